"""Presets of cards and clouds: rates against the circuits and clocks that their makers state, and what they plan."""

from __future__ import annotations

import pytest

from hyper_parallel.cluster import Cluster, Device
from hyper_parallel.cluster.presets import peak_flops, preset_of
from hyper_parallel.errors import ConfigError
from hyper_parallel.workload import Work

ARITHMETIC = {
    "rtx4090": (128, 512, 2.52e9),
    "rtx5090": (170, 512, 2.407e9),
    "rtx6000-ada": (142, 1024, 2.505e9),
    "l40s": (142, 1024, 2.52e9),
    "l4": (58, 1024, 2.04e9),
    "a10g": (80, 512, 1.71e9),
    "mi325x": (304, 2048, 2.1e9),
    "gaudi3": (8, 256 * 256 * 2, 1.75e9),
}
"""Multiprocessors (matrix engines), dense bfloat16 FLOPs of each in a cycle with sums in float32, and the clock."""

BUS = {
    "rtx4090": (384, 21e9),
    "rtx5090": (512, 28e9),
    "rtx6000-ada": (384, 20e9),
    "l40s": (384, 18e9),
    "l4": (192, 12.5e9),
    "a10g": (384, 12.5e9),
    "mi325x": (8192, 5.86e9),
    "gaudi3": (8192, 3.6e9),
}
"""Width of the memory's bus in bits, and bit/s of each."""


def device(name: str) -> Device:
    found = Cluster.preset(name).device
    assert found is not None
    return found


@pytest.mark.parametrize("name", ARITHMETIC)
def test_the_peak_is_what_the_circuits_do_at_their_clock(name: str) -> None:
    units, flops, clock = ARITHMETIC[name]
    assert device(name).peak("bfloat16") == pytest.approx(units * flops * clock, rel=0.02)


@pytest.mark.parametrize("name", BUS)
def test_the_memory_is_as_fast_as_its_bus(name: str) -> None:
    bits, rate = BUS[name]
    assert device(name).memory.read == pytest.approx(bits / 8 * rate, rel=0.01)


def test_seconds_of_a_product_are_in_the_proportion_of_the_peaks() -> None:
    work = Work.of_matmul(8192, 8192, 8192, dtype="bfloat16")
    seconds = {name: device(name).seconds(work) for name in ARITHMETIC}
    assert seconds["rtx5090"] < seconds["rtx4090"] < seconds["a10g"]
    assert seconds["gaudi3"] < seconds["mi325x"] < seconds["l40s"] < seconds["l4"]
    # Without the halved rate of sums in float32 a GeForce card would be as fast as its sibling for workstations.
    assert seconds["rtx4090"] > 1.5 * seconds["rtx6000-ada"]


def test_a_node_without_nvlink_reduces_far_below_one_with_it() -> None:
    size = float(2**30)
    seconds = {
        name: Cluster.preset(name).collective_seconds("all_reduce", size, 8) for name in ("h100", *ARITHMETIC)
    }
    for name in ("rtx4090", "rtx5090", "rtx6000-ada", "l40s", "l4", "a10g"):
        slot = 63e9 if name == "rtx5090" else 31.5e9
        # A ring moves 2 (n − 1) / n of the bytes over each slot, at no more than its rate.
        assert seconds[name] > 2 * 7 / 8 * size / slot
        assert seconds[name] > 5 * seconds["h100"]
    assert seconds["gaudi3"] < 2 * seconds["h100"]


def test_devices_are_recognized_by_whole_words_of_their_names() -> None:
    assert preset_of("NVIDIA L4") == "l4"
    assert preset_of("NVIDIA L40S") == "l40s"
    assert preset_of("NVIDIA RTX 6000 Ada Generation") == "rtx6000-ada"
    assert preset_of("NVIDIA H200") == "h200"
    assert preset_of("AMD Instinct MI300X OAM") == "mi300x"
    others = (
        "NVIDIA L40",
        "Quadro RTX 6000",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 5090 Laptop GPU",
    )
    assert [preset_of(name) for name in others] == [None] * len(others)
    assert peak_flops("NVIDIA GeForce RTX 4090", "float16") == 165.2e12


def test_names_as_users_write_them_and_the_nearest_to_others() -> None:
    assert Cluster.named("RTX4090x8").ranks == 8
    assert Cluster.named("4090x2").device == device("rtx4090")
    with pytest.raises(ConfigError, match="did you mean 'rtx5090'"):
        Cluster.named("rtx5091")
    with pytest.raises(ConfigError, match="did you mean 'gaudi3'"):
        Cluster.named("gaudi2")
