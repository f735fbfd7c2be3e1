"""Orders of steps whose micro-batches are of several kinds: complete, within memory, and short."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from step_timing import time_step

from hyper_parallel.errors import StrategyError
from hyper_parallel.program import TaskKind
from hyper_parallel.schedule import Action, Costs, DeadlockError, Schedule, time_schedule
from hyper_parallel.schedule.micro_batch_kinds import MicroBatchKind, StepTables
from hyper_parallel.schedule.step_order import step_schedule


def _drawn(draw: random.Random, ranks: int, kinds: int, most: int) -> list[MicroBatchKind]:
    """Kinds whose stages lie on some of the ranks, with several inputs to the last one."""
    made = []
    for _ in range(kinds):
        placement = tuple(sorted(draw.sample(range(ranks), draw.randint(1, ranks))))
        stages = len(placement)
        forward = {(one, stages - 1): draw.choice((0.0, 0.1)) for one in range(stages - 1)}
        forward |= {(one, one + 1): 0.0 for one in range(stages - 1) if draw.random() < 0.3}
        backward = {(t, s): seconds for (s, t), seconds in forward.items() if draw.random() < 0.8}
        saved = [draw.uniform(1, 3) for _ in range(stages)]
        costs = Costs(
            forward=tuple(draw.uniform(0.2, 2) for _ in placement),
            backward=tuple(4.0 for _ in placement),
            input=tuple(draw.uniform(0.0, 2) for _ in placement),
            weight=tuple(draw.uniform(0.0, 2) for _ in placement),
            saved=tuple(saved),
            released=tuple(draw.uniform(-1, one) for one in saved),
        )
        made.append(MicroBatchKind(costs, placement, forward, backward, draw.randint(1, most)))
    return made


def _check(kinds: list[MicroBatchKind], schedule: Schedule) -> None:
    """Each stage of each micro-batch's own kind runs forward and backward once, and no other."""
    tables = StepTables(kinds, schedule.ranks)
    wanted = {
        (rank, tables.first_stage[tables.kind_of[m]] + stage, m)
        for rank, own in enumerate(tables.stage)
        for m, stage in enumerate(own)
        if stage >= 0
    }
    found: dict[tuple[int, int, int], list[TaskKind]] = {}
    for rank, order in enumerate(schedule.orders):
        for action in order:
            found.setdefault((rank, action.stage, action.micro_batch), []).append(action.kind)
    assert found.keys() == wanted
    for ran in found.values():
        assert ran in (
            [TaskKind.FORWARD, TaskKind.BACKWARD],
            [TaskKind.FORWARD, TaskKind.INPUT, TaskKind.WEIGHT],
        )


@pytest.mark.parametrize("seed", range(60))
def test_a_step_is_complete_runs_as_it_was_listed_and_keeps_to_its_memory(seed: int) -> None:
    draw = random.Random(seed)
    ranks = draw.randint(1, 5)
    kinds = _drawn(draw, ranks, draw.randint(1, 4), 4)
    caps = [draw.uniform(0.5, 8) for _ in range(ranks)] if seed % 3 else None
    found = step_schedule(kinds, ranks, caps)
    _check(kinds, found.schedule)
    timed = time_step(kinds, found.schedule)
    assert timed.makespan == pytest.approx(found.makespan)
    assert found.makespan >= found.bound * (1 - 1e-9)
    tables = StepTables(kinds, ranks)
    for rank, cap in enumerate(tables.caps_of_1f1b() if caps is None else caps):
        one = max(
            (
                kind.costs.saved[at] + max(0.0, -kind.costs.released[at])
                for kind in kinds
                for at, where in enumerate(kind.placement)
                if where == rank
            ),
            default=0.0,
        )
        assert timed.peaks[rank] <= max(cap, one) * (1 + 1e-6)


def test_it_depends_on_its_arguments_alone() -> None:
    kinds = _drawn(random.Random(3), 4, 3, 5)
    assert step_schedule(kinds, 4) == step_schedule(list(kinds), 4)


def test_one_kind_in_a_chain_is_timed_as_a_pipeline() -> None:
    draw = random.Random(7)
    forward, back, weight = (tuple(draw.uniform(0.5, 2) for _ in range(4)) for _ in range(3))
    both = tuple(a + b for a, b in zip(back, weight, strict=True))
    costs = Costs(forward=forward, backward=both, input=back, weight=weight, transfers=(0.1, 0.2, 0.1))
    kinds = [MicroBatchKind.chain(costs, range(4), 6)]
    found = step_schedule(kinds, 4)
    # A whole backward pass sends the gradients of its inputs before it computes those of its weights.
    halves = {TaskKind.BACKWARD: (TaskKind.INPUT, TaskKind.WEIGHT)}
    orders = tuple(
        tuple(replace(one, kind=kind) for one in order for kind in halves.get(one.kind, (one.kind,)))
        for order in found.schedule.orders
    )
    # Transfers over one border follow one another in `time_schedule`; here they are shorter than any action.
    timed = time_schedule(replace(found.schedule, orders=orders), costs)
    assert time_step(kinds, found.schedule).makespan == pytest.approx(timed.makespan, rel=1e-9)


def _shortest(kinds: list[MicroBatchKind], ranks: int) -> float:
    """Over all orders of each rank, with whole backward passes."""
    tables = StepTables(kinds, ranks)
    actions = [
        [
            Action(kind, tables.first_stage[tables.kind_of[m]] + stage, m)
            for m, stage in enumerate(own)
            if stage >= 0
            for kind in (TaskKind.FORWARD, TaskKind.BACKWARD)
        ]
        for own in tables.stage
    ]
    best = float("inf")
    for orders in itertools.product(*(itertools.permutations(one) for one in actions)):
        try:
            schedule = Schedule("all", tables.placement, orders, tables.micro_batches)
            best = min(best, time_step(kinds, schedule).makespan)
        except DeadlockError:
            continue
    return best


@pytest.mark.parametrize("seed", range(3))
def test_small_steps_are_near_the_best_of_all_orders(seed: int) -> None:
    """Two ranks and three micro-batches; splitting backward passes may even be shorter than all of these orders."""
    draw = random.Random(seed)
    kinds = []
    for count, both in ((1, True), (1, False), (1, True)):
        stages = 2 if both else 1
        times = [tuple(draw.uniform(0.3, 2) for _ in range(stages)) for _ in range(3)]
        whole = tuple(a + b for a, b in zip(times[1], times[2], strict=True))
        costs = Costs(forward=times[0], backward=whole, input=times[1], weight=times[2])
        kinds.append(MicroBatchKind.chain(costs, (0, 1) if both else (1,), count))
    best = _shortest(kinds, 2)
    found = step_schedule(kinds, 2, [99.0, 99.0])
    assert found.bound <= best * (1 + 1e-9)
    assert found.makespan <= best * 1.1


def test_two_encoders_do_not_wait_for_each_other() -> None:
    costs = Costs(forward=(1.0, 1.0, 1.0), backward=(2.0,) * 3, input=(1.0,) * 3, weight=(1.0,) * 3)
    apart = MicroBatchKind(costs, (0, 1, 2), {(0, 2): 0.0, (1, 2): 0.0}, {(2, 0): 0.0, (2, 1): 0.0})
    chain = MicroBatchKind.chain(costs, (0, 1, 2))
    assert step_schedule([apart], 3).makespan == pytest.approx(5.0)
    assert step_schedule([chain], 3).makespan == pytest.approx(7.0)


def test_what_has_no_gradients_to_send_back_is_done_when_it_has_run() -> None:
    """An encoder that is not trained gets no gradients, and the language model does not wait for it at the end."""
    costs = Costs(forward=(1.0, 1.0), backward=(0.0, 2.0), input=(0.0, 1.0), weight=(0.0, 1.0))
    frozen = MicroBatchKind(costs, (0, 1), {(0, 1): 0.0}, {}, 4)
    assert step_schedule([frozen], 2, [9.0, 9.0]).makespan == pytest.approx(1 + 4 * 3)


def test_kinds_one_after_the_other_take_longer_than_mixed() -> None:
    """A kind that needs the encoder alone for long, and one that needs the language model alone."""
    images = MicroBatchKind.chain(
        Costs(forward=(2.0, 1.0), backward=(4.0, 2.0), input=(0.0, 1.0), weight=(4.0, 1.0)), (0, 1), 4
    )
    text = MicroBatchKind.chain(Costs(forward=(3.0,), backward=(6.0,), input=(3.0,), weight=(3.0,)), (1,), 2)
    caps = [9.0, 9.0]
    together = step_schedule([images, text], 2, caps).makespan
    apart = step_schedule([images], 2, caps).makespan + step_schedule([text], 2, caps).makespan
    assert together <= 0.8 * apart


def test_wrong_kinds_are_refused() -> None:
    one = Costs.even(2)
    with pytest.raises(StrategyError, match="needs a rank of its own"):
        MicroBatchKind.chain(one, (0, 0))
    with pytest.raises(StrategyError, match="forward passes give to later stages"):
        MicroBatchKind(one, (0, 1), {(1, 0): 0.0}, {})
    with pytest.raises(StrategyError, match="name ranks below 1"):
        step_schedule([MicroBatchKind.chain(one, (0, 1))], 1)
    with pytest.raises(StrategyError, match="has 2 stages"):
        time_step([MicroBatchKind.chain(one, (0, 1), 2)], Schedule("x", (0, 1), ((), ()), 1))
