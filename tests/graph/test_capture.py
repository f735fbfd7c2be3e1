"""What a capture writes down, and that running it is running the step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hyper_parallel.compat import kernels
from hyper_parallel.compat.fx_graph import fake_mode_with_symbols
from hyper_parallel.errors import CaptureError
from hyper_parallel.graph import StepGraph, capture, executable, host, lifetimes, peak, phase, values_of
from hyper_parallel.graph.host_nodes import HostPoint


def _fake(*shape: int) -> torch.Tensor:
    return torch.empty(*shape)


def _linear_step() -> StepGraph:
    """Forward, loss, backward and a plain gradient step of one layer."""
    mode = fake_mode_with_symbols()
    with mode:
        model = nn.Sequential(nn.Linear(4, 3, bias=False), nn.Tanh())
        x = _fake(5, 4)

        def step() -> dict[str, torch.Tensor]:
            out = model(x)
            with phase("loss"):
                loss = out.square().sum()
            with phase("backward"):
                (gradient,) = torch.autograd.grad(loss, [model[0].weight])
            host(HostPoint.CHECK, [loss.detach()])
            with phase("optimizer"), torch.no_grad():
                model[0].weight.add_(gradient, alpha=-0.1)
            return {"loss": loss.detach()}

        return capture(step, {"weight": ("parameter", model[0].weight), "x": ("input", x)}, model)


def _eager(weight: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = weight.clone().requires_grad_()
    loss = torch.tanh(nn.functional.linear(x, leaf)).square().sum()
    (gradient,) = torch.autograd.grad(loss, [leaf])
    return loss.detach(), weight.clone().add_(gradient, alpha=-0.1)


def test_a_graph_computes_what_eager_computes_and_updates_state_in_place() -> None:
    weight, x = torch.randn(3, 4), torch.randn(5, 4)
    loss, updated = _eager(weight, x)
    seen = []
    outputs = executable(_linear_step()).run(
        {"weight": weight, "x": x}, lambda point, values: seen.append((point, values[0].item()))
    )
    assert torch.equal(outputs["loss"], loss)
    assert torch.equal(weight, updated)
    assert seen == [("check", loss.item())]


def test_what_comes_from_outside_is_known_by_its_storage() -> None:
    with fake_mode_with_symbols():
        model = nn.Linear(4, 3)
        weight, bias, x = model.weight, model.bias, _fake(5, 4)
        inputs = {
            "weight": ("parameter", weight),
            "row": ("input", weight.detach()[0]),
            "bias": ("parameter", bias),
            "x": ("input", x),
        }
        graph = capture(lambda: {"y": model(x).detach()}, inputs, model)

    kinds = {entry.name: (storage, entry.kind) for storage, entry in graph.outside.items()}
    # Views of one memory are one storage, which the last of them brings.
    assert {name: kind for name, (_, kind) in kinds.items()} == {
        "row": "input",
        "bias": "parameter",
        "x": "input",
    }
    made = {value.storage for node in graph.nodes for value in values_of(node)} - graph.outside.keys()
    assert len(made) == 1, "the output, which no input brings"
    assert graph.copy().outside == graph.outside


def test_an_update_is_captured_without_memory_for_its_parameter() -> None:
    with fake_mode_with_symbols():
        model = nn.Module()
        model.weight = nn.Parameter(_fake(2**40))  # of which no machine has four
        gradient, first, second = (_fake(2**40) for _ in range(3))
        count, lr = torch.zeros(()), torch.ones((), dtype=torch.float64)

        def step() -> dict[str, torch.Tensor]:
            with phase("optimizer"), torch.no_grad():
                kernels.adamw_(
                    [model.weight],
                    [gradient],
                    [first],
                    [second],
                    [count],
                    lr=lr,
                    betas=(0.9, 0.95),
                    weight_decay=0.1,
                    eps=1e-8,
                )
            return {}

        inputs = {"parameter": model.weight, "gradient": gradient, "first": first, "second": second}
        inputs |= {"count": count, "lr": lr}
        found = capture(step, {name: ("input", tensor) for name, tensor in inputs.items()}, model)
    assert "_fused_adamw_" in str([node.target for node in found.nodes])


def test_what_the_host_raises_leaves_the_state_as_it_was() -> None:
    weight, x = torch.randn(3, 4), torch.randn(5, 4)
    before = weight.clone()

    def refuse(point: str, values: object) -> None:
        raise ArithmeticError(point)

    with pytest.raises(ArithmeticError, match="check"):
        executable(_linear_step()).run({"weight": weight, "x": x}, refuse)
    assert torch.equal(weight, before)


def test_the_node_that_failed_is_found_and_the_host_may_use_autograd() -> None:
    run = executable(_linear_step())
    seen = []

    def ask(point: str, values: object) -> None:
        x = torch.ones(2, requires_grad=True)
        seen.extend(torch.autograd.grad(x.square().sum(), [x]))

    with pytest.raises(RuntimeError) as caught:
        run.run({"weight": torch.zeros(3, 5), "x": torch.zeros(5, 4)}, ask)
    node = run.node_of(caught.value)
    assert (
        node is not None
        and node.meta["region"].phase == "forward"
        and node.target is torch.ops.aten.mm.default
    )
    run.run({"weight": torch.zeros(3, 4), "x": torch.zeros(5, 4)}, ask)
    assert [x.tolist() for x in seen] == [[2.0, 2.0]]


def test_nodes_know_their_phase_and_module() -> None:
    where = {
        (str(node.target), node.meta["region"].phase, node.meta["module"]) for node in _linear_step().nodes
    }
    assert ("aten.tanh.default", "forward", "1") in where
    assert ("aten.tanh_backward.default", "backward", "1") in where
    assert ("aten.add_.Tensor", "optimizer", "") in where


def test_a_tensor_that_nobody_told_of_is_refused() -> None:
    mode = fake_mode_with_symbols()
    with mode:
        x, forgotten = _fake(2, 2), _fake(2, 2)
        with pytest.raises(CaptureError, match=r"\(2, 2\) that comes from outside"):
            capture(lambda: {"y": x + forgotten}, {"x": ("input", x)})


def test_views_share_a_storage_and_the_peak_counts_it_once() -> None:
    mode = fake_mode_with_symbols()
    with mode:
        x = _fake(8, 8)
        step = capture(lambda: {"y": (x + 1).view(64).t().reshape(8, 8) * 2}, {"x": ("input", x)})
    assert peak(step).bytes == 3 * 8 * 8 * 4
    assert [life.kind for life in lifetimes(step)] == ["input", "temporary", "temporary"]


def test_numbers_read_from_tensors_are_sizes_of_the_run() -> None:
    mode = fake_mode_with_symbols()
    with mode:
        x, n = _fake(6, 2), torch.zeros((), dtype=torch.int64)

        def step() -> dict[str, torch.Tensor]:
            count = n.item()
            torch._check(count >= 0)
            torch._check(count <= 6)
            return {"y": torch.cat([x.narrow(0, 0, count), x.narrow(0, 0, count) + 1])}

        graph = capture(step, {"x": ("input", x), "n": ("input", n)})
    run = executable(graph)
    x = torch.randn(6, 2)
    for count in (2, 5):
        outputs = run.run({"x": x, "n": torch.tensor(count)})
        assert torch.equal(outputs["y"], torch.cat([x[:count], x[:count] + 1]))


def test_a_number_that_no_input_decides_is_known() -> None:
    """As of the mask of ones that a model makes where it was given none."""
    mode = fake_mode_with_symbols()
    with mode:
        x = _fake(3, 4)

        def step(offset: float, given: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
            mask = torch.ones(3, 4, device=x.device) if given is None else given
            mask[:, 1:] += offset
            return {"y": x + 1 if (mask == 1).all() else x * 2}

        plain = capture(lambda: step(0.0), {"x": ("input", x)})
        shifted = capture(lambda: step(1.0), {"x": ("input", x)})
        with pytest.raises(CaptureError, match="asks for a tensor's value"):
            capture(lambda: step(0.0, x.clone()), {"x": ("input", x)})
    real = torch.randn(3, 4)
    assert torch.equal(executable(plain).run({"x": real})["y"], real + 1)
    assert torch.equal(executable(shifted).run({"x": real})["y"], real * 2)
