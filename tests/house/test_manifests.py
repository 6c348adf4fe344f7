"""Every client reads its own manifest, and all have the same name and version.

Run: `python -m pytest tests/house/test_manifests.py`.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from tree import ROOT

IN_JSON = r'"version": "(.+)"'
# Each file that carries the version: how it is written there, and how often.
PLACES = {
    "plugin.json": (IN_JSON, 1),
    ".claude-plugin/plugin.json": (IN_JSON, 1),
    ".claude-plugin/marketplace.json": (IN_JSON, 2),
    ".codex-plugin/plugin.json": (IN_JSON, 1),
    ".cursor-plugin/plugin.json": (IN_JSON, 1),
    "gemini-extension.json": (IN_JSON, 1),
    "pyproject.toml": (r'^version = "(.+)"', 1),
    "template/curry_train/__init__.py": (r'^__version__ = "(.+)"', 1),
    "CHANGELOG.md": (r"\A(?:(?!^## ).*\n)*## (\d\S*)", 1),  # the newest heading
}
OPEN_KEYS = {
    "$schema",
    "name",
    "version",
    "description",
    "author",
    "homepage",
    "repository",
    "license",
    "keywords",
}


def versions(root: Path) -> dict[str, str]:
    """Read the version from every place that carries it."""
    found = {}
    for name, (pattern, count) in PLACES.items():
        matches = re.findall(pattern, (root / name).read_text(encoding="utf-8"), re.MULTILINE)
        assert len(matches) == count, (
            f"{name} carries {len(matches)} versions and should carry {count}"
        )
        found |= {f"{name} {number}": version for number, version in enumerate(matches, start=1)}
    return found


def manifest(name: str) -> dict[str, Any]:
    return json.loads((ROOT / name).read_text(encoding="utf-8"))


def test_one_version_stands_everywhere():
    found = versions(ROOT)
    assert len(found) == 10
    assert len(set(found.values())) == 1, found


@pytest.mark.parametrize(
    ("name", "number"), [(name, i) for name, (_, count) in PLACES.items() for i in range(count)]
)
def test_a_version_that_differs_in_one_place_is_caught(tmp_path, name, number):
    for file in PLACES:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / file, tmp_path / file)
    text = (tmp_path / name).read_text(encoding="utf-8")
    start, end = list(re.finditer(PLACES[name][0], text, re.MULTILINE))[number].span(1)
    (tmp_path / name).write_text(f"{text[:start]}9.9.9{text[end:]}", encoding="utf-8")
    found = versions(tmp_path)
    assert [place for place, version in found.items() if version == "9.9.9"] == [
        f"{name} {number + 1}"
    ]
    assert len(set(found.values())) == 2


def test_the_open_manifest_holds_only_the_keys_of_agent_plugins_1_0_0():
    found = manifest("plugin.json")
    assert set(found) - {"extensions"} == OPEN_KEYS
    assert found["$schema"] == "https://agent-plugins.org/schemas/1.0.0/plugin.schema.json"
    assert re.fullmatch(r"[a-z0-9](?:[a-z0-9]|[-.](?![-.]))*[a-z0-9]", found["name"])


def test_claude_code_codex_and_copilot_read_the_same_facts_as_the_open_manifest():
    open_manifest = manifest("plugin.json")
    assert {
        "$schema": open_manifest["$schema"],
        **manifest(".claude-plugin/plugin.json"),
    } == open_manifest


@pytest.mark.parametrize("client", ["codex", "cursor"])
def test_the_manifests_of_codex_and_cursor_repeat_the_open_manifest(client):
    open_manifest, found = manifest("plugin.json"), manifest(f".{client}-plugin/plugin.json")
    (ROOT / found.pop("skills")).resolve(strict=True)
    facts = {key: open_manifest[key] for key in OPEN_KEYS - {"$schema"}}
    if client == "codex":
        shown = found.pop("interface")
        assert shown["shortDescription"] == facts["description"]
        assert shown["developerName"] == facts["author"]["name"]
        assert shown["websiteURL"] == facts["homepage"]
    else:
        facts["author"] = {"name": facts["author"]["name"]}  # its schema has no address of authors
        assert found.pop("displayName") == facts["name"]
    assert found == facts


def test_the_marketplace_of_agents_offers_the_same_plugin():
    marketplace = manifest(".agents/plugins/marketplace.json")
    (plugin,) = marketplace["plugins"]
    assert marketplace["name"] == plugin["name"] == manifest("plugin.json")["name"]
    assert plugin["source"] == {"source": "local", "path": "./"}
    assert plugin["policy"] == {"installation": "AVAILABLE", "authentication": "ON_INSTALL"}


def test_the_marketplace_offers_this_folder_as_the_plugin():
    open_manifest, marketplace = (
        manifest("plugin.json"),
        manifest(".claude-plugin/marketplace.json"),
    )
    (plugin,) = marketplace["plugins"]
    assert plugin["source"] == "./"
    assert {key: open_manifest[key] for key in plugin if key != "source"} == {
        key: value for key, value in plugin.items() if key != "source"
    }
    assert (marketplace["name"], marketplace["owner"]) == (
        open_manifest["name"],
        open_manifest["author"],
    )


def test_the_context_file_of_gemini_exists():
    found = manifest("gemini-extension.json")
    assert set(found) == {"name", "version", "description", "contextFileName"}
    assert (ROOT / found["contextFileName"]).is_file()


@pytest.mark.parametrize("name", [name for name in PLACES if name.endswith(".json")])
def test_no_manifest_is_a_link(name):
    assert not (ROOT / name).is_symlink(), (
        "Claude Code's strict validation refuses a link between manifests"
    )
    assert manifest(name)["name"] == "curry-train"


def test_the_root_has_no_claude_md():
    assert not (ROOT / "CLAUDE.md").exists(), (
        "strict validation of a plugin refuses it: write to AGENTS.md"
    )


def test_agents_md_is_short_enough_to_be_read_in_every_conversation():
    assert len((ROOT / "AGENTS.md").read_text(encoding="utf-8").splitlines()) < 180


def test_the_glossary_gives_each_word_one_line_and_one_meaning():
    text = (ROOT / "AGENTS.md").read_text(encoding="utf-8").split("## Words\n")[1]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    words = [word for cell, _ in rows[1:] for word in cell.split(", ")]
    assert len(words) >= 40
    assert len(set(words)) == len(words)
