"""Published dense peak FLOP/s of accelerators, by name and dtype: the denominator of MFU.

Makers often quote figures with structured sparsity; these are half of those. fp32 is the figure without TF32,
which is what PyTorch computes with by default.

Sources. A100: NVIDIA A100 datasheet (2021). H100: NVIDIA H100 datasheet (2023), by form factor. H200:
NVIDIA H200 datasheet (2024). B200: NVIDIA HGX B200 specification (2024), an eighth of the board. Ascend 910B:
the FP16 figures of the Atlas 800T A2 (eight 910B3, 313 TFLOP/s each) and the Atlas 300T A2 (910B4, 280
TFLOP/s); the bf16 rate is the fp16 rate, and no fp32 figure is published.
"""

from __future__ import annotations

import torch

_HALF = (torch.bfloat16, torch.float16)

# (substrings of the name, all of which must occur; half precision; fp32; fp8). The first match is taken.
_PEAKS: tuple[tuple[tuple[str, ...], float, float | None, float | None], ...] = (
    (("A100",), 312e12, 19.5e12, None),
    (("H100", "PCIe"), 756e12, 51e12, 1513e12),
    (("H100", "NVL"), 835e12, 60e12, 1671e12),
    (("H100",), 989e12, 67e12, 1979e12),
    (("H200", "NVL"), 835e12, 60e12, 1671e12),
    (("H200",), 989e12, 67e12, 1979e12),
    (("GB200",), 2500e12, 80e12, 5000e12),
    (("B200",), 2250e12, 75e12, 4500e12),
    (("Ascend910B3",), 313e12, None, None),
    (("Ascend910B4",), 280e12, None, None),
)


def peak_flops(device_name: str, dtype: torch.dtype) -> float | None:
    """Dense FLOP/s of one device in `dtype`, or None where no published figure is known."""
    for words, half, single, eighth in _PEAKS:
        if all(word in device_name for word in words):
            if dtype in _HALF:
                return half
            if dtype == torch.float32:
                return single
            return eighth if dtype in (torch.float8_e4m3fn, torch.float8_e5m2) else None
    return None
