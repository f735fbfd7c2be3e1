"""`data` section: training and evaluation data."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from hyper_parallel.config.hub_data import DataPaths
from hyper_parallel.hub.hub_id import local_folder
from hyper_parallel.strategy.section import PathText, Section

PositiveInt = Annotated[int, Field(ge=1)]


BUILTIN = "builtin"
"""Names the chat template of `hyper_parallel.data`."""


class TokenizerConfig(Section):
    """The tokenizer. Default with `model.path`: that folder's own, with which its weights were trained; with
    `model.config`: one that is trained on the training text and cached.
    """

    path: PathText | None = None
    """A folder with `tokenizer.json` (and `tokenizer_config.json`), and for images or recordings a processor; or
    an id of the Hub, as in `model.path`."""
    vocab_size: PositiveInt | None = None
    """Size of the byte-level BPE vocabulary that is trained when no path is given; default: 8192."""
    chat_template: PathText | None = None
    """A Jinja file with the chat template for `messages`, used and exported in place of the tokenizer's own;
    `builtin` is a simple one (docs/data.md). Default: the tokenizer's own; for a tokenizer that is trained
    here, `builtin`.
    """
    replace: bool = False
    """With `model.path`: use the tokenizer named here although the loaded weights were trained with another
    one. The embedding's rows then stand for other tokens and must be learned anew.
    """

    @property
    def folder(self) -> str | None:
        """The folder of `path`, as ModelConfig's."""
        return local_folder(self.path)

    @property
    def trained_size(self) -> int:
        """Size of the vocabulary that is trained when no path is given."""
        return self.vocab_size or 8192


class DataConfig(Section):
    """Text, packed into sequences whose documents do not attend to each other."""

    train: DataPaths
    """Files, folders or globs to train on; `python-stdlib` is the standard library's own source text.
    A data set of the Hugging Face Hub is `hub:org/name`, or a mapping with its `path`, `name` and `split`; a text
    without `hub:` is always a path.
    """
    eval: DataPaths | None = None
    """Evaluation files. Default: the share `holdout` of the training documents is held out."""
    holdout: Annotated[float, Field(ge=0, lt=1)] = 0.02
    """Share of the training documents, chosen by their content's digest, that is held out for evaluation."""
    format: Literal["auto", "text", "jsonl", "datasets"] = "auto"
    """`text`: a file is a document. `jsonl`: a line is a document with `text`, `prompt` and `response`, or
    chat `messages` (only answers contribute to the loss), and images or recordings (docs/multimodal.md).
    `datasets`: a folder that `datasets.save_to_disk` wrote. `auto` decides by name and content.
    """
    tokenizer: TokenizerConfig = TokenizerConfig()
    """The tokenizer and its chat template."""
    sequence: PositiveInt = 512
    """Tokens per sequence; with images or recordings, the most that a document may have."""
    pack: bool | None = None
    """Put several documents into one sequence. False gives each document its own, padded. Default: true where the model
    keeps the documents of a sequence apart, which is checked before training; where it does not, false. Documents with
    images or recordings, and those beside them, always have their own."""
    balance: bool = True
    """Deal rows that are unlike (images, recordings) to data ranks and micro-batches so that those that are computed
    at once are as much work. Neither loss nor gradients change.
    """
    cache: PathText = ".cache/hyper-parallel"
    """The folder that caches the trained tokenizer and the tokenized text."""

    @model_validator(mode="after")
    def _something_to_read(self) -> DataConfig:
        if not self.train:
            raise ValueError("'train' names no files")
        return self
