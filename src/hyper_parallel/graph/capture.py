"""Capture: runs a callable on fake tensors and records every dispatched operator as a graph.

The recorder stands below autograd, where `loss.backward()` is operators like any others, and above the fake tensors,
which give each result its shape and storage. It needs no values and allocates nothing. The caller declares the tensors
that come from outside; another one that it meets is an error. What `torch.tensor` makes is a constant.

Which module a node belongs to: in the forward pass the innermost module whose forward runs. A node of the backward pass
runs under an autograd node, which bears the number that its operator of the forward pass had; the recorder knows which
module was running when that number was given.
"""

from __future__ import annotations

import bisect
import contextlib
import operator
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from hyper_parallel.compat.dispatch import (
    TorchDispatchMode,
    mapped,
    next_sequence,
    outside_modes,
    running_backward,
)
from hyper_parallel.compat.fake_tensors import fake_kernel, is_fake
from hyper_parallel.compat.fx_graph import expression, is_symbolic
from hyper_parallel.errors import CaptureError, HyperParallelError
from hyper_parallel.graph.capture_errors import explained
from hyper_parallel.graph.capture_overrides import followed, padded_values
from hyper_parallel.graph.dynamic_sizes import Sizes
from hyper_parallel.graph.guards import Questions
from hyper_parallel.graph.ir import CollectiveGroup, GivenTensor, Input, Kind, StepGraph, Storage, Value
from hyper_parallel.graph.memory_effects import trim
from hyper_parallel.graph.step_context import Region, current_step, layer_finder, layer_of, locate

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
"""Calls that read a property of a fake tensor and compute nothing."""
Outside = Callable[[torch.Tensor], tuple[str, torch.Tensor]]
"""A real tensor that the step read and was not told of, to its name as an input and a fake one in its place."""
_LIFT = torch.ops.aten.lift_fresh.default
_VALUE = torch.ops.aten._local_scalar_dense.default
_SHOWN = frozenset(
    {torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.__repr__, torch.Tensor.__format__}
)
"""What takes values out of a tensor without an operator."""


def capture(
    step: Callable[[], Mapping[str, torch.Tensor]],
    tensors: Mapping[str, GivenTensor],
    modules: nn.Module | None = None,
    gradients: Callable[[], Mapping[str, torch.Tensor]] | None = None,
    groups: Mapping[str, CollectiveGroup] | None = None,
    questions: Questions | None = None,
    outside: Outside | None = None,
    made: MutableMapping[int, torch.Tensor] | None = None,
) -> StepGraph:
    """Capture `step` as a graph. To be called inside the fake mode that its tensors belong to.

    `tensors`: every tensor that the step reads from outside, by name and kind; `step` finds them where it expects
    them, in modules for example. What it returns are the outputs. `modules`: the model whose modules' names the nodes
    are given. `gradients`: called after the step, the gradient of each parameter by its name. `groups`: the process
    groups by name, so that collectives can be asked for their axis and ranks (`collective_groups.group_of`).
    `questions`: answers what the step asks of its inputs' values; when left out, only questions that no input decides
    are answered. `outside`: makes an input, of the kind `constant`, of a real tensor that the step meets and was not
    told of; when left out, such a tensor is an error. `made`: is given each tensor of the capture, by its address.

    Raises CaptureError, which names the line and the operator, when the step reads a tensor that it was not told of, or
    cannot be followed; and whatever of our own errors the step raises.
    """
    recorder = _Recorder(modules, questions, outside, made)
    for name, (kind, tensor) in tensors.items():
        recorder.give(name, kind, tensor)
    device = next((tensor.device for _, tensor in tensors.values()), torch.device("cpu"))
    try:
        context = replace(current_step(), even_sizes=recorder.sizes.even)
        fused = padded_values() if context.pads_values else contextlib.nullcontext()
        shown = _NothingShown(questions is not None)
        with recorder.following(), context.installed(), followed(device), recorder, shown, fused:
            returned = dict(step())
    except CaptureError as error:
        raise recorder.explained(error) from error
    except HyperParallelError:
        raise
    except Exception as error:
        # Whatever it is: a step that fails for another reason fails when it runs eagerly, too.
        raise recorder.explained(error) from error
    found = recorder.finished(returned, dict(gradients()) if gradients is not None else {})
    found.groups = dict(groups or {})
    recorder.forget()
    return found


class _NothingShown(TorchFunctionMode):
    """Refuses to show the values of tensors: a graph would not show them again. Numbers in the text of an error or a
    warning are shown where questions of them are answered (`answers`), which are asked again for other inputs."""

    def __init__(self, answers: bool) -> None:
        super().__init__()
        self._answers = answers

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.__format__ and self._answers and not args[0].dim():
            answer = args[0].item()
            # Without an answer it is a symbol, whose name would stand in the text.
            if isinstance(answer, bool | int | float):
                return format(answer, *args[1:])
        if func in _SHOWN:
            raise CaptureError(
                f"Tensor.{func.__name__} shows a tensor's values, which are not there before the step runs; "
                "leave it out of the step"
            )
        return func(*args, **(kwargs or {}))


class _Recorder(TorchDispatchMode):
    """Writes down what is dispatched inside it."""

    def __init__(
        self,
        model: nn.Module | None,
        questions: Questions | None = None,
        outside: Outside | None = None,
        made: MutableMapping[int, torch.Tensor] | None = None,
    ) -> None:
        super().__init__()
        self._outside, self._made = outside, made
        self._lifted: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Real tensors from outside with the fake ones in their places, by the real ones' addresses."""
        self._questions = questions or Questions({})
        self._asks_sizes = questions is not None
        self._names = {module: name for name, module in model.named_modules()} if model is not None else {}
        self._layer_named = layer_finder(self._names.values())
        self._last: Any = None
        """The operator that was dispatched last."""
        self._graph = fx.Graph()
        self.sizes = Sizes(self._graph)
        self._inputs: list[Input] = []
        self._last_input: fx.Node | None = None
        self._storages: list[Storage] = []
        self._by_address: dict[int, int] = {}
        self._alive: list[Any] = []
        """Storages, kept so that no address is used again."""
        self._given: dict[int, tuple[torch.Tensor, fx.Node]] = {}
        self._constants: dict[str, torch.Tensor] = {}
        self._modules: list[str] = []
        self._sequences: list[int] = []
        self._at_sequence: list[str] = []

    # Inputs that the caller declares before.

    def give(self, name: str, kind: Kind, tensor: torch.Tensor) -> None:
        """A tensor from outside."""
        before = self._last_input
        with self._graph.inserting_after(before) if before is not None else contextlib.nullcontext():
            node = self._last_input = self._graph.placeholder(f"in_{len(self._inputs)}")
        self._inputs.append(Input(name, kind))
        value = self._value(tensor, name)
        region = Region(self._layer_named(name), None, "forward")
        node.meta.update(value=value, region=region, module="", recomputed=False)
        self._given[value.storage] = (tensor, node)
        self._tell(tensor, node)

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """Know which of the model's modules is running."""
        names = self._names

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
        self._last = func
        if func is _LIFT and not is_fake(args[0]):
            return self._constant(args[0])
        if self._outside is not None and _has_real(args, kwargs):
            args, kwargs = mapped(self._fake, (args, kwargs))
        if func is _VALUE:
            asked = self._node_of(args[0], func)
            answer = self._questions.ask(asked, self._graph, self._inputs, self._storages, self._constants)
            if answer is not None:
                return answer
        nodes = tuple(self._argument(arg, func) for arg in args)
        named = {key: self._argument(arg, func) for key, arg in kwargs.items()}
        result = (fake_kernel(func) or func)(*args, **kwargs)
        if func is torch.ops._c10d_functional.wait_tensor.default:
            # What was waited for is the same memory; the fake kernel says that it is new.
            result = args[0]
        if func is torch.ops.aten.detach.default:
            self._tell(result, nodes[0])
            return result
        node = self._graph.call_function(func, nodes, named)
        node.meta.update(self._where())
        node.meta["value"] = self._results(result, node)
        if isinstance(result, torch.Tensor):
            return self._sized(result, node)
        if isinstance(result, tuple) and any(isinstance(part, torch.Tensor) for part in result):
            return tuple(
                self._sized(part, part.__dict__[_ATTRIBUTE][1]) if isinstance(part, torch.Tensor) else part
                for part in result
            )
        return result

    def _fake(self, leaf: Any) -> Any:
        """A fake tensor, an input from now on, for a real one."""
        if not isinstance(leaf, torch.Tensor) or is_fake(leaf):
            return leaf
        if id(leaf) not in self._lifted:
            assert self._outside is not None
            name, fake = self._outside(leaf)
            self._lifted[id(leaf)] = leaf, fake
            if _ATTRIBUTE not in fake.__dict__ or fake.__dict__[_ATTRIBUTE][0] is not self:
                self.give(name, "constant", fake)
        return self._lifted[id(leaf)][1]

    def forget(self) -> None:
        """Let go of all tensors, so that those that are still there are held by somebody else."""
        self._given.clear()
        self._lifted.clear()

    def _sized(self, result: torch.Tensor, node: fx.Node) -> torch.Tensor:
        """A tensor with known sizes in place of one whose sizes inputs decide (`nonzero`), which are questions of them;
        the same where there is none, or nobody answers."""
        if not self._asks_sizes:
            return result
        unknown = [dim for dim, size in enumerate(result.shape) if is_symbolic(size)]
        symbols = [self.sizes.nodes.get(expression(result.shape[dim])) for dim in unknown]
        # Others have the size of what they are made of.
        if not unknown or any(size is None or size.args[0] is not node for size in symbols):
            return result
        shape = list(result.shape)
        for dim in unknown:
            size = self._questions.ask(node, self._graph, self._inputs, self._storages, self._constants, dim)
            if size is None:
                return result
            shape[dim] = int(size)
        known = result.new_empty(shape)
        node.meta["value"] = self._results(known, node)
        return known

    def _constant(self, tensor: torch.Tensor) -> torch.Tensor:
        """A real tensor, just made of numbers, as the graph's own: each run begins with a copy of it."""
        name = f"constant_{len(self._constants)}"
        result: torch.Tensor = _LIFT(tensor)
        with outside_modes():
            self._constants[name] = tensor.detach().clone()
        node = self._graph.create_node("get_attr", name)
        node.meta.update(self._where(), value=self._value(tensor, name))
        copy = self._graph.call_function(torch.ops.aten.clone.default, (node,))
        copy.meta.update(self._where())
        copy.meta["value"] = self._results(result, copy)
        return result

    def explained(self, error: Exception) -> CaptureError:
        """Why the capture stopped, with the place."""
        last = "" if self._last is None else str(self._last)
        return explained(error, last, self._where()["module"], self._names)

    def _where(self) -> dict[str, Any]:
        backward = running_backward()
        module = self._modules[-1] if self._modules else ""
        recomputed = backward is not None and bool(self._modules)
        if backward is not None and not self._modules:
            at = bisect.bisect_right(self._sequences, backward) - 1
            module = self._at_sequence[at] if at >= 0 and backward < next_sequence() else ""
        context = current_step()
        region = Region(layer_of(module), context.micro_batch, context.phase)
        return {"region": region, "module": module, "recomputed": recomputed}

    def _argument(self, arg: Any, func: Any) -> Any:
        if isinstance(arg, torch.Tensor):
            return self._node_of(arg, func)
        if isinstance(arg, tuple | list):
            parts = [self._argument(part, func) for part in arg]
            return parts if isinstance(arg, list) else tuple(parts)
        if isinstance(arg, torch.SymInt):
            return self.sizes.argument(arg)
        if isinstance(arg, torch.SymFloat | torch.SymBool):
            raise CaptureError(f"{func} is given {arg}, a number that depends on the data and is no size")
        return arg

    def _results(self, result: Any, node: fx.Node) -> Any:
        if isinstance(result, torch.Tensor):
            self._tell(result, node)
            self.sizes.bind_value(result, node)
            return self._value(result)
        if isinstance(result, torch.SymInt):
            self.sizes.bind(result, node)
            return None
        if isinstance(result, tuple | list):
            values: list[Value | None] = []
            for index, part in enumerate(result):
                if not isinstance(part, torch.Tensor):
                    values.append(None)
                    continue
                item = self._graph.call_function(operator.getitem, (node, index))
                item.meta.update(node.meta, value=self._value(part))
                self._tell(part, item)
                self.sizes.bind_value(part, item)
                values.append(item.meta["value"])
            return tuple(values)
        return None

    def _tell(self, tensor: torch.Tensor, node: fx.Node) -> None:
        tensor.__dict__[_ATTRIBUTE] = (self, node)
        if self._made is not None:
            self._made[id(tensor)] = tensor

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
        raise CaptureError(
            f"{func} reads a tensor of {tuple(tensor.shape)} that comes from outside of the step and is none of its "
            "inputs; register it as a buffer of its module (register_buffer), or compute it in the forward pass"
        )

    def _storage(self, tensor: torch.Tensor, name: str | None = None) -> int:
        if tensor.layout != torch.strided:
            raise CaptureError(
                "it makes a sparse tensor, for which no plan has memory; where it is a gradient, make the embedding "
                "with sparse=False"
            )
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
        output.meta.update(self._where())
        before = output
        for node in self._graph.nodes:
            if "region" not in node.meta:
                # Arithmetic on sizes is where the node before it is.
                where = {key: before.meta[key] for key in ("region", "module", "recomputed")}
                node.meta.update(where)
            before = node
        step = StepGraph(
            self._graph,
            self._inputs,
            list(returned),
            self._storages,
            self._constants,
            {self._storage(gradient): name for name, gradient in gradients.items()},
            {symbol: node for symbol, node in self.sizes.nodes.items() if symbol.is_Symbol},
            even=self.sizes.even,
        )
        step = trim(step)
        locate(step, self._layer_named)
        return step


def _has_real(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether there is a real tensor among an operator's arguments."""
    for arg in (*args, *kwargs.values()):
        if isinstance(arg, torch.Tensor):
            if not is_fake(arg):
                return True
        elif isinstance(arg, list | tuple) and _has_real(arg, {}):
            return True
    return False


def _lies_like(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one storage are the same elements in the same order."""
    return (
        tensor.shape == other.shape
        and tensor.stride() == other.stride()
        and tensor.storage_offset() == other.storage_offset()
        and tensor.dtype == other.dtype
    )
