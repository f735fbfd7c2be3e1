"""An engine for whoever can do without: None where it refuses the model."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist
from torch import nn

from hyper_parallel.config.inference import Inference
from hyper_parallel.errors import UnsupportedModelError
from hyper_parallel.inference.engine import Engine
from hyper_parallel.inference.model_support import check_model, prove

log = logging.getLogger(__name__)


def offered_engine(model: nn.Module, what: str, eos: frozenset[int]) -> Engine | None:
    """An engine, proved on the model; None where it refuses the model on any rank. A collective of all ranks.

    `what`: is done without the engine then, for the log.
    """
    found: Engine | None = None
    try:
        config = check_model(model)
        found = Engine(model, Inference().page, layers=int(config.num_hidden_layers), eos=eos)
        prove(found, config)
    except UnsupportedModelError as error:
        log.info("%s without the inference engine: %s", what, error)
        found = None
    refused = torch.tensor(float(found is None), device=next(model.parameters()).device)
    if dist.is_initialized():
        dist.all_reduce(refused)
    return None if refused.item() else found
