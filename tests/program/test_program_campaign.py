"""The verifier of Programs against a search of all states and runs on gloo, on a few random Programs."""

from __future__ import annotations

import pytest

from harness import program_campaign


def test_a_small_campaign_judges_rightly() -> None:
    result = program_campaign.campaign(programs=8, seed=1, hangs=0)
    assert result["judged_wrongly"] == []
    counts = result["counts"]
    assert counts["rejected"] == 4
    assert counts["accepted"] >= 4
    assert counts["runs on gloo"] == counts["runs on gloo that ended"] == 2 * counts["accepted"]


def test_a_verifier_that_accepts_everything_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_campaign, "find_defects", lambda program: ())
    monkeypatch.setattr(program_campaign, "run_on_gloo", lambda *arguments: [])
    monkeypatch.setattr(program_campaign, "MOST_MUTANTS", 2)
    result = program_campaign.campaign(programs=6, seed=1, hangs=0)
    assert result["judged_wrongly"]
