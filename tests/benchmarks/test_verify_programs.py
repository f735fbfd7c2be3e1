"""The benchmark of the verifier: a few Programs are judged, run and counted."""

from __future__ import annotations

import pytest
import verify_programs


def test_a_small_campaign_judges_rightly() -> None:
    result = verify_programs.campaign(programs=8, seed=1, hangs=0)
    assert result["judged_wrongly"] == []
    counts = result["counts"]
    assert counts["rejected"] == 4
    assert counts["accepted"] >= 4
    assert counts["runs on gloo"] == counts["runs on gloo that ended"] == 2 * counts["accepted"]


def test_a_verifier_that_accepts_everything_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_programs, "find_defects", lambda program: ())
    monkeypatch.setattr(verify_programs, "run_on_gloo", lambda *arguments: [])
    monkeypatch.setattr(verify_programs, "MOST_MUTANTS", 2)
    result = verify_programs.campaign(programs=6, seed=1, hangs=0)
    assert result["judged_wrongly"]
