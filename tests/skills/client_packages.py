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


def packages_folder():
    named = os.environ.get("CURRY_CLIENTS_DIR")
    cached = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(named) if named else cached / "curry-train/clients"


def package(spec, *, seconds=None):
    """Return the folder of an installed package; with `seconds` install it within that time."""
    folder = packages_folder() / re.sub(r"[^\w.-]+", "-", spec).strip("-")
    if folder.is_dir():
        return folder
    if seconds is None:
        raise Unavailable(f"{spec} is not in {folder.parent}: `make clients` installs it")
    if shutil.which("npm") is None:
        raise Unavailable(f"npm is not installed, which brings {spec}: install Node.js")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as half:
            words = [
                "npm",
                "install",
                "--no-audit",
                "--no-fund",
                "--prefer-offline",
                "--fetch-retries=0",
            ]
            subprocess.run(
                [*words, "--prefix", half, spec],
                check=True,
                capture_output=True,
                text=True,
                timeout=seconds,
            )
            with suppress(OSError):  # another process was first
                Path(half).rename(folder)
            Path(half).mkdir(exist_ok=True)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"npm did not bring {spec} within {seconds:.0f} s") from None
    except subprocess.CalledProcessError as error:
        reasons = re.findall(r"npm error (?:code )?(.+)", error.stderr) or [
            f"status {error.returncode}"
        ]
        raise Unavailable(f"npm did not bring {spec}: {reasons[0]}") from None
    except OSError as error:
        raise Unavailable(
            f"{spec} can't be kept in {folder.parent}: {error.strerror}; set CURRY_CLIENTS_DIR"
        ) from None
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
