"""Workload: the model's shape and what a step of it costs; the one FLOP convention, and so MFU, lives here."""

from hyper_parallel.workload.flops import Flops, flops_of_config, flops_of_model, mfu

__all__ = ["Flops", "flops_of_config", "flops_of_model", "mfu"]
