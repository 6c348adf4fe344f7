"""House rules on text: docstrings, mentioned paths, links, and words that do not belong.

Run: `python tests/house/rules.py`.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tree import FUNCTIONS, files, nodes, parse, python_files, read, relative

MOST_SUMMARY_CHARACTERS = 90
SUMMARY_START = re.compile(r"[A-Z`]")
# These words open a noun clause that a reader has to solve: "What was meant where ...".
RIDDLE_START = re.compile(r"(?:What|That|Those|Who|Whom|Whose|Whether|Which|How)\b")
RIDDLE = re.compile(r"\bthat is\b.*\bthat is\b", re.IGNORECASE)

FRAME = re.compile(r"#+ ?[-=#*_~]{4,}")

JINJA_MARK = re.compile(r"\{\{|\{%|\{#")
WORKPLACE_WORD = re.compile(
    r"[/]work/|[/]tmp/w/|[/]farm/|[.][.]/shared|this[ ]session|developer[ ]session", re.IGNORECASE
)

# A path of this repository; `<technique>` and `*` in it stand for any name.
MENTIONED_PATH = re.compile(
    r"(?<![\w/.<>-])(?:"
    r"(?:scripts|benchmarks|tests|curry_train)/[\w/.<>*-]*\.py"
    r"|(?:template|evidence)/[\w/.<>*-]*[\w>*])"
)
PLACEHOLDER = re.compile(r"/[A-Z]+\.[a-z]+$")  # as in evidence/FILE.json
OPTION_BEFORE = re.compile(r"(?:--[\w-]+[ =]|\bPath\(\")\Z")
LINK_TARGET = re.compile(r"!?\[[^\]\[]*\]\((?P<target>[^)\s]+)(?:\s+\"[^\"]*\")?\)")
FENCED_BLOCK = re.compile(r"^ *(?P<fence>```+|~~~+).*?^ *(?P=fence) *$", re.MULTILINE | re.DOTALL)
ANOTHER_SITE = re.compile(r"[a-z]+:", re.IGNORECASE)


def modules_have_docstrings(root: Path) -> list[str]:
    """Every module opens with its purpose."""
    return [
        f"{relative(path, root)} has no docstring: write what it is for, and the command that "
        "proves it"
        for path in python_files(root)
        if not ast.get_docstring(parse(path))
    ]


def docstrings_start_with_a_summary(root: Path) -> list[str]:
    """The first line of a docstring is one short sentence that starts with a verb or a name."""
    return [
        f"{relative(path, root)}:{line} {problem}"
        for path in python_files(root)
        for line, problem in summary_problems(path)
    ]


def summary_problems(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line of each docstring that breaks the rule, and what to do."""
    for node in nodes(path, ast.Module, ast.ClassDef, *FUNCTIONS):
        if ast.get_docstring(node):
            problem = summary_problem(ast.get_docstring(node).splitlines()[0].strip())
            if problem:
                yield node.body[0].lineno, problem


def summary_problem(first: str) -> str | None:
    """Return what is wrong with the first line of a docstring."""
    if len(first) > MOST_SUMMARY_CHARACTERS:
        return (
            f"opens a docstring with {len(first)} characters, and {MOST_SUMMARY_CHARACTERS} is the "
            "most: shorten the sentence"
        )
    if not SUMMARY_START.match(first):
        return f"opens a docstring with {first[:1]!r}: start with a capital letter or a `name`"
    if not first.endswith("."):
        return f"opens a docstring without a whole sentence: end {first[-20:]!r} with a period"
    if found := RIDDLE_START.match(first):
        return f"opens a docstring with {found[0]!r}: start with a verb, or name the thing"
    if RIDDLE.search(first):
        return "opens a docstring with two clauses of 'that is': name the thing in one word"
    return None


def sections_open_with_one_line(root: Path) -> list[str]:
    """A comment that opens a section is one line of words, with no frame around it."""
    return [
        f"{relative(path, root)}:{number} draws a line with a comment: write the heading alone"
        for path in python_files(root)
        for number, line in enumerate(read(path).splitlines(), start=1)
        if FRAME.fullmatch(line.strip())
    ]


def pages(root: Path) -> list[Path]:
    """List what users and agents read in Markdown."""
    return [root / "README.md", root / "AGENTS.md", *sorted((root / "skills").rglob("*.md"))]


def mentioned_paths_exist(root: Path) -> list[str]:
    """README, AGENTS, skills, Makefile and docstrings mention no path that is gone."""
    violations = [f"{page.name} is missing: write it" for page in pages(root) if not page.is_file()]
    known: dict[str, bool] = {}
    for path, number, text in _texts(root):
        for found in MENTIONED_PATH.finditer(text):
            mentioned = found[0]
            if OPTION_BEFORE.search(text, 0, found.start()) or PLACEHOLDER.search(mentioned):
                continue  # a file that the user names
            if mentioned not in known:
                known[mentioned] = _exists(mentioned, root)
            if not known[mentioned]:
                violations.append(
                    f"{relative(path, root)}:{number} names {mentioned}, which is not there: "
                    "correct the path"
                )
    return violations


def _texts(root: Path) -> Iterator[tuple[Path, int, str]]:
    """Yield the lines of pages, and the docstrings of modules, with their line numbers."""
    for page in (*pages(root), root / "Makefile"):
        if page.is_file():
            for number, line in enumerate(read(page).splitlines(), start=1):
                yield page, number, line
    for path in python_files(root):
        for node in nodes(path, ast.Module, ast.ClassDef, *FUNCTIONS):
            if docstring := ast.get_docstring(node):
                yield path, node.body[0].lineno, docstring


def _exists(mentioned: str, root: Path) -> bool:
    """Return whether a path is there, from the root or from a project that `new` renders."""
    pattern = re.sub(r"<[^>]*>", "*", mentioned)
    bases = [root, root / "template", root / "template/project"]
    candidates = [pattern, f"{pattern}.jinja"]
    if "*" not in pattern:
        return any((base / name).exists() for base in bases for name in candidates)
    return any(any(base.glob(name)) for base in bases if base.is_dir() for name in candidates)


def links_lead_somewhere(root: Path) -> list[str]:
    """A relative link of a Markdown page leads to a file, seen from the page."""
    violations = []
    for page in (*pages(root), root / "CHANGELOG.md"):
        if not page.is_file():
            continue
        text = FENCED_BLOCK.sub(lambda block: "\n" * block[0].count("\n"), read(page))
        for found in LINK_TARGET.finditer(text):
            target = found["target"].partition("#")[0]
            if target and not ANOTHER_SITE.match(target) and not (page.parent / target).exists():
                line = text.count("\n", 0, found.start()) + 1
                violations.append(
                    f"{relative(page, root)}:{line} links to {target}, which is not there: "
                    "correct the link"
                )
    return violations


def pages_set_no_python_path(root: Path) -> list[str]:
    """Commands for users run the console command or a script of the bundle."""
    return [
        f"{relative(page, root)}:{number} sets PYTHONPATH: write `curry-train ...`, or "
        "`python ROOT/scripts/curry_train.py ...` for a bare clone"
        for page in pages(root)
        if page.is_file()
        for number, line in enumerate(read(page).splitlines(), start=1)
        if "PYTHONPATH=" in line
    ]


def template_runs_where_it_is_written(root: Path) -> list[str]:
    """No path and no module below template/ holds Jinja; only a *.jinja file is rendered.

    Read from the syntax tree, because the braces of an f-string are Python: Jinja outside a string
    does not parse or is a set that holds a set, and inside a string it is in the string's value,
    where an f-string has one brace left.
    """
    violations = []
    for path in files(root, "template"):
        name = relative(path, root)
        if JINJA_MARK.search(name):
            violations.append(f"{name} has Jinja in its path: give the file a plain name")
        if path.suffix != ".py":
            continue
        try:
            parse(path)
        except SyntaxError as error:
            violations.append(
                f"{name}:{error.lineno} is not Python ({error.msg}): render a *.jinja file instead"
            )
            continue
        violations += [
            f"{name}:{node.lineno} has Jinja in a module: render a *.jinja file instead"
            for node in nodes(path, ast.Constant, ast.Set)
            if _is_jinja(node)
        ]
    return violations


def _is_jinja(node: ast.Constant | ast.Set) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and JINJA_MARK.search(node.value) is not None
    return any(isinstance(inner, ast.Set | ast.Dict) for inner in node.elts)


def nothing_mentions_the_workplace(root: Path) -> list[str]:
    """No file has a path of a machine that it was written on, or a word on how it was written."""
    violations = []
    for path in files(root):
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue  # a picture or an archive
        violations += [
            f"{relative(path, root)}:{number} has {found[0]!r}: write what holds for every user"
            for number, line in enumerate(lines, start=1)
            if (found := WORKPLACE_WORD.search(line))
        ]
    return violations
