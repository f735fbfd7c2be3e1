"""A run whose requests come one by one gives the answers of one that had them all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hyper_parallel.config.generate import inference_settings
from hyper_parallel.inference.engine import Engine
from hyper_parallel.inference.kv_cache.sizes import KVCacheSizes
from hyper_parallel.inference.request import Completion, Request, Running
from inference.opened_tiers import opened
from inference.small_models import prompts, small


def engine_of(name: str) -> Engine:
    model: Any = small(name)
    return Engine(model, 16, layers=model.config.num_hidden_layers, eos=frozenset())


def requests_of(engine: Engine, tokens: int = 9) -> tuple[list[Request], Any]:
    settings = inference_settings(
        {"temperature": 0.8, "max_tokens": tokens, "logprobs": "drawn", "page": 16, "batch": 3}
    )
    given = prompts(engine.model)
    requests = [
        Request(ids=tuple(ids), sampling=settings.sampling(), seed=5, row=row)
        for row, ids in enumerate(given)
    ]
    return requests, settings


def text_of(ids: list[int]) -> str:
    return " ".join(map(str, ids))


def all_of(
    engine: Engine, requests: list[Request], settings: Any, later: int, most: int
) -> dict[int, Completion]:
    """Answers where all but the first come after `later` lists of at most `most` passes."""
    found: dict[int, Completion] = {}
    with engine.open_run(requests, settings, text_of) as run:
        run.submit(0, requests[0])
        for _ in range(later):
            found.update(run.advance(most))
        for number, one in enumerate(requests[1:], 1):
            run.submit(number, one)
        while len(run):
            found.update(run.advance(most))
    return found


def test_the_same_answers_as_of_a_run_with_all_requests() -> None:
    engine = engine_of("llama")
    requests, settings = requests_of(engine)
    expected = dict(engine.run(requests, settings, text_of))
    assert all_of(engine, requests, settings, later=3, most=2) == expected
    assert len({tuple(one.tokens) for one in expected.values()}) > 1


def test_answers_go_on_in_another_run() -> None:
    """Tokens are drawn by their place in the answer, whichever run draws them."""
    engine = engine_of("llama")
    requests, settings = requests_of(engine)
    expected = {number: one.tokens for number, one in engine.run(requests, settings, text_of)}
    with engine.open_run(requests, settings, text_of) as run:
        for number, one in enumerate(requests):
            run.submit(number, one)
        found = dict(run.advance(4))
        left = run.withdraw()
    assert not found
    assert any(tokens for _, _, tokens in left)
    with engine.open_run(requests, settings, text_of) as run:
        for number, request, tokens in left:
            run.submit(
                number,
                replace(request, ids=requests[number].ids + tuple(tokens), answered=len(tokens)),
            )
        while len(run):
            found.update(run.advance(50))
    assert {number: one.tokens for number, one in found.items()} == expected


def test_requests_that_are_swapped_out_are_withdrawn(tmp_path: Path) -> None:
    engine = engine_of("llama")
    requests, settings = requests_of(engine, tokens=40)
    dict(engine.run(requests, settings, text_of))
    engine.cache.configure(KVCacheSizes(device=7, host=60), opened(("host",), tmp_path))
    with engine.open_run(requests, settings, text_of) as run:
        for number, one in enumerate(requests):
            run.submit(number, one)
        found: dict[int, Completion] = {}
        while len(run) and not engine.cache.report.swapped:
            found.update(run.advance(1))
        assert engine.cache.report.swapped
        assert len(run) == len(requests) - len(found)
        left = run.withdraw()
    assert sorted([*found, *(number for number, _, _ in left)]) == list(range(len(requests)))


def test_what_is_taken_is_told_with_the_log_probability_of_the_draw() -> None:
    """Of the distribution at the temperature, the token that ends an answer included."""
    engine = engine_of("llama")
    requests, settings = requests_of(engine)
    plain = dict(engine.run(requests, settings, text_of))
    engine.eos = frozenset({plain[1].tokens[4]})
    told: dict[int, list[tuple[int, float]]] = {}

    def taken(one: Running, token: int, logprob: float | None) -> None:
        assert logprob is not None
        told.setdefault(one.number, []).append((token, logprob))

    engine.taken = taken
    found = dict(engine.run(requests, settings, text_of))
    assert found[1].finish == "stop"
    for number, one in found.items():
        tokens = [token for token, _ in told[number]]
        assert tokens[: len(one.tokens)] == one.tokens
        assert len(tokens) == len(one.tokens) + (one.finish == "stop")
        ids = torch.tensor([[*requests[number].ids, *tokens]])
        with torch.no_grad():
            logits = engine.model(ids).logits[0, len(requests[number].ids) - 1 : -1] / 0.8
        exact = logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]
        torch.testing.assert_close(
            torch.tensor([logprob for _, logprob in told[number]]), exact, atol=5e-5, rtol=0
        )


def test_some_requests_are_given_up() -> None:
    """The others' answers are what they are without them, and all pages come back."""
    engine = engine_of("llama")
    requests, settings = requests_of(engine)
    expected = dict(engine.run(requests, settings, text_of))
    with engine.open_run(requests, settings, text_of) as run:
        for number, one in enumerate(requests):
            run.submit(number, one)
        found = dict(run.advance(2))
        run.cancel({0, 2})
        while len(run):
            found.update(run.advance(50))
    assert found == {number: one for number, one in expected.items() if number not in (0, 2)}


def test_all_passes_of_a_call_are_computed() -> None:
    """A call does not end with the first answer that does."""
    engine = engine_of("llama")
    requests, settings = requests_of(engine)
    expected = dict(engine.run(requests, settings, text_of))
    assert len(requests) > settings.batch, "some end before others"
    with engine.open_run(requests, settings, text_of) as run:
        for number, one in enumerate(requests):
            run.submit(number, one)
        assert dict(run.advance(10_000)) == expected
        assert not run.advance(1)
