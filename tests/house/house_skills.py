"""House rules on what every agent client takes as a skill; `tests/house/house.py` runs them."""

import re
from collections.abc import Iterator
from pathlib import Path

from house_tree import Skill, relative, skills

KEYS = {"name", "description", "license", "compatibility", "metadata"}
LONGEST_DESCRIPTION = 1024
ALL_DESCRIPTIONS = 2000  # together they take about 1% of an agent's context
LONGEST_BODY = 150
# A path of this repository; `<technique>` and `*` in it stand for any name.
MENTIONED = re.compile(
    r"(?<![\w/.<>-])(?:(?:scripts|tests|curry_train)/[\w/.<>*-]*\.py|(?:template|evidence)/[\w/.<>*-]*[\w>*])"
)


def frontmatter_is_what_every_client_takes(root: Path) -> list[str]:
    """Only the open keys, a name equal to the folder, a description that every client can show."""
    return [
        f"skills/{skill.name}/SKILL.md: {problem}"
        for skill in skills(root)
        for problem in _problems(skill)
    ]


def _problems(skill: Skill) -> Iterator[str]:
    if skill.problem:
        yield skill.problem
        return
    found = skill.frontmatter
    for key in sorted(set(found) - KEYS):
        yield f"the key {key!r} fails the open validator: put it under metadata"
    if found.get("name") != skill.name:
        yield f"name is {found.get('name')!r} and the folder {skill.name!r}: make them equal"
    description = found.get("description")
    if not isinstance(description, str) or not 1 <= len(description) <= LONGEST_DESCRIPTION:
        yield f"description must be text of 1 to {LONGEST_DESCRIPTION} characters"
    elif set("<>") & set(description):
        yield "description holds < or >, which some clients refuse: say it in words"
    metadata = found.get("metadata", {})
    if not isinstance(metadata, dict) or not all(
        isinstance(each, str) for pair in metadata.items() for each in pair
    ):
        yield "metadata must map text to text: quote its values"


def descriptions_fit_together(root: Path) -> list[str]:
    """All descriptions are in an agent's context at once."""
    total = sum(len(str(skill.frontmatter.get("description", ""))) for skill in skills(root))
    if total < ALL_DESCRIPTIONS:
        return []
    return [
        f"the descriptions of skills/ sum to {total} characters: shorten them to less than {ALL_DESCRIPTIONS}"
    ]


def bodies_stay_short(root: Path) -> list[str]:
    """The body of a skill is read whole; what is needed now and then goes into references/."""
    lengths = ((skill.name, skill.body.count("\n")) for skill in skills(root))
    return [
        f"skills/{name}/SKILL.md has a body of {length} lines: move what is rarely needed to references/"
        for name, length in lengths
        if length >= LONGEST_BODY
    ]


def mentioned_paths_exist(root: Path) -> list[str]:
    """What README, AGENTS and the skills point at is there; link checkers do not see a path in plain text."""
    pages = [root / "README.md", root / "AGENTS.md", *sorted((root / "skills").rglob("*.md"))]
    absent = [f"{page.name} is missing: write it" for page in pages if not page.is_file()]
    return absent + [
        f"{relative(page, root)}:{number} names {path}, which is not there: correct the path"
        for page in pages
        if page.is_file()
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1)
        for path in MENTIONED.findall(line)
        if not _exists(path, root)
    ]


def _exists(path: str, root: Path) -> bool:
    base = root / "template" if path.startswith("curry_train/") else root
    return any(base.glob(re.sub(r"<[^>]*>", "*", path)))
