"""Simulated reinforcement-learning loops, by order and staleness: python benchmarks/rl_simulated.py

Everything here is simulated, by a discrete-event simulation that uses the real queue; no device is used.

`orders`: fifo, window, discard, and admission by capacity alone, against the best colocated synchronous loop of the
same 16 devices: 512 log-normal answers a step (σ = 1), generation 85% of the synchronous step. All rows of a case have
the split of the devices that balances the roles. Means over three seeds. Three cases: timers (an answer's time does
not depend on how many run, training is shared evenly), shared passes (32 running answers make a pass twice as long as
one), and fixed training (which takes as long on one device as on 16, as verl's nearly does).

`verl`: the published ladder of verl's fully asynchronous trainer on 128 H20 (Qwen2.5-Math-7B, DAPO, 28K tokens), from
https://verl.readthedocs.io/en/latest/advance/fully_async.html (table "128-card 7B Asynchronous Mode Experiment"):

    colocated               step 356.30 = gen 177.85 + old_log_prob 53.92 + update_actor 113.81 + 10.72 else
    stream, 64:64           step 231.34 = wait for samples 128.47 + update_actor  98.77 +  4.10 else
    partial rollout, 64:64  step 150.63 = wait for samples  33.14 + update_actor 113.16 +  4.33 else

Times given to the simulation: generation on 128 devices 177.85 s; generation on 64 devices 202.55 s, which is the
stream row's wait and the three of four updates that run before its last answers are there (128.47 + 3/4 98.77);
update_actor on 64 devices 113.16 s. So the stream step is largely given, and the third row's is predicted. The mean
length is not published: rows show how the prediction depends on it. `staleness_threshold` s admits (1 + s) 512
prompts, which is a staleness of 15 + 16 s updates here.

`one_step_off`: verl's one-step-off trainer, 4 devices generate and 12 train, from
https://verl.readthedocs.io/en/latest/advance/one_step_off.html: generation on 16 and on 4 devices, old_log_prob and
update_actor on both, what else a step takes.

docs/rl-staleness.md has tables written from the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from commandline import run
from pages import Benchmark, table

from hyper_parallel.config.rl_simulation import RlSimulation
from hyper_parallel.rl.simulator import LoopResult, simulate_colocated, simulate_loop
from hyper_parallel.rl.simulator.run import lower_bound
from hyper_parallel.rl.simulator.scaling import generation_law

DEVICES, SAMPLES, SHARE = 16, 512, 0.85
SEEDS = (1, 2, 3)

Setting = dict[str, Any]


def case(name: str) -> Setting:
    """The simulation of one case, with generation `SHARE` of the colocated step."""
    setting: Setting = {
        "devices": DEVICES,
        "batch": SAMPLES,
        "lengths": {"mean": 1000, "sigma": 1.0, "longest": 2**20},
        "generation": {"pass_seconds": 0.01, "slots": SAMPLES // DEVICES},
        "train": {"work": 0.0},
        "warmup": 12,  # at first, window trains short answers and the long ones are not due yet
        "steps": 12,
    }
    if name == "shared passes":
        setting["generation"] |= {"pass_seconds": 0.01 * 31 / 32, "sequence_seconds": 0.01 / 32}
    alone = simulate_colocated(RlSimulation(**setting)).seconds
    train = alone * (1 - SHARE) / SHARE
    setting["train"] = {"fixed": train} if name == "fixed training" else {"work": train * DEVICES}
    return setting


def mean(results: list[LoopResult]) -> dict[str, Any]:
    """The mean over seeds of what a row shows, and the largest staleness of any."""
    count = len(results)
    row = {
        name: round(sum(getattr(result, name) for result in results) / count, 4) + 0.0
        for name in ("seconds", "generating", "training", "bubble", "wasted", "mean_staleness")
    }
    row["step_tokens"] = round(sum(result.tokens for result in results) / count)
    return {**row, "largest_staleness": max(result.largest_staleness for result in results)}


def orders(name: str) -> Iterator[dict[str, Any]]:
    """Rows of one case: the colocated loop first."""
    setting = case(name)
    colocated = mean([simulate_colocated(RlSimulation(**setting, seed=seed)) for seed in SEEDS])
    yield {"case": name, "order": "colocated", "staleness": 0, "speed": 1.0, **colocated}
    # One split for all rows: where neither role holds the other up, were lengths all the same.
    setup = RlSimulation(**setting)
    rollout = min(range(1, DEVICES), key=lambda devices: (lower_bound(setup, devices), -devices))
    bounds = (1, 2, 4) if name == "timers" else (2,)
    settings = [("window", 0), *((o, s) for s in bounds for o in ("fifo", "window", "discard", "capacity"))]
    for order, staleness in settings:
        own = {**setting, "order": order, "staleness": staleness}
        found = mean([simulate_loop(RlSimulation(**own, seed=seed), rollout) for seed in SEEDS])
        yield {
            "case": name,
            "order": order,
            "staleness": staleness,
            "rollout": rollout,
            "speed": round(colocated["seconds"] / found["seconds"], 3),
            **found,
        }


def verl(mean_tokens: float) -> Iterator[dict[str, Any]]:
    """Rows of the published ladder, for an assumed mean length."""
    setting: Setting = {
        "devices": 128,
        "rollout": 64,
        "batch": 128,
        "group": 16,
        "updates": 4,
        "batches_per_step": 4,
        "lengths": {"mean": mean_tokens, "sigma": 1.0, "longest": 28672},
        "generation": {"measured": {128: 177.85, 64: 128.47 + 0.75 * 98.77}},
        "train": {"measured": {128: 113.81, 64: 113.16}},
        "score": {"measured": {128: 53.92}},
        "rescore": False,
        "transfer_seconds": 4.3,
        "switch_seconds": 10.72,
        "warmup": 3,
        "steps": 10,
    }
    colocated = simulate_colocated(RlSimulation(**setting, staleness=15))
    published = {"colocated": 356.30, "stream": 231.34, "partial rollout": 150.63}
    law = generation_law(RlSimulation(**setting, staleness=15))
    rows = [("colocated", "colocated", colocated)]
    rollouts = [("partial rollout", 23, order) for order in ("capacity", "window", "discard", "fifo")]
    for name, staleness, order in (("stream", 15, "capacity"), *rollouts):
        own = RlSimulation(**setting, staleness=staleness, order=order)
        rows.append((name, order, simulate_loop(own)))
    for name, order, result in rows:
        speed, theirs = colocated.seconds / result.seconds, 356.30 / published[name]
        yield {
            "row": name,
            "mean_tokens": mean_tokens,
            "order": order,
            "published_seconds": published[name],
            "published_speed": round(theirs, 3),
            "speed": round(speed, 3),
            "off": round(speed / theirs - 1, 4),
            "pass_ms": round(law[0] * 1e3, 3),
            **mean([result]),
        }


def one_step_off() -> Iterator[dict[str, Any]]:
    """Rows of the one-step-off trainer. Published are, colocated and one step off: the step, gen (on 16 and on 4
    devices), old_log_prob and update (on 16 and on 12); then the wait for answers, and the longest one. What else a
    step takes is the rest."""
    measured = {
        "FSDP2": ((749, 520), (247, 458), (88, 108), (286, 337), 45, 20480),
        "Megatron": ((699, 566), (162, 501), (119, 120), (344, 347), 59, 8192),
    }
    for engine, (published, gen, score, train, waits, longest) in measured.items():
        switch = published[0] - gen[0] - score[0] - train[0]
        setup = RlSimulation(
            devices=16,
            rollout=4,
            batch=128,
            group=16,
            staleness=1,
            order="fifo",
            lengths={"mean": 2000, "sigma": 1.0, "longest": longest},
            generation={"measured": {16: gen[0], 4: gen[1]}, "slots": 2048, "interrupt": False},
            train={"measured": {16: train[0], 12: train[1]}},
            score={"measured": {16: score[0], 12: score[1]}},
            transfer_seconds=published[1] - waits - score[1] - train[1],
            switch_seconds=switch,
            warmup=3,
            steps=20,
        )
        colocated, found = simulate_colocated(setup), simulate_loop(setup)
        speed, theirs = colocated.seconds / found.seconds, published[0] / published[1]
        yield {
            "engine": engine,
            "published_seconds": published,
            "published_speed": round(theirs, 3),
            "colocated_seconds": round(colocated.seconds, 1),
            "speed": round(speed, 3),
            "off": round(speed / theirs - 1, 4),
            **mean([found]),
        }


def page(result: Mapping[str, Any]) -> Iterator[str]:

    def beside(row: Mapping[str, Any]) -> tuple[str, ...]:
        return f"{row['published_speed']:.2f}x", f"{row['speed']:.2f}x", f"{row['off']:+.0%}"

    yield from table(
        "Case | Order | η | Rollout devices | Speed | Waste | Bubble | Mean staleness | Largest | Mean length",
        (
            f"| {row['case']} | {row['order']} | {row['staleness']} | {row.get('rollout', 'all')} "
            f"| {row['speed']:.2f} | {row['wasted']:.1%} | {row['bubble']:.0%} | {row['mean_staleness']:.2f} "
            f"| {row['largest_staleness']} | {row['step_tokens'] / SAMPLES:.0f} |"
            for row in result["orders"]
        ),
    )
    yield ""
    yield from table(
        "verl's row | Order | Mean tokens (assumed) | Published, s | Simulated, s | Published | Simulated | Off",
        (
            (
                *(row["row"], row["order"], row["mean_tokens"]),
                *(f"{row['published_seconds']:.0f}", f"{row['seconds']:.0f}", *beside(row)),
            )
            for row in result["verl"]
        ),
    )
    yield ""
    yield from table(
        "One step off | Published, s | Simulated, s | Published | Simulated | Off",
        (
            (row["engine"], row["published_seconds"][1], f"{row['seconds']:.0f}", *beside(row))
            for row in result["one_step_off"]
        ),
    )


BENCHMARK = Benchmark("rl_simulated", {"rl-staleness.md": page})


def main() -> None:
    names = ("timers", "shared passes", "fixed training")
    found = {
        "orders": [row for name in names for row in orders(name)],
        "verl": [row for tokens in (3000, 2000, 4000) for row in verl(tokens)],
        "one_step_off": list(one_step_off()),
    }
    BENCHMARK.keep({"source": "simulated", **found})


if __name__ == "__main__":
    run(main)
