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

import argparse
import gc
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from measure import paired_ratio, without_notes, write
from transformers import AutoModelForCausalLM, GenerationConfig, Qwen3MoeConfig
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from hyper_parallel import Generator
from hyper_parallel.inference.weights import streamed_experts, units

MODEL: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "vocab_size": 2048,
    "max_position_embeddings": 256,
}
SHORT = {**MODEL, "hidden_size": 64, "moe_intermediate_size": 64, "num_hidden_layers": 4, "num_experts": 8}
WAYS = ("whole projections", "chosen experts", "on the host")
BATCHES = (1, 8, 64)
PAGE = "<!-- written by benchmarks/generate_experts.py -->"
DOCS = Path(__file__).parents[1] / "docs" / "inference-memory.md"


def saved(config: Mapping[str, Any], folder: Path) -> None:
    """Write a model with new weights; no token ends an answer."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(
        Qwen3MoeConfig(**config, eos_token_id=None, bos_token_id=None), dtype=torch.float32
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0, eos_token_id=None)
    model.save_pretrained(folder)


@contextmanager
def a_way(name: str) -> Iterator[None]:
    """Inside, a Generator that is made keeps its experts like this."""
    with ExitStack() as stack:
        if name == "whole projections":
            stack.enter_context(mock.patch.object(units, "stacked_experts", return_value=0))
        if name == "chosen experts":
            stack.enter_context(mock.patch.object(streamed_experts, "HOST_TOKENS", 0))
        yield


def compared(folder: Path, tier: str, batch: int, tokens: int, rounds: int) -> dict[str, Any]:
    """One tier and number of requests at once; a first round is not counted. With `rounds` 0 it is all there is."""
    draws = torch.Generator().manual_seed(batch)
    work = [torch.randint(4, 256, (8,), generator=draws).tolist() for _ in range(batch)]
    ways = [way for way in WAYS if tier == "host" or way != "on the host"]
    with ExitStack() as stack:
        made: dict[str, Generator] = {}
        for way in ways:
            where = str(folder / f"spill-{way}".replace(" ", "-")) if tier == "flash" else "1GiB"
            with a_way(way):
                made[way] = stack.enter_context(
                    Generator(
                        folder / "model",
                        memory={"device": "4GiB", tier: where},
                        max_tokens=tokens,
                        batch=batch,
                        logprobs=True,
                        page=16,
                    )
                )
        floors = {way: generator.smallest_budget(work) for way, generator in made.items()}
        budget = int(1.1 * floors["whole projections"])
        seconds: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
        runs: dict[str, dict[str, Any]] = {}
        answers: dict[str, Any] = {}
        first = 1 if rounds else 0
        for generator in made.values():
            assert generator.memory is not None
            generator.memory.budget = budget
        for turn in range(first + max(rounds, 1)):
            for way, generator in made.items():
                memory = generator.memory
                assert memory is not None
                if not turn:
                    generator(work)  # makes the plan
                gc.collect()
                passes, read = generator.passes, memory.stream.tiers.read[tier]
                began = time.perf_counter(), time.process_time()
                answers[way] = [(one.tokens, one.logprobs) for one in generator(work)]
                if turn >= first:
                    seconds[way].append((time.perf_counter() - began[0], time.process_time() - began[1]))
                passes = generator.passes - passes
                assert memory.plan is not None
                runs[way] = {
                    "floor": floors[way],
                    "passes": passes,
                    "requests_at_once": memory.plan.requests,
                    "read_by_a_pass": (memory.stream.tiers.read[tier] - read) / passes,
                }
        for way in ways:
            runs[way]["same"] = answers[way] == answers["whole projections"]
            for at, kind in enumerate(("clock", "processor")):
                own, other = ([one[at] for one in seconds[which]] for which in (way, "whole projections"))
                runs[way][f"{kind}_s"] = statistics.median(own)
                runs[way][f"faster_{kind}"] = paired_ratio(other, own)
        assert made["whole projections"].memory is not None
        weights = made["whole projections"].memory._sizes.weights
    return {"budget": budget, "weights": weights, "runs": runs}


def table(rows: Mapping[str, Any], load: float, rounds: int) -> str:
    """The table of the page."""
    lines = [
        f"Rounds: {rounds}. Load of the machine's {os.cpu_count()} cores before it began: {load:.1f}.",
        "",
        "| | smallest budget | at once | read by a pass | clock | processor | faster (clock) | faster (processor) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row, found in rows.items():
        for way, one in found["runs"].items():
            first, second = (one["faster_clock"], one["faster_processor"])
            beside = ("1", "1") if way == WAYS[0] else (_interval(first), _interval(second))
            lines.append(
                f"| {row}: {way} | {one['floor'] / 2**20:.1f} MiB | {one['requests_at_once']} "
                f"| {one['read_by_a_pass'] / 2**20:.1f} MiB | {one['clock_s']:.2f} s | {one['processor_s']:.2f} s "
                f"| {beside[0]} | {beside[1]} |"
            )
    return "\n".join(lines)


def _interval(ratio: Mapping[str, float]) -> str:
    return f"{ratio['ratio']:.2f}x ({ratio['low']:.2f} to {ratio['high']:.2f})"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write; 1 where an answer differs in a bit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--short", action="store_true", help="a tiny model, once, for tests")
    given = parser.parse_args(arguments)
    rounds = 0 if given.short else given.rounds
    load = os.getloadavg()[0]
    torch.set_num_threads(1)
    set_verbosity_error()
    disable_progress_bar()
    began = time.perf_counter()
    folder = Path(tempfile.mkdtemp(prefix="generate-experts-", dir=Path(__file__).parent))
    rows: dict[str, Any] = {}
    try:
        with without_notes():
            saved(SHORT if given.short else MODEL, folder / "model")
            for tier in ("flash", "host"):
                for batch in BATCHES[:2] if given.short else BATCHES:
                    name = f"{tier}, {batch} requests"
                    rows[name] = compared(folder, tier, batch, 4 if given.short else 8, rounds)
                    for way, one in rows[name]["runs"].items():
                        print(
                            f"{name}: {way}: {one['clock_s']:.3f} s, {one['read_by_a_pass'] / 2**20:.2f} MiB a "
                            f"pass, {one['passes']} passes, {one['requests_at_once']} at once",
                            flush=True,
                        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    same = all(one["same"] for row in rows.values() for one in row["runs"].values())
    print(f"{time.perf_counter() - began:.0f} s; {'the same bits' if same else 'BITS DIFFER'}")
    if not given.short:
        print(write("generate_experts", {"load": load, "rounds": rounds, "same_bits": same, "rows": rows}))
        before, after = DOCS.read_text().split(f"{PAGE}\n")
        end = "<!-- end -->"
        DOCS.write_text(f"{before}{PAGE}\n{table(rows, load, rounds)}\n{end}{after.split(end, 1)[1]}")
    return int(not same)


if __name__ == "__main__":
    sys.exit(main())
