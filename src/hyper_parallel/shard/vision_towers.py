"""Vision towers: parts of a model that a micro-batch without images leaves out.

FSDP2 reduces the gradients that there are, and ranks must agree on which these are: where one rank's rows have an
image and another's have none, they would wait for each other. So every weight of a tower has a gradient in every
micro-batch: of zero where the tower did not run, and where it did, of zero for weights that it does not compute with,
such as layers behind the one whose features are used.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hyper_parallel.shard.hooks import Forward, Wrapper, wrap
from hyper_parallel.shard.rules import decoder_of, input_embedding, is_transformers


def apply_towers(model: nn.Module) -> None:
    """Give gradients, if only of zero, to all that stands beside a Transformers model's decoder.

    Applied before the parameters' access, so that it finds in the modules what they compute with.
    """
    if not is_transformers(model):
        return
    towers = list(towers_of(model))
    if towers:
        wrap(model, _completing(towers))


def towers_of(model: nn.Module) -> Iterator[nn.Module]:
    """The largest modules with weights that hold no part of the language model: not the decoder, embedding or head."""
    core: Any = model
    language = {
        id(part)
        for root in (
            model.get_submodule(decoder_of(model)),
            input_embedding(model),
            core.get_output_embeddings(),
        )
        if root is not None
        for part in root.modules()
    }

    def outside(module: nn.Module) -> Iterator[nn.Module]:
        if id(module) in language:
            return
        if not any(id(part) in language for part in module.modules()):
            if next(module.parameters(), None) is not None:
                yield module
            return
        for child in module.children():
            yield from outside(child)

    yield from outside(model)


def _completing(towers: list[nn.Module]) -> Wrapper:
    def wrapper(forward: Forward, *args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        if not torch.is_grad_enabled():
            return output
        return _with_zero(output, sum(_zero(tower) for tower in towers))

    return wrapper


def _zero(tower: nn.Module) -> Tensor:
    """0, with a gradient of zeros to every weight of the tower."""
    weights = [weight for weight in _weights(tower) if weight.requires_grad]
    return sum((weight.flatten()[:1].float() * 0).sum() for weight in weights)  # type: ignore[return-value]


def _weights(tower: nn.Module) -> Iterator[Tensor]:
    for module in tower.modules():
        for weight in module._parameters.values():
            if weight is not None:
                yield weight


def _with_zero(output: Any, zero: Any) -> Any:
    if not isinstance(zero, Tensor):
        return output
    if isinstance(output, Tensor):
        return output + zero.to(output.dtype)
    for name in ("loss", "logits"):
        found = getattr(output, name, None)
        if found is not None:
            output[name] = found + zero.to(found.dtype)
            break
    return output
