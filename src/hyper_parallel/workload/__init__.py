"""Workload: the model's shape and what a step of it costs; the one FLOP convention, and so MFU, lives here."""

from hyper_parallel.workload.flops import Flops, flops_of_config, flops_of_model, mfu
from hyper_parallel.workload.work import Work, WorkKind, bytes_of

__all__ = ["Flops", "Work", "WorkKind", "bytes_of", "flops_of_config", "flops_of_model", "mfu"]
