"""AMD's machines: eight MI300X or MI325X on one board.

Peaks that AMD states with structured sparsity are halved. Link bandwidths are one way.
"""

from __future__ import annotations

from collections.abc import Callable

from hyper_parallel.cluster.files import (
    MEMORY_CURVE,
    Facts,
    Tree,
    attention_shares,
    cluster_tree,
    estimate,
    known,
    matmul_curve,
)

_MI300X = "AMD Instinct MI300X datasheet (2023)"
_MI325X = "AMD Instinct MI325X datasheet (2024)"
_AS_H100 = "as on NVIDIA's machines, since none is published"


def _cdna3(memory: float, bandwidth: float, source: str) -> Facts:
    """Eight devices in a full mesh; MI300X and MI325X differ in their memory alone."""
    platform = source.replace("datasheet", "platform datasheet")
    return {
        "node": known(8, platform),
        "device.matrix.float32": known(163.4e12, source),
        "device.matrix.bfloat16": known(1307.4e12, source),
        "device.matrix.float8_e4m3fn": known(2614.9e12, source),
        "device.vector.float32": known(163.4e12, source),
        "device.vector.bfloat16": estimate(163.4e12, "the float32 rate"),
        "device.memory.bytes": known(memory, source),
        "device.memory.read": known(bandwidth, source),
        "device.launch": estimate(
            5e-6, "a kernel after another in a stream, somewhat more than on NVIDIA's devices"
        ),
        "device.efficiency.matmul": estimate(
            matmul_curve(0.60),
            "the best measured on the MI300X is 758 of 1307 TFLOP/s (stas00/ml-engineering); half lengths as on the "
            "A100",
        ),
        "device.efficiency.attention": estimate(
            attention_shares(0.30, 0.22), "somewhat below an H100's shares"
        ),
        "device.efficiency.memory": estimate(MEMORY_CURVE, "the curve of the A100"),
        "device.comm_share": estimate(0.15, _AS_H100),
        "device.comm_slowdown": estimate(1.126, _AS_H100),
        "links.node.bandwidth": known(448e9, f"{platform}: seven links of 64 GB/s, one to each other device"),
        "links.node.efficiency": estimate(0.7, "of a full mesh, whose links a ring uses one at a time"),
        "links.node.latency": estimate(3.4e-6, _AS_H100),
        "links.node.setup": estimate(8.4e-6, _AS_H100),
        "links.network.bandwidth": estimate(50e9, "eight 400 Gb/s cards, as usual in its generation"),
        "links.network.efficiency": estimate(0.85, "of RoCE, a little less than InfiniBand's 0.9"),
        "links.network.shared_paths": estimate(True, "RoCE is routed by hashes"),
        "links.network.latency": estimate(1.4e-5, _AS_H100),
        "links.network.setup": estimate(8.4e-6, _AS_H100),
        "links.host.bandwidth": known(63e9, "PCI Express 5.0, 16 lanes of 32 GT/s with 128b/130b coding"),
        "links.host.efficiency": estimate(0.85, "what pinned copies over PCI Express commonly reach"),
        "links.host.latency": estimate(1e-5, "of an asynchronous copy, from its call to its first byte"),
        "host.bytes": estimate(2.0e12, "a usual configuration"),
        "host.read": estimate(9.2e11, "two processors with twelve channels of DDR5-4800"),
        "host.ranks": known(8, platform),
    }


def mi300x() -> Tree:
    """Eight MI300X."""
    facts = _cdna3(192e9, 5.3e12, _MI300X)
    return cluster_tree("mi300x", "AMD Instinct MI300X", "eight MI300X", facts)


def mi325x() -> Tree:
    """Eight MI325X."""
    facts = _cdna3(256e9, 6.0e12, _MI325X)
    return cluster_tree("mi325x", "AMD Instinct MI325X", "eight MI325X", facts)


PRESETS: dict[str, Callable[[], Tree]] = {"mi300x": mi300x, "mi325x": mi325x}
