"""Damage checkpoints of a run and of a Trainer in every file, and see which one a resume takes.

    python benchmarks/damage_saves.py [--cases 300] [--seed 0]

Each case copies a folder with three checkpoints, does one thing to one file of the newest (a flipped bit, cut, emptied,
extended, removed, replaced by that of the checkpoint before, replaced by a link or a folder) and looks the newest one
up. Right is: the one before, with a reason; or the newest, where every byte that is loaded is as it was written
(a lock, or a manifest that was removed). What is taken is loaded and compared. Three more cases ruin the weights.

Prints a table, writes ``benchmarks/results/damage_saves.json``, and exits with 1 when any case is wrong.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

import measure
import torch
from torch import nn

import hyper_parallel as hp
from hyper_parallel.checkpoint import Piece, Writer, newest, read
from hyper_parallel.checkpoint.health import LARGEST_WEIGHT
from hyper_parallel.errors import CheckpointError
from hyper_parallel.integration import checkpoints
from hyper_parallel.integration.manifest import MANIFEST, write_manifest
from hyper_parallel.layout import Layout, Mesh

STEPS = (1, 2, 3)
LAYOUT = Layout.replicated(Mesh(), (64, 8))
HARMLESS = {".writer.lock"}
KINDS = ("flip", "cut", "empty", "extend", "remove", "older", "link", "folder")


def value(step: int) -> torch.Tensor:
    """What is saved after a step."""
    return torch.full((64, 8), float(step))


def make_run(folder: Path) -> None:
    """Three checkpoints as a run writes them."""
    with Writer(folder, 1, 0, keep=9) as writer:
        for step in STEPS:
            piece = Piece(value(step), LAYOUT)
            writer.save(
                step, {"w": piece}, {}, assets={"a.json": b"%d" % step}, largest={"w": LARGEST_WEIGHT}
            )


def make_trainer(folder: Path, handle: hp.shard.ShardedModel) -> None:
    """Three checkpoints as a Trainer writes them."""
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
    """Do one thing to one file."""
    content = path.read_bytes()
    path.unlink()
    if kind == "flip":
        flipped = bytearray(content or b"\0")
        flipped[draw.randrange(len(flipped))] ^= 1 << draw.randrange(8)
        path.write_bytes(flipped)
    elif kind == "cut":
        path.write_bytes(content[: draw.randrange(max(1, len(content)))])
    elif kind in ("empty", "extend"):
        path.write_bytes(b"" if kind == "empty" else content + b"x")
    elif kind == "older":
        shutil.copy(older, path)
    elif kind == "link":
        path.symlink_to(older.absolute())
    elif kind == "folder":
        path.mkdir()


def found_in(folder: Path, handle: hp.shard.ShardedModel | None) -> tuple[int, str, bool]:
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


def main() -> None:
    """Run all cases."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    handle = hp.sharded(hp.parallelize(nn.Linear(8, 64, bias=False), hp.Strategy()))
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as temporary:
        whole = {"run": Path(temporary) / "run", "trainer": Path(temporary) / "trainer"}
        make_run(whole["run"])
        make_trainer(whole["trainer"], handle)
        for number in range(arguments.cases):
            kind = ("run", "trainer")[number % 2]
            case = Path(temporary) / "case"
            shutil.rmtree(case, ignore_errors=True)
            shutil.copytree(whole[kind], case)
            newer, older = (
                (case / "step-00000003", case / "step-00000002")
                if kind == "run"
                else (case / "checkpoint-3", case / "checkpoint-2")
            )
            files = sorted(path for path in newer.rglob("*") if path.is_file())
            path = files[number // 2 % len(files)]
            name = path.relative_to(newer).as_posix()
            before = older / name.replace("step-00000003", "step-00000002")
            how = KINDS[draw.randrange(len(KINDS))]
            damage(path, before, how, draw)
            harmless = path.name in HARMLESS or (path.name == MANIFEST and how == "remove")
            told = f"{kind}: {name}: {how}"
            try:
                step, why, equal = found_in(case, handle if kind == "trainer" else None)
            except CheckpointError as error:
                wrong.append(f"{told}: {error}")
                continue
            ok = equal and (step == 3 if harmless else step == 2 and bool(why))
            counts[f"{kind}, {how}: the {'newest' if step == 3 else 'one before'}"] += 1
            if not ok:
                wrong.append(f"{told}: took step {step}, values {'right' if equal else 'WRONG'} ({why})")
        for bad in (float("nan"), float("inf"), 1e38):
            case = Path(temporary) / f"ruined-{bad}"
            make_run(case)
            with Writer(case, 1, 0, keep=9) as writer:
                ruined = Piece(torch.full((64, 8), bad), LAYOUT)
                writer.save(4, {"w": ruined}, {}, largest={"w": LARGEST_WEIGHT})
            step, why, equal = found_in(case, None)
            counts["run, ruined weights: the one before"] += 1
            if step != 3 or not equal or "ruined" not in why:
                wrong.append(f"weights of {bad}: took step {step} ({why})")
    for what, count in sorted(counts.items()):
        print(f"{count:>5}  {what}")
    total = arguments.cases + 3
    result = {"seed": arguments.seed, "cases": total, "counts": dict(sorted(counts.items())), "wrong": wrong}
    path = measure.write("damage_saves", result)
    print(f"{total - len(wrong)} of {total} right -> {path.name}", *wrong, sep="\n")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
