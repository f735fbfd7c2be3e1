"""Batch generation: the prompts of a file, answered into a file, with a progress line."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hyper_parallel.config.inference import Inference
from hyper_parallel.errors import DataError, HyperParallelError
from hyper_parallel.inference.generator import Generator
from hyper_parallel.inference.prompt_file import AnswerFile, Row

_SECONDS = 2.0
"""Between progress lines."""


def run_batch(
    model: Path,
    rows: Sequence[Row],
    answers: AnswerFile,
    settings: Inference,
    show: Callable[[str, bool], None],
) -> None:
    """Answer what is missing. `show` is given a progress line, and whether it is the last.

    Raises DataError with the line of a prompt that the model cannot read, before anything is generated.
    """
    generator = Generator(model, **settings.model_dump())
    ids: dict[int, list[int]] = {}
    requests = []
    for row, sample in answers.missing:
        try:
            if row not in ids:
                ids[row] = generator.ids_of(rows[row].prompt)
            requests.append(generator.request(ids[row], settings, row, sample))
        except HyperParallelError as error:
            raise DataError(f"line {rows[row].line} of the prompts: {error}") from None
    places, tokens, begun, shown = answers.missing, 0, time.monotonic(), 0.0
    with answers.writing() as file:
        for count, (place, answer) in enumerate(generator.run(requests), 1):
            answers.add(file, places[place], answer)
            tokens += len(answer.tokens)
            now = time.monotonic()
            if now - shown >= _SECONDS or count == len(requests):
                shown = now
                rate = tokens / max(now - begun, 1e-9)
                told = f"{count} of {len(requests)} answers, {tokens} tokens, {rate:.0f} tokens/s"
                if generator.shared:
                    told += f", {generator.shared} tokens of prompts shared"
                show(told, count == len(requests))
