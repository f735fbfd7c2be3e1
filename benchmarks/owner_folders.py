"""The comparisons of a folder that `save_pretrained` wrote: read by us, trained from, and exported again."""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from owner_verdicts import (
    FIRST_ID,
    LAST_ID,
    LENGTH,
    Verdict,
    difference,
    draw_ids,
    reference,
    verdict,
    without_cache,
)
from torch import Tensor
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

import hyper_parallel as hp
from harness.small_models import noisy_model, small_fields
from hyper_parallel.checkpoint import Writer, export, newest
from hyper_parallel.config import from_dict
from hyper_parallel.train.checkpoint_state import model_shards
from hyper_parallel.verify.report import TOLERANCE


def from_folder(family: str) -> Iterator[tuple[str, Callable[[], Verdict]]]:
    """The comparisons of a folder that `save_pretrained` wrote: read by us, trained from, and exported again."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        saved = _Saved(family, place)
        yield "folder", saved.loaded
        yield "packing", saved.packed
        yield "export", saved.exported


class _Saved:
    """A family's folder, and what Transformers reads from it; made by the first comparison that needs it."""

    def __init__(self, family: str, place: Path) -> None:
        self._family, self._place = family, place
        self._model: Any = None

    @property
    def _folder(self) -> Path:
        return self._place / "model"

    def _owner(self) -> Any:
        if self._model is None:
            with reference():
                save(noisy_model(small_fields(self._family)), self._folder)
                model = AutoModelForCausalLM.from_pretrained(self._folder, dtype=torch.float32)
                self._model = without_cache(model.eval())
        return self._model

    def _logits(self, model: Any) -> Tensor:
        with torch.no_grad():
            found: Tensor = without_cache(model.eval())(draw_ids()).logits
        return found

    def loaded(self) -> Verdict:
        """Logits of what `hp.load_weights` reads, beside those of `from_pretrained`."""
        owner = self._owner()
        with reference():
            right = self._logits(owner)
        with torch.device("meta"):
            config = AutoConfig.from_pretrained(self._folder)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        hp.parallelize(model, hp.Strategy())
        hp.load_weights(model, self._folder)
        error, _ = difference({"logits": right}, {"logits": self._logits(model)})
        return verdict(error, "logits of the folder that save_pretrained wrote")

    def packed(self) -> Verdict:
        """The mean loss of a run that trains on packed documents, beside that of each document alone."""
        owner = self._owner()
        documents = draw_documents()
        with reference():
            right = _loss_alone(owner, documents)
        got, rows = trained_loss(self._place, documents)
        result = verdict(
            abs(got - right) / right, f"the mean loss is {got:.6g}, of documents alone {right:.6g}"
        )
        if rows == len(documents) and result["verdict"] == "right":
            result |= {"verdict": "adapted", "detail": "the run gives each document its own row"}
        return result

    def exported(self) -> Verdict:
        """What `export` writes of a run's checkpoint: the names and values of `save_pretrained`, and its logits."""
        owner = self._owner()
        found = newest(self._place / "out" / "checkpoints")
        written = export(found.path if found else self._checkpoint(), self._place / "exported")
        right, got = _tensors(self._folder), _tensors(written)
        if right.keys() != got.keys():
            more, fewer = sorted(got.keys() - right.keys()), sorted(right.keys() - got.keys())
            return {
                "verdict": "wrong",
                "detail": f"names: {len(more)} of its own ({', '.join(more[:2])}), "
                f"{len(fewer)} missing ({', '.join(fewer[:2])})",
            }
        error, where = difference(right, got)
        if error > TOLERANCE["float32"]:
            return verdict(error, where)
        again, report = AutoModelForCausalLM.from_pretrained(
            written, dtype=torch.float32, output_loading_info=True
        )
        missing = sorted({*report["missing_keys"], *report["unexpected_keys"]})
        if missing:
            return {"verdict": "wrong", "detail": f"from_pretrained reports {', '.join(missing[:3])}"}
        error, _ = difference({"logits": self._logits(owner)}, {"logits": self._logits(again)})
        return verdict(error, "logits of from_pretrained")

    def _checkpoint(self) -> Path:
        """A checkpoint of the owner's values, where no run wrote one."""
        model = copy.deepcopy(self._owner())
        state = {"model_config": json.loads(model.config.to_json_string(use_diff=False))}
        hp.parallelize(model, hp.Strategy())
        with Writer(self._place / "checkpoints", 1, 0, background=False) as writer:
            writer.save(1, model_shards(hp.sharded(model)), state)
        return next((self._place / "checkpoints").glob("*1"))


def save(model: Any, folder: Path) -> None:
    """As Transformers does, with a tokenizer beside it."""
    model.eval().save_pretrained(folder)
    _tokenizer().save_pretrained(folder)


def trained_loss(place: Path, documents: list[list[int]]) -> tuple[float, int]:
    """Train the model of a folder, ``model`` in `place`, for an epoch without changing it; the mean loss of tokens,
    and the number of rows."""
    lines = [json.dumps({"text": "".join(map(_character, ids[:-1]))}) for ids in documents]
    (place / "text.jsonl").write_text("\n".join(lines) + "\n")
    data = {
        "train": [str(place / "text.jsonl")],
        "holdout": 0,
        "sequence": LENGTH,
        "cache": str(place / "cache"),
    }
    train = {
        "epochs": 1,
        "batch": 1,
        "engine": "eager",
        "sample": False,
        # The weights stay as they are.
        "optimizer": {"lr": 1e-12},
        "schedule": {"name": "constant"},
    }
    model = {"path": str(place / "model")}
    file = {"version": 1, "out": str(place / "out"), "model": model, "data": data, "train": train}
    hp.Trainer(from_dict(file)).run()
    told = [json.loads(line) for line in (place / "out" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in told if "loss" in line]
    tokens = sum(step["loss_tokens"] for step in steps)
    return sum(step["loss"] * step["loss_tokens"] for step in steps) / tokens, len(steps)


def _tensors(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def _tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE without merges: families that build one of their own class from its vocabulary get the same."""
    import tokenizers

    words = ["<unk>", "<end>", "<pad>", *(f"<{at}>" for at in range(3, FIRST_ID))]
    words += [_character(at) for at in range(FIRST_ID, LAST_ID)]
    core = tokenizers.Tokenizer(tokenizers.models.BPE({word: at for at, word in enumerate(words)}, []))
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>", pad_token="<pad>")


def _character(token: int) -> str:
    return chr(ord("!") + token - FIRST_ID)


def draw_documents() -> list[list[int]]:
    """Ids of twelve documents of different lengths, each with its end."""
    lengths = (3, 11, 6, 9, 4, 14, 7, 5, 10, 3, 8, 12)
    ids = draw_ids(1, sum(lengths))[0].split(lengths)
    return [[*document.tolist(), 1] for document in ids]


def _loss_alone(model: Any, documents: list[list[int]]) -> float:
    total = 0.0
    with torch.no_grad():
        for document in documents:
            ids = torch.tensor([document])
            logits = model(input_ids=ids).logits[0, :-1].float()
            total += float(functional.cross_entropy(logits, ids[0, 1:], reduction="sum"))
    return total / sum(len(document) - 1 for document in documents)
