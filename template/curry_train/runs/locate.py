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
import itertools
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..core.wording import some_of
from .fingerprints import Observation, Record, place_of
from .rounding import Expected, epsilon_of, is_rounding, num_elements
from .values import Facts, Values

# Operations, from the first one that differs, that are aligned between the two runs.
LONGEST_ALIGNED = 500
# Kinds of observations with digests.
COMPARED = ("batch", "state", "enter", "exit", "loss", "gradient", "gradients", "update", "step")


# Phase and description of differences of what an optimizer works on, by the kind of observation.
IN_STATE = {
    "state": ("state", "{what} differs {when} (initialisation, loading, or code between steps)"),
    "gradients": (
        "gradients",
        "the {what} differs after backward and not in it (accumulation, a hook, or an "
        "exchange between ranks)",
    ),
    "update": ("optimizer", "{what} differs {when}"),
    "step": ("optimizer", "{path} gets equal gradients and leaves another {what}"),
}
GRADIENT_AT_STEP = (
    "gradients",
    "the {what} differs at the step and not after backward (clipping or scaling)",
)


@dataclass
class Located:
    """The first difference of two runs, and what may have led to it."""

    headline: str
    # Where it is: step, phase, module path and number of the call. Empty where all is equal.
    place: Facts = field(default_factory=dict)
    # What differs before it, and settings of the place.
    notes: list[str] = field(default_factory=list)
    num_compared: int = 0
    # Kind of the observation that differs first.
    kind: str = ""
    # Whether this rank's parts of sharded tensors are equal there.
    is_of_another_rank: bool = False

    @property
    def is_equal(self) -> bool:
        return not self.place

    def to_json(self) -> Facts:
        return asdict(self) | {"equal": self.is_equal}


def locate(a: Record, b: Record, noises: Sequence[Record] = ()) -> Located:
    """Compare the observations of one rank in two runs.

    With runs of A's program with noise, differences that rounding explains are none.
    """
    if a[0].level != b[0].level:
        raise ValueError(
            f"the records are of level {a[0].level} in A and {b[0].level} in B: make one of them "
            "again, with the --level of the other"
        )
    comparison = Comparison(a, b, noises)
    found = comparison.run()
    found.notes = list(dict.fromkeys([*found.notes, *comparison.of_the_runs()]))
    found.num_compared = comparison.num_compared
    return found


def expected_values(a: Record, b: Record, step: int) -> tuple[Expected, Expected]:
    """Return A's digests from a step on, and their precision, by the places in A and in B."""
    found: tuple[Expected, Expected] = {}, {}
    for one, other in Comparison(a, b).pairs():
        own = other.own
        for name, name_in_b in zip(other.digests, own.digests, strict=True):
            if one.step >= step and (value := one.digests.get(name)):
                kept = value, epsilon_of(value, other.digests[name])
                found[0].setdefault(place_of(one), {})[name] = kept
                found[1].setdefault(place_of(own), {})[name_in_b] = kept
    return found


# Phase, module path, number of the call, and a description.
Place = tuple[str, str, int | None, str]
Pair = tuple[Observation, Observation]


class Comparison:
    """Two lists of observations, with those of B by their keys."""

    def __init__(
        self,
        a: Record,
        b: Record,
        noises: Sequence[Record] = (),
    ) -> None:
        self.noises = [_index_by_place(noise) for noise in noises]
        digests = [digest for one in a for digest in one.digests.values()]
        # So many terms may be summed up to one value.
        self.most_terms = max(map(num_elements, digests), default=0)
        self.renamed = _find_renamed(a, b)
        self.runs = a, _rename_as_in_a(b, self.renamed)
        # What both runs have, though one of their optimizers may lack it.
        self.known = set.intersection(*map(_list_names, self.runs))
        # Steps and names of parameters whose gradients were made in one run alone.
        self.made_alone = set.symmetric_difference(
            *({(it.step, it.path) for it in run if "parameter" in it.digests} for run in self.runs)
        )
        # Step of the last observation, and whether the record is whole.
        self.ends = [(run[-1].step, run[-1].kind == "end") for run in self.runs]
        # Where a record ended early, its last step may lack that of an optimizer.
        self.end = min(self.ends)[0] + ({*self.ends} == {(self.ends[0][0], True)})
        self.num_compared = 0
        # The last one that was equal, other than states.
        self.last = Observation(kind="start", path="the run")
        # The random generators that were equal once, and where they differ for the first time.
        self.seen_equal: set[str] = set()
        self.drawn: dict[str, str] = {}
        # What calls and optimizers were given, by path and number.
        self.given: dict[tuple[str, int], Pair] = {}

    def pairs(self) -> Iterator[Pair]:
        """Yield the observations of A that B has too, with those of B."""
        a, b = map(_index_by_place, self.runs)
        # Initial weights come first: they are noted at the first call of their model.
        for place in sorted(a, key=lambda place: a[place].kind != "state" or a[place].step > 1):
            if place in b:
                yield a[place], b[place]

    def _is_rounding(self, one: Observation, other: Observation, name: str) -> bool:
        if not self.noises:
            return False
        # Without a distance A's value was not kept, as of a sharded tensor.
        found = other.distances.get(name, {})
        # Initial values are drawn or loaded, nothing is computed between two steps, and sums of
        # equal gradients are equal, except those of several ranks.
        is_alone = all(run[0].environment["world_size"] == 1 for run in self.runs)
        is_sum = one.kind == "gradients" and is_alone
        is_kept = one.kind == "update" and "gradient" not in name
        if one.kind == "state" or is_sum or is_kept:
            return not found
        noises = [
            run.get(place_of(one), Observation()).distances.get(name, {}) for run in self.noises
        ]
        over_batch = one.kind == "loss" or name.startswith(("parameter", "buffer "))
        terms = self.most_terms / max(1, num_elements(one.digests[name])) if over_batch else 1
        epsilon = epsilon_of(one.digests[name], other.digests.get(name, ""))
        return is_rounding(found, noises, epsilon, terms)

    def _alone(self, one: Observation, other: Observation) -> list[str]:
        """Return the gradients, parameters and states that one run alone has there."""
        names = sorted(one.digests.keys() ^ other.digests.keys())
        if one.kind == "gradients":
            return [name for name in names if (one.step, name) in self.made_alone]
        names = names if one.kind == "update" else []
        return [name for name in names if name.removeprefix("gradient of ") in self.known]

    def _is_of_another_loader(self, one: Observation, other: Observation) -> bool:
        """Return whether one run asks another loader first, so that their names are exchanged."""
        return one.kind == "batch" and any(
            it.kind == "batch" and it.digests == own.digests and it.path != one.path
            for own, run in zip((other, one), self.runs, strict=True)
            for it in run
        )

    def run(self) -> Located:
        num_rounded = 0
        for one, other in self.pairs():
            self.num_compared += 1
            self._note_generators(one, other)
            if one.kind in ("enter", "update"):
                self.given[one.path, one.call] = one, other
            digests = other.digests
            others = [
                name for name, value in one.digests.items() if digests.get(name, value) != value
            ]
            names = [name for name in others if not self._is_rounding(one, other, name)]
            names = [*self._alone(one, other), *names]
            if names and not self._is_of_another_loader(one, other):
                located = self._find_more_steps(
                    one.step + (one.kind in ("loss", "update"))
                ) or self._describe(one, other, names)
                located.is_of_another_rank = bool(one.shards) and one.shards == other.shards
                return located
            num_rounded += bool(others)
            if one.kind != "state":
                self.last = one
        if self.last.kind == "start":
            return Located("the records have nothing in common", {"phase": "nothing"})
        if found := self._find_more_steps(self.end):
            return found
        text = f"equal: {self.num_compared} observations in {self.last.step} steps"
        if num_rounded:
            text += f", of which {num_rounded} differ by rounding alone"
        if self.ends[0] != self.ends[1]:
            ends = [f"{'after' if is_whole else 'in'} step {step}" for step, is_whole in self.ends]
            text += f"; A ends {ends[0]}, and B ends {ends[1]}"
        return Located(text)

    def _find_more_steps(self, end: int) -> Located | None:
        """Name what one run does more often in a step before `end`: steps, or backward calls."""
        a, b = (
            Counter((it.step, it.path) for it in run if it.kind in ("loss", "update"))
            for run in self.runs
        )
        # Without optimizers that one run alone has under this name.
        common = {path for _, path in a} & {path for _, path in b}
        found = [
            (step, path == "loss", -(a | b)[step, path], path, runs)
            for runs, more in (("A than in B", a - b), ("B than in A", b - a))
            for step, path in more
            if step < min(end, self.end) and path in common
        ]
        if not found:
            return None
        step, is_backward, _, path, runs = min(found)
        phase, text = "optimizer", f"{path} makes more steps"
        if is_backward:
            phase, text = "backward", "there are more backward calls"
        place = {"step": step, "phase": phase, "path": path}
        return Located(f"step {step}, {phase}: {text} in {runs}", place)

    # The description of the first difference.

    def _describe(self, one: Observation, other: Observation, names: Sequence[str]) -> Located:
        kind = "state" if one.kind in IN_STATE else one.kind
        phase, path, call, text = getattr(self, f"_place_{kind}")(one, other, names)
        place = {"step": one.step, "phase": phase, "path": path, "call": call}
        settings = [_list_settings(run).get(path, {}) for run in self.runs]
        notes = [*_list_changes(*settings, owner=path)]
        what = {"enter": "input ", "exit": "output "}.get(one.kind, "") + names[0]
        if names[0] in one.digests.keys() & other.digests.keys():
            a, b = (it.digests[names[0]].partition(":")[0] for it in (one, other))
            notes += _list_changes({f"type of {what}": a}, {f"type of {what}": b})
        if given := self.given.get((one.path, one.call)):
            notes += _list_changes(given[0].values, given[1].values, owner=one.path)
        notes += self.drawn.values()
        return Located(f"step {one.step}, {phase}: {text}", place, notes, kind=one.kind)

    def _place_batch(self, one: Observation, other: Observation, names: Sequence[str]) -> Place:
        entries = f" in {some_of(names)}" if len(names) < len(one.digests) else ""
        text = f"batch {one.call} of {one.path} {self._describe_rows(one, other)}{entries}"
        return "data", one.path, one.call, text

    def _describe_rows(self, own: Observation, other: Observation) -> str:
        """Describe how the samples of a batch differ."""
        if own.rows == other.rows:
            return "differs"
        if sorted(own.rows) == sorted(other.rows):
            return "has the same samples in another order"
        for one in self.runs[0] if other.rows else ():
            if (one.kind, one.rows) == (own.kind, other.rows):
                which = "batch" if one.kind == "batch" else "call"
                return f"has in B the samples of {which} {one.call} of A, in step {one.step}"
        return "has other samples"

    def _place_enter(self, one: Observation, other: Observation, names: Sequence[str]) -> Place:
        if one.within is not None:
            path, call = one.within
            own = f"{path}, call {call}, in its own code{self._find_last_inside(path)}"
            if alone := self._describe_given_alone(path, call):
                own = f"{path}, call {call}, {alone}"
            return one.phase, path, call, f"{own}: another input {names[0]} of {_call(one)}"
        # Data has no gradient.
        if names[0] in one.made:
            text = f"the loop's own code after {_call(self.last)}: another input of {_call(one)}"
            return "loop", "loop", 0, text
        rows = self._describe_rows(one, other)
        text = f"the loop gives other data: input {names[0]} of {_call(one)} {rows}"
        return "data", "loop", one.call, text

    def _describe_given_alone(self, path: str, call: int) -> str:
        """Say what a call was given in one run alone, if anything."""
        pair = self.given.get((path, call))
        alone = sorted(pair[0].digests.keys() ^ pair[1].digests.keys()) if pair else []
        return f"is given input {some_of(alone, 1)} in one run alone" if alone else ""

    def _find_last_inside(self, path: str) -> str:
        """Name the last call inside of a module, if there was one."""
        last = self.last
        if last.kind != "exit" or not last.within:
            return ""
        return f" after {_call(last)}" if last.within[0] == path else ""

    def _place_exit(self, one: Observation, other: Observation, names: Sequence[str]) -> Place:
        after = self._find_last_inside(one.path)
        own = f", in its own code{after}," if after else ""
        given = self.given.get((one.path, one.call))
        what = "has equal inputs"
        if given and given[0].generators not in (given[1].generators, one.generators):
            what += ", draws from a random generator that differs,"
        what = self._describe_given_alone(one.path, one.call) or what
        text = f"{_call(one)}{own} {what} and another output {some_of(names, 1)}"
        return one.phase, one.path, one.call, text

    def _place_loss(self, one: Observation, other: Observation, names: Sequence[str]) -> Place:
        a, b = (it.values.get("value of loss") for it in (one, other))
        code = f"the loop's own code after {_call(self.last)}"
        text = f"{code}: the loss is {a} in A and {b} in B"
        return "loss", "loop", one.call, text

    def _place_gradient(self, one: Observation, other: Observation, names: Sequence[str]) -> Place:
        if names[0] == "parameter":
            owner = one.path
            called = [path for path, _ in self.given]
            # Attention uses the weights of a module inside of it without a call of that.
            while owner and owner not in called:
                owner = owner.rpartition(".")[0]
            num_calls = called.count(owner)
            # A module that was called more often than backward has the sum of these calls.
            call = one.call if num_calls == one.call + 1 else None
            return "backward", owner, call, f"{owner}: another gradient of {one.path}"
        a, b = (
            [it for it in run if (it.kind, it.step) == ("gradient", one.step)] for run in self.runs
        )
        # In B code between the modules may have got the right gradient from them.
        sound = [[it.path, it.call] for it in b if one.digests[names[0]] in it.digests.values()]
        # Of a module and one inside of it, the inner one.
        users = [
            user
            for user in one.consumers
            if not any(path.startswith(f"{user[0]}.") for path, _ in one.consumers)
            and user not in sound
        ]
        made_in = one.made_in
        # A later output of the call may be computed from it, if the loss depends on that one too.
        has_others = any(
            _call(it) == _call(one) and it.digests.keys() != one.digests.keys() for it in a
        )
        if not has_others and made_in == [one.path, one.call]:
            made_in = None
        path, call = [*users, made_in or ("loop", 0)][0]
        who = ", ".join(f"{path}, call {call}" for path, call in users)
        who = who or f"{path}, call {call}, in its own code"
        return "backward", path, call, f"{who}: another gradient of {names[0]} of {_call(one)}"

    def _place_state(self, one: Observation, other: Observation, names: Sequence[str]) -> Place:
        """Describe a difference of parameters, gradients or an optimizer's state."""
        phase, text = IN_STATE[one.kind]
        what, _, path = names[0].rpartition(" of ")
        if what == "gradient":
            phase, text = GRADIENT_AT_STEP
        for run, without in ("A", other), ("B", one):
            if names[0] not in without.digests:
                text = f"in {run} alone: {{what}}"
                names = [name for name in names if name not in without.digests]
        when = "before the first step" if one.step == 1 else "since the step before"
        # Its modules have begun with equal parameters.
        when = when if what or phase != "optimizer" else "since the forward pass"
        named = "gradient of " * (one.kind == "gradients") + some_of(names, 1)
        text = text.format(what=named, when=when, path=one.path)
        return phase, path, one.call, text

    # What differs besides.

    def _note_generators(self, one: Observation, other: Observation) -> None:
        a, b = one.generators, other.generators
        for name in sorted({**a, **b}):
            if a.get(name) == b.get(name):
                self.seen_equal.add(name)
                continue
            where = "from the start"
            if name in self.seen_equal:
                where = f"after {_call(self.last)}, at {_call(one)} of step {one.step}"
            self.drawn.setdefault(name, f"the random generator of {name} differs {where}")

    def of_the_runs(self) -> Iterator[str]:
        """Yield modules that only one run calls, those with other names, and other settings."""
        a, b = ([path for path, *_ in _list_calls(run)] for run in self.runs)
        for name, own, other in (("A", a, b), ("B", b, a)):
            if alone := [path for path in own if path not in other]:
                yield f"called in {name} alone: {some_of(alone)}"
        names = [f"{a} is {b} in B" for b, a in self.renamed.items() if not a.endswith(" of B")]
        if names:
            yield f"renamed: {some_of(names)}"
        yield from _list_changes(*map(settings_of, self.runs))


def _index_by_place(observations: Record) -> dict[Any, Observation]:
    return {place_of(one): one for one in observations if one.kind in COMPARED}


def _call(one: Observation) -> str:
    is_call = one.kind in ("enter", "exit", "gradient")
    return f"{one.path}, call {one.call}" if is_call else f"the {one.kind} of {one.path}"


def _list_changes(a: Values, b: Values, *, owner: str = "") -> Iterator[str]:
    of_owner = f" of {owner}" if owner else ""
    for name in {**a, **b}:
        # As text: 1 and 1.0 are other arguments of an operation, and nan is not equal to itself.
        if repr(a.get(name)) != repr(b.get(name)):
            yield f"{name}{of_owner} is {a.get(name, 'unset')} in A and {b.get(name, 'unset')} in B"


def settings_of(observations: Record) -> Facts:
    """Return what a run was started with, by names such as "variable OMP_NUM_THREADS"."""
    start = observations[0]
    kind, owner, *arguments = start.program or ["script", None]
    environment = dict(start.environment)
    packages = environment.pop("packages", {})
    return {
        "arguments": arguments,
        kind: owner,
        **environment,
        **{f"package {it}": version for it, version in packages.items() if it not in environment},
        **{f"code {name}": value for name, value in start.code.items()},
        **{f"variable {name}": value for name, value in start.variables.items()},
        **next((one.switches for one in observations if one.kind == "settings"), {}),
    }


def first_operation(a: Record, b: Record, found: Located) -> str:
    """Describe the first operation that differs at a place, in runs that recorded them there.

    Operations are aligned by name, so one that only one of the runs has is named as such.
    """
    # What came after the difference did not make it.
    both = Comparison(a, b)
    ends = [*both.pairs()][found.num_compared - 1]
    before = [run[: run.index(end)] for run, end in zip(both.runs, ends, strict=True)]
    step = found.place["step"]
    calls = [
        {(it.path, it.call) for it in run if (it.kind, it.step) == ("enter", step)}
        for run in before
    ]
    # A module that is called in one run alone, or later in the other one.
    alone = calls[0] ^ calls[1]
    by_worker = [_find_operations(run, found, alone) for run in before]
    runs: list[list[Observation]] = [[], []]
    for worker in sorted({it.worker for run in by_worker for it in run}, reverse=True):
        pair = [[it for it in run if it.worker == worker] for run in by_worker]
        # Workers of a loader may have gone on with later batches.
        end = min(map(len, pair)) if worker >= 0 else None
        runs = [run + more[:end] for run, more in zip(runs, pair, strict=True)]
    same = [_outcome(one) == _outcome(other) for one, other in zip(*runs, strict=False)]
    begin = len(list(itertools.takewhile(bool, same)))
    rest = [one[begin : begin + LONGEST_ALIGNED] for one in runs]
    if rest == [[], []]:
        return "no operation differs there: an assignment of Python, compiled code, or no repeat"
    matched = _match([[one.name for one in run] for run in rest])
    end_a, end_b = next(iter(matched), (None, None))
    if (end_a, end_b) != (0, 0):
        sides = ("B", rest[1][:end_b]), ("A", rest[0][:end_a])
        return "; ".join(_alone(run, alone) for run, alone in sides if alone)
    one, other = rest[0][0], rest[1][0]
    lines = " and ".join(dict.fromkeys([one.line, other.line]))
    changed = next(_list_changes(one.values, other.values), "")
    what = f"argument {changed}" if changed else "another result"
    return f"{one.name} ({lines}): {what}"


def _alone(run: str, operations: Record) -> str:
    # Views and new memory come with what computes.
    operations = [one for one in operations if one.computes] or operations
    name, *others = dict.fromkeys(one.name for one in operations)
    also = f", with {some_of(others)}" if others else ""
    return f"{name} ({operations[0].line}) is in {run} alone{also}"


def _outcome(operation: Observation) -> tuple[Any, ...]:
    return operation.name, repr(operation.values), operation.digests


def _find_operations(
    run: Record, found: Located, alone: Container[tuple[str, int]]
) -> list[Observation]:
    """Return the operations, in order, that may have made the difference.

    Those of calls that one run has made `alone` may have made it too.
    """
    place = found.place
    phase = place["phase"]
    within = None
    phases = ["forward"]
    if phase in ("forward", "evaluation"):
        within = [place["path"], place["call"]]
    elif found.kind == "step":
        phases = ["optimizer"]
    elif found.kind == "gradient" or phase == "recompute":
        phases = ["backward"]
    elif phase == "gradients":
        phases = ["backward", "forward"]
    return [
        one
        for one in run
        if one.kind == "operation"
        and (one.step == place["step"] if one.worker < 0 else phase == "data")
        and one.phase in phases
        and (one.phase != "forward" or one.within == within or tuple(one.within or ()) in alone)
    ]


# Modules by their paths.


def _list_names(observations: Record) -> set[str]:
    """Return the names of all parameters, buffers and optimizer state."""
    return set().union(*(it.digests for it in observations if it.kind in ("state", "step")))


def _list_settings(observations: Record) -> dict[str, Facts]:
    return {path: settings for one in observations for path, settings in one.settings.items()}


def _list_calls(observations: Record) -> list[tuple[str, str, dict[str, str]]]:
    """Return path, class and initial state of what is called in the first step, in order.

    The state is by the names within the path.
    """
    settings = _list_settings(observations)
    first = [one for one in observations if one.step == 1]
    paths = dict.fromkeys(one.path for one in first if one.kind in ("enter", "update"))
    initial: dict[str, str] = {}
    for one in first:
        if one.kind == "state":
            initial |= one.digests
    return [
        (
            path,
            settings.get(path, {}).get("class", ""),
            {name[len(path) :]: it for name, it in initial.items() if name.startswith(f"{path}.")},
        )
        for path in paths
    ]


def _find_renamed(a: Record, b: Record) -> dict[str, str]:
    """Return the path in A for each path of B that A does not have so.

    Modules are matched in order: by path and class or, where more of the initial state is equal
    then, by class and initial state.
    """
    calls = [_list_calls(one) for one in (a, b)]
    known = set.intersection(*({(path, kind) for path, kind, _ in run} for run in calls))
    by_path = [
        [path if (path, kind) in known else f"({kind})" for path, kind, _ in run] for run in calls
    ]
    by_state = [[kind + "".join(state.values()) for _, kind, state in run] for run in calls]
    matched = max(
        map(_match, (by_path, by_state)),
        key=lambda pairs: sum(by_state[0][a] == by_state[1][b] for a, b in pairs),
    )
    found = {}
    for in_a, in_b in matched:
        path_a, _, state_a = calls[0][in_a]
        path_b, _, state_b = calls[1][in_b]
        have_its_shapes = all(
            state_b.get(name, it).partition(":")[0] == it.partition(":")[0]
            for name, it in state_a.items()
        )
        if path_a != path_b and have_its_shapes:
            found[path_b] = path_a
    # A layer that only B has moves the others on, and may have the path of one of A.
    return found | {
        path: f"{path} of B"
        for path, *_ in calls[1]
        if path in found.values() and path not in found
    }


def _match(names: Sequence[Sequence[str]]) -> list[tuple[int, int]]:
    """Return the numbers of those that match in two lists, in their order."""
    blocks = difflib.SequenceMatcher(None, names[0], names[1], autojunk=False).get_matching_blocks()
    return [(a + number, b + number) for a, b, size in blocks for number in range(size)]


def _rename_as_in_a(b: Record, renamed: Mapping[str, str]) -> Record:
    """Return observations of B by the paths in A; the field "own" has each as it was."""

    def name_in_a(name: str) -> str:
        # A module, a parameter of one, or such as "gradient of model.h.0.bias".
        what, of, path = name.rpartition(" of ")
        owner, dot, last = path.rpartition(".")
        found = f"{renamed[owner]}{dot}{last}" if owner in renamed else path
        return f"{what}{of}{renamed.get(path, found)}"

    found = []
    for own in b:
        one = Observation(**vars(own), own=own)
        one.path = name_in_a(own.path)
        for key in {"digests", "distances", "settings"} & vars(own).keys():
            setattr(one, key, {name_in_a(name): it for name, it in getattr(own, key).items()})
        if own.within:
            path, call = own.within
            one.within = [name_in_a(path), call]
        found.append(one)
    return found
