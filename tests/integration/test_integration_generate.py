"""`predict_with_generate`: the tokens of Seq2SeqTrainer in one process, by the engine, on any strategy."""

from __future__ import annotations

import functools
import tempfile
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

from harness import run_ranks
from hyper_parallel.integration.engine_generate import EngineGenerate
from integration.trainer_cases import as_torchrun, collate, model_of, rows

ROWS = 10
ENDS = [2, 3]


def _predicted(strategy: dict[str, Any] | None, **settings: Any) -> tuple[np.ndarray, dict[str, float], int]:
    """Tokens, metrics, and the rows that the engine answered. None: Transformers' own Trainer."""
    transformers.logging.set_verbosity_error()
    axes = {} if strategy is None else strategy["axes"]
    data = axes.get("shard", 1) * axes.get("replicate", 1)
    model = model_of("llama")
    model.generation_config.eos_token_id = settings.pop("ends", ENDS)
    model.generation_config.pad_token_id = 0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    with tempfile.TemporaryDirectory() as folder:
        arguments = Seq2SeqTrainingArguments(
            output_dir=folder,
            per_device_eval_batch_size=4 // data,
            predict_with_generate=True,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        given: dict[str, Any] = {
            "model": model,
            "args": arguments,
            "data_collator": functools.partial(collate, side=settings.pop("side", "left")),
        }
        if strategy is None:
            trainer: Any = Seq2SeqTrainer(**given)
        else:
            from hyper_parallel.integration.transformers import HyperParallelSeq2SeqTrainer

            trainer = HyperParallelSeq2SeqTrainer(strategy=strategy, **given)
        trainer._pad_tensors_to_max_len = _padded
        found = trainer.predict(rows(ROWS), **settings)
        assert "generate" not in vars(model), "the model's own again"
        engine = (
            trainer._generate.rows if isinstance(getattr(trainer, "_generate", None), EngineGenerate) else 0
        )
    return found.predictions, found.metrics, engine


def _padded(tensor: torch.Tensor, length: int) -> torch.Tensor:
    """As Seq2SeqTrainer does with a tokenizer."""
    return torch.nn.functional.pad(tensor, (0, length - tensor.shape[-1]), value=0)


def _rank(rank: int, world: int, strategy: dict[str, Any], settings: dict[str, Any]) -> Any:
    as_torchrun(rank, world)
    return _predicted(strategy, **settings)


def _words(predictions: np.ndarray) -> list[list[int]]:
    """Without padding, which depends on the rows that are predicted together."""
    return [[token for token in row if token > 0] for row in predictions.tolist()]


GREEDY = {"max_new_tokens": 12}


@pytest.mark.parametrize(
    ("settings", "by_engine"),
    [
        (GREEDY, True),
        ({"max_new_tokens": 12, "repetition_penalty": 1.3}, True),
        ({"max_length": 24}, True),
        ({"max_new_tokens": 6, "num_beams": 2}, False),
        ({"max_new_tokens": 6, "min_new_tokens": 5}, False),
        ({"max_new_tokens": 6, "side": "right"}, False),
        ({"max_new_tokens": 6, "ends": None}, True),
    ],
)
def test_one_process(settings: dict[str, Any], by_engine: bool) -> None:
    expected, metrics, _ = _predicted(None, **settings)
    found, own, answered = _predicted({"axes": {}}, **settings)
    assert np.array_equal(found, expected)
    assert own.keys() == metrics.keys()
    assert bool(answered) == by_engine
    if by_engine:
        assert answered == ROWS


@pytest.mark.parametrize("axes", [{"tensor": 2}, {"shard": 2}, {"replicate": 2}])
def test_two_ranks(axes: dict[str, int]) -> None:
    expected, _, _ = _predicted(None, **GREEDY)
    for found, _, answered in run_ranks(_rank, 2, {"axes": axes}, GREEDY):
        assert _words(found)[:ROWS] == _words(expected)
        assert answered >= ROWS // 2


def test_what_is_drawn_does_not_depend_on_the_strategy() -> None:
    drawn = {"max_new_tokens": 12, "do_sample": True, "temperature": 0.9, "top_p": 0.95}
    alone, _, _ = _predicted({"axes": {}}, **drawn)
    assert np.array_equal(alone, _predicted({"axes": {}}, **drawn)[0])
    assert not np.array_equal(alone, _predicted({"axes": {}}, **GREEDY)[0])
    for found, _, _ in run_ranks(_rank, 2, {"axes": {"shard": 2}}, drawn):
        assert _words(found)[:ROWS] == _words(alone)
