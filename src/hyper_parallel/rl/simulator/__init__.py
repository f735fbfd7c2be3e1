"""Discrete-event simulation of the reinforcement-learning loop, with its real queue. No torch.

`simulate_loop`, `simulate_colocated` and `simulate_alternating` give a `LoopResult`; `best_split` chooses the devices
of each role, and `ranked_splits` orders given splits.
"""

from hyper_parallel.rl.simulator.run import (
    LoopResult,
    best_split,
    ranked_splits,
    simulate_alternating,
    simulate_colocated,
    simulate_loop,
)

__all__ = [
    "LoopResult",
    "best_split",
    "ranked_splits",
    "simulate_alternating",
    "simulate_colocated",
    "simulate_loop",
]
