"""The registry, the CPU's memory statistics, published peaks, and telling lost peers from causes."""

from __future__ import annotations

import mmap
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from hyper_parallel.cluster.presets import peak_flops
from hyper_parallel.compat import backend, is_lost_peer, names, register, registry
from hyper_parallel.compat.cpu import CpuBackend
from hyper_parallel.errors import LaunchError


class _Accelerator(CpuBackend):
    name = "accelerator"
    collective = "fast"
    count = 2

    def available(self) -> bool:
        return self.count > 0

    def device_count(self) -> int:
        return self.count

    def devices_for(self, workers: int) -> bool:
        return workers <= self.count


@pytest.fixture
def accelerator() -> Iterator[_Accelerator]:
    made = _Accelerator()
    register("accelerator", lambda: made)
    yield made
    del registry._factories["accelerator"]
    registry._made.pop("accelerator", None)


def test_auto_is_the_cpu_where_no_accelerator_is() -> None:
    if torch.accelerator.is_available():
        pytest.skip("this machine has an accelerator")
    cpu = backend("auto")
    assert (cpu.name, cpu.collective, cpu.process_group) == ("cpu", "gloo", "gloo")
    assert cpu.device(3) == torch.device("cpu")


def test_auto_takes_an_accelerator_with_a_device_for_each_worker(accelerator: _Accelerator) -> None:
    assert names()[-1] == "cpu" and "accelerator" in names()
    assert backend("auto", workers=2) is accelerator
    assert accelerator.process_group == "cpu:gloo,accelerator:fast"
    assert backend("auto", workers=3).name == "cpu"


def test_fewer_devices_than_workers_is_refused_when_asked_for_by_name(accelerator: _Accelerator) -> None:
    with pytest.raises(LaunchError, match=r"3 workers here need .* there are only 2"):
        backend("accelerator", workers=3)
    accelerator.count = 0
    with pytest.raises(LaunchError, match="PyTorch finds none here"):
        backend("accelerator")


def test_an_unknown_device_names_the_nearest() -> None:
    with pytest.raises(LaunchError, match="did you mean 'cuda'"):
        backend("cuba")


def test_resident_memory_and_its_peak_follow_an_allocation() -> None:
    cpu, size = backend("cpu"), 64 * 2**20
    cpu.reset_memory_peak()
    before = cpu.memory_allocated()
    # Not a tensor: the allocator may have as much at hand from what other tests gave back.
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as block:
        block.write(b"x" * size)
        assert cpu.memory_allocated() >= before + 0.9 * size
    assert cpu.memory_peak() >= before + 0.9 * size
    assert cpu.memory_total() > cpu.memory_peak()


def test_host_buffer_has_the_shape_and_dtype() -> None:
    buffer = backend("cpu").host_buffer((2, 3), torch.bfloat16)
    assert buffer.shape == (2, 3) and buffer.dtype == torch.bfloat16 and buffer.device.type == "cpu"


@pytest.mark.parametrize(
    ("name", "dtype", "expected"),
    [
        ("NVIDIA A100-SXM4-80GB", torch.bfloat16, 312e12),
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989e12),
        ("NVIDIA H100 PCIe", torch.bfloat16, 756e12),
        ("NVIDIA H200", torch.float32, 67e12),
        ("NVIDIA H200", torch.float8_e4m3fn, 1979e12),
        ("NVIDIA B200", torch.float16, 2250e12),
        ("NVIDIA GB200", torch.float16, 2500e12),
        ("Ascend910B3", torch.float16, 313e12),
        ("Ascend910B3", torch.float32, None),
        ("NVIDIA A100-SXM4-80GB", torch.float8_e4m3fn, None),
        ("NVIDIA GeForce RTX 4090", torch.bfloat16, 165.2e12),
        ("NVIDIA GeForce RTX 3090", torch.bfloat16, None),
    ],
)
def test_published_peaks(name: str, dtype: torch.dtype, expected: float | None) -> None:
    assert peak_flops(name, str(dtype).removeprefix("torch.")) == expected


def test_the_cpu_has_no_peak() -> None:
    assert backend("cpu").peak_flops(torch.float32) is None


def test_a_lost_peer_is_told_from_a_cause() -> None:
    lost = RuntimeError("[/x/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:37761")
    assert is_lost_peer(lost)
    assert is_lost_peer(dist.DistNetworkError("failed to recv, got 0 bytes"))
    wrapped = RuntimeError("step 3 failed")
    wrapped.__cause__ = lost
    assert is_lost_peer(wrapped)
    assert not is_lost_peer(RuntimeError("shape mismatch"))
    assert not is_lost_peer(ValueError("Connection closed by peer"))
