"""A Trainer's batch as rows: shifted labels, masks that may go, documents by positions, padding to what axes divide."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from spread_steps import tiny
from torch import nn
from trainer_cases import model_of

from harness import run_ranks
from hyper_parallel.errors import DataError, IntegrationError
from hyper_parallel.integration.batch_rows import positions_of, rows_of, shifted
from hyper_parallel.integration.parallel_run import ParallelRun
from hyper_parallel.integration.streamed_sharding import as_on_rank_0, parallelize_streamed
from hyper_parallel.layout.mesh import Mesh
from hyper_parallel.shard import ShardedModel, parallelize, sharded
from hyper_parallel.shard.context.plan import ContextPlan
from hyper_parallel.strategy import Strategy

IDS = torch.arange(3, 13).reshape(2, 5)


@pytest.fixture(scope="module")
def alone() -> ShardedModel:
    """The handle of a model on one device."""
    return sharded(parallelize(tiny(), Strategy()))


class Dealt:
    """A handle whose axes divide lengths by four, and positions by two."""

    mesh = Mesh(("context", 2))

    class plan:
        mesh = Mesh(("context", 2))
        context = ContextPlan("ring", 2, 1, "", ())
        sequence = False


DEALT: Any = Dealt()


def test_labels_are_those_of_the_next_token() -> None:
    labels = torch.tensor([[-100, 4, 5], [6, -100, 8]])
    assert shifted({"labels": labels}).tolist() == [[4, 5, -100], [-100, 8, -100]]
    assert shifted({"labels": labels, "shift_labels": labels}) is labels
    assert shifted({"labels": None}) is None


@pytest.mark.parametrize(
    ("mask", "stays"),
    [
        ([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]], False),
        ([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]], True),
        ([[1, 1, 1, 1, 1], [1, 0, 1, 1, 1]], True),
        ([[1, 1, 1, 1, 1], [0, 0, 0, 0, 0]], True),
    ],
)
def test_a_mask_goes_where_it_hides_only_ends(
    alone: ShardedModel, mask: list[list[int]], stays: bool
) -> None:
    inputs = {"input_ids": IDS, "attention_mask": torch.tensor(mask)}
    rows = rows_of(inputs, alone)
    assert ("attention_mask" in rows.rest) == stays and not rows.several
    if stays:
        with pytest.raises(IntegrationError, match=r"padding_side = 'right'"):
            rows_of(inputs, DEALT)


def test_numbers_of_documents_become_positions(alone: ShardedModel) -> None:
    mask = torch.tensor([[1, 1, 2, 2, 2], [1, 1, 1, 2, 0]])
    assert positions_of(mask).tolist() == [[0, 1, 0, 1, 2], [0, 1, 2, 0, 0]]
    rows = rows_of({"input_ids": IDS, "attention_mask": mask}, alone)
    assert rows.several and rows.position_ids is not None and not rows.rest
    given = torch.arange(5).expand(2, 5)
    rows = rows_of({"input_ids": IDS, "attention_mask": mask, "position_ids": given}, alone)
    assert rows.position_ids is given and not rows.several


def test_documents_that_a_mask_leaves_together(alone: ShardedModel) -> None:
    """LlamaFactory's `packing` without `neat_packing`: Transformers looks for documents only where no mask is."""
    anew = torch.tensor([[0, 1, 0, 1, 2], [0, 1, 2, 0, 1]])
    rows = rows_of({"input_ids": IDS, "attention_mask": torch.ones(2, 5), "position_ids": anew}, alone)
    assert rows.position_ids is anew and not rows.several and not rows.rest
    assert rows_of({"input_ids": IDS, "position_ids": anew}, alone).several


def test_rows_are_padded_to_what_the_axes_divide() -> None:
    given = {
        "input_ids": IDS,
        "labels": IDS,
        "position_ids": torch.tensor([[0, 1, 0, 1, 2], [0, 1, 2, 3, 4]]),
        "cu_seq_lens_q": torch.tensor([0, 2, 5]),
    }
    rows = rows_of(given, DEALT, pad=9)
    assert rows.length == 5 and rows.several and not rows.rest
    assert rows.input_ids[:, 5:].tolist() == [[9, 9, 9]] * 2
    assert rows.labels is not None and rows.labels[:, 4:].eq(-100).all()
    assert rows.position_ids is not None and rows.position_ids[:, 5:].tolist() == [[3, 4, 5], [5, 6, 7]]
    assert rows_of(given, DEALT, length=12).input_ids.shape == (2, 12)
    with pytest.raises(IntegrationError, match="nothing says how to pad inputs_embeds"):
        rows_of({**given, "inputs_embeds": torch.zeros(2, 5, 4)}, DEALT)


def _differing(rank: int, world: int) -> list[float]:
    torch.manual_seed(rank)
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.bias.zero_()
    as_on_rank_0(model)
    return model.weight.flatten().tolist()


def _different_models(rank: int, world: int) -> str:
    with pytest.raises(IntegrationError) as refused:
        as_on_rank_0(nn.Linear(2, 2, bias=rank == 0))
    return str(refused.value)


def _shared(rank: int, world: int) -> list[Any]:
    spread = ParallelRun.over(tiny(), Strategy(axes={"shard": 2, "tensor": 2}))
    index = spread.data_index
    spread.check_same_rows([torch.tensor([index])])
    found = [
        spread.gather(torch.tensor(index)).tolist(),
        spread.gather(torch.tensor([[index, 7]])).tolist(),
        spread.gather(torch.tensor([index == 1])).tolist(),
        spread.gather_object([index]),
        (spread.data_ranks, spread.loss_ranks, spread.world),
    ]
    try:
        spread.check_same_rows([torch.tensor([rank])])
    except DataError as error:
        found.append(str(error))
    return found


def test_values_that_differ_are_those_of_rank_0() -> None:
    first, second = run_ranks(_differing, 2)
    assert first == second
    told = "ranks built different models: one has 2 tensors, another 1; build the same model in every process"
    assert run_ranks(_different_models, 2) == [told] * 2


def _in_pieces(rank: int, world: int, strategy: dict[str, Any]) -> list[str]:
    whole = {name: p.detach().clone() for name, p in model_of("lora").named_parameters()}
    handle = parallelize_streamed(
        model_of("lora"), Strategy(**strategy), torch.device("cpu"), from_rank_0=True
    )
    return [p.name for p in handle.parameters() if not p.local.equal(handle.cut(whole[p.name], p.layout))]


@pytest.mark.parametrize("axes", [{"shard": 2}, {"tensor": 2}])
def test_a_model_goes_to_its_device_in_pieces(axes: dict[str, int]) -> None:
    assert run_ranks(_in_pieces, 2, {"axes": axes}) == [[], []]


def test_shares_of_the_batch_are_counted_once() -> None:
    for *found, refused in run_ranks(_shared, 4):
        assert found == [[0, 1], [[0, 7], [1, 7]], [False, True], [[0], [1]], (2, 2, 4)]
        assert refused.startswith("ranks 0 and 1 compute on the same rows")
