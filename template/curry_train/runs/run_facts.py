"""Facts of a run for its journal: configuration, code, packages, device and command.

    journal.start(facts=run_facts(config, device=torch.device("cuda"), world_size=8))

They explain a difference between two runs. They hold no path of the machine, except those that were
typed in the command and the configuration.
Proof: `python -m pytest tests/test_run_facts.py`.
"""

import contextlib
import hashlib
import importlib.metadata
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..core.provenance import provenance

GIT_SECONDS = 10.0
# The digest covers the content of at most this many files that git does not track.
MOST_ADDED = 1000


def run_facts(
    config: Mapping[str, Any],
    *,
    device: torch.device,
    world_size: int = 1,
    folder: str | os.PathLike[str] | None = None,
) -> dict[str, Any]:
    """Collect the facts of a run whose code is in `folder`, the working directory by default."""
    known = provenance(device)
    environment = {
        "device": known["device"],
        "world_size": world_size,
        "python": known["python"],
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if torch.version.cuda else None,
        "threads": known["threads"],
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "packages": package_versions(),
    }
    code = git_state(Path(folder or Path.cwd()))
    return {
        "command": known["command"],
        "config": dict(config),
        "code": code,
        "environment": environment,
    }


def package_versions() -> dict[str, str]:
    """Return the version of every installed distribution, by normalised name."""
    versions: dict[str, str] = {}
    for package in importlib.metadata.distributions():
        name = package.metadata["Name"]
        if name:
            # Of several distributions with one name, Python imports the first.
            versions.setdefault(name.lower().replace("_", "-"), package.version)
    return dict(sorted(versions.items()))


def git_state(folder: Path) -> dict[str, Any]:
    """Return the git revision and a digest of uncommitted code, or why there is no revision.

    Uncommitted code is the changes to tracked files, and Python files that git does not track.
    """
    try:
        revision = _git(folder, "rev-parse", "--verify", "--quiet", "HEAD").decode("ascii").strip()
        changes = _git(folder, "diff", "--no-ext-diff", "--no-color", "--no-textconv", "HEAD")
        added = _git(
            folder, "ls-files", "--others", "--exclude-standard", "-z", "--", "*.py"
        ).split(b"\0")[:-1]
    except FileNotFoundError:
        return {"revision": None, "why": "git is not installed"}
    except subprocess.TimeoutExpired:
        return {"revision": None, "why": f"git took longer than {GIT_SECONDS:g} seconds"}
    except subprocess.CalledProcessError as error:
        if not error.stderr:
            why = "nothing was committed yet"
        elif b"not a git repository" in error.stderr:
            why = "no git repository"
        else:
            why = f"git exited with {error.returncode}"
        return {"revision": None, "why": why}
    if not changes and not added:
        return {"revision": revision, "dirty": False}

    digest = hashlib.sha256(changes)
    for name in added[:MOST_ADDED]:
        digest.update(name)
        # The file may have been removed in the meantime.
        with contextlib.suppress(OSError):
            digest.update((folder / os.fsdecode(name)).read_bytes())
    return {
        "revision": revision,
        "dirty": True,
        "changes": digest.hexdigest()[:16],
        "added_files": len(added),
    }


def _git(folder: Path, *arguments: str) -> bytes:
    environment = os.environ | {"GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C", "GIT_PAGER": "cat"}
    command = ["git", "-C", str(folder), *arguments]
    completed = subprocess.run(
        command, capture_output=True, check=True, timeout=GIT_SECONDS, env=environment
    )
    return completed.stdout
