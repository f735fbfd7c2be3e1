"""The step as a graph: captured from any callable on fake tensors, measured, rewritten, run.

`capture` takes no Strategy: whatever was sharded shows its collectives, and whatever was not shows none.
"""

from hyper_parallel.graph.capture import capture
from hyper_parallel.graph.costs import costs
from hyper_parallel.graph.dependencies import check_order, dependencies, reorder
from hyper_parallel.graph.dynamic_sizes import balanced_sizes
from hyper_parallel.graph.execute import Executable, executable
from hyper_parallel.graph.host_nodes import HostPoint, host
from hyper_parallel.graph.ir import (
    CollectiveGroup,
    Input,
    Kind,
    Slot,
    StepGraph,
    Storage,
    Value,
    group_of,
    is_cache,
    is_collective,
    is_wait,
    values_of,
)
from hyper_parallel.graph.liveness import Lifetime, Peak, lifetimes, peak, workspaces
from hyper_parallel.graph.lower import lower
from hyper_parallel.graph.pass_manager import Pass, Ran, Rewrite, rewritten, run_passes, validate
from hyper_parallel.graph.recompute import inside, layers, recompute, regather, repeatable
from hyper_parallel.graph.recompute_policies import selective
from hyper_parallel.graph.step_context import PHASES, Phase, phase

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
    "check_order",
    "costs",
    "dependencies",
    "executable",
    "group_of",
    "host",
    "inside",
    "is_cache",
    "is_collective",
    "is_wait",
    "layers",
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
    "validate",
    "values_of",
    "workspaces",
]
