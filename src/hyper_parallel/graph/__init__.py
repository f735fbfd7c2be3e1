"""The step as a graph: captured from any callable on fake tensors, measured, rewritten, run.

`capture` takes no Strategy: whatever was sharded shows its collectives, and whatever was not shows none.
"""

from hyper_parallel.graph.capture import capture
from hyper_parallel.graph.costs import costs
from hyper_parallel.graph.dependencies import check_order, dependencies, legal, reorder
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
from hyper_parallel.graph.liveness import Lifetime, Peak, changes, lifetimes, peak, text, workspaces
from hyper_parallel.graph.lower import lower
from hyper_parallel.graph.pass_manager import Pass, Ran, Rewrite, rewritten, run_passes, validate
from hyper_parallel.graph.recompute import inside, layers, recompute, regather, repeatable
from hyper_parallel.graph.recompute_policies import fit, selective
from hyper_parallel.graph.reorder_for_memory import early_free
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
