"""The commands of the README, a measured step, a memory budget and an interrupted run, as a newcomer types them.

Models, steps and text are made smaller by overrides, so that each command takes seconds; the commands are the README's.
"""

from __future__ import annotations

import json
import re
import shlex
import signal
from pathlib import Path

import pytest

from harness.person import Person

pytestmark = pytest.mark.timeout(600)

ROOT = Path(__file__).parents[2]
SMALL = (
    "model.config.hidden_size=64 model.config.intermediate_size=128 model.config.num_hidden_layers=2 "
    "model.config.num_attention_heads=4 model.config.num_key_value_heads=2 "
    "data.train=text.txt data.tokenizer.vocab_size=300 data.sequence=64 "
    "train.batch=8 train.schedule.warmup=0 train.sample.tokens=4"
)
TEXT = "def add(a, b):\n    return a + b\n\n\nclass Box:\n    pass\n\n\n"


def readme(*begins: str) -> list[str]:
    """The commands of the README's blocks that begin so, without comments."""
    text = (ROOT / "README.md").read_text()
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", text, re.DOTALL))
    lines = [shlex.join(shlex.split(line, comments=True)) for line in blocks.splitlines()]
    return [line for line in lines if line.startswith(begins)]


def losses(folder: Path) -> dict[int, float]:
    """The training loss by step, from a run's metrics."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def initial(shown: str) -> float:
    [found] = re.findall(r"initial loss +([0-9.]+),", shown)
    return float(found)


def test_the_readmes_commands(clone: Person) -> None:
    clone.writes("text.txt", TEXT * 400)
    trains = [line for line in readme("hyper-parallel train examples/", "torchrun") if "memory" not in line]
    assert len(trains) == 4
    first = "hyper-parallel train examples/quickstart.yaml"
    seen = []
    for at, line in enumerate([first, *trains]):
        out = "" if at == 0 else f" out=runs/{at}"
        shown = clone.types(f"{line} {SMALL} train.steps=4{out}")
        assert "step 4/4" in shown and "checkpoint" in shown
        seen.append(initial(shown))
    assert max(seen) - min(seen) < 1e-3, "the first loss depends on the strategy"
    for line in readme("hyper-parallel verify examples/"):
        assert re.search(r"right: \d+ parameters", clone.types(f"{line} {SMALL}")), line
    goes_on, generates, exports, doctor, schema = readme(
        *(f"hyper-parallel {name}" for name in ("train runs/", "generate", "export", "doctor", "schema"))
    )
    shown = clone.types(goes_on.replace("train.steps=200", "train.steps=6"))
    assert "resumed from" in shown and "step 6/6" in shown
    assert clone.types(generates.replace("max_tokens=40", "max_tokens=8"))
    clone.types(exports)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        path.name for path in (clone.folder / "exported").iterdir()
    }
    assert "CPU" in clone.types(doctor).upper()
    clone.types(schema.replace("'>'", ">"))
    json.loads((clone.folder / "hyper-parallel.schema.json").read_text())


def test_the_readmes_predictions(clone: Person) -> None:
    """`inspect` and `simulate` start no worker; fewer layers make the answer a matter of seconds."""
    shown = clone.types("hyper-parallel inspect examples/simulate/llama-8b.yaml")
    assert "8.0B" in shown or "8,030" in shown
    [simulates] = [line for line in readme("hyper-parallel simulate") if "--html" in line]
    shown = clone.types(f"{simulates} model.config.num_hidden_layers=4")
    assert re.search(r"predicted .* a step", shown)
    assert (clone.folder / "step.html").stat().st_size > 10_000
    assert not (clone.folder / "runs").exists(), "a prediction wrote a run"


def test_a_measured_step(clone: Person) -> None:
    clone.writes("text.txt", TEXT * 400)
    clone.types(
        f"hyper-parallel train examples/quickstart.yaml --profile launch.workers=1 {SMALL} train.steps=9"
    )
    written = {path.name for path in (clone.folder / "runs/quickstart/profile").iterdir()}
    assert any(name.endswith(".html") for name in written), written


def test_the_least_budget_that_a_refusal_names_is_enough(clone: Person) -> None:
    """The advice is taken literally."""
    clone.writes("text.txt", TEXT * 400)
    run = (
        f"hyper-parallel train examples/quickstart.yaml launch.workers=1 {SMALL} train.steps=3 out=runs/small"
    )
    refused = clone.types(f"{run} strategy.memory='{{device: 1KiB, flash: ./spill}}'", code=2)
    [least] = re.findall(r"at least ([0-9,]+) bytes", refused)
    budget = least.replace(",", "")
    clone.types(f"{run} strategy.memory='{{device: {budget}, flash: ./spill}}'")
    assert len(losses(clone.folder / "runs/small")) == 3


def test_an_interrupted_run_goes_on(clone: Person) -> None:
    """Ctrl-C, then an end without notice: the same command continues, with the losses of a run in one piece."""
    clone.writes("text.txt", TEXT * 400)
    run = (
        f"hyper-parallel train examples/quickstart.yaml launch.workers=1 {SMALL} train.steps=60 "
        "checkpoint.every=5 train.log_every=1"
    )
    clone.types(f"{run} out=runs/whole")
    for how, code in ((signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)):
        started = clone.starts(f"{run} out=runs/interrupted")
        assert started.stdout is not None
        lines: list[str] = []
        while sum(line.startswith("step ") for line in lines) < 10:
            lines.append(started.stdout.readline())
            assert lines[-1], "".join(lines)
        started.send_signal(how)
        started.stdout.read()
        assert started.wait(60) == code
        assert len(losses(clone.folder / "runs/interrupted")) < 60, "the run ended before the signal"
    assert "resumed from" in "".join(lines)
    shown = clone.types(f"{run} out=runs/interrupted")
    assert "resumed from" in shown and "step 60/60" in shown
    assert losses(clone.folder / "runs/interrupted") == losses(clone.folder / "runs/whole")
