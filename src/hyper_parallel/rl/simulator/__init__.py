"""Discrete-event simulation of the reinforcement-learning loop, with its real queue. No torch.

`simulate_loop` and `simulate_colocated` give a `LoopResult`; `best_split` chooses the devices of each role.
"""

from hyper_parallel.rl.simulator.result import LoopResult
from hyper_parallel.rl.simulator.run import simulate_colocated, simulate_loop
from hyper_parallel.rl.simulator.split import Split, best_split

__all__ = ["LoopResult", "Split", "best_split", "simulate_colocated", "simulate_loop"]
