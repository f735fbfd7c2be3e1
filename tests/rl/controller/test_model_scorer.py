"""Every answer that a reward model is asked about has one reward, whatever is lost, dropped or begun anew."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.rl_runs import rl_config
from hyper_parallel.rl.controller.scorer_kinds import ModelScorer
from hyper_parallel.rl.sample import Sample

SIZE = 3
OPERATIONS = (*["submit"] * 5, "take", "take", "give", "lose", "drop", "resume")


def scorer(staleness: int) -> ModelScorer:
    return ModelScorer(rl_config("run", rl={"group": SIZE, "staleness": staleness}).rl, 0.5)


def answer(ticket: int, place: int, text: str = "") -> Sample:
    sizes: dict[str, Any] = dict.fromkeys(("prompt", "tokens", "logprobs", "versions", "drawn"), ())
    return Sample(
        ticket=ticket, place=place, row=ticket, ended=True, text=text or f"{ticket}.{place}", **sizes
    )


def submit(one: ModelScorer, ticket: int, place: int) -> None:
    one.submit(answer(ticket, place), {"prompt": "p"})


def score(text: str) -> float:
    ticket, _, place = text.partition(".")
    return int(ticket) + int(place) / 10


@given(st.data(), st.sampled_from([0, 1]))
def test_one_reward_each(data: st.DataObject, staleness: int) -> None:
    own = scorer(staleness)
    order = data.draw(st.permutations([(ticket, place) for ticket in range(4) for place in range(SIZE)]))
    expected: set[tuple[int, int]] = set()
    dropped: set[int] = set()
    got: dict[tuple[int, int], float | None] = {}
    asked: Any = None
    left = list(order)

    def give() -> None:
        nonlocal asked
        for one in own.give([[score(text) for _, text in group] for group in asked]):
            if one.ticket in dropped:
                continue
            assert (one.ticket, one.place) not in got
            got[one.ticket, one.place] = one.reward
        asked = None

    def take() -> None:
        nonlocal asked
        count = own.waiting
        asked = own.take()
        assert sum(map(len, asked)) == count
        if staleness == 0:
            for group in asked:
                texts = [text for _, text in group]
                assert texts == [f"{texts[0][0]}.{place}" for place in range(SIZE)]

    for operation in data.draw(st.lists(st.sampled_from(OPERATIONS), min_size=15, max_size=40)):
        if operation == "submit" and left:
            ticket, place = left.pop()
            if ticket not in dropped:
                submit(own, ticket, place)
                expected.add((ticket, place))
        elif operation == "take" and asked is None:
            take()
        elif operation == "give" and asked is not None:
            give()
        elif operation == "lose":
            if asked is None:
                take()
            own.ask_again()
            asked = None
        elif operation == "drop":
            ticket = data.draw(st.integers(0, 3))
            own.drop(ticket, range(SIZE))
            assert all(key.ticket != ticket for key, _, _ in own._waiting)
            dropped.add(ticket)
            expected = {one for one in expected if one[0] != ticket or one in got}
        elif operation == "resume":
            own.begin_anew()
            assert own.pending == 0
            # All of it comes again, with the same tickets.
            asked, left, expected, dropped = None, list(order), set(), set()
            got.clear()
    while left:
        ticket, place = left.pop()
        if ticket not in dropped:
            submit(own, ticket, place)
            expected.add((ticket, place))
    for _ in range(2):
        if asked is not None:
            give()
        take()
    give()
    assert own.pending == 0
    assert {key: value for key, value in got.items() if key[0] not in dropped} == {
        key: pytest.approx(score(f"{key[0]}.{key[1]}")) for key in expected if key[0] not in dropped
    }
