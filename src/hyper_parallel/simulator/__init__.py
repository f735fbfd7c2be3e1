"""Discrete-event simulation of a Trace on a Cluster, which gives a predicted Timeline.

Pure Python, deterministic, no torch: a laptop simulates a step of thousands of ranks.
"""

from hyper_parallel.simulator.simulate import alone, simulate

__all__ = ["alone", "simulate"]
