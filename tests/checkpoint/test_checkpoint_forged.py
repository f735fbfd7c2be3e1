"""A forged checkpoint, whose digests are right and whose content is not, ends in one line and writes nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import harness
from harness.hostile import attempts
from harness.hostile import checkpoints as hostile_checkpoints
from hyper_parallel.checkpoint import newest
from hyper_parallel.checkpoint.file_format import whole
from hyper_parallel.errors import CheckpointError
from hyper_parallel.layout import Box
from hyper_parallel.train.checkpoint_state import read_state

TESTS = Path(harness.__file__).parents[1]
HARMLESS = {"a config that names code"}
"""Forgeries that are exported, without what was forged."""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, attempts.Outcome]:
    count = len(hostile_checkpoints.CASES) + 60
    return {o.name: o for o in attempts.checkpoints(1, count, tmp_path_factory.mktemp("forged"))}


def test_every_forgery_is_refused_in_one_line(outcomes: dict[str, attempts.Outcome]) -> None:
    assert len(hostile_checkpoints.CASES) > 100
    for name in hostile_checkpoints.CASES:
        expected = "harmless" if name in HARMLESS else "refused"
        assert outcomes[name].verdict == expected, outcomes[name]


def test_drawn_changes_never_end_otherwise(outcomes: dict[str, attempts.Outcome]) -> None:
    drawn = [outcome for name, outcome in outcomes.items() if name not in hostile_checkpoints.CASES]
    assert [o for o in drawn if o.verdict not in attempts.GOOD] == []
    assert sum(o.verdict == "refused" for o in drawn) > len(drawn) / 2


def test_a_forgery_is_passed_over_for_an_older_checkpoint(tmp_path: Path) -> None:
    path = hostile_checkpoints.pristine(tmp_path)
    hostile_checkpoints.CASES["an asset behind two slashes"](path, tmp_path)
    newer = path.with_name("step-00000009")
    path.rename(newer)
    hostile_checkpoints.pristine(tmp_path)
    found = newest(tmp_path)
    assert found is not None and found.step == 3
    assert "which no checkpoint has" in found.skipped[0][1]


GOOD_STATE = {"run": {"step": 3, "consumed": 1, "tokens": 2}, "optimizer": {}, "identity": {}}


@pytest.mark.parametrize(
    "state",
    [
        {"run": []},
        {"run": {}},
        {"run": {**GOOD_STATE["run"], "step": "3"}},
        {"run": {**GOOD_STATE["run"], "step": -3}},
        {"run": {**GOOD_STATE["run"], "no such": 1}},
        {"optimizer": []},
        {"identity": None},
    ],
    ids=str,
)
def test_the_state_of_a_run_is_validated(tmp_path: Path, state: dict[str, Any]) -> None:
    path = hostile_checkpoints.pristine(tmp_path)
    forge = hostile_checkpoints.marker
    forge(lambda body: body["state"].update(GOOD_STATE))(path, path)
    assert read_state(path)["run"]["step"] == 3
    nothing_yet = {**GOOD_STATE["run"], "step": 0, "consumed": 0, "tokens": 0}
    forge(lambda body: body["state"].update({**GOOD_STATE, "run": nothing_yet}))(path, path)
    assert read_state(path)["run"]["step"] == 0
    forge(lambda body: body["state"].update(state))(path, path)
    with pytest.raises(CheckpointError, match="its state is none that a training run writes"):
        read_state(path)


def test_nothing_rests_on_asserts(tmp_path: Path) -> None:
    """Under `python -O` there are none."""
    script = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[1])\n"
        "from harness.hostile import attempts as h, checkpoints as c; names = list(c.CASES)\n"
        "found = list(h.checkpoints(2, len(names) + 20, Path(sys.argv[2])))\n"
        "bad = [o for o in found if o.verdict not in h.GOOD]\n"
        "print(bad); sys.exit(bool(bad) or not sys.flags.optimize)"
    )
    done = subprocess.run(
        [sys.executable, "-O", "-c", script, str(TESTS), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def box(offset: tuple[int, ...], size: tuple[int, ...]) -> Box:
    return Box(offset, (0,) * len(offset), size)


def test_blocks_have_each_element_once() -> None:
    rows = [box((r, 0), (1, 5)) for r in range(7)]
    columns = [box((0, c), (7, 1)) for c in range(5)]
    bricks = [box((0, 0), (3, 2)), box((0, 2), (2, 3)), box((2, 2), (5, 3)), box((3, 0), (4, 2))]
    for boxes in (rows, columns, bricks, [box((0, 0), (7, 5))]):
        whole("w", (7, 5), boxes)
        whole("w", (7, 5), boxes[::-1])
    for boxes in (rows[1:], [*rows, rows[0]], [*rows[1:], rows[1]], [*columns[1:], columns[2]], []):
        with pytest.raises(ValueError, match=r"elements of w are there|hold the same elements"):
            whole("w", (7, 5), boxes)
    # The right number of elements, two of them twice and two never.
    with pytest.raises(ValueError, match="hold the same elements"):
        whole("w", (7, 5), [*bricks[:3], box((2, 0), (4, 2))])
    whole("n", (), [box((), ())])
    whole("empty", (0, 4), [])
    with pytest.raises(ValueError, match=r"twice|2 of 1"):
        whole("n", (), [box((), ()), box((), ())])
