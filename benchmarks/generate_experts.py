"""Experts of a mixture within a byte budget: python benchmarks/generate_experts.py [--rounds 5] [--short]

One mixture in float32 with one thread, weights in flash or in host memory, prompts of 8 tokens and greedy answers, with
1, 8 and 64 requests at once. Three ways take turns in one process, each with the same budget:

- whole projections: what a byte budget did before, all experts of a layer as one module (here only);
- chosen experts: of a layer those that its tokens choose, read to the device one by one;
- on the host: the same, but experts that few tokens reach are computed with in the tier's memory. Not with flash.

The budget is 1.1 times the smallest one of whole projections. Bytes are those that a pass reads from the tier, on
average. Tokens and log-probabilities must be the same. Writes ``benchmarks/results/generate_experts.json`` and the
table of ``docs/inference-memory.md``, unless `--short`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import torch
from commandline import run
from generation import KINDS, circumstances, medians, ratios, turns
from measure import load, quiet, ratio_text, without_notes
from pages import Benchmark, table
from processes import scratch
from shapes import llama, new_model, random_prompts

from hyper_parallel import Generator
from hyper_parallel.inference.weights import away_weight, units

MODEL: dict[str, Any] = {
    **llama(256, 4, 8, inner=512, kv=2, vocabulary=2048, positions=256, head_dim=32),
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 512,
    "num_experts": 16,
    "num_experts_per_tok": 2,
}
SHORT = {**MODEL, "hidden_size": 64, "moe_intermediate_size": 64, "num_experts": 8}
WAYS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "whole projections": lambda: mock.patch.object(units, "stacked_experts", return_value=0),
    "chosen experts": lambda: mock.patch.object(away_weight, "HOST_TOKENS", 0),
    "on the host": nullcontext,
}
"""Inside of each, a Generator that is made keeps its experts like this."""
WHOLE = "whole projections"
BATCHES = (1, 8, 64)
Pass = list[tuple[list[int], Any]]
"""Tokens and log-probabilities of each answer."""


def answered(generator: Generator, work: list[list[int]], tier: str, told: dict[str, Any]) -> Pass:
    """Answer once, and tell what its passes were."""
    memory = generator.memory
    assert memory is not None
    passes, read = generator.passes, memory.stream.tiers.read[tier]
    answers = [(one.tokens, one.logprobs) for one in generator(work)]
    assert memory.plan is not None
    passes = generator.passes - passes
    told.update(
        passes=passes,
        requests_at_once=memory.plan.requests,
        read_by_a_pass=(memory.stream.tiers.read[tier] - read) / passes,
    )
    return answers


def compared(folder: Path, tier: str, batch: int, tokens: int, rounds: int) -> dict[str, Any]:
    work = random_prompts([8] * batch, 256, seed=batch, first=4)
    made: dict[str, Generator] = {}
    with ExitStack() as stack:
        for way, inside in WAYS.items():
            if tier == "flash" and way == "on the host":
                continue
            where = str(folder / f"spill-{way}".replace(" ", "-")) if tier == "flash" else "1GiB"
            settings: dict[str, Any] = {"max_tokens": tokens, "batch": batch, "logprobs": True, "page": 16}
            with inside():
                generator = Generator(folder / "model", memory={"device": "4GiB", tier: where}, **settings)
            made[way] = stack.enter_context(generator)
        runs: dict[str, dict[str, Any]] = {
            way: {"floor": one.smallest_budget(work)} for way, one in made.items()
        }
        budget = int(1.1 * runs[WHOLE]["floor"])
        for generator in made.values():
            assert generator.memory is not None
            generator.memory.budget = budget
            generator(work)  # makes the plan
        passes = {way: partial(answered, one, work, tier, runs[way]) for way, one in made.items()}
        taken = turns(passes, rounds)
        for way, own in taken.items():
            faster = ratios(taken[WHOLE], own)
            runs[way] |= medians(own) | {f"faster_{kind}": ratio for kind, ratio in faster.items()}
            runs[way]["same"] = own[-1].result == taken[WHOLE][-1].result
        memory = made[WHOLE].memory
        assert memory is not None
        weights = memory._sizes.weights
    return {"budget": budget, "weights": weights, "runs": runs}


def page(result: Mapping[str, Any]) -> Iterator[str]:
    yield from circumstances(result)

    def row(name: str, way: str, one: Mapping[str, Any]) -> Iterator[object]:
        yield f"{name}: {way}"
        yield from (f"{one['floor'] / 2**20:.1f} MiB", one["requests_at_once"])
        yield f"{one['read_by_a_pass'] / 2**20:.1f} MiB"
        yield from (f"{one[f'{kind}_s']:.2f} s" for kind in KINDS)
        yield from ("1" if way == WHOLE else ratio_text(one[f"faster_{kind}"]) for kind in KINDS)

    yield from table(
        " | smallest budget | at once | read by a pass | clock | processor | faster (clock) | faster (processor)",
        (tuple(row(name, *one)) for name, found in result["rows"].items() for one in found["runs"].items()),
    )


BENCHMARK = Benchmark("generate_experts", {"inference-memory.md": page})


def main(rounds: int = 5, short: Annotated[bool, "a tiny model, once, for tests"] = False) -> bool:
    """Measure, print, and write; whether an answer differs in a bit."""
    rounds = 0 if short else rounds
    before = load()
    torch.set_num_threads(1)
    rows: dict[str, Any] = {}
    with without_notes(), scratch(on_disk=True) as folder:
        new_model(SHORT if short else MODEL).save_pretrained(folder / "model")
        for tier in ("flash", "host"):
            for batch in BATCHES[:2] if short else BATCHES:
                name = f"{tier}, {batch} requests"
                rows[name] = compared(folder, tier, batch, 4 if short else 8, rounds)
                for way, one in rows[name]["runs"].items():
                    print(f"{name}: {way}: {one}", flush=True)
    same = all(one["same"] for row in rows.values() for one in row["runs"].values())
    print("the same bits" if same else "BITS DIFFER")
    if not short:
        BENCHMARK.keep({"load": before, "rounds": rounds, "same_bits": same, "rows": rows})
    return not same


if __name__ == "__main__":
    quiet()
    run(main)
