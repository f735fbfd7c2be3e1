"""Workload: a model's shape and the FLOPs of a step; the FLOP and MFU convention.

`published.shape("llama-3-405b")` is a published model's Shape.
"""

from hyper_parallel.workload.mixers import Latent
from hyper_parallel.workload.shape import Shape
from hyper_parallel.workload.work import Flops, Work, WorkKind, bytes_of, flops_of_model, mfu
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
    "flops_of_model",
    "mfu",
]
