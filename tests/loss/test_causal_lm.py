"""The loss of a model: chunked and split, against whole logits on one device."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).parents[1] / "shard"))
from families import ROWS, STRATEGIES, batch, build, inputs_of

from harness import run_ranks
from hyper_parallel import shard
from hyper_parallel.compat.local_tensor import each_rank, one_device, per_rank, simulated_ranks
from hyper_parallel.config.train import LossConfig
from hyper_parallel.errors import StrategyError
from hyper_parallel.shard.loss import causal_lm_loss
from hyper_parallel.shard.process_mesh import LOSS_AXES
from hyper_parallel.strategy import Strategy

Outcome = tuple[float, float, dict[str, torch.Tensor]]
"""Loss, loss without gradients, whole gradients by name."""

OPTIONS = {"label_smoothing": 0.1, "z_loss": 1e-3}


def _prepared(family: str, strategy: Strategy, lowering: str, **overrides: Any) -> torch.nn.Module:
    model = build(family, **overrides)
    shard.parallelize(model, strategy, lowering=lowering)  # type: ignore[arg-type]
    shard.init_weights(model, seed=1)
    return model


def _outcome(model: torch.nn.Module, strategy: Strategy, options: LossConfig) -> Outcome:
    handle = shard.sharded(model)
    with one_device():
        whole = batch(images=hasattr(model.config, "vision_config"))
        tokens = int((whole["labels"] != -100).sum())

    def mine(key: str) -> torch.Tensor:
        return per_rank(lambda r: whole[key].chunk(strategy.axes.data)[handle.data_index_of(r)].clone())

    rows = per_rank(lambda r: torch.arange(ROWS).chunk(strategy.axes.data)[handle.data_index_of(r)])
    given = {**inputs_of({key: mine(key) for key in whole}), "labels": mine("labels")}
    given |= {"tokens": tokens, "options": options}
    with handle.micro_batch(seed=3, step=7, rows=rows), torch.no_grad():
        valued = handle.all_reduce(causal_lm_loss(model, **given), LOSS_AXES)
    with handle.micro_batch(seed=3, step=7, rows=rows):
        loss = causal_lm_loss(model, **given)
        (2 * loss).backward()  # not only for a gradient of 1
    loss = handle.all_reduce(loss.detach(), LOSS_AXES)
    gradients = {
        p.name: handle.gather(p.grad, p.layout) / 2 for p in handle.parameters() if p.grad is not None
    }
    with one_device():
        first = {name: next(iter(each_rank(g).values())).clone() for name, g in gradients.items()}
        return (
            float(next(iter(each_rank(loss).values()))),
            float(next(iter(each_rank(valued).values()))),
            first,
        )


@functools.cache
def _expected(family: str, **overrides: Any) -> Outcome:
    """By the model's own logits and PyTorch's cross-entropy; nothing of ours but the values."""
    model = _prepared(family, Strategy(), "traceable", **overrides)
    whole = batch(images=hasattr(model.config, "vision_config"))
    handle = shard.sharded(model)
    tokens = int((whole["labels"] != -100).sum())

    def loss() -> torch.Tensor:
        logits = model(**inputs_of(whole), use_cache=False).logits.float().flatten(0, 1)
        labels = whole["labels"].flatten()
        plain = torch.nn.functional.cross_entropy(
            logits, labels, ignore_index=-100, reduction="sum", label_smoothing=OPTIONS["label_smoothing"]
        )
        lse = logits.logsumexp(-1)[labels != -100]
        return (plain + OPTIONS["z_loss"] * lse.square().sum()) / tokens

    with handle.micro_batch(seed=3, step=7, rows=torch.arange(ROWS)):
        with torch.no_grad():
            valued = float(loss())
        value = loss()
        value.backward()
    return (
        float(value.detach()),
        valued,
        {n: p.grad for n, p in model.named_parameters() if p.grad is not None},
    )


def _close(got: Outcome, expected: Outcome) -> None:
    assert got[0] == pytest.approx(expected[0], abs=2e-6)
    assert got[1] == pytest.approx(expected[1], abs=2e-6)
    assert got[2].keys() == expected[2].keys()
    for name, gradient in expected[2].items():
        # As in the matrix: sums in another order, 1e-7 measured, with a factor of five.
        torch.testing.assert_close(
            got[2][name], gradient, rtol=0, atol=5e-7, msg=lambda m, n=name: f"{n}: {m}"
        )


def _options(chunk: int | str) -> LossConfig:
    return LossConfig(chunk=chunk, **OPTIONS)  # type: ignore[arg-type]


# Gemma 2 caps its logits in the model's own forward, here at a value that they reach.
FAMILIES = ["llama", "llama-tied", "qwen3", "gemma2", "gemma3", "phi3", "gpt2", "deepseek-v3", "qwen2.5-vl"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunk", [24, "none"])  # 128 positions: 24 does not divide them
def test_one_device(family: str, chunk: int | str) -> None:
    overrides = {"final_logit_softcapping": 0.5} if family == "gemma2" else {}
    got = _outcome(_prepared(family, Strategy(), "traceable", **overrides), Strategy(), _options(chunk))
    _close(got, _expected(family, **overrides))


MORE = {
    "2D": {"axes": {"tensor_y": 2, "tensor_x": 2}},
    "context 2 tensor 2": {"axes": {"context": 2, "tensor": 2}},
}
SIMULATED = [
    ("llama", "tensor 2"),
    ("llama", "2D"),
    ("llama-tied", "context 2 tensor 2"),
    ("llama-tied", "tensor 4 sequence"),
    ("gemma3", "shard 2 tensor 2"),
    ("gpt2", "shard 2"),
    ("phi3", "replicate 2 shard 2 tensor 2 sequence recompute"),
    ("qwen2.5-vl", "shard 2"),
]


@pytest.mark.parametrize(("family", "name"), SIMULATED)
def test_simulated_ranks(family: str, name: str) -> None:
    strategy = Strategy(**(STRATEGIES | MORE)[name])
    with simulated_ranks(strategy.axes.world):
        got = _outcome(_prepared(family, strategy, "traceable"), strategy, _options(7))
    _close(got, _expected(family))


def _rank(rank: int, world: int, family: str, name: str, chunk: int | str) -> Outcome:
    strategy = Strategy(**STRATEGIES[name], check=False)
    return _outcome(_prepared(family, strategy, "fsdp"), strategy, _options(chunk))


@pytest.mark.parametrize(
    ("family", "name", "chunk"),
    [
        ("llama", "shard 2", 7),
        ("llama-tied", "shard 2 tensor 2", 7),
        ("gemma3", "replicate 2 shard 2", 7),
        ("llama-tied", "tensor 4 sequence", 7),
        ("qwen3", "tensor 2 shard 2 sequence", "none"),
    ],
)
def test_workers_over_fsdp2(family: str, name: str, chunk: int | str) -> None:
    expected = _expected(family)
    for got in run_ranks(_rank, Strategy(**STRATEGIES[name]).axes.world, family, name, chunk):
        _close(got, expected)


class _Largest(TorchDispatchMode):
    """The most elements of any tensor that an operator made whose last dim is the vocabulary's."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.rows, self._vocabulary = 0, vocabulary

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.dim() and tensor.size(-1) == self._vocabulary:
                self.rows = max(self.rows, tensor.numel() // self._vocabulary)
        return result


@pytest.mark.parametrize("gradients", [True, False])
def test_full_logits_never_exist(gradients: bool) -> None:
    model = _prepared("llama", Strategy(), "traceable")
    whole = batch()
    given = (whole["input_ids"], whole["labels"], whole["position_ids"], 100.0)
    seen = {}  # 40 rows are more than the 32 of the head's weight as it is multiplied with
    for chunk in (40, "none"):
        with _Largest(131) as largest, torch.set_grad_enabled(gradients):
            loss = causal_lm_loss(model, *given, _options(chunk))
            if gradients:
                loss.backward()
        seen[chunk] = largest.rows
    assert seen == {40: 40, "none": whole["input_ids"].numel()}


def _rank_largest(rank: int, world: int) -> list[int]:
    model = _prepared("llama", Strategy(axes={"tensor": world}, check=False), "fsdp")
    whole = batch()
    with _Largest(131) as gathered, _Largest(66) as local:  # 131 over 2 ranks: 66 and 65
        causal_lm_loss(
            model, whole["input_ids"], whole["labels"], whole["position_ids"], 100.0, _options("none")
        ).backward()
    return [gathered.rows, local.rows if rank == 0 else whole["input_ids"].numel()]


def test_logits_stay_split_over_the_vocabulary() -> None:
    assert run_ranks(_rank_largest, 2) == [[0, ROWS * 16]] * 2


def test_low_precision_weights_get_gradients_summed_in_fp32() -> None:
    """Summed in bfloat16, 64 chunks would be off by several units in the last place; in fp32 it rounds once."""
    strategy = Strategy(precision={"param": "bfloat16", "compute": "bfloat16"})
    model = _prepared("llama", strategy, "traceable")
    whole, gradients = batch(), {}
    for chunk in (2, "none"):
        model.zero_grad()
        causal_lm_loss(
            model, whole["input_ids"], whole["labels"], whole["position_ids"], 100.0, _options(chunk)
        ).backward()
        gradients[chunk] = model.lm_head.weight.grad.float()
    # Half a unit in the last place of each chunk's own gradient, and one of the sum.
    scale = gradients["none"].abs().max()
    assert (gradients[2] - gradients["none"]).abs().max() <= 2**-8 * scale


def test_gradients_are_handed_out_once() -> None:
    model = _prepared("llama", Strategy(), "traceable")
    whole = batch()
    loss = causal_lm_loss(model, whole["input_ids"], whole["labels"], whole["position_ids"], 1.0, _options(7))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="differentiated a second time"):
        loss.backward()


def test_frozen_heads_and_frozen_models() -> None:
    whole, model = batch(), _prepared("llama", Strategy(), "traceable")
    given = (whole["input_ids"], whole["labels"], whole["position_ids"], 100.0, _options(7))
    model.lm_head.weight.requires_grad_(False)
    causal_lm_loss(model, *given).backward()
    assert model.lm_head.weight.grad is None and model.model.norm.weight.grad is not None
    model.model.requires_grad_(False)
    assert not causal_lm_loss(model, *given).requires_grad
    model.lm_head.weight.requires_grad_(True)
    model.model.zero_grad()
    causal_lm_loss(model, *given).backward()
    assert model.lm_head.weight.grad is not None and model.model.norm.weight.grad is None


def test_the_model_itself_still_gives_logits() -> None:
    whole = batch()
    with simulated_ranks(2):
        model = _prepared("llama", Strategy(axes={"tensor": 2}), "traceable")
        ids = per_rank(lambda rank: whole["input_ids"].clone())
        positions = per_rank(lambda rank: whole["position_ids"].clone())
        labels = per_rank(lambda rank: whole["labels"].clone())
        before = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        causal_lm_loss(model, ids, labels, positions, 1.0, _options(7))
        after = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        assert before.shape[-1] == 131
        with one_device():
            assert torch.equal(each_rank(before)[0], each_rank(after)[0])


def _rank_auxiliary(rank: int, world: int, axes: dict[str, int], chunk: int | str) -> Outcome:
    strategy = Strategy(axes=axes, check=False)
    model = _prepared("mixtral", strategy, "fsdp", output_router_logits=True, router_aux_loss_coef=0.5)
    return _outcome(model, strategy, _options(chunk))


@pytest.mark.parametrize("axes", [{"shard": 2}, {"tensor": 2}])
def test_the_auxiliary_loss_is_added_while_training(axes: dict[str, int]) -> None:
    model = _prepared("mixtral", Strategy(), "traceable", output_router_logits=True, router_aux_loss_coef=0.5)
    whole = batch()
    ids, positions = whole["input_ids"], whole["position_ids"]
    # Transformers' own, which it adds to a loss that it computes itself.
    output = model(input_ids=ids, position_ids=positions, labels=ids, use_cache=False)
    auxiliary = 0.5 * output.aux_loss
    (gate,) = torch.autograd.grad(auxiliary, [model.model.layers[0].mlp.gate.weight])
    got = _outcome(model, Strategy(), _options(24))
    plain = _expected("mixtral")
    assert got[0] - plain[0] == pytest.approx(float(auxiliary.detach()), rel=1e-4)
    assert got[1] == pytest.approx(plain[1], abs=2e-6)
    name = "model.layers.0.mlp.gate.weight"
    torch.testing.assert_close(got[2][name] - plain[2][name], gate, rtol=1e-4, atol=1e-6)
    for theirs in run_ranks(_rank_auxiliary, 2, axes, 24):
        _close(theirs, got)


def test_adapters_are_seen_through() -> None:
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    whole, outcomes = batch(), []
    for chunk in (24, "none"):
        model = peft.get_peft_model(build("llama"), settings)
        shard.parallelize(model, Strategy(), lowering="traceable")
        shard.init_weights(model, seed=1)
        with _Largest(131) as largest:
            loss = causal_lm_loss(
                model, whole["input_ids"], whole["labels"], whole["position_ids"], 100.0, _options(chunk)
            )
        loss.backward()
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        outcomes.append((float(loss.detach()), 0.0, gradients))
        assert largest.rows == (32 if chunk == 24 else 128) and any("lm_head.lora_B" in n for n in gradients)
    _close(*outcomes)


class Tiny(torch.nn.Module):
    """No model of Transformers': a module that returns logits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = torch.nn.Embedding(11, 4), torch.nn.Linear(4, 11)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(ids))


def test_other_modules_and_models_that_are_not_parallelized() -> None:
    ids = torch.arange(10).reshape(2, 5)
    labels = ids + 1
    labels[0, 3] = -100
    expected = torch.nn.functional.cross_entropy(
        Tiny()(ids).flatten(0, 1), labels.flatten(), reduction="sum", label_smoothing=0.1
    )
    options = LossConfig(label_smoothing=0.1, chunk=2)
    for model in (Tiny(), shard.parallelize(Tiny(), Strategy())):
        torch.testing.assert_close(causal_lm_loss(model, ids, labels, None, 9, options), expected / 9)


def test_parts_sum_to_the_whole() -> None:
    """Micro-batches with different numbers of valid tokens."""
    model, whole = Tiny(), batch()
    ids, labels = whole["input_ids"] % 11, whole["labels"] % 11
    labels[0, :15] = -100
    tokens = (labels != -100).sum()
    parts = sum(
        causal_lm_loss(model, ids[i : i + 2], labels[i : i + 2], None, tokens) for i in range(0, 8, 2)
    )
    expected = torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
    torch.testing.assert_close(parts, expected)


def test_a_head_that_mixes_positions_is_refused_in_chunks() -> None:
    model = _prepared("llama", Strategy(), "traceable")
    head = model.lm_head.forward
    model.lm_head.forward = lambda x: head(x).sum(1)
    whole = batch()
    with pytest.raises(
        StrategyError, match="LlamaForCausalLM does not compute its logits position by position"
    ):
        causal_lm_loss(
            model, whole["input_ids"], whole["labels"], whole["position_ids"], 1.0, LossConfig(chunk=7)
        )


def test_a_head_with_a_dtype_of_its_own_is_computed_at_once() -> None:
    strategy = Strategy(precision={"compute": "bfloat16", "modules": {"lm_head": "float32"}})
    model, whole = _prepared("llama", strategy, "traceable"), batch()
    given = (whole["input_ids"], whole["labels"], whole["position_ids"], 100.0)
    with _Largest(131) as largest:
        causal_lm_loss(model, *given, _options(7)).backward()
    assert largest.rows == whole["input_ids"].numel()
    assert model.lm_head.weight.grad is not None
