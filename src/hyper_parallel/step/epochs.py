"""Steps of a run that is declared in epochs: passes over the training data.

    steps = ⌈epochs · sequences / batch⌉

The order of rows has every row once per epoch and crosses from one epoch into the next within a batch, so that only the
last step may go beyond the last epoch, by less than a batch.
"""

from __future__ import annotations

import math

from hyper_parallel.config import RunConfig
from hyper_parallel.data.load import TrainingData
from hyper_parallel.errors import ConfigError


def with_steps(config: RunConfig, text: TrainingData) -> RunConfig:
    """The run with `train.steps` computed from `train.epochs`; the run itself where it is declared in steps.

    Raises ConfigError where the warm-up is longer than that.
    """
    train = config.train
    epochs = train.epochs
    if epochs is None:
        return config
    # What a product of decimals rounds up by is no step.
    steps = max(1, math.ceil(epochs * text.order.length / train.batch - 1e-9))
    train = train.model_copy(update={"steps": steps})
    try:
        train.check_warmup()
    except ValueError as error:
        raise ConfigError(f"train: {epochs_line(epochs, text.order.length, steps)}, and {error}") from None
    return config.model_copy(update={"train": train})


def epochs_line(epochs: float, sequences: int, steps: int) -> str:
    """``3 epochs of 412 sequences: 155 steps``."""
    counts = (epochs, "epoch"), (sequences, "sequence"), (steps, "step")
    passes, rows, updates = (f"{count:,.10g} {word}{'' if count == 1 else 's'}" for count, word in counts)
    return f"{passes} of {rows}: {updates}"
