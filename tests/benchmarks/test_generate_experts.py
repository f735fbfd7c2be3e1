"""The benchmark of experts within a byte budget, on a tiny model: all ways have the same bits."""

from __future__ import annotations

import generate_experts
import pytest


def test_all_ways_have_the_same_bits(capsys: pytest.CaptureFixture[str]) -> None:
    assert not generate_experts.main(short=True)
    shown = capsys.readouterr().out
    assert "host, 8 requests: on the host" in shown
    assert "the same bits" in shown
