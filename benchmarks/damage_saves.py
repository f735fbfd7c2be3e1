"""Damage checkpoints of a run and of a Trainer in every file, and see which one a resume takes.

    python benchmarks/damage_saves.py [--cases 300] [--seed 0]

Each case copies a folder with three checkpoints, does one thing to one file of the newest (a flipped bit, cut, emptied,
extended, removed, replaced by that of the checkpoint before, replaced by a link or a folder) and looks the newest one
up. Right is: the one before, with a reason; or the newest, where every byte that is loaded is as it was written
(a lock, or a manifest that was removed). What is taken is loaded and compared. Three more cases ruin the weights.

Exits with 1 when any case is wrong.
"""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
from commandline import run
from pages import Benchmark
from processes import scratch
from torch import nn

import hyper_parallel as hp
from hyper_parallel.checkpoint import Piece, Writer, newest, read
from hyper_parallel.checkpoint.verify import LARGEST_WEIGHT
from hyper_parallel.errors import CheckpointError
from hyper_parallel.integration import checkpoints
from hyper_parallel.integration.checkpoints import MANIFEST, write_manifest
from hyper_parallel.layout import Layout, Mesh

BENCHMARK = Benchmark("damage_saves")
STEPS = (1, 2, 3)
LAYOUT = Layout.replicated(Mesh(), (64, 8))
KINDS = ("flip", "cut", "empty", "extend", "remove", "older", "link", "folder")
NAMES = {"run": "step-{:08d}", "trainer": "checkpoint-{}"}
"""The folder of a step."""


def value(step: float) -> torch.Tensor:
    """What is saved after a step."""
    return torch.full((64, 8), float(step))


def make_run(folder: Path, *values: float) -> None:
    """Checkpoints as a run writes them, with an asset and one tensor, of these values."""
    with Writer(folder, 1, 0, keep=9) as writer:
        for step, one in enumerate(values, 1):
            assets, weights = {"a.json": b"%d" % step}, {"w": Piece(value(one), LAYOUT)}
            writer.save(step, weights, {}, assets=assets, largest={"w": LARGEST_WEIGHT})


def make_trainer(folder: Path, handle: hp.shard.ShardedModel) -> None:
    for step in STEPS:
        inner = folder / f"checkpoint-{step}"
        inner.mkdir(parents=True)
        for name in ("scheduler.pt", "rng_state_0.pth", "training_args.bin", "config.json"):
            (inner / name).write_bytes(f"{name} of {step}".encode() * 9)
        with torch.no_grad():
            handle.parameters()[0].local.copy_(value(step))
        checkpoints.save(inner, handle, None, step, {})
        (inner / "trainer_state.json").write_text(f'{{"global_step": {step}}}')
        write_manifest(inner)


def damage(path: Path, older: Path, kind: str, draw: random.Random) -> None:
    content = path.read_bytes()
    path.unlink()
    if kind == "flip":
        flipped = bytearray(content or b"\0")
        flipped[draw.randrange(len(flipped))] ^= 1 << draw.randrange(8)
        path.write_bytes(flipped)
    elif kind == "cut":
        path.write_bytes(content[: draw.randrange(max(1, len(content)))])
    elif kind == "empty":
        path.touch()
    elif kind == "extend":
        path.write_bytes(content + b"x")
    elif kind == "older":
        shutil.copy(older, path)
    elif kind == "link":
        path.symlink_to(older.absolute())
    elif kind == "folder":
        path.mkdir()


def resumed(folder: Path, handle: hp.shard.ShardedModel | None) -> tuple[int, str, bool]:
    """The step that a resume takes, why not the newest, and whether what it loads is what was saved."""
    if handle is None:
        taken = newest(folder)
        assert taken is not None
        values = torch.zeros(64, 8)
        read(taken.path, {"w": Piece(values, LAYOUT)})
        step, skipped = taken.step, taken.skipped
    else:
        other = checkpoints.newest(folder, handle)
        assert other.path is not None
        step, skipped = int(other.path.name.split("-")[1]), other.skipped
        checkpoints.load(other.path, handle, None)
        values = handle.parameters()[0].local.detach()
    return step, "; ".join(reason for _, reason in skipped), torch.equal(values, value(step))


def damaged(folder: Path, cases: int, draw: random.Random) -> Iterator[dict[str, str]]:
    """Each case: what was done, which checkpoint was taken, and what is wrong with that."""
    handle = hp.sharded(hp.parallelize(nn.Linear(8, 64, bias=False), hp.Strategy()))
    make_run(folder / "run", *STEPS)
    make_trainer(folder / "trainer", handle)
    for number in range(cases):
        kind, case = ("run", "trainer")[number % 2], folder / "case"
        shutil.rmtree(case, ignore_errors=True)
        shutil.copytree(folder / kind, case)
        newer, older = (case / NAMES[kind].format(step) for step in (3, 2))
        files = sorted(path for path in newer.rglob("*") if path.is_file())
        path = files[number // 2 % len(files)]
        name = path.relative_to(newer).as_posix()
        how = draw.choice(KINDS)
        damage(path, older / name.replace("step-00000003", "step-00000002"), how, draw)
        harmless = path.name == ".writer.lock" or (path.name == MANIFEST and how == "remove")
        row = {"case": f"{kind}, {how}", "taken": "none", "wrong": ""}
        try:
            step, why, equal = resumed(case, handle if kind == "trainer" else None)
        except CheckpointError as error:
            yield row | {"wrong": f"{kind}: {name}: {how}: {error}"}
            continue
        row["taken"] = "the newest" if step == 3 else "the one before"
        if not equal or (step != 3 if harmless else step != 2 or not why):
            row["wrong"] = f"{kind}: {name}: {how}: step {step}, values {'right' * equal or 'WRONG'} ({why})"
        yield row


def ruined(folder: Path) -> Iterator[dict[str, str]]:
    """Weights that no training comes back from are skipped, with the reason."""
    for bad in (float("nan"), float("inf"), 1e38):
        case = folder / f"ruined-{bad}"
        make_run(case, *STEPS, bad)
        step, why, equal = resumed(case, None)
        wrong = step != 3 or not equal or "ruined" not in why
        told = f"weights of {bad}: took step {step} ({why})" if wrong else ""
        yield {"case": "run, ruined weights", "taken": "the one before", "wrong": told}


def main(cases: int = 300, seed: int = 0) -> bool:
    with scratch() as folder:
        rows = [*damaged(folder, cases, random.Random(seed)), *ruined(folder)]
    counts = dict(sorted(Counter(f"{row['case']}: {row['taken']}" for row in rows).items()))
    wrong = [row["wrong"] for row in rows if row["wrong"]]
    print(counts, f"{len(rows) - len(wrong)} of {len(rows)} right", *wrong, sep="\n")
    BENCHMARK.keep({"seed": seed, "cases": len(rows), "counts": counts, "wrong": wrong})
    return bool(wrong)


if __name__ == "__main__":
    run(main)
