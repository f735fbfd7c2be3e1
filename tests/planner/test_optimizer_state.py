"""The planner's bytes of an optimizer's state beside those of the tensors that the optimizer makes."""

from __future__ import annotations

import pytest
from pydantic import TypeAdapter
from transformers import AutoConfig, AutoModelForCausalLM

from hyper_parallel import shard
from hyper_parallel.config.train import OptimizerConfig
from hyper_parallel.step.optimizer import build_optimizer
from hyper_parallel.strategy import Strategy
from hyper_parallel.workload.shape import Shape
from hyper_parallel.workload.workload import OPTIMIZERS, Workload, state_bytes

LLAMA = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_is_what_the_optimizer_keeps(name: str) -> None:
    config = AutoConfig.for_model("llama", **LLAMA)
    model = AutoModelForCausalLM.from_config(config)
    shard.parallelize(model, Strategy())
    settings = TypeAdapter(OptimizerConfig).validate_python({"name": name})
    pieces = build_optimizer(model, settings).pieces().values()
    kept = sum(piece.local.numel() * piece.local.element_size() for piece in pieces)
    work = Workload(Shape.of_config(config.to_dict(), "small"), 1, 32, optimizer=name)
    # Bytes an element; vectors, and sides of matrices that are not the model's width, are not told apart.
    assert state_bytes(work) == pytest.approx(kept / work.trained_parameters, rel=0.01, abs=0.015)
