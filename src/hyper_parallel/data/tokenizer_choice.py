"""Tokenizer selection for a run.

Token ids are meaningful only to weights that were trained with the same tokenizer. So loaded weights use their own
tokenizer, and another one only if the run file sets `replace`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from hyper_parallel.config.data import BUILTIN, TokenizerConfig
from hyper_parallel.data.chat import DEFAULT_TEMPLATE
from hyper_parallel.errors import DataError

if TYPE_CHECKING:
    from hyper_parallel.data.tokenizer import Tokenizer


def absent(folder: Path, key: str) -> str:
    """Error text for a folder that the run file names under `key` and that has no tokenizer."""
    if not folder.exists():
        return f"{key}: {folder} does not exist; name a folder with tokenizer.json"
    if key == "model.path":
        return (
            f"model.path: {folder} has no tokenizer.json, and its weights know the ids of one tokenizer only; put the "
            "files of that tokenizer there (AutoTokenizer's save_pretrained writes them), or name their folder with "
            "data.tokenizer.path"
        )
    return f"{key}: {folder} holds no tokenizer.json; name a folder that does, or leave the path out"


def choose(tokenizer: TokenizerConfig, model: str | None, trained: Callable[[], Tokenizer]) -> Tokenizer:
    """The tokenizer of a run: the named one, else that of the folder `model`, else `trained()`.

    Raises DataError if loaded weights get a tokenizer other than their own without `replace`.
    """
    # Here, since the command line looks for mistakes before it imports what this needs.
    from hyper_parallel.data.tokenizer import load

    if model is not None and tokenizer.path is None and not tokenizer.replace:
        chosen = load(model, "model.path")
    else:
        chosen = trained() if tokenizer.path is None else load(str(tokenizer.folder))
        own = None if model is None else Path(model).expanduser()
        if own is not None and not tokenizer.replace and (own / "tokenizer.json").is_file():
            _refuse_another(chosen, load(str(own), "model.path"))
    if tokenizer.chat_template is not None:
        chosen.transformers.chat_template = _template(tokenizer.chat_template)
        chosen.folder = None
    return chosen


def _refuse_another(chosen: Tokenizer, own: Tokenizer) -> None:
    """Raises unless both give every text the same ids; chat templates may differ."""
    if chosen.ids_of_texts == own.ids_of_texts:
        return
    theirs, ours = own.transformers.get_vocab(), chosen.transformers.get_vocab()
    moved = sum(ours.get(token) != number for token, number in theirs.items())
    raise DataError(
        f"data.tokenizer.path: {chosen.folder} is not the tokenizer that the weights of {own.folder} were trained with "
        f"({moved} of its {len(theirs)} tokens are absent or have other ids); leave it out to use the model's own, or "
        "set data.tokenizer.replace to true to train the embedding anew"
    )


def _template(given: str) -> str:
    if given == BUILTIN:
        return DEFAULT_TEMPLATE
    try:
        return Path(given).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise DataError(
            f"data.tokenizer.chat_template: cannot read {given}: {reason}; name a Jinja file, or {BUILTIN!r}"
        ) from error
