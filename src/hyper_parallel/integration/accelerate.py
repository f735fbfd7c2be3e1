"""Accelerate on a parallelized model: its per-process counts become per-share counts.

Ranks that share a data index see the same rows, so rows are dealt to, and results gathered from, one rank of each.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from accelerate import Accelerator
from accelerate.utils import recursively_apply
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from hyper_parallel.errors import IntegrationError
from hyper_parallel.integration.local_optimizer import clip_to_norm
from hyper_parallel.integration.parallel_run import ParallelRun


class SpreadAccelerator(Accelerator):
    """An Accelerator that another trainer made, from then on for a spread model."""

    spread: ParallelRun
    _dealing = False
    _part: Callable[[Tensor], Tensor] | None = None
    passes = 0
    """Backward passes of the micro-batch."""

    @classmethod
    def of(cls, accelerator: Accelerator, spread: ParallelRun) -> SpreadAccelerator:
        """The same object, so that whoever holds it has the new one."""
        accelerator.__class__ = cls
        assert isinstance(accelerator, cls)
        accelerator.spread = spread
        return accelerator

    # Rows.

    @property
    def num_processes(self) -> int:
        """How many shares of the batch there are; by them a Trainer scales what it divides by processes."""
        return self.spread.data_ranks

    @property
    def process_index(self) -> int:
        """This process's rank; while rows are dealt, its share of the batch."""
        return self.spread.data_index if self._dealing else int(self.state.process_index)

    @property
    def is_last_process(self) -> bool:
        """Whether this is the process of the highest rank."""
        return int(self.state.process_index) == int(self.state.num_processes) - 1

    @property
    def dispatch_batches(self) -> bool | None:
        """Whether rank 0 reads the rows for all. Not where ranks share rows: then each reads its own."""
        given: bool | None = self.dataloader_config.dispatch_batches
        if self.spread.data_ranks == self.spread.world:
            return given
        if given:
            raise IntegrationError(
                "accelerator_config.dispatch_batches sends every process other rows, but the strategy has ranks that "
                "share them; leave it out"
            )
        return False

    def prepare_data_loader(self, data_loader: DataLoader, *args: Any, **kwargs: Any) -> DataLoader:
        """The loader of this rank's share of the rows."""
        init_function = getattr(data_loader, "worker_init_fn", None)
        if isinstance(init_function, functools.partial) and "rank" in init_function.keywords:
            # Workers of a loader are seeded by rank, and those of one share must draw the same.
            data_loader.worker_init_fn = functools.partial(
                init_function.func,
                *init_function.args,
                **{**init_function.keywords, "rank": self.spread.data_index},
            )
        if isinstance(data_loader.dataset, IterableDataset):
            _ = self.dispatch_batches
        with self._dealt():
            found: DataLoader = super().prepare_data_loader(data_loader, *args, **kwargs)
            return found

    @contextlib.contextmanager
    def _dealt(self) -> Iterator[None]:
        self._dealing = True
        try:
            yield
        finally:
            self._dealing = False

    # Results.

    def gather(self, tensor: Any) -> Any:
        """Gather the tensors of every share of the batch, one after the other."""
        return recursively_apply(self.spread.gather, tensor, error_on_other_type=True)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """`gather`, without the rows that were repeated to fill the last batch."""
        if not use_gather_object:
            try:
                recursively_apply(lambda x: x, input_data, error_on_other_type=True)
            except TypeError:
                use_gather_object = True
        if use_gather_object:
            data: Any = [one for part in self.spread.gather_object(input_data) for one in part]
        else:
            data = self.gather(input_data)
        state = self.gradient_state
        if not state.end_of_dataloader or state.remainder <= 0:
            return data
        kept = state.remainder
        return data[:kept] if use_gather_object else recursively_apply(lambda x: x[:kept], data)

    # The backward pass.

    @contextlib.contextmanager
    def dividing(self, part: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """Inside, gradients are of `part(loss)`: they are summed over ranks, and a loss is a mean over them."""
        self._part, self.passes = part, 0
        try:
            yield
        finally:
            self._part = None

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """The gradients of a loss, or inside of `dividing` of this rank's part of it."""
        if self._part is not None:
            self.passes += 1
            loss = self._part(loss)
        super().backward(loss, **kwargs)

    # The model.

    def prepare_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """The model as it is: it is spread already."""
        if not any(known is model for known in self._models):
            self._models.append(model)
        return model

    def clip_grad_norm_(
        self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2
    ) -> Tensor | None:
        """The norm of the whole gradient, before it is clipped to `max_norm`."""
        return clip_to_norm(self.spread.handle, max_norm, norm_type)
