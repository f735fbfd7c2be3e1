"""The comparisons of one family with its owner, Transformers, each on one device: what `owner.py` runs.

A verdict is a dict: ``verdict`` (right, adapted, refused, wrong, traceback or no reference), ``error`` (the largest
difference over the largest element of what is right), and ``detail``, one line.
"""

from __future__ import annotations

import contextlib
import copy
import json
import multiprocessing
import re
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import yaml
from campaigns import one_line
from torch import Tensor, distributed, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

import hyper_parallel as hp
from hyper_parallel.checkpoint import Writer, export, newest
from hyper_parallel.compat.float64 import float64, widen
from hyper_parallel.config import from_dict
from hyper_parallel.config.train import LossConfig
from hyper_parallel.errors import HyperParallelError
from hyper_parallel.shard.loss import causal_lm_loss
from hyper_parallel.shard.loss.forward import logits_of
from hyper_parallel.train.checkpoint_state import model_shards
from hyper_parallel.verify.report import TOLERANCE
from hyper_parallel.verify.shrink import Fields, noisy_model, small_fields

Verdict = dict[str, Any]
Tensors = Mapping[str, Tensor]

ROWS, LENGTH = 2, 32
FIRST_ID = 8
"""Ids below it may have a meaning of their own, as padding has."""
LAST_ID = FIRST_ID + 94
"""Each id is a printable character of ASCII; every family's small vocabulary has more."""
ROUNDING = 1e-2
"""A larger error is no rounding."""
RANKS_S = 60
"""Two ranks that take longer hang."""
CHUNK = 24
"""Positions whose logits are computed at a time: the step has more."""


_FOLDER = re.compile(r"/tmp/\w+")
"""Of one run only."""


class NoReferenceError(Exception):
    """The owner itself does not compute this."""


def verdict(error: float, detail: str = "", limit: float = TOLERANCE["float32"]) -> Verdict:
    """Right where the error is within the limit."""
    if error <= limit:
        return {"verdict": "right", "error": float(f"{error:.2g}")}
    return {"verdict": "wrong", "error": float(f"{error:.2g}"), "detail": detail}


def judged(comparison: Callable[[], Verdict]) -> Verdict:
    """The verdict of a comparison, also where it raises, and the processor's seconds."""
    began = time.process_time()
    result = _judged(comparison)
    return {**result, "seconds": round(time.process_time() - began, 1)}


def _judged(comparison: Callable[[], Verdict]) -> Verdict:
    try:
        return comparison()
    except HyperParallelError as refusal:
        return {"verdict": "refused", "detail": one_line(_FOLDER.sub("…", str(refusal)), 600)}
    except NoReferenceError as reason:
        return {"verdict": "no reference", "detail": one_line(reason)}
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        ours = [frame for frame in frames if "hyper_parallel" in frame.filename]
        place = (ours or frames)[-1]
        where = f"{Path(place.filename).name}:{place.lineno}"
        return {"verdict": "traceback", "detail": f"{where}: {type(error).__name__}: {one_line(error)}"}


@contextlib.contextmanager
def reference() -> Iterator[None]:
    """Inside, the owner computes."""
    try:
        yield
    except Exception as error:
        raise NoReferenceError(f"{type(error).__name__}: {one_line(error)}") from error


def difference(right: Tensors, got: Tensors) -> tuple[float, str]:
    """The largest error of a tensor over its largest element, which counts as 1e-4 of the norm of all at least; and
    the tensor's name. A tensor that one side lacks is zero there."""
    norm = float(sum(float(tensor.double().square().sum()) for tensor in right.values())) ** 0.5
    worst, where = 0.0, ""
    for name in {**right, **got}:
        a, b = right.get(name), got.get(name)
        present = a if a is not None else b
        assert present is not None
        a = torch.zeros_like(present) if a is None else a
        b = torch.zeros_like(present) if b is None else b
        if a.shape != b.shape:
            return float("inf"), f"{name} has the shape {[*b.shape]}, not {[*a.shape]}"
        if not a.numel():
            continue
        scale = max(float(a.double().abs().max()), 1e-4 * norm, 1e-30)
        error = float((a.double() - b.double()).abs().max()) / scale
        if not error <= worst:
            worst, where = error if error == error else float("inf"), name
    return worst, where


def without_cache(model: Any) -> Any:
    """A Transformers model whose forward keeps no keys and values, which some keep wrongly where they train."""
    model.config.use_cache = False
    return model


def draw_ids(rows: int = ROWS, length: int = LENGTH) -> Tensor:
    """int64 [rows, length] random ids."""
    return torch.randint(FIRST_ID, LAST_ID, (rows, length), generator=torch.Generator().manual_seed(0))


# Loss.


def loss(family: str) -> Verdict:
    """Our loss, its gradients and the buffers that it changes, beside those of the model's own forward with labels."""
    try:
        return _loss(small_fields(family, auxiliary=True))
    except NoReferenceError:
        if small_fields(family, auxiliary=True) == small_fields(family):
            raise
        return _loss(small_fields(family))


def _loss(fields: Fields) -> Verdict:
    model = noisy_model(fields)
    settings: Any = CHUNK
    try:
        result = _loss_verdict(model, settings)
    except HyperParallelError as refusal:
        if "train.loss.chunk: none" not in str(refusal):
            raise
        settings = "none"
        result = _loss_verdict(model, settings)
        if result["verdict"] == "right":
            result |= {"verdict": "adapted", "detail": "train.loss.chunk: none, as the refusal says"}
    if result["verdict"] == "wrong":
        again = _loss_verdict(model, settings, shifted=True)
        if again["verdict"] == "right":
            return {**again, "verdict": "adapted", "detail": "its labels are those of the next token"}
        # A loop of the user's own gets the loss that it asks for; a run may refuse to train on another one.
        with tempfile.TemporaryDirectory() as place:
            _trained(Path(place), {"config": fields}, _documents())
    return result


def _loss_verdict(model: nn.Module, chunk: Any, shifted: bool = False) -> Verdict:
    error, where = _loss_error(model, chunk, shifted)
    if TOLERANCE["float32"] < error < ROUNDING:
        exact, where = _loss_error(model, chunk, shifted, exactly=True)
        if exact <= TOLERANCE["float64"]:
            return {"verdict": "right", "error": float(f"{exact:.2g}")}
    return verdict(error, where)


def _loss_error(model: nn.Module, chunk: Any, shifted: bool, exactly: bool = False) -> tuple[float, str]:
    """The largest difference, and where it is. `shifted`: the owner is given the labels of the next token, which the
    decoders of encoder-decoders expect. `exactly`: in float64, where rounding is next to nothing."""
    theirs, ours = without_cache(copy.deepcopy(model)), copy.deepcopy(model)
    ids = draw_ids()
    labels = ids.roll(-1, 1)
    labels[:, -1] = -100
    with reference(), float64() if exactly else contextlib.nullcontext():
        if exactly:
            widen(theirs)
        right = theirs(input_ids=ids, labels=labels if shifted else ids).loss
        right.backward()
    with contextlib.ExitStack() as stack:
        if exactly:
            stack.enter_context(float64())
        hp.parallelize(ours, hp.Strategy())
        if exactly:
            widen(ours)
        stack.enter_context(hp.sharded(ours).micro_batch(seed=0, step=0, rows=torch.arange(ROWS)))
        positions = torch.arange(LENGTH).repeat(ROWS, 1)
        tokens = float((labels != -100).sum())
        got = causal_lm_loss(ours, ids, labels, positions, tokens=tokens, options=LossConfig(chunk=chunk))
        got.backward()
    losses = difference({"loss": right.detach()}, {"loss": got.detach()})
    if losses[0] > TOLERANCE["float64" if exactly else "float32"]:
        return losses[0], f"the loss is {float(got.detach()):.6g}, the owner's {float(right.detach()):.6g}"
    return max(
        losses,
        difference(_gradients(theirs), _gradients(ours)),
        difference(dict(theirs.named_buffers()), dict(ours.named_buffers())),
    )


def _gradients(model: nn.Module) -> Tensors:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


# Rows.


def rows(family: str) -> Verdict:
    """Logits of two rows together beside those of each alone."""
    return _rows(small_fields(family))


def longer_rows(family: str) -> Verdict:
    """The same where rotary factors follow the longest document of the batch (`dynamic`)."""
    fields = small_fields(family)
    config: Any = AutoConfig.for_model(**fields)
    rope = getattr(config, "rope_parameters", None)
    if not isinstance(rope, dict) or "rope_type" not in rope:
        raise NoReferenceError("its config has no rotary embedding of one kind for all layers")
    rope = {**rope, "rope_type": "dynamic", "factor": 2.0}
    if "partial_rotary_factor" in rope:  # a quarter of a small head is too little for the formula
        rope["partial_rotary_factor"] = 1.0
    return _rows({**fields, "rope_parameters": rope, "max_position_embeddings": LENGTH}, 3 * LENGTH // 2)


def _rows(fields: Fields, length: int = LENGTH) -> Verdict:
    ids = draw_ids(ROWS, length)
    # The first row is one document. The second holds two; where factors follow the longest, the first is long enough.
    long = LENGTH * 5 // 4 if length > LENGTH else LENGTH * 3 // 4
    positions = torch.stack([torch.arange(length), torch.arange(length) % long])
    with reference(), torch.no_grad():
        model = noisy_model(fields)
        # A model that has seen a long row keeps its factors for the next ones: each call has a model of its own.
        together = logits_of(copy.deepcopy(model), ids, positions)
        by_row = [(ids[i : i + 1], positions[i : i + 1]) for i in range(ROWS)]
        separate = torch.cat([logits_of(copy.deepcopy(model), *row) for row in by_row])
    error, _ = difference({"logits": separate}, {"logits": together})
    # Matrix products of another number of rows round in another order.
    if error <= 10 * TOLERANCE["float32"]:
        return {"verdict": "right", "error": float(f"{error:.2g}")}
    dealt = judged(lambda: _on_two_ranks(fields, ids, positions))
    detail = f"rows depend on each other ({error:.2g}); shard: 2: {dealt.get('detail', 'as one device')}"
    return {
        **dealt,
        "verdict": "adapted" if dealt["verdict"] == "right" else dealt["verdict"],
        "detail": detail,
    }


def _on_two_ranks(fields: Fields, ids: Tensor, positions: Tensor) -> Verdict:
    """What two data ranks compute with a row each, if they are not refused, beside one device with both: processes,
    since ranks that are simulated go without the checks before training."""
    labels = ids.roll(-1, 1)
    labels[positions.roll(-1, 1) == 0] = -100
    with reference():
        model = noisy_model(fields)
        logits = logits_of(model, ids, positions).float()
        right = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        right.backward()
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as place:
        rows = (fields, ids, labels, positions, f"file://{place}/store", sending)
        ranks = [context.Process(target=_rank, args=(rank, *rows), daemon=True) for rank in range(ROWS)]
        for process in ranks:
            process.start()
        try:
            if not receiving.poll(RANKS_S):
                return {"verdict": "traceback", "detail": f"two ranks took more than {RANKS_S} s"}
            got = receiving.recv()
        finally:
            for process in ranks:
                process.kill()
                process.join()
    if isinstance(got, Exception):
        raise got
    return verdict(*max(difference({"loss": right.detach()}, got[0]), difference(_gradients(model), got[1])))


def _rank(
    rank: int, fields: Fields, ids: Tensor, labels: Tensor, positions: Tensor, store: str, results: Connection
) -> None:
    """One data rank, with one row; the first tells the loss and the gradients of all, or what it raised."""
    try:
        distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=ROWS)
        model = noisy_model(fields)
        hp.parallelize(model, hp.Strategy(axes={"shard": ROWS}))
        handle, mine = hp.sharded(model), torch.tensor([rank])
        with handle.micro_batch(seed=0, step=0, rows=mine):
            tokens = float((labels != -100).sum())
            loss = causal_lm_loss(model, ids[mine], labels[mine], positions[mine], tokens=tokens)
            loss.backward()
        total = handle.all_reduce(loss.detach(), ("replicate", "shard"))
        gradients = {
            p.name: handle.gather(p.grad, p.layout) for p in handle.parameters() if p.grad is not None
        }
        if rank == 0:
            results.send(({"loss": total}, gradients))
    except Exception as error:
        if rank == 0:
            results.send(error if isinstance(error, HyperParallelError) else RuntimeError(one_line(error)))
    finally:
        results.close()
    time.sleep(RANKS_S)  # until it is ended: another rank may still need it


# Folders, and a run from one.


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
                noisy_model(small_fields(self._family)).eval().save_pretrained(self._folder)
                _tokenizer().save_pretrained(self._folder)
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
        documents = _documents()
        with reference():
            right = _loss_alone(owner, documents)
        got = _trained(self._place, {"path": str(self._folder)}, documents)
        result = verdict(
            abs(got - right) / right, f"the mean loss is {got:.6g}, of documents alone {right:.6g}"
        )
        chosen = yaml.safe_load((self._place / "out" / "run.yaml").read_text())["data"].get("pack", True)
        if result["verdict"] == "right" and chosen is False:
            result |= {"verdict": "adapted", "detail": "the run takes pack: false"}
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


def _trained(place: Path, model: Mapping[str, Any], documents: list[list[int]]) -> float:
    """Train a model of a run file for an epoch without changing it, in a folder; the mean loss of all tokens."""
    lines = [json.dumps({"text": "".join(map(_character, ids[:-1]))}) for ids in documents]
    (place / "text.jsonl").write_text("\n".join(lines) + "\n")
    data = {
        "train": [str(place / "text.jsonl")],
        "holdout": 0,
        "sequence": LENGTH,
        "cache": str(place / "cache"),
    }
    if "config" in model:
        _tokenizer().save_pretrained(place / "tokenizer")
        data["tokenizer"] = {"path": str(place / "tokenizer")}
    train = {
        "epochs": 1,
        "batch": 1,
        "engine": "eager",
        "sample": False,
        # The weights stay as they are.
        "optimizer": {"lr": 1e-12},
        "schedule": {"name": "constant"},
    }
    file = {"version": 1, "out": str(place / "out"), "model": dict(model), "data": data, "train": train}
    hp.Trainer(from_dict(file)).run()
    told = [json.loads(line) for line in (place / "out" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in told if "loss" in line]
    tokens = sum(step["loss_tokens"] for step in steps)
    return float(sum(step["loss"] * step["loss_tokens"] for step in steps) / tokens)


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


def _documents() -> list[list[int]]:
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


def comparisons(family: str) -> Iterator[tuple[str, Verdict]]:
    """(name, verdict) of each comparison of a family, as they are done."""
    yield "loss", judged(lambda: loss(family))
    yield "rows", judged(lambda: rows(family))
    yield "longer rows", judged(lambda: longer_rows(family))
    for name, comparison in from_folder(family):
        yield name, judged(comparison)
