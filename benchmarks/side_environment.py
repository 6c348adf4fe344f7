"""Install libraries in an environment of their own, next to the project's.

    python benchmarks/side_environment.py zoo      # into .venv/zoo, from zoo_requirements.txt

Other libraries change their behaviour where they find each other, so the tests' environment stays
without them. Dependencies are listed in the requirements and not resolved, since a resolver would
bring another torch.

Proof: `make zoo ARGS='--only bert'`, which installs before it runs.
"""

import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main(name: str) -> None:
    """Make an environment with the requirements, on top of the one that runs this script."""
    environment = ROOT / ".venv" / name
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    python = environment / "bin" / "python"
    folder = Path(sysconfig.get_path("purelib", "venv", {"base": str(environment)}))
    below = [path for path in sys.path if path.endswith("site-packages")]
    (folder / "below.pth").write_text("\n".join([*below, str(ROOT / "template")]) + "\n")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    requirements = Path(__file__).with_name(f"{name}_requirements.txt")
    subprocess.run([*pip, "--requirement", requirements], check=True)


if __name__ == "__main__":
    main(sys.argv[1])
