"""Predicted against measured generation on this machine: python benchmarks/generate_fidelity.py

1. `hyper-parallel calibrate` measures this machine's operators (no model) with one worker on all cores;
   `--cluster FILE` takes an earlier measurement instead.
2. Passes of prompts, passes that generate and whole batches are predicted from that file, as `simulate --generate`
   does.
3. `Generator` runs the same requests with as many threads: seconds of each pass of the engine, and tokens/s of a batch;
   medians of several rounds.

Nothing is fitted to the cases. The settings of a batch are those of the engine; a pass's prediction is compared with
the passes of the same composition. docs/inference-predictions.md is written from the result.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any
from unittest import mock

import torch
from commandline import run
from fidelity_report import calibrated, error, errors
from measure import RESULTS, load
from pages import Benchmark, spaced, table
from shapes import llama, new_model, random_prompts

from hyper_parallel import Generator
from hyper_parallel.cluster import Cluster
from hyper_parallel.config.inference import GenerationWorkload, Inference
from hyper_parallel.estimate.generate_capture import captured_pass
from hyper_parallel.estimate.generate_predict import in_dtype
from hyper_parallel.estimate.generate_trace import simulate_run
from hyper_parallel.inference.engine import Engine
from hyper_parallel.simulator.generation.pass_cost import PassPricer
from hyper_parallel.simulator.generation.pass_model import PassLoad, Piece
from hyper_parallel.strategy import Strategy

CLUSTER = RESULTS / "generate-fidelity-cluster.yaml"
MODELS = {
    "4 × 256": llama(256, 4, 8, inner=1024, positions=2048),
    "12 × 512": llama(512, 12, 8, inner=2048, positions=2048),
}
"""Layers × width."""
ROUNDS = 5


@dataclass(frozen=True)
class Case:
    """Requests of one length."""

    requests: int
    prompt: int
    answer: int
    settings: dict[str, int]


CASES = (
    Case(16, 64, 64, {"batch": 16, "page": 32, "rows": 96}),
    Case(32, 128, 32, {"batch": 32, "page": 64, "rows": 512}),
    Case(4, 768, 16, {"batch": 4, "page": 256, "rows": 512}),
    Case(1, 512, 64, {"batch": 1, "page": 128, "rows": 128}),
)


@contextlib.contextmanager
def timed_passes() -> Iterator[dict[Any, list[float]]]:
    """Inside, seconds of the engine's passes are taken, by their composition."""
    own, passes = Engine._passed, defaultdict[Any, list[float]](list)

    def timed(engine: Engine, chosen: list[Any], *given: Any) -> Any:
        begun = time.perf_counter()
        found = own(engine, chosen, *given)
        key = tuple(sorted((segment.count, segment.first) for _, segment in chosen))
        passes[key].append(time.perf_counter() - begun)
        return found

    with mock.patch.object(Engine, "_passed", timed):
        yield passes


def measured(generator: Generator, case: Case, seed: int) -> tuple[float, dict[Any, list[float]]]:
    """Seconds of a batch and of its passes."""
    prompts = random_prompts([case.prompt] * case.requests, 4096, seed=seed)
    settings = {key: value for key, value in case.settings.items() if key != "page"}
    with timed_passes() as passes:
        begun = time.perf_counter()
        generator(prompts, max_tokens=case.answer, **settings)
        seconds = time.perf_counter() - begun
    return seconds, passes


def row_of(name: str, case: Case, cluster: Cluster, rounds: int) -> dict[str, Any]:
    """A case: predicted and measured."""
    meta = new_model(MODELS[name], scale=1.0, device="meta")
    pricer = PassPricer(captured_pass(meta, in_dtype(Strategy(version=1, check=False), meta), name), cluster)
    work = GenerationWorkload(requests=case.requests, prompt_tokens=case.prompt, answer_tokens=case.answer)
    told = simulate_run(pricer, work, Inference(**case.settings))
    model = new_model(MODELS[name], scale=1.0)
    generator = Generator(model, page=case.settings["page"], rows=case.settings["rows"])
    measured(generator, case, 0)
    seconds: list[float] = []
    passes: dict[Any, list[float]] = defaultdict(list)
    for number in range(rounds):
        one, taken = measured(generator, case, 1 + number)
        seconds.append(one)
        for key, values in taken.items():
            passes[key] += values
    kinds = defaultdict[str, list[tuple[float, float]]](list)
    for key, values in passes.items():
        single = {count == 1 for count, _ in key}
        if len(single) == 1:  # passes of both kinds are not compared
            cost = pricer.price(PassLoad.of([Piece(*piece) for piece in key], len(key)))
            kinds["answers" if True in single else "prompts"].append(
                (cost.seconds, statistics.median(values))
            )

    def both(predicted: float, measured: float) -> dict[str, float]:
        return {"predicted": predicted, "measured": measured}

    tokens = case.requests * case.answer
    return {
        "model": name,
        "requests": case.requests,
        "prompt": case.prompt,
        "answer": case.answer,
        **case.settings,
        "tokens_per_second": both(tokens / told.seconds, tokens / statistics.median(seconds)),
        "passes": both(told.passes, sum(map(len, passes.values())) / rounds),
        **{kind: both(*map(statistics.mean, zip(*pairs, strict=True))) for kind, pairs in kinds.items()},
    }


KINDS = {
    "prompts": "passes of prompts",
    "answers": "passes that generate",
    "tokens_per_second": "tokens/s of a batch",
}


def page(result: Mapping[str, Any]) -> Iterator[str]:
    """The part of docs/inference-predictions.md."""
    rows, where = result["rows"], result["machine"]
    off = {kind: errors(one[kind] for one in rows if kind in one) for kind in KINDS}
    told = (f"{KINDS[kind]} {one['mean']:.1%} (worst {one['worst']:.1%})" for kind, one in off.items())

    def row(one: Mapping[str, Any]) -> Iterator[object]:
        yield from (one["model"], one["requests"], one["prompt"], one["answer"])
        for kind in KINDS:
            scale = 1.0 if kind == "tokens_per_second" else 1e3
            yield from (f"{one[kind][which] * scale:.1f}" for which in ("predicted", "measured"))
            yield f"{error(one[kind]):+.1%}"

    return spaced(
        f"Mean absolute error: {', '.join(told)}.",
        f"Measured on {where['cpu']}, {where['cores']} cores, as many threads, PyTorch {where['torch']}. Milliseconds "
        "of a pass.",
        table(
            "Llama | Requests | Prompt | Answer | Prompts' pass: predicted | measured | error | Answers' pass: "
            "predicted | measured | error | Tokens/s: predicted | measured | error",
            (tuple(row(one)) for one in rows),
            "l" + "r" * 12,
        ),
    )


BENCHMARK = Benchmark("generate_fidelity", {"inference-predictions.md": page})


def main(
    cluster: Annotated[str | None, "a cluster file of this machine"] = None, rounds: int = ROUNDS
) -> None:
    """Measure, predict, run and write."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    here = calibrated(1, CLUSTER, cluster)
    rows = []
    for name in MODELS:
        for case in CASES:
            rows.append(row_of(name, case, here, rounds))
            print(rows[-1], flush=True)
    BENCHMARK.keep({"load": load(), "rows": rows})


if __name__ == "__main__":
    run(main)
