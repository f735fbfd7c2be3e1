"""HyperOffload: a step's live bytes under a budget, by moving storages between memories while it runs."""

from hyper_parallel.offload.apply import apply
from hyper_parallel.offload.choose import choose
from hyper_parallel.offload.moves import Move, Plan, replay
from hyper_parallel.offload.problem import Problem, Rate, Space
from hyper_parallel.offload.problem_of import problem_of
from hyper_parallel.offload.runtime import Runtime

__all__ = ["Move", "Plan", "Problem", "Rate", "Runtime", "Space", "apply", "choose", "problem_of", "replay"]
