"""The step as a graph: captured from any callable on fake tensors, measured, rewritten, run.

`capture` takes no Strategy: whatever was sharded shows its collectives, and whatever was not shows none.
"""

from hyper_parallel.graph.cache import Slot, is_cache
from hyper_parallel.graph.capture import capture
from hyper_parallel.graph.costs import costs
from hyper_parallel.graph.execute import Executable, executable
from hyper_parallel.graph.fit import fit
from hyper_parallel.graph.groups import Group, group_of, is_collective, is_wait
from hyper_parallel.graph.host import host
from hyper_parallel.graph.lifetimes import Lifetime, Peak, lifetimes, peak
from hyper_parallel.graph.lower import lower
from hyper_parallel.graph.nouns import Input, Kind, StepGraph, Storage, Value, values_of
from hyper_parallel.graph.order import check_order, dependencies, legal, reorder
from hyper_parallel.graph.passes import Pass, Ran, Rewrite, rewritten, run_passes, validate
from hyper_parallel.graph.phase import PHASES, Phase, phase
from hyper_parallel.graph.recompute import inside, layers, recompute, regather, repeatable
from hyper_parallel.graph.sizes import balanced_sizes
from hyper_parallel.graph.sooner import sooner
from hyper_parallel.graph.text import changes, text
from hyper_parallel.graph.workspaces import workspaces

__all__ = [
    "PHASES",
    "Executable",
    "Group",
    "Input",
    "Kind",
    "Lifetime",
    "Pass",
    "Peak",
    "Phase",
    "Ran",
    "Rewrite",
    "Slot",
    "StepGraph",
    "Storage",
    "Value",
    "balanced_sizes",
    "capture",
    "changes",
    "check_order",
    "costs",
    "dependencies",
    "executable",
    "fit",
    "group_of",
    "host",
    "inside",
    "is_cache",
    "is_collective",
    "is_wait",
    "layers",
    "legal",
    "lifetimes",
    "lower",
    "peak",
    "phase",
    "recompute",
    "regather",
    "reorder",
    "repeatable",
    "rewritten",
    "run_passes",
    "sooner",
    "text",
    "validate",
    "values_of",
    "workspaces",
]
