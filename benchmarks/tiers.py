"""How fast the tiers are, and what the machine gives without them: python benchmarks/tiers.py --flash FOLDER

Each figure is the median of many copies. `raw` is one copy of memory, and direct reads and writes of a file by one
thread without a checksum, 2 MiB at a time. The load of the machine at the start and at the end is kept with the result:
on one that others use, rates are those that are left over.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import secrets
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from measure import timed_on, write
from pages import DOCS, put
from torch import Tensor

from hyper_parallel.compat import Backend, backend
from hyper_parallel.offloading.tiers import FlashTier, HostTier, PoolTier, Tier, measure
from hyper_parallel.offloading.tiers.checksum import checksum
from hyper_parallel.offloading.tiers.flash import PART

MiB = 2**20
SIZES = (64 * 2**10, MiB, 16 * MiB, 256 * MiB)
LOAD = "load of the machine before and after"


def median(times: int, step: Callable[[], object], on: Backend) -> float:
    step()
    return statistics.median(timed_on(on, step) for _ in range(times))


def speed(count: int, seconds: float) -> dict[str, float]:
    return {"milliseconds": round(seconds * 1e3, 4), "GB_per_s": round(count / seconds / 1e9, 3)}


def of_tier(tier: Tier, on: Backend, times: int) -> dict[str, Any]:
    """Each size out and back, and both ways at once."""
    started = time.perf_counter()
    out, back = measure(tier, on)
    result: dict[str, Any] = {
        "measure": {
            "seconds": round(time.perf_counter() - started, 3),
            "out": {"latency_us": round(out.latency * 1e6, 1), "GB_per_s": round(out.bandwidth / 1e9, 3)},
            "back": {"latency_us": round(back.latency * 1e6, 1), "GB_per_s": round(back.bandwidth / 1e9, 3)},
        }
    }
    tier.reserve({0: max(SIZES), 1: max(SIZES)})
    x, y = (torch.randint(0, 256, (max(SIZES),), dtype=torch.uint8).to(on.name) for _ in range(2))
    for count in SIZES:

        def both(x: Tensor = x[:count], y: Tensor = y[:count]) -> None:
            pending = [tier.begin_write(0, x), tier.begin_read(1, y)]
            for one in pending:
                one.wait()

        tier.begin_write(1, y[:count]).wait()
        result[f"{count // 2**10} KiB"] = {
            "out": speed(count, median(times, lambda x=x[:count]: tier.begin_write(0, x).wait(), on)),
            "back": speed(count, median(times, lambda y=y[:count]: tier.begin_read(1, y).wait(), on)),
            "both, together": speed(2 * count, median(times, both, on)),
        }
    return result


def raw(folder: Path, on: Backend, times: int) -> dict[str, Any]:
    """The machine without a tier."""
    count = 64 * MiB
    pages = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    source = torch.frombuffer(pages, dtype=torch.uint8)
    source.random_(0, 256)
    target = torch.zeros_like(source)
    view = memoryview(pages)
    name = folder / f"raw-{secrets.token_hex(4)}"
    file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    try:
        os.posix_fallocate(file, 0, count)

        def parts(call: Callable[..., int]) -> None:
            for at in range(0, count, PART):
                assert call(file, [view[at : at + PART]], at) == PART

        return {
            "copy of memory": speed(count, median(times, lambda: target.copy_(source), on)),
            "checksum": speed(
                count,
                median(times, lambda: [checksum(source[at : at + PART]) for at in range(0, count, PART)], on),
            ),
            "direct write": speed(count, median(times, lambda: parts(os.pwritev), on)),
            "direct read": speed(count, median(times, lambda: parts(os.preadv), on)),
        }
    finally:
        os.close(file)
        name.unlink()


def page(result: Mapping[str, Any]) -> Iterator[str]:
    """The lines of docs/tiers.md, "Measured"."""
    machine, load, plain = result["machine"], result[LOAD], result["raw"]
    where = machine["accelerator"] or f"a CPU ({machine['cpu']}, {machine['cores']} cores)"
    threads = "one thread" if result["threads"] == 1 else f"{result['threads']} threads"
    yield (
        f"`benchmarks/tiers.py` on {where}, {threads}; medians of {result['times']} copies. The load of the shared "
        f"machine was {load[0]:.1f} before and {load[1]:.1f} after "
        "([result](../benchmarks/results/tiers.json))."
    )
    yield ""
    yield f"| {max(SIZES) // MiB} MiB | Out | Back | Both ways at once, in sum | {min(SIZES) // 2**10} KiB, out |"
    yield "|---|---|---|---|---|"
    for name in ("host", "pool", "flash"):
        large, small = (result[name][f"{size // 2**10} KiB"] for size in (max(SIZES), min(SIZES)))
        rates = " | ".join(f"{large[way]['GB_per_s']:.1f} GB/s" for way in ("out", "back", "both, together"))
        yield f"| {name} | {rates} | {1e3 * small['out']['milliseconds']:.0f} µs |"
    yield ""
    rate = {name: f"{one['GB_per_s']:.1f}" for name, one in plain.items()}
    yield (
        f"Without a tier the same machine copied memory at {rate['copy of memory']} GB/s, and one thread wrote a file "
        f"directly at {rate['direct write']} and read it at {rate['direct read']} GB/s. The checksum ran at "
        f"{rate['checksum']} GB/s on a core, {1 / plain['checksum']['GB_per_s']:.2f} s a GB. `measure` took "
        f"{result['host']['measure']['seconds']:.2f} s of the host tier and "
        f"{result['flash']['measure']['seconds']:.2f} s of flash."
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--flash", type=Path, default=Path(tempfile.gettempdir()) / "tiers")
    parser.add_argument("--times", type=int, default=15)
    parser.add_argument("--device", default="auto")
    arguments = parser.parse_args()
    on, room = backend(arguments.device), 2 * max(SIZES) + MiB
    load = [os.getloadavg()[0]]
    result: dict[str, Any] = {"device": on.name, "threads": torch.get_num_threads(), "times": arguments.times}
    with HostTier(on, room) as tier:
        result["host"] = of_tier(tier, on, arguments.times)
    with PoolTier(on, room, f"benchmark-{secrets.token_hex(4)}") as tier:
        result["pool"] = of_tier(tier, on, arguments.times)
    with FlashTier(arguments.flash, on) as tier:
        result["flash"] = of_tier(tier, on, arguments.times)
    result["raw"] = raw(arguments.flash, on, arguments.times)
    load.append(os.getloadavg()[0])
    result[LOAD] = [round(one, 2) for one in load]
    path = write("tiers", result)
    text = path.read_text()
    put(DOCS / "tiers.md", "tiers.py", page(json.loads(text)))
    print(text)


if __name__ == "__main__":
    main()
