"""What others do about weights beyond the device, on our tiers. Part of `generate_offload.py`.

A static batch is padded on the left to its longest prompt, and runs until its longest answer is there. A block is one
or several such batches that are computed one after the other in each module while its weights are there:

- next layer: blocks of one batch. A layer is read while the one before computes;
- zig-zag (FlexGen, Sheng et al. 2023, section 4): blocks of several batches.

Both have our split of the budget (`make_plan`: as many layers stay as there is room for), our measurement of what a
pass holds, our tiers and buffer, and a plain loop in place of `generate`. Keys and values stay on the device. The sizes
of batches and blocks are those with the fewest bytes to read, by an oracle of the answers' lengths.

Accelerate's `disk_offload` is the real one: it keeps nothing on the device, and maps a file for each weight.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from generation import Answers, Work, generated, padded
from torch import Tensor, nn
from transformers import DynamicCache, LlamaForCausalLM
from transformers.masking_utils import create_causal_mask

from hyper_parallel.compat import backend
from hyper_parallel.inference.memory_needs import StorageCounter
from hyper_parallel.inference.memory_plan import MemoryPlan, Sizes, make_plan
from hyper_parallel.inference.weights.stream import WeightStream
from hyper_parallel.inference.weights.tiers import ModelSource, WeightTiers, slot_bytes
from hyper_parallel.inference.weights.units import units_of
from hyper_parallel.offloading.open_tiers import open_tiers


class _Block(nn.Module):
    """A module that computes for all batches of a block while its weights are there."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, calls: Sequence[tuple[Tensor, dict[str, Any]]]) -> list[Tensor]:
        return [self.inner(x, **given) for x, given in calls]


class Batch:
    """A static batch under way."""

    def __init__(self, prompts: Sequence[Sequence[int]], config: Any) -> None:
        self.ids, self.mask = padded(prompts)
        self.cache = DynamicCache(config=config)
        self.answers: Answers = [[] for _ in prompts]

    def call(self, model: Any) -> tuple[Tensor, dict[str, Any]]:
        """What the first layer is given."""
        x = model.embed_tokens(self.ids)
        positions = (self.mask.cumsum(-1) - 1).clamp(min=0)[:, -self.ids.size(1) :]
        mask = create_causal_mask(
            config=model.config,
            inputs_embeds=x,
            attention_mask=self.mask,
            past_key_values=self.cache,
            position_ids=positions,
        )
        return x, {
            "attention_mask": mask,
            "position_embeddings": model.rotary_emb(x, position_ids=positions),
            "position_ids": positions,
            "past_key_values": self.cache,
            "use_cache": True,
        }

    def take(self, logits: Tensor) -> None:
        """Add the most likely tokens, of logits [B, 1, V]."""
        self.ids = logits[:, -1].argmax(-1, keepdim=True)
        self.mask = torch.cat([self.mask, torch.ones_like(self.ids)], 1)
        for answer, token in zip(self.answers, self.ids[:, 0].tolist(), strict=True):
            answer.append(token)


class BlockLlama(LlamaForCausalLM):  # type: ignore[misc]
    """A Llama whose passes serve a block of batches."""

    @classmethod
    def of(cls, model: Any) -> BlockLlama:
        """With copies of a Llama's weights."""
        made: BlockLlama = copy.deepcopy(model)
        made.__class__ = cls
        made._no_split_modules = {_Block.__name__}
        made.model.layers = nn.ModuleList(map(_Block, made.model.layers))
        return made

    def forward(self, block: Sequence[Batch]) -> list[Tensor]:
        """The logits [B, 1, V] of the next token of each batch."""
        calls = [batch.call(self.model) for batch in block]
        for layer in self.model.layers:
            found = layer(calls)
            calls = [(x, given) for x, (_, given) in zip(found, calls, strict=True)]
        newest = torch.cat([x[:, -1:] for x, _ in calls])
        return list(self.lm_head(self.model.norm(newest)).split([len(batch.answers) for batch in block]))


class StaticBatches:
    """Static batches within a budget, with weights in tiers. `close` it."""

    def __init__(
        self,
        model: Any,
        work: Work,
        budget: int,
        sizes_of_batches: Sequence[int],
        batches_of_blocks: Sequence[int],
        **tiers: Any,
    ) -> None:
        """The numbers that are tried. `tiers`: `host`, bytes, or `flash`, a folder."""
        self.model, self.work = BlockLlama.of(model), work
        with torch.no_grad():
            self.held = {
                (size, count): self._held(size, count)
                for size in sizes_of_batches
                for count in batches_of_blocks
                if size <= len(work.prompts) and size * count < len(work.prompts) + size
            }
        self._tiers, units = open_tiers(backend(), **tiers), units_of(self.model)
        stored = WeightTiers(units, self._tiers, {name: tier.capacity for name, tier in self._tiers.items()})
        buffer, source = torch.empty(max(map(slot_bytes, units)), dtype=torch.uint8), ModelSource(self.model)
        for unit in units:
            stored.write(unit, buffer, source.fill)
            source.stored(unit)
        self.stream = WeightStream(self.model, units, stored, torch.device("cpu"))
        sizes = Sizes(tuple(unit.size for unit in units), self.stream.fixed, 0)
        plans: dict[tuple[int, int], MemoryPlan] = {}
        for (size, count), bytes_ in self.held.items():
            if plan := make_plan(sizes, budget, requests=size * count, pages=0, workspace=bytes_):
                plans[size, count] = plan
        self.size, self.count = min(plans, key=lambda key: (self._passes(*key) * plans[key].read, key[1]))
        self.plan = plan = plans[self.size, self.count]
        self.passes = self._passes(self.size, self.count)
        self.stream.place(
            [units[at] for at in plan.resident], [units[at] for at in plan.gathered], plan.buffer
        )

    def __call__(self) -> Answers:
        found = []
        with torch.no_grad():
            for places in self._blocks(self.size, self.count):
                prompts = ([self.work.prompts[at] for at in batch] for batch in places)
                block = [Batch(one, self.model.config) for one in prompts]
                for _ in range(self._longest(places)):
                    for batch, logits in zip(block, self.model(block), strict=True):
                        batch.take(logits)
                found += [answer for batch in block for answer in batch.answers]
        return [answer[:length] for answer, length in zip(found, self.work.lengths, strict=True)]

    def close(self) -> None:
        """End, and close the tiers."""
        self.stream.close(restore=False)
        for tier in self._tiers.values():
            tier.close()

    def _blocks(self, size: int, count: int) -> Iterator[list[range]]:
        total = len(self.work.prompts)
        for first in range(0, total, size * count):
            last = min(first + size * count, total)
            yield [range(at, min(at + size, last)) for at in range(first, last, size)]

    def _passes(self, size: int, count: int) -> int:
        return sum(map(self._longest, self._blocks(size, count)))

    def _longest(self, places: Sequence[range]) -> int:
        return max(self.work.lengths[at] for batch in places for at in batch)

    def _held(self, size: int, count: int) -> int:
        """Bytes that a block holds beside weights: measured in its first pass and in its last one."""
        longest = max(self.work.prompts, key=len)
        counter = StorageCounter(torch.device("cpu"), [*self.model.parameters(), *self.model.buffers()])
        with counter:
            block = [Batch([longest] * size, self.model.config) for _ in range(count)]
            for batch, logits in zip(block, self.model(block), strict=True):
                batch.take(logits)
            more = self.work.longest - len(longest) - 2
            for batch in block:
                for place, layer in enumerate(batch.cache.layers):
                    shape = (*layer.keys.shape[:2], more, layer.keys.shape[3])
                    batch.cache.update(torch.zeros(shape), torch.zeros(shape), place)
                batch.mask = torch.cat([batch.mask, batch.mask.new_ones(size, more)], 1)
            self.model(block)
        return counter.peak


class AccelerateDisk:
    """`accelerate.disk_offload` under `generate`, with static batches of the size with the fewest passes that fits
    beside one layer. Files leave the system's cache after each pass."""

    def __init__(self, model: Any, work: Work, budget: int, folder: Path, held: Mapping[int, int]) -> None:
        """`held`: what static batches hold beside weights, by their size."""
        import accelerate

        self.work = work
        self.model = copy.deepcopy(model)
        most = budget - max(one.nbytes for one in model.parameters())
        self.size = max(size for size, bytes_ in held.items() if bytes_ <= most)
        accelerate.disk_offload(self.model, str(folder), execution_device=torch.device("cpu"))
        self.model.register_forward_hook(lambda *_: uncached(folder))
        firsts = range(0, len(work.prompts), self.size)
        self.passes = sum(max(work.lengths[first : first + self.size]) for first in firsts)

    def __call__(self) -> Answers:
        return generated(self.model, self.work, self.size)


def uncached(folder: Path) -> None:
    """Take the files of a folder out of the system's cache."""
    for path in folder.iterdir():
        if path.is_file():
            number = os.open(path, os.O_RDONLY)
            try:
                os.fsync(number)
                os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(number)
