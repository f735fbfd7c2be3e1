"""Rows with stated numbers of images and recordings, for a model that no data are known for.

Images are grey squares and recordings silence; the model's own processor makes of them what the model takes. Numbers
are drawn evenly from their range, and text fills each row up to the length.
"""

from __future__ import annotations

import json
import random
import wave
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyper_parallel.config import RunConfig, from_dict
from hyper_parallel.data import MultimodalData, load_data
from hyper_parallel.data.media import MARKS
from hyper_parallel.data.processor import has_processor
from hyper_parallel.errors import ConfigError
from hyper_parallel.estimate.submodel_costs import STEPS
from hyper_parallel.step.build import transformers_config
from hyper_parallel.step.multimodal import media_kinds, model_class

_WORD = " a"
_LONGEST = 2**20
"""Tokens that a row of a probe may have."""
_MARGIN = 8
"""Tokens that a row may lack to the length."""


@dataclass(frozen=True)
class StatedRows:
    """What rows have."""

    batch: int
    """Rows of a step."""
    sequence: int
    """Tokens of a row."""
    images: tuple[int, int]
    recordings: tuple[int, int]
    """The least and the most of a row."""
    size: int
    """Pixels of the side of an image."""
    seconds: float
    """Of a recording."""

    def __str__(self) -> str:
        counts = {"images": self.images, "recordings": self.recordings}
        said = [f"{a} {n}" if a == b else f"{a}..{b} {n}" for n, (a, b) in counts.items() if b]
        return f"{' and '.join(said)} a row, {self.batch} rows of {self.sequence:,} tokens"


def stated_run(model: Path, stated: StatedRows, folder: Path) -> RunConfig:
    """A run of the model on rows that are written to `folder`.

    Raises ConfigError for a folder without a processor, media that the model does not take, and rows that are too long.
    """
    if not (model / "config.json").is_file():
        raise ConfigError(
            f"--model {model}: has no config.json; give a Transformers folder with its processor"
        )
    if not has_processor(model):
        raise ConfigError(
            f"--model {model}: has no processor (preprocessor_config.json or processor_config.json), which makes "
            "images and sound what the model takes; AutoProcessor's save_pretrained writes it, or give a run file with "
            "its rows"
        )
    config: dict[str, Any] = {
        "version": 1,
        "out": "runs/planned",
        "model": {"path": str(model)},
        "data": {
            "train": str(folder / "rows.jsonl"),
            "holdout": 0,
            "sequence": stated.sequence,
            "cache": str(folder / "cache"),
        },
        "train": {"batch": stated.batch, "steps": 1000, "sample": False},
    }
    run = from_dict(config)
    _check_kinds(run, model, stated)
    named = {"image": _image(folder, stated.size), "audio": _recording(folder, stated.seconds, model)}
    counts = _drawn(stated)
    filler = _filler(run, folder, named, stated)
    _write(folder, named, counts, [filler(*one) for one in counts])
    return run


def _check_kinds(run: RunConfig, model: Path, stated: StatedRows) -> None:
    kinds = media_kinds(model_class(transformers_config(run.model)))
    for kind, option, (_, most) in (
        ("image", "--images", stated.images),
        ("audio", "--recordings", stated.recordings),
    ):
        if most and kind not in kinds:
            takes = " and ".join(sorted(kinds)) or "text alone"
            raise ConfigError(
                f"{option}: the model of {model} takes {takes}; leave it out, or name another model"
            )


def _drawn(stated: StatedRows) -> list[tuple[int, int]]:
    draw = random.Random(0)
    count = stated.batch * STEPS
    return [(draw.randint(*stated.images), draw.randint(*stated.recordings)) for _ in range(count)]


def _filler(run: RunConfig, folder: Path, named: dict[str, str], stated: StatedRows) -> Any:
    """(images, recordings) to the words that fill a row of so many. Raises ConfigError where none is left."""
    probes = [(0, 0, 0), (0, 0, 64), (1, 0, 0), (0, 1, 0)]
    taken = [
        one for one in probes if (not one[0] or stated.images[1]) and (not one[1] or stated.recordings[1])
    ]
    # A row with media, so that the processor is asked; it is not counted.
    _write(folder, named, [one[:2] for one in taken], [one[2] for one in taken])
    tokens = dict(zip(taken, (cost.tokens for cost in _costs(run, len(taken))), strict=True))
    base = tokens[0, 0, 0]
    word = (tokens[0, 0, 64] - base) / 64
    each = [tokens.get(one, base) - base for one in ((1, 0, 0), (0, 1, 0))]

    def words(images: int, recordings: int) -> int:
        left = stated.sequence - base - _MARGIN - images * each[0] - recordings * each[1]
        if left < 0:
            raise ConfigError(
                f"--sequence {stated.sequence}: {images} images of {each[0]} tokens and {recordings} recordings of "
                f"{each[1]} do not fit; raise --sequence, or state fewer or smaller media"
            )
        return int(left / word)

    return words


def _costs(run: RunConfig, count: int) -> list[Any]:
    hf = transformers_config(run.model)
    found = load_data(
        run.data.model_copy(update={"sequence": _LONGEST}),
        model=run.model.folder,
        family=hf.model_type,
        kinds=media_kinds(model_class(hf)),
    )
    assert isinstance(found, MultimodalData)
    return [found.train.cost(row) for row in range(count)]


def _write(
    folder: Path, named: dict[str, str], counts: Sequence[tuple[int, int]], words: Sequence[int]
) -> None:
    lines = []
    for (images, recordings), count in zip(counts, words, strict=True):
        text = MARKS["image"] * images + MARKS["audio"] * recordings + "a" + _WORD * count
        record: dict[str, Any] = {"text": text}
        if images:
            record["images"] = [named["image"]] * images
        if recordings:
            record["audios"] = [named["audio"]] * recordings
        lines.append(json.dumps(record) + "\n")
    (folder / "rows.jsonl").write_text("".join(lines))


def _image(folder: Path, size: int) -> str:
    from PIL import Image

    Image.new("RGB", (size, size), (127, 127, 127)).save(folder / "image.png")
    return "image.png"


def _recording(folder: Path, seconds: float, model: Path) -> str:
    file = model / "preprocessor_config.json"
    rate = json.loads(file.read_text()).get("sampling_rate", 16000) if file.is_file() else 16000
    with wave.open(str(folder / "recording.wav"), "wb") as made:
        made.setnchannels(1)
        made.setsampwidth(2)
        made.setframerate(rate)
        made.writeframes(bytes(2 * int(rate * seconds)))
    return "recording.wav"
