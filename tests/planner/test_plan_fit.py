"""Fitting finds what made the data, and judging never lets a source see itself."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fit_constants.fit import judge, quantiles, seconds_of, solve
from fit_constants.published_runs import RECIPES, RUNS, Evidence, evidence

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
    return Evidence(t, sources, *names, seconds, plenty, everything, everything, ~everything)


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
    assert after.rows == (30, 30) and after.step[1] > before.step[1] + 0.3
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
    assert found.groups == ("one, A100", "two, A100") and found.rows == (30, 30)
    assert max(found.step) < 0.05 < min(found.null)
    assert found.ordered[0] == found.ordered[1] > 0 and found.picked[0] == found.picked[1] > 0


def test_quantiles_are_weighted() -> None:
    values = np.arange(100.0)
    assert quantiles(values, np.ones(100)) == (4.0, 94.0)
    assert quantiles(values, np.where(values < 50, 1.0, 0.0)) == (2.0, 47.0)
