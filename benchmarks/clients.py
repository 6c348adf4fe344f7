"""Install the bundle into each agent client without a network, and read the loaded skills.

    make clients ARGS="--json evidence/clients.json"

Most clients clone a repository, which is that of a copy of the working tree here. The output and
status of an installer prove nothing: installers end with 0 while they drop skills.
No client is logged in. Proof: `python -m pytest tests/skills/test_clients.py`.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.skills.client_packages import NODE, Unavailable, offline, package

from copies import copy_tree
from recording import record_parser, write_record

PLUGIN = "curry-train@curry-train"
REPOSITORY = "curry-train/curry-train"
# The folders besides the manifests that a client needs; the others stay in the repository.
NEEDED = ("skills", "template", "scripts")
LONGEST_RUN = 60  # seconds for one command of a client; the slowest takes 4 of them alone on a core


@dataclass(frozen=True)
class Place:
    """Create an empty home and project with one client installed and no network."""

    executable: Path
    home: Path
    project: Path

    @property
    def words(self) -> list[str]:
        return [*offline(), str(self.executable)]

    @property
    def environment(self) -> dict[str, str]:
        """Return an environment without keys, settings or proxies; set a dead proxy if needed."""
        kept = {name: os.environ[name] for name in ("LANG", "TMPDIR") if name in os.environ}
        names = ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy")
        closed = dict.fromkeys(names, "http://127.0.0.1:9")
        path = f"{package(NODE) / 'node_modules/.bin'}{os.pathsep}{os.environ['PATH']}"
        own = {"HOME": str(self.home), "PATH": path, "NO_COLOR": "1", "DISABLE_TELEMETRY": "1"}
        return kept | closed | own

    def run(self, *words: str, answer: str = "") -> subprocess.CompletedProcess[str]:
        """Run the client with these words; `answer` is typed in when it asks."""
        return subprocess.run(
            [*self.words, *words],
            cwd=self.project,
            env=self.environment,
            input=answer,
            capture_output=True,
            text=True,
            timeout=LONGEST_RUN,
        )

    def say(self, *words: str, answer: str = "") -> str:
        """Run the client with these words, and return its output."""
        ended = self.run(*words, answer=answer)
        return ended.stdout + ended.stderr

    @contextmanager
    def talk(self, *words: str) -> Iterator[subprocess.Popen[str]]:
        """Start a long-running client; end it and its children after LONGEST_RUN at the latest."""
        process = subprocess.Popen(
            [*self.words, *words],
            cwd=self.project,
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )

        def end() -> None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

        timer = threading.Timer(LONGEST_RUN, end)
        timer.start()
        try:
            yield process
        finally:
            timer.cancel()
            end()
            process.communicate()


@dataclass(frozen=True)
class Client:
    """Describe an agent client: its package, its install command, and how it lists skills."""

    package: str
    executable: str
    install: Callable[[Place, str], str]
    loaded: Callable[[Place], set[str]]
    # Whether it clones with the settings of the user's git; Gemini CLI is given the folder.
    clones: bool = True


def _through_marketplace(verb: str, *options: str) -> Callable[[Place, str], str]:
    def install(place: Place, source: str) -> str:
        added = place.say("plugin", "marketplace", "add", source, *options)
        return added + place.say("plugin", verb, PLUGIN)

    return install


def _own(names: list[str]) -> set[str]:
    """Select the bundle's skills by the plugin prefix, and strip the prefix."""
    prefix = PLUGIN.partition("@")[0] + ":"
    return {name.removeprefix(prefix) for name in names if name.startswith(prefix)}


def _claude(place: Place) -> set[str]:
    """Start a session, which lists its skills before its first, unanswered request."""
    with place.talk("-p", "hello", "--output-format", "stream-json", "--verbose") as session:
        session.stdin.close()
        session.stdin = None
        for line in session.stdout:
            if line.startswith("{") and (message := json.loads(line)).get("subtype") == "init":
                return _own(message["skills"])
    return set()


def _codex(place: Place) -> set[str]:
    """List the skills through the app server of the editor extensions; no command lists them."""
    questions = [
        {
            "id": 1,
            "method": "initialize",
            "params": {"clientInfo": {"name": "clients.py", "version": "0"}},
        },
        {"method": "initialized"},
        {
            "id": 2,
            "method": "skills/list",
            "params": {"cwds": [str(place.project)], "forceReload": True},
        },
    ]
    with place.talk("app-server") as server:
        server.stdin.write("".join(json.dumps(question) + "\n" for question in questions))
        server.stdin.flush()
        for line in server.stdout:
            if (answer := json.loads(line)).get("id") == 2:
                listed = answer["result"]["data"][0]["skills"]
                return _own([skill["name"] for skill in listed if skill["enabled"]])
    return set()


def _copilot(place: Place) -> set[str]:
    listed = json.loads(place.run("skill", "list", "--json").stdout)
    return {skill["name"] for skill in listed if skill["source"] == "plugin" and skill["enabled"]}


CLIENTS = {
    "Claude Code": Client(
        "@anthropic-ai/claude-code@2.1.330",
        "claude",
        _through_marketplace("install", "--sparse", ".claude-plugin", *NEEDED),
        _claude,
    ),
    "Codex": Client(
        "@openai/codex@0.169.0",
        "codex",
        _through_marketplace(
            "add", *(word for name in (".agents", *NEEDED) for word in ("--sparse", name))
        ),
        _codex,
    ),
    "Copilot CLI": Client(
        "@github/copilot@1.0.102", "copilot", _through_marketplace("install"), _copilot
    ),
    "Gemini CLI": Client(
        "@google/gemini-cli@0.61.0",
        "gemini",
        lambda place, source: place.say("extensions", "install", source, "--consent", answer="y\n"),
        lambda place: {*re.findall(r"(?m)^(\S+) \[Enabled\]$", place.say("skills", "list"))},
        clones=False,
    ),
    "npx skills": Client(
        "skills@1.7.4",
        "skills",
        lambda place, source: place.say(
            "add", source, "--yes", "--skill", "*", "--agent", "claude-code", "codex"
        ),
        # The folders in which it finds what it installed for the other clients.
        lambda place: {one["name"] for one in json.loads(place.run("list", "--json").stdout)},
    ),
}


def copy_bundle(root: Path) -> Path:
    """Make a repository with the files of the bundle that a clone has."""
    copy_tree(root)
    who = ("-c", "user.name=nobody", "-c", "user.email=nobody@localhost")
    for words in (["init", "--quiet"], ["add", "--all"], ["commit", "--quiet", "--message=all"]):
        subprocess.run(["git", *who, *words], cwd=root, check=True, capture_output=True)
    return root


def loaded_skills(
    name: str, bundle: Path, *, seconds: float | None = None
) -> tuple[set[str], str, int]:
    """Return the names of the skills that a client loaded, its output, and what it installed."""
    client = CLIENTS[name]
    package(NODE, seconds=seconds)
    executable = package(client.package, seconds=seconds) / "node_modules/.bin" / client.executable
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        place = Place(executable, Path(folder) / "home", Path(folder) / "project")
        place.home.mkdir()
        place.project.mkdir()
        (place.home / ".gitconfig").write_text(
            f'[url "file://{bundle}"]\n\tinsteadOf = https://github.com/{REPOSITORY}.git\n'
            f"[safe]\n\tdirectory = *\n"
        )
        output = client.install(place, REPOSITORY if client.clones else str(bundle))
        return client.loaded(place), output, installed_bytes(Path(folder))


def installed_bytes(folder: Path) -> int:
    """Return the bytes of the largest installed copy, without the repository of its clone."""
    sizes = [0]
    for page in folder.rglob("skills/recompute/SKILL.md"):
        copy = page.parents[2]
        paths = [path for path in copy.rglob("*") if path.is_file() and not path.is_symlink()]
        own = [path for path in paths if ".git" not in path.relative_to(copy).parts]
        sizes.append(sum(path.stat().st_size for path in own))
    return max(sizes)


def problems(loaded: set[str], bundle: Path) -> list[str]:
    """List the differences between the loaded skills and the folders of skills/."""
    wanted = {path.name for path in (bundle / "skills").iterdir() if path.is_dir()}
    absent = [f"did not load {name}" for name in sorted(wanted - loaded)]
    return absent + [f"loaded {name}, which is no folder" for name in sorted(loaded - wanted)]


def main() -> int:
    """Status: 0 every client loads every skill, 1 one does not, 2 a package can't be had."""
    options = record_parser(__doc__).parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        bundle = copy_bundle(Path(folder) / "bundle")
        for name, client in CLIENTS.items():
            try:
                loaded, output, num_bytes = loaded_skills(name, bundle, seconds=600)
            except Unavailable as error:
                sys.stderr.write(f"{name}: {error}\n")
                return 2
            wrong = problems(loaded, bundle)
            rows.append(
                {
                    "client": name,
                    "package": client.package,
                    "megabytes": round(num_bytes / 1e6, 2),
                    "loaded": sorted(loaded),
                    "problems": wrong,
                }
            )
            result = "; ".join(wrong) or f"{len(loaded)} skills, {num_bytes / 1e6:.1f} MB"
            print(f"{name:12} {client.package:34} {result}", flush=True)
            if wrong:
                sys.stderr.write(output)
    network = "a namespace without one" if offline() else "proxies that nobody answers"
    write_record(options.json, {"node": NODE, "network": network, "rows": rows})
    return int(any(row["problems"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
