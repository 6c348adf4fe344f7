"""Compare the planner's solver with all possible choices: within the budget, and in time.

python -m pytest tests/plan/test_solve.py
"""

import dataclasses
import itertools
import random
import time

import pytest

from curry_train.plan import solve as solve_module
from curry_train.plan.solve import (
    Choice,
    Solution,
    Stage,
    least_peak,
    peak_of,
    solve,
    unbeaten,
)

GIB = 2**30


def small_chain(seed):
    """Draw up to five blocks of five choices, the head's needs, and a budget near them."""
    draw = random.Random(seed)
    stages = [
        Stage(
            tuple(
                Choice(str(number), draw.randint(0, 40), draw.randint(0, 40), draw.randint(0, 50))
                for number in range(draw.randint(1, 5))
            ),
            standing_bytes=draw.randint(0, 10),
        )
        for _ in range(draw.randint(1, 5))
    ]
    return stages, draw.randint(0, 60), draw.randint(1, 200)


def large_chain(seed, *, num_blocks=None, num_choices=77):
    """Make blocks of about half a GB with fine menus: holding less costs more recompute."""
    draw, stages = random.Random(seed), []
    for _ in range(num_blocks or draw.randint(24, 32)):
        whole, forward = draw.randint(4 * 10**8, 8 * 10**8), draw.uniform(0.5, 1.5)
        parts = [0.05, *sorted(draw.uniform(0.05, 1.0) for _ in range(num_choices - 2)), 1.0]
        choices = []
        for number, part in enumerate(parts):
            again = whole - int(whole * part)
            cost = forward * (1 - part) ** 1.2 * draw.uniform(1.0, 1.02)
            choices.append(
                Choice(str(number), int(whole * part), int(again * draw.uniform(0.8, 1.3)), cost)
            )
        stages.append(Stage(tuple(choices), standing_bytes=draw.randint(0, 10**7)))
    return stages, draw.choice((0, 10**8, 2 * 10**9))


def all_plans(stages, head):
    """Return the peak and the cost of all possible choices, the cheapest of each peak."""
    plans = {}
    for chosen in itertools.product(*(range(len(stage.choices)) for stage in stages)):
        cost = sum(stage.choices[index].cost for stage, index in zip(stages, chosen, strict=True))
        peak = peak_of(stages, chosen, head_bytes=head)
        plans[peak] = min(cost, plans.get(peak, cost))
    return plans


def cheapest_cost(stages, head, budget):
    return min(
        (cost for peak, cost in all_plans(stages, head).items() if peak <= budget), default=None
    )


def fault_of(solver, stages, head, budget):
    """Return what is wrong with a solver's answer on a countable chain, or None."""
    found, cost = solver(stages, budget, head_bytes=head), cheapest_cost(stages, head, budget)
    if found is None or cost is None:
        return None if found is cost else f"found {found}, and the least cost is {cost}"
    if found.peak_bytes != peak_of(stages, found.chosen, head_bytes=head):
        return f"says a peak of {found.peak_bytes}"
    if found.peak_bytes > budget:
        return f"a peak of {found.peak_bytes} with a budget of {budget}"
    spent = sum(
        stage.choices[index].cost for stage, index in zip(stages, found.chosen, strict=True)
    )
    return (
        None
        if spent == found.cost == cost
        else f"costs {spent}, says {found.cost}, and the least is {cost}"
    )


def faults(solver, num_chains=400):
    found = {}
    for seed in range(num_chains):
        stages, head, budget = small_chain(seed)
        if fault := fault_of(solver, stages, head, budget):
            found[seed] = fault
    return found


# The peak by hand, and the best plan of small chains.


def test_the_peak_of_a_step_by_hand():
    first = Stage((Choice("keep", 10, 2, 0.0),), standing_bytes=1)
    second = Stage((Choice("keep", 5, 7, 0.0),), standing_bytes=3)
    assert peak_of([first], [0]) == 10 + 2 + 1
    assert peak_of([first, second], [0, 0]) == 10 + 5 + 7 + 3
    assert peak_of([first, second], [0, 0], head_bytes=11) == 10 + 5 + 11
    assert peak_of([], [], head_bytes=4) == 4


def test_the_plan_of_a_small_chain_is_the_best_one_or_none_exists():
    assert faults(solve) == {}
    answers = [
        solve(stages, budget, head_bytes=head)
        for stages, head, budget in map(small_chain, range(400))
    ]
    assert 100 < sum(answer is None for answer in answers) < 300  # both kinds occur


def test_the_bound_that_shortens_menus_does_not_change_the_best_plan(monkeypatch):
    """Find the same costs by dynamic programming alone: the bound drops nothing needed."""
    monkeypatch.setattr(solve_module, "price_menus", lambda menus, known: (None, menus))
    assert faults(solve) == {}


def test_few_quanta_find_plans_within_the_budget_and_near_the_best_cost(monkeypatch):
    """Find a plan with 64 quanta if one exists, never above the budget.

    It never costs more than a plan for a budget that is smaller by a quantum for each block.
    """
    monkeypatch.setattr(solve_module, "NUM_QUANTA", 64)
    monkeypatch.setattr(solve_module, "SEARCH_PASSES", 1)
    equal = 0
    for seed in range(300):
        stages, head, budget = small_chain(seed)
        stages = [
            Stage(
                tuple(scaled(choice, 10**7 + 3) for choice in stage.choices), stage.standing_bytes
            )
            for stage in stages
        ]
        head, budget = head * 10**7, budget * (10**7 + 3)
        found, best = solve(stages, budget, head_bytes=head), cheapest_cost(stages, head, budget)
        assert (found is None) == (best is None)
        if found is None:
            continue
        assert found.peak_bytes <= budget
        quantum = (
            sum(max(choice.held_bytes for choice in stage.choices) for stage in stages) // 64 + 1
        )
        bound = cheapest_cost(stages, head, budget - quantum * len(stages))
        assert bound is None or best <= found.cost <= bound
        equal += found.cost == best
    assert equal > 100


def scaled(choice, factor):
    return dataclasses.replace(
        choice,
        held_bytes=choice.held_bytes * factor,
        transient_bytes=choice.transient_bytes * factor,
    )


def test_sums_that_only_differ_in_their_last_bytes_are_distinguished():
    """Catch a solver that rounds each block up to a quantum: no plan, or a more expensive one."""
    stages = [
        Stage((Choice("keep", GIB + 1, 0, 0.0), Choice("again", GIB, 0, 1.0))) for _ in range(20)
    ]
    for num_kept in range(21):
        found = solve(stages, 20 * GIB + num_kept)
        assert (found.cost, found.peak_bytes) == (20 - num_kept, 20 * GIB + num_kept)
    assert solve(stages, 20 * GIB - 1) is None


# Saboteurs: the comparison above must see them.


def ignores_transient(stages, budget_bytes, *, head_bytes=0):
    flat = [
        dataclasses.replace(
            stage,
            choices=tuple(
                dataclasses.replace(choice, transient_bytes=0) for choice in stage.choices
            ),
        )
        for stage in stages
    ]
    return described(solve(flat, budget_bytes, head_bytes=head_bytes), stages, head_bytes)


def ignores_standing(stages, budget_bytes, *, head_bytes=0):
    flat = [dataclasses.replace(stage, standing_bytes=0) for stage in stages]
    return described(solve(flat, budget_bytes, head_bytes=head_bytes), stages, head_bytes)


def rounds_down(stages, budget_bytes, *, head_bytes=0):
    flat = [
        dataclasses.replace(
            stage,
            choices=tuple(
                dataclasses.replace(choice, held_bytes=choice.held_bytes // 8 * 8)
                for choice in stage.choices
            ),
        )
        for stage in stages
    ]
    return described(solve(flat, budget_bytes, head_bytes=head_bytes), stages, head_bytes)


def ignores_head(stages, budget_bytes, *, head_bytes=0):
    return described(solve(stages, budget_bytes), stages, head_bytes)


def described(found, stages, head_bytes):
    return found and dataclasses.replace(
        found, peak_bytes=peak_of(stages, found.chosen, head_bytes=head_bytes)
    )


def greedy_by_cost_per_byte(stages, budget_bytes, *, head_bytes=0):
    """Change the cheapest choices by least cost per freed byte until the step fits."""
    chosen = [
        min(range(len(s.choices)), key=lambda i, s=s: (s.choices[i].cost, s.choices[i].held_bytes))
        for s in stages
    ]
    while peak_of(stages, chosen, head_bytes=head_bytes) > budget_bytes:
        changes = []
        for position, stage in enumerate(stages):
            now = stage.choices[chosen[position]]
            changes += [
                ((choice.cost - now.cost) / (now.held_bytes - choice.held_bytes), position, index)
                for index, choice in enumerate(stage.choices)
                if choice.held_bytes < now.held_bytes
            ]
        if not changes:
            return None
        _, position, index = min(changes)
        chosen[position] = index
    cost = sum(stage.choices[index].cost for stage, index in zip(stages, chosen, strict=True))
    return Solution(tuple(chosen), peak_of(stages, chosen, head_bytes=head_bytes), cost)


@pytest.mark.parametrize(
    "saboteur", [ignores_transient, ignores_standing, ignores_head, rounds_down]
)
def test_a_solver_that_forgets_bytes_is_above_the_budget(saboteur):
    assert any("with a budget of" in fault for fault in faults(saboteur, 100).values())


def test_a_greedy_solver_costs_more_than_the_best_plan_or_finds_none():
    found = faults(greedy_by_cost_per_byte, 100).values()
    assert any("and the least is" in fault for fault in found)
    assert any(fault.startswith("found None") for fault in found)
    assert not any("with a budget of" in fault for fault in found)


# Chains as large as real ones.


def test_large_chains_are_within_the_budget_and_use_97_percent_of_one_that_binds():
    """Take budgets that bind: the cheapest choices do not fit and some others do.

    A plan may leave what no single block can use: with 24 blocks of 20 choices that is far less
    than 3%. A chain of few blocks, or with coarse menus, may leave more, and has no bound here.
    """
    num_binding, least_used = 0, 1.0
    for seed in range(200):
        stages, head = large_chain(seed, num_choices=20)
        draw = random.Random(-seed)
        most = peak_of(stages, [len(stage.choices) - 1 for stage in stages], head_bytes=head)
        budget = int(most * draw.uniform(0.05, 1.1))
        found = solve(stages, budget, head_bytes=head)
        if found is None:
            assert least_peak(stages, head_bytes=head).peak_bytes > budget
            continue
        assert found.peak_bytes == peak_of(stages, found.chosen, head_bytes=head) <= budget
        if most > budget:
            num_binding, least_used = num_binding + 1, min(least_used, found.peak_bytes / budget)
        else:
            assert found.cost == 0.0
    assert num_binding >= 120
    assert least_used >= 0.97


def least_cost_by_price(stages, room):
    """Compute a lower bound on the cost of all choices that hold at most `room` bytes.

    For any price of a byte it is the blocks' cost and held bytes at that price, less the room's.
    """

    def bound(price):
        cheapest = (
            min(choice.cost + price * choice.held_bytes for choice in stage.choices)
            for stage in stages
        )
        return sum(cheapest) - price * room

    return max(bound(10 ** (exponent / 50)) for exponent in range(-600, -350))


def test_large_plans_cost_at_most_2_percent_more_than_an_independent_bound():
    """Compare with a bound that ignores transient bytes, so it allows too many plans."""
    for seed in range(6):
        stages, _ = large_chain(seed)
        budget = int(sum(stage.choices[-1].held_bytes for stage in stages) * (0.3 + 0.1 * seed))
        found = solve(stages, budget + 2 * 10**9, head_bytes=2 * 10**9)
        assert found.cost <= 1.02 * least_cost_by_price(stages, budget)


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_200_blocks_with_77_choices_take_at_most_a_second_and_use_the_budget(share):
    stages, _ = large_chain(0, num_blocks=200)
    budget = int(sum(stage.choices[-1].held_bytes for stage in stages) * share)
    seconds = []
    for _ in range(3):
        start = time.process_time()  # CPU time of this process, whatever else the machine does
        found = solve(stages, budget, head_bytes=10**9)
        seconds.append(time.process_time() - start)
    assert 0.999 * budget <= found.peak_bytes <= budget
    assert min(seconds) <= 1.0


def test_equal_blocks_differ_only_as_far_as_they_must():
    """Change only some of the equal blocks; changing all would leave half of the budget."""
    stage = Stage(
        (Choice("keep", 600_000_007, 0, 0.0), Choice("again", 100_000_003, 400_000_001, 1.0))
    )
    for num_kept in (0, 1, 57, 120):
        budget = num_kept * 600_000_007 + (120 - num_kept) * 100_000_003 + 400_000_001
        found = solve([stage] * 120, budget)
        assert (found.cost, found.chosen.count(0)) == (120 - num_kept, num_kept)


# The least peak.


def test_the_least_peak_is_the_minimum_at_its_lowest_cost():
    for seed in range(300):
        stages, head, _ = small_chain(seed)
        plans, found = all_plans(stages, head), least_peak(stages, head_bytes=head)
        assert found.peak_bytes == min(plans) == peak_of(stages, found.chosen, head_bytes=head)
        assert found.cost == plans[min(plans)]


def test_the_least_peak_of_a_large_chain_is_exact_to_the_byte():
    stages, head = large_chain(1, num_blocks=64)
    found = least_peak(stages, head_bytes=head)
    assert solve(stages, found.peak_bytes, head_bytes=head).peak_bytes == found.peak_bytes
    assert solve(stages, found.peak_bytes - 1, head_bytes=head) is None


def test_the_choices_that_hold_least_need_not_have_the_least_peak():
    stages = [Stage((Choice("again", 1, 100, 0.0), Choice("keep", 50, 0, 0.0)))]
    assert least_peak(stages) == Solution((1,), 50, 0.0)


# One block, the head, no blocks, and wrong input.


def test_a_single_block_takes_its_cheapest_choice_that_fits():
    stages = [
        Stage(
            (Choice("keep", 90, 5, 0.0), Choice("some", 50, 20, 1.0), Choice("again", 10, 90, 2.0)),
            3,
        )
    ]
    assert solve(stages, 98) == Solution((0,), 98, 0.0)
    assert solve(stages, 97) == solve(stages, 73) == Solution((1,), 73, 1.0)
    assert solve(stages, 72) is None


def test_blocks_recompute_to_make_room_for_the_head():
    stages = [Stage((Choice("keep", 10, 0, 0.0), Choice("again", 1, 9, 1.0)))] * 4
    assert solve(stages, 60, head_bytes=20) == Solution((0, 0, 0, 0), 60, 0.0)
    assert solve(stages, 59, head_bytes=20).cost == 1.0
    assert solve(stages, 60, head_bytes=55).cost == 4.0
    assert solve(stages, 60, head_bytes=57) is None


def test_a_chain_of_no_blocks_holds_its_head():
    assert solve([], 10, head_bytes=10) == least_peak([], head_bytes=10) == Solution((), 10, 0.0)
    assert solve([], 9, head_bytes=10) is None


def test_choices_that_are_worse_in_everything_are_left_out():
    rows = [(1.0, 5, 5), (1.0, 5, 6), (1.0, 4, 9), (1.0, 5, 5)]
    assert sorted(unbeaten(rows)) == [0, 2]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Choice("keep", -1, 0, 0.0),
            "held_bytes of the choice 'keep' must be a whole number .* 0, got -1",
        ),
        (
            lambda: Choice("keep", 0, 1.5, 0.0),
            "transient_bytes of the choice 'keep' must be .* got 1.5: give",
        ),
        (
            lambda: Choice("keep", 0, 0, float("inf")),
            "the cost of the choice 'keep' is inf: give a finite number",
        ),
        (lambda: Stage(()), "a stage has no choices: give at least one"),
        (
            lambda: Stage((Choice("keep", 0, 0, 0.0),), -5),
            "standing_bytes of a stage must be .* got -5",
        ),
        (
            lambda: solve([], 0),
            "budget_bytes must be a whole number of at least 1, got 0: give it in bytes",
        ),
        (lambda: solve([], 2.5e9), "budget_bytes must be .* got 2500000000.0"),
        (lambda: solve([], True), "budget_bytes must be .* got True"),
        (lambda: solve([], 1, head_bytes=-1), "head_bytes must be .* got -1"),
        (lambda: least_peak([], head_bytes=-1), "head_bytes must be .* got -1"),
    ],
)
def test_wrong_input_is_refused_with_advice(make, message):
    with pytest.raises(ValueError, match=message):
        make()
