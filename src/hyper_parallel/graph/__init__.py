"""The step as a graph: captured from any callable on fake tensors, measured, rewritten, run.

`capture` takes no Strategy: whatever was sharded shows its collectives, and whatever was not shows none.
"""

from hyper_parallel.graph.capture import capture
from hyper_parallel.graph.collective_groups import group_of, is_collective, is_wait
from hyper_parallel.graph.costs import costs
from hyper_parallel.graph.dependencies import check_order, dependencies, legal, reorder
from hyper_parallel.graph.dynamic_sizes import balanced_sizes
from hyper_parallel.graph.early_free import early_free
from hyper_parallel.graph.execute import Executable, executable
from hyper_parallel.graph.greedy_recompute import fit
from hyper_parallel.graph.ir import CollectiveGroup, Input, Kind, StepGraph, Storage, Value, values_of
from hyper_parallel.graph.liveness import Lifetime, Peak, lifetimes, peak
from hyper_parallel.graph.lower import lower
from hyper_parallel.graph.pass_manager import Pass, Ran, Rewrite, rewritten, run_passes, validate
from hyper_parallel.graph.phase import PHASES, Phase, phase
from hyper_parallel.graph.printer import changes, text
from hyper_parallel.graph.recompute import inside, layers, recompute, regather, repeatable
from hyper_parallel.graph.selective_recompute import selective
from hyper_parallel.graph.suspension import HostPoint, host
from hyper_parallel.graph.tier_ops import Slot, is_cache
from hyper_parallel.graph.workspaces import workspaces

__all__ = [
    "PHASES",
    "CollectiveGroup",
    "Executable",
    "HostPoint",
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
    "early_free",
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
    "selective",
    "text",
    "validate",
    "values_of",
    "workspaces",
]
