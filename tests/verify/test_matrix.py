"""The matrix and the fuzz tell right from wrong from refused, and a case is a function of its number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import equivalence
import pytest
import torch

from harness.equivalence import (
    Cell,
    build_model,
    draw_batch,
    family_config,
    judged,
    markdown,
    one_device,
    run_cell,
    run_matrix,
)
from harness.families import FAMILIES
from harness.random_files import Case, draw_case
from hyper_parallel.runtime.stage_runner import StageRunner
from hyper_parallel.shard.mesh_axis import Axis

TENSOR = {"axes": {"tensor": 2}}


def cell(family: dict[str, Any], strategy: dict[str, Any]) -> Cell:
    batch = draw_batch(family)
    one = one_device(family, {}, batch)
    return judged(
        "f", "s", lambda: run_cell(family_config(family, strategy), build_model(family), batch, one)
    )


def test_a_cell_is_right_or_refused() -> None:
    cells = run_matrix(
        {"llama": FAMILIES["llama"]},
        {"tensor 2": TENSOR, "tensor 3": {"axes": {"tensor": 3}}, "e": {"axes": {"shard": 2, "expert": 2}}},
    )
    assert [c.status for c in cells] == ["right", "refused"]
    page = markdown(cells, "this")
    assert "1 right, 1 refused, 0 wrong, of 2" in page
    assert "4 attention heads cannot be split over axes.tensor = 3" in page


def test_a_sum_that_is_forgotten_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Axis, "copy", lambda self, x: x)
    assert cell(FAMILIES["llama"], TENSOR).status == "wrong"


def test_a_crash_is_wrong() -> None:
    def crash() -> Any:
        raise RuntimeError("no")

    assert judged("f", "s", crash) == Cell("f", "s", "wrong", torch.inf, torch.inf, "RuntimeError: no")


def test_the_page_has_a_row_for_each_strategy_and_every_refusal() -> None:
    cells = [
        Cell("llama", "tensor 2", "right", 2e-7, 0.0),
        Cell("mixtral", "tensor 2", "wrong", 0.5, 0.0, "gradient of x"),
        Cell("mixtral", "expert 2", "refused", 0.0, 0.0, "odd experts"),
    ]
    lines = markdown(cells, "the command").splitlines()
    assert "Written by `the command`: 1 right, 1 refused, 1 wrong, of 3." in lines
    at = lines.index("| | llama | mixtral |")
    assert lines[at + 1 : at + 4] == [
        "|---|---|---|",
        "| tensor 2 | 2e-07 | wrong |",
        "| expert 2 | · | refused |",
    ]
    assert "- **mixtral** under expert 2: odd experts" in lines
    assert "- **mixtral** under tensor 2: gradient of x" in lines


def test_the_tool_writes_the_page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(equivalence, "STRATEGIES", {"tensor 2": TENSOR})
    monkeypatch.setattr(
        "sys.argv", ["equivalence.py", "--families", "llama", "--out", str(tmp_path / "page.md")]
    )
    assert equivalence.main() == 0
    page = (tmp_path / "page.md").read_text()
    assert (
        "Written by `python tools/equivalence.py --families llama`: 1 right, 0 refused, 0 wrong, of 1."
        in page
    )
    monkeypatch.setattr("sys.argv", ["equivalence.py", "--families", "lama"])
    with pytest.raises(SystemExit):
        equivalence.main()


def test_more_ranks_than_a_vocabulary_has_chunks() -> None:
    """131 rows in chunks of 9: the last of 16 ranks has none."""
    heads = {"num_attention_heads": 16, "num_key_value_heads": 16, "hidden_size": 64}
    assert cell({**FAMILIES["llama-tied"], **heads}, {"axes": {"tensor": 16}}).status == "right"


GEMMA = {
    "model_type": "gemma3_text", "vocab_size": 98, "hidden_size": 16, "intermediate_size": 42, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 4, "max_position_embeddings": 64,
    "tie_word_embeddings": False, "pad_token_id": None, "sliding_window": 3, "layer_types": ["full_attention"] * 4,
}  # fmt: skip
ROUNDED = Case(
    172,
    GEMMA,
    {"axes": {"tensor_y": 2, "pipeline": 2}, "sequence": True},
    {"batch": 4, "clip": None, "micro_batch": 1},
    24,
)
"""A pipeline whose gradients are off by more than 1e-5, as they are without a pipeline: by rounding."""


def test_a_pipelines_rounding_is_told_from_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    found = ROUNDED.run()
    assert found.status == "right" and found.error > 1e-5, found.detail
    add = StageRunner._add

    def doubled(self: StageRunner, name: str, value: torch.Tensor) -> None:
        add(self, name, value * (1.0001 if name.endswith("layers.3.mlp.up_proj.weight") else 1.0))

    monkeypatch.setattr(StageRunner, "_add", doubled)
    broken = ROUNDED.run()
    assert broken.status == "wrong" and "layers.3.mlp.up_proj.weight" in broken.detail


@pytest.mark.parametrize("number", range(6))
def test_random_cases_are_right_or_refused(number: int) -> None:
    assert draw_case(number) == draw_case(number)
    found = draw_case(number).run()
    assert found.status in ("right", "refused"), found.detail
