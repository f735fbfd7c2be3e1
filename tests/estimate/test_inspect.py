"""What inspect tells without workers: few layers stand for all, levels, the command, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from inspect_worlds import DEEPSEEK, GEMMA3, LLAMA, MIXTRAL, run_of

from hyper_parallel.cli.main import main
from hyper_parallel.errors import CaptureError, ConfigError, StrategyError
from hyper_parallel.estimate import cluster_of, inspect, inspect_run, predict_run
from hyper_parallel.strategy import Axes

TWO = {"axes": {"shard": 2, "tensor_y": 2, "tensor_x": 2}, "sequence": True}
SHARDED = {"axes": {"shard": 4, "tensor": 2}, "sequence": True}


@pytest.mark.parametrize(
    ("model", "strategy", "kinds"),
    [
        (LLAMA, SHARDED, [5]),
        (LLAMA, {**SHARDED, "memory": {"recompute": "layer"}}, [5]),
        (LLAMA, {**SHARDED, "memory": {"recompute": "layer", "recompute_layers": 2}}, [2, 3]),
        (GEMMA3, SHARDED, [5, 2]),
        (DEEPSEEK, {"axes": {"shard": 4, "tensor": 2, "expert": 4}}, [2, 3]),
        (MIXTRAL, {"axes": {"shard": 4, "expert": 4}, "memory": {"recompute": "layer"}}, [3]),
    ],
    ids=["llama", "recomputed", "two recomputed", "sliding and full", "dense and experts", "experts"],
)
def test_few_layers_stand_for_all(model: dict[str, Any], strategy: dict[str, Any], kinds: list[int]) -> None:
    run = run_of(model, strategy, micro_batch=1)
    rank = run.strategy.axes.world - 1
    few, all_layers = inspect_run(run, rank), inspect_run(run, rank, whole=True)
    assert few.kinds == kinds
    assert few.rows == all_layers.rows
    assert few.collectives == all_layers.collectives
    assert few.gathered == all_layers.gathered
    assert few.transient >= all_layers.transient
    assert few.transient == pytest.approx(all_layers.transient, rel=0.05)
    assert few.peak == pytest.approx(all_layers.peak, rel=0.01)
    assert few.peak is not None and few.peak <= few.total


def test_rules_and_dtypes_of_single_layers_stay_with_them() -> None:
    strategy = {
        **SHARDED,
        "sequence": False,
        "rules": {"model.layers.3.mlp.*_proj": "replicate"},
        "precision": {"compute": "bfloat16", "modules": {"model.layers.1": "float32"}},
        "memory": {"reshard_after_forward": {"model.layers.4": False}},
    }
    run = run_of(LLAMA, strategy)
    few, all_layers = inspect_run(run), inspect_run(run, whole=True)
    # Layers 0 and 2 are alike; 1, 3 and 4 each are not.
    assert sorted(few.kinds) == [1, 1, 1, 2]
    assert few.rows == all_layers.rows
    assert few.collectives == all_layers.collectives


def test_levels_are_told_where_axes_are_placed() -> None:
    placement = {"node": ["tensor"], "network": ["shard"], "devices": {"node": 4}}
    told = inspect_run(run_of(LLAMA, {**SHARDED, "placement": placement}))
    levels = {(row.axis, row.level) for row in told.collectives}
    assert ("tensor_x", "node") in levels
    # 4 devices of a node hold 2 ranks of shard, which is 4: half of it crosses the network.
    assert {level for axis, level in levels if axis == "shard"} == {"node", "network"}


def test_one_device_has_no_collectives() -> None:
    told = inspect_run(run_of(LLAMA, {}))
    assert told.collectives == []
    assert told.gathered == 0
    assert told.totals["optimizer"] == 2 * told.totals["parameters"] == 8 * told.parameters
    assert "no collectives" in told.table()


def test_recomputing_saves_activations_and_nothing_else() -> None:
    kept = inspect_run(run_of(LLAMA, SHARDED)).totals
    again = inspect_run(run_of(LLAMA, {**SHARDED, "memory": {"recompute": "layer"}})).totals
    assert again["activations"] < kept["activations"] / 3
    assert {k: v for k, v in again.items() if k in ("parameters", "gradients", "optimizer", "gathered")} == {
        k: v for k, v in kept.items() if k in ("parameters", "gradients", "optimizer", "gathered")
    }


def test_gathered_weights_by_zero_level() -> None:
    def gathered(layers: int = 5, **memory: Any) -> int:
        model = {**LLAMA, "num_hidden_layers": layers}
        return inspect_run(run_of(model, {"axes": {"shard": 4}, "memory": memory})).gathered

    layer = 4 * (2 * 48 * 48 + 2 * 16 * 48 + 3 * 68 * 48 + 2 * 48)
    # The head, whose 131 rows are padded to 132 for 4 ranks, and the norm; no backward pass reads the embedding.
    root = 4 * (132 * 48 + 48)
    for kept in (gathered(reshard_after_forward=False), gathered(shard="gradients")):
        assert kept == root + 5 * layer
    # Where they are freed, the number of layers makes no difference.
    assert layer <= gathered() == gathered(layers=9) <= root + layer


def test_the_peak_is_that_of_the_order_of_the_models_code() -> None:
    for memory in ({}, {"recompute": "layer"}, {"shard": "optimizer"}):
        run = run_of({**LLAMA, "num_hidden_layers": 8}, {**SHARDED, "memory": memory}, micro_batch=1)
        predicted = predict_run(run, cluster_of("h100x8", run), as_written=True).timeline.peak.bytes
        assert inspect_run(run).peak == pytest.approx(predicted, rel=0.01)


@pytest.mark.parametrize(
    ("model", "strategy"),
    [
        (LLAMA, {}),
        (LLAMA, SHARDED),
        (LLAMA, {**SHARDED, "memory": {"recompute": "layer", "recompute_layers": 2}}),
        (MIXTRAL, {"axes": {"shard": 4, "expert": 4}, "memory": {"shard": "optimizer"}}),
        (LLAMA, {"axes": {"pipeline": 2, "shard": 2}, "pipeline": {"schedule": "1f1b"}}),
    ],
    ids=["one device", "tensor", "recomputed", "experts", "pipeline"],
)
def test_on_a_cluster_the_peak_is_that_of_simulate(model: dict[str, Any], strategy: dict[str, Any]) -> None:
    run = run_of(model, strategy, micro_batch=1)
    cluster = cluster_of("h100x8", run)
    predicted = predict_run(run, cluster).timeline
    inspected = inspect_run(run, predicted.peak.rank, cluster=cluster)
    assert inspected.peak == predicted.peak.bytes
    assert inspected.peak_by_kind == predicted.peak_by_kind()
    assert "peak, ordered for h100x8" in inspected.table()
    assert inspected.to_json()["ordered_on"] == "h100x8"
    as_written = inspect_run(run)
    assert as_written.peak_by_kind == {} and as_written.ordered_on is None
    assert ("peak, as the code is written" in as_written.table()) == (as_written.peak is not None)
    if run.strategy.axes.tensor > 1:
        # What training gathers early is there besides.
        assert inspected.peak > as_written.peak


def test_a_step_that_cannot_be_captured_is_told_by_its_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = inspect_run(run_of(LLAMA, SHARDED), 3)

    def refuse(*given: Any, **named: Any) -> Any:
        raise CaptureError("the model asks for a value")

    monkeypatch.setattr(inspect, "captured_step", refuse)
    told = inspect_run(run_of(LLAMA, SHARDED), 3)
    exact = ("parameters", "gradients", "optimizer")
    assert {key: told.totals[key] for key in exact} == {key: captured.totals[key] for key in exact}
    assert (told.totals["activations"], told.peak, told.collectives) == (0, None, [])
    assert "cannot be captured" in told.table() and "the model asks for a value" in told.table()


def test_a_million_tokens_are_shared_by_context() -> None:
    run = run_of(
        {
            **LLAMA,
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 1 << 20,
        },
        {"axes": {"context": 32}, "memory": {"recompute": "layer"}},
        batch=1,
    )
    run = run.model_copy(update={"data": run.data.model_copy(update={"sequence": 1 << 20})})
    one = run.model_copy(update={"strategy": run.strategy.model_copy(update={"axes": Axes()})})
    told, alone = inspect_run(run, 31), inspect_run(one)
    assert told.totals["activations"] <= 1.1 / 32 * alone.totals["activations"]
    assert {row.axis for row in told.collectives} >= {"context"}


def test_gradients_of_a_head_in_chunks_are_no_activations() -> None:
    at_once, chunks = (
        inspect_run(run_of(LLAMA, {"axes": {"shard": 2}}, loss={"chunk": chunk})) for chunk in ("none", 16)
    )
    head = next(row for row in chunks.rows if row.module == "lm_head")
    # 4 rows of 32 positions: their logits, and the loss's own arithmetic, are gone.
    assert head.activations == 0
    logits = 4 * 32 * 131 * 4
    # The gradient of the hidden states is there instead: 4 · 32 positions of 48 features.
    saved = at_once.totals["activations"] - chunks.totals["activations"]
    assert saved >= logits - 4 * 32 * 48 * 4


def test_two_tensor_axes_are_told() -> None:
    told = inspect_run(run_of({**LLAMA, "num_attention_heads": 8, "num_key_value_heads": 4}, TWO))
    assert {"tensor_x", "tensor_y"} <= {row.axis for row in told.collectives}
    assert any("tensor_y" in row.layout and "tensor_x" in row.layout for row in told.rows)


def test_sixteen_thousand_ranks() -> None:
    axes = {"replicate": 512, "shard": 16, "tensor": 2}
    told = inspect_run(run_of(LLAMA, {"axes": axes}, batch=8192), 16383)
    assert (told.world, told.rank) == (16384, 16383)
    assert {row.axis for row in told.collectives} >= {"replicate", "shard", "tensor_x"}


def test_no_rank_beyond_the_world() -> None:
    with pytest.raises(ConfigError, match="--rank: 8 is none of the 8 ranks"):
        inspect_run(run_of(LLAMA, SHARDED), 8)


def test_a_strategy_that_does_not_fit_is_refused_as_in_training() -> None:
    with pytest.raises(StrategyError, match="attention heads"):
        inspect_run(run_of(LLAMA, {"axes": {"tensor": 4}}))


# The command.

RUN = """\
version: 1
out: nowhere
model:
  config: {model_type: llama, VOCABULARYhidden_size: 32, intermediate_size: 64, num_hidden_layers: 2,
           num_attention_heads: 4, num_key_value_heads: 2}
data: {train: there/is/no/such.txt, sequence: 16, tokenizer: {TOKENIZER}}
train: {batch: 4}
strategy: {axes: {shard: 2, tensor: 2}}
"""


@pytest.fixture(autouse=True)
def _a_wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """One in which no layout is folded."""
    monkeypatch.setenv("COLUMNS", "160")


def _run(path: Path, capsys: pytest.CaptureFixture[str], *arguments: str, **filled: str) -> str:
    text = RUN.replace("VOCABULARY", filled.get("vocabulary", "vocab_size: 64, "))
    path.write_text(text.replace("TOKENIZER", filled.get("tokenizer", "vocab_size: 300")))
    main(["inspect", str(path), *arguments])
    return capsys.readouterr().out


def test_the_command_needs_no_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = _run(tmp_path / "run.yaml", capsys)
    for words in (
        "model.layers.*.self_attn.q_proj",
        "[32/tensor_x/shard, 32]",
        "tensor_x",
        "exact:",
        "measured",
    ):
        assert words in shown
    assert not (tmp_path / "nowhere").exists()


def test_the_command_in_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = json.loads(_run(tmp_path / "run.yaml", capsys, "--json", "--rank", "3", "strategy.axes.shard=4"))
    assert (told["world"], told["rank"]) == (8, 3)
    assert told["total"] == sum(told["totals"].values())
    head = next(row for row in told["rows"] if row["module"] == "lm_head")
    assert head["parameters"] == 4 * 64 // 8 * 32


def test_a_vocabulary_that_is_left_out_is_that_of_the_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = _run(tmp_path / "run.yaml", capsys, vocabulary="")
    assert "data.tokenizer.vocab_size = 300" in shown
    assert "[300/tensor_x/shard, 32]" in shown
    with pytest.raises(SystemExit) as ended:
        _run(tmp_path / "run.yaml", capsys, vocabulary="", tokenizer="path: nowhere")
    assert ended.value.code == 2
    assert "model.config.vocab_size" in capsys.readouterr().err


def test_a_wrong_rank_ends_with_two(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        _run(tmp_path / "run.yaml", capsys, "--rank", "4")
    assert ended.value.code == 2
    assert "0 to 3" in capsys.readouterr().err
