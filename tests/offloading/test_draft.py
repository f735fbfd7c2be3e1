"""A plan in lists: what is counted while it changes is what the layout and the replay of the same moves say."""

import math
import random
from dataclasses import replace

import pytest

from harness.layouts import everything_away
from harness.memory_problems import drawn, under
from hyper_parallel.offloading.schedule.problem import Problem, replay
from hyper_parallel.offloading.schedule.transfer_layout import Draft, Facts


def changed(draft: Draft, draw: random.Random) -> None:
    """Any change that the rules allow."""
    facts = draft.facts
    row = draw.randrange(len(draft.taken))
    if not draft.taken[row]:
        leave = draw.randint(facts.after[row], facts.until[row])
        fetch = draw.randint(max(leave + 1, facts.since[row]), facts.used[row])
        draft.join(row, draw.randint(facts.open[row], leave), leave, fetch)
        return
    leave, fetch = draft.leave[row], draft.fetch[row]
    match draw.randrange(4):
        case 0 if not facts.must[row]:
            draft.drop(row)
        case 1:
            draft.leave_at(row, draw.randint(facts.after[row], min(facts.until[row], fetch - 1)))
        case 2:
            draft.fetch_at(row, draw.randint(max(facts.since[row], leave + 1), facts.used[row]))
        case _:
            draft.store_at(row, draw.randint(facts.open[row], leave))


def tight(problem: Problem) -> Problem:
    """Two spaces, the first without room for all, so that storages go to the other one as others come and go."""
    small = replace(problem.spaces[0], bytes=sum(held.bytes for held in problem.held) // 3)
    return replace(problem, spaces=(small, *problem.spaces[1:]))


@pytest.mark.parametrize(
    "problem",
    [
        *(under(drawn(seed, 16, 30), 0.3) for seed in range(4)),
        tight(under(drawn(3, 16, 30, tiers=2), 0.6)),
    ],
)
def test_counts_what_layout_and_replay_do(problem: Problem) -> None:
    layout = everything_away(problem)
    facts, draw = Facts(problem, layout.gaps), random.Random(0)
    draft = Draft(facts, layout)
    for _ in range(60):
        before = draft.layout(layout).moves(problem)
        there = draft.copy()
        for _ in range(draw.randint(1, 3)):
            changed(there, draw)
        assert draft.layout(layout).moves(problem) == before
        found = there.layout(layout)
        moves = found.moves(problem)
        assert there.live.at.tolist() == found.live.at.tolist() == problem.profile(moves)
        replayed = replay(problem, moves)
        stall, _ = there.stall()
        assert stall == pytest.approx(replayed.stall, rel=1e-6, abs=1e-9 * facts.step)
        assert there.stall(stall * 1.001 + 1e-12)[0] == stall
        assert there.stall(stall * 0.999 - 1e-12)[0] == math.inf
        assert {*there.waits} <= {*there.rows}
        draft = there


def test_stays_and_comes_back_as_far_as_memory_allows() -> None:
    problem = under(drawn(1, 16, 30), 0.5)
    layout = everything_away(problem)
    draft = Draft(Facts(problem, layout.gaps), layout)
    moved = 0
    for row in draft.rows:
        leave, fetch = draft.leave[row], draft.fetch[row]
        last = draft.latest(row, fetch - 1)
        if last > leave:
            draft.leave_at(row, last)
            moved += 1
        assert draft.live.peak <= problem.budget
        if last < fetch - 1:
            draft.leave_at(row, last + 1)
            assert draft.live.peak > problem.budget
            draft.leave_at(row, last)
        least = max(draft.facts.since[row], draft.leave[row] + 1)
        first = draft.earliest(row, least)
        if first < fetch:
            draft.fetch_at(row, first)
            moved += 1
        assert draft.live.peak <= problem.budget
        if first > least:
            draft.fetch_at(row, first - 1)
            assert draft.live.peak > problem.budget
            draft.fetch_at(row, first)
    assert moved
