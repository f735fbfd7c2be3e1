"""Every causal language model of the installed Transformers under eight strategies: right or refused, never wrong.

    python benchmarks/attack_models.py [--families a,b] [--strategies a,b] [--resume] [--workers 2]

A family is the default config of its class with sizes cut (`hyper_parallel.verify.shrink`). A cell is one training
step on simulated ranks, or on processes where a model cannot be simulated, every gradient against one device; what the
check before training refuses is refused. Writes
``benchmarks/results/attack_models.json`` after each family, so that `--resume` goes on where a run ended, `--families`
and `--strategies` run some anew, and at the end the table in ``docs/families.md``. Exits with 1 when a cell is wrong,
ends in a traceback, or hangs.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import json
import logging
import multiprocessing
import pickle
import re
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from measure import RESULTS, write
from pages import DOCS, put

LIMIT_S = 180
"""A cell that takes longer hangs."""

ROWS, LENGTH = 2, 32
PER_PROCESS = 20

STRATEGIES: dict[str, dict[str, Any]] = {
    "shard 2": {"axes": {"shard": 2}},
    "tensor 2": {"axes": {"tensor": 2}},
    "tensor 4 sequence": {"axes": {"tensor": 4}, "sequence": True},
    "tensor 2 × 2": {"axes": {"tensor_x": 2, "tensor_y": 2}},
    "ring 2": {"axes": {"context": 2}, "context": {"method": "ring"}},
    "ulysses 2": {"axes": {"context": 2}, "context": {"method": "ulysses"}},
    "expert 2": {"axes": {"shard": 2, "expert": 2}},
    "pipeline 2": {"axes": {"pipeline": 2}},
    "16 ranks": {"axes": {"shard": 2, "context": 2, "tensor": 4}, "sequence": True},
}
"""The last one is a product: two data ranks, two of positions, four of features with the sequence split too, over which
experts fold by two where there are any."""

_ARITHMETIC = re.compile(
    r"(cannot be split|does not divide|which it does not|must divide|not divisible|is no multiple|divides neither)"
)
"""A refusal that says that the numbers do not come out: another degree or another length would be taken."""

_MARKS = {"right": "✓", "arithmetic": "÷", "refused": "–", "WRONG": "**wrong**", "traceback": "**crash**"}


def families() -> list[str]:
    """The families of causal language models that read text alone. A family that is several models in one (a vision
    tower and a language model) stands here by its language model, which is a family of its own."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    parts = {"attn_config", "ffn_config"}  # sections of one model, not models
    drafting = "_assistant"  # a drafting head, which reads another model's keys and values
    return [
        name
        for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        if set(CONFIG_MAPPING[name].sub_configs) <= parts and not name.endswith(drafting)
    ]


def run(family: str, strategies: Iterable[str] = ()) -> dict[str, Any]:
    """The cells of a family, all of them or under the strategies named, as the result file has them."""
    import torch
    import transformers

    from hyper_parallel.errors import StrategyError
    from hyper_parallel.verify import matrix
    from hyper_parallel.verify.families import has_experts
    from hyper_parallel.verify.shrink import shrunken

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, _hung)
    began = time.monotonic()
    config = transformers.CONFIG_MAPPING[family]()
    fields = {**shrunken(config), "model_type": family}
    batch = matrix.draw_batch(fields, ROWS, LENGTH)
    device = "meta"
    try:
        try:
            one = matrix.one_device(fields, {}, batch, {"batch": ROWS}, LENGTH)
        except StrategyError:  # not all values are drawn by the model's own code: it is built with them
            device = "cpu"
            one = matrix.one_device(fields, {}, batch, {"batch": ROWS}, LENGTH, device)
        experts = has_experts(matrix.build_model(fields).config)
    except Exception as error:
        return {"no_reference": f"{type(error).__name__}: {_line(error)}", "cells": {}}
    cells = {}
    for name, strategy in STRATEGIES.items():
        if strategies and name not in strategies:
            continue
        if "expert" in strategy["axes"] and not experts:
            continue
        if name == "16 ranks" and experts:
            strategy = {**strategy, "axes": {**strategy["axes"], "expert": 2}}
        start = time.monotonic()
        signal.alarm(LIMIT_S)
        cell = functools.partial(_cell, fields, strategy, batch, one, device)
        made = _outcome(cell)
        if made["outcome"] in ("WRONG", "traceback"):
            made = _checked(fields, strategy, device) or made
        cells[name] = {**made, "seconds": round(time.monotonic() - start, 1)}
        signal.alarm(0)
    return {"fields": fields, "cells": cells, "seconds": round(time.monotonic() - began, 1)}


def _cell(fields: Mapping[str, Any], strategy: Mapping[str, Any], batch: Any, one: Any, device: str) -> Any:
    from hyper_parallel.errors import SimulationError
    from hyper_parallel.verify import matrix

    pipeline = "pipeline" in strategy["axes"]
    config = matrix.family_config(
        fields, strategy, {"batch": ROWS, **({"micro_batch": 1} if pipeline else {})}, LENGTH
    )
    if not pipeline:
        with contextlib.suppress(SimulationError):
            return matrix.run_cell(config, matrix.build_model(fields, device), batch, one)
    signal.alarm(LIMIT_S + 30 * config.strategy.axes.world)
    return _by_processes(config, fields, device, batch, one)


def _by_processes(config: Any, fields: Mapping[str, Any], device: str, batch: Any, one: Any) -> Any:
    """The report of real workers over gloo. Raises what rank 0 raises."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["hyper_parallel.verify.matrix", "transformers"])
    with tempfile.TemporaryDirectory() as folder:
        given = (config, dict(fields), device, batch, one, folder)
        ranks = [
            context.Process(target=_rank, args=(rank, *given)) for rank in range(config.strategy.axes.world)
        ]
        try:
            for process in ranks:
                process.start()
            for process in ranks:
                process.join()
        finally:
            for process in ranks:
                process.kill()
        found = pickle.loads((Path(folder) / "report").read_bytes())
    if isinstance(found, Exception):
        raise found
    return found


def _rank(
    rank: int, config: Any, fields: Mapping[str, Any], device: str, batch: Any, one: Any, folder: str
) -> None:
    import torch
    import torch.distributed as dist
    import transformers

    from hyper_parallel.verify import matrix
    from hyper_parallel.verify.run import against_pipeline, against_workers

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    world = config.strategy.axes.world
    store = dist.FileStore(f"{folder}/store", world)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    found: Any
    try:
        model: Any = matrix.build_model(fields, device)
        compared = against_workers
        if config.strategy.axes.pipeline > 1:
            compared = against_pipeline
            with contextlib.suppress(ValueError):  # as in `train`: one by one, experts cannot be captured
                model.set_experts_implementation("grouped_mm")
        found = compared(config, model, batch, one, f"{world} processes over gloo")
    except Exception as error:
        found = error
    if rank == 0:
        (Path(folder) / "report").write_bytes(pickle.dumps(found))
    dist.destroy_process_group()


def _outcome(cell: Any) -> dict[str, Any]:
    from hyper_parallel.errors import HyperParallelError

    try:
        report = cell()
    except HyperParallelError as refusal:
        kind = "arithmetic" if _ARITHMETIC.search(str(refusal)) else "refused"
        return {"outcome": kind, "detail": _line(refusal)}
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        at = next((f for f in reversed(frames) if "hyper_parallel" in f.filename), frames[-1])
        where = f"{Path(at.filename).name}:{at.lineno}"
        return {"outcome": "traceback", "detail": f"{where}: {type(error).__name__}: {_line(error)[-200:]}"}
    worst = max(p.gradient for p in report.parameters)
    detail = "; ".join(report.failures[:3])
    return {"outcome": "right" if report.ok else "WRONG", "error": float(f"{worst:.2g}"), "detail": detail}


def _checked(fields: Mapping[str, Any], strategy: Mapping[str, Any], device: str) -> dict[str, Any] | None:
    """What the check before training says of a cell that is wrong, which simulated ranks go without; None when it lets
    the strategy pass."""
    from hyper_parallel.errors import HyperParallelError
    from hyper_parallel.shard.parallelize import check_tokens
    from hyper_parallel.verify import matrix

    declared = matrix.family_config(fields, strategy, {"batch": ROWS}, LENGTH).strategy
    try:
        check_tokens(matrix.build_model(fields, device), declared, fields["vocab_size"])
    except HyperParallelError as refusal:
        return {"outcome": "refused", "detail": _line(refusal)}
    return None


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _hung(*_: object) -> None:
    raise TimeoutError(f"a cell took more than {LIMIT_S} s")


def counted(found: Mapping[str, Any]) -> dict[str, Any]:
    """How many cells came to what; the share of right ones is of those whose numbers come out."""
    outcomes = collections.Counter(c["outcome"] for f in found.values() for c in f["cells"].values())
    judged = sum(outcomes.values()) - outcomes["arithmetic"]
    return {
        "families": sum(bool(f["cells"]) for f in found.values()),
        "cells": sum(outcomes.values()),
        **{outcome: outcomes[outcome] for outcome in _MARKS},
        "right_share": round(outcomes["right"] / judged, 3) if judged else 0.0,
    }


def page(result: Mapping[str, Any]) -> Iterator[str]:
    """The part of docs/families.md."""
    counts, found = result["counts"], result["families"]
    yield (
        f"{counts['families']} of the {result['of']} families of Transformers {result['transformers']}, "
        f"{counts['cells']} cells: "
        f"{counts['right']} right, {counts['arithmetic']} refused because heads or lengths do not divide, "
        f"{counts['refused']} refused for another reason, {counts['WRONG']} wrong, {counts['traceback']} crashes. "
        f"Of those whose numbers divide, {counts['right_share']:.0%} are right."
    )
    yield ""
    yield "✓ right, ÷ heads or lengths do not divide, – refused, · no experts."
    yield ""
    yield "| | " + " | ".join(STRATEGIES) + " |"
    yield "|---" * (len(STRATEGIES) + 1) + "|"
    for family, of in sorted(found.items()):
        if of["cells"]:
            row = [
                _MARKS[of["cells"][name]["outcome"]] if name in of["cells"] else "·" for name in STRATEGIES
            ]
            yield f"| {family} | " + " | ".join(row) + " |"
    left = {family: of["no_reference"] for family, of in sorted(found.items()) if "no_reference" in of}
    if left:
        yield ""
        yield (
            "Not run, since one device does not train them here: "
            + ", ".join(f"{family} ({why})" for family, why in left.items())
            + "."
        )


def reasons(found: Mapping[str, Any]) -> Iterable[tuple[str, int]]:
    """Refusals by what they say, names and numbers left out, the most frequent first."""
    told = collections.Counter(
        re.sub(r"\d+", "N", re.sub(r"'[^']*'", "'…'", cell["detail"]))[:170]
        for of in found.values()
        for cell in of["cells"].values()
        if cell["outcome"] == "refused"
    )
    return told.most_common()


def outcomes(wanted: Sequence[str], only: list[str], workers: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """(family, what it came to), as they end; processes are replaced after `PER_PROCESS` families, which fill them."""
    context = multiprocessing.get_context("spawn")
    # Not max_tasks_per_child, with which an executor of Python 3.11 stops for ever (python/cpython issue 115634).
    size = PER_PROCESS * workers
    for start in range(0, len(wanted), size):
        part = wanted[start : start + size]
        with ProcessPoolExecutor(workers, mp_context=context) as pool:
            asked = {pool.submit(run, family, only): family for family in part}
            for future in as_completed(asked):
                yield asked[future], future.result()


def main() -> int:
    """Run the families; 0 when no cell is wrong and none crashes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--families", help="only these, separated by commas")
    parser.add_argument("--strategies", help="only these, separated by commas")
    parser.add_argument("--resume", action="store_true", help="only those without a result")
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    import transformers

    kept = RESULTS / "attack_models.json"
    found: dict[str, Any] = {}
    if (given.resume or given.families or given.strategies) and kept.exists():
        found = json.loads(kept.read_text())["families"]
    wanted = given.families.split(",") if given.families else families()
    if given.resume:
        wanted = [family for family in wanted if family not in found]
    result: dict[str, Any] = {}
    only = given.strategies.split(",") if given.strategies else []
    for done, (family, of) in enumerate(outcomes(wanted, only, given.workers), 1):
        before = found.get(family, {}).get("cells", {})
        found[family] = {**of, "cells": {**before, **of["cells"]} if given.strategies else of["cells"]}
        told = " ".join(f"{name}: {cell['outcome']}," for name, cell in of["cells"].items())
        print(f"{done} of {len(wanted)}: {family}: {told or of.get('no_reference')}", flush=True)
        for name, cell in of["cells"].items():
            if cell["outcome"] in ("WRONG", "traceback"):
                print(f"    {name}: {cell['detail']}", flush=True)
        result = {
            "transformers": transformers.__version__,
            "of": len(families()),
            "counts": counted(found),
            "families": dict(sorted(found.items())),
        }
        write("attack_models", result)
    if result:
        put(DOCS / "families.md", "attack_models.py", page(result))
        for reason, count in reasons(found):
            print(f"{count:6}  {reason}")
        print(result["counts"])
    counts = counted(found)
    return 1 if counts["WRONG"] or counts["traceback"] else 0


if __name__ == "__main__":
    sys.exit(main())
