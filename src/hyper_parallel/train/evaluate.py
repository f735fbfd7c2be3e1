"""Loss on held-out text: always the same rows, the same value on any number of workers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from hyper_parallel.config.train import LossConfig
from hyper_parallel.data import Rows
from hyper_parallel.shard import ShardedModel, sharded
from hyper_parallel.shard.forward import inference
from hyper_parallel.shard.loss import IGNORED, causal_lm_loss, valid_tokens
from hyper_parallel.shard.plan.plan import length_multiple
from hyper_parallel.shard.process_mesh import LOSS_AXES, ROW_AXES
from hyper_parallel.step.batches import MicroBatch, load_rows, rows_beside, share_of
from hyper_parallel.step.pipeline_build import BuiltPipeline
from hyper_parallel.step.program_runner import whole_loss


class Evaluation:
    """The first `batches` · `batch` rows of the held-out text, or all of them if there are fewer.

    They are loaded once and kept on the device. A rank whose share ran out computes rows without loss, so that
    all ranks take part in each collective.
    """

    def __init__(
        self,
        text: Rows,
        batches: int,
        batch: int,
        micro_batch: int | None,
        handle: ShardedModel,
        device: torch.device,
        options: LossConfig | None = None,
    ) -> None:
        self._options = options
        share = share_of(handle, batch)
        micro = micro_batch or share.stop - share.start
        total = min(len(text), batches * batch)
        self._micro: list[MicroBatch] = []
        for start in range(0, total, batch):
            for at in range(share.start, share.stop, micro):
                wanted = [start + at + i for i in range(micro)]
                held = [row for row in wanted if row < total]
                # Filled up with row 0, which then bears no loss here.
                beside = (start + one for one in rows_beside(handle, batch, at, micro))
                length = text.positions(
                    [row if row < total else 0 for row in beside], length_multiple(handle.plan)
                )
                filled, places = held + [0] * (micro - len(held)), range(at, at + micro)
                loaded = load_rows(text, filled, places, device, length=length)
                loaded.labels[len(held) :] = IGNORED
                self._micro.append(loaded)

    def __bool__(self) -> bool:
        """Whether there is anything to evaluate on."""
        return bool(self._micro)

    def loss(
        self,
        model: nn.Module,
        ends: Callable[[], bool] = lambda: False,
        pipeline: BuiltPipeline | None = None,
    ) -> float | None:
        """Mean loss of a valid token; NaN if none of the rows has one. A collective.

        `pipeline`: of a model that is cut into stages.

        None where `ends` returned true, which is asked before each micro-batch (of a pipeline: before the first) and
        must be the same on every rank.
        """
        handle = sharded(model)
        if pipeline is not None:
            return None if ends() else self._over_stages(handle, pipeline)
        loss, tokens = torch.zeros(2, device=self._micro[0].labels.device)
        with inference(model):
            for micro in self._micro:
                if ends():
                    return None
                loss += causal_lm_loss(
                    model,
                    micro.input_ids,
                    micro.labels,
                    micro.position_ids,
                    1.0,
                    self._options,
                    micro_batches=1,
                    **micro.extra,
                )
                tokens += valid_tokens(micro.labels)
        valid = handle.all_reduce(tokens, ROW_AXES).item()
        return handle.all_reduce(loss, LOSS_AXES).item() / valid if valid else float("nan")

    def _over_stages(self, handle: ShardedModel, pipeline: BuiltPipeline) -> float:
        loss = pipeline.evaluate(self._micro)
        tokens = torch.stack([valid_tokens(one.labels) for one in self._micro]).sum()
        valid = handle.all_reduce(tokens, ROW_AXES).item()
        return whole_loss(handle, loss).item() / valid if valid else float("nan")
