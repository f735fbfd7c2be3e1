"""Captures a model's forward and backward pass as one graph.

A host point between the two passes hands out the outputs of the forward pass and receives their gradients. A run of the
graph is suspended there, with everything that it holds, until autograd calls the backward pass. The graph uses every
parameter at that point and at its end, so that parameters are on the device whenever other code runs. The end also
marks them as written, since an optimizer may change them before the next step.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hyper_parallel.compat.dispatch import flatten, leaves_of, unflatten, without_autocast
from hyper_parallel.compat.fake_tensors import fake_mode, faked
from hyper_parallel.compat.fx_graph import fake_mode_with_symbols
from hyper_parallel.compat.hf_conversions import computed_once, taken_for_real
from hyper_parallel.compat.memory import is_movable
from hyper_parallel.errors import CaptureError
from hyper_parallel.graph import Kind, StepGraph, capture, host, is_cache, phase, rewritten
from hyper_parallel.graph.gradients import owned
from hyper_parallel.graph.guards import Question, Questions
from hyper_parallel.graph.host_nodes import HOST, HostPoint
from hyper_parallel.graph.ir import GivenTensor, module_state, state_tensors
from hyper_parallel.graph.memory_effects import reads, touched
from hyper_parallel.offloading.autograd.captured_inputs import (
    CallSignature,
    OutsideTensor,
    OutsideTensors,
    check_released,
    check_written,
    following,
)
from hyper_parallel.offloading.autograd.parallel_context import Around
from hyper_parallel.offloading.autograd.side_effects import (
    Change,
    Effect,
    Transaction,
    effects_of,
    same_changes,
)
from hyper_parallel.offloading.autograd.state_snapshot import Snapshot
from hyper_parallel.offloading.pass_pipeline import passes
from hyper_parallel.shard.saved_gathers import SavedItem, SavedKind
from hyper_parallel.strategy import Strategy

_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)


@dataclass(frozen=True)
class Output:
    """A tensor that the forward pass gives."""

    name: str
    """Of the field of the result that it is in; empty where the result is a tensor."""
    differentiable: bool
    through: bool
    """A gradient comes back for it."""
    kept: bool
    """It may be held until the backward pass is over."""
    dtype: torch.dtype


@dataclass(frozen=True)
class Passes:
    """Both passes of one kind of call."""

    step: StepGraph
    outputs: tuple[Output, ...]
    leaves: tuple[Any, ...]
    """Of the result; those that are tensors are in `outputs`, in order."""
    shape: Any
    """Of the result's tree."""
    questions: tuple[Question, ...]
    """What the forward pass asked of its inputs' values."""
    wanted: tuple[str, ...]
    """Inputs of the step that have a gradient, at least one; a spread model may keep what comes for a later call."""
    left: Mapping[SavedItem, str | None]
    """What the passes leave around them (`around`), and which output of the step it is; None for what was there."""
    outside: tuple[OutsideTensor, ...] = ()
    effects: tuple[Effect, ...] = ()
    """What the forward pass does to Python state, with the last of the outputs."""
    entries: Mapping[str, Hashable] | None = None
    """The Python state under which the passes were captured (`state_snapshot.Snapshot.entries`)."""

    def result(self, tensors: Sequence[Tensor], state: Snapshot) -> Any:
        """The model's result from these outputs; its side effects on Python state are done."""
        left = iter(tensors)
        found = unflatten([next(left) if leaf is _TENSOR else leaf for leaf in self.leaves], self.shape)
        for effect in self.effects:
            effect.replay(left, state)
        return found

    def outside_now(self, state: Snapshot) -> dict[str, Tensor] | None:
        """Tensors from outside by their names as inputs; None where one is of another kind than when captured."""
        now = {outside.name: outside.now(state) for outside in self.outside}
        there = {name: tensor for name, tensor in now.items() if tensor is not None}
        return there if len(there) == len(now) else None


_TENSOR = object()


def staying(state: Mapping[str, Tensor], inputs: Sequence[Tensor]) -> frozenset[str]:
    """Of a model's state, by name, what keeps its memory during a call: given up, it would be gone for others too, or
    could not be taken again (memory shared with other processes, or with NumPy)."""
    storages = {name: tensor.untyped_storage() for name, tensor in state.items()}
    owners: dict[int, int] = {x.untyped_storage().data_ptr(): 1 for x in inputs}
    for storage in storages.values():
        address = storage.data_ptr()
        owners[address] = owners.get(address, 0) + 1
    return frozenset(
        name
        for name, storage in storages.items()
        if owners[storage.data_ptr()] > 1 or storage.nbytes() != state[name].nbytes or not is_movable(storage)
    )


@dataclass(frozen=True)
class ModelCall:
    """A call of a model whose gradients are wanted."""

    model: nn.Module
    forward: Callable[..., Any]
    """The model's own forward method."""
    signature: CallSignature
    """Of a parallelized model, the first argument, also of `forward`, is the context that the call found."""
    state: Snapshot
    """The Python state that the call finds."""


@dataclass(frozen=True)
class PassSettings:
    """Settings that a model's passes are captured for."""

    through: Sequence[str] | None = None
    """The fields of the result that receive gradients; None to decide from the result."""
    keep: bool = False
    """The caller may hold the other fields until the backward pass is over."""
    around: Around | None = None
    """The context of a parallelized model."""


def capture_passes(call: ModelCall, settings: PassSettings) -> Passes:
    """Capture the forward and backward pass of a call. The Python state is afterwards what it was before.

    Guards are evaluated on the call's tensors. Raises CaptureError where the passes cannot be captured.
    """
    tensors: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
    try:
        passes = _capture_passes(call, settings, tensors)
    except BaseException:
        call.state.clear_caches()
        raise
    check_released(tensors, call.state)
    return passes


def _capture_passes(
    model_call: ModelCall, settings: PassSettings, made: weakref.WeakValueDictionary[int, Tensor]
) -> Passes:
    """As `capture_passes`. `made` is given all tensors of the capture."""
    model, call, state, around = model_call.model, model_call.signature, model_call.state, settings.around
    # Plans support data-dependent sizes only for the rows of experts.
    spread_experts = around is not None and bool(around.handle.plan.experts)
    mode = fake_mode_with_symbols() if spread_experts else fake_mode()
    questions = Questions(call.named)
    resident: dict[str, Kind] = dict.fromkeys(staying(state.state, call.tensors), "constant")
    outside = OutsideTensors(mode, questions, state, [*state.state.values(), *call.tensors])
    with faked(model, mode), following(model, state), mode:
        given = [_empty(tensor) for tensor in call.tensors]
        body = _Body(model_call, settings, given)
        inputs = {name: GivenTensor("input", tensor) for name, tensor in zip(call.names, given, strict=True)}
        fakes = [dict(module._buffers) for module in model.modules()]
        try:
            with taken_for_real(), computed_once(model) as again, body.undone():
                step = capture(
                    body,
                    {
                        **{
                            name: GivenTensor(resident.get(name, kind), x)
                            for name, (kind, x) in module_state(model).items()
                        },
                        **inputs,
                    },
                    model,
                    lambda: body.gradients,
                    questions=questions,
                    outside=outside.lift,
                    made=made,
                )
            wanted = body.wanted
            _check_left(model, fakes)
        finally:
            body.forget()
    check_written(step, state, call)
    _say_written(step)
    if around is not None:
        # Asked for now: the capture has made those that it was the first to need.
        step.groups = around.handle.axes.process_groups()
        step = around.rewritten(step, again)
    elif again:
        step = rewritten(step, passes(Strategy(), ordered=False, recompute=again))
    return Passes(
        step,
        tuple(body.outputs),
        tuple(body.leaves),
        body.shape,
        tuple(questions.asked),
        wanted,
        body.left,
        tuple(outside.found),
        tuple(body.effects),
        {path: token for path, token in state.entries.items() if path not in body.counted},
    )


def _empty(like: Tensor) -> Tensor:
    empty = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
    return empty.requires_grad_(like.requires_grad)


class _Body:
    """Both passes, on whatever tensors the model has."""

    def __init__(self, call: ModelCall, settings: PassSettings, given: Sequence[Tensor]) -> None:
        self._call, self._settings, self._given, self._state = call, settings, given, call.state
        named = state_tensors(call.model)
        named.update(zip(call.signature.names, given, strict=True))
        self._wanted = {tensor: name for name, tensor in named.items() if tensor.requires_grad}
        self._of: dict[Tensor, Tensor] = {}
        self._taken: set[int] = set()
        self.outputs: list[Output] = []
        self.leaves: list[Any] = []
        self.shape: Any = None
        self.left: dict[SavedItem, str | None] = {}
        self.effects: list[Effect] = []
        self._transaction: Transaction | None = None

    @contextlib.contextmanager
    def undone(self) -> Iterator[None]:
        """Afterwards Python state is what it was before."""
        self._transaction = Transaction(self._state)
        try:
            yield
        finally:
            self._transaction.undo()
            self._transaction = None

    @property
    def counted(self) -> set[str]:
        """Numbers that the forward pass counts and never reads: no guards."""
        return {effect.place.path for effect in self.effects if effect.mode == "add"}

    @property
    def gradients(self) -> Mapping[str, Tensor]:
        """By the names of the inputs that they are of."""
        return {self._wanted[tensor]: gradient for tensor, gradient in self._of.items()}

    @property
    def wanted(self) -> tuple[str, ...]:
        """The names of the inputs that have a gradient, and where all of them are kept for later the first."""
        return tuple(self.gradients) or tuple(self._wanted.values())[:1]

    def forget(self) -> None:
        self._of.clear()

    def __call__(self) -> Mapping[str, Tensor]:
        with torch.enable_grad():
            returned = self._call.signature.run(self._call.forward, self._given)
        assert self._transaction is not None
        changes = self._transaction.changes()
        self.effects, behind, places = effects_of(
            changes, self._state, {id(x): name for name, x in state_tensors(self._call.model).items()}
        )
        tensors = self._read(returned, behind, places)
        through = [tensor for tensor, output in zip(tensors, self.outputs, strict=True) if output.through]
        state = [tensor.detach() for tensor in state_tensors(self._call.model).values()]
        with torch.no_grad():
            shown = [tensor.detach() for tensor in tensors]
            answers = [
                host(
                    HostPoint.TURN if not at else HostPoint.GRADIENT,
                    [*shown, *state] if not at else [shown[0]],
                    x.numel(),
                    x.dtype,
                )
                for at, x in enumerate(through)
            ]
        self._taken.update(x.untyped_storage()._cdata for x in (*answers, *shown, *self._given, *state))
        hooks = [tensor.register_hook(self._owner(tensor)) for tensor in self._wanted]
        # In this thread, on any device: an engine's own thread would not know the phase.
        try:
            with phase("backward"), torch.autograd.set_multithreading_enabled(False), without_autocast():
                gradients = [x.view(like.shape) for x, like in zip(answers, through, strict=True)]
                torch.autograd.grad(through, list(self._wanted), gradients, allow_unused=True)
        finally:
            for hook in hooks:
                hook.remove()
        if not same_changes(changes, self._transaction.changes()):
            raise CaptureError(
                "the backward pass changes Python state (a hook on gradients or a checkpoint that keeps something), "
                f"which a graph of it would not do again: {_first_of(changes, self._transaction.changes())}; do it "
                "outside of the model's passes"
            )
        with torch.no_grad(), phase("backward"):
            host(HostPoint.END, state)
        named = {
            f"output.{at}": tensor
            for at, (tensor, output) in enumerate(zip(shown, self.outputs, strict=True))
            if output.kept
        }
        named.update({f"answer.{at}": tensor for at, tensor in enumerate(answers)})
        named.update({f"gradient.{name}": tensor for name, tensor in self.gradients.items()})
        named.update(self._leave())
        return named

    def _leave(self) -> Mapping[str, Tensor]:
        """What the passes leave around them, by the names of outputs."""
        named: dict[str, Tensor] = {}
        around = self._settings.around
        for what, tensor in (around.left() if around is not None else {}).items():
            if tensor is None:
                self.left[what] = None
                continue
            if tensor.untyped_storage()._cdata in self._taken:
                # A weight that is its parameter as it is: found there again.
                if what.kind == SavedKind.WEIGHT:
                    continue
                # A gradient that autograd gave to two parameters, and the other one's owner may write to it.
                with torch.no_grad(), phase("backward"):
                    tensor = tensor.clone()
            self.left[what] = f"left.{len(named)}"
            named[f"left.{len(named)}"] = tensor
        return named

    def _owner(self, tensor: Tensor) -> Callable[[Tensor | None], None]:
        def keep(gradient: Tensor | None) -> None:
            if gradient is None:  # kept for a later call
                return
            if gradient.layout != torch.strided:
                raise CaptureError(
                    f"the gradient of {self._wanted[tensor].partition('.')[2]} is sparse, which no plan has memory "
                    "for; make the embedding with sparse=False"
                )
            with torch.no_grad():
                self._of[tensor] = owned(gradient, tensor, self._taken)

        return keep

    def _read(self, returned: Any, behind: Sequence[Tensor], places: Sequence[str]) -> list[Tensor]:
        """The tensors of the result, and those left `behind` in Python state; what the result is made of is noted."""
        tensors: list[Tensor] = []
        names: list[str] = []
        leaves, self.shape = flatten(returned)
        for name, value in _fields(returned):
            for leaf in leaves_of(value):
                if isinstance(leaf, Tensor):
                    tensors.append(leaf)
                    names.append(name)
                elif not isinstance(leaf, _PLAIN):
                    raise CaptureError(_opaque(name, leaf))
        self.leaves = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        through = self._settings.through if self._settings.through is not None else _assumed(names, tensors)
        results = len(tensors)
        tensors += behind
        names += places
        self.outputs = [
            Output(
                name,
                x.requires_grad,
                x.requires_grad and name in through,
                self._settings.keep or at >= results or (x.requires_grad and name in through),
                x.dtype,
            )
            for at, (name, x) in enumerate(zip(names, tensors, strict=True))
        ]
        there = {output.name for output in self.outputs if output.through}
        if not there or not set(through) <= there:
            known = ", ".join(sorted({output.name for output in self.outputs if output.differentiable}))
            raise CaptureError(
                f"hp.offload expects gradients through {', '.join(through) or 'nothing'}; the results of this call "
                f"that have a gradient are: {known or 'nothing'}"
            )
        return tensors


def _fields(returned: Any) -> list[tuple[str, Any]]:
    """The result's parts by their names, in the order of its leaves."""
    if isinstance(returned, Mapping):
        return [(str(name), value) for name, value in returned.items()]
    if isinstance(returned, tuple | list):
        return [(str(at), value) for at, value in enumerate(returned)]
    return [("", returned)]


def _assumed(names: Sequence[str], tensors: Sequence[Tensor]) -> list[str]:
    """The fields through which gradients come back, where nobody says it: the loss, if there is one."""
    found = [name for name, tensor in zip(names, tensors, strict=True) if tensor.requires_grad]
    if "loss" in found:
        return ["loss"]
    numbers = [n for n, x in zip(names, tensors, strict=True) if x.requires_grad and not x.dim()]
    return numbers[:1] or list(dict.fromkeys(found))


def _opaque(name: str, leaf: Any) -> str:
    cache = "; pass use_cache=False" if name == "past_key_values" else ""
    return (
        f"the model returns{f' in {name!r}' if name else ''} a {type(leaf).__name__}, in which nobody can find "
        f"the tensors{cache}. What hp.offload runs returns tensors, numbers and strings, in tuples, lists, dicts and "
        "Transformers' outputs"
    )


def _first_of(changes: Sequence[Change], later: Sequence[Change]) -> str:
    known = [(id(change.place.container), change.place.key) for change in changes]
    new = (c for c in later if (id(c.place.container), c.place.key) not in known)
    return next(new, later[0] if later else changes[0]).place.path


def _check_left(model: nn.Module, fakes: Sequence[Mapping[str, Tensor | None]]) -> None:
    """Raises CaptureError for a buffer that the forward pass replaced."""
    for (name, module), before in zip(model.named_modules(), fakes, strict=True):
        changed = [key for key, value in module._buffers.items() if before.get(key) is not value]
        if changed:
            raise CaptureError(
                f"the forward pass of module {name!r} sets its buffer {changed[0]!r} to another tensor, which a graph "
                "of it would not do again; write into it (copy_)"
            )


def _say_written(step: StepGraph) -> None:
    """Mark what the user's code may write to between two steps as written at the end of each."""
    for node in step.nodes:
        if node.target is HOST and node.args[0] == HostPoint.END:
            node.meta["writes"] = frozenset(touched(node))


def late(step: StepGraph) -> frozenset[str]:
    """Inputs, and outputs (``output.0``), that the backward pass reads or moves, as the turn leaves them."""
    names: dict[int, str] = {}
    found: set[int] = set()
    for node in step.nodes:
        at_host = node.target is HOST
        if at_host and node.args[0] == HostPoint.TURN:
            shown: Any = node.args[1]
            names = {source.meta["value"].storage: f"output.{at}" for at, source in enumerate(shown)}
        elif names and not at_host:
            # What is moved may come back from a copy that was made before the turn.
            found |= touched(node) if is_cache(node) else reads(node)
    names |= {storage: entry.name for storage, entry in step.outside.items()}
    return frozenset(names[storage] for storage in found if storage in names)


def exact(step: StepGraph) -> frozenset[str]:
    """Inputs whose earlier contents the backward pass uses: a copy that was made in the forward pass comes back, or
    what was computed from them is computed again."""
    found: set[int] = set()
    behind = False
    for node in step.nodes:
        if node.target is HOST:
            behind = behind or node.args[0] == HostPoint.TURN
        elif behind and is_cache(node):
            found |= touched(node)
        elif behind and node.meta["recomputed"]:
            found |= reads(node)
    return frozenset(entry.name for storage, entry in step.outside.items() if storage in found)
