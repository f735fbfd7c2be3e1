"""Modules of multi-token prediction that published models are trained with (arXiv 2412.19437, section 2.2).

A config names their number (`num_nextn_predict_layers`), and Transformers builds the model without them: a step trains
them only where its framework does.
"""

from __future__ import annotations

MODULES: dict[str, int] = {
    "deepseek-v3": 1,
    "glm-4.5": 1,
    "glm-4.5-air": 1,
    "pangu-ultra-moe-718b": 1,
    "nemotron-3-super": 2,
    "qwen3-next-80b-a3b": 1,
}
"""By the published model's name; sources as of `published_shapes` and `published_hybrids`."""


def of_published(name: str) -> int:
    """Modules that a published model is trained with; 0 for those that have none."""
    return MODULES.get(name, 0)
