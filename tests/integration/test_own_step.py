"""`hp.step` under every kind of strategy, on real workers: losses, norms, gradients and values of plain PyTorch."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import hyper_parallel as hp
from harness import run_ranks
from harness.equivalence import build_model
from harness.pipeline_steps import settings_of
from harness.submodel_models import MODELS
from hyper_parallel.errors import HyperParallelError

TOLERANCE = 2e-6
"""Of losses and norms, and of gradients and values over the largest of their tensor: the rounding of sums in fp32."""
ADAMW = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-3, "weight_decay": 0.1}
"""A large eps, so that an update is as smooth as its gradient."""
CLIP, STEPS = 0.5, 3


def _model() -> Any:
    """The same values each time."""
    return build_model(settings_of("llama-tied", 2), "cpu").train()


def _batch(step: int) -> dict[str, Tensor]:
    """Eight rows, which bear loss at different numbers of positions."""
    ids = torch.randint(64, (8, 16), generator=torch.Generator().manual_seed(step))
    labels = ids.clone()
    for row in range(8):
        labels[row, : row % 5 * 2] = -100
    return {"input_ids": ids, "labels": labels}


Found = dict[str, Any]
"""What a step came to: loss, norm, tokens, values by name, and gradients by name where they were looked at."""


def _plain(steps: int) -> list[Found]:
    """Transformers' model and loss, and PyTorch's optimizer, in one process."""
    model, found = _model(), []
    decayed = [one for one in model.parameters() if one.dim() > 1]
    others = [one for one in model.parameters() if one.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], **ADAMW)
    for step in range(steps):
        batch = _batch(step)
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        gradients = {name: one.grad.clone() for name, one in model.named_parameters()}
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        values = {name: one.detach().clone() for name, one in model.named_parameters()}
        tokens = int((batch["labels"][:, 1:] != -100).sum())
        found.append(
            {
                "loss": float(loss.detach()),
                "norm": float(norm),
                "tokens": tokens,
                "gradients": gradients,
                "values": values,
            }
        )
    return found


@pytest.fixture(scope="module")
def plain() -> list[Found]:
    return _plain(STEPS + 1)


def _mine(step: Any, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: one.chunk(step.data_ranks)[step.data_rank] for name, one in batch.items()}


def _made(strategy: Mapping[str, Any], **options: Any) -> Any:
    return hp.step(_model(), {"check": False, **strategy}, optimizer=ADAMW, clip=CLIP, **options)


def _values(step: Any) -> dict[str, Tensor]:
    handle = step.handle
    return {one.name: handle.gather(one.local, one.layout).clone() for one in handle.owned()}


def _result(step: Any, out: Any, gradients: Mapping[str, Tensor] | None = None) -> Found:
    found = {"loss": out.loss, "norm": out.grad_norm, "tokens": out.tokens, "values": _values(step)}
    return found if gradients is None else {**found, "gradients": gradients}


def _in_two(step: Any, number: int) -> Found:
    """One step from its halves, in two parts of the batch."""
    batch = _batch(number)
    tokens = float((batch["labels"][:, 1:] != -100).sum())
    rows = [_mine(step, {name: one[half::2] for name, one in batch.items()}) for half in range(2)]
    losses = [float(step.forward_backward(one, tokens=tokens / 2)) / 2 for one in rows]
    handle = step.handle
    gradients = {one.name: handle.gather(one.grad, one.layout).clone() / 2 for one in handle.owned()}
    for one in handle.owned():
        one.grad.div_(2)
    out = step.update()
    assert sum(losses) == pytest.approx(out.loss / 2)
    assert out.tokens == tokens
    return {**_result(step, out, gradients), "loss": out.loss / 2}


@dataclass(frozen=True)
class Case:
    strategy: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def budget(self) -> bool:
        return "device" in self.strategy.get("memory", {})


BUDGET = {"device": "1MiB", "host": "16MiB"}
CASES: dict[int, list[Case]] = {
    1: [
        Case({}),
        Case({}, {"engine": "eager", "micro_batch": 2}),
        Case({}, {"micro_batch": 4}),
        Case({"memory": BUDGET}),
    ],
    2: [
        Case({"axes": {"shard": 2}}),
        Case({"axes": {"shard": 2}}, {"engine": "eager", "micro_batch": 2}),
        Case({"axes": {"tensor": 2}, "sequence": True}),
        Case({"axes": {"context": 2}}),
        Case({"axes": {"shard": 2}, "memory": BUDGET}),
        Case({"axes": {"pipeline": 2}}, {"micro_batch": 1}),
        Case({"axes": {"pipeline": 2}, "memory": BUDGET}, {"micro_batch": 2}),
    ],
    4: [Case({"axes": {"pipeline": 2, "shard": 2}}, {"micro_batch": 1})],
}


def _train(rank: int, world: int, case: Case) -> list[Found]:
    step = _made(case.strategy, **case.options)
    found = [_result(step, step(_mine(step, _batch(number)))) for number in range(STEPS - case.budget)]
    memory = step.memory
    assert memory.state["parameters"] and memory.state["optimizer"] == 2 * memory.state["parameters"]
    if case.budget:
        with pytest.raises(HyperParallelError, match=r"call step\(batch\), or leave the budget out"):
            step.forward_backward(_mine(step, _batch(0)))
        assert memory.peak is not None and memory.peak <= memory.budget == 2**20 and memory.plans
    else:
        found[-1] = _in_two_instead(case, found[:-1])
    if world > 1:
        with pytest.raises(HyperParallelError, match="in a process without one"):
            step.predict("h100x8")
    step.close()
    return found


def _in_two_instead(case: Case, before: list[Found]) -> Found:
    step = _made(case.strategy, **case.options)
    for number in range(len(before)):
        step(_mine(step, _batch(number)))
    return _in_two(step, len(before))


def _off(value: Tensor, like: Tensor) -> float:
    return float((value - like).abs().max() / like.abs().max())


def _judge(plain: Sequence[Found], ranks: Sequence[Sequence[Found]]) -> None:
    for number, one in enumerate(plain):
        seen: set[str] = set()
        for found in (steps[number] for steps in ranks):
            assert found["tokens"] == one["tokens"]
            for key in ("loss", "norm"):
                assert found[key] == pytest.approx(one[key], rel=TOLERANCE), (number, key)
            for what in ("gradients", "values"):
                for name, value in found.get(what, {}).items():
                    error = _off(value, one[what][name])
                    assert error < TOLERANCE, (number, what, name, error)
            seen |= found["values"].keys()
        assert seen == one["values"].keys()


@pytest.mark.parametrize(
    ("world", "number"), [(world, at) for world, cases in CASES.items() for at in range(len(cases))]
)
def test_steps_are_those_of_plain_pytorch(plain: list[Found], world: int, number: int) -> None:
    case = CASES[world][number]
    ranks = [_train(0, 1, case)] if world == 1 else run_ranks(_train, world, case, timeout=300)
    _judge(plain[: len(ranks[0])], ranks)


def test_a_graph_and_both_halves_have_the_bits_of_eager_steps() -> None:
    captured, eager, halves = _made({}), _made({}, engine="eager"), _made({})
    for number in range(2):
        batch = _batch(number)
        halves.forward_backward(batch)
        results = [captured(batch), eager(batch), halves.update()]
        assert len({(one.loss, one.grad_norm) for one in results}) == 1
    for name, value in _values(eager).items():
        assert torch.equal(value, _values(captured)[name]), name
        assert torch.equal(value, _values(halves)[name]), name


# Submodels.


def _seq2seq(rank: int, world: int) -> list[Found]:
    made = MODELS["t5"]
    rows = made.draw(4)
    batch = {**rows, "shift_labels": rows["labels"]}
    del batch["labels"]
    parts = {"encoder": {"modules": ["encoder"]}, "decoder": {}}
    step = hp.step(
        made.build(),
        {"check": False, "submodels": parts},
        optimizer=ADAMW,
        clip=CLIP,
        micro_batch=2,
        batch=batch,
    )
    assert (step.data_rank, step.data_ranks) == (0, 1)
    assert any("encoder: ranks 0" in line for line in step.plan)
    held_out = step.evaluate(batch)
    found = [_result(step, step(batch))]
    assert found[0]["loss"] == pytest.approx(held_out)
    with pytest.raises(HyperParallelError, match="the step of submodels is not simulated"):
        step.predict("h100x8")
    return found


def test_submodels_take_the_same_calls() -> None:
    made = MODELS["t5"]
    model: Any = made.build().train()
    rows = made.draw(4)
    logits = model(input_ids=rows["input_ids"], decoder_input_ids=rows["decoder_input_ids"]).logits
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), rows["labels"].flatten())
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    decayed = [one for one in model.parameters() if one.dim() > 1]
    others = [one for one in model.parameters() if one.dim() < 2]
    torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], **ADAMW).step()
    values = {name: one.detach() for name, one in model.named_parameters()}
    plain = {"loss": float(loss.detach()), "norm": float(norm), "tokens": rows["labels"].numel()}
    _judge([{**plain, "values": values}], run_ranks(_seq2seq, 2, timeout=300))


# State.


def _save(rank: int, world: int, folder: str) -> list[Found]:
    """Two steps and a checkpoint; a third, which is taken back and done again."""
    step = _made({"axes": {"shard": 2}}, engine="eager")
    for number in range(2):
        step(_mine(step, _batch(number)))
    step.save(folder)
    held = step.state_dict()
    kept = {name: piece.local.clone() for name, piece in held["tensors"].items()}
    first = _result(step, step(_mine(step, _batch(2))))
    for name, piece in step.state_dict()["tensors"].items():
        held["tensors"][name] = type(piece)(kept[name], piece.layout, piece.owners)
    step.load_state_dict(held)
    again = _result(step, step(_mine(step, _batch(2))))
    assert first["loss"] == again["loss"] and step.done == 3
    assert all(torch.equal(value, again["values"][name]) for name, value in first["values"].items())
    return [again]


def _go_on(rank: int, world: int, case: Case, folder: str) -> list[Found]:
    step = _made(case.strategy, batch=_batch(0), **case.options)
    step.load(folder)
    assert step.done == 2
    found = [_result(step, step(_mine(step, _batch(2))))]
    step.close()
    return found


def test_a_checkpoint_is_taken_up_under_other_strategies(plain: list[Found], tmp_path: Path) -> None:
    _judge(plain[2:3], run_ranks(_save, 2, str(tmp_path), timeout=300))
    pipeline = Case({"axes": {"pipeline": 2}}, {"micro_batch": 1})
    _judge(plain[2:3], run_ranks(_go_on, 2, pipeline, str(tmp_path), timeout=300))
    for case in (Case({}), Case({"memory": BUDGET})):
        _judge(plain[2:3], [_go_on(0, 1, case, str(tmp_path))])


# Losses and optimizers of the user's own.


def _cross_entropy(outputs: Any, labels: Tensor, tokens: Tensor) -> Tensor:
    flat = outputs.logits.flatten(0, 1)
    return nn.functional.cross_entropy(flat, labels.flatten(), ignore_index=-100, reduction="sum") / tokens


def _own(rank: int, world: int, folder: str | None = None) -> list[Found]:
    strategy = {"check": False, "axes": {"shard": world}}

    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    step = hp.step(_model(), strategy, loss=_cross_entropy, optimizer=make, clip=CLIP, micro_batch=2)
    found = [_result(step, step(_mine(step, _batch(number)))) for number in range(2)]
    if folder is not None:
        step.save(folder)
        other = hp.step(
            _model(), strategy, loss=_cross_entropy, optimizer=make, clip=CLIP, batch=_mine(step, _batch(0))
        )
        other.load(folder)
        step = other
    return [*found, _result(step, step(_mine(step, _batch(2))))]


def test_a_loss_function_and_an_optimizer_of_pytorch(tmp_path: Path) -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    plain = []
    for number in range(3):
        loss = model(**_batch(number), use_cache=False).loss
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        values = {name: one.detach().clone() for name, one in model.named_parameters()}
        tokens = int((_batch(number)["labels"][:, 1:] != -100).sum())
        plain.append({"loss": float(loss.detach()), "norm": float(norm), "tokens": tokens, "values": values})
    _judge(plain, [_own(0, 1)])
    _judge(plain, run_ranks(_own, 2, str(tmp_path)))


# Predictions, and a model of a config.


def test_it_is_predicted_as_the_run_file_is() -> None:
    from hyper_parallel.estimate.predict import cluster_of, predict_run

    step = hp.step(settings_of("llama-tied", 2), {"check": False}, seed=3, batch=_batch(0), micro_batch=4)
    found = step.predict("h100")
    assert found.timeline.step == predict_run(step.config, cluster_of("h100", step.config)).timeline.step
    assert found.tokens == 8 * 16 and found.micro_batch == 4
    spread = _made({"axes": {"shard": 2, "tensor": 2}}).predict("h100x8", _batch(0))
    assert spread.tokens == 2 * 8 * 16 and spread.timeline.trace.world == 4
    again = hp.step(settings_of("llama-tied", 2), {"check": False}, seed=3, batch=_batch(0))
    assert all(torch.equal(value, _values(again)[name]) for name, value in _values(step).items())
    memory = step.memory
    assert (
        memory.peak is not None and memory.peak == sum(memory.at_peak.values()) > memory.state["parameters"]
    )


# What is refused, in a line that says what to do.


def test_wrong_arguments_are_refused() -> None:
    step = _made({})
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("hp.step(..., batch=…)", lambda: step.model),
        ("call forward_backward(batch) first", lambda: _made({}, batch=_batch(0)).update()),
        ("a batch needs 'labels'", lambda: step({"input_ids": _batch(0)["input_ids"]})),
        ("a batch needs 'input_ids'", lambda: step({"labels": _batch(0)["labels"]})),
        ("8 rows are no whole number of micro-batches of 3", lambda: _made({}, micro_batch=3)(_batch(0))),
        ("torchrun --nproc-per-node 2", lambda: _made({"axes": {"shard": 2}})(_batch(0))),
        ("lr", lambda: hp.step(_model(), {}, optimizer={"rl": 1e-3})),
        (
            "memory.device needs the step's graph",
            lambda: _made({"memory": BUDGET}, loss=_cross_entropy)(_batch(0)),
        ),
        (
            "leave the mask out to keep them apart",
            lambda: step(
                {
                    **_batch(0),
                    "position_ids": (torch.arange(16) % 8).repeat(8, 1),
                    "attention_mask": torch.ones(8, 16),
                }
            ),
        ),
    ]
    for text, call in calls:
        with pytest.raises(HyperParallelError) as refusal:
            call()
        assert text in str(refusal.value) and "\n" not in str(refusal.value), str(refusal.value)
    # What was refused has changed nothing.
    assert step(_batch(0)).loss == pytest.approx(_plain(1)[0]["loss"], rel=TOLERANCE)


def _uneven(rank: int, world: int) -> str:
    step = _made({"axes": {"shard": 2}}, engine="eager", batch=_batch(0))
    batch = {name: one[: 4 - rank] for name, one in _batch(0).items()}
    with pytest.raises(HyperParallelError) as refusal:
        step(batch)
    dist.barrier()
    return str(refusal.value)


def test_ranks_with_other_rows_are_told() -> None:
    for told in run_ranks(_uneven, 2):
        assert "give every rank as many rows, padded to one length" in told


# The example, and its place in the documents.

ROOT = Path(__file__).parents[2]


def _example(rank: int, world: int, strategy: Mapping[str, Any]) -> list[float]:
    spec = importlib.util.spec_from_file_location("own_step", ROOT / "examples" / "own_step.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    losses: list[float] = module.train(6, strategy)
    return losses


def test_the_example_trains_alike_on_one_process_and_on_two() -> None:
    alone = _example(0, 1, {})
    assert alone[-1] < alone[0]
    for strategy in (
        {"axes": {"pipeline": 2}},
        {"axes": {"shard": 2}, "memory": {"device": "4MiB", "host": "64MiB"}},
    ):
        for losses in run_ranks(_example, 2, strategy, timeout=240):
            assert losses == pytest.approx(alone, abs=1e-4)


def test_the_document_shows_the_example() -> None:
    text = (ROOT / "docs" / "training.md").read_text()
    shown = text[text.index("step = hp.step(") :].partition("```")[0]
    assert textwrap.indent(shown.strip(), "    ") in (ROOT / "examples" / "own_step.py").read_text()


def test_the_name_is_a_package_and_a_function() -> None:
    program = (
        "import sys, hyper_parallel as hp; hp.step; import hyper_parallel.step.lr_schedule\n"
        "from hyper_parallel import step\nassert callable(hp.step) and step is hp.step\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
