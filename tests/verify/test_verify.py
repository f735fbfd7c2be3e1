"""`verify` says right when a strategy is right, and wrong when any part of it is broken on purpose."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from harness import run_ranks
from hyper_parallel.cli.main import main
from hyper_parallel.compat import backend
from hyper_parallel.compat.local_tensor import per_rank, simulated_ranks
from hyper_parallel.config import RunConfig
from hyper_parallel.config.load import from_dict
from hyper_parallel.errors import SimulationError, StrategyError
from hyper_parallel.launch import Worker
from hyper_parallel.shard.mesh_axis import Axis
from hyper_parallel.shard.sharded_model import ShardedModel
from hyper_parallel.step.build import unsharded
from hyper_parallel.step.optimizer.adamw import AdamW
from hyper_parallel.verify import Report, verify_file
from hyper_parallel.verify.report import TOLERANCE
from hyper_parallel.verify.run import RESULT, worker_main
from hyper_parallel.verify.step import rows_to_verify

STRATEGY = {"axes": {"shard": 2, "tensor": 2}, "sequence": True}


@pytest.fixture
def run_file(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "text.txt").write_text(
        "".join(f"line {n}: the quick brown fox, again and again.\n" for n in range(400))
    )
    llama = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return {
        "version": 1,
        "out": str(tmp_path / "out"),
        "model": {"config": {**llama, **heads}},
        "data": {
            "train": str(tmp_path / "text.txt"),
            "sequence": 32,
            "tokenizer": {"vocab_size": 300},
            "cache": str(tmp_path / "cache"),
        },
        "train": {"batch": 4, "micro_batch": 1},
        "strategy": STRATEGY,
    }


def config_of(run_file: dict[str, Any], **changes: Any) -> RunConfig:
    return from_dict({**run_file, **changes})


def test_a_right_strategy_is_right(run_file: dict[str, Any]) -> None:
    report = verify_file(config_of(run_file))
    assert report.ok, report.failures
    assert len(report.parameters) == 21
    assert "right: 21 parameters" in report.table()
    assert Report.from_json(json.loads(json.dumps(report.to_json()))) == report


OPTIMIZERS: list[dict[str, Any]] = [
    {"name": "adamw"},
    {"name": "muon"},
    {"name": "lion"},
    {"name": "adafactor", "scale_parameter": True, "weight_decay": 0.1},
    {"name": "adamw_8bit", "block": 16},
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda one: one["name"])
def test_in_bfloat16_with_each_optimizer(run_file: dict[str, Any], optimizer: dict[str, Any]) -> None:
    strategy = {**STRATEGY, "precision": {"compute": "bfloat16"}}
    report = verify_file(config_of(run_file, strategy=strategy, train={"batch": 4, "optimizer": optimizer}))
    assert report.ok, report.failures


def _no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Axis, "copy", lambda self, x: x)


def _no_reduction_over_data(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Axis._reduce_scatter
    half = lambda self, x, dim: whole(self, x * (0.5 if self.name == "shard" else 1), dim)  # noqa: E731
    monkeypatch.setattr(Axis, "_reduce_scatter", half)


def _copies_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    norm = ShardedModel.grad_norm
    monkeypatch.setattr(
        ShardedModel, "grad_norm", lambda self: norm(self) * (2 if self.mesh.world > 1 else 1)
    )


def _update_of_the_first_rank_only(monkeypatch: pytest.MonkeyPatch) -> None:
    step = AdamW.step

    def sharded_is_skipped(self: AdamW, lr_scale: float) -> None:
        step(self, lr_scale if type(self._groups[0].locals[0]) is torch.Tensor else 0.5 * lr_scale)

    monkeypatch.setattr(AdamW, "step", sharded_is_skipped)


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (_no_copy, "gradient of model."),
        (_no_reduction_over_data, "gradient of"),
        (_copies_counted_twice, "gradient norm"),
        (_update_of_the_first_rank_only, "updated value of"),
    ],
)
def test_a_broken_part_is_found(
    run_file: dict[str, Any], monkeypatch: pytest.MonkeyPatch, broken: Any, said: str
) -> None:
    broken(monkeypatch)
    report = verify_file(config_of(run_file))
    assert not report.ok
    assert any(failure.startswith(said) for failure in report.failures), report.failures
    assert "WRONG" in report.table()


@pytest.mark.parametrize("gathered", ["again", "mlp"])
def test_inputs_that_are_gathered_again(run_file: dict[str, Any], gathered: str) -> None:
    strategy = {**STRATEGY, "memory": {"gathered": gathered, "recompute": "layer"}}
    report = verify_file(config_of(run_file, strategy=strategy))
    assert report.ok, report.failures
    alone = config_of(run_file, strategy=strategy, launch={"workers": 1}).effective_strategy
    assert alone.memory.gathered == "keep" and alone.memory.recompute == "layer"


@pytest.mark.parametrize("axes", [{"shard": 2}, {"shard": 2, "tensor": 2}, {"shard": 2, "context": 2}])
def test_rows_of_one_and_of_several_documents(
    run_file: dict[str, Any], tmp_path: Path, axes: dict[str, int]
) -> None:
    """Transformers makes a mask for the ranks whose rows hold several documents, and none for the others."""
    lines = [json.dumps({"text": "a quick fox. " * (1 + 20 * (n % 2))}) for n in range(16)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    data = {**run_file["data"], "train": str(tmp_path / "text.jsonl"), "holdout": 0}
    strategy = {"axes": axes, "sequence": "tensor" in axes}
    for seed in range(32):
        config = config_of(run_file, data=data, strategy=strategy, train={"batch": 2}, seed=seed)
        rows = rows_to_verify(config, unsharded(config)[1])["position_ids"]
        if len({bool((row.diff() != 1).any()) for row in rows}) == 2:
            break
    else:
        raise AssertionError("no two rows of which one holds several documents")
    report = verify_file(config)
    assert report.ok, report.failures


def test_a_branch_that_ranks_take_differently_is_refused_by_the_one_process_driver() -> None:
    with pytest.raises(StrategyError, match="--driver gloo"), simulated_ranks(2):
        bool(per_rank(lambda rank: torch.tensor(rank > 0)))
    with pytest.raises(StrategyError, match="--driver gloo"), simulated_ranks(2):
        _ = per_rank(lambda rank: torch.tensor(rank + 1)).item() > 1


def test_rounding_is_told_from_a_mistake_by_float64(
    run_file: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TOLERANCE, "float32", 1e-8)
    report = verify_file(config_of(run_file))
    assert report.off and report.float64 is not None and report.rounding is not None
    assert report.ok, report.failures
    assert max(p.gradient for p in report.float64.parameters) < 1e-12
    assert "they are rounding" in report.table()
    assert Report.from_json(json.loads(json.dumps(report.to_json()))) == report


def test_a_mistake_is_one_in_float64_too(run_file: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Axis._reduce_scatter
    monkeypatch.setattr(Axis, "_reduce_scatter", lambda self, x, dim: whole(self, x * (1 + 3e-5), dim))
    report = verify_file(config_of(run_file))
    assert not report.ok and report.float64 is not None
    assert not report.float64.ok


def test_what_only_float32_gets_wrong_is_wrong(
    run_file: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Axis._reduce_scatter

    def in_bfloat16(self: Axis, x: torch.Tensor, dim: int) -> torch.Tensor:
        return whole(self, x if x.dtype == torch.float64 else x.bfloat16().to(x.dtype), dim)

    monkeypatch.setattr(Axis, "_reduce_scatter", in_bfloat16)
    report = verify_file(config_of(run_file))
    assert not report.ok and report.float64 is not None
    assert report.float64.ok
    assert "the mistake is one of precision" in report.table()


def _decided_by_float64(rank: int, world: int, run_file: dict[str, Any]) -> None:
    TOLERANCE["float32"] = 1e-8
    worker_main(from_dict(run_file), Worker(rank, rank, world, world, torch.device("cpu"), backend("cpu")))


def test_workers_decide_by_float64_together(run_file: dict[str, Any], tmp_path: Path) -> None:
    run_ranks(_decided_by_float64, 2, {**run_file, "strategy": {"axes": {"shard": 2}}})
    report = Report.from_json(json.loads((tmp_path / "out" / RESULT).read_text()))
    assert report.float64 is not None and report.float64.ok
    assert max(p.gradient for p in report.float64.parameters) < 1e-12


def test_one_device_has_nothing_to_compare(run_file: dict[str, Any]) -> None:
    with pytest.raises(StrategyError, match="nothing to compare"):
        verify_file(config_of(run_file, strategy={}))


def test_one_device_is_compared_with_the_models_own_code(
    run_file: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps({**run_file, "strategy": {}}))
    main(["verify", str(path)])
    assert "the model's own code: loss right · rows right" in capsys.readouterr().out


def test_real_workers_from_the_command_line(
    run_file: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps({**run_file, "strategy": {"axes": {"shard": 2}}}))
    with pytest.raises(SystemExit) as ended:
        main(["verify", str(file), "--driver", "gloo", "--json"])
    assert ended.value.code == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"]
    assert report["driver"] == "2 workers over gloo"


LONGCAT = {
    "model_type": "longcat_flash",
    "hidden_size": 64,
    "num_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "ffn_hidden_size": 128,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "head_dim": 8,
    "v_head_dim": 8,
    "qk_head_dim": 16,
    "moe_topk": 2,
    "n_routed_experts": 8,
    "zero_expert_num": 8,
    "expert_ffn_hidden_size": 20,
    "max_position_embeddings": 64,
}
"""Each rank computes the experts that its own tokens chose, and no others."""


def test_a_model_that_one_process_cannot_follow_is_run_by_workers(run_file: dict[str, Any]) -> None:
    config = config_of(run_file, model={"config": LONGCAT}, strategy={"axes": {"shard": 2}})
    with pytest.raises(SimulationError, match="verify --driver gloo"):
        verify_file(config, "local")
    report = verify_file(config)
    assert report.ok, report.failures
    assert report.driver == "2 workers over gloo, for the ranks of one process cannot follow this model"
