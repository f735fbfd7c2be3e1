"""Intel's machines: eight Gaudi 3 on one board, joined by their own Ethernet ports. Link bandwidths are one way."""

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

_GAUDI3 = "Intel Gaudi 3, Hot Chips 2024"
_PORTS = f"{_GAUDI3}: 24 ports of 200 Gb/s"
_AS_H100 = "as on NVIDIA's machines, since none is published"


def gaudi3() -> Tree:
    """Eight Gaudi 3; 21 of a device's 24 ports go to the seven others, three to each, and three to the network."""
    facts: Facts = {
        "node": known(8, _GAUDI3),
        "device.matrix.float32": estimate(229e12, "an eighth of the bfloat16 rate"),
        "device.matrix.bfloat16": known(1835e12, _GAUDI3),
        "device.matrix.float8_e4m3fn": known(1835e12, _GAUDI3),
        "device.vector.float32": estimate(14.3e12, "half of the bfloat16 rate"),
        "device.vector.bfloat16": known(28.7e12, _GAUDI3),
        "device.memory.bytes": known(128e9, _GAUDI3),
        "device.memory.read": known(3.67e12, _GAUDI3),
        "device.launch": estimate(
            5e-6, "a kernel after another in a stream, somewhat more than on NVIDIA's devices"
        ),
        "device.efficiency.matmul": estimate(
            matmul_curve(0.8), "that of an H100, since no products by shape are published"
        ),
        "device.efficiency.attention": estimate(attention_shares(0.35, 0.28), "the shares of an H100"),
        "device.efficiency.memory": estimate(MEMORY_CURVE, "the curve of the A100"),
        "device.comm_share": estimate(0.05, "collectives are moved by the ports, beside few vector cores"),
        "device.comm_slowdown": estimate(1.05, "for the memory's bandwidth that they take"),
        "links.node.bandwidth": known(525e9, f"{_PORTS}, 21 of them within the node"),
        "links.node.efficiency": estimate(0.7, "of a full mesh, whose links a ring uses one at a time"),
        "links.node.latency": estimate(3.4e-6, _AS_H100),
        "links.node.setup": estimate(8.4e-6, _AS_H100),
        "links.network.bandwidth": known(75e9, f"{_PORTS}, three of them to other nodes"),
        "links.network.efficiency": estimate(0.85, "of RoCE, a little less than InfiniBand's 0.9"),
        "links.network.shared_paths": estimate(True, "RoCE is routed by hashes"),
        "links.network.latency": estimate(1.4e-5, _AS_H100),
        "links.network.setup": estimate(8.4e-6, _AS_H100),
        "links.host.bandwidth": known(63e9, "PCI Express 5.0, 16 lanes of 32 GT/s with 128b/130b coding"),
        "links.host.efficiency": estimate(0.85, "what pinned copies over PCI Express commonly reach"),
        "links.host.latency": estimate(1e-5, "of an asynchronous copy, from its call to its first byte"),
        "host.bytes": estimate(1.0e12, "a usual configuration"),
        "host.read": estimate(6.1e11, "two processors with eight channels of DDR5-4800"),
        "host.ranks": known(8, _GAUDI3),
    }
    return cluster_tree("gaudi3", "GAUDI3", "eight Gaudi 3", facts)


PRESETS: dict[str, Callable[[], Tree]] = {"gaudi3": gaudi3}
