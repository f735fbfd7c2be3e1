"""Overrides while a step is captured: no garbage collection, generators' states as operators, padded attention.

Graphs of tens of thousands of nodes all stay until a capture, a rewrite or a plan is done. Python's collector of cycles
would look through them again and again, which takes up to a third of the time and finds nothing (`uncollected`).
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from hyper_parallel.compat.dispatch import outside_modes
from hyper_parallel.compat.fake_tensors import is_fake
from hyper_parallel.errors import CaptureError


def collect_between() -> None:
    """Free what one large step has left before the next one is made, where the collector rests for longer than both."""
    if not gc.isenabled():
        gc.collect()


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """In the block cycles are not collected; what has none is freed at once as ever. May be nested."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


# Random-generator states as graph values: reading and setting a state are operators.
#
# `torch.utils.checkpoint` reads the state before a forward pass and sets it before the recomputation, so that dropout
# draws the same mask twice. To a capture these would be calls on the host, done once and never again; while one is
# under way, `torch.get_rng_state` and `torch.set_rng_state`, and those of the devices, are the operators below. Both
# count as draws, so that no pass moves them past a draw, repeats them, or leaves them out.
#
# A state that does not come from the graph, and a seed, would be the same in every run, where the code may want another
# one each time: refused.

_TAGS = (torch.Tag.nondeterministic_seeded,)
_library = torch.library.Library("hyper_parallel", "FRAGMENT")
_library.define("random_state(Device device) -> Tensor", tags=_TAGS)
_library.define("set_random_state(Tensor state, Device device) -> ()", tags=_TAGS)


def state_of(device: torch.device) -> torch.Tensor:
    """The state of a device's default generator, uint8 [n] on the host."""
    if device.type == "cpu":
        return torch.default_generator.get_state()
    found: torch.Tensor = torch.get_device_module(device).get_rng_state(device)
    return found


def set_state(state: torch.Tensor, device: torch.device) -> None:
    """Bring a device's default generator to a state."""
    if device.type == "cpu":
        torch.default_generator.set_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


def _fake_state(device: torch.device) -> torch.Tensor:
    with outside_modes():
        count = state_of(device).numel()
    return torch.empty(count, dtype=torch.uint8, device="cpu")


def _fake_set(state: torch.Tensor, device: torch.device) -> None:
    return None


_library.impl("random_state", state_of, "CompositeExplicitAutograd")
_library.impl("set_random_state", set_state, "CompositeExplicitAutograd")
torch.library.register_fake("hyper_parallel::random_state", _fake_state, lib=_library)
torch.library.register_fake("hyper_parallel::set_random_state", _fake_set, lib=_library)
_READ = torch.ops.hyper_parallel.random_state.default
_SET = torch.ops.hyper_parallel.set_random_state.default
torch.fx.node.has_side_effect(_SET)


@contextlib.contextmanager
def followed(device: torch.device) -> Iterator[None]:
    """Inside, code that reads and sets generators' states is captured; `device` is the one that the step runs on.

    Raises CaptureError for what sets a generator that no operator can follow.
    """
    host = torch.device("cpu")
    with outside_modes():
        before = torch.default_generator.get_state()
    patches: list[tuple[Any, str, Callable[..., Any]]] = []
    for module in (torch, torch.random):
        patches += [(module, "get_rng_state", lambda: _READ(host))]
        patches += [(module, "set_rng_state", lambda state: _set(state, host))]
        patches += [(module, name, _refused(name)) for name in ("manual_seed", "seed")]
    if device.type != "cpu":
        for module in _modules(device.type):
            patches += [(module, "get_rng_state", lambda of=device: _READ(_device(of, device)))]
            patches += [(module, "set_rng_state", lambda state, of=device: _set(state, _device(of, device)))]
    known = [(module, name, getattr(module, name)) for module, name, _ in patches]
    try:
        for module, name, instead in patches:
            setattr(module, name, instead)
        yield
    finally:
        for module, name, own in known:
            setattr(module, name, own)
        with outside_modes():
            moved = not torch.equal(torch.default_generator.get_state(), before)
            torch.default_generator.set_state(before)
    if moved:
        raise CaptureError(
            "the forward pass sets the state of PyTorch's random generator (Generator.manual_seed or set_state), which "
            "a graph of it would not do again; seed before the model is called, or use torch.get_rng_state and "
            "torch.set_rng_state inside"
        )


def _modules(kind: str) -> Iterator[Any]:
    """A device's module, and the one inside it where these functions are from."""
    module = torch.get_device_module(kind)
    for found in (module, getattr(module, "random", None)):
        if hasattr(found, "get_rng_state") and hasattr(found, "set_rng_state"):
            yield found


def _device(of: Any, default: torch.device) -> torch.device:
    found = torch.device(default.type, of) if isinstance(of, int) else torch.device(of)
    return default if found.index is None else found


def _set(state: torch.Tensor, device: torch.device) -> None:
    if not is_fake(state):
        raise CaptureError(
            "the forward pass sets a random generator to a state that was read outside of it, which would be the same "
            "in every call; read it (torch.get_rng_state) inside the forward pass"
        )
    _SET(state, device)


def _refused(name: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any) -> NoReturn:
        raise CaptureError(
            f"the forward pass calls torch.{name}, which a graph of it would not do again; seed before the model is "
            "called"
        )

    return refuse


# Attention whose values have fewer features than its keys, captured as the one kernel that devices have for it.
#
# PyTorch's fused attention of a CPU takes heads of one size. Multi-head latent attention (DeepSeek-V2, arXiv
# 2405.04434) has queries and keys of 192 features and values of 128, so that on a CPU it becomes products of float32
# matrices with all scores between them, which no accelerator computes. Under `padded_values` the values are padded with
# zeros to the size of the keys, and the result is cut: the same numbers by a fused kernel, for (d_qk − d_v) / (d_qk +
# d_v) more FLOPs of attention, a fifth for these heads. For costs alone; a run computes what PyTorch has on its device.

ATTENTION = functional.scaled_dot_product_attention


class padded_values(TorchFunctionMode):
    """A context in which attention's values are padded."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if func is not ATTENTION:
            return func(*args, **named)
        named |= dict(
            zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args, strict=False)
        )
        query, value = named["query"], named["value"]
        features, narrow = query.size(-1), value.size(-1)
        if narrow >= features:
            return func(*args, **(kwargs or {}))
        if named.get("scale") is None:
            named["scale"] = features**-0.5
        named["value"] = functional.pad(value, (0, features - narrow))
        found: Tensor = func(**named)
        return found[..., :narrow]
