"""Requests that Ray would let wait without end are refused; the places of workers on nodes. No Ray needed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from harness.role_groups import group_config
from hyper_parallel.config.launch import RoleLaunch
from hyper_parallel.errors import LaunchError
from hyper_parallel.launch.roles.ray_cluster import AUTH_MODE, AUTH_TOKEN, authenticate
from hyper_parallel.launch.roles.ray_engine import (
    RayEngine,
    _place,
    _with_token,
    check_capacity,
    needs_of,
)


def _config(folder: Path, **launch: object) -> RoleLaunch:
    made = group_config(folder, "actor", 4).model_dump()
    return RoleLaunch.model_validate({**made, "launch": {"device": "cpu", "threads": 2, **launch}})


def test_a_worker_needs_a_processor_for_each_thread_and_its_device(tmp_path: Path) -> None:
    nodes = [{"CPU": 8.0, "GPU": 2.0}, {"CPU": 8.0, "NPU": 4.0}]
    assert needs_of(_config(tmp_path), nodes) == {"CPU": 2.0}
    assert needs_of(_config(tmp_path, device="auto"), nodes) == {"CPU": 2.0, "GPU": 1.0}
    assert needs_of(_config(tmp_path, device="auto"), [{"CPU": 8.0}]) == {"CPU": 2.0}
    assert needs_of(_config(tmp_path, device="npu"), nodes) == {"CPU": 2.0, "NPU": 1.0}
    assert needs_of(_config(tmp_path, device="cuda"), nodes) == {"CPU": 2.0, "GPU": 1.0}
    with pytest.raises(LaunchError, match="needs devices 'cuda', and no node of the Ray cluster has any"):
        needs_of(_config(tmp_path, device="cuda"), [{"CPU": 8.0}])


def test_workers_that_no_set_of_nodes_has_room_for_are_refused() -> None:
    needs, free = {"CPU": 3.0, "GPU": 1.0}, {"CPU": 100.0, "GPU": 100.0}
    nodes = [{"CPU": 8.0, "GPU": 4.0}, {"CPU": 8.0, "GPU": 1.0}, {"CPU": 64.0}]
    check_capacity("actor", 3, needs, nodes, free)
    # 17 processors and 5 devices of the nodes together would be enough for 4.
    with pytest.raises(LaunchError) as raised:
        check_capacity("actor", 4, needs, nodes, free)
    assert str(raised.value) == (
        "group 'actor' needs 4 workers with 3 CPU and 1 GPU each, and the Ray cluster (3 nodes) has room for 3; ask "
        "for fewer workers or threads, or add nodes"
    )


def test_workers_whose_room_is_taken_are_refused() -> None:
    with pytest.raises(LaunchError, match="needs 4 CPU, and 3 are free in the Ray cluster"):
        check_capacity("actor", 4, {"CPU": 1.0}, [{"CPU": 8.0}], {"CPU": 3.0})


def test_the_places_of_workers_on_two_nodes_and_with_devices_of_their_own() -> None:
    addresses = ["10.0.0.1", "10.0.0.2", "10.0.0.1"]
    places = [_place(rank, addresses, "10.0.0.1", 7, False) for rank in range(3)]
    assert [(place.rank, place.local_rank, place.local_world) for place in places] == [
        (0, 0, 2),
        (1, 0, 1),
        (2, 1, 2),
    ]
    assert not any(place.one_machine for place in places) and {place.world for place in places} == {3}
    assert (_place(2, addresses, "10.0.0.1", 7, True).local_rank, places[0].port) == (0, 7)


def test_workers_of_several_machines_prove_that_they_belong_together(tmp_path: Path) -> None:
    config = _config(tmp_path)
    assert _with_token(config, False).launch.token is None
    first, second = (_with_token(config, True).launch.token for _ in range(2))
    assert first and second and len(first) == 64 and first != second
    own = _config(tmp_path, token="a secret of my own")
    assert _with_token(own, True) is own


def test_without_ray_the_engine_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setenv(AUTH_MODE, "token")
    with pytest.raises(LaunchError, match=r"install it with: pip install 'hyper-parallel\[ray\]'"):
        RayEngine()


def test_authentication_stays_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(AUTH_MODE, "disabled")
    with pytest.raises(LaunchError, match="RAY_AUTH_MODE=disabled would let everybody"):
        authenticate(None)
    authenticate("10.0.0.1:6379")  # whoever started that cluster has decided
    for name in (AUTH_MODE, AUTH_TOKEN):
        monkeypatch.setenv(name, "set, so that it is restored")
        monkeypatch.delenv(name)
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    authenticate(None)
    assert os.environ[AUTH_MODE] == "token" and len(os.environ[AUTH_TOKEN]) == 64
