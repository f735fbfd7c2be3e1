"""Generation within a byte budget beside Accelerate: python benchmarks/generate_offload.py [--short]

One Llama in float32 with one thread, ragged requests (prompts and answers of different lengths), greedy. All take turns
in one process:

- weights on flash, three times the budget: `Generator`, and Accelerate's `disk_offload` under `generate`, which keeps
  nothing on the device and maps a file for each weight. Its static batches are as large as fit beside one layer. Files
  are read past the system's cache, or taken out of it after each pass (Accelerate);
- everything fits: `Generator` with a budget beside `Generator` without.

Seconds are of the clock and of the processor. Tokens must be the same; an answer that differs is listed with the
distance of the two logits where it first does. Writes ``benchmarks/results/generate_offload.json`` and the table of
``docs/inference-memory.md``, unless `--short`.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import accelerate
import torch
from commandline import run
from generation import (
    KINDS,
    Answers,
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

from hyper_parallel import Generator
from hyper_parallel.inference.memory_needs import StorageCounter

MODEL = llama(256, 10, 8, kv=2, vocabulary=2048, positions=1024, tie_word_embeddings=False)
SHORT = {**MODEL, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 6, "vocab_size": 256}
SIZES = (16, 12, 8, 6, 4, 3, 2, 1)
"""Of static batches."""
ROWS = ("weights on flash", "everything fits")


class AccelerateDisk:
    """`accelerate.disk_offload` under `generate`. Files leave the system's cache after each pass."""

    def __init__(self, model: Any, work: Work, budget: int, folder: Path) -> None:
        self.work = work
        room = budget - max(one.nbytes for one in model.parameters())
        self.size = next(size for size in SIZES if bytes_of_a_batch(model, work, size) <= room)
        self.model = copy.deepcopy(model)
        accelerate.disk_offload(self.model, str(folder), execution_device=torch.device("cpu"))
        self.model.register_forward_hook(lambda *_: uncached(folder))
        firsts = range(0, len(work.prompts), self.size)
        self.passes = sum(max(work.lengths[first : first + self.size]) for first in firsts)

    def __call__(self) -> Answers:
        return generated(self.model, self.work, self.size)


def bytes_of_a_batch(model: Any, work: Work, size: int) -> int:
    """What the longest prompts and answers hold at most, beside weights."""
    longest = Work([max(work.prompts, key=len)] * size, [max(work.lengths)] * size)
    counter = StorageCounter(torch.device("cpu"), [*model.parameters(), *model.buffers()])
    with counter:
        generated(model, longest, size)
    return counter.peak


def uncached(folder: Path) -> None:
    """Take the files of a folder out of the system's cache."""
    for path in folder.iterdir():
        if path.is_file():
            number = os.open(path, os.O_RDONLY)
            try:
                os.fsync(number)
                os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(number)


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


def weights_on_flash(model: Any, work: Work, folder: Path, rounds: int, share: float) -> dict[str, Any]:
    """The budget is a share of the weights."""
    total = sum(one.nbytes for one in model.parameters())
    budget = int(total * share)
    memory = {"device": budget, "flash": str(folder / "spill")}
    disk = AccelerateDisk(model, work, budget, folder / "accelerate")
    with Generator(folder / "model", memory=memory) as generator:
        ours = answered(generator, work)
        result = compared(model, work, {"ours": ours, "Accelerate disk_offload": disk}, rounds)
        before = generator.passes
        ours()
        plan = generator.memory.plan  # type: ignore[union-attr]
        assert plan is not None
        result["ours"] |= {"passes": generator.passes - before, "read_by_a_pass": plan.read}
        result["Accelerate disk_offload"] |= {"passes": disk.passes, "read_by_a_pass": total}
    return {"budget": budget, "weights": total, "runs": result}


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
    share = 2 / 3 if short else 1 / 3
    rows: dict[str, Callable[[], dict[str, Any]]] = {
        "weights on flash": lambda: weights_on_flash(model, ragged, folder, rounds, share),
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
