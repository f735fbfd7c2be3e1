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

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
from commandline import run
from generate_offload_cache import policies
from generate_offload_weights import AccelerateDisk, StaticBatches
from generation import (
    KINDS,
    Run,
    Work,
    answered,
    circumstances,
    drawn,
    generated,
    logit_gaps,
    medians,
    ratios,
    turns,
)
from measure import load, quiet, ratio_text, without_notes
from pages import Benchmark, table
from processes import scratch
from shapes import llama, new_model

import hyper_parallel as hp
from hyper_parallel import Generator

MODEL = llama(256, 10, 8, kv=2, vocabulary=2048, positions=1024, tie_word_embeddings=False)
CACHED = {**MODEL, "num_hidden_layers": 8, "num_key_value_heads": 8}
"""With more keys and values for its weights."""
SHORT = {**MODEL, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 6, "vocab_size": 256}
SIZES = (1, 2, 3, 4, 6, 8, 12, 16)
"""Of static batches."""
ROWS = ("weights on flash", "weights in host memory", "keys and values in host memory", "everything fits")


def compared(model: Any, work: Work, runs: Mapping[str, Run], rounds: int) -> dict[str, Any]:
    """Take turns; of each the seconds, and the ratio to the first one's."""
    found = turns(runs, rounds)
    own = next(iter(runs))
    result: dict[str, Any] = {}
    for name, taken in found.items():
        gaps = logit_gaps(model, work, found[own][-1].result, taken[-1].result)
        result[name] = {**medians(taken), "differences": gaps}
        if name != own:
            result[name]["slower_than_ours"] = ratios(taken, found[own])
    return result


def weights(model: Any, work: Work, folder: Path, rounds: int, flash: bool, share: float) -> dict[str, Any]:
    """Weights in one tier; the budget is a share of them."""
    total = sum(one.nbytes for one in model.parameters())
    budget = int(total * share)
    sizes = SIZES if len(work.prompts) > 8 else (2,)
    tier = {"flash": str(folder / "spill")} if flash else {"host": 2 * total}
    with ExitStack() as stack:
        generator = stack.enter_context(Generator(folder / "model", memory={"device": budget, **tier}))
        runs: dict[str, Run] = {"ours": answered(generator, work)}
        read: dict[str, int] = {}
        passes: dict[str, int] = {}
        for name, blocks in (("next-layer prefetch", (1,)), ("zig-zag", (1, 2, 3, 4, 8))):
            place = {"flash": folder / f"spill-{len(blocks)}"} if flash else tier
            static = stack.enter_context(closing(StaticBatches(model, work, budget, sizes, blocks, **place)))
            runs[name], passes[name], read[name] = static, static.passes, static.plan.read
            print(f"  {name}: {static.count} batches of {static.size}", flush=True)
        if flash:
            held = {size: static.held[size, 1] for size in sizes}
            disk = AccelerateDisk(model, work, budget, folder / "accelerate", held)
            name = "Accelerate disk_offload"
            runs[name], passes[name], read[name] = disk, disk.passes, total
        result = compared(model, work, runs, rounds)
        before = generator.passes
        runs["ours"]()
        plan = generator.memory.plan  # type: ignore[union-attr]
        assert plan is not None
        passes["ours"], read["ours"] = generator.passes - before, plan.read
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
        caches = {
            "ours: TieredCache": lambda: hp.TieredCache(model, device=budget, host=host),
            **policies(config, size, work.longest, budget, host),
        }
        runs: dict[str, Run] = {
            "ours: Generator": answered(generator, work),
            **{name: partial(generated, model, work, size, cache) for name, cache in caches.items()},
        }
        result = compared(model, work, runs, rounds)
    return {"budget": budget, "keys_and_values": whole, "batch": size, "runs": result}


def fits(model: Any, work: Work, folder: Path, rounds: int) -> dict[str, Any]:
    """A budget that holds everything."""
    with Generator(folder / "model", memory={"device": "1GiB", "host": "256MiB"}) as generator:
        runs = {
            "without a budget": answered(Generator(folder / "model"), work),
            "with a budget": answered(generator, work),
        }
        return {"runs": compared(model, work, runs, rounds)}


def measured(names: tuple[str, ...], short: bool, rounds: int, folder: Path) -> dict[str, Any]:
    model = new_model(SHORT if short else MODEL)
    model.save_pretrained(folder / "model")
    requests = partial(drawn, vocabulary=256, lengths_first=True)
    ragged = requests(5, (4, 40), (2, 6)) if short else requests(16, (8, 96), (3, 20))
    contexts = requests(4, (20, 60), (2, 6)) if short else requests(16, (16, 192), (4, 40))
    share = 2 / 3 if short else 1 / 3
    rows: dict[str, Callable[[], dict[str, Any]]] = {
        "weights on flash": lambda: weights(model, ragged, folder, rounds, flash=True, share=share),
        "weights in host memory": lambda: weights(model, ragged, folder, rounds, flash=False, share=share),
        "keys and values in host memory": lambda: keys_and_values(
            new_model(SHORT if short else CACHED), contexts, folder, rounds, 4 if short else 8
        ),
        "everything fits": lambda: fits(model, ragged, folder, 2 * rounds),
    }
    result: dict[str, Any] = {}
    for name in names:
        began = time.perf_counter()
        print(name, flush=True)
        result[name] = {**rows[name](), "seconds": time.perf_counter() - began}
        for which, one in result[name]["runs"].items():
            print(f"  {which}: {one}", flush=True)
    return result


def page(result: Mapping[str, Any]) -> Iterator[str]:
    yield from circumstances(result)

    def row(group: str, name: str, one: Mapping[str, Any]) -> Iterator[str]:
        yield f"{group}: {name}"
        yield from (f"{one[f'{kind}_s']:.2f} s" for kind in KINDS)
        beside = one.get("slower_than_ours")
        yield from ("1" if beside is None else ratio_text(beside[kind]) for kind in KINDS)

    yield from table(
        " | clock | processor | clock, beside ours | processor, beside ours",
        (tuple(row(name, *one)) for name, found in result["rows"].items() for one in found["runs"].items()),
    )


BENCHMARK = Benchmark("generate_offload", {"inference-memory.md": page})


def main(
    rounds: int = 5,
    rows: Annotated[tuple[str, ...], "some rows; nothing is written", ROWS] = ROWS,
    short: Annotated[bool, "a tiny model, once, for tests"] = False,
) -> bool:
    """Measure, print, and write; whether an answer differs by more than a tie."""
    before, began = load(), time.perf_counter()
    torch.set_num_threads(1)
    with without_notes(), scratch(on_disk=True) as folder:
        found = measured(rows, short, 0 if short else rounds, folder)
    gaps = [gap for row in found.values() for one in row["runs"].values() for gap in one["differences"]]
    seconds = time.perf_counter() - began
    print(f"{seconds:.0f} s; {len(gaps)} answers differ, the logits by {max(gaps, default=0.0):.1e} at most")
    if not short and tuple(rows) == ROWS:
        BENCHMARK.keep({"load": before, "rounds": rounds, "seconds": seconds, "rows": found})
    return max(gaps, default=0.0) > 1e-3


if __name__ == "__main__":
    quiet()
    run(main)
