"""Are steps of submodels those of one device? python benchmarks/verify_submodels.py [--only TEXT]

Unmodified small models of Transformers on real gloo workers, with submodels on unlike device groups: loss, norm, every
gradient and every updated value of plain gradient descent, and of some the losses of an evaluation, beside the model on
one device. Errors are relative to the largest element, or to a thousandth of that of all gradients where one is 0 but
for rounding. A case is right below 1e-5. Writes benchmarks/results/verify_submodels.json and the table of
docs/submodels.md; ends with 1 when a case is wrong.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path
from typing import Any

from measure import machine, write
from pages import DOCS, put

from hyper_parallel.strategy.submodels import read_submodels

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from harness.submodel_steps import Compared, SubmodelCase, against_one_device

RIGHT = 1e-5
LLAVA = ["model.vision_tower", "model.multi_modal_projector"]
QWEN, AUDIO = ["model.visual"], ["model.audio_tower"]
Axes = dict[str, int]


def _vision(model: str, modules: list[str], vision: Axes, language: Axes, **other: Any) -> SubmodelCase:
    parts = {"vision": {"modules": modules, "axes": vision}, "language": {"axes": language}}
    return SubmodelCase(model, parts, **other)


def _omni(audio: Axes, vision: Axes, language: Axes) -> SubmodelCase:
    parts = {
        "audio": {"modules": AUDIO, "axes": audio},
        "vision": {"modules": QWEN, "axes": vision},
        "language": {"axes": language},
    }
    return SubmodelCase("omni", parts)


def _t5(encoder: Axes, decoder: Axes) -> SubmodelCase:
    return SubmodelCase(
        "t5", {"encoder": {"modules": ["encoder"], "axes": encoder}, "decoder": {"axes": decoder}}
    )


SKEWED: dict[str, Any] = {"rows": 4, "micro_batches": 5, "steps": 2, "evaluates": True}
CASES = [
    _vision("llava", LLAVA, {}, {"tensor": 2}, steps=2),
    _vision("llava", LLAVA, {}, {"shard": 2, "tensor": 2}),
    _vision("llava", LLAVA, {"shard": 2}, {"pipeline": 2}),
    _vision("llava", LLAVA, {"shard": 2}, {"pipeline": 2, "tensor": 2}),
    _vision("llava", LLAVA, {"replicate": 2}, {"tensor_x": 2, "tensor_y": 2}, rows=4),
    _vision("llava", LLAVA, {"shard": 2}, {"shard": 4}, rows=4),
    _vision("llava", LLAVA, {"shard": 4}, {"tensor": 2}, rows=4, strategy={"memory": {"shard": "optimizer"}}),
    _vision("llava", LLAVA, {}, {"tensor": 2}, strategy={"memory": {"recompute": "layer"}}),
    _vision("llava", LLAVA, {"replicate": 2}, {"tensor": 2}, frozen=LLAVA),
    _vision("llava mixture", LLAVA, {}, {"shard": 2, "expert": 2}, evaluates=True),
    _vision("llava mixture", LLAVA, {"shard": 2}, {"tensor": 2}),
    _vision("qwen2.5-vl", QWEN, {}, {"tensor": 2}, **SKEWED),
    _vision("qwen2.5-vl", QWEN, {"replicate": 2}, {"shard": 2}, **SKEWED),
    _vision("qwen2.5-vl", QWEN, {"shard": 2}, {"pipeline": 2}, **SKEWED),
    _omni({"replicate": 2}, {}, {"tensor": 2}),
    _omni({}, {"shard": 2}, {"shard": 2, "tensor": 2}),
    _t5({}, {"shard": 2}),
    _t5({"shard": 2}, {"replicate": 2}),
]


def name_of(case: SubmodelCase) -> str:
    """``llava: vision 1, language tensor 2``, and what else is unlike the defaults."""

    def axes_of(part: Any) -> str:
        return " · ".join(f"{axis} {degree}" for axis, degree in part.get("axes", {}).items()) or "1"

    parts = ", ".join(f"{name} {axes_of(part)}" for name, part in case.submodels.items())
    other = [f"{key}: {value}" for section in case.strategy.values() for key, value in section.items()]
    other += ["encoder frozen"] * bool(case.frozen)
    return "; ".join([f"{case.model}: {parts}", *other])


def world_of(case: SubmodelCase) -> int:
    """Its workers."""
    return sum(one.axes.world for one in read_submodels(case.submodels).values())


def main() -> int:
    """Run them; 1 when a case is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default="", help="cases whose name has this text; nothing is written")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    found: dict[str, Compared] = {}
    for case in CASES:
        if given.only in name_of(case):
            (found[name_of(case)],) = against_one_device(world_of(case), [case])
            one = found[name_of(case)]
            sys.stdout.write(f"{name_of(case)}: {one.refused or f'{one.error:.1e}'}\n")
            sys.stdout.flush()
    wrong = [name for name, one in found.items() if one.missing or not one.error < RIGHT]
    if not given.only:
        rows = {
            name: {
                "workers": world_of(case),
                "loss": found[name].loss,
                "norm": found[name].norm,
                "gradients": found[name].gradient,
                "values": found[name].value,
                "evaluated": found[name].evaluated,
            }
            for case in CASES
            if (name := name_of(case)) in found
        }
        write("verify_submodels", {"machine": machine(), "wrong": wrong, "cases": rows})
        put(DOCS / "submodels.md", "verify_submodels.py", table(rows))
    sys.stdout.write(f"{len(found) - len(wrong)} of {len(found)} right\n")
    return 1 if wrong else 0


def table(rows: dict[str, dict[str, Any]]) -> list[str]:
    """Of the page."""
    lines = [
        "| Submodels | Workers | Loss | Gradients | Updated values | Evaluation |",
        "|---|---|---|---|---|---|",
    ]
    for name, one in rows.items():
        errors = " | ".join(f"{one[key]:.1e}" for key in ("loss", "gradients", "values"))
        evaluated = "" if one["evaluated"] is None else f"{one['evaluated']:.1e}"
        lines.append(f"| {name} | {one['workers']} | {errors} | {evaluated} |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
