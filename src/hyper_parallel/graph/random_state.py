"""Random-generator states as graph values: reading and setting a state are operators.

`torch.utils.checkpoint` reads the state before a forward pass and sets it before the recomputation, so that dropout
draws the same mask twice. To a capture these would be calls on the host, done once and never again; while one is under
way, `torch.get_rng_state` and `torch.set_rng_state`, and those of the devices, are the operators below. Both count as
draws, so that no pass moves them past a draw, repeats them, or leaves them out.

A state that does not come from the graph, and a seed, would be the same in every run, where the code may want another
one each time: refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch

from hyper_parallel.compat.dispatch import outside_modes
from hyper_parallel.compat.fake_process_group import is_fake
from hyper_parallel.errors import CaptureError

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
