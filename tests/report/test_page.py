"""The page needs nothing but itself, and holds what the timeline says."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

from harness.traces import Ops, one_f_one_b, toy, trace
from hyper_parallel.report import page
from hyper_parallel.simulator import simulate
from hyper_parallel.trace import Bytes, Timeline

VOID = {"meta", "input", "br", "link", "img"}


class _Reader(HTMLParser):
    """Checks that elements nest, and keeps tags with what refers elsewhere, and text by element."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.refers: list[str] = []
        self.texts: dict[str, str] = {}
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        self.refers += [f"{tag} {name}" for name, _ in attrs if name in ("src", "href", "action", "srcset")]
        self.ids += [value for name, value in attrs if name == "id" and value]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, text: str) -> None:
        where = self.open[-1] if self.open and self.open[-1] in ("script", "style") else "text"
        self.texts[where] = self.texts.get(where, "") + text


def _read(text: str) -> _Reader:
    reader = _Reader()
    reader.feed(text)
    assert not reader.open
    return reader


def _data(text: str) -> list[dict[str, Any]]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    assert found
    return json.loads(found[1])


def test_it_asks_for_nothing_else(timeline: Timeline) -> None:
    text = page(timeline, "A step")
    reader = _read(text)
    assert reader.refers == []
    assert not re.search(r"https?:|//[a-z]+\.|url\(|@import|fetch\(|XMLHttpRequest|import\(", text)
    assert len(reader.ids) == len(set(reader.ids))
    assert len(text) < 200_000


def test_it_says_predicted_and_names_the_cluster_and_its_source(timeline: Timeline) -> None:
    reader = _read(page(timeline, "A step"))
    assert "predicted step of 64 ranks on h100x64" in reader.texts["text"]
    assert f"constants: {timeline.source}" in reader.texts["text"]
    assert "measured" not in reader.texts["text"]
    measured = _read(page(replace(timeline, predicted=False), "A step")).texts["text"]
    assert "measured step of 64 ranks" in measured
    assert "predicted" not in measured


def test_its_data_are_the_timelines(timeline: Timeline) -> None:
    (data,) = _data(page(timeline, "A step"))
    (group,) = data["classes"]
    assert group["ranks"] == "ranks 0–63"
    assert [lane["name"] for lane in group["lanes"]] == ["matrix", "vector", "comm:shard", "comm:tensor"]
    for lane in group["lanes"]:
        starts = [
            round(s.start * 1e9) for s in timeline.spans if s.engine == lane["name"] and s.end > s.start
        ]
        assert [sum(lane["t"][: place + 1]) for place in range(len(lane["t"]))] == sorted(starts)
    names = data["names"]
    labels = [[names[at] for at in row] for row in data["labels"]]
    assert ["gate", "model.layers.0.mlp", "forward", "matmul"] in [label[:4] for label in labels]
    changes = group["memory"]["device"]
    held, most = 0, 0
    for change in changes["b"]:
        held += change
        most = max(most, held)
    assert most == timeline.peak.bytes
    assert data["step"] == round(timeline.step * 1e9)


def test_a_lane_has_the_time_that_a_transfer_waits_for_the_other_rank() -> None:
    """Ranks of 1F1B: the first sends its third micro-batch when the second has come back with the first one's."""
    timeline = simulate(one_f_one_b(3, 4, 1.0, 2.0), toy())
    (data,) = _data(page(timeline, "A step"))
    lanes = {lane["name"]: lane for lane in data["classes"][0]["lanes"]}
    assert "w" not in lanes["matrix"]
    assert lanes["comm:send forward"]["w"] == [4_000_000_000]


def test_what_users_wrote_cannot_end_an_element() -> None:
    ops = Ops()
    ops.kernel("</script><b>", 1, module="<i>&", allocates=(Bytes(1, 8, "activation"),))
    text = page(simulate(trace(ops), toy()), "<title> & {{data}}")
    reader = _read(text)
    assert "<i>&" in reader.texts["text"]
    assert "<title> & {{data}} (predicted)" in reader.texts["text"]
    (data,) = _data(text)
    assert "</script><b>" in data["names"]


def test_two_timelines_stand_beside_each_other(timeline: Timeline) -> None:
    measured = replace(timeline, predicted=False)
    text = page([timeline, measured], "Both")
    assert len(_data(text)) == 2
    assert text.count('<section class="timeline"') == 2
    assert "<title>Both (predicted and measured)</title>" in text
    assert '<div class="pair"><section class="table"><h3><b class="badge predicted">' in text
    assert f"{timeline.step * 1e3:.1f} ms<small>measured</small>" in text
    same = page([timeline, timeline], "Both")
    assert "<small>predicted, h100x64</small>" in same
