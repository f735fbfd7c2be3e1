"""An accelerator is a registration: the checks of streams, memory and collectives on a PrivateUse1 device."""

from __future__ import annotations

import os
from pathlib import Path

from harness.forked_command import run_script

_SCRIPT = """
import torch
import torch.distributed as dist
from harness import dummy_device, stream_contract
from hyper_parallel.compat import TorchBackend, backend, register

dummy_device.install()
register("dummy", lambda: TorchBackend("dummy", dummy_device.COLLECTIVE, socket_variable="DUMMY_IFNAME"))

dummy = backend("auto", workers=2)
assert dummy.name == "dummy" and backend("auto", workers=3).name == "cpu"
assert dummy.device(1) == torch.device("dummy", 1)
for check in stream_contract.CHECKS:
    check(dummy, dummy_device.launch)
    print("passed", check.__name__)

dummy_device.allocate(100)
dummy_device.allocate(-40)
assert (dummy.memory_allocated(), dummy.memory_peak(), dummy.memory_total()) == (60, 100, 2**30)
dummy.reset_memory_peak()
assert dummy.memory_peak() == 60
assert dummy.device_name() == "Dummy 1" and dummy.peak_flops(torch.float32) is None
assert dummy.environment("lo") == {"GLOO_SOCKET_IFNAME": "lo", "DUMMY_IFNAME": "lo"}

assert dummy.process_group == "cpu:gloo,dummy:dummyccl"
dist.init_process_group(dummy.process_group, store=dist.HashStore(), rank=0, world_size=1)
assert dist.get_backend_config() == dummy.process_group, dist.get_backend_config()
group = dist.group.WORLD
assert group._get_backend(torch.device("dummy")) is not group._get_backend(torch.device("cpu"))
dist.destroy_process_group()
print("passed collectives")
"""


def test_a_dummy_accelerator_passes_the_same_checks(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "GLOO_SOCKET_IFNAME": "lo"}
    done = run_script(_SCRIPT, folder=tmp_path, env=environment, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("passed") == 9
