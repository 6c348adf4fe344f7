"""Copy a technique as a user owns it: its import closure, flat, in a package.

package = own(tmp_path, "sac")                     # tmp_path/owned_sac/{sac,blocks,...}.py
own(tmp_path, "sac", faults=[("is_mutable", "is_mutable and False")], package="faulty_sac")
"""

import ast
import re
from collections.abc import Sequence
from pathlib import Path

import curry_train

PACKAGE_FOLDER = Path(curry_train.__file__).parent
OWNED_TESTS_FOLDER = PACKAGE_FOLDER.parent / "tests"

# The techniques whose modules `add` copies, and the module that is the technique's home.
OWNED_TECHNIQUES = {
    "grad-accum": "grad_accum",
    "recompute": "recompute",
    "sac": "sac",
    "regions": "regions",
    "offload": "offload",
    "snn-timesteps": "snn_timesteps",
    "chunked-loss": "cross_entropy",
    "grad-flow": "grad_flow",
}

RELATIVE_IMPORT = re.compile(r"^( *)from \.+(?:\w+\.)*(\w+) import ", re.MULTILINE)
Fault = tuple[str, str]  # text of the source, and its replacement in the faulty copy


def closure_of(home: Path, *, among: Path = PACKAGE_FOLDER) -> set[Path]:
    """Return a module and all modules of the package that it imports, in functions too."""
    found: set[Path] = set()
    waiting = [home]
    while waiting:
        module = waiting.pop()
        if module in found:
            continue
        found.add(module)
        for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level:
                folder = module.parents[node.level - 1]
                assert node.module, f"{module} imports a package: {ast.unparse(node)}"
                waiting.append(folder.joinpath(*node.module.split(".")).with_suffix(".py"))
    assert all(path.is_relative_to(among) for path in found)
    return found


def own(
    folder: Path, module: str, *, package: str | None = None, faults: Sequence[Fault] = ()
) -> str:
    """Copy a module with its closure into a new package in `folder`; return the package's name.

    `module` is a path in the package without its suffix, or the stem of a technique. Each fault
    must be found in the copy.
    """
    home = PACKAGE_FOLDER / f"{module if '/' in module else f'primitives/{module}'}.py"
    package = package or f"owned_{home.stem}"
    closure = closure_of(home)
    assert len({path.stem for path in closure}) == len(closure), "two modules share a name"
    (folder / package).mkdir()
    (folder / package / "__init__.py").write_text("")
    texts = {
        path.stem: RELATIVE_IMPORT.sub(r"\1from .\2 import ", path.read_text()) for path in closure
    }
    for text, replacement in faults:
        holders = [stem for stem in texts if text in texts[stem]]
        assert holders, f"no module of {package} has {text!r}: plant another fault"
        for stem in holders:
            texts[stem] = texts[stem].replace(text, replacement)
    for stem, text in texts.items():
        (folder / package / f"{stem}.py").write_text(text)
    return package
