"""A run as a row of a CSV states it, which tests change cell by cell."""

from __future__ import annotations

from typing import Any

RUN: dict[str, Any] = {
    "row_id": "7",
    "source_id": "S99",
    "model": "llama-3-8b",
    "layers": "32.0",
    "hidden": "4096.0",
    "heads": "32.0",
    "kv_heads": "8",
    "ffn": "14336",
    "ffn_gated": "1",
    "vocab": "128256",
    "seq_len": "8192",
    "hardware": "H100-80GB-SXM",
    "n_devices": "16",
    "devices_per_node": "8",
    "framework": "Megatron-LM",
    "precision": "bf16",
    "tp": "2",
    "pp": "2",
    "cp": "1",
    "mbs": "1",
    "gbs": "64",
}
