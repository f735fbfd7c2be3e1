"""What the environments of launchers say."""

from __future__ import annotations

import pytest

from hyper_parallel.errors import LaunchError, PlaceError
from hyper_parallel.launch.rendezvous import WorkerPlace, detect, first_node, split_address, tasks_on_node

_TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}
_SRUN = {
    "SLURM_PROCID": "6",
    "SLURM_LOCALID": "2",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_JOB_ID": "1000",
    "SLURM_STEP_ID": "2",
}


def test_no_launcher() -> None:
    assert detect({"HOME": "/"}, "127.0.0.1:0") is None


def test_torchrun() -> None:
    assert detect(_TORCHRUN, "127.0.0.1:0") == WorkerPlace("torchrun", 5, 8, 1, 4, "10.0.0.1", 29500)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (_TORCHRUN | {"RANK": "8"}, r"the rank 8 of 8, and ranks are 0 to 7; correct RANK and WORLD_SIZE"),
        (_TORCHRUN | {"RANK": "-1"}, r"the rank -1 of 8"),
        (_TORCHRUN | {"LOCAL_RANK": "4"}, r"the local rank 4 of 4"),
        (_SRUN | {"SLURM_PROCID": "7"}, r"slurm gives this process the rank 7 of 7"),
    ],
)
def test_a_place_outside_the_world_is_refused(environ: dict[str, str], message: str) -> None:
    with pytest.raises(PlaceError, match=message):
        detect(environ, "127.0.0.1:0")


def test_torchrun_without_a_meeting_point_takes_the_stated_one_or_is_refused() -> None:
    bare = {key: value for key, value in _TORCHRUN.items() if not key.startswith("MASTER")}
    place = detect(bare, "10.1.1.1:1234")
    assert place is not None and (place.host, place.port) == ("10.1.1.1", 1234)
    with pytest.raises(LaunchError, match=r"rank 5 of 8.*set MASTER_ADDR"):
        detect(bare, "127.0.0.1:0")


def test_srun_finds_the_first_node_and_a_port_that_all_tasks_agree_on() -> None:
    assert detect(_SRUN, "127.0.0.1:0") == WorkerPlace("slurm", 6, 7, 2, 3, "gpu07", 17002)
    stated = detect(_SRUN, "10.1.1.1:1234")
    assert stated is not None and (stated.host, stated.port) == ("10.1.1.1", 1234)


def test_within_sbatch_without_srun_the_command_starts_its_own_workers() -> None:
    assert detect({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "1"}, "127.0.0.1:0") is None
    assert detect({**_SRUN, "SLURM_STEP_NUM_TASKS": "1"}, "127.0.0.1:0") is None


def test_open_mpi_and_mpich() -> None:
    open_mpi = {
        "OMPI_COMM_WORLD_RANK": "3",
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    }
    mpich = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    for environ in (open_mpi, mpich):
        assert detect(environ, "10.1.1.1:1234") == WorkerPlace("mpi", 3, 4, 1, 2, "10.1.1.1", 1234)


def test_a_variable_that_is_no_number_is_named() -> None:
    with pytest.raises(LaunchError, match="WORLD_SIZE must be a whole number; got 'eight'"):
        detect({**_TORCHRUN, "WORLD_SIZE": "eight"}, "127.0.0.1:0")


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("gpu07", "gpu07"), ("gpu[07-09,12],x1", "gpu07"), ("a,b", "a"), ("rack[2,4]-gpu", "rack2-gpu")],
)
def test_first_node(nodes: str, first: str) -> None:
    assert first_node(nodes) == first


def test_tasks_on_node() -> None:
    assert [tasks_on_node("2(x3),1", node) for node in range(4)] == [2, 2, 2, 1]
    with pytest.raises(LaunchError, match="not understood"):
        tasks_on_node("many", 0)


def test_split_address() -> None:
    assert split_address("10.0.0.1:29500") == ("10.0.0.1", 29500)
    assert split_address("[::1]:0") == ("::1", 0)
