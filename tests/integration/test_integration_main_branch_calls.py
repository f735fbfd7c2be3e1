"""Single calls of LlamaFactory's main branch: what they return, and what is refused before a model is touched."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy

from harness import run_ranks
from hyper_parallel.errors import IntegrationError
from hyper_parallel.integration import llamafactory
from hyper_parallel.integration.llamafactory import (
    HSDPModule,
    HyperParallelArguments,
    clip_grad_norm_,
    ep_prepare_model,
    fsdp2_prepare_model,
    hsdp_sync_stream,
    wrap_optimizer_with_skip_dtensor_dispatch,
)
from hyper_parallel.integration.llamafactory.context_parallel import (
    LossAlone,
    cp_prepare_model,
    get_cp_group,
    get_cp_group_ranks,
    get_cp_rank,
    get_dp_rank,
    shard_inputs_for_cp,
)
from hyper_parallel.platform import get_platform
from hyper_parallel.shard import sharded
from integration.spread_steps import tiny


def accelerator(mixed_precision: str = "no", **plugin: Any) -> Any:
    """What the functions read of an Accelerator whose state has an FSDP2 plugin."""
    made = FullyShardedDataParallelPlugin(fsdp_version=2, **plugin)
    state = types.SimpleNamespace(fsdp_plugin=made)
    return types.SimpleNamespace(state=state, device=torch.device("cpu"), mixed_precision=mixed_precision)


def prepared(fields: dict[str, Any] | None = None, model: Any = None, **given: Any) -> Any:
    model = tiny() if model is None else model
    return fsdp2_prepare_model(accelerator(**given), model, HyperParallelArguments.from_dict(fields or {}))


def batch(length: int) -> dict[str, torch.Tensor]:
    ids = torch.arange(2 * length).reshape(2, length) % 60 + 3
    mask = torch.ones_like(ids)
    return {"input_ids": ids, "labels": ids.clone(), "attention_mask": mask}


def test_every_name_that_is_imported_is_there() -> None:
    for name in llamafactory.__all__:
        if name != "HyperParallelTrainer":
            assert getattr(llamafactory, name) is not None
    assert set(llamafactory.__all__) <= set(dir(llamafactory))


def test_the_platform_is_the_launchers_until_there_is_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (get_platform().get_rank(), get_platform().get_world_size()) == (0, 1)
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "6")
    assert (get_platform().get_rank(), get_platform().get_world_size()) == (5, 6)
    arguments = HyperParallelArguments(cp_size=2)
    assert (get_cp_rank(arguments), get_dp_rank(arguments)) == (1, 2)
    assert get_cp_group_ranks(arguments) == (4, 5)
    assert get_cp_group(HyperParallelArguments()) is None


@pytest.mark.parametrize("length", [8, 7])
def test_rows_are_cut_and_what_does_not_divide_is_padded(length: int) -> None:
    inputs = batch(length)
    inputs["position_ids"] = torch.arange(length).expand(2, -1)
    parts = [shard_inputs_for_cp(inputs, rank, 2) for rank in range(2)]
    for key in ("input_ids", "position_ids"):
        whole = torch.cat([part[key] for part in parts], 1)
        assert whole.shape == (2, 8)
        assert torch.equal(whole[:, :length], inputs[key])
    for part in parts:
        assert part["labels"] is inputs["labels"]
        assert part["attention_mask"] is inputs["attention_mask"]
    assert inputs["input_ids"].size(1) == length


def test_the_queries_of_a_4d_mask_are_cut() -> None:
    mask = torch.arange(2 * 6 * 6).reshape(2, 1, 6, 6)
    inputs = {**batch(6), "attention_mask": mask}
    assert torch.equal(shard_inputs_for_cp(inputs, 1, 3)["attention_mask"], mask[:, :, 2:4])


def test_one_part_is_the_whole() -> None:
    inputs = batch(7)
    assert shard_inputs_for_cp(inputs, 0, 1) == inputs


def test_a_batch_without_rows_is_refused() -> None:
    with pytest.raises(IntegrationError, match=r"without input_ids .* cp_size 2; it has labels"):
        shard_inputs_for_cp({"labels": torch.zeros(2, 4)}, 0, 2)


def test_a_loss_alone_refuses_what_it_has_not() -> None:
    output = LossAlone(loss=torch.tensor(1.0))
    assert output["loss"] is output.loss is output.get("loss")
    for ask in (lambda: output["logits"], lambda: output.get("logits"), lambda: output.logits):
        with pytest.raises(IntegrationError, match=r"returns no logits.*cp_size 1"):
            ask()


def test_a_prepared_model_is_the_same_object_and_is_prepared_once() -> None:
    model = tiny()
    names = [name for name, _ in model.named_parameters()]
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert not isinstance(model, HSDPModule)
    assert prepared(model=model) is model
    assert isinstance(model, HSDPModule)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert [name for name, _ in model.named_parameters()] == names
    assert all(torch.equal(p, values[name]) for name, p in model.named_parameters())
    cls = type(model)
    assert prepared(model=model) is model
    assert type(model) is cls
    model.set_is_last_backward(False)
    model.set_requires_gradient_sync(False)
    hsdp_sync_stream()


def test_tied_weights_stay_tied() -> None:
    model = prepared(model=tiny(tied=True))
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_the_optimizer_steps_and_its_step_stays_a_method() -> None:
    model = prepared()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    wrap_optimizer_with_skip_dtensor_dispatch(optimizer)
    step = optimizer.step
    wrap_optimizer_with_skip_dtensor_dispatch(optimizer)
    assert optimizer.step is step
    assert step.__func__ is not None
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda at: 0.5**at)
    before = model.lm_head.weight.detach().clone()
    model(**batch(6)).loss.backward()
    norm = clip_grad_norm_(model.parameters(), 0.25)
    assert float(norm) > 0.25
    assert float(clip_grad_norm_(model.parameters(), float("inf"))) == pytest.approx(0.25, rel=1e-4)
    optimizer.step()
    schedule.step()
    assert not torch.equal(model.lm_head.weight, before)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)


def test_clipping_refuses_another_norm_and_a_part_of_the_parameters() -> None:
    model = prepared()
    model(**batch(6)).loss.backward()
    with pytest.raises(IntegrationError, match="norm_type=inf"):
        clip_grad_norm_(model.parameters(), 1.0, norm_type=float("inf"))
    with pytest.raises(IntegrationError, match="were not given"):
        clip_grad_norm_([next(model.parameters())], 1.0)
    with pytest.raises(IntegrationError, match="none of a prepared model's"):
        clip_grad_norm_(tiny().parameters(), 1.0)


def test_the_plugin_says_precision_and_recomputation() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    given = {"mixed_precision_policy": policy, "reshard_after_forward": False}
    strategy = sharded(prepared(mixed_precision="bf16", model=tiny().bfloat16(), **given)).strategy
    precision = strategy.precision
    assert (precision.param, precision.compute, precision.reduce) == ("float32", "bfloat16", "float32")
    assert strategy.memory.reshard_after_forward is False

    # What the arguments say comes first.
    said = {"param_dtype": "float32", "reduce_dtype": "bfloat16", "reshard_after_forward": True}
    strategy = sharded(prepared(said, mixed_precision="bf16", **given)).strategy
    assert (strategy.precision.compute, strategy.precision.reduce) == ("float32", "bfloat16")
    assert strategy.memory.reshard_after_forward is True

    assert sharded(prepared(model=tiny().bfloat16())).strategy.precision.param == "bfloat16"


def test_checkpoint_wrappers_of_accelerate_become_recomputation() -> None:
    model = tiny()
    names = [name for name, _ in model.named_parameters()]
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = checkpoint_wrapper(layer)
    model = prepared(model=model)
    assert [name for name, _ in model.named_parameters()] == names
    assert sharded(model).strategy.memory.recompute == "layer"


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"cpu_offload": True}, "fsdp_offload_params"),
        ({"ignored_modules": [nn.Linear(1, 1)]}, "ignored_modules"),
        ({"mixed_precision": "fp16"}, "'fp16' is not supported"),
        ({"fields": {"tp_size": 2}}, "tp_size 2 = 2 does not divide"),
        ({"fields": {"cp_size": 2}}, "cp_size 2 = 2 does not divide"),
        ({"fields": {"activation_mode": "swap"}}, "memory budget"),
        ({"fields": {"memory": {"device": "1GiB", "host": "1GiB"}}}, "memory budget"),
        ({"fields": {"device_type": "cuda"}}, "device_type is 'cuda'"),
        ({"fields": {"strategy": {"axes": {"context": 2}}}}, "multiply to 2"),
    ],
)
def test_what_cannot_be_honoured_is_refused_and_the_model_is_untouched(
    given: dict[str, Any], text: str
) -> None:
    model = tiny()
    with pytest.raises(IntegrationError, match=text):
        prepared(**given, model=model)
    assert not isinstance(model, HSDPModule)
    assert model(**batch(6)).loss.requires_grad


def _stages(rank: int, world: int) -> str:
    model = tiny()
    with pytest.raises(IntegrationError) as error:
        prepared({"pp_size": 2}, model)
    assert not isinstance(model, HSDPModule)
    return str(error.value)


def test_stages_are_refused_since_the_loop_runs_the_passes() -> None:
    first, second = run_ranks(_stages, 2)
    assert first == second and "\n" not in first
    assert "set pp_size to 1, or use LlamaFactory 0.9.5, whose trainer is HyperParallel's" in first


def test_models_that_cannot_be_split_are_refused() -> None:
    arguments = HyperParallelArguments(ep_size=1, cp_size=1)
    assert cp_prepare_model(nn.Linear(2, 2), accelerator(), arguments) is not None
    assert ep_prepare_model(nn.Linear(2, 2), accelerator(), arguments) is not None
    with pytest.raises(IntegrationError, match="ep_size 2 does not divide"):
        ep_prepare_model(tiny(), accelerator(), HyperParallelArguments(ep_size=2))
    compiled = torch.nn.Module()
    compiled._orig_mod = tiny()
    with pytest.raises(IntegrationError, match="torch_compile"):
        prepared(model=compiled)
