"""NVIDIA's machines: DGX-1, DGX A100, H100, H200, B200 and B300, GB200 and GB300 NVL72, and the export variants.

Peaks stated with structured sparsity are halved; float32 is without TF32, PyTorch's default. Link bandwidths are one
way.
"""

from __future__ import annotations

from collections.abc import Callable

from hyper_parallel.cluster.files import (
    MEMORY_CURVE,
    Fact,
    Facts,
    Tree,
    attention_shares,
    cluster_tree,
    estimate,
    known,
    matmul_curve,
)

_A100 = "NVIDIA A100 80GB datasheet (2021), SXM"
_A100_PAPER = "NVIDIA A100 architecture whitepaper (2020), table of peak rates"
_DGX_A100 = "NVIDIA DGX A100 640GB datasheet (2020)"
_H100 = "NVIDIA H100 datasheet (2023), SXM"
_H100_PAPER = "NVIDIA H100 architecture whitepaper (2022), table of peak rates, SXM5"
_DGX_H100 = "NVIDIA DGX H100 datasheet (2022)"
_H200 = "NVIDIA H200 datasheet (2024), SXM"
_B200 = "NVIDIA HGX B200 specification (2024), an eighth of the board"
_DGX_B200 = "NVIDIA DGX B200 datasheet (2024)"
_GB200 = "NVIDIA GB200 NVL72 specification (2024), a 72nd of the rack"
_B300 = "NVIDIA HGX B300 specification (2025), an eighth of the board"
_DGX_B300 = "NVIDIA DGX B300 datasheet (2025)"
_GB300 = "NVIDIA GB300 NVL72 specification (2025), a 72nd of the rack"
_V100 = "NVIDIA V100 datasheet (2020), SXM2"
_DGX_1 = "NVIDIA DGX-1 datasheet (2019), with V100"
_A100_40 = "NVIDIA A100 40GB datasheet (2020), SXM"
_DGX_A100_40 = "NVIDIA DGX A100 320GB datasheet (2020)"
_H800 = "DeepSeek-AI, arXiv 2505.09343, section 4: an H100 whose NVLink has 400 GB/s, of both ways"
_H20 = "NVIDIA H20 specification, as dealers publish it, secondary"
_A800 = "NVIDIA A800 datasheet (2022): an A100 whose NVLink has 400 GB/s, of both ways"
RINGS = "tuning.cc of NVIDIA's collectives, ring, Simple, as ported by meta-pytorch/autoparallel @a54c252"
_CALCULON = "calculon-ai/calculon systems/a100_80g.json @caa4b11, a model's constant"
_STAS = "stas00/ml-engineering @744d01e"
_STAS_BEST = "stas00/ml-engineering @b9e2972, compute/accelerator/README.md"
_SIMUMAX = "MooreThreads/SimuMax @4dcaae5"
_PCIE6 = "PCI Express 6.0, 16 lanes of 64 GT/s with PAM4 and FLIT coding"
_FLASH3 = "Shah et al., FlashAttention-3, arXiv 2407.08608"
_PCIE3 = "PCI Express 3.0, 16 lanes of 8 GT/s with 128b/130b coding"
PCIE4 = "PCI Express 4.0, 16 lanes of 16 GT/s with 128b/130b coding"
PCIE5 = "PCI Express 5.0, 16 lanes of 32 GT/s with 128b/130b coding"


_MATMUL_A100 = known(
    matmul_curve(0.847),
    f"{_SIMUMAX}: fitted to the measured shares of 183 products in bfloat16 on the A100 PCIe, 0.79 with a mean error "
    "of 4.8%, times what the SXM reaches of the PCIe's best: 271.2 to 252.9 TFLOP/s "
    f"({_STAS_BEST})",
)
_ATTENTION_A100 = known(
    attention_shares(0.50, 0.40),
    f"{_SIMUMAX}: median of 12 measured shapes each way on the A100 PCIe, halved since hidden scores are counted",
)
_ATTENTION_H100 = estimate(
    attention_shares(0.35, 0.28),
    f"forward: FlashAttention-2 reaches 35% of an H100 ({_FLASH3}, abstract); backward in the A100's proportion",
)


def common(bandwidth: float, memory_source: str) -> Facts:
    """Facts common to all of them."""
    return {
        "device.memory.read": known(bandwidth, memory_source),
        "device.launch": estimate(3e-6, "kernels that follow each other in a stream begin 2 to 4 µs apart"),
        "device.efficiency.memory": known(
            MEMORY_CURVE,
            f"{_CALCULON}: 0.3, 0.6, 0.75 and 0.9 from 0, 1, 10 and 100 MB on; the first is set at 0.1 MB",
        ),
        "device.comm_share": estimate(
            0.15, "20 of 132 multiprocessors, the blocks of a collective's kernels"
        ),
        "device.comm_slowdown": known(
            1.126, "Galvatron's measured slowdown of a kernel beside a collective; Calculon has 1.15"
        ),
    }


def _links(
    nvlink: float, nvlink_source: str, share: Fact, network: float, network_source: str, host: Fact
) -> Facts:
    """NVLink in the node, one network card for each device, and the link to the host."""
    return {
        "links.node.bandwidth": known(nvlink, nvlink_source),
        "links.node.efficiency": share,
        "links.node.latency": known(3.4e-6, RINGS + ": a hop over NVLink"),
        "links.node.setup": known(8.4e-6, RINGS + ": base latency"),
        "links.network.bandwidth": known(network, network_source),
        "links.network.efficiency": known(0.9, _CALCULON + ": InfiniBand"),
        "links.network.latency": known(14.0e-6, RINGS + ": a hop over the network"),
        "links.network.setup": known(8.4e-6, RINGS + ": base latency"),
        "links.host.bandwidth": host,
        "links.host.efficiency": estimate(0.85, "what pinned copies over PCI Express commonly reach"),
        "links.host.latency": estimate(1e-5, "of an asynchronous copy, from its call to its first byte"),
    }


def _host(memory: float, source: str, read: float, channels: str, flash: float) -> Facts:
    """A node's host memory and its drives."""
    return {
        "host.bytes": known(memory, source),
        "host.read": estimate(read, f"{channels}, all of them at their rate"),
        "host.ranks": known(8, source),
        "flash.bytes": known(flash, source),
        "flash.read": estimate(5.0e10, "eight NVMe drives of 6 to 7 GB/s each"),
        "flash.write": estimate(3.0e10, "eight NVMe drives of 4 GB/s each"),
        "flash.latency": estimate(1e-4, "of a read from an NVMe drive"),
        "flash.ranks": known(8, source),
    }


def _hopper(memory: float, bandwidth: float, source: str, nvlink: Fact | None = None) -> Facts:
    return {
        "node": known(8, _DGX_H100),
        "device.matrix.float32": known(67e12, source),
        "device.matrix.bfloat16": known(989e12, source),
        "device.matrix.float8_e4m3fn": known(1979e12, source),
        "device.vector.float32": known(67e12, source),
        "device.vector.bfloat16": known(133.8e12, _H100_PAPER),
        "device.memory.bytes": known(memory, source),
        **common(bandwidth, source),
        "device.efficiency.matmul": estimate(
            matmul_curve(0.80),
            f"the best measured is 794.5 of 989 TFLOP/s ({_STAS}); half lengths as on the A100",
        ),
        "device.efficiency.attention": _ATTENTION_H100,
        **_links(
            nvlink.value if nvlink else 450e9,
            nvlink.source if nvlink else source,
            known(0.81, f"{_STAS}: ring all-reduce of 8 GiB on 8 H200, 365.6 of 450 GB/s"),
            50e9,
            f"{_DGX_H100}: eight 400 Gb/s cards",
            known(63e9, PCIE5),
        ),
        **_host(2.0e12, _DGX_H100, 6.1e11, "two processors with eight channels of DDR5-4800", 3.07e13),
    }


def _ampere(memory: float, bandwidth: float, source: str, nvlink: Fact, machine: str, host: Facts) -> Facts:
    return {
        "node": known(8, machine),
        "device.matrix.float32": known(19.5e12, source),
        "device.matrix.bfloat16": known(312e12, source),
        "device.vector.float32": known(19.5e12, source),
        "device.vector.bfloat16": known(39e12, _A100_PAPER),
        "device.vector.float16": known(78e12, _A100_PAPER),
        "device.memory.bytes": known(memory, source),
        **common(bandwidth, source),
        "device.efficiency.matmul": _MATMUL_A100,
        "device.efficiency.attention": _ATTENTION_A100,
        **_links(
            nvlink.value,
            nvlink.source,
            known(0.78, f"{_STAS}: all-reduce of 8 GiB on 8 A100, 234.6 of 300 GB/s"),
            25e9,
            f"{machine}: eight 200 Gb/s cards",
            known(31.5e9, PCIE4),
        ),
        **host,
    }


_DDR4 = (4.1e11, "two processors with eight channels of DDR4-3200")


def a100() -> Tree:
    """DGX A100 of 80 GB."""
    host = _host(2.0e12, _DGX_A100, *_DDR4, 3.07e13)
    facts = _ampere(80e9, 2.039e12, _A100, known(300e9, _A100), _DGX_A100, host)
    return cluster_tree("a100", "NVIDIA A100-SXM4-80GB", "DGX A100", facts)


def a100_40() -> Tree:
    """DGX A100 of 40 GB."""
    host = _host(1.0e12, _DGX_A100_40, *_DDR4, 1.5e13)
    facts = _ampere(40e9, 1.555e12, _A100_40, known(300e9, _A100_40), _DGX_A100_40, host)
    return cluster_tree("a100-40gb", "NVIDIA A100-SXM4-40GB", "DGX A100 of 320 GB", facts)


def a800() -> Tree:
    """Eight A800, otherwise as a DGX A100."""
    host = _host(2.0e12, _DGX_A100, *_DDR4, 3.07e13)
    facts = _ampere(80e9, 2.039e12, _A800, known(200e9, _A800), _DGX_A100, host)
    return cluster_tree("a800", "NVIDIA A800-SXM4-80GB", "eight A800", facts)


def v100() -> Tree:
    """DGX-1 with V100 of 32 GB. It has no bfloat16; float16 stands for it."""
    facts: Facts = {
        "node": known(8, _DGX_1),
        "device.matrix.float32": known(15.7e12, _V100),
        "device.matrix.float16": known(125e12, _V100),
        "device.vector.float32": known(15.7e12, _V100),
        "device.vector.float16": known(31.4e12, _V100),
        "device.memory.bytes": known(32e9, _V100),
        **common(9.0e11, _V100),
        "device.efficiency.matmul": estimate(matmul_curve(0.75), "somewhat below the A100's"),
        "device.efficiency.attention": estimate(
            attention_shares(0.35, 0.28), "a guess: no fused kernel for this device"
        ),
        **_links(
            150e9,
            _V100,
            estimate(0.78, "the share that the A100 reaches"),
            6.25e9,
            f"{_DGX_1}: four 100 Gb/s cards for eight devices",
            known(15.75e9, _PCIE3),
        ),
        **_host(5.12e11, _DGX_1, 1.54e11, "two processors with four channels of DDR4-2400", 7.7e12),
        "flash.read": estimate(2.0e9, "four SATA drives of 0.5 GB/s each"),
        "flash.write": estimate(2.0e9, "four SATA drives of 0.5 GB/s each"),
    }
    return cluster_tree("v100", "Tesla V100-SXM2-32GB", "DGX-1 with V100", facts)


def h100() -> Tree:
    """DGX H100."""
    return cluster_tree("h100", "NVIDIA H100 80GB HBM3", "DGX H100", _hopper(80e9, 3.35e12, _H100))


def h200() -> Tree:
    """DGX H200."""
    return cluster_tree("h200", "NVIDIA H200", "DGX H200", _hopper(141e9, 4.8e12, _H200))


def h800() -> Tree:
    """Eight H800, otherwise as a DGX H100."""
    facts = _hopper(80e9, 3.35e12, _H100, known(200e9, _H800))
    return cluster_tree("h800", "NVIDIA H800", "eight H800", facts)


def h20() -> Tree:
    """Eight H20, otherwise as a DGX H100."""
    facts = {
        **_hopper(96e9, 4.0e12, _H20),
        "device.matrix.float32": known(44e12, _H20),
        "device.matrix.bfloat16": known(148e12, _H20),
        "device.matrix.float8_e4m3fn": known(296e12, _H20),
        "device.vector.float32": known(44e12, _H20),
        "device.vector.bfloat16": estimate(88e12, "twice the float32 rate, as on the H100"),
        "device.efficiency.matmul": estimate(
            matmul_curve(0.90),
            "few multiprocessors are kept busy more easily than an H100's",
        ),
    }
    return cluster_tree("h20", "NVIDIA H20", "eight H20", facts)


def _blackwell(source: str, half: float, single: float, memory: float, quarter: float) -> Facts:
    return {
        "device.matrix.float32": known(single, source),
        "device.matrix.bfloat16": known(half, source),
        "device.matrix.float8_e4m3fn": known(2 * half, source),
        "device.matrix.float4_e2m1fn_x2": known(quarter, source),
        "device.vector.float32": known(single, source),
        "device.vector.bfloat16": estimate(2 * single, "twice the float32 rate, as on the H100"),
        "device.memory.bytes": known(memory, source),
        **common(8e12, source),
        "device.efficiency.matmul": known(
            matmul_curve(0.507, [59.0, 67.0, 173.0]),
            f"{_SIMUMAX}: fitted to the measured shares of 514 products in bfloat16 on the B200; mean error 10%. "
            f"{_STAS} reached 0.78 with the best shape",
        ),
        "device.efficiency.attention": known(
            attention_shares(0.37, 0.35),
            f"{_SIMUMAX}: median of 32 measured shapes each way on the B200, halved since hidden scores are counted",
        ),
    }


def _nvlink5(source: str, network_source: str, host: Fact, network: float = 50e9) -> Facts:
    share = known(0.74, f"{_SIMUMAX} b200_bf16_ceperm.json: NVLink all-reduce, fitted 0.7424 of 900 GB/s")
    return _links(900e9, source, share, network, network_source, host)


def b200() -> Tree:
    """DGX B200."""
    facts: Facts = {
        "node": known(8, _DGX_B200),
        **_blackwell(_B200, 2250e12, 75e12, 180e9, 9000e12),
        **_nvlink5(_B200, f"{_DGX_B200}: eight 400 Gb/s cards", known(63e9, PCIE5)),
        **_host(4.0e12, _DGX_B200, 7.2e11, "two processors with eight channels of DDR5-5600", 3.07e13),
    }
    return cluster_tree("b200", "NVIDIA B200", "DGX B200", facts)


def b300() -> Tree:
    """DGX B300."""
    facts: Facts = {
        "node": known(8, _DGX_B300),
        **_blackwell(_B300, 2250e12, 75e12, 288e9, 13500e12),
        **_nvlink5(_B300, f"{_DGX_B300}: eight 800 Gb/s cards", known(126e9, _PCIE6), 100e9),
        **_host(4.0e12, _DGX_B300, 8.2e11, "two processors with eight channels of DDR5-6400", 3.07e13),
    }
    return cluster_tree("b300", "NVIDIA B300", "DGX B300", facts)


def _rack(source: str, device: Facts, network: float, network_source: str) -> Facts:
    """NVL72: 18 trays of four devices, all 72 joined by NVLink."""
    facts: Facts = {
        "node": known(4, source),
        "supernode": known(72, source),
        **device,
        **_nvlink5(
            source,
            network_source,
            estimate(225e9, "NVLink-C2C's 900 GB/s, of both ways, divided among the two devices of a Grace"),
            network,
        ),
    }
    return {
        **facts,
        **{f"links.supernode.{key}": facts[f"links.node.{key}"] for key in _LINK},
        "host.bytes": known(9.4e11, f"{source}: 17 TB of LPDDR5X in 18 trays"),
        "host.read": known(
            1.0e12, "NVIDIA Grace datasheet (2023): 512 GB/s for each of a tray's two processors"
        ),
        "host.ranks": known(4, source),
    }


def gb200() -> Tree:
    """GB200 NVL72."""
    device = _blackwell(_GB200, 2500e12, 80e12, 186e9, 10000e12)
    network = "NVIDIA DGX GB200 datasheet (2024): 400 Gb/s for each device"
    return cluster_tree("gb200-nvl72", "NVIDIA GB200", "GB200 NVL72", _rack(_GB200, device, 50e9, network))


def gb300() -> Tree:
    """GB300 NVL72."""
    device = _blackwell(_GB300, 2500e12, 80e12, 288e9, 15000e12)
    network = f"{_GB300}: 800 Gb/s for each device"
    return cluster_tree("gb300-nvl72", "NVIDIA GB300", "GB300 NVL72", _rack(_GB300, device, 100e9, network))


_LINK = ("bandwidth", "efficiency", "latency", "setup")

PRESETS: dict[str, Callable[[], Tree]] = {
    "v100": v100,
    "a100": a100,
    "a100-40gb": a100_40,
    "a800": a800,
    "h100": h100,
    "h200": h200,
    "h800": h800,
    "h20": h20,
    "b200": b200,
    "b300": b300,
    "gb200-nvl72": gb200,
    "gb300-nvl72": gb300,
}

ALIASES = {"gb200": "gb200-nvl72", "nvl72": "gb200-nvl72", "gb300": "gb300-nvl72", "a100-80gb": "a100"}

FORM_FACTORS: tuple[tuple[tuple[str, ...], dict[str, float], str], ...] = (
    (
        ("H100", "PCIe"),
        {"float32": 51e12, "bfloat16": 756e12, "float8_e4m3fn": 1513e12},
        "NVIDIA H100 datasheet",
    ),
    (
        ("H100", "NVL"),
        {"float32": 60e12, "bfloat16": 835e12, "float8_e4m3fn": 1671e12},
        "NVIDIA H100 datasheet",
    ),
    (
        ("H200", "NVL"),
        {"float32": 60e12, "bfloat16": 835e12, "float8_e4m3fn": 1671e12},
        "NVIDIA H200 datasheet",
    ),
)
"""Slower variants of the same devices: words of PyTorch's device name, peaks of matrix products, source."""
