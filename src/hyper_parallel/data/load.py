"""The data of a run: packed text, or rows of the model's processor where documents have images or sound."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from hyper_parallel.config.data import BUILTIN, DataConfig, TokenizerConfig
from hyper_parallel.data import chat
from hyper_parallel.data import tokenizer as tokenizers
from hyper_parallel.data.corpus import Corpus, corpora
from hyper_parallel.data.document import Chat, Document, is_held_out
from hyper_parallel.data.media import NAMES
from hyper_parallel.data.multimodal import DataSources, MultimodalData
from hyper_parallel.data.order import Order
from hyper_parallel.data.packing import PackedText
from hyper_parallel.data.processor import has_processor
from hyper_parallel.data.read_documents import documents
from hyper_parallel.data.sources import Declared, Source, digests, find
from hyper_parallel.data.tokenizer import Tokenizer
from hyper_parallel.errors import ConfigError, DataError

log = logging.getLogger(__name__)


class TextData:
    """Tokenized and packed text; the same in every process that reads the same files.

    Results are cached in `data.cache` under a digest of their inputs. Of concurrent processes one builds and the
    others wait. Nothing depends on the rank: every rank holds the same rows.
    """

    tokenizer: Tokenizer
    train: PackedText
    eval: PackedText
    """Held-out rows; of length 0 if nothing is held out."""
    order: Order
    """The order of the rows of `train`."""
    stops: tuple[int, ...]
    """The ids with which texts and answers end, the end-of-text token first."""
    conversations: bool
    """Whether any document to train on is a conversation."""
    identity: dict[str, Any]
    """Digest of everything that determines the rows, except the tokenizer: runs with equal digests have the same rows.
    """

    media = False

    def __init__(
        self,
        config: DataConfig,
        *,
        seed: int = 0,
        positions: int | None = None,
        model: str | None = None,
        no_media: str = "the model takes text alone",
    ) -> None:
        """`seed` determines the order of the rows. `positions`: the model's maximum, if limited. `model`: the folder of
        the loaded weights, with their tokenizer. `no_media`: why images cannot be trained on.

        Raises ConfigError for a sequence longer than `positions`, and DataError for text that is missing, not in the
        declared format, or too short.
        """
        check_positions(config, positions)
        cache = Path(config.cache).expanduser()
        sources = find(config.train, config.format, "train")
        found = digests(sources)
        key = found.reading
        holdout = config.holdout if config.eval is None else 0.0
        self.tokenizer = choose_tokenizer(
            config.tokenizer, model, lambda: _trained(config, sources, key, holdout, cache)
        )
        train, held_out = corpora(
            cache, key, lambda: _text_alone(documents(sources, "train"), no_media), self.tokenizer, holdout
        )
        if config.eval is not None:
            others = find(config.eval, config.format, "eval")
            read = lambda: _text_alone(documents(others, "eval"), no_media)  # noqa: E731
            of_eval = digests(others)
            held_out, _ = corpora(cache, f"eval-{of_eval.reading}", read, self.tokenizer, 0.0)
            _check(held_out, config.eval, "eval")
        _check(train, config.train, "train")
        self.stops = tuple(dict.fromkeys((self.tokenizer.eos, *train.ends)))
        self.conversations = train.conversations
        self._shown = held_out if held_out.documents else train
        pack = config.pack is not False
        self.train = PackedText(train, config.sequence, pad=self.tokenizer.pad, pack=pack)
        self.eval = PackedText(held_out, config.sequence, pad=self.tokenizer.pad, pack=pack)
        if pack and self.train.tokens < config.sequence:
            raise DataError(
                f"data.train has {self.train.tokens} tokens, but one sequence needs {config.sequence}; "
                "give more text, lower data.sequence, or set data.pack to false"
            )
        for name, rows in (("train", self.train), ("eval", self.eval)):
            if not len(rows) and rows.documents:
                raise DataError(
                    f"data.{name}: no document is longer than one token, so that nothing is predicted"
                )
        if holdout and not self.eval.documents:
            log.info("none of %d documents is held out at data.holdout %g", self.train.documents, holdout)
        self.order = Order(seed, len(self.train))
        self.identity = {
            "the digest of the text of data.train": found.content,
            "data.holdout": holdout,
            "data.sequence": config.sequence,
            "data.pack": pack,
            "the number of training sequences": len(self.train),
        }
        if config.eval is not None:
            self.identity["the digest of the text of data.eval"] = of_eval.content

    def prompt(self, given: str | None = None) -> list[int]:
        """The prompt ids of a sample: `given`, as a user's message if the text has conversations; by default the first
        held-out (or training) document up to its first answer.
        """
        if given is None and self._shown.loss is not None:
            end = int(self._shown.offsets[1])
            answers = self._shown.loss[:end].nonzero()[0]
            return [int(token) for token in self._shown.tokens[: int(answers[0]) if len(answers) else end]]
        if given is not None and self.conversations:
            question = Chat("train.sample.prompt", [{"role": "user", "content": given}])
            return self.tokenizer.encode_template([chat.prompt(self.tokenizer.transformers, question)])[0][0]
        return self.tokenizer.encode("def " if given is None else given)


def check_positions(config: DataConfig, positions: int | None) -> None:
    """Raise ConfigError for rows longer than the model's `positions`; None and XLNet's -1 are no limit."""
    if positions is not None and 0 < positions < config.sequence:
        raise ConfigError(
            f"data.sequence is {config.sequence}, but the model has {positions} positions; "
            "lower data.sequence or choose a model with more positions"
        )


def _text_alone(found: Iterator[Document], why: str) -> Iterator[Document]:
    """The documents. Raises DataError for one with media, and `why` they cannot be trained on."""
    for document in found:
        if document.media:
            raise DataError(f"{document.where}: {NAMES[document.media[0].kind]}, and {why}")
        yield document


def _trained(config: DataConfig, sources: list[Source], key: str, holdout: float, cache: Path) -> Tokenizer:
    def texts() -> Iterator[str]:
        # Held-out text is unseen by the tokenizer too, unless the share takes all that there is (see
        # `corpora`).
        kept = False
        for document in documents(sources, "train"):
            if not is_held_out(document, holdout):
                kept = True
                yield document.content()
        if not kept:
            yield from (document.content() for document in documents(sources, "train"))

    size = sum(source.size() for source in sources)
    return tokenizers.trained(cache, f"{key}-{holdout!r}", texts(), size, config.tokenizer.trained_size)


def _check(corpus: Corpus, declared: Declared, key: str) -> None:
    if not corpus.documents:
        names = ", ".join(map(str, declared)) if isinstance(declared, list) else str(declared)
        raise DataError(f"data.{key}: there is no document with text in {names}")


TrainingData = TextData | MultimodalData


def load_data(
    config: DataConfig,
    *,
    seed: int = 0,
    positions: int | None = None,
    model: str | None = None,
    family: str = "the model",
    kinds: Collection[str] = (),
) -> TrainingData:
    """Load the data that the `data` section declares. `seed`, `positions` and `model` are as of `TextData`; `family`
    names the model, and `kinds` what it takes beside text: ``image``, ``audio``.

    Raises what `TextData` does, and DataError for media that the model does not take.
    """
    folder = _processor_folder(config, model)
    if folder is None or not kinds:
        why = _no_media(config, model, family, kinds)
        return TextData(config, seed=seed, positions=positions, model=model, no_media=why)
    train = DataSources.of(config, "train", family, kinds)
    held_out = None if config.eval is None else DataSources.of(config, "eval", family, kinds)
    if train.media is None and (held_out is None or held_out.media is None):
        return TextData(config, seed=seed, positions=positions, model=model)
    check_positions(config, positions)
    tokenizer = choose_tokenizer(config.tokenizer, model, _never)
    return MultimodalData(config, folder, tokenizer, seed=seed, train=train, held_out=held_out)


def _processor_folder(config: DataConfig, model: str | None) -> Path | None:
    named = [Path(path).expanduser() for path in (config.tokenizer.folder, model) if path is not None]
    return next((folder for folder in named if has_processor(folder)), None)


def _no_media(config: DataConfig, model: str | None, family: str, kinds: Collection[str]) -> str:
    """Why images or sound cannot be trained on."""
    if not kinds:
        return f"{family} takes text alone; train a model that takes them, or leave the record out"
    named = config.tokenizer.folder or model
    where = f"{named} has no processor" if named else "no folder with a processor is named"
    key = "" if named else "; name it with data.tokenizer.path"
    return (
        f"{where} (preprocessor_config.json or processor_config.json); AutoProcessor's save_pretrained writes its files"
        f"{key}"
    )


def _never() -> Tokenizer:
    raise ConfigError(
        "data.tokenizer: a processor of images or sound needs its own tokenizer, and none is trained for it; leave "
        "'replace' and 'vocab_size' out"
    )


# The tokenizer of a run.
#
# Token ids are meaningful only to weights that were trained with the same tokenizer. So loaded weights use their own
# tokenizer, and another one only if the run file sets `replace`.


def choose_tokenizer(
    tokenizer: TokenizerConfig, model: str | None, trained: Callable[[], Tokenizer]
) -> Tokenizer:
    """The tokenizer of a run: the named one, else that of the folder `model`, else `trained()`.

    Raises DataError if loaded weights get a tokenizer other than their own without `replace`.
    """
    if model is not None and tokenizer.path is None and not tokenizer.replace:
        chosen = tokenizers.load(model, "model.path")
    else:
        chosen = trained() if tokenizer.path is None else tokenizers.load(str(tokenizer.folder))
        own = None if model is None else Path(model).expanduser()
        if own is not None and not tokenizer.replace and (own / "tokenizer.json").is_file():
            _refuse_another(chosen, tokenizers.load(str(own), "model.path"))
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
        return chat.DEFAULT_TEMPLATE
    try:
        return Path(given).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise DataError(
            f"data.tokenizer.chat_template: cannot read {given}: {reason}; name a Jinja file, or {BUILTIN!r}"
        ) from error
