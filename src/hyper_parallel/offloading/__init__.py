"""HyperOffload: a step's live bytes under a budget, by moving storages between memories while it runs."""

from hyper_parallel.offloading.apply import apply
from hyper_parallel.offloading.choose import choose
from hyper_parallel.offloading.moves import Move, Plan, replay
from hyper_parallel.offloading.problem import Problem, Rate, Space
from hyper_parallel.offloading.problem_of import problem_of
from hyper_parallel.offloading.runtime import Runtime

__all__ = ["Move", "Plan", "Problem", "Rate", "Runtime", "Space", "apply", "choose", "problem_of", "replay"]
