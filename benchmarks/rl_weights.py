"""Weights from an actor's layouts to a rollout's: bytes and time beside gather-then-broadcast, delta and bfloat16.

    python benchmarks/rl_weights.py
    python benchmarks/rl_weights.py --pairs 4  # a look; writes nothing

**Pairs.** 50 pairs of random layouts on groups of 1 to 4 processes. The lower bound is counted element by element, from
the indices that each rank holds. Gather-then-broadcast gathers whole parameters on the actor's rank 0, with the fewest
bytes too, and broadcasts them to all ranks of the rollout, which cut out their shards. Both alternate; a time is that
of the slowest rank, the median of the runs; CPU seconds are the sum over the ranks.

**Delta.** A model is trained with AdamW, and after every update the payload in float32 and in bfloat16 is encoded as
the difference to the last one. It pays on links slower than saved bytes / (seconds to encode and decode).
"""

from __future__ import annotations

import math
import random
import statistics
import time
from dataclasses import replace
from typing import Annotated, Any

import torch
import torch.distributed as dist
from commandline import run
from measure import timed
from pages import Benchmark
from shapes import llama

from harness import ranks
from harness.weight_layouts import held, random_description
from hyper_parallel.compat.process_groups import serve_store
from hyper_parallel.config.rl_roles import WeightsConfig
from hyper_parallel.layout import Layout, Mesh
from hyper_parallel.rl.weights.description import Description
from hyper_parallel.rl.weights.payload import (
    HEADER_BYTES,
    apply_difference,
    box_of,
    difference,
    pack,
    packed_bytes,
    payload_of,
)
from hyper_parallel.rl.weights.plan import WeightPlan, plan_weights
from hyper_parallel.rl.weights.transfer import Meeting, WeightTransfer, connect, describe, local_tensors

BENCHMARK = Benchmark("rl_weights")
MOST = 4
"""Ranks of a group."""
WORLD = 2 * MOST
RUNS = 3
SECONDS = 120.0
RATES = (3e-4, 1e-5, 1e-6)
UPDATES = 12


def sides(seed: int, scale: int) -> tuple[Description, Description]:
    """A random actor and rollout with the same parameters: 16 of float32, up to scale² MiB each, some of 8 experts."""
    draw = random.Random(seed)
    shapes: dict[str, tuple[int, ...]] = {
        f"p{at}": (draw.randint(64, 512) * scale, draw.randint(64, 512) * scale) for at in range(12)
    } | {f"e{at}": (8, draw.randint(32, 128) * scale, draw.randint(64, 256) * scale) for at in range(4)}
    actor = random_description(draw, "actor", shapes, ["float32"], MOST)
    return actor, random_description(draw, "rollout", shapes, ["float32"], MOST)


def collector(actor: Description) -> Description:
    """Whole parameters on rank 0 of the actor's group."""
    whole = tuple(
        replace(p, layout=Layout.replicated(Mesh(), p.layout.shape), groups=((0,),)) for p in actor.parameters
    )
    return Description(role="collector", world=actor.world, parameters=whole)


def lower_bound(plan: WeightPlan) -> int:
    """Bytes that the target's ranks lack, element by element."""
    return sum(
        held(p, rank).size * one.item_bytes
        for one, p in zip(plan.parameters, plan.target.parameters, strict=True)
        for rank in range(plan.target.world)
    )


class Rank:
    """One process's part of a pair, in both methods."""

    def __init__(self, rank: int, port: int, seed: int, scale: int) -> None:
        actor, rollout = sides(seed, scale)
        self.plan = plan_weights(actor, rollout)
        self.gathering = plan_weights(actor, collector(actor), colocated=True)
        self.rank, self.actor, self.rollout = rank, actor, rollout
        self.gives, self.takes = rank < actor.world, actor.world <= rank < self.plan.world
        values = {p.name: torch.arange(math.prod(p.layout.shape)) for p in actor.parameters}
        self.wanted: dict[str, torch.Tensor] = {}
        self.whole: dict[str, torch.Tensor] = {}
        if self.gives:
            self.source = {p.name: values[p.name].float()[held(p, rank)] for p in actor.parameters}
        if self.takes:
            place = rank - actor.world
            self.wanted = {p.name: values[p.name].float()[held(p, place)] for p in rollout.parameters}
        if self.takes or rank == 0:
            self.whole = {p.name: torch.zeros(p.layout.shape) for p in actor.parameters}
        self.target = {name: torch.zeros_like(value) for name, value in self.wanted.items()}
        self.link = self._link(self.plan, port, f"ours {seed}") if rank < self.plan.world else None
        self.gather = self._link(self.gathering, port, f"gather {seed}", self.whole) if self.gives else None
        members = [0, *range(actor.world, self.plan.world)]
        self.broadcast = dist.new_group(members)
        self.version = 0

    def _link(
        self, plan: WeightPlan, port: int, name: str, whole: dict[str, torch.Tensor] | None = None
    ) -> WeightTransfer:
        target = whole if whole is not None else self.target if self.takes else None
        return connect(
            plan,
            self.rank,
            Meeting(host="127.0.0.1", port=port, link=name),
            source=(lambda: self.source) if self.gives else None,
            target=None if target is None else lambda: target,
            seconds=SECONDS,
        )

    def point_to_point(self) -> None:
        self.version += 1
        if self.link is not None and self.gives:
            self.link.send(self.version)
        elif self.link is not None:
            self.link.install(self.link.receive())

    def gather_then_broadcast(self) -> None:
        self.version += 1
        if self.gather is not None:
            self.gather.install(self.gather.exchange(self.version))
        if self.takes or self.rank == 0:
            for one in self.plan.parameters:
                dist.broadcast(self.whole[one.source], 0, group=self.broadcast)
        if self.takes:
            for p in self.rollout.parameters:
                for box in p.layout.boxes(p.layout.mesh.coordinate(self.rank - self.actor.world)):
                    self.target[p.name][box.local_slices] = self.whole[p.name][box.global_slices]

    def right(self) -> bool:
        """Whether the target has what it should, which is then erased."""
        equal = all(torch.equal(self.target[name], value) for name, value in self.wanted.items())
        for value in self.target.values():
            value.zero_()
        return equal

    def close(self) -> None:
        for link in filter(None, (self.link, self.gather)):
            link.close()
        if self.takes or self.rank == 0:
            dist.destroy_process_group(self.broadcast)


def worker(rank: int, world: int, port: int, pairs: int, scale: int) -> list[dict[str, Any]]:
    rows = []
    for seed in range(pairs):
        one = Rank(rank, port, seed, scale)
        times: dict[str, list[float]] = {"point_to_point": [], "gather_then_broadcast": []}
        cpu = dict.fromkeys(times, 0.0)
        for _ in range(RUNS):
            for method, seconds in times.items():
                began = time.process_time()
                seconds.append(timed(getattr(one, method), world))
                cpu[method] += (time.process_time() - began) / RUNS
                assert one.right(), f"pair {seed}: {method} on rank {rank}"
        moved = torch.tensor(0 if one.link is None else one.link.sent_bytes // RUNS)
        dist.all_reduce(moved)
        used = torch.tensor(list(cpu.values()))
        dist.all_reduce(used)
        messages = list(one.plan.messages())
        # A header for each message, and an acknowledgement of one byte from each receiver to each of its senders.
        headers = len(messages) * HEADER_BYTES + len({(m.sender, m.receiver) for m in messages})
        size = sum(math.prod(p.layout.shape) * 4 for p in one.actor.parameters)
        rows.append(
            {
                "actor": dict(one.actor.parameters[0].layout.mesh.axes),
                "rollout": dict(one.rollout.parameters[0].layout.mesh.axes),
                "bytes": int(moved) - headers,
                "lower_bound": lower_bound(one.plan),
                "crossing": one.plan.crossing_bytes,
                "model": size,
                "headers": headers,
                "gather_then_broadcast_bytes": one.gathering.moved_bytes + one.rollout.world * size,
                "gather_then_broadcast_crossing": one.rollout.world * size,
                "cpu_seconds": dict(zip(cpu, used.tolist(), strict=True)),
                "seconds": {method: statistics.median(seconds) for method, seconds in times.items()},
            }
        )
        dist.barrier()
        one.close()
    return rows


def deltas() -> list[dict[str, Any]]:
    """Bytes and time of differences between the versions of a model that trains."""
    from transformers import LlamaConfig, LlamaForCausalLM

    rows = []
    for rate in RATES:
        torch.manual_seed(0)
        fields = llama(128, 2, 4, inner=384, kv=4, vocabulary=1000, positions=2048)
        model: Any = LlamaForCausalLM(LlamaConfig(**fields))
        described = describe(model, "actor")
        plans = {
            dtype: plan_weights(described, replace(described, role="rollout"), WeightsConfig(dtype=dtype))
            for dtype in (None, "bfloat16")
        }
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
        last: dict[Any, list[torch.Tensor]] = {}
        figures: dict[Any, list[tuple[int, int, float]]] = {dtype: [] for dtype in plans}
        for update in range(UPDATES):
            tokens = torch.randint(0, 1000, (8, 64))
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            for dtype, plan in plans.items():
                payloads = _payloads(plan, model)
                if update > 1:
                    figures[dtype].append(_difference(plan, payloads, last[dtype]))
                last[dtype] = payloads
        for dtype, found in figures.items():
            full, sent = found[0][0], statistics.mean(row[1] for row in found)
            seconds = statistics.median(row[2] for row in found)
            rows.append(
                {
                    "lr": rate,
                    "dtype": dtype or "float32",
                    "full_bytes": full,
                    "delta_bytes": round(sent),
                    "ratio": sent / full,
                    "seconds": seconds,
                    "pays_below_bytes_per_second": (full - sent) / seconds,
                }
            )
    return rows


def _payloads(plan: WeightPlan, model: Any) -> list[torch.Tensor]:
    tensors = local_tensors(model)

    def box(part: Any) -> torch.Tensor:
        return box_of(tensors[part.parameter.source], part.give)

    return [
        payload_of(pack(message, box, torch.empty(packed_bytes(message), dtype=torch.uint8)))
        for message in plan.messages()
    ]


def _difference(plan: WeightPlan, new: list[torch.Tensor], old: list[torch.Tensor]) -> tuple[int, int, float]:
    """Bytes of the payloads and of their differences, and seconds to encode and decode these."""
    began, sent = time.perf_counter(), 0
    for message, mine, theirs in zip(plan.messages(), new, old, strict=True):
        encoded = difference(message, mine, theirs)
        sent += encoded.numel()
        if encoded is not mine:
            apply_difference(message, encoded, theirs)
            assert torch.equal(theirs, mine)
    return sum(one.numel() for one in new), sent, time.perf_counter() - began


def measured(pairs: int, scale: int) -> list[dict[str, Any]]:
    """The rows of `pairs` pairs, and a line about them."""
    served, began = serve_store("127.0.0.1"), time.perf_counter()
    rows: list[dict[str, Any]] = ranks.run_ranks(
        worker, WORLD, served.port, pairs, scale, timeout=60 + 20.0 * pairs
    )[0]
    print(summary(rows), f"{time.perf_counter() - began:.0f} s", flush=True)
    return rows


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:

    def times(key: str) -> list[float]:
        return [row[key]["gather_then_broadcast"] / row[key]["point_to_point"] for row in rows]

    def fewer(key: str) -> float:
        return statistics.median(row[f"gather_then_broadcast_{key}"] / row[key] for row in rows)

    quicker = times("seconds")
    return {
        "pairs": len(rows),
        "megabytes": statistics.median(row["model"] for row in rows) / 1e6,
        "equal_to_the_lower_bound": sum(row["bytes"] == row["lower_bound"] for row in rows),
        "times_fewer_bytes": fewer("bytes"),
        "times_fewer_bytes_out_of_the_actor": fewer("crossing"),
        "times_quicker": statistics.median(quicker),
        "times_quicker_least": min(quicker),
        "times_quicker_most": max(quicker),
        "quicker_in": sum(one > 1 for one in quicker),
        "times_less_cpu": statistics.median(times("cpu_seconds")),
    }


def main(pairs: Annotated[int, "of layouts; other than 50 are a look, which is not written"] = 50) -> None:
    torch.set_num_threads(1)
    rows, large = measured(pairs, 1), measured(pairs // 5, 4)
    delta = deltas()
    print(*delta, sep="\n")
    if pairs == 50:
        summaries = {"summary": summary(rows), "summary_large": summary(large)}
        BENCHMARK.keep({"runs": RUNS, **summaries, "delta": delta, "rows": rows, "rows_large": large})


if __name__ == "__main__":
    run(main)
