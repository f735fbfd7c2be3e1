"""Methods of Trainer that a subclass overrides: called with a spread model as in one process, with the same numbers, or
refused by name."""

from __future__ import annotations

import inspect
import itertools
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_cases import as_torchrun, collate, model_of, rows
from transformers import PrinterCallback, Seq2SeqTrainer, Seq2SeqTrainingArguments

from harness import run_ranks
from hyper_parallel.errors import IntegrationError
from hyper_parallel.integration.trainer_arguments import NEVER_CALLED, WITHOUT_PIPELINE

NEAR = 1e-5
STRATEGIES: dict[str, dict[str, Any]] = {
    "shard": {"axes": {"shard": 2}},
    "tensor": {"axes": {"tensor": 2}},
    "pipeline": {"axes": {"pipeline": 2}},
}
METHODS = sorted(
    name
    for name, value in inspect.getmembers(Seq2SeqTrainer)
    if not name.startswith("__")
    and inspect.isfunction(value)
    and not isinstance(inspect.getattr_static(Seq2SeqTrainer, name), staticmethod)
)
NOT_RUN = {"hyperparameter_search", "push_to_hub", "init_hf_repo", "create_model_card", "predict"}
"""Methods that the run below does not call, for they search, or talk to a hub, or need logits."""


def _noting(base: type, names: list[str], seen: Counter[str]) -> type:
    """A subclass with each of the methods, which notes that it was called."""

    def method(name: str) -> Callable[..., Any]:
        def called(self: Any, *args: Any, **kwargs: Any) -> Any:
            seen[name] += 1
            return getattr(super(kind, self), name)(*args, **kwargs)

        return called

    kind = type("Noting", (base,), {name: method(name) for name in names})
    return kind


class _Own:
    """Methods as people write them, without a call of what they replace."""

    def compute_loss(
        self: Any, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs)
        loss = 2 * outputs.loss
        return (loss, outputs) if return_outputs else loss

    def training_step(self: Any, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        model.train()
        inputs = self._prepare_inputs(inputs)
        loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        self.accelerator.backward(loss)
        return loss.detach()

    def get_batch_samples(self: Any, epoch_iterator: Any, num_batches: int, device: Any = None) -> Any:
        taken = list(itertools.islice(epoch_iterator, num_batches))
        return taken, self._get_num_items_in_batch(taken, device)

    def create_optimizer(self: Any, model: Any = None) -> Any:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.3)
        return self.optimizer

    def log(self: Any, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        super().log({**logs, "own": 1.0}, *args, **kwargs)  # type: ignore[misc]


class _Behind:
    """A training_step that computes gradients by itself."""

    def training_step(self: Any, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        loss = self.compute_loss(model, self._prepare_inputs(inputs), num_items_in_batch=num_items_in_batch)
        loss.backward()
        return loss.detach()


def _trainer(kind: Any, folder: str, strategy: dict[str, Any] | None, data: int) -> Any:
    args = Seq2SeqTrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=4 // data,
        per_device_eval_batch_size=4 // data,
        num_train_epochs=2,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        logging_steps=1,
        eval_strategy="epoch",
        save_strategy="epoch",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        log_level="error",
    )
    trainer = kind(
        model=model_of("llama"),
        args=args,
        train_dataset=_alike(11),
        eval_dataset=_alike(5),
        data_collator=collate,
        **({} if strategy is None else {"strategy": {"check": False, **strategy}}),
    )
    trainer.pop_callback(PrinterCallback)
    return trainer


def _alike(count: int) -> list[dict[str, list[int]]]:
    """Rows of one length: means of them are what a method of the user's own may return."""
    return [{"input_ids": one["input_ids"][:5], "labels": one["input_ids"][:5]} for one in rows(count)]


def _ours() -> Any:
    from hyper_parallel.integration.transformers import HyperParallelSeq2SeqTrainer

    return HyperParallelSeq2SeqTrainer


def _refused_under(strategy: str) -> set[str]:
    return set(NEVER_CALLED) | (set(WITHOUT_PIPELINE) if strategy == "pipeline" else set())


def _run(trainer: Any) -> dict[str, list[float]]:
    trainer.train()
    log = trainer.state.log_history
    keys = ("loss", "grad_norm", "eval_loss", "own")
    return {key: [float(one[key]) for one in log if key in one] for key in keys}


def _noted(rank: int, world: int, folder: str, strategies: dict[str, Any]) -> dict[str, Any]:
    """By strategy: what a run logs, and which of the methods it called."""
    as_torchrun(rank, world)
    found = {}
    for name, strategy in strategies.items():
        seen: Counter[str] = Counter()
        left = NOT_RUN | _refused_under(name)
        base = Seq2SeqTrainer if strategy is None else _ours()
        kind = _noting(base, [one for one in METHODS if one not in left], seen)
        trainer = _trainer(kind, f"{folder}/{name}", strategy, 2 if name == "shard" else 1)
        found[name] = _run(trainer), set(seen)
    return found


def _replaced(rank: int, world: int, folder: str, strategies: dict[str, Any]) -> dict[str, Any]:
    """By strategy: what a run with `_Own`'s methods logs; of `_Behind`'s, why it ends."""
    as_torchrun(rank, world)
    found: dict[str, Any] = {}
    for name, strategy in strategies.items():
        base = Seq2SeqTrainer if strategy is None else _ours()
        data = 2 if name == "shard" else 1
        own = type("Own", (_Own, base), {"__module__": __name__})
        found[name] = _run(_trainer(own, f"{folder}/{name}", strategy, data))
        if strategy is not None:
            behind = type("Behind", (_Behind, base), {"__module__": __name__})
            with pytest.raises(IntegrationError) as refused:
                _trainer(behind, f"{folder}/behind", strategy, data).train()
            found[f"{name} behind"] = str(refused.value)
    return found


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, list[float]], set[str]]:
    folder = str(tmp_path_factory.mktemp("plain"))
    return run_ranks(_noted, 1, folder, {"plain": None})[0]["plain"]  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def spread(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_ranks(_noted, 2, str(tmp_path_factory.mktemp("spread")), STRATEGIES)[0]


@pytest.mark.parametrize("name", STRATEGIES)
def test_what_one_process_calls_is_called(plain: Any, spread: dict[str, Any], name: str) -> None:
    (right, called), (got, ours) = plain, spread[name]
    assert len(METHODS) > 85
    assert called - ours <= _refused_under(name)
    for key, values in right.items():
        assert got[key] == pytest.approx(values, abs=NEAR), key


def test_methods_without_a_call_of_what_they_replace_count_as_in_one_process(tmp_path: Path) -> None:
    right = run_ranks(_replaced, 1, str(tmp_path), {"plain": None})[0]["plain"]
    found = run_ranks(_replaced, 2, str(tmp_path), {name: STRATEGIES[name] for name in ("shard", "tensor")})[
        0
    ]
    assert right["own"] and right["loss"]
    for name in ("shard", "tensor"):
        for key, values in right.items():
            assert found[name][key] == pytest.approx(values, abs=NEAR), (name, key)
        assert found[f"{name} behind"].startswith("_Behind.training_step computed no gradients through")


def _refused(rank: int, world: int) -> dict[str, str]:
    as_torchrun(rank, world)
    found = {}
    for name in sorted(_refused_under("pipeline")):
        kind = _noting(_ours(), [name], Counter())
        kind.__module__ = __name__
        with tempfile.TemporaryDirectory() as folder, pytest.raises(IntegrationError) as refused:
            _trainer(kind, folder, STRATEGIES["pipeline"], 1)
        found[name] = str(refused.value)
    return found


def test_what_nothing_would_call_is_refused_by_name() -> None:
    found = run_ranks(_refused, 2)[0]
    assert found.keys() == _refused_under("pipeline")
    assert all(text.startswith(f"Noting.{name} would not be called: ") for name, text in found.items())
