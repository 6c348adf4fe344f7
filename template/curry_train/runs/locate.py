"""Find the first place at which two recorded runs differ.

    found = locate(read_fingerprints("A"), read_fingerprints("B"))
    found.headline  # "step 2, forward: model.h.3.ln, call 0, has equal inputs and another output 0"

The observations of A are gone through in the order of execution. The first one whose digests are
not those of B decides, because everything before it is equal; its kind tells what lies between.
Observations are matched by step, module path and number of the call, so more operations, more
modules and renamed modules in one of the runs do not matter.

Proof: `python -m pytest tests/runs/test_locate.py`.
"""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

Observation = Mapping[str, Any]
# Kinds of observations with digests.
COMPARED = ("batch", "state", "enter", "exit", "loss", "gradient", "update", "updated")


@dataclass
class Located:
    """The first difference of two runs, and what may have led to it."""

    headline: str
    # Where it is: step, phase, module path and number of the call. Empty where all is equal.
    place: dict[str, Any] = field(default_factory=dict)
    # What differs before it, and settings of the place.
    notes: list[str] = field(default_factory=list)
    num_compared: int = 0

    @property
    def is_equal(self) -> bool:
        return not self.place

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"equal": self.is_equal}


def locate(a: Sequence[Observation], b: Sequence[Observation]) -> Located:
    """Compare the observations of one rank in two runs."""
    return Comparison(a, b).run()


# Phase, module path, number of the call, and a description.
Place = tuple[str, str, int, str]
Pair = tuple[Observation, Observation]


class Comparison:
    """Two lists of observations, with those of B by their keys."""

    def __init__(self, a: Sequence[Observation], b: Sequence[Observation]) -> None:
        self.a = a
        self.start = a[0], b[0]
        self.renamed = _renamed(a, b)
        self.in_b = {_key(one, self.renamed): one for one in b if one["kind"] in COMPARED}
        self.settings = _settings_of(a), _settings_of(b, self.renamed)
        self.calls = _calls(a), _calls(b, self.renamed)
        self.num_compared = 0
        self.last: Observation | None = None
        # For each random generator the first observation where it differs, after an equal one.
        self.drawn: dict[str, str] = {}
        # What calls and optimizers were given, by path and number.
        self.given: dict[tuple[str, int], Pair] = {}

    def run(self) -> Located:
        for one in self.a:
            other = self.in_b.get(_key(one, {})) if one["kind"] in COMPARED else None
            if other is None:
                continue
            self.num_compared += 1
            self._note_generators(one, other)
            if one["kind"] in ("enter", "update"):
                self.given[one["path"], one["call"]] = one, other
            digests = _renamed_keys(other["digests"], self.renamed)
            names = [
                name for name, value in one["digests"].items() if digests.get(name, value) != value
            ]
            if names:
                return self._describe(one, other, names)
            self.last = one
        if not self.num_compared:
            return Located("the records have nothing in common", {"phase": "nothing"})
        text = f"equal: {self.num_compared} observations in {self.a[-1].get('step', 0)} steps"
        return Located(text, {}, [*self._only_in_one(), *self._environment()], self.num_compared)

    # The description of the first difference.

    def _describe(self, one: Observation, other: Observation, names: Sequence[str]) -> Located:
        describe = {
            "batch": self._batch,
            "state": self._state,
            "enter": self._enter,
            "exit": self._exit,
            "loss": self._loss,
            "gradient": self._gradient,
            "update": self._update,
            "updated": self._updated,
        }[one["kind"]]
        phase, path, call, text = describe((one, other), names)
        place = {"step": one["step"], "phase": phase, "path": path, "call": call}
        notes = [
            *self._of_the_place(one, path),
            *self.drawn.values(),
            *self._only_in_one(),
            *self._environment(),
        ]
        headline = f"step {one['step']}, {phase}: {text}"
        return Located(headline, place, list(dict.fromkeys(notes)), self.num_compared)

    def _batch(self, pair: Pair, names: Sequence[str]) -> Place:
        one = pair[0]
        text = f"batch {one['call']} of {one['path']} {self._rows(pair)}"
        return "data", one["path"], one["call"], text

    def _rows(self, pair: Pair) -> str:
        """Describe how the samples of a batch differ."""
        rows = [one.get("rows") or [] for one in pair]
        if rows[0] and sorted(rows[0]) == sorted(rows[1]):
            return "has the same samples in another order"
        others = [one for one in self.a if one["kind"] == pair[0]["kind"] and one.get("rows")]
        for one in others:
            if one["rows"] == rows[1]:
                return f"is in B that of step {one['step']}, call {one['call']}, of A"
        known = {row for one in others for row in one["rows"]}
        num_known = sum(row in known for row in rows[1])
        also = f", of which A has {num_known} of {len(rows[1])} too" if num_known else ""
        return f"has other samples{also}"

    def _state(self, pair: Pair, names: Sequence[str]) -> Place:
        when = "before the first step" if pair[0]["step"] == 1 else "since the step before"
        why = "initialisation or loading" if pair[0]["step"] == 1 else "changed between steps"
        return "state", names[0], 0, f"{names[0]}{_and_more(names)} differs {when} ({why})"

    def _enter(self, pair: Pair, names: Sequence[str]) -> Place:
        one = pair[0]
        if one["within"] is not None:
            path, call = one["within"]
            own = f"{path}, call {call}, in its own code{self._after(path)}"
            return one["phase"], path, call, f"{own}: another input {names[0]} of {_call(one)}"
        if self.last is not None and self.last["kind"] == "exit":
            text = f"the loop's own code after {_call(self.last)}: another input of {_call(one)}"
            return "loop", "loop", 0, text
        text = f"the loop gives other data: input {names[0]} of {_call(one)} {self._rows(pair)}"
        return "data", "loop", one["call"], text

    def _after(self, path: str) -> str:
        """Name the last call inside of a module, if there was one."""
        last = self.last
        if last is None or last["kind"] != "exit" or not last["within"]:
            return ""
        return f" after {_call(last)}" if last["within"][0] == path else ""

    def _exit(self, pair: Pair, names: Sequence[str]) -> Place:
        one = pair[0]
        after = self._after(one["path"])
        own = f", in its own code{after}," if after else ""
        given = self.given.get((one["path"], one["call"]))
        what = "has equal inputs"
        if given and given[0]["generator"] not in (given[1]["generator"], one["generator"]):
            what += ", draws from a random generator that differs,"
        text = f"{_call(one)}{own} {what} and another output {names[0]}{_and_more(names)}"
        return one["phase"], one["path"], one["call"], text

    def _loss(self, pair: Pair, names: Sequence[str]) -> Place:
        values = [one["values"].get("value of loss") for one in pair]
        after = f" after {_call(self.last)}" if self.last else ""
        text = f"the loop's own code{after}: the loss is {values[0]} in A and {values[1]} in B"
        return "loss", "loop", pair[0]["call"], text

    def _gradient(self, pair: Pair, names: Sequence[str]) -> Place:
        one = pair[0]
        if names[0] == "parameter":
            owner = one["path"].rpartition(".")[0]
            return "backward", owner, one["call"], f"{owner}: another gradient of {one['path']}"
        users = [tuple(user) for user in one["consumers"]]
        # Of a module and one inside of it, the inner one.
        users = [user for user in users if not any(it[0].startswith(f"{user[0]}.") for it in users)]
        place = [*users, one["within"] or ("loop", 0)]
        names_of_users = ", ".join(f"{path}, call {call}" for path, call in users)
        who = names_of_users or f"{place[0][0]}, call {place[0][1]}, in its own code"
        text = f"{who}: another gradient of {names[0]} of {_call(one)}"
        return "backward", place[0][0], place[0][1], text

    def _update(self, pair: Pair, names: Sequence[str]) -> Place:
        call = pair[0]["call"]
        what, _, path = names[0].rpartition(" of ")
        if what == "gradient":
            text = (
                f"the gradient of {path}{_and_more(names)} differs at the step and not in backward"
                " (clipping, scaling, accumulation or an exchange between ranks)"
            )
            return "gradients", path, call, text
        when = "before the first step" if pair[0]["step"] == 1 else "since the step before"
        return "optimizer", path, call, f"{names[0]}{_and_more(names)} differs {when}"

    def _updated(self, pair: Pair, names: Sequence[str]) -> Place:
        one = pair[0]
        text = f"{one['path']} gets equal gradients and leaves another {names[0]}{_and_more(names)}"
        return "optimizer", names[0].rpartition(" of ")[2], one["call"], text

    # What differs besides.

    def _of_the_place(self, one: Observation, path: str) -> Iterator[str]:
        settings = [of_run.get(path, {}) for of_run in self.settings]
        yield from _changes(settings[0], settings[1], path)
        if one["kind"] in ("enter", "exit", "updated", "update"):
            for first, second in filter(None, [self.given.get((one["path"], one["call"]))]):
                yield from _changes(first["values"], second["values"], one["path"])
                modes = [{"training": it.get("training")} for it in (first, second)]
                yield from _changes(modes[0], modes[1], one["path"])

    def _note_generators(self, one: Observation, other: Observation) -> None:
        states = [it.get("generators") or {"torch": it.get("generator")} for it in (one, other)]
        for name in states[0].keys() & states[1].keys():
            if states[0][name] != states[1][name]:
                since = f"after {_call(self.last)}" if self.last else "from the start"
                where = f"{since}, at {_call(one)} of step {one['step']}"
                self.drawn.setdefault(name, f"the random generator of {name} differs {where}")

    def _only_in_one(self) -> Iterator[str]:
        """Yield modules that are called in one of the runs alone, and those with other names."""
        for name, own, other in (("A", *self.calls), ("B", *reversed(self.calls))):
            known = {path for path, _ in other}
            if alone := [
                path for path in dict.fromkeys(path for path, _ in own) if path not in known
            ]:
                yield f"called in {name} alone: {_listed(alone)}"
        if self.renamed:
            yield f"renamed: {_listed([f'{a} is {b} in B' for b, a in self.renamed.items()])}"

    def _environment(self) -> list[str]:
        names = ("environment", "code", "switches", "variables", "program")
        a, b = ({name: one.get(name) for name in names} for one in self.start)
        return list(_changes(_flat(a), _flat(b), ""))


def _key(one: Observation, renamed: Mapping[str, str]) -> tuple[Any, ...]:
    # Each output and input of a call has a gradient of its own.
    what = tuple(one["digests"]) if one["kind"] == "gradient" else ()
    path = _path_in_a(one["path"], renamed)
    return one["kind"], one["step"], one.get("phase"), path, one["call"], what


def _call(one: Observation) -> str:
    is_call = one["kind"] in ("enter", "exit", "gradient")
    return (
        f"{one['path']}, call {one['call']}" if is_call else f"the {one['kind']} of {one['path']}"
    )


def _and_more(names: Sequence[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _listed(names: Sequence[str], most: int = 6) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


def _changes(a: Mapping[str, Any], b: Mapping[str, Any], owner: str) -> Iterator[str]:
    of_owner = f" of {owner}" if owner else ""
    for name in {**a, **b}:
        # As text, because nan is not equal to itself.
        if repr(a.get(name)) != repr(b.get(name)):
            yield f"{name}{of_owner} is {a.get(name)} in A and {b.get(name)} in B"


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {name: value}
    found: dict[str, Any] = {}
    for key, one in value.items():
        found |= _flat(one, f"{name}.{key}" if name else str(key))
    return found


def first_operation(
    a: Sequence[Observation], b: Sequence[Observation], place: Mapping[str, Any]
) -> str:
    """Describe the first operation that differs at a place, in runs that recorded them there.

    Operations are aligned by name, so one that only one of the runs has is named as such.
    """
    runs = [_operations_at(one, place) for one in (a, b)]
    names = [[one["name"] for one in run] for run in runs]
    matcher = difflib.SequenceMatcher(None, names[0], names[1], autojunk=False)
    for tag, begin_a, end_a, begin_b, end_b in matcher.get_opcodes():
        if tag != "equal":
            which = "A" if end_a > begin_a else "B"
            alone = [*runs[0][begin_a:end_a], *runs[1][begin_b:end_b]][0]
            return f"{alone['name']} ({alone['line']}) is in {which} alone"
        for one, other in zip(runs[0][begin_a:end_a], runs[1][begin_b:end_b], strict=True):
            changed = next(_changes(one["values"], other["values"], ""), "")
            if changed or one["digests"] != other["digests"]:
                what = f"argument {changed}" if changed else "another result"
                return f"{one['name']} ({one['line']}): {what}"
    return "no operation differs there when both run again: it does not repeat"


def _operations_at(run: Sequence[Observation], place: Mapping[str, Any]) -> list[Observation]:
    phases = {"backward": "backward", "recompute": "backward", "optimizer": "optimizer"}
    phase = phases.get(place["phase"], "forward")
    is_in_module = place["phase"] in ("forward", "evaluation")
    within = [place["path"], place["call"]] if is_in_module else None
    return [
        one
        for one in run
        if (one["kind"], one.get("phase"), one.get("step")) == ("operation", phase, place["step"])
        and (phase != "forward" or one["within"] == within)
    ]


# Modules by their paths.


def _settings_of(
    observations: Sequence[Observation], renamed: Mapping[str, str] | None = None
) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for one in observations:
        if one["kind"] == "settings":
            found |= {_path_in_a(path, renamed or {}): it for path, it in one["settings"].items()}
    return found


def _calls(
    observations: Sequence[Observation], renamed: Mapping[str, str] | None = None
) -> list[tuple[str, str]]:
    """Return path and class of the calls of the first step, in order."""
    settings = _settings_of(observations, renamed)
    paths = [
        _path_in_a(one["path"], renamed or {})
        for one in observations
        if one["kind"] == "enter" and one["step"] == 1
    ]
    return [(path, settings.get(path, {}).get("class", "")) for path in paths]


def _renamed(a: Sequence[Observation], b: Sequence[Observation]) -> dict[str, str]:
    """Return the path in A for each path of B that A does not have, by class and order."""
    calls = [list(dict.fromkeys(_calls(one))) for one in (a, b)]
    known = [{path for path, _ in one} for one in calls]
    names = [
        [path if path in known[0] & known[1] else f"({kind})" for path, kind in one]
        for one in calls
    ]
    found = {}
    matcher = difflib.SequenceMatcher(None, names[0], names[1], autojunk=False)
    for place_a, place_b, size in matcher.get_matching_blocks():
        for number in range(size):
            path_a, path_b = calls[0][place_a + number][0], calls[1][place_b + number][0]
            if path_a != path_b:
                found[path_b] = path_a
    return found


def _path_in_a(path: str, renamed: Mapping[str, str]) -> str:
    """Return the path in A of a module, or of a parameter of one."""
    if not renamed or path in renamed:
        return renamed.get(path, path)
    owner, dot, name = path.rpartition(".")
    return f"{renamed[owner]}{dot}{name}" if owner in renamed else path


def _renamed_keys(digests: Mapping[str, Any], renamed: Mapping[str, str]) -> Mapping[str, Any]:
    """Return digests of parameters under their names in A, such as "gradient of model.h.0.bias"."""
    if not renamed:
        return digests
    found = {}
    for name, value in digests.items():
        what, of, path = name.rpartition(" of ")
        found[f"{what}{of}{_path_in_a(path, renamed)}"] = value
    return found
