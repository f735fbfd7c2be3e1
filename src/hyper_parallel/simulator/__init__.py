"""Simulation: a Trace on a Cluster gives a predicted Timeline, event by event.

Pure Python, deterministic, no torch: a step of thousands of ranks is simulated on a laptop.
"""

from hyper_parallel.simulator.simulate import alone, simulate

__all__ = ["alone", "simulate"]
