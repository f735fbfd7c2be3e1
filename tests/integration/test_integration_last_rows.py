"""Rows that fill up the last batch of an epoch, in the batches of each share."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hyper_parallel.errors import IntegrationError
from hyper_parallel.integration.batch_rows import NoRows, check_rows, new_rows, shortened, warn_of_stream


def _state(remainder: int, end: bool = True) -> SimpleNamespace:
    return SimpleNamespace(end_of_dataloader=end, remainder=remainder)


def test_shares_have_the_rows_that_are_left() -> None:
    for left in range(1, 8):
        assert sum(new_rows(_state(left), share, 2) or 0 for share in range(4)) == left
    assert new_rows(_state(0), 0, 2) is None
    assert new_rows(_state(3, end=False), 0, 2) is None


def test_a_share_without_a_row_has_labels_that_bear_no_loss() -> None:
    batch = {"input_ids": torch.arange(6).view(2, 3), "labels": torch.arange(6).view(2, 3), "scale": 2.0}
    assert shortened(batch, None, 2) is batch and shortened(batch, 2, 2) is batch
    one = shortened(batch, 1, 2)
    assert one["labels"].tolist() == [[0, 1, 2]] and one["scale"] == 2.0 and not isinstance(one, NoRows)
    none = shortened(batch, 0, 2)
    assert isinstance(none, NoRows) and none["input_ids"] is batch["input_ids"]
    assert none["labels"].tolist() == [[-100] * 3] * 2
    # Classes of rows: the model's own loss of rows without a class is NaN.
    assert shortened({"labels": torch.tensor([1, 2])}, 0, 2)["labels"].tolist() == [1, 2]


def _spread(balancing: object = None) -> Any:
    return SimpleNamespace(handle=SimpleNamespace(balancing=balancing), data_ranks=2)


def test_batches_in_which_rows_cannot_be_told_are_refused_at_the_first() -> None:
    joined, apart = {"input_ids": torch.arange(6).view(1, 6)}, {"input_ids": torch.zeros(2, 3)}
    check_rows(joined, _state(0), 2, _spread())
    check_rows(apart, _state(1), 2, _spread())
    with pytest.raises(IntegrationError, match="set dataloader_drop_last=True"):
        check_rows(joined, _state(1), 2, _spread())


def test_rows_that_would_count_in_an_auxiliary_loss_are_refused_at_the_first() -> None:
    batch = {"input_ids": torch.zeros(2, 3)}
    check_rows(batch, _state(3), 2, _spread(object()))
    with pytest.raises(IntegrationError, match="routers' auxiliary loss; set dataloader_drop_last=True"):
        check_rows(batch, _state(2), 2, _spread(object()))


def test_a_stream_whose_rows_nobody_counted_is_said_to_have_rows_twice(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for state, drops in ((_state(-1), True), (_state(-1, end=False), False), (_state(0), False)):
        warn_of_stream(state, drops=drops)
    assert not caplog.records
    warn_of_stream(_state(-1), drops=False)
    assert "may have rows a second time" in caplog.text and "dataloader_drop_last=True" in caplog.text
