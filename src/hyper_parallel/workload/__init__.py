"""Workload: the model's shape and what a step of it costs; the one FLOP convention, and so MFU, lives here.

`published.shape("llama-3-405b")` is a published model's Shape.
"""

from hyper_parallel.workload.flops import Flops, flops_of_config, flops_of_model, mfu
from hyper_parallel.workload.shape import Latent, Shape
from hyper_parallel.workload.work import Work, WorkKind, bytes_of
from hyper_parallel.workload.workload import PRECISIONS, Precision, Workload

__all__ = [
    "PRECISIONS",
    "Flops",
    "Latent",
    "Precision",
    "Shape",
    "Work",
    "WorkKind",
    "Workload",
    "bytes_of",
    "flops_of_config",
    "flops_of_model",
    "mfu",
]
