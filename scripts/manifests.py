"""Write the manifests of agent clients, and what else repeats pyproject.toml.

That is the version in the package, and the requirements in the scripts' PEP 723 blocks.

    python scripts/manifests.py
"""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def contents(root: Path) -> dict[str, str]:
    """Return the text of each file that repeats pyproject.toml, by its path."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    texts = {
        name: json.dumps(manifest, indent=2) + "\n" for name, manifest in manifests(project).items()
    }
    package = "template/curry_train/__init__.py"
    texts[package] = re.sub(
        r'(?m)^__version__ = ".*"',
        f'__version__ = "{project["version"]}"',
        (root / package).read_text(encoding="utf-8"),
    )
    for script in sorted((root / "scripts").glob("*.py")):
        text = script.read_text(encoding="utf-8")
        texts[script.relative_to(root).as_posix()] = with_requirements(text, project)
    return texts


def manifests(project: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the manifest of each client by its path."""
    url = project["urls"]["Repository"]
    author = {"name": project["authors"][0]["name"], "url": url}
    shown = {"name": project["name"]}
    release = {"version": project["version"], "description": project["description"]}
    terms = {"license": project["license"], "keywords": project["keywords"]}
    plugin = {**shown, **release, "author": author, "homepage": url, "repository": url, **terms}
    category = "Developer Tools"
    return {
        "plugin.json": {
            "$schema": "https://agent-plugins.org/schemas/1.0.0/plugin.schema.json",
            **plugin,
        },
        ".claude-plugin/plugin.json": plugin,
        ".claude-plugin/marketplace.json": {
            **shown,
            "owner": author,
            "metadata": release,
            "plugins": [{**shown, "source": "./", **release, **terms}],
        },
        ".codex-plugin/plugin.json": {
            **plugin,
            "skills": "./skills/",
            "interface": {
                "displayName": project["name"],
                "shortDescription": project["description"],
                "developerName": author["name"],
                "category": category,
                "websiteURL": url,
            },
        },
        ".cursor-plugin/plugin.json": {
            **plugin,
            "author": {"name": author["name"]},  # its schema has no address of authors
            "displayName": project["name"],
            "skills": "./skills/",
        },
        "gemini-extension.json": {**shown, **release, "contextFileName": "AGENTS.md"},
        ".agents/plugins/marketplace.json": {
            **shown,
            "interface": {"displayName": project["name"]},
            "plugins": [
                {
                    **shown,
                    "source": {"source": "local", "path": "./"},
                    "policy": {"installation": "AVAILABLE", "authentication": "ON_INSTALL"},
                    "category": category,
                }
            ],
        },
    }


def with_requirements(script: str, project: dict[str, Any]) -> str:
    """Return a script with the project's specifiers in its PEP 723 block, the comment on top."""
    block = re.match(r"# /// script\n(?:#.*\n)+?# ///\n", script)
    if block is None:
        return script
    text = re.sub(
        r'requires-python = ".*"', f'requires-python = "{project["requires-python"]}"', block[0]
    )
    for requirement in [*project["dependencies"], *project["optional-dependencies"]["plots"]]:
        name = re.split(r"[^\w-]", requirement)[0]
        text = re.sub(rf'"{name}\b[^"]*"', f'"{requirement}"', text)
    return text + script[block.end() :]


def write(root: Path) -> None:
    """Write each file that differs."""
    for name, text in contents(root).items():
        path = root / name
        path.parent.mkdir(exist_ok=True)
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {name}")


if __name__ == "__main__":
    write(ROOT)
