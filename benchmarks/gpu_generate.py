"""Generation on one accelerator, and a rollout's log-probabilities beside the trainer's. Part of `gpu.py`."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from generate_throughput import drawn
from generation import Answers, Work, answered, continuous, differences, static
from measure import in_turns, paired_ratio, timed_on, without_notes
from rl_logprobs import gaps
from shapes import new_model

from hyper_parallel import Generator
from hyper_parallel.compat import Backend

TIE = 1e-4
"""Of the largest logit: two that are nearer may change places by rounding."""
GAP = 1e-4
"""Nats per token in float32."""
SIZE = 32
"""Of a static batch."""
PAGE = 256
"""Tokens of a page of `generate_batch`, the size of Transformers' kernels."""


def check_generation(
    device: torch.device,
    families: dict[str, dict[str, Any]],
    names: Iterable[str],
    policies: Iterable[str],
    longest: int,
) -> list[tuple[str, bool, str]]:
    """Greedy float32 tokens beside `generate`, and log-probabilities of what a rollout drew beside the trainer's."""
    checks = []
    for name in names:
        model = model_of(families[name], device, "float32")
        work = drawn(16, longest, int(families[name]["vocab_size"]))
        with without_notes():
            own, other = answered(Generator(model), work)(), static(model, work, 8)()
        found = differences(model, work, own, other)
        tied = found["largest_gap"] <= TIE * _largest_logit(model, work)
        note = f"{found['answers']} of 16 answers differ, by a tie of at most {found['largest_gap']:.1e}"
        checks.append((f"{name}: greedy tokens beside generate", tied, note))
    for family, gap in gaps("float32", device, policies):
        note = f"{gap['largest']:.1e} nats at most"
        checks.append((f"{family}: log-probabilities of a rollout", gap["largest"] < GAP, note))
    return checks


def measure_generation(
    backend: Backend,
    device: torch.device,
    fields: dict[str, Any],
    policies: Iterable[str],
    rounds: int,
    longest: int,
) -> dict[str, Any]:
    """Tokens per second in bfloat16 of `Generator`, static batches sorted by length, and `generate_batch`, in turn."""
    model = model_of(fields, device, "bfloat16")
    work = drawn(64, longest, int(fields["vocab_size"]))
    runs: dict[str, Callable[[], Answers]] = {
        "ours": answered(Generator(model), work),
        "static": static(model, work, SIZE),
        "continuous": continuous(model, work, PAGE),
    }
    found: dict[str, Any] = {"tokens": sum(work.lengths), "not_measured": {}}
    for name, run in list(runs.items()):
        try:
            with without_notes():
                run()
        except Exception as error:  # what the alternative needs may not be installed
            if name == "ours":
                raise
            found["not_measured"][name] = f"{type(error).__name__}: {error}".splitlines()[0]
            del runs[name]
    with without_notes():
        seconds = in_turns(runs, rounds, partial(timed_on, backend))
    for name, taken in seconds.items():
        median = statistics.median(taken)
        found[name] = {"s": median, "tokens_per_s": found["tokens"] / median}
        if name != "ours":
            found[name]["faster"] = paired_ratio(taken, seconds["ours"])
    return {**found, "rollout_and_trainer_bfloat16": dict(gaps("bfloat16", device, policies))}


def model_of(fields: dict[str, Any], device: torch.device, dtype: str) -> Any:
    """With new weights, and room for whole answers."""
    room = "n_positions" if fields["model_type"] == "gpt2" else "max_position_embeddings"
    return new_model({**fields, room: 1024}, dtype=dtype, device=str(device))


def _largest_logit(model: Any, work: Work) -> float:
    prompts: Sequence[list[int]] = work.prompts
    with torch.no_grad():
        return float(model(torch.tensor([prompts[0]], device=model.device)).logits.abs().max())
