"""Generation within a byte budget beside what others do: python benchmarks/generate_offload.py [--short]

One Llama in float32 with one thread, ragged requests (prompts and answers of different lengths), greedy. All take turns
in one process and have the same budget, prompts and tiers:

- weights on flash, three times the budget: ours (`Generator`), next-layer prefetch and FlexGen's zig-zag with static
  batches, and Accelerate's `disk_offload` under `generate`;
- weights in host memory: the same without Accelerate, whose offload to the host copies nothing on a CPU;
- keys and values in host memory: `TieredCache`, and the policies of `OffloadedCache`, `OffloadedStaticCache` and pages
  with LRU, each under `generate` with static batches; and `Generator`, with as many pages as the budget has;
- everything fits: `Generator` with a budget beside `Generator` without.

Real: `Generator`, `TieredCache`, `generate`, Accelerate. All other policies are implemented again on our tiers
(`generate_offload_weights`, `generate_offload_cache`), with the same copies, since Transformers' own need CUDA streams
and FlexGen has no Llama. Files of weights are read past the system's cache, or taken out of it after each pass
(Accelerate). Seconds are of the clock and of the processor. Tokens must be the same; an answer that differs is listed
with the distance of the two logits where it first does. Writes ``benchmarks/results/generate_offload.json`` and the
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
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from generate_offload_cache import policies
from generate_offload_weights import AccelerateDisk, Answers, StaticBatches, Work, generated
from measure import paired_ratio, without_notes, write
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import set_verbosity_error

import hyper_parallel as hp
from hyper_parallel import Generator

MODEL: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 10,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 2048,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
CACHED = {**MODEL, "num_hidden_layers": 8, "num_key_value_heads": 8}
"""With more keys and values for its weights."""
SHORT = {**MODEL, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 6, "vocab_size": 256}
SIZES = (1, 2, 3, 4, 6, 8, 12, 16)
"""Of static batches."""
PAGE = "<!-- written by benchmarks/generate_offload.py -->"
DOCS = Path(__file__).parents[1] / "docs" / "inference-memory.md"
Run = Callable[[], Answers]


def model_of(config: Mapping[str, Any]) -> Any:
    """With new weights; no token ends an answer."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**config, eos_token_id=None, bos_token_id=None)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0, eos_token_id=None)
    return model


def drawn(requests: int, prompts: tuple[int, int], answers: tuple[int, int]) -> Work:
    """Requests with lengths between those given."""
    draws = torch.Generator().manual_seed(7)
    sizes = torch.randint(prompts[0], prompts[1] + 1, (requests,), generator=draws).tolist()
    lengths = torch.randint(answers[0], answers[1] + 1, (requests,), generator=draws).tolist()
    return Work([torch.randint(4, 256, (size,), generator=draws).tolist() for size in sizes], lengths)


def ours(generator: Generator, work: Work) -> Run:
    """`Generator`, each request with its own length."""
    each = [generator.settings.model_copy(update={"max_tokens": length}) for length in work.lengths]

    def run() -> Answers:
        requests = [generator.request(ids, chosen) for ids, chosen in zip(work.prompts, each, strict=True)]
        found = dict(generator.run(requests))
        return [found[place].tokens for place in range(len(requests))]

    return run


def compared(model: Any, work: Work, runs: Mapping[str, Run], rounds: int) -> dict[str, Any]:
    """Take turns; of each the seconds, and the ratio to the first one's. A first round is not counted; with
    `rounds` 0 it is all there is."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    answers: dict[str, Answers] = {}
    first = 1 if rounds else 0
    for turn in range(first + max(rounds, 1)):
        for name, run in runs.items():
            gc.collect()
            clock, processor = time.perf_counter(), time.process_time()
            answers[name] = run()
            if turn >= first:
                found[name].append((time.perf_counter() - clock, time.process_time() - processor))
    own = next(iter(runs))
    result: dict[str, Any] = {}
    for name, pairs in found.items():
        result[name] = {
            "clock_s": statistics.median(one[0] for one in pairs),
            "processor_s": statistics.median(one[1] for one in pairs),
            "differences": differences(model, work, answers[own], answers[name]),
        }
        if name != own:
            result[name]["slower_than_ours"] = {
                kind: paired_ratio([one[at] for one in pairs], [one[at] for one in found[own]])
                for at, kind in enumerate(("clock", "processor"))
            }
    return result


def differences(model: Any, work: Work, own: Answers, other: Answers) -> list[float]:
    """Of each answer that differs: how near the two logits are where it first does."""
    gaps = []
    for prompt, one, two in zip(work.prompts, own, other, strict=True):
        assert len(one) == len(two)
        place = next((at for at, pair in enumerate(zip(one, two, strict=True)) if pair[0] != pair[1]), None)
        if place is not None:
            with torch.no_grad():
                logits = model(torch.tensor([prompt + one[:place]])).logits[0, -1]
            gaps.append(float((logits[one[place]] - logits[two[place]]).abs()))
    return gaps


def weights(model: Any, work: Work, folder: Path, rounds: int, flash: bool, share: float) -> dict[str, Any]:
    """Weights in one tier; the budget is a share of them."""
    total = sum(one.nbytes for one in model.parameters())
    budget = int(total * share)
    tier: dict[str, Any] = {"flash": folder / "spill"} if flash else {"host": 2 * total}
    with ExitStack() as stack:
        generator = stack.enter_context(
            Generator(folder / "model", memory={"device": budget, **{k: _plain(v) for k, v in tier.items()}})
        )
        runs = {"ours": ours(generator, work)}
        passes, read = {}, {}
        for name, blocks in (("next-layer prefetch", False), ("zig-zag", True)):
            place = {"flash": folder / f"spill-{blocks}"} if flash else tier
            sizes = SIZES if len(work.prompts) > 8 else (2,)
            static = StaticBatches(model, work, budget, sizes, (1, 2, 3, 4, 8) if blocks else (1,), **place)
            stack.callback(static.close)
            runs[name] = static
            passes[name], read[name] = static.passes, static.plan.read
            shape = f"{static.count} batches of {static.size}"
            print(f"  {name}: {shape}, {static.passes} passes of {static.plan.read >> 10} KiB", flush=True)
            held = {size: bytes_ for (size, count), bytes_ in static.held.items() if count == 1}
        if flash:
            files = folder / "accelerate"
            disk = AccelerateDisk(model, work, budget, files, held)
            runs["Accelerate disk_offload"] = disk
            passes["Accelerate disk_offload"], read["Accelerate disk_offload"] = disk.passes, total
        result = compared(model, work, runs, rounds)
        before = generator.passes
        runs["ours"]()
        plan = generator.memory.plan  # type: ignore[union-attr]
        assert plan is not None
        passes["ours"], read["ours"] = generator.passes - before, plan.read
        print(
            f"  ours: {plan.requests} requests, {passes['ours']} passes of {plan.read >> 10} KiB", flush=True
        )
        for name, one in result.items():
            one.update(passes=passes[name], read_by_a_pass=read[name])
    return {"budget": budget, "weights": total, "runs": result}


def keys_and_values(model: Any, work: Work, folder: Path, rounds: int, size: int) -> dict[str, Any]:
    """The KV cache in host memory: a budget of four layers of the longest static batch."""
    model.save_pretrained(folder / "cached")
    config = model.config
    token = 8 * config.num_key_value_heads * config.head_dim
    whole = size * work.longest * token * config.num_hidden_layers
    budget = 4 * whole // config.num_hidden_layers
    host = 4 * whole
    page = 32
    with Generator(folder / "cached", pages=budget // (page * token * config.num_hidden_layers)) as generator:
        runs = {
            "ours: Generator": ours(generator, work),
            "ours: TieredCache": lambda: generated(
                model, work, size, lambda: hp.TieredCache(model, device=budget, host=host)
            ),
        }
        for name, policy in policies(config, size, work.longest, budget, host).items():
            runs[name] = partial(generated, model, work, size, policy)
        result = compared(model, work, runs, rounds)
    return {"budget": budget, "keys_and_values": whole, "batch": size, "runs": result}


def fits(model: Any, work: Work, folder: Path, rounds: int) -> dict[str, Any]:
    """A budget that holds everything."""
    with Generator(folder / "model", memory={"device": "1GiB", "host": "256MiB"}) as generator:
        runs = {
            "without a budget": ours(Generator(folder / "model"), work),
            "with a budget": ours(generator, work),
        }
        return {"runs": compared(model, work, runs, rounds)}


def _plain(given: Any) -> Any:
    return str(given) if isinstance(given, Path) else given


def measured(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All rows."""
    short = given.short
    model = model_of(SHORT if short else MODEL)
    model.save_pretrained(folder / "model")
    ragged = drawn(5, (4, 40), (2, 6)) if short else drawn(16, (8, 96), (3, 20))
    contexts = drawn(4, (20, 60), (2, 6)) if short else drawn(16, (16, 192), (4, 40))
    rounds = given.rounds
    rows: dict[str, Callable[[], dict[str, Any]]] = {
        "weights on flash": lambda: weights(
            model, ragged, folder, rounds, flash=True, share=2 / 3 if short else 1 / 3
        ),
        "weights in host memory": lambda: weights(
            model, ragged, folder, rounds, flash=False, share=2 / 3 if short else 1 / 3
        ),
        "keys and values in host memory": lambda: keys_and_values(
            model_of(SHORT if short else CACHED), contexts, folder, rounds, 4 if short else 8
        ),
        "everything fits": lambda: fits(model, ragged, folder, 2 * rounds),
    }
    result: dict[str, Any] = {}
    for name in given.rows.split(",") if given.rows else rows:
        began = time.perf_counter()
        print(name, flush=True)
        result[name] = {**rows[name](), "seconds": time.perf_counter() - began}
        for which, one in result[name]["runs"].items():
            ratio = one.get("slower_than_ours")
            beside = "" if ratio is None else f"; {_interval(ratio['clock'])} of the clock, "
            beside += "" if ratio is None else f"{_interval(ratio['processor'])} of the processor"
            print(
                f"  {which}: {one['clock_s']:.3f} s, {one['processor_s']:.3f} s of the processor{beside}; "
                f"{len(one['differences'])} answers differ",
                flush=True,
            )
    return result


def _interval(ratio: Mapping[str, float]) -> str:
    return f"{ratio['ratio']:.2f}x ({ratio['low']:.2f} to {ratio['high']:.2f})"


def table(rows: Mapping[str, Any], load: float, rounds: int) -> str:
    """The table of the page."""
    lines = [
        f"Rounds: {rounds}. Load of the machine's {os.cpu_count()} cores before it began: {load:.1f}.",
        "",
        "| | clock | processor | clock, beside ours | processor, beside ours |",
        "|---|---|---|---|---|",
    ]
    for row, found in rows.items():
        for name, one in found["runs"].items():
            ratio = one.get("slower_than_ours")
            beside = ("1", "1")
            if ratio is not None:
                beside = (_interval(ratio["clock"]), _interval(ratio["processor"]))
            lines.append(
                f"| {row}: {name} | {one['clock_s']:.2f} s | {one['processor_s']:.2f} s | {beside[0]} | {beside[1]} |"
            )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write; 1 where an answer differs by more than a tie."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", help="some rows, separated by commas")
    parser.add_argument("--short", action="store_true", help="a tiny model, once, for tests")
    given = parser.parse_args(arguments)
    if given.short:
        given.rounds = 0
    load = os.getloadavg()[0]
    torch.set_num_threads(1)
    set_verbosity_error()
    began = time.perf_counter()
    folder = Path(tempfile.mkdtemp(prefix="generate-offload-", dir=Path(__file__).parent))
    try:
        with without_notes():
            rows = measured(given, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    gaps = [gap for row in rows.values() for one in row["runs"].values() for gap in one["differences"]]
    seconds = time.perf_counter() - began
    print(f"{seconds:.0f} s; {len(gaps)} answers differ, the logits by {max(gaps, default=0.0):.1e} at most")
    if not given.short and not given.rows:
        print(
            write(
                "generate_offload", {"load": load, "rounds": given.rounds, "seconds": seconds, "rows": rows}
            )
        )
        before, after = DOCS.read_text().split(f"{PAGE}\n")
        DOCS.write_text(
            before
            + f"{PAGE}\n"
            + table(rows, load, given.rounds)
            + "\n<!-- end -->"
            + after.split("<!-- end -->", 1)[1]
        )
    return int(max(gaps, default=0.0) > 1e-3)


if __name__ == "__main__":
    sys.exit(main())
