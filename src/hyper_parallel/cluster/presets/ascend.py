"""Huawei's machines: Atlas 800T A2 (910B), CloudMatrix384 (910C, the A3 generation) and Atlas 950 (A5).

Huawei publishes fewer figures than others; estimated ones are marked. A device is what PyTorch sees: for the 910C,
whose package holds two dies, one die. Link bandwidths are one way.
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

_A2 = "Huawei Atlas 800T A2 specification: eight 910B3, 313 TFLOP/s each"
_DEEPSERVE = "DeepServe, arXiv 2501.14417, its table of machines"
_CLOUDMATRIX = "CloudMatrix384 paper, arXiv 2506.12708, from secondary summaries"
_STAS = "stas00/ml-engineering @744d01e, secondary"
_DAVINCI = (
    "a core's matrix unit does 16·16·16 products in a cycle and its two vector units 128 halves each "
    "(Liao et al., DaVinci, Hot Chips 2019): a sixteenth of the matrix rate, half of that in float32"
)
_LAUNCH = "a kernel after another in a stream, somewhat more than on NVIDIA's devices"


def _device(half: float, half_source: str, memory: float, memory_source: str) -> Facts:
    return {
        "device.matrix.float32": estimate(half / 4, "a quarter of the bfloat16 rate"),
        "device.matrix.bfloat16": known(half, half_source),
        "device.vector.float32": estimate(half / 32, _DAVINCI),
        "device.vector.bfloat16": estimate(half / 16, _DAVINCI),
        "device.memory.bytes": known(memory, memory_source),
        "device.launch": estimate(5e-6, _LAUNCH),
        "device.efficiency.matmul": estimate(
            matmul_curve(0.79), "the curve of the A100, since no products by shape are published"
        ),
        "device.efficiency.attention": estimate(attention_shares(0.50, 0.40), "the shares of the A100"),
        "device.efficiency.memory": estimate(MEMORY_CURVE, "the curve of the A100"),
        "device.comm_share": estimate(0.05, "collectives are moved by copy engines, beside few vector cores"),
        "device.comm_slowdown": estimate(1.05, "for the memory's bandwidth that they take"),
    }


def _network(bandwidth: float, source: str) -> Facts:
    return {
        "links.network.bandwidth": known(bandwidth, source),
        "links.network.efficiency": estimate(0.85, "of RoCE, a little less than InfiniBand's 0.9"),
        "links.network.shared_paths": estimate(True, "RoCE is routed by hashes"),
        "links.network.latency": estimate(1.4e-5, "as a hop on NVIDIA's machines"),
        "links.network.setup": estimate(8.8e-5, _SETUP),
    }


_SETUP = "as measured in a supernode: what is left of α(n) = 90, 111, 157, 378 µs at 2, 8, 16, 128 ranks"
_MEASURED = "all-to-all of sgl-project's kernels for Ascend, secondary"
_STEP = f"{_MEASURED}: α(n) = 90, 111, 157, 378 µs at 2, 8, 16, 128 ranks, so 2.3 µs a rank"
_REACHED = f"{_MEASURED}: 117.8 of 196 GB/s"


def a2() -> Tree:
    """Atlas 800T A2: eight 910B in a full mesh."""
    facts: Facts = {
        "node": known(8, _A2),
        **_device(313e12, _A2, 64e9, _DEEPSERVE),
        "device.memory.read": estimate(1.6e12, "HBM2e of its generation; the figure of a 910C's die"),
        "links.node.bandwidth": estimate(196e9, "seven links of 28 GB/s, one to each other device"),
        "links.node.efficiency": estimate(0.6, "the share that the 910C reaches"),
        "links.node.latency": estimate(2.3e-6, _STEP + ", on the 910C"),
        "links.node.setup": estimate(8.8e-5, _SETUP),
        **_network(25e9, _DEEPSERVE + ": 200 Gb/s RoCE for each device"),
        "links.host.bandwidth": estimate(31.5e9, "PCI Express 4.0, 16 lanes, which its host processor has"),
        "links.host.efficiency": estimate(0.8, "what pinned copies commonly reach"),
        "links.host.latency": estimate(1e-5, "of an asynchronous copy"),
        "host.bytes": estimate(1.5e12, "a usual configuration; up to 2 TB"),
        "host.read": estimate(7.6e11, "four processors with eight channels of DDR4-2933"),
        "host.ranks": known(8, _A2),
    }
    return cluster_tree("910b", "Ascend910B3", "Atlas 800T A2", facts)


def a3() -> Tree:
    """CloudMatrix384: 48 nodes of eight 910C (sixteen dies), joined by the unified bus."""
    facts: Facts = {
        "node": known(16, _CLOUDMATRIX + ": eight packages of two dies"),
        "supernode": known(768, _CLOUDMATRIX + ": 384 packages of two dies"),
        **_device(376e12, _CLOUDMATRIX + ": half of a package's 752 TFLOP/s", 64e9, _CLOUDMATRIX),
        "device.memory.read": known(1.6e12, _CLOUDMATRIX + ": half of a package's 3.2 TB/s"),
        "links.node.bandwidth": known(196e9, _CLOUDMATRIX + ": one way, of a die"),
        "links.node.efficiency": known(0.6, _REACHED),
        "links.node.latency": known(2.3e-6, _STEP),
        "links.node.setup": known(8.8e-5, _SETUP),
        "links.supernode.bandwidth": known(190e9, _CLOUDMATRIX + ": within 3% of that in the node"),
        "links.supernode.efficiency": known(0.6, _REACHED),
        "links.supernode.latency": known(3.3e-6, _CLOUDMATRIX + ": less than 1 µs above that in the node"),
        "links.supernode.setup": known(8.8e-5, _SETUP),
        **_network(25e9, _CLOUDMATRIX + ": up to 400 Gb/s for a package"),
        "links.host.bandwidth": estimate(40e9, "a processor's 160 GB/s of unified bus among its four dies"),
        "links.host.latency": estimate(
            5e-6, "of a copy over the unified bus, from its call to its first byte"
        ),
        "links.pool.bandwidth": estimate(40e9, "the processors' 160 GB/s each, divided among all dies"),
        "links.pool.latency": estimate(6e-6, "of a copy over the unified bus between nodes"),
        "host.bytes": estimate(1.5e12, "a usual configuration of four processors"),
        "host.read": estimate(6.4e11, "four processors with 160 GB/s of unified bus each"),
        "host.ranks": known(16, _CLOUDMATRIX),
        "pool.bytes": estimate(7.2e13, "48 nodes' memory"),
        "pool.read": estimate(3.07e13, "192 processors with 160 GB/s of unified bus each"),
        "pool.ranks": known(768, _CLOUDMATRIX),
    }
    return cluster_tree("cloudmatrix384", "Ascend910C", "CloudMatrix384", facts)


def a5() -> Tree:
    """Atlas 950 SuperPoD: 950DT, up to 8,192 of them joined by the unified bus."""
    announced = "Huawei's announcement of the Atlas 950 SuperPoD (2025)"
    facts: Facts = {
        "node": estimate(8, "as in the generations before"),
        "supernode": known(8192, announced),
        **_device(486e12, _STAS + ": 950DT", 96e9, _STAS + ": 950DT; the announcement of 2025 says 144 GB"),
        "device.matrix.float8_e4m3fn": known(919e12, _STAS + ": 950DT"),
        "device.memory.read": known(4.0e12, _STAS + ": 950DT"),
        "links.node.bandwidth": known(840e9, _STAS + ": unified bus, one way"),
        "links.node.efficiency": estimate(0.6, "the share that the 910C reaches"),
        "links.node.latency": estimate(2.3e-6, "that of the 910C"),
        "links.node.setup": estimate(8.8e-5, "that of the 910C"),
        "links.supernode.bandwidth": estimate(815e9, "3% below the node's, as on the 910C"),
        "links.supernode.efficiency": estimate(0.6, "the share that the 910C reaches"),
        "links.supernode.latency": estimate(3.3e-6, "1 µs above the node's, as on the 910C"),
        "links.supernode.setup": estimate(8.8e-5, "that of the 910C"),
        "links.network.bandwidth": estimate(50e9, "400 Gb/s for each device, as usual in its generation"),
        "links.network.efficiency": estimate(0.85, "of RoCE, a little less than InfiniBand's 0.9"),
        "links.network.shared_paths": estimate(True, "RoCE is routed by hashes"),
        "links.network.latency": estimate(1.4e-5, "as a hop on NVIDIA's machines"),
        "links.network.setup": estimate(8.8e-5, "that of the 910C"),
        "links.host.bandwidth": estimate(80e9, "twice that of the 910C"),
        "links.host.latency": estimate(5e-6, "that of the 910C"),
        "links.pool.bandwidth": estimate(80e9, "twice that of the 910C"),
        "links.pool.latency": estimate(6e-6, "that of the 910C"),
        "host.bytes": estimate(2.0e12, "a usual configuration"),
        "host.read": estimate(6.4e11, "that of the 910C"),
        "host.ranks": estimate(8, "as in the generations before"),
        "pool.bytes": estimate(1.5e15, "1.5 TB for each node of 8,192 devices"),
        "pool.read": estimate(6.55e14, "80 GB/s for each of 8,192 devices"),
        "pool.ranks": known(8192, announced),
    }
    return cluster_tree("atlas950", "Ascend950DT", "Atlas 950 SuperPoD", facts)


PRESETS: dict[str, Callable[[], Tree]] = {"910b": a2, "cloudmatrix384": a3, "atlas950": a5}

ALIASES = {
    "a2": "910b",
    "ascend910b": "910b",
    "a3": "cloudmatrix384",
    "910c": "cloudmatrix384",
    "ascend910c": "cloudmatrix384",
    "a5": "atlas950",
    "950": "atlas950",
    "ascend950": "atlas950",
}

FORM_FACTORS: tuple[tuple[tuple[str, ...], dict[str, float], str], ...] = (
    (("Ascend910B4",), {"bfloat16": 280e12}, "Huawei Atlas 300T A2 specification"),
)
"""Slower variants of the same devices: words of PyTorch's device name, peaks of matrix products, source."""
