"""A callable run once on fake tensors, and every operator that it dispatches written down.

The recorder stands below autograd, where `loss.backward()` is operators like any others, and above the fake tensors,
which give each result its shape and storage. It needs no values and allocates nothing. It is told the tensors that
come from outside; one that it meets and was not told of is an error, and a real tensor is a constant.

Which module a node belongs to: in the forward pass the innermost module whose forward runs. A node of the backward pass
runs under an autograd node, which bears the number that its operator of the forward pass had; the recorder knows which
module was running when that number was given.
"""

from __future__ import annotations

import bisect
import contextlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from hyper_parallel.compat.dispatch import next_sequence, running_backward, written
from hyper_parallel.compat.fake import is_fake
from hyper_parallel.errors import CaptureError
from hyper_parallel.graph.nouns import Input, Kind, StepGraph, Storage, Value
from hyper_parallel.graph.phase import current_phase
from hyper_parallel.graph.sizes import Sizes
from hyper_parallel.graph.trim import trim

_ATTRIBUTE = "_hyper_parallel_node"
_QUESTIONS = frozenset(
    {
        torch.ops.aten.is_contiguous.default,
        torch.ops.aten.sym_size.default,
        torch.ops.aten.sym_stride.default,
        torch.ops.aten.sym_numel.default,
        torch.ops.aten.sym_storage_offset.default,
        torch.ops.aten.is_pinned.default,
    }
)
"""What is asked of a fake tensor and computes nothing."""


def capture(
    step: Callable[[], Mapping[str, torch.Tensor]],
    tensors: Mapping[str, tuple[Kind, torch.Tensor]],
    modules: nn.Module | None = None,
    gradients: Callable[[], Mapping[str, torch.Tensor]] | None = None,
    groups: Mapping[str, tuple[str, tuple[int, ...]]] | None = None,
) -> StepGraph:
    """What `step` computes, as a graph. To be called inside the fake mode that its tensors belong to.

    `tensors`: every tensor that the step reads from outside, by name and kind; `step` finds them where it expects
    them, in modules for example. What it returns are the outputs. `modules`: the model whose modules' names the nodes
    are given. `gradients`: called after the step, the gradient of each parameter by its name. `groups`: the axis and
    the ranks of each process group, by its name, so that collectives can be asked for them (`groups.group_of`).

    Raises CaptureError when the step reads a tensor that it was not told of, or cannot be followed.
    """
    recorder = _Recorder()
    for name, (kind, tensor) in tensors.items():
        recorder.give(name, kind, tensor)
    with recorder.following(modules), recorder:
        returned = dict(step())
    found = recorder.finished(returned, dict(gradients()) if gradients is not None else {})
    found.groups = dict(groups or {})
    return found


class _Recorder(TorchDispatchMode):
    """Writes down what is dispatched inside it."""

    def __init__(self) -> None:
        super().__init__()
        self._graph = fx.Graph()
        self._sizes = Sizes(self._graph)
        self._inputs: list[Input] = []
        self._storages: list[Storage] = []
        self._by_address: dict[int, int] = {}
        self._alive: list[Any] = []
        """Storages, kept so that no address is used again."""
        self._given: dict[int, tuple[torch.Tensor, fx.Node]] = {}
        self._constants: dict[str, torch.Tensor] = {}
        self._modules: list[str] = []
        self._sequences: list[int] = []
        self._at_sequence: list[str] = []

    # What is told before.

    def give(self, name: str, kind: Kind, tensor: torch.Tensor) -> None:
        """A tensor from outside."""
        node = self._graph.placeholder(f"in_{len(self._inputs)}")
        self._inputs.append(Input(name, kind))
        value = self._value(tensor, name)
        node.meta.update(value=value, phase="forward", module="", reads=(), writes=(), recomputed=False)
        self._given[value.storage] = (tensor, node)
        self._tell(tensor, node)

    @contextlib.contextmanager
    def following(self, model: nn.Module | None) -> Iterator[None]:
        """Know which of the model's modules is running."""
        names = {module: name for name, module in model.named_modules()} if model is not None else {}

        def enter(module: nn.Module, _: Any) -> None:
            if module in names:
                self._modules.append(names[module])
                self._mark()

        def leave(module: nn.Module, *_: Any) -> None:
            if module in names:
                self._modules.pop()
                self._mark()

        self._mark()
        hooks = [
            nn.modules.module.register_module_forward_pre_hook(enter),
            nn.modules.module.register_module_forward_hook(leave, always_call=True),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _mark(self) -> None:
        self._sequences.append(next_sequence())
        self._at_sequence.append(self._modules[-1] if self._modules else "")

    # What is seen.

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim" or func in _QUESTIONS:
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        if func is torch.ops._c10d_functional.wait_tensor.default:
            # What was waited for is the same memory; the fake kernel says that it is new.
            result = args[0]
        if func is torch.ops.aten.detach.default:
            self._tell(result, self._node_of(args[0], func))
            return result
        reads: set[int] = set()
        node = self._graph.call_function(
            func,
            tuple(self._argument(arg, func, reads) for arg in args),
            {key: self._argument(arg, func, reads) for key, arg in kwargs.items()},
        )
        writes = {self._storage(tensor) for tensor in written(func, args, kwargs)}
        node.meta.update(self._where(), reads=tuple(sorted(reads)), writes=tuple(sorted(writes)))
        node.meta["value"] = self._results(result, node)
        return result

    def _where(self) -> dict[str, Any]:
        backward = running_backward()
        module = self._modules[-1] if self._modules else ""
        recomputed = backward is not None and bool(self._modules)
        if backward is not None and not self._modules:
            at = bisect.bisect_right(self._sequences, backward) - 1
            module = self._at_sequence[at] if at >= 0 and backward < next_sequence() else ""
        return {"phase": current_phase(), "module": module, "recomputed": recomputed}

    def _argument(self, arg: Any, func: Any, reads: set[int]) -> Any:
        def convert(x: Any) -> Any:
            if isinstance(x, torch.Tensor):
                node = self._node_of(x, func)
                if is_fake(x):
                    reads.add(self._storage(x))
                return node
            if isinstance(x, torch.SymInt):
                return self._sizes.argument(x)
            if isinstance(x, torch.SymFloat | torch.SymBool):
                raise CaptureError(f"{func} is given {x}, a number that depends on the data and is no size")
            return x

        return tree_map(convert, arg)

    def _results(self, result: Any, node: fx.Node) -> Any:
        if isinstance(result, torch.Tensor):
            self._tell(result, node)
            self._sizes.bind_value(result, node)
            return self._value(result)
        if isinstance(result, torch.SymInt):
            self._sizes.bind(result, node)
            return None
        if isinstance(result, tuple | list):
            made: list[Value | None] = []
            for index, part in enumerate(result):
                if not isinstance(part, torch.Tensor):
                    made.append(None)
                    continue
                item = self._graph.call_function(operator.getitem, (node, index))
                item.meta.update(node.meta, reads=(), writes=(), value=self._value(part))
                self._tell(part, item)
                self._sizes.bind_value(part, item)
                made.append(item.meta["value"])
            return tuple(made)
        return None

    def _tell(self, tensor: torch.Tensor, node: fx.Node) -> None:
        tensor.__dict__[_ATTRIBUTE] = (self, node)

    def _node_of(self, tensor: torch.Tensor, func: Any) -> fx.Node:
        recorder, node = tensor.__dict__.get(_ATTRIBUTE, (None, None))
        if recorder is self:
            assert isinstance(node, fx.Node)
            return node
        given = self._given.get(self._by_address.get(tensor.untyped_storage()._cdata, -1))
        if given is not None and _lies_like(tensor, given[0]):
            # The same memory under another name: an optimizer's own view of a parameter.
            self._tell(tensor, given[1])
            return given[1]
        if is_fake(tensor):
            raise CaptureError(
                f"{func} reads a tensor of {tuple(tensor.shape)} that comes from outside of the step and is none of "
                "its inputs; register it as a buffer of its module, or compute it in the forward pass"
            )
        name = f"constant_{len(self._constants)}"
        self._constants[name] = tensor.detach().clone()
        made = self._graph.create_node("get_attr", name)
        made.meta.update(self._where(), reads=(), writes=(), value=self._value(tensor, name))
        self._tell(tensor, made)
        return made

    def _storage(self, tensor: torch.Tensor, name: str | None = None) -> int:
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address not in self._by_address:
            self._alive.append(storage)
            index = self._by_address[address] = len(self._storages)
            self._storages.append(Storage(index, storage.nbytes(), tensor.device, name))
        return self._by_address[address]

    def _value(self, tensor: torch.Tensor, name: str | None = None) -> Value:
        return Value(
            tuple(tensor.shape),
            tuple(tensor.stride()),
            tensor.dtype,
            tensor.device,
            self._storage(tensor, name),
        )

    # What comes of it.

    def finished(
        self, returned: Mapping[str, torch.Tensor], gradients: Mapping[str, torch.Tensor]
    ) -> StepGraph:
        """The graph, without what nobody uses."""
        output = self._graph.output(
            tuple(self._node_of(tensor, f"the output {name!r}") for name, tensor in returned.items())
        )
        output.meta.update(self._where(), reads=(), writes=())
        step = StepGraph(
            self._graph,
            self._inputs,
            list(returned),
            self._storages,
            self._constants,
            {self._storage(gradient): name for name, gradient in gradients.items()},
            {symbol: node for symbol, node in self._sizes.nodes.items() if symbol.is_Symbol},
        )
        return trim(step)


def _lies_like(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one storage are the same elements in the same order."""
    return (
        tensor.shape == other.shape
        and tensor.stride() == other.stride()
        and tensor.storage_offset() == other.storage_offset()
        and tensor.dtype == other.dtype
    )
