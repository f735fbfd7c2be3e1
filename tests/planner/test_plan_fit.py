"""Fitting finds what made the data, and judging never lets a source see itself."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fit_constants.fit import judge, seconds_of, solve
from fit_constants.published_runs import RECIPES, RUNS, TRANSCRIBED, Evidence, evidence
from fit_constants.residuals import conformal

from hyper_parallel.cluster import Cluster
from hyper_parallel.planner.constants import Constants
from hyper_parallel.planner.framework_profiles import GENERIC
from hyper_parallel.planner.table import Table
from hyper_parallel.workload.published import shape
from hyper_parallel.workload.workload import Workload


def runs(cluster: str = "a100", n: int = 60, seed: int = 0) -> Table:
    draw = np.random.default_rng(seed)
    spread = {axis: draw.choice([1.0, 2.0, 4.0, 8.0], n) for axis in ("shard", "tensor_x", "pipeline")}
    devices = spread["shard"] * spread["tensor_x"] * spread["pipeline"]
    work = Workload(shape("llama-2-7b"), 256, 4096)
    zero = draw.choice([1.0, 3.0], n)
    return Table.of(work, Cluster.named(cluster), GENERIC, **spread, zero=zero, devices=devices)


def test_fitting_finds_the_constants_that_made_the_data() -> None:
    t = runs()
    truth = replace(Constants(), ampere=0.62, inside=0.55)
    found = solve(t, seconds_of(t, truth), ["a"] * 20 + ["b"] * 20 + ["c"] * 20)
    errors = np.abs(seconds_of(t, found) / seconds_of(t, truth) - 1)
    assert errors.mean() < 0.02
    assert found.ampere == pytest.approx(0.62, rel=0.08)


def test_what_the_data_do_not_tell_stays_at_its_prior() -> None:
    t = runs()
    found = solve(t, seconds_of(t, Constants()), ["a"] * t.n)
    assert found.hopper == Constants().hopper and found.ascend == Constants().ascend


def test_a_few_absurd_rows_do_not_decide() -> None:
    t = runs()
    seconds = np.array(seconds_of(t, Constants()))
    seconds[:3] *= 5
    found = solve(t, seconds, ["a"] * t.n)
    errors = np.abs(seconds_of(t, found)[3:] / seconds[3:] - 1)
    assert np.median(errors) < 0.03


def _evidence() -> Evidence:
    t = runs()
    seconds = np.array(seconds_of(t, Constants(ampere=0.7)))
    sources = np.array(["one"] * 30 + ["two"] * 30)
    plenty = np.full(t.n, np.nan)
    everything = np.ones(t.n, bool)
    names = np.array(["A100"] * t.n), np.array(["m"] * t.n)
    return Evidence(t, sources, *names, seconds, plenty, everything, everything, ~everything, ~everything)


def test_a_source_is_judged_by_constants_that_did_not_see_it() -> None:
    evidence = _evidence()
    before = judge(evidence).estimate[:30]
    seconds = evidence.seconds.copy()
    seconds[:30] *= 3
    after = judge(replace(evidence, seconds=seconds)).estimate
    np.testing.assert_allclose(after[:30], before)
    assert not np.allclose(after[30:], judge(evidence).estimate[30:])


def test_computed_rows_are_judged_and_not_fitted_on() -> None:
    runs = _evidence()
    computed = np.arange(runs.timed.size) >= 45  # half of the source `two`
    marked = replace(runs, computed=computed)
    seconds = np.where(computed, 3 * runs.seconds, runs.seconds)
    before, after = judge(marked), judge(replace(marked, seconds=seconds))
    np.testing.assert_allclose(after.estimate, before.estimate)
    assert after.groups["two, A100"]["error"] > before.groups["two, A100"]["error"] + 0.3
    seen = judge(replace(runs, seconds=seconds)).estimate[:30]
    assert not np.allclose(seen, before.estimate[:30])


def test_rows_that_look_computed_are_those_of_one_node_of_s02() -> None:
    """Of three models alike but for their layers, the middle one's time lies on the others' line."""
    found = evidence(RUNS, RECIPES)
    t, computed = found.table, found.computed
    assert computed.sum() == 1080 and (found.fitted & computed).sum() == 0
    alike: dict[tuple[float, ...], dict[float, float]] = {}
    names = ("hidden", "tensor_x", "pipeline", "replicate", "micro", "batch")
    for row in np.flatnonzero(computed):
        key = tuple(float(getattr(t, name)[row]) for name in names)
        alike.setdefault(key, {})[float(t.layers[row])] = float(found.seconds[row])
    off = [(one[12] + (one[24] - one[12]) / 3) / one[16] - 1 for one in alike.values()]
    assert len(off) == 360
    assert np.median(np.abs(off)) < 1e-5 and max(map(abs, off)) < 0.011


def test_figures_of_a_judgement() -> None:
    found = judge(_evidence())
    assert {name: one["rows"] for name, one in found.groups.items()} == {"one, A100": 30, "two, A100": 30}
    assert all(one["error"] < 0.05 < one["null"] for one in found.groups.values())
    assert found.ordered[0] == found.ordered[1] > 0 and found.picked[0] == found.picked[1] > 0


def test_rows_that_are_transcribed_are_judged_and_not_fitted_on() -> None:
    runs = _evidence()
    transcribed = np.arange(runs.timed.size) >= 45  # half of the source `two`
    seconds = np.where(transcribed, 3 * runs.seconds, runs.seconds)
    found = judge(replace(runs, transcribed=transcribed, seconds=seconds))
    np.testing.assert_allclose(
        found.estimate[:30], judge(replace(runs, transcribed=transcribed)).estimate[:30]
    )
    assert found.groups["two, A100"]["rows"] == 15 and found.cells["two, dense, A100"]["rows"] == 30
    known = evidence(RUNS, RECIPES, TRANSCRIBED)
    assert known.transcribed.sum() == evidence(TRANSCRIBED).timed.size > 0
    assert not (known.fitted & known.transcribed).any()


def test_cells_are_apart_by_kind_of_model_and_hardware() -> None:
    runs = _evidence()
    hardware = np.where(np.arange(runs.timed.size) % 2, "A100", "A100 40GB")
    experts = np.where(np.arange(runs.timed.size) < 10, 8.0, 0.0)
    table = runs.table.replaced(experts=experts, chosen=2.0, expert_ffn=1024.0)
    cells = judge(replace(runs, hardware=hardware, table=table)).cells
    assert {name: one["rows"] for name, one in cells.items()} == {
        "one, dense, A100": 10,
        "one, dense, A100 40GB": 10,
        "one, mixture, A100": 5,
        "one, mixture, A100 40GB": 5,
        "two, dense, A100": 15,
        "two, dense, A100 40GB": 15,
    }
    assert cells["one, mixture, A100"]["mixture"] and not cells["two, dense, A100"]["mixture"]


def test_a_kind_on_a_generation_is_judged_by_constants_that_did_not_see_it() -> None:
    """All runs are of one kind on one generation: what is left are the priors."""
    runs = _evidence()
    cell = judge(runs).cells["one, dense, A100"]
    by_priors = np.abs(seconds_of(runs.table, Constants())[:30] / runs.seconds[:30] - 1).mean()
    assert cell["unseen"] == pytest.approx(by_priors) and cell["error"] < cell["unseen"]


def test_every_cell_weighs_the_same() -> None:
    """Nineteen cells of one run each, and one of a thousand that are all right."""
    scores = np.concatenate([np.arange(1.0, 20.0), np.zeros(1000)])
    cells = np.array([f"cell {n}" for n in range(19)] + ["right"] * 1000)
    assert conformal(scores, cells) == 18.0  # up to which 19 of 20 cells lie, and 0.9 of 21 are 18.9


def test_too_few_cells_have_no_quantile_but_the_largest() -> None:
    assert conformal(np.arange(8.0), np.array(list("abcdefgh"))) == 7.0


def test_the_quantile_covers_nine_of_ten_runs_of_one_more_cell() -> None:
    draw = np.random.default_rng(0)

    def cell() -> np.ndarray:
        return np.abs(draw.normal(0, 0.1) + draw.normal(0, 0.05, draw.integers(1, 40)))

    held = []
    for _ in range(400):
        known = [cell() for _ in range(20)]
        names = np.repeat(np.arange(20).astype(str), [one.size for one in known])
        held.append((cell() <= conformal(np.concatenate(known), names)).mean())
    assert 0.90 < np.mean(held) < 0.96
