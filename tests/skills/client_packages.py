"""The npm packages of the agent clients, cached outside the repository and run offline.

The cache is CURRY_CLIENTS_DIR, or a folder in the user's cache.
Proof: `python -m pytest tests/skills/test_clients.py`.
"""

import os
import re
import shutil
import subprocess
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

NODE = "node@22.23.3"  # `skills` needs this version; the machine's own may be older


class Unavailable(RuntimeError):
    """Raised when a client's package can't be installed here."""


def package(spec, *, seconds=None):
    """Return the folder of an installed package; with `seconds` install it within that time."""
    cached = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "curry-train/clients")
    packages = Path(os.environ.get("CURRY_CLIENTS_DIR") or cached)
    folder = packages / re.sub(r"[^\w.-]+", "-", spec).strip("-")
    if folder.is_dir():
        return folder
    if seconds is None:
        raise Unavailable(f"{spec} is not in {folder.parent}: `make clients` installs it")
    words = ["npm", "install", "--no-audit", "--no-fund", "--prefer-offline", "--fetch-retries=0"]
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, ignore_cleanup_errors=True) as half:
            command = [*words, "--prefix", half, spec]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=seconds)
            with suppress(OSError):  # another process was first
                Path(half).rename(folder)
    except (OSError, subprocess.SubprocessError) as error:
        raise Unavailable(f"npm did not bring {spec} into {folder.parent}: {error}") from None
    return folder


@cache
def offline():
    """Return the words that cut off a command's network: a namespace on Linux, else none."""
    words = ("unshare", "--map-root-user", "--net")
    if (
        shutil.which("unshare")
        and subprocess.run([*words, "true"], capture_output=True).returncode == 0
    ):
        return words
    return ()
