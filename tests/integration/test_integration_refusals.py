"""What cannot be honoured inside a Trainer is refused by name, before anything runs; what can be is put into effect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_cases import ACCUMULATION, BATCH, Case, as_torchrun, model_of, trainer_of
from transformers import TrainingArguments

from harness import run_ranks
from hyper_parallel.errors import ConfigError, IntegrationError
from hyper_parallel.integration import parallel_run
from hyper_parallel.integration.parallel_run import AutoRequest, read, strategy_of
from hyper_parallel.integration.trainer_arguments import adjusted, check_model
from hyper_parallel.strategy import Strategy

ALONE: dict[str, Any] = {"axes": {"replicate": 1}}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"fp16_full_eval": True}, "fp16_full_eval cannot be used .* leave it out"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size .* set per_device_train_batch_size"),
        ({"use_liger_kernel": True}, "use_liger_kernel cannot be used"),
        ({"torch_compile": True}, "torch_compile cannot be used"),
        (
            {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"every_n_layers": 2}},
            "every_n_layers cannot be honoured",
        ),
    ],
)
def test_an_argument_that_cannot_be_honoured_is_named(
    tmp_path: Path, arguments: dict[str, Any], told: str
) -> None:
    with pytest.raises(IntegrationError, match=told):
        trainer_of(Case(ALONE, arguments=arguments), str(tmp_path))


def test_an_optimizer_of_the_unspread_model_is_refused(tmp_path: Path) -> None:
    made = torch.optim.AdamW(model_of("llama").parameters())
    with pytest.raises(IntegrationError, match="optimizer_cls_and_kwargs"):
        trainer_of(Case(ALONE), str(tmp_path), optimizers=(made, None))


def test_trials_of_hyperparameters_are_refused(tmp_path: Path) -> None:
    with pytest.raises(IntegrationError, match="start a run for each trial"):
        trainer_of(Case(ALONE), str(tmp_path)).hyperparameter_search()


@pytest.mark.parametrize(
    ("arguments", "axes"),
    [
        ({"neftune_noise_alpha": 5}, {"context": 2}),
        ({"train_sampling_strategy": "batch_rebalance"}, {"tensor": 2}),
    ],
)
def test_an_argument_that_does_not_go_with_the_axes_is_named(
    arguments: dict[str, Any], axes: dict[str, int]
) -> None:
    assert run_ranks(_refused, 2, arguments, {"axes": axes}) == [next(iter(arguments))] * 2


def _refused(rank: int, world: int, arguments: dict[str, Any], strategy: dict[str, Any]) -> str:
    as_torchrun(rank, world)
    with pytest.raises(IntegrationError) as error:
        trainer_of(Case(strategy, arguments=arguments), "unwritten")
    return str(error.value).split("=")[0].split()[0]


def test_a_model_that_is_split_or_quantised_already_is_refused() -> None:
    for attribute, value, told in (
        ("hf_quantizer", object(), "is quantised"),
        ("hf_device_map", {"a": 0, "b": 1}, "load it without device_map"),
        ("is_distributed_loading_by_transformers", True, "split by Transformers"),
    ):
        model = torch.nn.Linear(2, 2)
        setattr(model, attribute, value)
        with pytest.raises(IntegrationError, match=told):
            check_model(model)


def test_what_the_arguments_and_the_model_say_where_the_strategy_is_silent(tmp_path: Path) -> None:
    def settled(strategy: Strategy, dtype: torch.dtype = torch.float32, **arguments: Any) -> Strategy:
        args = TrainingArguments(str(tmp_path), use_cpu=True, **arguments)
        return adjusted(strategy, args, torch.nn.Linear(2, 2, dtype=dtype))

    said = settled(Strategy(), bf16=True).precision
    assert (said.param, said.compute) == ("float32", "bfloat16")
    said = settled(Strategy(), torch.bfloat16).precision
    assert (said.param, said.compute, said.reduce) == ("bfloat16", "bfloat16", "float32")
    said = settled(Strategy.model_validate({"precision": {"compute": "float32"}}), bf16=True).precision
    assert said.compute == "float32"
    assert settled(Strategy(), gradient_checkpointing=True).memory.recompute == "layer"
    for memory in ({"recompute": "selective"}, {"recompute": "layer", "recompute_layers": 2}):
        chosen = settled(Strategy.model_validate({"memory": memory}), gradient_checkpointing=True).memory
        assert {key: getattr(chosen, key) for key in memory} == memory
    with pytest.raises(IntegrationError, match="say one of them"):
        settled(Strategy.model_validate({"memory": {"recompute": "none"}}), gradient_checkpointing=True)
    with pytest.raises(IntegrationError, match="load the model in float32 or bfloat16"):
        settled(Strategy(), torch.float16)


def test_a_strategy_is_given_in_several_ways(tmp_path: Path) -> None:
    axes = {"shard": 2, "tensor": 2}
    own, run = tmp_path / "strategy.yaml", tmp_path / "run.yaml"
    own.write_text("version: 1\naxes: {shard: 2, tensor: 2}\n")
    run.write_text(
        "version: 1\nout: x\nmodel: {config: {model_type: llama}}\ndata: {train: python-stdlib}\n"
        "strategy: {axes: {shard: 2, tensor: 2}}\n"
    )
    meant = Strategy.model_validate({"axes": axes})
    for given in (meant, {"axes": axes}, own, str(run)):
        assert read(given, 4) == meant
    assert read(None, 4).axes.shard == 4
    assert read("auto", 4).open
    with pytest.raises(IntegrationError, match=r"there is no file nowhere\.yaml"):
        read("nowhere.yaml", 4)
    with pytest.raises(ConfigError, match="did you mean 'shard'"):
        read({"axes": {"shards": 2}}, 4)
    with pytest.raises(
        IntegrationError, match=r"multiply to 4 \(shard 2 · tensor_x 2\), and there are 3 processes"
    ):
        strategy_of(meant, torch.nn.Linear(2, 2), world=3, batch=4, length=8)


def _chosen(rank: int, world: int) -> tuple[int, int, int, int]:
    as_torchrun(rank, world)
    choose = parallel_run.choose
    # By the closed forms alone: what is simulated beside is `auto`'s, and takes its time.
    parallel_run.choose = lambda *args: choose(*args, simulate=None)  # type: ignore[assignment]
    strategy = {"axes": {"tensor": 2, "shard": "auto"}, "cluster": "h100"}
    trainer = trainer_of(Case(strategy, data=2), "unwritten")
    spread = trainer.spread
    total = trainer.get_total_train_batch_size(trainer.args)
    return (
        spread.handle.strategy.axes.tensor,
        spread.data_ranks,
        trainer.args.gradient_accumulation_steps,
        total,
    )


def test_open_axes_are_planned_and_the_global_batch_stays() -> None:
    assert run_ranks(_chosen, 2) == [(2, 1, 2 * ACCUMULATION, BATCH * ACCUMULATION)] * 2


def test_auto_inside_a_trainer_leaves_no_pipeline_open() -> None:
    asked = AutoRequest(Strategy.model_validate("auto"), torch.nn.Linear(2, 2), batch=8, rows=1, length=32)
    found = parallel_run._run(asked, str(Path(__file__).parent)).strategy
    assert "pipeline" not in found.axes.open and found.axes.pipeline == 1 and "shard" in found.axes.open
    assert "memory.shard" in found.chosen and not any(key.startswith("pipeline") for key in found.chosen)
