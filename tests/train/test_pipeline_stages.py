"""What a pipeline's stages compute themselves, and what they hold."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from harness.families import FAMILIES
from harness.pipelines import Captured, captured_module, in_stages, summed
from hyper_parallel.graph import executable
from hyper_parallel.graph.gradients import GRADIENT
from hyper_parallel.graph.partition import by_modules
from hyper_parallel.graph.stage_cut import layer_stages
from hyper_parallel.graph.step_context import region_of
from hyper_parallel.step.pipeline_stages import PipelineStages, pipeline_stages

TIED = "model.embed_tokens.weight"


def _crossing_back(found: PipelineStages) -> list[tuple[int, ...]]:
    """Shapes of what goes back from stage to stage in each micro-batch."""
    return [one.value.shape for stage in found.partition.stages for one in stage.gradients_out]


def test_a_tied_gradient_that_is_cast_is_not_sent_in_each_micro_batch() -> None:
    found = Captured(FAMILIES["llama-tied"], {"precision": {"compute": "bfloat16"}})
    cut = pipeline_stages(found.step, layer_stages("model.layers", (1, 1), found.step), 2, "parameters")
    assert _crossing_back(cut) == [(1, 32, 32)]
    assert all(f"{GRADIENT}{TIED}" in stage.step.outputs for stage in cut.partition.stages)
    assert cut.users[f"parameter.{TIED}"] == {0, 1}
    gather = cut.gather((0, 1))
    state = {**found.state, **executable(gather).run(found.state)} if gather is not None else found.state
    whole, staged = found.whole(), in_stages(cut.partition, state, found.batches, together=True)
    alone = (whole.keys() & staged.keys()) - {f"{GRADIENT}{TIED}"}
    assert len(alone) > 15
    assert all(torch.equal(whole[name], staged[name]) for name in alone)
    # The sum of two stages is not rounded to bfloat16.
    torch.testing.assert_close(staged[f"{GRADIENT}{TIED}"], whole[f"{GRADIENT}{TIED}"], rtol=2**-7, atol=1e-4)


class Repeated(nn.Module):
    """Two blocks, each of which runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for block in (*self.blocks, *self.blocks):
            x = torch.relu(block(x))
        return x


def test_a_block_that_two_stages_run_goes_back_in_both() -> None:
    model = Repeated()
    step = captured_module(model, (3, 6))
    cut = pipeline_stages(step, by_modules({"first": 0, "blocks.0": 0, "blocks.1": 1}), 2, "parameters")
    # The gradient of the hidden state goes back, and no activation to be used there.
    backward = {node.name for node in step.nodes if region_of(node).phase == "backward"}
    assert {one.node for stage in cut.partition.stages for one in stage.gradients_out} <= backward
    for stage in cut.partition.stages:
        names = {name for name in stage.step.outputs if name.startswith(GRADIENT)}
        assert all(stage.number in cut.users[f"parameter.{name.removeprefix(GRADIENT)}"] for name in names), (
            names
        )
    state = {f"parameter.{name}": one.detach() for name, one in model.named_parameters()}
    batches = [{"x": torch.randn(3, 6)} for _ in range(2)]
    whole = summed(executable(step).run({**state, **batch}) for batch in batches)
    staged = in_stages(cut.partition, state, batches, together=True)
    for name in whole:
        torch.testing.assert_close(staged[name], whole[name], rtol=1e-5, atol=1e-6)
