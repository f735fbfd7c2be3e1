"""Batch generation: the prompts of a file, answered into a file, with a progress line."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hyper_parallel.config.inference import Inference
from hyper_parallel.errors import DataError, HyperParallelError
from hyper_parallel.inference.generator import Generator
from hyper_parallel.inference.load_model import identity, located
from hyper_parallel.inference.prompt_file import AnswerFile, read_prompts
from hyper_parallel.inference.request import Completion, Request
from hyper_parallel.strategy.generation_memory import GenerationMemory

_SECONDS = 2.0
"""Between progress lines."""

Deliver = Callable[[int, Completion, int], None]
"""Takes the place and the answer of a request, and the tokens of prompts that were shared until now."""


class Batch:
    """The files of a batch, and what of it is still to be generated."""

    def __init__(self, model: Path, source: Path, out: Path, settings: Inference) -> None:
        """Read the prompts, and the answers of an earlier run. Raises DataError for files that cannot be used, and
        CheckpointError for a folder that holds no model."""
        self.out, self._settings = out, settings
        self._rows = read_prompts(source)
        if not out.absolute().parent.is_dir():
            raise DataError(f"--out: {out.absolute().parent}: no such folder")
        if out.exists() and out.samefile(source):
            raise DataError(f"--out: {out} is the input; give another file")
        deciding = {
            **settings.sampling().model_dump(),
            "seed": settings.seed,
            "page": settings.page,
            **({} if settings.special_tokens_in_text else {"special_tokens_in_text": False}),
            "model": identity(located(model)),
        }
        if settings.kv_dtype is not None:  # otherwise as in files of versions that had no such key
            deciding["kv_dtype"] = settings.kv_dtype
        self._answers = AnswerFile(out, self._rows, settings.n, deciding)
        self._missing = self._answers.missing
        self.size = len(self._rows) * settings.n
        """Answers to all prompts."""
        self.missing = bool(self._missing)
        """Whether there is anything to do."""
        if len(self._missing) < self.size:
            say(
                f"{out}: {self.size - len(self._missing)} answers are there; going on with {len(self._missing)}"
            )

    def requests(self, generator: Generator) -> list[Request]:
        """What is missing. Raises DataError with the line of a prompt that the model cannot read."""
        ids: dict[int, list[int]] = {}
        found = []
        for row, sample in self._missing:
            try:
                if row not in ids:
                    ids[row] = generator.ids_of(
                        self._rows[row].prompt, self._rows[row].options, settings=self._settings
                    )
                found.append(generator.request(ids[row], self._settings, sample))
            except HyperParallelError as error:
                raise DataError(f"line {self._rows[row].line} of the prompts: {error}") from None
        return found

    @contextmanager
    def writing(self, moved: Callable[[], str] = str) -> Iterator[Deliver]:
        """The function that writes an answer, and shows progress. `moved`: says what went between memories."""
        tokens = count = 0
        begun, shown = time.monotonic(), 0.0

        def deliver(place: int, answer: Completion, shared: int) -> None:
            nonlocal tokens, count, shown
            self._answers.add(file, self._missing[place], answer)
            tokens += len(answer.tokens)
            count += 1
            now, last = time.monotonic(), count == len(self._missing)
            if now - shown >= _SECONDS or last:
                shown = now
                rate = tokens / max(now - begun, 1e-9)
                line = f"{count} of {len(self._missing)} answers, {tokens} tokens, {rate:.0f} tokens/s"
                if shared:
                    line += f", {shared} tokens of prompts shared"
                if found := moved():
                    line += f", {found}"
                _show(line, last)

        with self._answers.writing() as file:
            yield deliver

    def end(self, unused: Sequence[str] = ()) -> None:
        """Say that all is there, and which tiers were of no use."""
        for name in unused:
            say(
                f"strategy.memory.{name}: no byte was moved there; what these prompts need had room without it"
            )
        say(f"{self.out}: {self.size} answers")


def run_batch(
    model: Path, source: Path, out: Path, settings: Inference, memory: GenerationMemory | None = None
) -> None:
    """Answer what is missing, in this process. Raises what `Batch` and `Generator` do, and FaultError if the disk is
    full."""
    batch = Batch(model, source, out, settings)
    unused: Sequence[str] = ()
    if batch.missing:
        with Generator(model, memory=memory, **settings.model_dump()) as generator:
            requests = batch.requests(generator)
            with batch.writing(generator.moved) as deliver:
                for place, answer in generator.run(requests):
                    deliver(place, answer, generator.shared)
            unused = generator.unused_tiers
    batch.end(unused)


def say(line: str) -> None:
    """Write a line on standard error."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def _show(line: str, last: bool) -> None:
    """A progress line, written over on a terminal."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[K{line}" + ("\n" if last else ""))
        sys.stderr.flush()
    else:
        say(line)
