"""A run's step as a Trace: captured with one micro-batch, and with a few of its layers where those are alike.

Passes rewrite the micro-batch, which is then written out as often as the step has micro-batches (`step.accumulation`);
a budget is planned over the whole. Of many micro-batches a few are written out, and the ops of one are repeated, as are
those of layers. The blocks that stand for others are compared op by op before they are repeated. Where they are not
alike after all, all layers are captured and all micro-batches written out, which is as right and takes longer. With
`whole` they always are.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from hyper_parallel.cluster import Cluster
from hyper_parallel.compat.dispatch import kernel_settings
from hyper_parallel.compat.fake_tensors import fake_ranks
from hyper_parallel.config import RunConfig
from hyper_parallel.errors import TraceError
from hyper_parallel.estimate.prediction import count_micro_batches, micro_batch
from hyper_parallel.estimate.repeat_ops import Loop, Repeated, Tag, Unlike, repeat
from hyper_parallel.graph import Pass, StepGraph, values_of
from hyper_parallel.graph.artifacts import own
from hyper_parallel.graph.likeness import Period, find_period
from hyper_parallel.graph.lower import Lowered, lowered
from hyper_parallel.graph.pass_manager import ACROSS_LAYERS, rewritten
from hyper_parallel.graph.step_context import current_step, region_of, storage_layers
from hyper_parallel.offloading.pass_pipeline import of_whole_step
from hyper_parallel.shard import parallelize, sharded
from hyper_parallel.shard.layer_kinds import layer_kinds, with_layers
from hyper_parallel.shard.plan import make_plan
from hyper_parallel.step.accumulation import loop_width, repeated, rewritten_loop
from hyper_parallel.step.capture_train_step import MicroBatchShape, capture_one
from hyper_parallel.step.engine import check_length
from hyper_parallel.step.graph_key import (
    NoDigest,
    described,
    environment,
    names,
    source_digest,
    sources,
    versions,
)
from hyper_parallel.step.graph_store import LARGEST, tidy
from hyper_parallel.step.recipe import Recipe
from hyper_parallel.strategy import Strategy
from hyper_parallel.trace import Trace
from hyper_parallel.trace.serialize import dump_trace, load_trace
from hyper_parallel.untrusted_files import open_regular, read_bytes

T = TypeVar("T")

CAPTURED = 5
"""Periods of layers that are captured."""
MICRO = 5
"""Micro-batches that are written out where there are more: the first two, the last two, and one that is repeated."""


_BATCH = re.compile(r"^micro\.(\d+)\.")
"""How `step.capture_train_step` names the inputs of a micro-batch."""
_FEW = 1 << 20
"""Bytes. What reads more of several layers at once grows with their number, which repeating does not tell; below that,
as for the norms of all gradients, it does not matter."""


def trace_of(
    model: nn.Module,
    config: RunConfig,
    classes: Mapping[int, str],
    *,
    views: bool,
    fused: bool = False,
    whole: bool = False,
    passes_of: Callable[[Strategy], Sequence[Pass]],
    say: Callable[[str], None] = lambda _: None,
    notes: list[str] | None = None,
) -> Trace:
    """The Trace of a run's step on ranks of one class. `model` is on the meta device, and is not changed.

    `passes_of`: the passes of a step under a strategy, which is that of a smaller model where layers are repeated.
    `fused`: as of `graph.lower.lowered`. `say` is told what is being done; to `notes` is added what was
    repeated. Errors are those of `capture_step`.
    """
    (name,) = set(classes.values())
    told = notes if notes is not None else []
    micro_batches = count_micro_batches(config)
    strategy = config.effective_strategy
    plan = make_plan(model, strategy)
    rewrites = passes_of(strategy)
    across = whole or any(one.provides & ACROSS_LAYERS for one in rewrites)
    kept = None if across else find_period(layer_kinds(model, plan, strategy), CAPTURED)
    # What is planned over all of them is no repetition of a few.
    apart = any(of_whole_step(one) for one in rewrites)
    width = loop_width(rewrites, micro_batches)
    captured = micro_batches if whole or apart else min(micro_batches, MICRO * width)
    found: Repeated | None = None
    if kept is not None or captured < micro_batches:
        smaller, smaller_strategy = model, strategy
        if kept is not None:
            smaller, smaller_strategy = with_layers(model, plan, strategy, kept.layers)
        shown = f"{len(kept.layers)} of {kept.total} layers, " if kept else ""
        say(f"capturing {shown}1 of {micro_batches} micro-batches as rank 0 of {len(classes)}")
        step = captured_step(smaller, config, smaller_strategy, captured, passes_of(smaller_strategy), say)
        try:
            found = _repeated(step, plan.layers, kept, (captured, micro_batches, width), views, fused)
        except Unlike as error:
            say(f"they are not alike ({error}); capturing all")
        else:
            if kept is not None:
                told.append(
                    f"{len(kept.layers)} of the {kept.total} layers were captured; those alike were repeated"
                )
            if captured < micro_batches:
                told.append(f"one of the {micro_batches} micro-batches was captured; the others are copies")
    if found is None:
        say(f"capturing all layers as rank 0 of {len(classes)}")
        step = captured_step(model, config, strategy, micro_batches, rewrites, say)
        one = lowered(step, views=views, fused=fused)
        return Trace({name: one.ops}, dict(classes), {name: one.resident}, 0.0, micro_batches)
    return Trace({name: found.ops}, dict(classes), {name: found.resident}, 0.0, micro_batches)


def captured_step(
    model: nn.Module,
    config: RunConfig,
    strategy: Strategy,
    micro_batches: int,
    passes: Sequence[Pass],
    say: Callable[[str], None] = lambda _: None,
    rank: int = 0,
) -> StepGraph:
    """The graph of a rank's step of so many micro-batches after its passes. `model` is not changed."""
    with fake_ranks(strategy.axes.world, rank):
        step = of_micro_batch(
            model, config, strategy, lambda recipe, shape: capture_one(recipe, shape, micro_batches)
        )
        say(f"{sum(1 for _ in step.nodes):,} nodes captured")
        if any(one.provides & ACROSS_LAYERS for one in passes):
            say(f"rewriting it: {', '.join(one.name for one in passes)}")
        each = [one for one in passes if not of_whole_step(one)]
        if micro_batches == 1:
            step = rewritten(step, each)
        else:
            step = repeated(rewritten_loop(step, strategy.memory.shard, micro_batches, each), micro_batches)
        return rewritten(step, [one for one in passes if of_whole_step(one)])


def of_micro_batch(
    model: nn.Module, config: RunConfig, strategy: Strategy, capture: Callable[[Recipe, MicroBatchShape], T]
) -> T:
    """What `capture` makes of a run's recipe and micro-batch on a rank of `fake_ranks`. `model` is not changed."""
    model = copy.deepcopy(model)
    parallelize(model, strategy, lowering="traceable")
    check_length(sharded(model), config)
    shape = MicroBatchShape(micro_batch(config), config.data.sequence, False)
    with replace(current_step(), even_load=load_of(strategy)).installed():
        return capture(Recipe.of(config, model), shape)


def load_of(strategy: Strategy) -> float:
    """How many times their even share of the rows the rank's experts are taken to get: under a budget as many as
    memory is kept for."""
    memory, ranks = strategy.memory, strategy.axes.expert
    return 1.0 if memory.device is None else min(memory.expert_load, float(ranks))


def _repeated(
    step: StepGraph,
    prefix: str | None,
    kept: Period | None,
    counts: tuple[int, int, int],
    views: bool,
    fused: bool,
) -> Repeated:
    """`counts`: of micro-batches that are written out, of all, and of those in the body of the step's loop."""
    captured, micro_batches, width = counts
    found = lowered(step, views=views, fused=fused)
    micro = [region_of(node).micro_batch for node in found.nodes]
    made = Repeated(found.ops, found.resident, tuple(range(len(found.ops))))
    if kept is not None and prefix is not None:
        made = _of_all_layers(step, found, prefix, kept)
        micro = [micro[index] for index in made.origin]
    if captured < micro_batches:
        runs = captured // width
        loop = Loop(runs // 2, micro_batches // width - runs + 1)
        near = [_near(None if tag is None else tag // width, loop) for tag in micro]
        batches = [(held, _run_of(held.name, width)) for held in made.resident]
        made = repeat(
            made.ops, near, batches, loop, lambda name, _, copied: _batch_renamed(name, loop, copied, width)
        )
    return made


def _of_all_layers(step: StepGraph, found: Lowered, prefix: str, kept: Period) -> Repeated:
    index = re.compile(rf"(?:^|(?<=\.)){re.escape(prefix)}\.(\d+)(?=\.|$)")

    def block_of(name: str) -> Tag:
        layer = index.search(name)
        return kept.block(int(layer[1])) if layer else None

    def renamed(name: str, _: Tag, copied: int) -> str:
        return index.sub(lambda layer: f"{prefix}.{kept.real(int(layer[1]), copied)}", name, count=1)

    layers = {
        storage: layer for storage, layer in storage_layers(step.graph.nodes).items() if index.match(layer)
    }
    for op, node in zip(found.ops, found.nodes, strict=True):
        if index.match(region_of(node).layer) or op.work is None or op.work.read <= _FEW:
            continue
        read = {layers.get(value.storage) for source in node.all_input_nodes for value in values_of(source)}
        if len(read - {None}) > 1:
            raise Unlike(f"{op.name} reads {op.work.read:.0f} bytes of several layers at once")
    tags = [block_of(region_of(node).layer) for node in found.nodes]
    resident = [(held, block_of(held.name)) for held in found.resident]
    return repeat(found.ops, tags, resident, Loop(kept.middle, kept.copies), renamed)


def _near(run: Tag, loop: Loop) -> Tag:
    """A run of the loop's body that is repeated, or stands beside it; None for the others."""
    return run if run is not None and abs(run - loop.middle) <= 1 else None


def _run_of(name: str, width: int) -> Tag:
    """The run of a body of so many micro-batches that an input of the step is of."""
    found = _BATCH.match(name)
    return int(found[1]) // width if found else None


def _batch_renamed(name: str, loop: Loop, copied: int, width: int) -> str:
    run = _run_of(name, width)
    if run is None or run < loop.middle:
        return name
    shift = width * (copied if run == loop.middle else loop.times - 1)
    return _BATCH.sub(lambda found: f"micro.{int(found[1]) + shift}.", name)


# A folder of Traces: a step that was captured and lowered for one prediction is read by later ones of the same step.
#
#     key = blake2b(versions, code, settings of PyTorch, model, run file, cluster, order and pricing of the Trace)
#
# It follows `step.graph_store`: the same digests of code and model, the same private folder, files put in place at
# once, and the sources of the code named in each file. Where a digest cannot be made, a source has changed, or a file
# is damaged, the step is captured.

log = logging.getLogger(__name__)

_UNREADABLE = (OSError, TraceError, ValueError, KeyError, TypeError, AttributeError)


@dataclass(frozen=True)
class StoredTrace:
    """What is kept of a step."""

    trace: Trace
    notes: Sequence[str]
    """What was repeated and planned, a sentence each."""


class TraceStore:
    """The Traces of predictions."""

    def __init__(self, folder: Path) -> None:
        """`folder`: of the cache; it is made where it is missing."""
        self._folder = folder

    def key(
        self, model: nn.Module, config: RunConfig, cluster: Cluster, pricing: Mapping[str, bool]
    ) -> str | None:
        """32 hexadecimal digits; predictions with the same have the same Trace. None where there is no digest, which is
        logged. `pricing`: what else decides the Trace."""
        try:
            content = {
                "versions": versions(),
                "code": names(),
                "settings": [kernel_settings(), environment()],
                "context": described(current_step()),
                "model": described(model),
                "trained": [[name, one.requires_grad] for name, one in model.named_parameters()],
                "run": described(config),
                "cluster": described(cluster),
                "pricing": dict(pricing),
            }
        except NoDigest as why:
            log.info("the trace is not cached: %s", why)
            return None
        # Classes of the user's are asked what they are.
        except Exception as error:
            log.info("the trace is not cached: %s: %s", type(error).__name__, error, exc_info=True)
            return None
        text = json.dumps(content, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def find(self, key: str) -> StoredTrace | None:
        """The Trace of this key; None where the step is to be captured."""
        try:
            path = own(self._folder) / f"{key}.trace"
            data: dict[str, Any] = json.loads(read_bytes(open_regular(path, links=False), LARGEST))
            changed = [file for file, digest in data["sources"].items() if source_digest(file) != digest]
            if changed:
                log.info("the cached trace is of other code: %s has changed", changed[0])
                return None
            found = StoredTrace(load_trace(data["trace"]), tuple(map(str, data["notes"])))
            os.utime(path)
        except FileNotFoundError:
            return None
        except _UNREADABLE as error:
            log.info("the cached trace cannot be read and the step is captured anew: %s", error)
            return None
        return found

    def save(self, key: str, found: StoredTrace) -> None:
        """Keep a Trace; where that is not possible, it is logged, and nothing else happens."""
        try:
            data = {"sources": sources(), "notes": list(found.notes), "trace": dump_trace(found.trace)}
            content = json.dumps(data).encode()
            if len(content) > LARGEST:
                log.info("the trace is not cached: it takes %d bytes", len(content))
                return
            folder = own(self._folder)
            temporary = folder / f"{key}.{os.getpid()}.{time.monotonic_ns()}.new"
            try:
                temporary.write_bytes(content)
                os.replace(temporary, folder / f"{key}.trace")
            finally:
                temporary.unlink(missing_ok=True)
            tidy(folder)
        except (NoDigest, OSError) as error:
            log.info("the trace is not cached: %s", error)
