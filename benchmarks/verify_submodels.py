"""Are steps of submodels those of one device? python benchmarks/verify_submodels.py [--only TEXT]

Unmodified small models of Transformers on real gloo workers, with submodels on unlike device groups: loss, norm, every
gradient and every updated value of plain gradient descent, and of some the losses of an evaluation, beside the model on
one device. Errors are relative to the largest element, or to a thousandth of that of all gradients where one is 0 but
for rounding. A case is right below 1e-5. Ends with 1 when a case is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from commandline import run
from measure import quiet
from pages import Benchmark, table

from harness.submodel_steps import SubmodelCase, against_one_device
from hyper_parallel.strategy.axes import read_submodels

RIGHT = 1e-5
LLAVA = ["model.vision_tower", "model.multi_modal_projector"]
QWEN, AUDIO = ["model.visual"], ["model.audio_tower"]
Axes = dict[str, int]


def _vision(model: str, modules: list[str], vision: Axes, language: Axes, **other: Any) -> SubmodelCase:
    parts = {"vision": {"modules": modules, "axes": vision}, "language": {"axes": language}}
    return SubmodelCase(model, parts, **other)


def _omni(audio: Axes, vision: Axes, language: Axes) -> SubmodelCase:
    encoders = {"audio": {"modules": AUDIO, "axes": audio}, "vision": {"modules": QWEN, "axes": vision}}
    return SubmodelCase("omni", {**encoders, "language": {"axes": language}})


def _t5(encoder: Axes, decoder: Axes) -> SubmodelCase:
    parts = {"encoder": {"modules": ["encoder"], "axes": encoder}, "decoder": {"axes": decoder}}
    return SubmodelCase("t5", parts)


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


def page(result: Mapping[str, Any]) -> Iterator[str]:

    def errors(row: Mapping[str, Any]) -> Iterator[str]:
        for key in ("loss", "gradients", "values", "evaluated"):
            yield "" if row[key] is None else f"{row[key]:.1e}"

    rows = ([name, row["workers"], *errors(row)] for name, row in result["cases"].items())
    yield from table("Submodels | Workers | Loss | Gradients | Updated values | Evaluation", rows)


BENCHMARK = Benchmark("verify_submodels", {"submodels.md": page})


def main(only: Annotated[str, "cases whose name has this text; nothing is written"] = "") -> bool:
    """Run them; whether a case is wrong."""
    quiet()
    rows, wrong = {}, []
    for case in CASES:
        name = name_of(case)
        if only not in name:
            continue
        world = sum(one.axes.world for one in read_submodels(case.submodels).values())
        (found,) = against_one_device(world, [case])
        print(f"{name}: {found.refused or f'{found.error:.1e}'}", flush=True)
        if found.missing or not found.error < RIGHT:
            wrong.append(name)
        errors = {"loss": found.loss, "norm": found.norm, "gradients": found.gradient, "values": found.value}
        rows[name] = {"workers": world, **errors, "evaluated": found.evaluated}
    if not only:
        BENCHMARK.keep({"wrong": wrong, "cases": rows})
    print(f"{len(rows) - len(wrong)} of {len(rows)} right")
    return bool(wrong)


if __name__ == "__main__":
    run(main)
