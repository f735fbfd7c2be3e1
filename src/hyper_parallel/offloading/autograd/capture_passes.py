"""Captures a model's forward and backward pass as one graph.

A host point between the two passes hands out the outputs of the forward pass and receives their gradients. A run of the
graph is suspended there, with everything that it holds, until autograd calls the backward pass. The graph uses every
parameter at that point and at its end, so that parameters are on the device whenever other code runs. The end also
marks them as written, since an optimizer may change them before the next step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hyper_parallel.compat.dispatch import without_autocast
from hyper_parallel.compat.fake_process_group import fake_mode, faked, is_fake
from hyper_parallel.compat.fake_world import computed_once, taken_for_real
from hyper_parallel.compat.pytree import flatten, leaves_of, unflatten
from hyper_parallel.compat.symbolic_sizes import fake_mode_with_symbols
from hyper_parallel.errors import CaptureError
from hyper_parallel.graph import Kind, StepGraph, capture, host, is_cache, phase, rewritten
from hyper_parallel.graph.gradient_layout import owned
from hyper_parallel.graph.guards import Question, Questions
from hyper_parallel.graph.ir import GivenTensor
from hyper_parallel.graph.memory_effects import reads, touched
from hyper_parallel.graph.module_state import module_state
from hyper_parallel.graph.suspension import HOST, HostPoint
from hyper_parallel.offloading.autograd.call_signature import CallSignature
from hyper_parallel.offloading.autograd.parallel_context import Around
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

    def result(self, tensors: Sequence[Tensor]) -> Any:
        """What the model returns, of these outputs."""
        left = iter(tensors)
        return unflatten([next(left) if leaf is _TENSOR else leaf for leaf in self.leaves], self.shape)


_TENSOR = object()


def lodgers(model: nn.Module) -> frozenset[str]:
    """Of `module_state`, what lies in memory that is not its own alone: given up, it would be gone for others too."""
    state = {name: tensor for name, (_, tensor) in module_state(model).items()}
    owners = Counter(tensor.untyped_storage().data_ptr() for tensor in state.values())
    return frozenset(
        name
        for name, tensor in state.items()
        if owners[tensor.untyped_storage().data_ptr()] > 1
        or tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()
    )


def capture_passes(
    model: nn.Module,
    forward: Callable[..., Any],
    call: CallSignature,
    through: Sequence[str] | None,
    keep: bool = True,
    around: Around | None = None,
) -> Passes:
    """Capture the forward and backward pass of one call of `model`, whose forward method is `forward`.

    `around`: the context of a parallelized model; the first argument of `call`, and of `forward`, is then the context
    that the call found. `through`: the fields of the result that receive gradients; None to decide from the result.
    `keep`: the caller may hold the other fields until the backward pass is over. Guards are evaluated on the call's
    tensors. Raises CaptureError where the passes cannot be captured.
    """
    # Plans support data-dependent sizes only for the rows of experts.
    spread_experts = around is not None and bool(around.handle.plan.experts)
    mode = fake_mode_with_symbols() if spread_experts else fake_mode()
    questions = Questions(call.named)
    staying: dict[str, Kind] = dict.fromkeys(lodgers(model), "constant")
    with faked(model, mode), mode:
        given = [_empty(tensor) for tensor in call.tensors]
        body = _Body(model, forward, call, given, through, keep, around)
        inputs = {name: GivenTensor("input", tensor) for name, tensor in zip(call.names, given, strict=True)}
        fakes = [dict(module._buffers) for module in model.modules()]
        try:
            with taken_for_real(), computed_once(model) as again:
                step = capture(
                    body,
                    {
                        **{
                            name: GivenTensor(staying.get(name, kind), x)
                            for name, (kind, x) in module_state(model).items()
                        },
                        **inputs,
                    },
                    model,
                    lambda: body.gradients,
                    questions=questions,
                )
            wanted = body.wanted
            _check_left(model, fakes)
        finally:
            body.forget()
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
    )


def _empty(like: Tensor) -> Tensor:
    made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
    return made.requires_grad_(like.requires_grad)


class _Body:
    """Both passes, on whatever tensors the model has."""

    def __init__(
        self,
        model: nn.Module,
        forward: Callable[..., Any],
        call: CallSignature,
        given: Sequence[Tensor],
        through: Sequence[str] | None,
        keep: bool,
        around: Around | None,
    ) -> None:
        self._around = around
        self._model, self._forward, self._call, self._given = model, forward, call, given
        self._through, self._keep = through, keep
        named = {**{name: tensor for name, (_, tensor) in module_state(model).items()}}
        named.update(zip(call.names, given, strict=True))
        self._wanted = {tensor: name for name, tensor in named.items() if tensor.requires_grad}
        self._of: dict[Tensor, Tensor] = {}
        self._taken: set[int] = set()
        self.outputs: list[Output] = []
        self.leaves: list[Any] = []
        self.shape: Any = None
        self.left: dict[SavedItem, str | None] = {}

    @property
    def gradients(self) -> Mapping[str, Tensor]:
        """By the names of the inputs that they are of."""
        return {self._wanted[tensor]: gradient for tensor, gradient in self._of.items()}

    @property
    def wanted(self) -> tuple[str, ...]:
        """The names of the inputs that have a gradient, and where all of them are kept for later the first."""
        return tuple(self.gradients) or tuple(self._wanted.values())[:1]

    def forget(self) -> None:
        """Let go of the gradients."""
        self._of.clear()

    def __call__(self) -> Mapping[str, Tensor]:
        with torch.enable_grad():
            returned = self._call.run(self._forward, self._given)
        tensors = self._read(returned)
        through = [tensor for tensor, output in zip(tensors, self.outputs, strict=True) if output.through]
        state = [tensor.detach() for _, tensor in module_state(self._model).values()]
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
        for what, tensor in (self._around.left() if self._around is not None else {}).items():
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
            with torch.no_grad():
                self._of[tensor] = owned(gradient, tensor, self._taken)

        return keep

    def _read(self, returned: Any) -> list[Tensor]:
        """The tensors of the result; what it is made of is noted."""
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
        through = self._through if self._through is not None else _assumed(names, tensors)
        self.outputs = [
            Output(
                name,
                x.requires_grad,
                x.requires_grad and name in through,
                self._keep or (x.requires_grad and name in through),
                x.dtype,
            )
            for name, x in zip(names, tensors, strict=True)
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


def _check_left(model: nn.Module, fakes: Sequence[Mapping[str, Tensor | None]]) -> None:
    """Nothing of the capture stays behind in the model."""
    for (name, module), before in zip(model.named_modules(), fakes, strict=True):
        changed = [key for key, value in module._buffers.items() if before.get(key) is not value]
        changed += [
            key for key, value in vars(module).items() if isinstance(value, Tensor) and is_fake(value)
        ]
        if changed:
            for key in changed:
                if key not in before:
                    delattr(module, key)
            raise CaptureError(
                f"the forward pass of module {name!r} sets its {changed[0]!r} to another tensor, which a graph of it "
                "would not do again; make it a buffer and write into it (copy_)"
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
