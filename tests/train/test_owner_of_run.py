"""What a run does with what the owner check finds: documents get rows of their own, or it is refused in one line."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import LLAMA, run_config
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from harness.small_models import small_fields
from hyper_parallel.cli.main import main
from hyper_parallel.config import RunConfig
from hyper_parallel.errors import ConfigError
from hyper_parallel.shard.loss.auxiliary_loss import OwnTerms
from hyper_parallel.shard.owner_check import Comparison
from hyper_parallel.step.build import build, compared_with_owner
from hyper_parallel.verify import verify_file

MAMBA = {"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 1, "state_size": 4, "expand": 2}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
SHORT_TEXT = {"train": [__file__], "holdout": 0, "eval": None}


def _run(folder: Path, model: dict[str, Any] = LLAMA, **sections: Any) -> RunConfig:
    data = {"sequence": 64, **SHORT_TEXT, "format": "jsonl", "train": str(folder / "text.jsonl")}
    lines = [f'{{"text": "document {n}: the quick brown fox"}}' for n in range(40)]
    (folder / "text.jsonl").write_text("\n".join(lines))
    given = {
        "data": {**data, **sections.pop("data", {})},
        "train": {"engine": "eager", **sections.pop("train", {})},
    }
    return run_config(folder, model={"config": model}, **given, **sections)


def test_documents_that_would_mix_get_rows_of_their_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        built = build(_run(tmp_path, MAMBA))
    assert not built.text.train.several and len(built.text.train) == 40
    assert built.text.identity["data.pack"] is False
    (line,) = [one.getMessage() for one in caplog.records if "pack" in one.getMessage()]
    assert (
        "would depend on each other in MambaForCausalLM, so each has its own row (data.pack: false)" in line
    )


def test_documents_that_do_not_mix_share_rows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for pack in (None, True):
        assert build(_run(tmp_path, data={"pack": pack})).text.train.several
    assert not any("pack" in one.getMessage() for one in caplog.records)


def test_packing_that_the_file_asks_for_is_refused_where_documents_mix(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        build(_run(tmp_path, MAMBA, data={"pack": True}))
    assert "\n" not in str(refused.value) and "set data.pack: false" in str(refused.value)
    # Its advice, and that of every refusal here, works.
    assert not build(_run(tmp_path, MAMBA, data={"pack": False})).text.train.several
    assert build(_run(tmp_path, MAMBA, data={"pack": True}, strategy={"check": False})).text.train.several


def test_another_loss_than_the_models_own_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("hyper_parallel.shard.region_check.result_cache._known", {})
    monkeypatch.setattr(
        sys.modules["hyper_parallel.shard.parallelize"], "own_terms", lambda model: OwnTerms()
    )
    experts = {"model_type": "mixtral", "num_local_experts": 4, "output_router_logits": True}
    run = _run(tmp_path, {**LLAMA, **experts, "router_aux_loss_coef": 0.5})
    with pytest.raises(
        ConfigError, match=r"the loss that is trained here is not the model's own, model\(input_ids, lab"
    ):
        build(run)


def test_smoothing_and_z_loss_are_no_difference(tmp_path: Path) -> None:
    assert build(_run(tmp_path, train={"loss": {"label_smoothing": 0.1, "z_loss": 1e-4}})).text.train.several


def test_rows_that_change_factors_are_refused_in_parts(tmp_path: Path) -> None:
    # Rows are never longer than the model's positions, beyond which these factors change.
    dynamic = {**LLAMA, "rope_parameters": DYNAMIC}
    assert build(_run(tmp_path, dynamic, train={"micro_batch": 4})).text.train.several
    longrope = {
        **LLAMA,
        "model_type": "phi3",
        "pad_token_id": 0,
        "original_max_position_embeddings": 16,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [2.0, 3.0, 4.0, 5.0],
            "original_max_position_embeddings": 16,
            "factor": 4.0,
        },
    }
    with pytest.raises(ConfigError, match=r"set data\.sequence to at most 16, or axes\.shard"):
        build(_run(tmp_path, longrope, train={"micro_batch": 4}))
    assert build(_run(tmp_path, longrope)).text.train.several
    assert build(_run(tmp_path, longrope, train={"micro_batch": 4}, data={"sequence": 16})).text.train.several


def test_rows_that_filling_changes_are_refused(tmp_path: Path) -> None:
    doge = {**LLAMA, "model_type": "doge", "is_moe": True, "num_experts": 16, "num_experts_per_tok": 3}
    try:
        AutoModelForCausalLM.from_config(AutoConfig.for_model(**doge))(torch.zeros(1, 2, dtype=torch.long))
    except TypeError as error:
        pytest.skip(f"this release of Transformers cannot run its own model: {error}")
    for pack in (None, False, True):
        with pytest.raises(
            ConfigError, match=r"a document that has its own row, filled up to data\.sequence, depends"
        ):
            build(_run(tmp_path, doge, data={"pack": pack}))


def test_a_table_of_positions_that_begins_with_unused_rows_is_that_much_shorter(tmp_path: Path) -> None:
    roberta = small_fields("roberta", vocab_size=300, pad_token_id=1, max_position_embeddings=34)
    assert build(_run(tmp_path, roberta, data={"sequence": 32}))
    with pytest.raises(ConfigError, match=r"data\.sequence is 33, but the model has 32 positions"):
        build(_run(tmp_path, roberta, data={"sequence": 33}))


def test_documents_share_no_row_where_nothing_could_be_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unknown = Comparison("not applicable", "no copy of it runs")
    found = {"packing": unknown}
    monkeypatch.setattr(
        "hyper_parallel.step.owner_refusals.verdicts",
        lambda model, kinds, *_, **__: {kind: found.get(kind, Comparison("right")) for kind in kinds},
    )
    assert not build(_run(tmp_path)).text.train.several
    with pytest.raises(ConfigError, match=r"could not be checked: no copy of it runs; set data\.pack: false"):
        build(_run(tmp_path, data={"pack": True}))
    assert build(_run(tmp_path, data={"pack": True}, strategy={"check": False})).text.train.several
    found["padding"] = unknown
    for pack in (None, False, True):
        with pytest.raises(ConfigError, match=r"as its owner does could not be checked: no copy of it runs"):
            build(_run(tmp_path, data={"pack": pack}))


class _Standardized(nn.Module):
    """A language model with statistics of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(300, 16), nn.BatchNorm1d(16), nn.Linear(16, 300)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.embed(ids).flatten(0, 1)).view(*ids.shape, -1))


def test_rows_that_depend_are_computed_together_or_not_at_all(tmp_path: Path) -> None:
    torch.manual_seed(0)
    with pytest.raises(
        ConfigError, match=r"the rows of a batch depend on each other in _Standardized .* micro-batches"
    ):
        build(_run(tmp_path, train={"micro_batch": 4}), _Standardized())
    assert not build(_run(tmp_path), _Standardized()).text.train.several


def test_verify_says_what_the_owner_check_found(tmp_path: Path) -> None:
    run = _run(tmp_path, strategy={"axes": {"tensor": 2}}, train={"batch": 2})
    report = verify_file(run)
    assert report.owner == "loss right · rows right · length right · padding right · packing right"
    assert f"one device against the model's own code: {report.owner}" in " ".join(report.table().split())


def test_verify_decides_as_train_does(tmp_path: Path) -> None:
    run = _run(tmp_path, MAMBA, data={"pack": True}, strategy={"axes": {"shard": 2}})
    with pytest.raises(ConfigError, match=r"set data\.pack: false"):
        verify_file(run)
    unchecked = _run(tmp_path, MAMBA, data={"pack": True}, strategy={"check": False})
    prepared = compared_with_owner(unchecked, always=True)
    assert prepared.text.train.several and not prepared.verdicts["packing"].right


def test_verify_refuses_as_train_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A norm over all heads, which a rule declares to be one of each head, does not run on the heads of a rank."""
    rules = {"*.q_norm": "shared", "*.k_norm": "shared"}
    olmo = {**LLAMA, "model_type": "olmo3", "sliding_window": 16}
    run = _run(tmp_path, olmo, strategy={"axes": {"tensor": 2}, "rules": rules}, train={"batch": 2})
    (tmp_path / "run.json").write_text(run.model_dump_json(context={}))
    with pytest.raises(SystemExit) as ended:
        main(["verify", str(tmp_path / "run.json")])
    error = capsys.readouterr().err.strip()
    assert ended.value.code == 2
    assert "this strategy on Olmo3ForCausalLM" in error and "Traceback" not in error
