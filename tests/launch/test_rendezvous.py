"""Which interface workers talk through, what a host name means, and a server that hears of its command's end."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from harness.commands import make_config, noted, running, wait_until
from hyper_parallel.errors import LaunchError
from hyper_parallel.launch.rendezvous import WorkerPlace, interface, is_loopback, listen
from hyper_parallel.launch.worker_supervisor import ForkServer


def _own_address() -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("203.0.113.7", 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def test_on_one_machine_workers_talk_through_loopback() -> None:
    assert interface(WorkerPlace("local", 0, 4, 0, 4, "127.0.0.1", 1)) == "lo"


def test_on_several_machines_they_talk_through_the_one_that_reaches_the_first() -> None:
    address = _own_address()
    if address is None:
        pytest.skip("this machine has no route beyond loopback")
    found = interface(WorkerPlace("torchrun", 0, 4, 0, 2, address, 1))
    assert found is not None and found != "lo"
    assert found in [name for _, name in socket.if_nameindex()]


def test_several_machines_are_not_tied_to_loopback() -> None:
    # The first machine's own name often means 127.0.1.1 there, which no other machine reaches.
    assert interface(WorkerPlace("slurm", 0, 4, 0, 2, "127.0.1.1", 1)) is None


def test_loopback_by_name_and_by_address() -> None:
    assert is_loopback("127.0.0.1") and is_loopback("localhost") and is_loopback("::1")
    assert not is_loopback("203.0.113.7") and not is_loopback("no such host")


def test_listening_is_on_the_asked_address_only() -> None:
    with listen("127.0.0.1", 0) as listener:
        host, port = listener.getsockname()
        assert host == "127.0.0.1" and port > 0


def test_a_host_without_an_address_is_named() -> None:
    with pytest.raises(LaunchError, match=r"the host 'no such host' of launch\.rendezvous has no address"):
        listen("no such host", 0)


def test_a_server_whose_command_is_gone_ends_with_its_workers(tmp_path: Path) -> None:
    server = ForkServer()
    place = WorkerPlace("local", 0, 1, 0, 1, "127.0.0.1", 0)
    try:
        workers = server.start([place], make_config(tmp_path, {}), "harness.targets:ignores_stop", None)
        wait_until((tmp_path / "run/rank-0.json").exists, "the worker is at work")
        worker = noted(tmp_path, 0)["pid"]
        assert running(worker)
        server.channel.close()
        wait_until(
            lambda: server._process.poll() is not None and not running(worker), "both have ended", timeout=15
        )
        workers.close()
    finally:
        server.close()
