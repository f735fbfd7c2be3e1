"""Verification that a strategy computes what one device computes: loss, gradients and updates."""

from hyper_parallel.verify.report import Report
from hyper_parallel.verify.run import verify_file, verify_one_device

__all__ = ["Report", "verify_file", "verify_one_device"]
