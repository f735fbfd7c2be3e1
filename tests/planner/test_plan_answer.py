"""The whole answer: text, JSON and page say what the search found, in figures that add up."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from hyper_parallel.cluster import Cluster
from hyper_parallel.planner import format
from hyper_parallel.planner import solve as sweep
from hyper_parallel.planner.columns import code
from hyper_parallel.planner.constants import Constants
from hyper_parallel.planner.metrics import Simulated
from hyper_parallel.planner.page import front, page_of
from hyper_parallel.planner.query import Question
from hyper_parallel.planner.solve import NothingFitsError, Solved, nothing_fits, solve
from hyper_parallel.planner.sweep_tables import fewest, lengths, scaling
from hyper_parallel.planner.training import answer_of
from hyper_parallel.units import format_duration
from hyper_parallel.workload.published import shape
from hyper_parallel.workload.workload import Workload

CONSTANTS = Constants()


def _question(name: str = "llama-3.2-1b", cluster: str = "h100x16", **more: Any) -> Question:
    return Question(workload=Workload(shape(name), 32, 2048), cluster=Cluster.named(cluster), **more)


@pytest.fixture(scope="module")
def one() -> Solved:
    return solve(_question(price=2.0), CONSTANTS, tokens=1e12)


def test_the_text_shows_the_best_and_says_that_it_is_an_estimate(one: Solved) -> None:
    told = answer_of(one).text()
    assert told.startswith("estimated steps of llama-3.2-1b (1.2B parameters), 32 × 2,048 tokens")
    assert f"the best {len(one.best)} of {one.found.counted:,} strategies" in told
    assert f"{one.best[0].mfu:.1%}" in told
    assert re.search(r"90% of measured steps lie within [\d.]+–[\d.]+", told)
    assert "its cost" in told
    assert max(len(line) for line in told.splitlines()) <= 200


def test_json_is_plain_and_holds_every_figure(one: Solved) -> None:
    found = json.loads(json.dumps(answer_of(one).to_json(), allow_nan=False))
    best = found["best"][0]
    assert found["estimated"] is True
    assert best["step_time_s"] == one.best[0].seconds
    assert sum(best["parts_s"].values()) == pytest.approx(best["step_time_s"])
    assert best["interval_s"][0] < best["step_time_s"] < best["interval_s"][1]
    assert sum(found["pruned"].values()) <= found["counted"]


def test_a_strategy_of_the_users_stands_beside_the_best(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("shard: 16\nzero: 3\nrecompute: full\n")
    one = solve(_question(), CONSTANTS, compare=file)
    assert one.compared is not None
    assert one.compared.seconds >= one.best[0].seconds
    assert "│yours" in answer_of(one).text()


def test_what_is_simulated_stands_beside_its_estimate(one: Solved) -> None:
    best = one.best[0]
    simulated = [
        Simulated(1.2 * best.seconds, False, 2 * best.capacity),
        Simulated(None, reason="cannot be captured"),
    ]
    told = answer_of(replace(one, simulated=simulated)).text()
    assert "they differ" in told
    assert "+20.0%" in told
    assert "DOES NOT FIT" in told
    assert "cannot be captured" in told


def test_a_disagreement_names_the_collective_that_it_comes_from(one: Solved) -> None:
    best = one.best[0]
    parts = {"products": best.seconds, "all_gather over shard": 0.3 * best.seconds}
    apart = Simulated(1.3 * best.seconds, True, 1e9, parts=parts)
    told = " ".join(answer_of(replace(one, simulated=[apart])).text(400).split())
    assert "they differ, mostly all_gather over shard:" in told
    found = answer_of(replace(one, simulated=[apart])).to_json()["predicted"][0]
    assert found["disagreement"]["part"] == "all_gather over shard" and found["parts_s"] == parts
    near = replace(apart, seconds=1.1 * best.seconds, parts={"products": 1.1 * best.seconds})
    assert "mostly" not in answer_of(replace(one, simulated=[near])).text(400)


def test_of_what_is_simulated_the_quickest_that_fits_is_written(one: Solved) -> None:
    simulated = [Simulated(seconds, fits, 1e9) for seconds, fits in ((3.0, True), (1.0, False), (2.0, True))]
    found = replace(one, simulated=simulated)
    assert found.chosen == 2 and one.chosen == 0
    axes = [format.axes(best.strategy) for best in found.best]
    lines = dict(answer_of(found).lines)
    assert lines["beside"] == f"simulated too: {axes[0]} 3.00 s (+50.0%); {axes[1]} does not fit"
    assert "ties" not in lines and "beside" not in dict(answer_of(one).lines)
    alone = dict(answer_of(replace(one, simulated=simulated[:1])).lines)["beside"]
    next_best = format_duration(one.best[1].seconds)
    assert alone == f"no other strategy was simulated; the next, {axes[1]}, is estimated at {next_best}"
    assert "simulated, 3 is the quickest (2.00 s), and --out writes it" in " ".join(
        answer_of(found).text(400).split()
    )


def test_nothing_fits_tells_the_floor_and_what_would_help() -> None:
    with pytest.raises(NothingFitsError, match=r"the smallest of [\d,]+ needs .* GiB of 74.5 GiB") as error:
        solve(_question("llama-3-70b", "h100x2", runnable=True), CONSTANTS)
    assert re.search(r"what would make it fit: \d+ devices \(estimated", str(error.value))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("helps", "words"), [("a", "a"), ("ab", "a, or b"), ("abc", "a, b, or c")])
def test_what_would_make_it_fit_is_a_list_in_words(one: Solved, helps: str, words: str) -> None:
    error = nothing_fits("it fits not", replace(one.found, smallest=one.best[0]), "1 GiB", list(helps))
    assert str(error).startswith(
        f"it fits not: the smallest of {one.found.counted:,} needs 1 GiB (estimated; "
    )
    assert str(error).endswith(f"; what would make it fit: {words}")


class _Reader(HTMLParser):
    """Checks that elements nest, and keeps what refers elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.refers: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in {"meta", "br"}:
            self.open.append(tag)
        self.refers += [name for name, _ in attrs if name in ("src", "href", "srcset")]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_asks_for_nothing_else_and_shows_the_front(one: Solved) -> None:
    points = front(one.question, CONSTANTS)
    assert [point.peak for point in points] == sorted(point.peak for point in points)
    seconds = [point.seconds for point in points]
    assert seconds == sorted(set(seconds), reverse=True)
    assert points[-1].seconds == pytest.approx(one.best[0].seconds)
    made = page_of(answer_of(one), one, points).html()
    reader = _Reader()
    reader.feed(made)
    assert not reader.open
    assert reader.refers == []
    assert not re.search(r"https?:|url\(|@import|fetch\(", made)
    assert made.count("<circle") == len(points) + len(one.best)
    assert "{{" not in made
    assert made.count('class="stack"') == 2 * len(one.best)


def test_scaling_has_a_row_for_each_number_of_devices() -> None:
    question = _question(price=2.0)
    points = sweep.curve([question.on(8), question.on(16), question.on(7)], CONSTANTS)
    made = scaling(points, 1e9)
    (sheet,) = made.sheets
    assert [row[0] for row in sheet.rows] == ["8", "16", "7"]
    assert sheet.rows[0][5] == "100.0%"
    assert "no strategy spreads" in sheet.rows[2][1] or points[2].fits
    assert made.to_json()["points"][0]["best"]["devices"] == 8
    assert made.text().startswith("estimated steps")


def test_the_fewest_devices_are_fewer_than_any_that_fit() -> None:
    work = Workload(shape("mistral-small-24b"), 48, 2048)
    stays = dict.fromkeys(("state_on_host", "weights_on_host", "activations_on_host"), 0)
    question = Question(workload=work, cluster=Cluster.named("h100"), devices=1, runnable=True, fix=stays)
    found = sweep.fewest(question, CONSTANTS)
    assert found is not None
    devices = found.question.devices
    assert devices & (devices - 1), "no power of two, which doubling alone would find"
    assert not any(sweep.ask(question.on(fewer), CONSTANTS).fits for fewer in range(1, devices))
    assert f"fits on {devices} devices" in fewest(question, found).sentences[0]


def test_the_longest_sequence_is_told_with_what_the_model_is_made_for() -> None:
    question = _question()
    points = sweep.curve([question.at(length) for length in (4096, 262144)], CONSTANTS)
    made = lengths(points)
    fitting = [point.question.workload.sequence for point in points if point.fits]
    assert fitting == [4096, 262144]
    assert made.sentences[0].startswith("262,144 tokens fit, the longest that was asked for")
    assert "made for 131,072 tokens" in made.sentences[1]
    assert {int(row[0].replace(",", "")) * int(row[1]) for row in made.sheets[0].rows} == {65536, 262144}


def test_of_lengths_that_do_not_all_fit_the_longest_is_named() -> None:
    work = Workload(shape("llama-3-70b"), 1, 2048)
    question = Question(workload=work, cluster=Cluster.named("h100x16"))
    points = sweep.curve([question.at(length) for length in (2048, 2**22)], CONSTANTS)
    assert [point.fits for point in points] == [True, False]
    assert (
        lengths(points)
        .sentences[0]
        .startswith("the longest of these lengths that fits: 2,048 tokens; 4,194,304 do")
    )


def test_what_train_refuses_is_said_on_the_terminal_and_on_the_page() -> None:
    work = Workload(shape("llama-3-70b"), 64, 2048)
    fixed = {"pipeline": (2.0,), "schedule": (float(code("schedule", "dualpipe")),)}
    one = solve(Question(workload=work, cluster=Cluster.named("h100x16"), fix=fixed), CONSTANTS)
    [said] = [line for line in answer_of(one).text().splitlines() if "train refuses" in line]
    assert said.startswith("note: train refuses 1") and "--runnable" in said
    assert escape(said.removeprefix("note: ")) in page_of(answer_of(one), one, []).html()
    runnable = solve(_question(runnable=True), CONSTANTS)
    told = answer_of(runnable).text()
    assert "train refuses" not in told and "--runnable" not in told
    assert all(found.strategy["schedule"] != "dualpipe" for found in runnable.best)
