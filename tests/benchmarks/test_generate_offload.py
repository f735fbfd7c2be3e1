"""Generation within a budget beside Accelerate, in short: both give the same tokens."""

from __future__ import annotations

import generate_offload
import pytest


def test_the_tokens_are_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert not generate_offload.main(short=True, rows=("weights on flash",))
    shown = capsys.readouterr().out
    assert shown.splitlines()[-1].endswith("0 answers differ, the logits by 0.0e+00 at most")
    assert "\n  Accelerate disk_offload: " in shown
