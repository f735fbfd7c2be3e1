"""The benchmark of bytes moved: what is counted is what the closed forms say, for odd shapes too."""

from __future__ import annotations

import comm_volume
import pytest

from harness.tensor_costs import Shape
from hyper_parallel.shard.tensor.factorization import Gathered


@pytest.mark.parametrize("gathered", comm_volume.TREATMENTS)
@pytest.mark.parametrize("ranks", [8, 16])
def test_counted_bytes_equal_the_closed_forms(
    ranks: int, gathered: Gathered, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = Shape(hidden=256, query=16 * 32, kv=4 * 32, head=32, between=832)
    monkeypatch.setitem(comm_volume.MODELS, "small", shape)
    row = comm_volume.row("small", ranks, gathered, tokens=64)
    assert row["two"]["activations"] == row["two_closed"]
    assert row["one"]["activations"] == row["one_closed"]
    assert (row["two"]["statistics"] > 0) == (row["x"] > 1)
    assert (row["two_kept_elements"] > 0) == (gathered != "again")
