"""Proof that a strategy computes what one device computes: loss, gradient norm, every gradient and update."""

from hyper_parallel.verify.report import Report
from hyper_parallel.verify.run import verify_file

__all__ = ["Report", "verify_file"]
