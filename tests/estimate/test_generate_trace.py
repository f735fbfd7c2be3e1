"""A simulated run has the passes of a real one, and keeps idle contexts in a tier."""

from __future__ import annotations

from typing import Any

import pytest
from inference_models import small_llama

from hyper_parallel import Generator
from hyper_parallel.cluster import Cluster
from hyper_parallel.config.inference import GenerationWorkload, Inference
from hyper_parallel.errors import ConfigError
from hyper_parallel.estimate.generate_trace import SimulatedRun, simulate_run
from hyper_parallel.simulator.generation import TierSplit
from hyper_parallel.simulator.generation.pass_cost import PassPricer
from hyper_parallel.simulator.generation.shape_pass import of_shape
from hyper_parallel.workload.published import shape


def run(split: TierSplit | None = None, settings: dict[str, Any] | None = None, **work: Any) -> SimulatedRun:
    """Of Llama 3 8B on an H100."""
    pricer = PassPricer(of_shape(shape("llama-3-8b")), Cluster.named("h100x1"), split or TierSplit())
    return simulate_run(pricer, GenerationWorkload(**work), Inference(**(settings or {})))


@pytest.mark.parametrize(
    ("prompt", "answer", "requests", "shared", "settings"),
    [
        (70, 9, 7, 0, {"batch": 3}),
        (33, 5, 6, 32, {"batch": 6, "page": 16, "rows": 64}),
        (150, 4, 5, 96, {"batch": 2}),
    ],
)
def test_the_passes_are_those_of_a_run(
    prompt: int, answer: int, requests: int, shared: int, settings: dict[str, int]
) -> None:
    found = run(
        settings=settings, requests=requests, prompt_tokens=prompt, answer_tokens=answer, shared_tokens=shared
    )
    generator = Generator(small_llama(), **settings)
    ids = [[5] * shared + [10 + number] * (prompt - shared) for number in range(requests)]
    before = generator._engine.passes
    generator(ids, max_tokens=answer)
    assert found.passes == generator._engine.passes - before
    assert found.shared == generator.shared
    assert found.tokens == requests * answer


def test_idle_conversations_rest_in_the_tier() -> None:
    work = {
        "requests": 12,
        "prompt_tokens": 4096,
        "answer_tokens": 32,
        "turns": 3,
        "message_tokens": 512,
        "idle_seconds": 20.0,
        "rate": 1.0,
    }
    settings = {"batch": 4, "page": 256, "rows": 2048}
    here, away = run(settings=settings, **work), run(TierSplit(idle=True), settings, **work)
    assert here.tokens == away.tokens == 12 * 3 * 32
    assert away.cached < 0.5 * here.cached
    assert away.fetched > 0
    assert away.stored >= away.fetched / 2
    assert away.tier_peak > 0
    assert away.seconds <= 1.02 * here.seconds
    assert away.shared == here.shared > 0
    # Without room in the tier, prompts are computed again.
    pricer = PassPricer(of_shape(shape("llama-3-8b")), Cluster.named("h100x1"), TierSplit(idle=True))
    none = simulate_run(pricer, GenerationWorkload(**work), Inference(**settings), room=0.0)
    assert none.fetched == 0
    assert none.shared < away.shared


def test_what_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"inference\.pages is 2"):
        run(settings={"pages": 2}, prompt_tokens=200)
    with pytest.raises(ConfigError, match="more than the 200"):
        run(requests=100_000, prompt_tokens=100_000)
