"""Columns of a `Table` that say what a step trains: the model's dimensions, its adapters, the length and the batch."""

from __future__ import annotations

from hyper_parallel.workload.adapters import BASE_BYTES
from hyper_parallel.workload.workload import PRECISIONS, Workload

SHAPE = (
    *("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "gated", "vocabulary", "tied"),
    *(
        "experts",
        "chosen",
        "expert_ffn",
        "shared_ffn",
        "dense_layers",
        "window",
        "windowed",
        "gate",
        "expert_hidden",
        "expert_bias",
        "expert_groups",
        "chosen_groups",
    ),
    *("attention_layers", "mixer_layers", "mlp_layers"),
)
"""Fields and properties of Shape."""
LATENT = ("query_rank", "key_rank", "plain", "rotary", "value")
MIXER = ("inputs", "inner", "scanned", "moved", "reference", "reference_scanned", "saved")
ADAPTER = (
    *("frozen", "frozen_bytes", "adapter_rank", "adapter_inputs", "adapter_outputs"),
    *("adapted_attention", "adapted_output", "adapted_mlp", "adapted_down"),
)
"""Columns of adapters; zeros where the whole model is trained."""


def of_workload(workload: Workload) -> dict[str, float]:
    """The columns of what is trained."""
    shape, latent, mixer = workload.shape, workload.shape.latent, workload.shape.mixer
    columns = {name: float(getattr(shape, name)) for name in SHAPE}
    columns |= {name: float(getattr(latent, name)) if latent else 0.0 for name in LATENT}
    columns |= {f"mixer_{name}": float(getattr(mixer, name)) if mixer else 0.0 for name in MIXER}
    rest = mixer.others + mixer.channels * mixer.kernel + mixer.vectors if mixer else 0
    return {
        **columns,
        "mixer_rest": float(rest),
        "prediction_modules": float(workload.prediction_modules),
        **_of_adapter(workload),
        "sequence": workload.sequence,
        "batch": workload.batch,
        "precision": PRECISIONS.index(workload.precision),
    }


def _of_adapter(workload: Workload) -> dict[str, float]:
    adapter = workload.adapter
    if adapter is None:
        return dict.fromkeys(ADAPTER, 0.0)
    features, chosen = adapter.features(workload.shape), adapter.linear
    layers = workload.shape.layers
    return {
        "frozen": 1.0,
        "frozen_bytes": BASE_BYTES[adapter.base],
        "adapter_rank": float(adapter.rank),
        "adapter_inputs": sum(into for into, _ in features) / layers,
        "adapter_outputs": sum(out for _, out in features) / layers,
        "adapted_attention": float(bool(chosen & {"q_proj", "k_proj", "v_proj", "in_proj"})),
        "adapted_output": float(bool(chosen & {"o_proj", "out_proj"})),
        "adapted_mlp": float(bool(chosen & {"gate_proj", "up_proj"})),
        "adapted_down": float("down_proj" in chosen),
    }
