"""A mixture that was parallelized for one device generates as the plain one: its experts' forward is wrapped twice."""

from __future__ import annotations

import copy
from typing import Any

import hyper_parallel as hp
from hyper_parallel.inference import Generator
from inference.small_models import prompts, small


def test_the_same_tokens() -> None:
    plain: Any = small("mixtral")
    expected = [one.tokens for one in Generator(copy.deepcopy(plain), max_tokens=6)(prompts(plain))]
    model = hp.parallelize(copy.deepcopy(plain), hp.Strategy())
    assert [one.tokens for one in Generator(model, max_tokens=6)(prompts(plain))] == expected
