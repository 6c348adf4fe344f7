"""What a run is made of, for its journal: configuration, code, packages, device and command.

    journal.start(facts=run_facts(config, device=torch.device("cuda"), world_size=8))

Two runs that differ are compared by these facts. No path of the machine is in them, but those of the command and the
configuration as they were typed. Proof: `python -m pytest tests/test_run_facts.py`.
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
MOST_ADDED = 1000  # files that git does not know, whose content is in the digest


def run_facts(
    config: Mapping[str, Any],
    *,
    device: torch.device,
    world_size: int = 1,
    folder: str | os.PathLike[str] | None = None,
) -> dict[str, Any]:
    """`folder` is where the code is, the working directory if left out."""
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
    """Every installed distribution, by its normalised name; the first of a name is the one that is imported."""
    found: dict[str, str] = {}
    for package in importlib.metadata.distributions():
        name = package.metadata["Name"]
        if name:
            found.setdefault(name.lower().replace("_", "-"), package.version)
    return dict(sorted(found.items()))


def git_state(folder: Path) -> dict[str, Any]:
    """The revision, whether code was changed or added since, and a digest of that; or why none is known."""
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
        why = (
            "no git repository"
            if b"not a git repository" in error.stderr
            else f"git ended with {error.returncode}"
        )
        return {"revision": None, "why": why if error.stderr else "nothing was committed yet"}
    if not changes and not added:
        return {"revision": revision, "dirty": False}
    digest = hashlib.sha256(changes)
    for name in added[:MOST_ADDED]:
        digest.update(name)
        with contextlib.suppress(OSError):  # it went away meanwhile
            digest.update((folder / os.fsdecode(name)).read_bytes())
    return {
        "revision": revision,
        "dirty": True,
        "changes": digest.hexdigest()[:16],
        "added_files": len(added),
    }


def _git(folder: Path, *words: str) -> bytes:
    quiet = os.environ | {"GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C", "GIT_PAGER": "cat"}
    command = ["git", "-C", str(folder), *words]
    return subprocess.run(
        command, capture_output=True, check=True, timeout=GIT_SECONDS, env=quiet
    ).stdout
