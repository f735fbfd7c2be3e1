"""NVIDIA's devices without NVLink, eight in a machine: RTX 4090, RTX 5090, RTX 6000 Ada, L40S, L4 and A10G.

Peaks are without sparsity. GeForce cards and the A10G multiply in bfloat16 with sums in float32, as training does, at
half of the rate that their datasheets give for sums in float16. Bandwidths of links are one way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hyper_parallel.cluster.files import (
    Fact,
    Facts,
    Tree,
    attention_shares,
    cluster_tree,
    estimate,
    known,
    matmul_curve,
)
from hyper_parallel.cluster.presets.nvidia import PCIE4, PCIE5, RINGS, common

_ADA = "NVIDIA Ada GPU architecture whitepaper (2023), version 2.1, table of peak rates"
_BLACKWELL = "NVIDIA RTX Blackwell GPU architecture whitepaper (2025), table of peak rates"
_L40S = "NVIDIA L40S datasheet (2023)"
_L4 = "NVIDIA L4 datasheet (2023)"
_A10G = "NVIDIA A10G datasheet for AWS (2022)"
_G5 = "AWS, Amazon EC2 G5: g5.48xlarge"
_G6 = "AWS, Amazon EC2 G6: g6.48xlarge"
_MEASURED_P2P = (
    "all-reduce of eight RTX PRO 6000 attached to two processors, 37.6 of 63 GB/s (voipmonitor/rtx6kpro, "
    "hardware/pcie-bandwidth.md)"
)
_SUMS = ": sums in float32"
_FLOPS_BENCH = "xzwgit/gpu-flops-bench @14a1e5e"
_DDR4 = estimate(4.1e11, "two processors with eight channels of DDR4-3200, all of them at their rate")
_DDR5 = estimate(6.1e11, "two processors with eight channels of DDR5-4800, all of them at their rate")

_RTX5090 = "all-reduce of four RTX 5090 through the host's memory, 35 of 63 GB/s (issue 1639 of NVIDIA's collectives)"
_OVER_HOST = estimate(0.56, _RTX5090)
_DIRECT = estimate(0.6, _MEASURED_P2P)
_GEFORCE = known(False, "an engineer of NVIDIA's collectives in their issue 1086: GeForce devices have none")
_VIRTUAL = estimate(False, "a virtual machine's devices commonly have none")


@dataclass(frozen=True)
class _Card:
    """A card as its source states it; rates in FLOP/s without sparsity, bandwidth in B/s."""

    source: str
    single: float
    half: float
    eighth: float
    """0 without units of eight bits."""
    memory: float
    bandwidth: float
    best: Fact
    """The best share of the peak that products reach."""

    def facts(self) -> Facts:
        eighth = (
            {"device.matrix.float8_e4m3fn": known(self.eighth, self.source + _SUMS)} if self.eighth else {}
        )
        return {
            "device.matrix.float32": known(self.single, self.source),
            "device.matrix.bfloat16": known(self.half, self.source + _SUMS),
            **eighth,
            "device.vector.float32": known(self.single, self.source),
            "device.vector.bfloat16": known(self.single, self.source + ": halves at the float32 rate"),
            "device.memory.bytes": known(self.memory, self.source),
            **common(self.bandwidth, self.source),
            "device.efficiency.matmul": self.best,
            "device.efficiency.attention": estimate(
                attention_shares(0.50, 0.40), "the shares of the A100, whose kernels these devices run"
            ),
        }


def _best(share: float, how: str) -> Fact:
    return estimate(matmul_curve(share), f"{how}; half lengths as on the A100")


_CLOCK = "the clock rises above the one that the peak is stated for"


def _machine(
    node: Fact,
    lanes: Fact,
    between: Fact,
    network: Fact,
    host: Fact,
    memory: Fact,
    direct: Fact | None = None,
) -> Facts:
    """Cards in slots of 16 lanes. `between`: the share of a slot's rate that collectives reach; `direct`: whether cards
    reach each other's memory, as those do for which it is left out.
    """
    return {
        "node": node,
        **({"peer_to_peer": direct} if direct else {}),
        "links.node.bandwidth": lanes,
        "links.node.efficiency": between,
        "links.node.latency": known(5.7e-6, RINGS + ": a hop over PCI Express"),
        "links.node.setup": known(8.4e-6, RINGS + ": base latency"),
        "links.network.bandwidth": network,
        "links.network.efficiency": estimate(0.85, "of Ethernet, a little less than InfiniBand's 0.9"),
        "links.network.shared_paths": estimate(True, "Ethernet is routed by hashes"),
        "links.network.latency": known(14.0e-6, RINGS + ": a hop over the network"),
        "links.network.setup": known(8.4e-6, RINGS + ": base latency"),
        "links.host.bandwidth": lanes,
        "links.host.efficiency": estimate(0.85, "what pinned copies over PCI Express commonly reach"),
        "links.host.latency": estimate(1e-5, "of an asynchronous copy, from its call to its first byte"),
        "host.bytes": host,
        "host.read": memory,
        "host.ranks": node,
    }


_SLOTS = estimate(8, "the slots of a usual server")
_OWN_NETWORK = estimate(1.5625e9, "one card of 100 Gb/s for eight devices")
_OWN_HOST = estimate(5.12e11, "a usual configuration")
_CLOUD_HOST = 768 * 2.0**30


def rtx4090() -> Tree:
    """Eight RTX 4090 in a server of two processors."""
    best = _best(1.0, f"{_CLOCK}: 179.2 TFLOP/s measured of 165.2 ({_FLOPS_BENCH})")
    card = _Card(_ADA, 82.6e12, 165.2e12, 330.3e12, 24e9, 1.008e12, best)
    machine = _machine(_SLOTS, known(31.5e9, PCIE4), _OVER_HOST, _OWN_NETWORK, _OWN_HOST, _DDR4, _GEFORCE)
    return cluster_tree("rtx4090", "NVIDIA GeForce RTX 4090", "eight RTX 4090", {**machine, **card.facts()})


def rtx5090() -> Tree:
    """Eight RTX 5090 in a server of two processors."""
    best = _best(1.0, f"{_CLOCK}: 254.0 TFLOP/s measured of 209.5 ({_FLOPS_BENCH})")
    card = _Card(_BLACKWELL, 104.8e12, 209.5e12, 419e12, 32e9, 1.792e12, best)
    facts = {
        **_machine(
            _SLOTS, known(63e9, PCIE5), known(0.56, _RTX5090), _OWN_NETWORK, _OWN_HOST, _DDR5, _GEFORCE
        ),
        **card.facts(),
        "device.matrix.float4_e2m1fn_x2": known(1676e12, _BLACKWELL + _SUMS),
    }
    return cluster_tree("rtx5090", "NVIDIA GeForce RTX 5090", "eight RTX 5090", facts)


def rtx6000_ada() -> Tree:
    """Eight RTX 6000 Ada in a server of two processors."""
    best = _best(0.75, "below the A100's, since the clock falls at 300 W")
    card = _Card(_ADA, 91.1e12, 364.2e12, 728.5e12, 48e9, 9.6e11, best)
    machine = _machine(_SLOTS, known(31.5e9, PCIE4), _DIRECT, _OWN_NETWORK, _OWN_HOST, _DDR4)
    facts = {**machine, **card.facts()}
    return cluster_tree("rtx6000-ada", "NVIDIA RTX 6000 Ada Generation", "eight RTX 6000 Ada", facts)


def l40s() -> Tree:
    """Eight L40S in a server of two processors."""
    best = _best(0.75, "as on the RTX 6000 Ada: the clock falls at 350 W")
    card = _Card(_L40S, 91.6e12, 362.05e12, 733e12, 48e9, 8.64e11, best)
    network = estimate(6.25e9, "400 Gb/s for eight devices, as in AWS g6e.48xlarge")
    host = estimate(1.0e12, "a usual configuration")
    machine = _machine(_SLOTS, known(31.5e9, PCIE4), _DIRECT, network, host, _DDR4)
    return cluster_tree("l40s", "NVIDIA L40S", "eight L40S", {**machine, **card.facts()})


def l4() -> Tree:
    """Eight L4, as g6.48xlarge has them."""
    best = _best(0.55, "the clock falls far at 72 W")
    card = _Card(_L4, 30.3e12, 121e12, 242.5e12, 24e9, 3.0e11, best)
    network = known(1.5625e9, f"{_G6}: 100 Gb/s for eight devices")
    host = known(_CLOUD_HOST, f"{_G6}: 768 GiB")
    machine = _machine(known(8, _G6), known(31.5e9, PCIE4), _OVER_HOST, network, host, _DDR4, _VIRTUAL)
    return cluster_tree("l4", "NVIDIA L4", "eight L4", {**machine, **card.facts()})


def a10g() -> Tree:
    """Eight A10G, as g5.48xlarge has them."""
    best = _best(0.85, "the share of the A100")
    card = _Card(_A10G, 35e12, 70e12, 0.0, 24e9, 6.0e11, best)
    network = known(1.5625e9, f"{_G5}: 100 Gb/s for eight devices")
    host = known(_CLOUD_HOST, f"{_G5}: 768 GiB")
    machine = _machine(known(8, _G5), known(31.5e9, PCIE4), _OVER_HOST, network, host, _DDR4, _VIRTUAL)
    return cluster_tree("a10g", "NVIDIA A10G", "eight A10G", {**machine, **card.facts()})


PRESETS: dict[str, Callable[[], Tree]] = {
    "rtx4090": rtx4090,
    "rtx5090": rtx5090,
    "rtx6000-ada": rtx6000_ada,
    "l40s": l40s,
    "l4": l4,
    "a10g": a10g,
}

ALIASES = {
    "4090": "rtx4090",
    "5090": "rtx5090",
    "rtx-4090": "rtx4090",
    "rtx-5090": "rtx5090",
    "6000-ada": "rtx6000-ada",
}
