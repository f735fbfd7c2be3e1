"""Equivalence matrix: one step of each family under each strategy, all ranks in this process, against one device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from harness.families import WITH_EXPERTS
from hyper_parallel.compat import local_tensor
from hyper_parallel.config import RunConfig, from_dict
from hyper_parallel.errors import HyperParallelError
from hyper_parallel.verify.report import Report
from hyper_parallel.verify.run import against_simulated, alone, step_of
from hyper_parallel.verify.step import StepOutcome, Tensors

Settings = Mapping[str, Any]
"""A section of a file, as data."""

ROWS, LENGTH = 8, 32
"""The batch of a cell: rows that every data degree up to 8 divides, positions for rings of 4 with halves."""


@dataclass(frozen=True)
class Cell:
    """One family under one strategy."""

    family: str
    strategy: str
    status: Literal["right", "wrong", "refused"]
    error: float
    """The worst gradient's error over its largest element; 0 where the cell was refused."""
    update: float
    """The worst updated value's error, likewise."""
    detail: str = ""
    """The reason of the refusal, or the error."""


def family_config(
    family: Settings, strategy: Settings, train: Settings | None = None, length: int = LENGTH
) -> RunConfig:
    """The run file of a cell. Its training text is never read, since the batch is random."""
    return from_dict(
        {
            "version": 1,
            "out": "unused",
            "model": {"config": dict(family)},
            "data": {"train": ["unused"], "sequence": length},
            "train": {"batch": ROWS, "clip": 1.0, **(train or {})},
            "strategy": {"version": 1, **strategy},
        }
    )


def build_model(family: Settings, device: str = "meta") -> nn.Module:
    """An unmodified Transformers model; on the "cpu" its values are those of the seed 0, whenever it is built.

    On one device its experts are computed one by one, since Transformers' grouped product refuses odd widths on a CPU.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    settings = dict(family)
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    vision = getattr(config, "vision_config", None) is not None
    kind: Any = AutoModelForImageTextToText if vision else AutoModelForCausalLM
    with local_tensor.one_device(), torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(0)
        model: nn.Module = kind.from_config(config, experts_implementation="eager")
    return model.train()


def draw_batch(family: Settings, rows: int = ROWS, length: int = LENGTH, seed: int = 0) -> Tensors:
    """int64 [rows, length] ids, shifted labels and positions, and for vision-language families an image in each row.

    Rows of text hold packed documents, cut at a different place in each row.
    """
    generator = torch.Generator().manual_seed(seed)
    text = family.get("text_config", family)
    ids = torch.randint(0, int(text["vocab_size"]), (rows, length), generator=generator)
    labels = ids.roll(-1, 1)
    labels[:, -1] = -100
    if "vision_config" in family:
        return with_images(family, ids, labels, generator)
    positions = torch.arange(length).repeat(rows, 1)
    for row in range(rows):
        at = int(torch.randint(1, length, (1,), generator=generator))
        positions[row, at:] -= at
        labels[row, at - 1] = -100
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


def with_images(family: Settings, ids: Tensor, labels: Tensor, generator: torch.Generator) -> Tensors:
    """An image of 4 × 8 patches, merged two by two, after the third token of each row."""
    rows, length = ids.shape
    patch = family["vision_config"]["patch_size"]
    ids %= min(family[key] for key in family if key.endswith("token_id"))
    ids[:, 3:11] = family["image_token_id"]
    labels[:, 2:10] = -100
    # Text has one position three times over, an image a time, a height and a width (arXiv 2409.12191, section 2.1).
    positions = torch.arange(length).repeat(rows, 3, 1)
    positions[:, 0, 3:11] = 3
    positions[:, 1, 3:11] = 3 + torch.arange(8) // 4
    positions[:, 2, 3:11] = 3 + torch.arange(8) % 4
    positions[:, :, 11:] -= 4
    return {
        "input_ids": ids,
        "labels": labels,
        "position_ids": positions,
        "pixel_values": torch.randn(rows, 32, 2 * 3 * patch**2, generator=generator),
        "image_grid_thw": torch.tensor([1, 4, 8]).repeat(rows, 1),
    }


def one_device(
    family: Settings,
    strategy: Settings,
    batch: Tensors,
    train: Settings | None = None,
    length: int = LENGTH,
    device: str = "meta",
) -> StepOutcome:
    """The reference on one device: the same precision, the whole batch at once. `device`: where it is built."""
    precision = {key: value for key, value in strategy.items() if key == "precision"}
    config = family_config(family, precision, {**(train or {}), "micro_batch": None}, length)
    return step_of(build_model(family, device), config, alone(config.strategy), batch, "traceable", None)


def run_cell(config: RunConfig, model: nn.Module, batch: Tensors, one: StepOutcome) -> Report:
    """One step of a model under the file's strategy, against `one`.

    Raises what a run with this file would raise.
    """
    return against_simulated(config, model, batch, one, "all ranks in one process")


def judged(family: str, strategy: str, run: Callable[[], Report]) -> Cell:
    """The cell for the result of `run`. Any exception other than a refusal counts as wrong, a crash included."""
    try:
        report = run()
    except HyperParallelError as refusal:
        return Cell(family, strategy, "refused", 0.0, 0.0, str(refusal))
    except Exception as crash:
        return Cell(family, strategy, "wrong", float("inf"), float("inf"), f"{type(crash).__name__}: {crash}")
    error = max(p.gradient for p in report.parameters)
    update = max(p.value for p in report.parameters)
    return Cell(
        family, strategy, "right" if report.ok else "wrong", error, update, "; ".join(report.failures[:3])
    )


def run_matrix(
    families: Mapping[str, Settings],
    strategies: Mapping[str, Settings],
    told: Callable[[Cell], None] = lambda cell: None,
) -> list[Cell]:
    """Every cell, family by family; `told` is called with each when it is done."""
    cells = []
    for family, settings in families.items():
        batch = draw_batch(settings)
        one = one_device(settings, {}, batch)
        for name, strategy in strategies.items():
            if "expert" in strategy["axes"] and family not in WITH_EXPERTS:
                continue
            cell = judged(family, name, functools.partial(_cell, settings, strategy, batch, one))
            cells.append(cell)
            told(cell)
    return cells


def _cell(family: Settings, strategy: Settings, batch: Tensors, one: StepOutcome) -> Report:
    return run_cell(family_config(family, strategy), build_model(family), batch, one)


def markdown(cells: Iterable[Cell], command: str) -> str:
    """The page ``docs/equivalence.md``: the table, and every refusal with its reason."""
    cells = list(cells)
    families = list(dict.fromkeys(cell.family for cell in cells))
    strategies = list(dict.fromkeys(cell.strategy for cell in cells))
    at = {(cell.family, cell.strategy): cell for cell in cells}
    count = {status: sum(c.status == status for c in cells) for status in ("right", "refused", "wrong")}
    lines = [
        "# Equivalence",
        "",
        "Each cell compares one training step of an unmodified Transformers model under a strategy, with all ranks "
        "in one process, with one device: the loss, the gradient norm, every gradient and every updated value. The "
        "number is the error of the worst gradient, divided by that gradient's largest element. A cell is right if "
        "gradients agree within 1e-5 and updates within 2e-6, or if a float64 step shows that a larger difference is "
        "rounding. Models are tiny and uneven on purpose (131 tokens, odd widths, two key-value heads). Rows hold "
        "packed documents, or an image for vision-language families. A dot marks a family without experts.",
        "",
        f"Written by `{command}`: {count['right']} right, {count['refused']} refused, {count['wrong']} wrong, "
        f"of {len(cells)}.",
        "",
        "| | " + " | ".join(families) + " |",
        "|---" * (len(families) + 1) + "|",
    ]
    for strategy in strategies:
        row = [_shown(at[family, strategy]) if (family, strategy) in at else "·" for family in families]
        lines.append(f"| {strategy} | " + " | ".join(row) + " |")
    for status, title in (("refused", "Refused, and why"), ("wrong", "Wrong")):
        told = [cell for cell in cells if cell.status == status]
        if told:
            lines += ["", f"## {title}", ""]
            lines += [f"- **{cell.family}** under {cell.strategy}: {cell.detail}" for cell in told]
    return "\n".join(lines) + "\n"


def _shown(cell: Cell) -> str:
    return f"{cell.error:.0e}" if cell.status == "right" else cell.status


STRATEGIES: dict[str, dict[str, Any]] = {
    "replicate 2": {"axes": {"replicate": 2}},
    "shard 2": {"axes": {"shard": 2}},
    "tensor 2": {"axes": {"tensor": 2}},
    "tensor 4 sequence": {"axes": {"tensor": 4}, "sequence": True},
    "tensor_x 2 tensor_y 2": {"axes": {"tensor_x": 2, "tensor_y": 2}},
    "context 2": {"axes": {"context": 2}},
    "context 4 ring": {"axes": {"context": 4}, "context": {"method": "ring"}},
    "replicate 2 shard 2": {"axes": {"replicate": 2, "shard": 2}},
    "tensor 2 shard 2 sequence recompute": {
        "axes": {"tensor": 2, "shard": 2},
        "sequence": True,
        "memory": {"recompute": "layer"},
    },
    "context 2 tensor 2": {"axes": {"context": 2, "tensor": 2}},
    "shard 2 context 2 tensor 2 sequence": {
        "axes": {"shard": 2, "context": 2, "tensor": 2},
        "sequence": True,
    },
    "replicate 2 context 2 tensor_x 2 tensor_y 2": {
        "axes": {"replicate": 2, "context": 2, "tensor_x": 2, "tensor_y": 2},
        "memory": {"gathered": "again"},
    },
    "shard 2 context 2 tensor_x 2 tensor_y 2": {
        "axes": {"shard": 2, "context": 2, "tensor_x": 2, "tensor_y": 2}
    },
    "replicate 2 shard 2 context 2 tensor_x 2 tensor_y 2": {
        "axes": {"replicate": 2, "shard": 2, "context": 2, "tensor_x": 2, "tensor_y": 2}
    },
    "shard 2 expert 2": {"axes": {"shard": 2, "expert": 2}},
    "shard 4 tensor 2 expert 4": {"axes": {"shard": 4, "tensor": 2, "expert": 4}},
    "replicate 2 shard 2 tensor 2 expert 4": {"axes": {"replicate": 2, "shard": 2, "tensor": 2, "expert": 4}},
    "shard 2 context 2 tensor_x 2 tensor_y 2 expert 8": {
        "axes": {"shard": 2, "context": 2, "tensor_x": 2, "tensor_y": 2, "expert": 8}
    },
    "pipeline 2": {"axes": {"pipeline": 2}},
    "pipeline 2 interleaved tensor 2": {
        "axes": {"pipeline": 2, "tensor": 2},
        "pipeline": {"schedule": "interleaved-1f1b"},
    },
    "pipeline 2 in pairs tensor 2 sequence recompute": {
        "axes": {"pipeline": 2, "tensor": 2},
        "sequence": True,
        "memory": {"recompute": "layer"},
        "pipeline": {"schedule": "1f1b", "overlap_forward_backward": True},
    },
    "shard 2 pipeline 2 zb-h1 optimizer": {
        "axes": {"shard": 2, "pipeline": 2},
        "memory": {"shard": "optimizer"},
        "pipeline": {"schedule": "zb-h1"},
    },
    "pipeline 2 dualpipev context 2 tensor 2": {
        "axes": {"pipeline": 2, "context": 2, "tensor": 2},
        "pipeline": {"schedule": "dualpipev"},
    },
    "replicate 2 pipeline 2 shard 2 tensor_x 2 tensor_y 2": {
        "axes": {"replicate": 2, "pipeline": 2, "shard": 2, "tensor_x": 2, "tensor_y": 2}
    },
    "pipeline 2 shard 2 tensor 2 expert 4": {
        "axes": {"pipeline": 2, "shard": 2, "tensor": 2, "expert": 4},
        "pipeline": {"schedule": "1f1b-split", "overlap_forward_backward": True},
    },
}
"""Name to the fields of a Strategy. The world is at most 32 ranks."""
