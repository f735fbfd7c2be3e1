"""Context of a parallelized model's passes, and errors of one rank that become errors of all.

A forward pass of a parallelized model reads a context: the requested loss (`causal_lm_loss`), the step and rows of its
random numbers, the documents of the rows, and what earlier micro-batches of the step saved. These are further
arguments of the captured graph. What the pass writes to the context (weights and gradients for later micro-batches,
each expert's load) are further results, which are stored in the context after the backward pass.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, fx

from hyper_parallel.errors import BudgetError, CaptureError, FollowsError
from hyper_parallel.graph import StepGraph, is_collective, rewritten
from hyper_parallel.graph.step_context import Draw, current_step
from hyper_parallel.offloading.expert_overflow import load_shown
from hyper_parallel.offloading.pass_pipeline import passes
from hyper_parallel.overlap.collective_order import DIGEST, described
from hyper_parallel.shard import ShardedModel
from hyper_parallel.shard.forward import known_positions, positions_known
from hyper_parallel.shard.loss.causal_lm import Request, root_of
from hyper_parallel.shard.memory import in_place, recomputed_modules
from hyper_parallel.shard.model_structure import is_own
from hyper_parallel.shard.saved_gathers import SavedGathers, SavedItem, SavedKind
from hyper_parallel.units import format_bytes


@dataclass(frozen=True)
class _Items:
    """Names of what is kept, in order: one leaf of a call, however they look."""

    names: tuple[SavedItem, ...]


class Around:
    """The surroundings of one spread model."""

    def __init__(self, handle: ShardedModel) -> None:
        self.handle = handle
        self.own = is_own(handle.model)
        """Its code is the user's, so that weights are gathered when it is called."""
        self._root = root_of(handle.model)
        self._given: Mapping[SavedItem, Tensor] = {}
        self._kept: SavedGathers | None = None
        self._counts: dict[str, Tensor] = {}

    def given(self) -> dict[str, Any]:
        """What a call made now would find, as a tree of tensors and of what is hashable: an argument of the call."""
        return {
            "loss": self._loss(),
            "draw": _draw(),
            "positions": known_positions(),
            # The graph follows it by itself; to calls it says which are of one kind.
            "documents": current_step().documents,
            "kept": self._what_is_kept(),
        }

    def _loss(self) -> Any:
        request = self._root.request if self._root is not None else None
        if request is None:
            return None
        tokens = request.tokens
        # A Python number is a part of the call's key: each new value would need a new plan.
        tokens = tokens if isinstance(tokens, Tensor) else torch.tensor(tokens, dtype=torch.float32)
        return request.labels, tokens, request.options, request.micro_batches

    def _what_is_kept(self) -> Any:
        gathers = current_step().gathers
        if gathers is None:
            return None
        contents = gathers.contents
        return gathers.position, _Items(tuple(contents)), list(contents.values())

    # While a call is captured.

    @contextlib.contextmanager
    def within(self, given: Mapping[str, Any]) -> Iterator[None]:
        """Inside, a forward pass of the model finds what `given` says, of other tensors; `left` says what it left."""
        routing = self.handle.routing
        context = replace(current_step(), recompute_in_graph=True)
        if self.handle.plan.experts:
            context = replace(context, report_load=load_shown(self.handle))
        if given["draw"] is not None:
            context = replace(context, draw=Draw(*given["draw"]))
        self._given, self._kept = {}, None
        if context.gathers is not None:
            _, items, tensors = given["kept"]
            self._given = dict(zip(items.names, tensors, strict=True))
            self._kept = context.gathers.holding(self._given)
            context = replace(context, gathers=self._kept)
        with contextlib.ExitStack() as stack:
            stack.enter_context(context.installed())
            stack.enter_context(positions_known(given["positions"]))
            if given["loss"] is not None:
                assert self._root is not None
                stack.enter_context(self._root.requested(Request(*given["loss"])))
            before = {} if routing is None else routing.counts
            if routing is not None:
                routing.counts = {}
            try:
                yield
            finally:
                if routing is not None:
                    self._counts, routing.counts = routing.counts, before
                if self.handle.balancing is not None:
                    self.handle.balancing.logits.clear()

    def left(self) -> dict[SavedItem, Tensor | None]:
        """What both passes of the captured call leave around them, by what it is; None for what they were given."""
        found: dict[SavedItem, Tensor | None] = {
            SavedItem(SavedKind.COUNT, name): x for name, x in self._counts.items()
        }
        if self._kept is not None:
            for item, tensor in self._kept.contents.items():
                found[item] = None if self._given.get(item) is tensor else tensor
        self._given, self._kept, self._counts = {}, None, {}
        return found

    def rewritten(self, step: StepGraph, again: list[str]) -> StepGraph:
        """The captured passes as the strategy wants them: layers computed again (those named, or those of
        `memory.recompute`), and weights gathered again."""
        strategy = self.handle.strategy
        step = in_place(step, self.handle)
        again = recomputed_modules(self.handle.model, strategy) or again
        return rewritten(step, passes(strategy, ordered=False, recompute=again))

    # When a call has run.

    def leave(self, left: Mapping[SavedItem, Tensor | None]) -> None:
        """Put what a run of both passes left in its places: of `left`, None is what was there before."""
        gathers, routing = self.handle.gathers, self.handle.routing
        before, contents = gathers.contents, {}
        for what, tensor in left.items():
            if what.kind == SavedKind.COUNT:
                assert routing is not None
                assert tensor is not None
                name = str(what.owner)
                routing.counts[name] = routing.counts[name] + tensor if name in routing.counts else tensor
            else:
                contents[what] = before[what] if tensor is None else tensor
        gathers.replace(contents)


def _draw() -> Any:
    draw = current_step().draw
    if draw is None:
        return None
    step = draw.step if isinstance(draw.step, Tensor) else torch.tensor(draw.step, dtype=torch.int64)
    if step.device != draw.rows.device:
        step = step.to(draw.rows.device)
    return draw.seed, step, draw.rows


T = TypeVar("T")


def agreed(
    handle: ShardedModel | None,
    make: Callable[[], T],
    digest: Callable[[T], bytes] = lambda result: bytes(DIGEST),
) -> T:
    """Return what `make` returns on this rank, once it has succeeded on every rank.

    Every rank calls it; it all-reduces a few numbers. `make` itself must not communicate. `handle` None is a model on
    one device, without communication. `digest`: of what is made, `DIGEST` bytes that are the same on every rank. Raises
    what `make` raises; a BudgetError then has the least budget that is enough for every rank. Raises FollowsError where
    `make` raised on other ranks only, and CaptureError where digests differ.
    """
    if handle is None or handle.mesh.world == 1:
        return make()
    result, error, own = [], None, bytes(DIGEST)
    try:
        result.append(make())
        own = digest(result[0])
    # The other ranks learn of any error before it is raised here.
    except Exception as raised:
        error = raised
    floor = error.floor if isinstance(error, BudgetError) else None
    numbers = [int(error is not None), floor or 0, *own, *(-byte for byte in own)]
    maxima = torch.tensor(numbers, dtype=torch.int64, device=handle.device)
    failed, most, *digests = handle.all_reduce(maxima, handle.mesh.names, "max").tolist()
    if error is not None:
        if isinstance(error, BudgetError) and floor is not None and most > floor:
            raise BudgetError(
                f"{error}; another worker needs more: {format_bytes(most)}", error.why, most
            ) from error
        raise error
    if failed:
        raise FollowsError(
            "hp.offload: the passes of the model have no plan on another worker, whose log says why, and none of the "
            "workers runs them"
        )
    if digests[:DIGEST] != [-byte for byte in digests[DIGEST:]]:
        raise CaptureError(
            f"hp.offload: the code of {type(handle.model).__name__} computes with other weights, or writes or returns "
            "something else, on some workers than on others, so that their graphs would exchange different tensors; "
            "have every worker run the same code, or train it without hp.offload and lowering='traceable'"
        )
    return result[0]


def program_digest(step: StepGraph) -> bytes:
    """A digest of what has to be the same on every rank: the collectives, in order, and what the step gives."""
    text = hashlib.blake2b(digest_size=DIGEST)
    names = dict(zip(step.placeholders, (entry.name for entry in step.inputs), strict=True))
    returned: Any = step.output.args[0]
    names |= zip(returned, step.outputs, strict=True)
    for node in step.nodes:
        if is_collective(node):
            text.update(f"{_whose(node, names)} {described(step, node)}\n".encode())
    text.update(" ".join(step.outputs).encode())
    return text.digest()


def _whose(node: fx.Node, names: Mapping[fx.Node, str]) -> str:
    """The name of the input that a collective gathers, or of the output that it reduces, where it is only one."""
    source = user = node
    while len(source.all_input_nodes) == 1:
        (source,) = source.all_input_nodes
    while user not in names and len(user.users) == 1:
        (user,) = user.users
    return names.get(source) or names.get(user, "")
