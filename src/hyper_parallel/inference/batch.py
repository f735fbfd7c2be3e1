"""Batch generation: prompts from JSON lines, answers to JSON lines, with a progress line."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from hyper_parallel.config.inference import Inference
from hyper_parallel.data.document import template_options
from hyper_parallel.errors import DataError, FaultError, HyperParallelError, nearest
from hyper_parallel.inference.generator import Generator
from hyper_parallel.inference.load_model import identity, located
from hyper_parallel.inference.request import Completion, Request, is_text
from hyper_parallel.strategy.memory import GenerationMemory
from hyper_parallel.untrusted_files import open_regular, parse_json

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
        """The requests that are missing. Raises DataError with the line of a prompt that the model cannot read."""
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
    model: Path,
    source: Path,
    out: Path,
    settings: Inference,
    memory: GenerationMemory | None = None,
    device: str = "auto",
) -> None:
    """Answer what is missing, in this process. Raises what `Batch` and `Generator` do, and FaultError if the disk is
    full."""
    batch = Batch(model, source, out, settings)
    unused: Sequence[str] = ()
    if batch.missing:
        with Generator(model, memory=memory, device=device, **settings.model_dump()) as generator:
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


# Prompts from JSON lines, and answers to JSON lines that an interrupted batch goes on from.
#
# Each answer is a line as soon as it is ready: the prompt's row with `text`, `tokens` and `finish`, its place in the
# input (`row`, `sample`) and a digest of what it answers. A second run of the same command reads these lines, leaves
# out what they answer, and writes the file in the order of the input when all is there.

_LONGEST = 64 * 2**20
_WRITTEN = frozenset({"text", "tokens", "finish", "logprobs", "row", "sample", "digest"})
"""Keys of an answer."""


@dataclass(frozen=True)
class Row:
    """A line of the input."""

    line: int
    content: dict[str, Any]

    options: dict[str, Any] = field(default_factory=dict)
    """What the chat template gets beside messages."""

    @property
    def prompt(self) -> Any:
        """Text, or messages."""
        return self.content["prompt"] if "prompt" in self.content else self.content["messages"]

    @property
    def query(self) -> Any:
        """All of it that decides the prompt's tokens."""
        return [self.prompt, self.options] if self.options else self.prompt


def read_prompts(path: Path) -> list[Row]:
    """The rows of a file of JSON lines; empty lines are left out.

    Raises DataError with the file and line for one that is no object with `prompt` or `messages`.
    """
    rows = []
    try:
        with open_regular(path) as file:
            lines = file.read().splitlines()
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            rows.append(_row(f"{path}, line {number}", number, line))
    if not rows:
        raise DataError(f'{path}: no prompts; write one a line, as in {{"prompt": "def add(a, b):"}}')
    return rows


def prompt_of(prompt: str | None, chat: str | None) -> str | list[dict[str, str]]:
    """The prompt of one of two options of the command line: a text to continue, or the messages of a conversation."""
    if prompt is not None:
        return prompt
    assert chat is not None, "one of the two is given"
    return [{"role": "user", "content": chat}]


def _row(where: str, number: int, line: bytes) -> Row:
    if len(line) > _LONGEST:
        raise DataError(f"{where}: longer than {_LONGEST} bytes")
    try:
        content = parse_json(line)
    except ValueError as error:
        raise DataError(f"{where}: {error}") from None
    if not isinstance(content, dict):
        raise DataError(
            f'{where}: must be an object such as {{"prompt": "..."}}; got {type(content).__name__}'
        )
    if not is_text(json.dumps(content, ensure_ascii=False)):
        raise DataError(f"{where}: has half of a character (a lone surrogate)")
    if taken := [key for key in content if key in _WRITTEN]:
        raise DataError(f"{where}: has the key {taken[0]!r}, which its answer is written under; rename it")
    given = [key for key in ("prompt", "messages") if key in content]
    if len(given) != 1:
        hint = "".join(nearest(key, ("prompt", "messages")) for key in content)
        raise DataError(
            f"{where}: has {' and '.join(given) or 'neither prompt nor messages'}; give one of them{hint}"
        )
    if given == ["prompt"] and not isinstance(content["prompt"], str):
        raise DataError(f"{where}: prompt must be text; got {type(content['prompt']).__name__}")
    if given == ["messages"]:
        _check_messages(where, content["messages"])
    return Row(number, content, template_options(content, where) if given == ["messages"] else {})


def _check_messages(where: str, messages: Any) -> None:
    whole = isinstance(messages, list) and messages
    if not whole or not all(
        isinstance(one, dict) and isinstance(one.get("role"), str) and isinstance(one.get("content"), str)
        for one in messages
    ):
        raise DataError(f'{where}: messages must be a list of {{"role": "user", "content": "..."}}')


class AnswerFile:
    """The output file of a batch. `n`: answers to each row; `settings`: all that decides tokens beside the prompt."""

    def __init__(self, path: Path, rows: Sequence[Row], n: int, settings: Mapping[str, Any]) -> None:
        """Read what an earlier run wrote. Raises DataError for answers to other prompts or with other settings."""
        self.path, self._rows, self._n = path, rows, n
        self._digests = [_digest(row.query, settings) for row in rows]
        self._lines: dict[tuple[int, int], str] = {}
        if path.exists():
            self._read()

    @property
    def missing(self) -> list[tuple[int, int]]:
        """Row and sample of the answers that are still to be found, in the order of the input."""
        return [
            (row, sample)
            for row in range(len(self._rows))
            for sample in range(self._n)
            if (row, sample) not in self._lines
        ]

    @contextmanager
    def writing(self) -> Iterator[TextIO]:
        """The file, open for `add`. At the end, if no answer is missing, it is put in the order of the input.

        Raises FaultError if the disk is full or fails; lines that were written stay.
        """
        try:
            # What was torn off by the end of an earlier run goes.
            self._write(self._lines.values())
            with open(self.path, "a", encoding="utf-8") as file:
                yield file
            if not self.missing:
                self._write(self._lines[place] for place in sorted(self._lines))
        except OSError as error:
            raise FaultError(
                f"{self.path}: cannot be written: {error.strerror}; finished answers are kept"
            ) from None

    def add(self, file: TextIO, place: tuple[int, int], answer: Completion) -> None:
        """Write an answer."""
        row, sample = place
        found = {
            **self._rows[row].content,
            "text": answer.text,
            "tokens": answer.tokens,
            "finish": answer.finish,
        }
        if answer.logprobs is not None:
            found["logprobs"] = answer.logprobs
        found |= {"row": row, "sample": sample, "digest": self._digests[row]}
        self._lines[place] = json.dumps(found, ensure_ascii=False)
        file.write(self._lines[place] + "\n")
        file.flush()

    def _write(self, lines: Any) -> None:
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            with open(temporary, "w", encoding="utf-8") as file:
                file.writelines(line + "\n" for line in lines)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.path)
        finally:
            temporary.unlink(missing_ok=True)

    def _read(self) -> None:
        try:
            with open_regular(self.path) as file:
                lines = file.read().split(b"\n")
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read: {error.strerror}") from None
        for number, line in enumerate(lines, 1):
            if not line:
                continue
            place = self._place(line)
            if place is None and number == len(lines):
                continue  # torn off when the run was killed
            if place is None:
                raise DataError(
                    f"{self.path}, line {number}: is no answer to these prompts with this model and these settings; "
                    "give another --out, or remove the file"
                )
            self._lines[place] = line.decode()

    def _place(self, line: bytes) -> tuple[int, int] | None:
        try:
            found = parse_json(line)
            row, sample = found["row"], found["sample"]
            same = found["digest"] == self._digests[row]
        except (ValueError, KeyError, IndexError, TypeError):
            return None
        return (row, sample) if same and row >= 0 and 0 <= sample < self._n else None


def _digest(prompt: Any, settings: Mapping[str, Any]) -> str:
    text = json.dumps([prompt, settings], sort_keys=True)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
