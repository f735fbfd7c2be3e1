"""What others do about memory, as the benchmark has it: the same results, and the points that follow from a policy."""

from __future__ import annotations

from typing import Any

import offload
import offload_peers as peers
import offload_saved
import pytest
import torch
from memory import MODELS
from torch import nn
from training import build, captured

import hyper_parallel as hp
from hyper_parallel.cluster import Cluster
from hyper_parallel.compat import registry
from hyper_parallel.graph import peak
from hyper_parallel.offloading import Rate
from hyper_parallel.offloading.tiers import HostTier
from hyper_parallel.workload.work import Work


@pytest.fixture(scope="module")
def case() -> peers.Case:
    """A small Llama with activations that are large beside its state, on a slow link."""
    fields = {
        **MODELS["llama"],
        "num_hidden_layers": 3,
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 176,
    }
    strategy = hp.Strategy.model_validate({"precision": {"compute": "bfloat16"}})
    step = captured(build(fields, strategy), 2, 128)
    return peers.Case(step, Cluster.named("h100"), Rate(0.0, 1e9))


def test_policies_hold_less_and_take_longer_than_none(case: peers.Case) -> None:
    none = peers.none(case)
    assert none.peak == peak(case.step).bytes and none.stall == 0
    for policy in (peers.layer_recompute, peers.save_on_cpu, peers.layer_ahead):
        found = policy(case)
        assert found.peak < none.peak and found.seconds > none.seconds


def test_copies_on_the_stream_that_computes_stall_for_all_their_seconds(case: peers.Case) -> None:
    copied = sum(held.bytes for held, *_ in peers.saved(case.step, case.problem()))
    assert peers.save_on_cpu(case).stall == pytest.approx(2 * copied / case.link.bandwidth)
    assert peers.layer_ahead(case).stall < peers.save_on_cpu(case).stall


def test_a_layer_ahead_holds_a_layer_more(case: peers.Case) -> None:
    borders = peers.Borders.of(case.step)
    # The loss stands between the layers' forward and backward passes.
    assert len(borders.places) == 2 + 3 + 1 + 3
    assert borders.behind(borders.places[1], 1) == borders.places[2]
    assert borders.before(borders.places[4] + 1, 1) == borders.places[3]
    assert peers.layer_ahead(case).peak >= peers.save_on_cpu(case).peak


def test_an_update_on_the_host_comes_when_all_gradients_are_there(case: peers.Case) -> None:
    problem = peers.on_the_host(case.step, case)
    parameters = [held for held in problem.held if held.state and held.kind == "parameter"]
    assert not [held for held in problem.held if held.kind == "optimizer"]
    elements = sum(held.bytes for held in parameters) // 4
    work = Work("optimizer", read=20 * elements, written=16 * elements)
    assert problem.starts[-1] - problem.starts[-2] == pytest.approx(case.cluster.host_seconds(work))
    whole = case.problem()
    gradients = sum(held.bytes for held in whole.held if held.kind == "gradient")
    back = sum(held.bytes for held in parameters)
    # Nothing is quicker than the link: gradients go out in the backward pass, parameters come back twice.
    assert peers.cpu_offload(case).seconds >= max(gradients, 2 * back) / case.link.bandwidth


@pytest.mark.parametrize("ahead", [False, True])
def test_what_was_saved_elsewhere_gives_the_same_gradients(ahead: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)))
    x = torch.randn(32, 64)

    def run() -> float:
        model.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        return float(loss.detach())

    run()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    written: list[int] = []

    class Counting(HostTier):
        def begin_write(self, slot: int, x: torch.Tensor) -> Any:
            written.append(x.numel())
            return super().begin_write(slot, x)

    with Counting(registry.backend("cpu"), 1 << 20) as tier:
        saved = offload_saved.SavedElsewhere(tier, list(model), [*model.parameters(), x], ahead)
        for _ in range(3):
            saved.step(run)
            assert all(map(torch.equal, [p.grad for p in model.parameters()], expected))
    # What each linear layer and each activation is given, but for x; the first of the three steps only counts.
    each = 32 * 64 * 4
    assert sum(written) == 2 * each * (5 if ahead else 8)


def test_copies_over_an_emulated_link_follow_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload_saved.time, "perf_counter", lambda: 10.0)
    with HostTier(registry.backend("cpu"), 1 << 12) as tier:
        link = offload_saved.Emulated(tier, bandwidth=1000.0)
        link.reserve({0: 500, 1: 500})
        x = torch.zeros(500, dtype=torch.uint8)
        out = [link.begin_write(slot, x) for slot in (0, 1)]
        assert [copy.until for copy in out] == [10.5, 11.0]
        assert link.begin_read(0, x).until == 10.5
        assert not out[0].done()


def test_ours_is_below_where_one_plan_holds_no_more_and_takes_no_longer() -> None:
    ours = [{"budget": 8, "peak": 8, "seconds": 1.0}, {"budget": 4, "peak": 4, "seconds": 3.0}]
    others = {
        "slower": {"peak": 9, "seconds": 1.5},
        "quicker": {"peak": 5, "seconds": 2.0},
        "smaller": {"peak": 3, "seconds": 9.0},
    }
    found = offload.below_simulated(others, ours)
    assert {name: one["on_or_below"] for name, one in found.items()} == {
        "slower": True,
        "quicker": False,
        "smaller": False,
    }
    assert found["quicker"]["ratio"] == 1.5


def test_the_page_has_the_results_and_says_what_was_not_run() -> None:
    point = {"peak": 3 << 30, "seconds": 2.5, "stall": 0.0}
    ours = [
        {"budget": 3 << 30, "peak": 3 << 30, "seconds": 1.25},
        {"budget": 2 << 30, "peak": 2 << 30, "seconds": 4.0},
    ]
    one = {"rows": 1, "sequence": 8, "layers": 2, "link_B_s": 1e9, "others": {"none": point}, "ours": ours}
    one["below"] = offload.below_simulated(one["others"], ours)
    text = list(offload.lines({"simulated": {"workloads": [one]}}))
    assert text.count("| none | 3.0 GiB | 2.500 s | 1.250 s |") == 1
    assert text.count("| a budget of 2.0 GiB | 2.0 GiB | | 4.000 s |") == 1
    assert text.count("Ours lies on or below the point of every alternative.") == 1
    missing = [line for line in text if line.startswith("Not run yet: ")]
    assert [line.partition(".")[0].removeprefix("Not run yet: ") for line in missing] == ["the real steps"]


def _row(
    name: str, mebibytes: int, seconds: float, *, ours: bool = False, flash: bool = False
) -> dict[str, Any]:
    took = {"seconds": [seconds] * 3, "median_s": seconds}
    return {"name": name, "note": "", "ours": ours, "flash": flash, "peak": mebibytes << 20, **took}


def test_the_page_says_what_real_steps_came_to() -> None:
    rows = [
        _row("quick", 100, 1.0),
        _row("small", 50, 4.0),
        _row("tiny", 10, 9.0),
        _row("ours, 50", 50, 2.0, ours=True),
        _row("ours, 5, flash", 5, 3.0, ours=True, flash=True),
    ]
    found = {"layers": 2, "emulated_bandwidth": 2**30, "rows": rows, "same_bits": True}
    found["below"] = offload._below_measured(rows)
    text = list(offload.lines({"real": found}))
    assert "| small | 50.0 MiB | 4.000 s |  | 0.50 × (0.50 to 0.50): ours, 50 |" in text
    assert "Ours lies above the point of: quick." in text
    assert "None of our plans that were run holds as little as: tiny." in text
    assert "3 alternatives and 2 of our plans alternate, 3 steps each" in text[0]
    assert "Not run yet: the real steps." not in text
