"""Global settings of PyTorch by which operators choose their kernels."""

from __future__ import annotations

from typing import Any

import torch

from hyper_parallel.compat.registry import backend


def kernel_settings() -> list[Any]:
    """Those of the process, as plain data."""
    attention = torch.backends.cuda
    return [
        str(torch.get_default_dtype()),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        [attention.flash_sdp_enabled(), attention.mem_efficient_sdp_enabled()],
        [attention.math_sdp_enabled(), attention.cudnn_sdp_enabled()],
        torch.backends.cudnn.enabled,
        torch.backends.mkldnn.is_available(),
    ]


def device_facts(device: torch.device) -> list[Any]:
    """Name of the device, and the number of the one that is meant where none is given; empty for the host."""
    if device.type in ("cpu", "meta") or not torch.accelerator.is_available():
        return []
    return [backend(device.type).device_name(), torch.accelerator.current_device_index()]
