"""Encoders of images and sound beside a language model, which a micro-batch without media leaves out.

FSDP2 reduces the gradients that there are, and ranks must agree on which these are: where one rank's rows have an image
and another's have none, they would wait for each other. So every weight of a tower has a gradient in every micro-batch:
of zero where the tower did not run, and where it did, of zero for weights that it does not compute with, such as layers
behind the one whose features are used.

The order of the reductions must be one too. FSDP2 reduces a layer when autograd passes its inputs, and at the end of
the backward pass where these take no gradient: so would those of the first layer be reduced behind a frozen embedding
(adapters), on the ranks without an image alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hyper_parallel.shard.hooks import Forward, Wrapper, wrap
from hyper_parallel.shard.model_structure import decoder_of, input_embedding, is_transformers


def apply_towers(model: nn.Module) -> None:
    """Give gradients, if only of zero, to all that stands beside a Transformers model's decoder.

    Applied before the parameters' access, so that it finds in the modules what they compute with.
    """
    if not is_transformers(model):
        return
    towers = list(towers_of(model))
    if towers:
        wrap(model, _completing(towers))
        if (embedding := input_embedding(model)) is not None:
            wrap(embedding, _taking_gradients(towers))


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


def _taking_gradients(towers: list[nn.Module]) -> Wrapper:
    """Have what an embedding gives take a gradient, as the features of a trained tower do on ranks with an image."""

    def wrapper(forward: Forward, *args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        if not torch.is_grad_enabled() or not isinstance(output, Tensor) or output.requires_grad:
            return output
        if not any(weight.requires_grad for tower in towers for weight in tower.parameters()):
            return output
        # A copy: some models write the features into it, which autograd refuses for what begins its graph.
        return output.requires_grad_().clone()

    return wrapper


def _zero(tower: nn.Module) -> Tensor:
    """0, with a gradient of zeros to every weight of the tower."""
    weights = [weight for weight in tower.parameters() if weight.requires_grad]
    return sum((weight.flatten()[:1].float() * 0).sum() for weight in weights)  # type: ignore[return-value]


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
