"""``simulate --rl``: the shipped example runs, says that it is simulated, and needs no torch; mistakes are one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from hyper_parallel.cli.main import command
from hyper_parallel.config.rl_simulation import load_rl_simulation
from hyper_parallel.errors import ConfigError

EXAMPLE = Path(__file__).parents[2] / "examples/rl/simulate-verl.yaml"
SMALL = ["simulation.batch=8", "simulation.steps=2", "simulation.warmup=1", "simulation.group=2"]
# Runs the command line in a fresh interpreter, and then says whether torch was imported.
PROBE = """
import sys
from hyper_parallel.cli.main import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    assert not end.code, end.code
print([name for name in ("torch", "transformers", "numpy") if name in sys.modules], file=sys.stderr)
"""


def test_the_example_runs_without_torch() -> None:
    arguments = ["simulate", "--rl", str(EXAMPLE), *SMALL]
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *arguments], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("simulated: ")
    assert "64 devices generate" in done.stdout
    assert done.stderr.strip() == "[]"


def test_json_and_a_chosen_split() -> None:
    sizes = ["simulation.devices=8", "simulation.rollout=auto", "simulation.score={fixed: 50}"]
    arguments = ["simulate", "--rl", str(EXAMPLE), *SMALL, *sizes, "--json"]
    done = CliRunner().invoke(command, arguments, catch_exceptions=False)
    found = json.loads(done.stdout)
    assert found["source"] == "simulated"
    assert found["loops"][0]["rollout_devices"] + found["loops"][0]["train_devices"] == 8


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("simulation.staleness=14", "give at least 15"),
        ("simulation.rollout=128", "leaves none of 128"),
        ("simulation.order=lifo", "must be"),
        ("simulation.generation.slot=3", "did you mean 'slots'"),
        ("simulation.generation.measured={64: 3.0}", "needs two numbers of devices"),
        ("simulation.train.fixed=1", "not both"),
    ],
)
def test_mistakes_name_their_key(override: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told.replace("'", ".")) as error:
        load_rl_simulation(EXAMPLE, [override])
    assert len(str(error.value).splitlines()) == 1


def test_options_of_training_do_not_go_with_it() -> None:
    done = CliRunner().invoke(command, ["simulate", "--rl", str(EXAMPLE), "--cluster", "h100"])
    assert done.exit_code == 2 and "only --json goes with it" in done.output
    done = CliRunner().invoke(command, ["simulate", str(EXAMPLE)])
    assert done.exit_code == 2 and "Missing option '--cluster'" in done.output
