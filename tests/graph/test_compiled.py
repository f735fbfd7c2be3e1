"""Which parts of a step are compiled, that exchanging them changes nothing, and how artifacts are kept."""

from __future__ import annotations

import fcntl
import random
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn

from hyper_parallel.compat import inductor
from hyper_parallel.compat.fx_graph import fake_mode_with_symbols
from hyper_parallel.errors import CompileError
from hyper_parallel.graph import StepGraph, capture, executable, host, phase
from hyper_parallel.graph.artifacts import obtain, own
from hyper_parallel.graph.compiled import FEWEST, Subgraph, compiled, digest, partition, replace
from hyper_parallel.graph.host_nodes import HostPoint
from hyper_parallel.graph.step_context import Region

Tensors = dict[str, torch.Tensor]


def _rewritten(step: StepGraph) -> tuple[StepGraph, int]:
    """The subgraphs exchanged for their own operators, not compiled."""
    result = step.copy()
    found = partition(result)
    replace(result, found, [(f"subgraph_{at}", _functional(subgraph)) for at, subgraph in enumerate(found)])
    return result, len(found)


def _functional(subgraph: Subgraph) -> Callable[..., list[torch.Tensor]]:
    """What a compiler may make of a subgraph: no output shares memory with another or with an input."""
    module = fx.GraphModule({}, subgraph.graph())
    return lambda *inputs: [output.clone() for output in module(*inputs)]


class _Layers(nn.Module):
    """Two equal layers with a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 8)) for _ in range(2)
        )
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def _step(scale: float = 1.0) -> StepGraph:
    """Gradients of two batches added up, a host point, an update."""
    with fake_mode_with_symbols():
        model = _Layers()
        batches = [torch.empty(4, 8), torch.empty(4, 8)]
        parameters = dict(model.named_parameters())

        def step() -> Tensors:
            total = torch.zeros(())
            gradients: Tensors = {}
            for x in batches:
                loss = model(x).square().sum() * scale
                with phase("backward"):
                    found = torch.autograd.grad(loss, list(parameters.values()))
                    for name, gradient in zip(parameters, found, strict=True):
                        gradients[name] = gradients[name].add_(gradient) if name in gradients else gradient
                total = total + loss.detach()
            host(HostPoint.CHECK, [total])
            with phase("optimizer"), torch.no_grad():
                for name, parameter in parameters.items():
                    parameter.add_(gradients[name], alpha=-0.1)
            return {"loss": total}

        tensors: Any = {name: ("parameter", parameter) for name, parameter in parameters.items()}
        tensors.update({f"x{at}": ("input", x) for at, x in enumerate(batches)})
        return capture(step, tensors, model)


def _values() -> Tensors:
    torch.manual_seed(0)
    tensors = {name: parameter.detach() for name, parameter in _Layers().named_parameters()}
    return {**tensors, "x0": torch.randn(4, 8), "x1": torch.randn(4, 8)}


def _run(step: StepGraph) -> tuple[torch.Tensor, Tensors]:
    tensors = _values()
    outputs = executable(step).run(tensors, lambda *_: None)
    return outputs["loss"], tensors


def test_the_operators_of_subgraphs_in_their_place_are_the_step() -> None:
    step = _step()
    result, count = _rewritten(step)
    assert count >= 8  # both layers and what is outside of them, forward and backward, twice
    loss, tensors = _run(step)
    again, others = _run(result)
    assert torch.equal(loss, again)
    assert all(torch.equal(tensors[name], others[name]) for name in tensors)


def test_equal_layers_give_one_artifact() -> None:
    step = _step()
    found = partition(step)
    names = [digest(subgraph, {}) for subgraph in found]
    layers = [subgraph.nodes[0].meta["module"].startswith("layers.") for subgraph in found]
    assert sum(layers) == 8
    # The first layer's backward pass does not go on to the input.
    assert len({name for name, layer in zip(names, layers, strict=True) if layer}) <= 5


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_views_and_writes_across_subgraphs_stay_what_they_were(seed: int) -> None:
    """Random straight-line programs with views and in-place operators, cut anywhere."""
    draw = random.Random(seed)
    operators: list[Callable[..., torch.Tensor]] = [
        lambda a, b: a + b,
        lambda a, b: a * 0.5,
        lambda a, b: a.t(),
        lambda a, b: a.view(-1).view(4, 4) if a.is_contiguous() else a.contiguous(),
        lambda a, b: a[:2].repeat(2, 1),
        lambda a, b: a.add_(b.clone()),
        lambda a, b: a.mul_(0.5),
        lambda a, b: a[1:3].add_(1.0).sum() + b,
        lambda a, b: a.unsqueeze(0).expand(2, 4, 4).sum(0),
    ]
    chosen = [(draw.choice(operators), draw.random(), draw.random()) for _ in range(24)]

    def trace(x: torch.Tensor, y: torch.Tensor) -> Tensors:
        pool = [x, y, x * 2.0]
        for operator, first, second in chosen:
            a, b = pool[int(first * len(pool))], pool[int(second * len(pool))]
            pool.append(operator(a, b))
        return {"last": pool[-1].clone(), "sum": torch.stack([p.sum() for p in pool]).sum(), "view": pool[-2]}

    with fake_mode_with_symbols():
        x, y = torch.empty(4, 4), torch.empty(4, 4)
        step = capture(lambda: trace(x, y), {"x": ("buffer", x), "y": ("buffer", y)})
    layer = 0
    for node in step.nodes:
        layer += draw.random() < 0.15
        node.meta["region"] = Region(f"layers.{layer}", None, "forward")
    result, _ = _rewritten(step)
    seen = []
    for graph in (step, result):
        tensors = {"x": torch.arange(16.0).view(4, 4), "y": -torch.arange(16.0).view(4, 4)}
        outputs = executable(graph).run(tensors)
        seen.append([*tensors.values(), *outputs.values()])
    assert all(torch.equal(one, other) for one, other in zip(*seen, strict=True))


def test_a_subgraph_holds_no_host_point_no_random_numbers_and_no_sizes_of_the_data() -> None:
    with fake_mode_with_symbols():
        x, n = torch.empty(8, 2), torch.zeros((), dtype=torch.int64)

        def step() -> Tensors:
            y = ((x + 1) * 2 - 3).exp()
            y = y * torch.rand_like(y)
            count = n.item()
            torch._check(count >= 0)
            torch._check(count <= 8)
            z = ((y.narrow(0, 0, count) + 1) * 2 - 3).exp().sum()
            host(HostPoint.LOOK, [z])
            return {"z": z, "y": ((y + 1) * 2 - 3).exp()}

        graph = capture(step, {"x": ("input", x), "n": ("input", n)})
    found = [[str(node.target) for node in subgraph.nodes] for subgraph in partition(graph)]
    whole = ["aten.add.Tensor", "aten.mul.Tensor", "aten.sub.Tensor", "aten.exp.default"]
    assert found == [whole, whole]
    assert len(whole) == FEWEST


# Artifacts.


def _subgraph() -> Subgraph:
    return partition(_step())[0]


@pytest.mark.parametrize("key", ["torch", "threads", "compiler", "config", "vectors", "hyper_parallel"])
def test_an_artifact_of_another_environment_is_another_one(key: str, tmp_path: Path) -> None:
    environment = {"hyper_parallel": "1", **inductor.environment(tmp_path)}
    assert digest(_subgraph(), environment) == digest(_subgraph(), dict(environment))
    assert digest(_subgraph(), environment) != digest(_subgraph(), {**environment, key: "other"})


def test_an_artifact_of_another_number_shape_or_dtype_is_another_one() -> None:
    def one(scale: float, rows: int, dtype: torch.dtype) -> str:
        with fake_mode_with_symbols():
            x = torch.empty(rows, 4, dtype=dtype)
            step = capture(lambda: {"y": (x * scale + 1).exp().sum().sqrt()}, {"x": ("input", x)})
        (subgraph,) = partition(step)
        return digest(subgraph, {})

    kinds = [
        (1.0, 2, torch.float32),
        (2.0, 2, torch.float32),
        (1.0, 3, torch.float32),
        (1.0, 2, torch.bfloat16),
    ]
    assert len({one(*kind) for kind in kinds}) == len(kinds)
    assert one(*kinds[0]) == one(*kinds[0])


def test_code_is_only_taken_from_a_folder_of_this_users_own(tmp_path: Path) -> None:
    mine = own(tmp_path / "cache")
    assert own(tmp_path / "cache") == mine
    assert stat.S_IMODE(mine.stat().st_mode) == 0o700
    mine.chmod(0o775)
    with pytest.raises(PermissionError, match=r"other users may write there \(mode 0775\)"):
        own(tmp_path / "cache")
    with pytest.raises(CompileError, match="other users may write there"):
        compiled(_step(), tmp_path / "cache")
    mine.rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    mine.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError, match="it is no folder"):
        own(tmp_path / "cache")


def _write(place: Path) -> None:
    (place / "data").write_text("whole")


def _obtain(folder: Path, make: Callable[[Path], None] = _write) -> tuple[dict[str, str], int]:
    return obtain(folder, {"a": make, "b": make}, lambda p: (p / "data").read_text(), time.monotonic() + 5)


def test_artifacts_are_made_once(tmp_path: Path) -> None:
    assert _obtain(tmp_path) == ({"a": "whole", "b": "whole"}, 2)
    assert _obtain(tmp_path) == ({"a": "whole", "b": "whole"}, 0)


@pytest.mark.parametrize("harm", ["changed", "cut", "gone", "unfinished"])
def test_a_damaged_artifact_is_made_again(tmp_path: Path, harm: str) -> None:
    _obtain(tmp_path)
    data = tmp_path / "a" / "data"
    if harm == "changed":
        data.write_text("whale")
    elif harm == "cut":
        data.write_text("who")
    elif harm == "gone":
        data.unlink()
    else:
        (tmp_path / "a" / "manifest.json").unlink()
    assert _obtain(tmp_path) == ({"a": "whole", "b": "whole"}, 1)


def test_what_another_process_holds_is_waited_for_last(tmp_path: Path) -> None:
    with open(tmp_path / "a.lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        made = []
        with pytest.raises(TimeoutError, match="another process still compiles 1 of 2"):
            obtain(
                tmp_path,
                {name: lambda p: (made.append(p.name), _write(p))[1] for name in "ab"},
                lambda p: (p / "data").read_text(),
                time.monotonic() + 0.3,
            )
    assert made == ["b"]


def test_without_a_compiler_the_error_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor, "missing", lambda: "a C++ compiler")
    with pytest.raises(CompileError, match=r"C\+\+ compiler"):
        compiled(_step(), tmp_path)


def test_what_the_compiler_raises_is_a_compile_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no such thing\nand more")

    monkeypatch.setattr(inductor, "compile_into", fail)
    with pytest.raises(CompileError, match=r"RuntimeError: no such thing$"):
        compiled(_step(), tmp_path)


@pytest.mark.skipif(inductor.missing() is not None, reason="no C++ compiler")
def test_compiled_subgraphs_compute_the_step_and_are_kept(tmp_path: Path) -> None:
    step = _step()
    first = compiled(step, tmp_path)
    assert first.made == first.artifacts > 0
    kept = compiled(step, tmp_path)
    assert kept.made == 0
    loss, tensors = _run(step)
    for result in (first, kept):
        again, others = _run(result.step)
        # Sums of 8 fp32 numbers in another order.
        torch.testing.assert_close(again, loss, rtol=1e-6, atol=0)
        for name in tensors:
            torch.testing.assert_close(others[name], tensors[name], rtol=1e-5, atol=1e-6)
