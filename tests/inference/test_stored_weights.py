"""Weights are read from a folder row by row where rows suffice, and are otherwise left to Transformers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from hyper_parallel.compat.hf_conversions import has_float32_exceptions
from hyper_parallel.errors import CheckpointError
from hyper_parallel.inference.weights.tiers import FolderSource
from shard.converted_families import blank, logits, noisy


def read(folder: Path) -> Any:
    model = blank(folder)
    source = FolderSource(model, folder)
    try:
        source.rest([], torch.device("cpu"))
    finally:
        source.close()
    return model


@pytest.mark.parametrize("family", ["gpt_neox", "granitemoe", "ernie4_5_moe"])
def test_renamed_and_joined_weights_are_read_row_by_row(family: str, tmp_path: Path) -> None:
    model = noisy(family)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(read(tmp_path)), logits(model))


def test_weights_that_are_converted_as_a_whole_are_left_to_transformers(tmp_path: Path) -> None:
    noisy("inkling2_text").save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="converted as a whole"):
        read(tmp_path)


def test_so_are_weights_that_stay_in_float32(tmp_path: Path) -> None:
    model = copy.deepcopy(noisy("gpt_neox"))
    assert not has_float32_exceptions(model)
    model._keep_in_fp32_modules = ["dense"]
    assert not has_float32_exceptions(model)
    assert has_float32_exceptions(model.to(torch.bfloat16))
