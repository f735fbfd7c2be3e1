"""How fast the tiers are, and what the machine gives without them: python benchmarks/tiers.py --flash FOLDER

Each figure is the median of many copies. `raw` is one copy of memory, and direct reads and writes of a file by one
thread without a checksum, 2 MiB at a time. The load of the machine at the start and at the end is kept with the result:
on one that others use, rates are those that are left over.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from commandline import run
from measure import load, taken, timed_on
from pages import Benchmark, table

from hyper_parallel.compat import Backend, backend
from hyper_parallel.offloading.tiers import FlashTier, HostTier, Pending, PoolTier, Tier, measure
from hyper_parallel.offloading.tiers.file_io import checksum
from hyper_parallel.offloading.tiers.flash import PART

MiB = 2**20
SIZES = (64 * 2**10, MiB, 16 * MiB, 256 * MiB)
FLASH = Path(tempfile.gettempdir()) / "tiers"
TIERS = ("host", "pool", "flash")
LOAD = "load of the machine before and after"


def speed(count: int, step: Callable[[], object], times: int, on: Backend) -> dict[str, float]:
    """The median of steps of so many bytes, after one that warms up."""
    step()
    seconds = statistics.median(timed_on(on, step) for _ in range(times))
    return {"milliseconds": round(seconds * 1e3, 4), "GB_per_s": round(count / seconds / 1e9, 3)}


def ended(*copies: Callable[[], Pending]) -> None:
    """Copies at the same time, until all are over."""
    for pending in [begin() for begin in copies]:
        pending.wait()


def of_tier(tier: Tier, on: Backend, times: int) -> dict[str, Any]:
    """Each size out and back, and both ways at once."""
    took = taken(partial(measure, tier, on))
    result: dict[str, Any] = {"measure": {"seconds": round(took.clock, 3)}}
    for way, rate in zip(("out", "back"), took.result, strict=True):
        rates = {"latency_us": round(rate.latency * 1e6, 1), "GB_per_s": round(rate.bandwidth / 1e9, 3)}
        result["measure"][way] = rates
    tier.reserve({0: max(SIZES), 1: max(SIZES)})
    x, y = (torch.randint(0, 256, (max(SIZES),), dtype=torch.uint8).to(on.name) for _ in range(2))
    for count in SIZES:
        out, back = partial(tier.begin_write, 0, x[:count]), partial(tier.begin_read, 1, y[:count])
        tier.begin_write(1, y[:count]).wait()
        result[f"{count // 2**10} KiB"] = {
            "out": speed(count, partial(ended, out), times, on),
            "back": speed(count, partial(ended, back), times, on),
            "both, together": speed(2 * count, partial(ended, out, back), times, on),
        }
    return result


def raw(folder: Path, on: Backend, times: int) -> dict[str, Any]:
    count = 64 * MiB
    pages = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    source = torch.frombuffer(pages, dtype=torch.uint8)
    source.random_(0, 256)
    target = torch.zeros_like(source)
    view = memoryview(pages)
    name = folder / f"raw-{secrets.token_hex(4)}"
    file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)

    def parts(call: Callable[..., int]) -> None:
        for at in range(0, count, PART):
            assert call(file, [view[at : at + PART]], at) == PART

    steps: dict[str, Callable[[], object]] = {
        "copy of memory": lambda: target.copy_(source),
        "checksum": lambda: [checksum(source[at : at + PART]) for at in range(0, count, PART)],
        "direct write": lambda: parts(os.pwritev),
        "direct read": lambda: parts(os.preadv),
    }
    try:
        os.posix_fallocate(file, 0, count)
        return {what: speed(count, step, times, on) for what, step in steps.items()}
    finally:
        os.close(file)
        name.unlink()


def page(result: Mapping[str, Any]) -> Iterator[str]:
    machine, loads, plain = result["machine"], result[LOAD], result["raw"]
    where = machine["accelerator"] or f"a CPU ({machine['cpu']}, {machine['cores']} cores)"
    threads = "one thread" if result["threads"] == 1 else f"{result['threads']} threads"
    yield (
        f"`benchmarks/tiers.py` on {where}, {threads}; medians of {result['times']} copies. The load of the shared "
        f"machine was {loads[0]:.1f} before and {loads[1]:.1f} after "
        "([result](../benchmarks/results/tiers.json))."
    )
    yield ""
    largest, least = f"{max(SIZES) // 2**10} KiB", f"{min(SIZES) // 2**10} KiB"
    rows = []
    for name in TIERS:
        rates = (
            f"{result[name][largest][way]['GB_per_s']:.1f} GB/s" for way in ("out", "back", "both, together")
        )
        rows.append((name, *rates, f"{1e3 * result[name][least]['out']['milliseconds']:.0f} µs"))
    yield from table(f"{max(SIZES) // MiB} MiB | Out | Back | Both ways at once, in sum | {least}, out", rows)
    yield ""
    rate = {name: f"{one['GB_per_s']:.1f}" for name, one in plain.items()}
    yield (
        f"Without a tier the same machine copied memory at {rate['copy of memory']} GB/s, and one thread wrote a file "
        f"directly at {rate['direct write']} and read it at {rate['direct read']} GB/s. The checksum ran at "
        f"{rate['checksum']} GB/s on a core, {1 / plain['checksum']['GB_per_s']:.2f} s a GB. `measure` took "
        f"{result['host']['measure']['seconds']:.2f} s of the host tier and "
        f"{result['flash']['measure']['seconds']:.2f} s of flash."
    )


BENCHMARK = Benchmark("tiers", {"tiers.md": page})


def main(flash: Path = FLASH, times: int = 15, device: str = "auto") -> None:
    on, room = backend(device), 2 * max(SIZES) + MiB
    loads = [load()]
    result: dict[str, Any] = {"device": on.name, "threads": torch.get_num_threads(), "times": times}
    makers: dict[str, Callable[[], Any]] = {
        "host": lambda: HostTier(on, room),
        "pool": lambda: PoolTier(on, room, f"benchmark-{secrets.token_hex(4)}"),
        "flash": lambda: FlashTier(flash, on),
    }
    for name in TIERS:
        with makers[name]() as tier:
            result[name] = of_tier(tier, on, times)
    result["raw"] = raw(flash, on, times)
    result[LOAD] = [round(one, 2) for one in (*loads, load())]
    BENCHMARK.keep(result)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    run(main)
