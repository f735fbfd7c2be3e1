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

import argparse
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from measure import RESULTS, machine, write
from pages import DOCS, put
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from hyper_parallel import Generator
from hyper_parallel.calibrate import Settings, calibrate
from hyper_parallel.cluster import Cluster
from hyper_parallel.config.generation_workload import GenerationWorkload
from hyper_parallel.config.inference import Inference
from hyper_parallel.estimate.generate_capture import captured_pass
from hyper_parallel.estimate.generate_predict import in_dtype
from hyper_parallel.estimate.generate_trace import simulate_run
from hyper_parallel.inference.engine import Engine
from hyper_parallel.simulator.generation.pass_cost import PassPricer
from hyper_parallel.simulator.generation.pass_load import PassLoad, Piece
from hyper_parallel.strategy import Strategy

CLUSTER = RESULTS / "generate-fidelity-cluster.yaml"
PAGE = DOCS / "inference-predictions.md"
MODELS = {
    "4 × 256": {
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
    },
    "12 × 512": {
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
    },
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


def llama(name: str, device: str = "cpu") -> nn.Module:
    """A Llama that no token ends."""
    config = AutoConfig.for_model(
        "llama",
        vocab_size=4096,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        eos_token_id=None,
        **MODELS[name],
    )
    torch.manual_seed(0)
    with torch.device(device):
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model.eval()


def predicted(name: str, case: Case, cluster: Cluster) -> dict[str, Any]:
    """Seconds of passes by composition, and of the batch."""
    model = llama(name, "meta")
    pricer = PassPricer(
        captured_pass(model, in_dtype(Strategy(version=1, check=False), model), name), cluster
    )
    work = GenerationWorkload(requests=case.requests, prompt_tokens=case.prompt, answer_tokens=case.answer)
    run = simulate_run(pricer, work, Inference(**case.settings))
    return {"seconds": run.seconds, "passes": run.passes, "pricer": pricer}


class Timed:
    """Seconds of the engine's passes, by their composition."""

    def __init__(self) -> None:
        self.passes: dict[tuple[tuple[int, int], ...], list[float]] = defaultdict(list)
        self._own = Engine._passed

    def __enter__(self) -> Timed:
        own, passes = self._own, self.passes

        def timed(engine: Any, chosen: Sequence[Any], *given: Any) -> Any:
            begun = time.perf_counter()
            found = own(engine, chosen, *given)
            key = tuple(sorted((segment.count, segment.first) for _, segment in chosen))
            passes[key].append(time.perf_counter() - begun)
            return found

        Engine._passed = timed  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        Engine._passed = self._own  # type: ignore[method-assign]


def measured(generator: Generator, case: Case, seed: int) -> tuple[float, dict[Any, list[float]]]:
    """Seconds of a batch and of its passes."""
    draws = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(4096, (case.prompt,), generator=draws).tolist() for _ in range(case.requests)]
    settings = {key: value for key, value in case.settings.items() if key != "page"}
    with Timed() as timed:
        begun = time.perf_counter()
        generator(prompts, max_tokens=case.answer, **settings)
        seconds = time.perf_counter() - begun
    return seconds, timed.passes


def rows_of(name: str, case: Case, cluster: Cluster, rounds: int) -> dict[str, Any]:
    """A case: predicted and measured."""
    told = predicted(name, case, cluster)
    generator = Generator(llama(name), page=case.settings["page"], rows=case.settings["rows"])
    measured(generator, case, 0)
    seconds, passes = [], defaultdict(list)
    for number in range(rounds):
        one, found = measured(generator, case, 1 + number)
        seconds.append(one)
        for key, values in found.items():
            passes[key] += values
    kinds: dict[str, list[tuple[float, float]]] = {"prompts": [], "answers": []}
    for key, values in passes.items():
        load = PassLoad.of([Piece(*piece) for piece in key], len(key))
        single = all(count == 1 for count, _ in key)
        if single or not any(count == 1 for count, _ in key):
            cost = told["pricer"].price(load)
            kinds["answers" if single else "prompts"].append((cost.seconds, statistics.median(values)))
    tokens, own = case.requests * case.answer, statistics.median(seconds)
    found: dict[str, Any] = {
        "model": name,
        "requests": case.requests,
        "prompt": case.prompt,
        "answer": case.answer,
        **case.settings,
        "tokens_per_second": {"predicted": tokens / told["seconds"], "measured": tokens / own},
        "passes": {"predicted": told["passes"], "measured": sum(map(len, passes.values())) / rounds},
    }
    for kind, pairs in kinds.items():
        if pairs:
            found[kind] = {
                "predicted": statistics.mean(one for one, _ in pairs),
                "measured": statistics.mean(other for _, other in pairs),
            }
    return found


def error(figure: dict[str, float]) -> float:
    """Predicted over measured, less 1."""
    return figure["predicted"] / figure["measured"] - 1


def page_lines(rows: Sequence[dict[str, Any]], where: dict[str, Any]) -> list[str]:
    """The rows as Markdown."""
    parts = {
        kind: [error(one[kind]) for one in rows if kind in one]
        for kind in ("prompts", "answers", "tokens_per_second")
    }
    told = {
        "prompts": "passes of prompts",
        "answers": "passes that generate",
        "tokens_per_second": "tokens/s of a batch",
    }
    lines = ["Mean absolute error: "]
    lines[0] += ", ".join(
        f"{told[kind]} {statistics.mean(map(abs, errors)):.1%} (worst {max(map(abs, errors)):.1%})"
        for kind, errors in parts.items()
    )
    lines[0] += "."
    lines += [
        "",
        f"Measured on {where['cpu']}, {where['cores']} cores, as many threads, PyTorch {where['torch']}. Milliseconds "
        "of a pass.",
        "",
        "| Llama | Requests | Prompt | Answer | Prompts' pass: predicted | measured | error | Answers' pass: "
        "predicted | measured | error | "
        "Tokens/s: predicted | measured | error |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for one in rows:
        cells = [one["model"], str(one["requests"]), str(one["prompt"]), str(one["answer"])]
        for kind, scale in (("prompts", 1e3), ("answers", 1e3), ("tokens_per_second", 1.0)):
            figure = one[kind]
            cells += [
                f"{figure['predicted'] * scale:.1f}",
                f"{figure['measured'] * scale:.1f}",
                f"{error(figure):+.1%}",
            ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    """Measure, predict, run and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cluster", type=Path, help="A cluster file of this machine.")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--quick", action="store_true", help="Print the first two cases; write nothing.")
    asked = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    if asked.cluster is None:
        level = "quick" if asked.quick else "full"
        cluster = calibrate(
            Settings(workers=1, level=level, folder=RESULTS), lambda said: print(said, flush=True)
        )
        cluster.dump(CLUSTER)
    else:
        cluster = Cluster.load(asked.cluster)
    rows = []
    for name in MODELS:
        for case in CASES[: 2 if asked.quick else None]:
            rows.append(rows_of(name, case, cluster, asked.rounds))
            print(rows[-1], flush=True)
    load = os.getloadavg()[0]
    if not asked.quick:
        write("generate_fidelity", {"machine": machine(), "load": load, "rows": rows})
        put(PAGE, "generate_fidelity.py", page_lines(rows, machine()))
    print("\n".join(page_lines(rows, machine())))


if __name__ == "__main__":
    main()
