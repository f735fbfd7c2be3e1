"""The owner check finds what one device computes otherwise than the model's own code, and finds nothing where it does
not."""

from __future__ import annotations

import sys

import pytest
import torch
from small_families import small
from torch import Tensor, nn

from harness.equivalence import build_model
from harness.small_models import small_fields
from hyper_parallel.shard.forward import first_position
from hyper_parallel.shard.loss.auxiliary_loss import OwnTerms
from hyper_parallel.shard.owner_check import OwnerReport, check, compare
from hyper_parallel.shard.owner_check.check import compare_rows
from hyper_parallel.shard.owner_check.comparisons import KINDS, Kind
from hyper_parallel.shard.parallelize import on_simulated_ranks
from hyper_parallel.shard.region_check import result_cache
from hyper_parallel.shard.region_check.check import vocabulary_of
from hyper_parallel.shard.region_check.outcome import SeenCall


@pytest.mark.parametrize("family", ["llama", "bloom", "mixtral"])
def test_what_is_right_in_everything(family: str) -> None:
    report = compare(small(family), spread=on_simulated_ranks)
    assert [report[kind].verdict for kind in KINDS] == ["right"] * 5, report


@pytest.mark.parametrize(
    ("family", "kind", "said"),
    [
        ("mamba", "packing", "document 2 is off by"),
        ("longrope", "length", "rows of more than 16 positions change those beside them: a row is off by"),
        ("doge", "rows", "row 1 is off by"),
        ("doge", "padding", "a document is off by"),
    ],
)
def test_what_the_model_mixes_is_found(family: str, kind: Kind, said: str) -> None:
    found = compare(small(family), kinds=(kind,), spread=on_simulated_ranks)[kind]
    assert found.verdict == "differs"
    assert found.detail.startswith(said) or said.startswith("row 1"), found.detail


@pytest.mark.parametrize("family", ["mixtral", "jetmoe", "dbrx", "bamba"])
def test_a_term_that_our_loss_lacks_is_found(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert compare(small(family), kinds=("loss",), spread=on_simulated_ranks)["loss"].verdict == "right"
    monkeypatch.setattr(
        sys.modules["hyper_parallel.shard.parallelize"], "own_terms", lambda model: OwnTerms()
    )
    found = compare(small(family), kinds=("loss",), spread=on_simulated_ranks)["loss"]
    assert found.verdict == "differs" and "off by" in found.detail


def test_a_module_of_ones_own_has_no_owner() -> None:
    """Only what Transformers defines is compared with it; a module that takes no positions mixes documents."""

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(90, 8), nn.Linear(8, 90)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.embed(ids).cumsum(1))

    report = compare(Mean(), vocabulary=90, spread=on_simulated_ranks)
    assert report["loss"].verdict == "not applicable"
    assert report["rows"].verdict == "right"
    assert report["packing"].verdict == "differs"
    assert compare(Mean(), spread=on_simulated_ranks)["rows"].verdict == "not applicable"


class _Rows(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.up, self.norm, self.kind = nn.Linear(6, 6), nn.BatchNorm1d(6), kind

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        if self.kind == "batch norm":
            return self.norm(hidden)
        if self.kind == "batch mean":
            return hidden - hidden.mean(0)
        if self.kind == "loss of a batch norm":
            return self.norm(hidden).relu().square().mean()
        if self.kind == "loss":
            return hidden.square().mean()
        if self.kind == "along dim 1":
            return hidden - hidden.mean(0)
        return hidden.relu()


@pytest.mark.parametrize(
    ("kind", "right"),
    [
        ("batch norm", False),
        ("batch mean", False),
        ("loss of a batch norm", False),
        ("loss", True),
        ("rows", True),
    ],
)
def test_rows_of_a_call(kind: str, right: bool) -> None:
    call = SeenCall.of((torch.zeros(4, 6),), {})
    assert compare_rows(_Rows(kind).train(), call, None).right == right


def test_statistics_that_are_frozen_are_no_mixing() -> None:
    assert compare_rows(_Rows("batch norm").eval(), SeenCall.of((torch.zeros(4, 6),), {}), None).right


def test_rows_may_lie_along_another_dim() -> None:
    """As in PyTorch's attention, which has positions first."""
    call = SeenCall.of((torch.zeros(5, 3, 6),), {})
    assert compare_rows(_Rows("along dim 1"), call, 3).right
    assert not compare_rows(_Rows("along dim 1"), call, 5).right


def test_verdicts_are_kept_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Kind, ...]] = []

    def compared(model: nn.Module, *, kinds: tuple[Kind, ...], **options: object) -> OwnerReport:
        asked.append(kinds)
        return compare(model, kinds=kinds, spread=on_simulated_ranks)

    monkeypatch.setattr(check, "compare", compared)
    monkeypatch.setattr(result_cache, "_known", {})
    monkeypatch.setattr(result_cache, "digest", lambda *_: "digest-of-a-test")
    for kind in KINDS:
        (result_cache._folder() / f"digest-of-a-test-{kind}").unlink(missing_ok=True)
    model = small("llama")
    assert check.verdicts(model, ("rows",), on_simulated_ranks)["rows"].right
    monkeypatch.setattr(result_cache, "_known", {})  # as another process
    assert set(check.verdicts(model, ("rows", "packing"), on_simulated_ranks)) == {"rows", "packing"}
    assert asked == [("rows",), ("packing",)]


def test_positions_begin_where_the_models_own_do() -> None:
    """The first row of RoBERTa's table is of padding."""
    model = small("roberta")
    assert first_position(model) == 2
    report = compare(model, spread=on_simulated_ranks)
    assert [report[kind].verdict for kind in KINDS] == ["right"] * 5, report


def test_sparse_attention_chooses_among_the_keys_of_a_row() -> None:
    fields = {**small_fields("glm_moe_dsa"), "index_topk": 2048}
    assert (
        compare(build_model(fields), kinds=("packing",), spread=on_simulated_ranks)["packing"].verdict
        == "right"
    )
    # With so few heads many keys have a score of 0, and which of them are chosen depends on the row's length.
    found = compare(
        build_model({**fields, "index_n_heads": 4}), kinds=("packing",), spread=on_simulated_ranks
    )
    assert found["packing"].verdict == "differs"


def test_a_decoder_with_a_table_of_its_own_size_is_given_its_tokens() -> None:
    model = build_model({**small_fields("marian"), "vocab_size": 200, "decoder_vocab_size": 130})
    assert vocabulary_of(model) == 130
