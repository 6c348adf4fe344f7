"""Which files a project or a package gets, as path -> bytes; nothing is written here.

Code goes byte for byte. Only `template/**/*.jinja` is rendered, and only tests have their imports rewritten.
Proof: `python -m pytest tests/cli/test_scaffold.py -k contents`.
"""

import keyword
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath

import jinja2

from .bundle import PACKAGE, Bundle, Technique
from .errors import ScaffoldError
from .imports import handed_out_names, reached_files, rewrite_imports

# What every project runs, where the bundle has it.
COMMANDS = ("loop.py", "benchmark.py", "config.py", "plots.py", "__main__.py")
TAKEN = (
    "torch",
    "numpy",
    "click",
    "rich",
    "pyyaml",
    "pytest",
    PACKAGE.replace("_", "-"),
)  # pip would mistake the project for it


def project_contents(
    bundle: Bundle, techniques: Sequence[Technique] | None, *, name: str
) -> dict[str, bytes]:
    """All files of a new project called `name`; `None` for the whole package."""
    check_project_name(name)
    chosen = bundle.techniques if techniques is None else techniques
    rendered = {str(path): render(bundle, str(path), name=name) for path in _templates(bundle)}
    if techniques is None:
        code = {_relative(bundle, path) for path in (bundle.template / PACKAGE).rglob("*.py")}
    else:
        commands = [
            f"{PACKAGE}/{file}" for file in COMMANDS if (bundle.template / PACKAGE / file).is_file()
        ]
        code = _code_of(bundle, chosen, commands, rendered=rendered)
    contents = {
        path: (bundle.template / path).read_bytes() for path in code | _data_beside(bundle, code)
    }
    contents |= {
        technique.test: (bundle.template / technique.test).read_bytes() for technique in chosen
    }
    return dict(sorted((contents | rendered).items()))


def package_contents(bundle: Bundle, techniques: Sequence[Technique]) -> dict[str, bytes]:
    """The files of these techniques inside a package, relative to it: modules, gates and what these import."""
    code = _code_of(bundle, techniques, [], rendered={})
    paths = sorted(code | _data_beside(bundle, code))
    return {
        str(PurePosixPath(path).relative_to(PACKAGE)): (bundle.template / path).read_bytes()
        for path in paths
    }


def test_contents(
    bundle: Bundle, techniques: Iterable[Technique], *, package: str
) -> dict[str, bytes]:
    """The tests of these techniques, relative to the project, importing from `package`."""
    return {
        technique.test: rewrite_imports(
            (bundle.template / technique.test).read_bytes(), package=package
        )
        for technique in techniques
    }


def render(bundle: Bundle, path: str, *, name: str) -> bytes:
    """`template/<path>.jinja` for a project called `name`."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(bundle.template),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,
    )
    try:
        text = environment.get_template(f"{path}.jinja").render(
            name=name, distribution=distribution_name(name)
        )
    except jinja2.TemplateError as error:
        raise ScaffoldError(f"template/{path}.jinja can't be rendered: {error}") from error
    return text.encode()


def distribution_name(name: str) -> str:
    """What pip calls the project: `my_run` is my-run; pip has no underscore at either end."""
    return name.strip("_").lower().replace("_", "-")


def check_project_name(name: str) -> None:
    if not is_module_name(name):
        raise ScaffoldError(
            f"{name!r} can't be a project's name: give --name a Python identifier, such as my_run"
        )
    if not name.isascii() or not name.strip("_"):
        raise ScaffoldError(
            f"{name!r} can't be a project's name, because pip takes ASCII letters and digits only"
        )
    if distribution_name(name) in TAKEN:
        raise ScaffoldError(
            f"{name!r} is the name of a package that the project needs itself; give another --name"
        )


def is_module_name(name: str) -> bool:
    return name.isidentifier() and not keyword.iskeyword(name)


def _code_of(
    bundle: Bundle,
    techniques: Iterable[Technique],
    more: Iterable[str],
    *,
    rendered: dict[str, bytes],
) -> set[str]:
    roots = [
        path
        for technique in techniques
        for path in (*technique.modules, technique.gate, technique.test)
    ]
    handed_out = handed_out_names((bundle.template / PACKAGE / "core/__init__.py").read_bytes())
    core = [
        f"{PACKAGE}/core/{module}.py" for module in set(handed_out.values())
    ]  # what core promises to everyone
    scripts = {path: content for path, content in rendered.items() if path.endswith(".py")}
    return reached_files(bundle.template, [*roots, *core, *more], rendered=scripts)


def _data_beside(bundle: Bundle, code: set[str]) -> set[str]:
    """What is not Python in the packages of `code`, such as `py.typed`; folders of data go with the package above."""
    data = set()
    for path in (bundle.template / PACKAGE).rglob("*"):
        relative = _relative(bundle, path)
        if path.is_file() and path.suffix not in (".py", ".pyc") and "/." not in relative:
            package = next(folder for folder in path.parents if (folder / "__init__.py").is_file())
            if _relative(bundle, package / "__init__.py") in code:
                data.add(relative)
    return data


def _templates(bundle: Bundle) -> list[PurePosixPath]:
    return [
        PurePosixPath(_relative(bundle, path)).with_suffix("")
        for path in sorted(bundle.template.rglob("*.jinja"))
    ]


def _relative(bundle: Bundle, path: Path) -> str:
    return path.relative_to(bundle.template).as_posix()
