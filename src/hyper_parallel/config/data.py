"""`data` section: training and evaluation data, files or data sets of the Hugging Face Hub."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from hyper_parallel.errors import ConfigError
from hyper_parallel.hub.hub_id import PREFIX, HubId, local_folder, parse_explicit
from hyper_parallel.strategy.section import PathText, PositiveInt, Section


class HubData(Section):
    """A data set of the Hub, read with the library datasets; its rows are as those of JSON lines."""

    path: PathText
    """Its id: `org/name` or `org/name@revision`."""
    name: str | None = None
    """The subset, of a data set that has several."""
    split: str | None = None
    """The split. Default: `train`, and for `data.eval` `validation`, `eval` or `test`; or the only one."""

    @model_validator(mode="after")
    def _is_an_id(self) -> HubData:
        try:
            _ = self.hub_id
        except ConfigError as error:
            raise ValueError(str(error)) from None
        if (
            self.split is not None
            and not self.split.replace("_", "").replace("-", "").replace(".", "").isalnum()
        ):
            raise ValueError(
                f"'split' ({self.split}) must be the name of one split; a part of one is not taken"
            )
        return self

    @classmethod
    def _hint(cls, key: str, known: set[str]) -> str:
        if key == "revision":
            return "unknown key; write the revision behind the id, as path: org/name@revision"
        return super()._hint(key, known)

    @property
    def hub_id(self) -> HubId:
        """The repository and its revision."""
        text = self.path if self.path.startswith(PREFIX) else PREFIX + self.path
        found = parse_explicit(text, "path")
        assert found is not None
        return found


def _kind(given: Any) -> str:
    return "section" if isinstance(given, Mapping | HubData) else "text"


def _kind_or_list(given: Any) -> str:
    return "list" if isinstance(given, list | tuple) else _kind(given)


# The kind of what is written says which is meant, so that a mistake is explained once.
DataPaths = Annotated[
    Annotated[PathText, Tag("text")]
    | Annotated[HubData, Tag("section")]
    | Annotated[
        list[
            Annotated[
                Annotated[PathText, Tag("text")] | Annotated[HubData, Tag("section")], Discriminator(_kind)
            ]
        ],
        Tag("list"),
    ],
    Discriminator(_kind_or_list),
]
"""A path, ``hub:org/name``, the section of a data set, or a list of them."""


def as_hub(entry: str | HubData, key: str) -> HubData | None:
    """The data set that an entry means: ``hub:org/name``, or the section; None for a path.

    Raises ConfigError for ``hub:`` before something else than an id.
    """
    if isinstance(entry, HubData):
        return entry
    found = parse_explicit(entry, key)
    return None if found is None else HubData(path=str(found))


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


def no_tokenizer(folder: Path, key: str) -> str:
    """Return the error text for a folder that the run file names under `key` and that has no tokenizer."""
    if not folder.exists():
        return f"{key}: {folder} does not exist; name a folder with tokenizer.json"
    if key == "model.path":
        return (
            f"model.path: {folder} has no tokenizer.json, and its weights know the ids of one tokenizer only; put the "
            "files of that tokenizer there (AutoTokenizer's save_pretrained writes them), or name their folder with "
            "data.tokenizer.path"
        )
    return f"{key}: {folder} holds no tokenizer.json; name a folder that does, or leave the path out"


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
