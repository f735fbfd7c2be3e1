"""Ctrl-C, and an end without `close`: nothing is left on the disk or in shared memory."""

from __future__ import annotations

import secrets
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hyper_parallel.offloading.tiers.leases import OWN

SCRIPT = """
import sys, time, torch
from hyper_parallel.compat import backend
from hyper_parallel.offloading.tiers import FlashTier, HostTier, PoolTier

cpu, x = backend("cpu"), torch.ones(8 * 2**20, dtype=torch.uint8)
tiers = [FlashTier(sys.argv[1], cpu), HostTier(cpu, 2**30), PoolTier(cpu, 2**30, sys.argv[2])]
for tier in tiers:
    tier.reserve({slot: x.numel() for slot in range(4)})
print("ready", flush=True)
if sys.argv[3] == "ends":
    for tier in tiers:
        tier.begin_write(0, x)
    raise SystemExit(3)
while True:
    for tier in tiers:
        for slot in range(4):
            pending = tier.begin_write(slot, x)
        pending.wait()
"""


@pytest.mark.parametrize("how", ["ends", "is interrupted"])
def test_nothing_is_left(tmp_path: Path, how: str) -> None:
    pool = secrets.token_hex(8)
    child = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "spill"), pool, how],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell that starts the tests in the background has them ignore it, and what they start.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    if how == "is interrupted":
        child.send_signal(signal.SIGINT)
    try:
        _, errors = child.communicate(timeout=60)
    finally:
        child.kill()
    assert child.returncode == (3 if how == "ends" else -signal.SIGINT), errors
    assert not list((tmp_path / "spill").iterdir())
    assert not (Path("/dev/shm") / OWN / f"pool-{pool}").exists()
