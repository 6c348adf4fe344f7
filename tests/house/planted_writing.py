"""Violations of the rules on code, text and techniques, with a part of each message.

Proof: `python -m pytest tests/house/test_house.py`.
"""

from plants import (
    GATES,
    PLAN,
    SCRIPT,
    SKILL,
    Plant,
    append,
    both,
    branches,
    module,
    remove,
    replace,
    skill,
    write,
)
from tree import PACKAGE

CODE = {
    "functions_are_short": [
        (append(f"{PLAN}/planner.py", "def f():\n" + "    x = 1\n" * 60), "f has 61 lines"),
        (append(SCRIPT, "class A:\n  async def f(self):\n" + "    x = 1\n" * 60), "f has 61 lines"),
    ],
    "functions_are_simple": [
        (append(f"{PLAN}/planner.py", branches(10)), "f has complexity 11, and 10 is the most"),
        (
            module(
                "benchmarks/x.py",
                "def f():\n"
                "    try:\n        pass\n"
                + "".join(f"    except E{number}:\n        pass\n" for number in range(9))
                + "    else:\n        pass\n",
            ),
            "f has complexity 11",
        ),
    ],
    "conditionals_are_not_nested": [
        (append(f"{PLAN}/planner.py", "x = 1 if a else 2 if b else 3\n"), "conditional inside"),
        (append(SCRIPT, "x = 1 if a else f(2 if b else 3)\n"), "conditional inside"),
    ],
    "comprehensions_are_not_nested": [
        (append(f"{PLAN}/planner.py", "x = [[b for b in a] for a in c]\n"), "comprehension inside"),
        (
            append(f"{PLAN}/planner.py", "x = {a for a in c if any(b for b in a)}\n"),
            "comprehension inside",
        ),
    ],
    "assignments_are_not_packed": [
        (append(f"{PLAN}/planner.py", "a, b, c = 1, 2, 3\n"), "assigns 3 values in one line"),
        (append(SCRIPT, "x = [a, b, *c] = 1, 2, *d\n"), "assigns 3 values in one line"),
    ],
    "ruff_holds_the_width": [
        (replace("pyproject.toml", "line-length = 100", "line-length = 120"), "line-length to 100"),
        (replace("pyproject.toml", '["E", "F"]', '["F"]'), "select E"),
        (replace("pyproject.toml", "ignore = []", 'ignore = ["E501"]'), "do not ignore E501"),
    ],
}

TEXT = {
    "modules_have_docstrings": [
        (write("scripts/x.py", "x = 1\n"), "scripts/x.py has no docstring"),
        (write("benchmarks/x.py", "# About x.\n"), "benchmarks/x.py has no docstring"),
    ],
    "docstrings_start_with_a_summary": [
        (write("tests/x.py", f'"""{"A" * 90}."""\n'), "tests/x.py:1 opens a docstring with 91"),
        (
            module("tests/x.py", 'def f():\n    """do it."""\n'),
            "tests/x.py:3 opens a docstring with 'd'",
        ),
        (write("tests/x.py", '"""Do it\nwell."""\n'), "end 'Do it' with a period"),
        *(
            (
                append(f"{PLAN}/planner.py", f'class X:\n    """{word} is there."""\n'),
                f"with '{word}'",
            )
            for word in ("What", "That", "Those", "Who", "Whose", "Whether", "Which", "How")
        ),
        (write("tests/x.py", '"""Name a thing that is typed that is none."""\n'), "two clauses"),
    ],
    "sections_open_with_one_line": [
        (
            append(f"{PLAN}/planner.py", f"# {'-' * 78}\n# Solve.\n# {'-' * 78}\n"),
            "draws a line with a comment",
        ),
        (module("tests/x.py", "    #=======\nx = 1\n"), "tests/x.py:2 draws a line"),
    ],
    "mentioned_paths_exist": [
        (append("AGENTS.md", "run scripts/gone.py\n"), "AGENTS.md:12 names scripts/gone.py"),
        (append(SKILL, "see curry_train/core/gone.py\n"), "names curry_train/core/gone.py"),
        (append("README.md", "`template/gone`\n"), "names template/gone"),
        (append("README.md", "template/<any>.gone\n"), "names template/<any>.gone"),
        (append("Makefile", "\tpython benchmarks/gone.py\n"), "names benchmarks/gone.py"),
        (
            write(
                f"{PLAN}/x.py", '"""Plan.\n\nProof: `python -m pytest tests/plan/test_x.py`.\n"""\n'
            ),
            "plan/x.py:1 names tests/plan/test_x.py",
        ),
        (remove("README.md"), "README.md is missing"),
    ],
    "links_lead_somewhere": [
        (append("README.md", "a [link](gone.md)\n"), "README.md:4 links to gone.md"),
        (append(SKILL, '[34%](evidence/run.json "held")\n'), "links to evidence/run.json"),
        (append("AGENTS.md", "![picture](gone.png#top)\n"), "links to gone.png"),
    ],
    "pages_set_no_python_path": [
        (append("README.md", "    PYTHONPATH=template python x\n"), "README.md:4 sets PYTHONPATH"),
        (append(SKILL, '`PYTHONPATH="ROOT/template" python x`\n'), "SKILL.md:10 sets PYTHONPATH"),
        (append("AGENTS.md", "`env PYTHONPATH=. python`\n"), "AGENTS.md:12 sets PYTHONPATH"),
    ],
    "template_runs_where_it_is_written": [
        (write("template/{{ name }}/x.py", ""), "Jinja in its path"),
        (write("template/x.py", "{% if x %}\n"), "is not Python"),
        (write("template/x.py", "x = {{ name }}\n"), "Jinja in a module"),
        (write("template/x.py", "x = '{{ name }}'\n"), "Jinja in a module"),
    ],
    "nothing_mentions_the_workplace": [
        (append("LICENSE", "/wo" + "rk/main\n"), "LICENSE:2 has"),
        (append(".ci/run", "# in this " + "session\n"), ".ci/run:2 has"),
    ],
}

TECHNIQUES = {
    "techniques_are_complete": [
        (
            remove(f"{GATES}/grad_accum.py"),
            "skills/grad-accum: there is no template/curry_train/gates",
        ),
        (remove("skills"), "holds no skill"),
        (
            replace(SKILL, "primitives/grad_accum.py", "primitives/x.py"),
            "there is no template/curry_train",
        ),
        (replace(SKILL, "module:", "modul:"), "names 0 modules"),
        (replace(SKILL, "module: ", "module: curry_train/loop.py "), "names 2 modules"),
    ],
    "gates_belong_to_a_skill": [
        (
            module(f"{GATES}/other.py", "GATES = ()\n"),
            "gates/other.py binds GATES and has no skill",
        ),
        (replace(f"{GATES}/grad_accum.py", "GATES", "CHECKS"), "grad_accum.py binds no GATES"),
    ],
    "frontmatter_is_what_every_client_takes": [
        (
            replace(SKILL, "license:", "allowed-tools: Bash\nlicense:"),
            "the key 'allowed-tools' fails",
        ),
        (replace(SKILL, "name: grad-accum", "name: x"), "name is 'x' and the folder 'grad-accum'"),
        (replace(SKILL, "description: ", "description: a: b: "), "quote what YAML cannot read"),
        (write(SKILL, "# Title\n"), "open it with frontmatter"),
        (write(SKILL, "---\n- a\n---\n"), "write the frontmatter as keys"),
        (skill("x", "description: a <b>"), "description holds < or >"),
        (skill("x", "license: MIT"), "description must be text"),
        (skill("x", f"description: {'a' * 1025}"), "description must have 1 to 1024"),
        (skill("x", "description: a\nmetadata: {floor: 1}"), "metadata must map text to text"),
    ],
    "descriptions_fit_together": [
        (skill("x", f"description: {'a' * 2000}"), "shorten them to less than 2000"),
        (
            both(
                skill("x", f"description: {'a' * 1000}"), skill("y", f"description: {'a' * 1000}")
            ),
            "shorten them to less than 2000",
        ),
    ],
    "bodies_stay_short": [
        (append(SKILL, "line\n" * 150), "move what is rarely needed"),
        (
            skill("x", "description: a\n---\n" + "line\n" * 150),
            "skills/x/SKILL.md has a body of 152",
        ),
    ],
    "template_holds_no_skill": [
        (write("template/skills/x/SKILL.md", ""), "move it to skills/"),
        (write("template/SKILL.md", ""), "template/SKILL.md: move it"),
    ],
    "scripts_declare_what_they_need": [
        (write("scripts/x.py", ""), "scripts/x.py has no PEP 723 block"),
        (replace(SCRIPT, "click>=", "click>"), "scaffold.py needs click>8.1"),
        (replace(SCRIPT, 'python = ">=3.11"', 'python = ">=3.9"'), "requires-python, '>=3.11'"),
        (
            replace(SCRIPT, "import environment\n", "import click, environment\n"),
            "before any import",
        ),
        (replace(SCRIPT, "environment.require(__file__)", ""), "before any import that may fail"),
        (both(remove(SCRIPT)), "scripts/ holds no script"),
    ],
    "versions_are_equal": [
        *(
            (replace(path, "1.2.3", "1.2.4"), "versions differ: ")
            for path in (
                *("plugin.json", ".claude-plugin/plugin.json", ".claude-plugin/marketplace.json"),
                *("gemini-extension.json", "pyproject.toml", "CHANGELOG.md"),
                f"{PACKAGE}/__init__.py",
            )
        ),
        (remove("gemini-extension.json"), "gemini-extension.json carries 0 versions"),
    ],
}

WRITING: dict[str, list[tuple[Plant, str]]] = CODE | TEXT | TECHNIQUES
