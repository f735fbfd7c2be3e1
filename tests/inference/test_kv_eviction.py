"""Predicted next use: what is used often stays, a prefix goes after its continuations, and memory is bounded."""

from __future__ import annotations

from hyper_parallel.inference.kv_cache.tiers import PredictedUse


def test_a_prefix_that_is_used_often_stays_and_its_continuations_go_first() -> None:
    policy = PredictedUse(most=500)
    for number in range(600):
        keys = [("system", number % 4, 0), ("system", number % 4, 1), ("question", number)]
        policy.used(keys)
        for key in keys:
            if number < 4:
                policy.entered(key)
    assert len(policy._lives) <= 500
    question, system = ("question", 598), ("system", 2, 1)
    assert policy.index(system) > 4 * policy.index(question)
    # Though the question was used later, it goes first.
    assert policy.first({system: None}, [question]) == question
    # Of one prompt, the last page.
    assert policy.first({("system", 3, 0): None, ("system", 3, 1): None}, []) == ("system", 3, 1)
