"""examples/cluster/several_machines.yaml and slurm.sbatch with processes of one machine in place of several."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from examples.runner import environment, folder_with_examples
from harness.forked_command import CommandProcess
from harness.ports import free_port

FILE = "examples/cluster/several_machines.yaml"
SMALL = (
    *("model.config.hidden_size=64", "model.config.intermediate_size=96", "model.config.num_hidden_layers=2"),
    *("data.train=text.txt", "data.tokenizer.vocab_size=300", "data.holdout=0", "data.sequence=32"),
    *("train.batch=4", "train.engine=eager", "train.sample=false", "trackers=[]", "checkpoint.every=0"),
    "train.schedule.warmup=0",
    *("strategy.axes={replicate: 2, shard: 1}", "strategy.precision.compute=float32"),
)
SRUN = """#!/usr/bin/env bash
# Stands in for srun: two tasks on this machine, in Slurm's environment; a signal is passed on to both.
while [[ $1 == --* ]]; do shift; done
export SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE=2 SLURM_NODEID=0 SLURM_STEP_NODELIST=localhost
for rank in 0 1; do
    SLURM_PROCID=$rank SLURM_LOCALID=$rank "$@" &
    tasks+=($!)
done
trap 'kill -TERM "${tasks[@]}"' TERM
status=0
for task in "${tasks[@]}"; do
    wait "$task"; ended=$?
    while kill -0 "$task" 2>/dev/null; do wait "$task"; ended=$?; done
    [ $ended -eq 0 ] || status=$ended
done
exit $status
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("a line of text, and another one.\n" * 400)
    return folder_with_examples(tmp_path)


def losses(out: Path) -> list[float]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def test_two_machines_without_a_launcher(place: Path) -> None:
    """The command of each machine's own; both are this one."""
    given = ("launch.nodes=2", f"launch.rendezvous=127.0.0.1:{free_port()}", "train.steps=2")
    with contextlib.ExitStack() as all_of_them:
        machines = [
            all_of_them.enter_context(
                CommandProcess(
                    ["train", FILE, *SMALL, *given, f"launch.node_rank={rank}"],
                    place,
                    env=environment(HYPER_PARALLEL_TOKEN="a secret of this test"),
                    together=True,
                )
            )
            for rank in range(2)
        ]
        ended = [machine.wait(200) for machine in machines]
        assert ended == [0, 0], [machine.output() for machine in machines]
    assert len(losses(place / "runs/several-machines")) == 2
    assert (place / "runs/several-machines/logs/rank-1.log").exists()


def slurm(place: Path) -> dict[str, str]:
    """The environment of a batch script, with stand-ins for srun, scontrol and the command."""
    tools = place / "tools"
    tools.mkdir()
    for name, text in {
        "srun": SRUN,
        "scontrol": '#!/usr/bin/env bash\necho "$@" > scontrol.txt\n',
        "hyper-parallel": f'#!/usr/bin/env bash\nexec {sys.executable} -m hyper_parallel "$@"\n',
    }.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    have = environment(SLURM_JOB_ID="7", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    return {**have, "PATH": f"{tools}:{have['PATH']}"}


def test_the_batch_script_trains_with_a_task_for_each_worker(place: Path) -> None:
    done = subprocess.run(
        ["bash", "examples/cluster/slurm.sbatch", FILE, *SMALL, "train.steps=2"],
        cwd=place,
        env=slurm(place),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(losses(place / "runs/several-machines")) == 2
    assert not (place / "scontrol.txt").exists()


def test_the_batch_script_saves_and_is_queued_again_at_the_end_of_its_time(place: Path) -> None:
    script = subprocess.Popen(
        ["bash", "examples/cluster/slurm.sbatch", FILE, *SMALL, "train.steps=100000", "train.log_every=1"],
        cwd=place,
        env=slurm(place),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert script.stdout is not None
    said = []
    for line in script.stdout:
        said.append(line)
        if line.startswith("step ") and "/100000" in line:
            script.terminate()  # as --signal=B:TERM@120 does, to the batch shell alone
            break
    said.append(script.communicate(timeout=120)[0])
    assert (place / "scontrol.txt").exists(), "".join(said)
    assert (place / "scontrol.txt").read_text() == "requeue 7\n"
    assert list((place / "runs/several-machines/checkpoints").glob("step-*/commit.json")), "".join(said)
