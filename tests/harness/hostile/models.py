"""Forged and damaged folders of models: configs, indexes and weights.

A folder of a small Llama is written; each case changes a copy of it, which a run file then names as `model.path`.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from harness.hostile.replaced import replace
from hyper_parallel.data.tokenizer import trained

Case = Callable[[Path], object]
CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def pristine(folder: Path) -> Path:
    """A folder as `save_pretrained` writes it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=320,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    with tempfile.TemporaryDirectory() as cache:
        trained(Path(cache), "some", ["some text"], 9, 300).save(folder)
    return folder


def field(name: str, value: Any) -> Case:
    """A value in ``config.json``."""

    def case(folder: Path) -> None:
        body = json.loads((folder / CONFIG).read_text())
        body[name] = value
        (folder / CONFIG).write_text(json.dumps(body))

    return case


def holds(name: str, content: bytes | str | Any) -> Case:
    """A file of this content, as JSON unless it is bytes."""
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    return lambda folder: (folder / name).write_bytes(data)


def index(content: Any) -> Case:
    """An index of this content beside the weights."""
    return holds(INDEX, content)


def header(change: Callable[[dict[str, Any]], Any]) -> Case:
    """Other words at the head of the weights."""

    def case(folder: Path) -> None:
        data = (folder / WEIGHTS).read_bytes()
        size = int.from_bytes(data[:8], "little")
        body = json.loads(data[8 : 8 + size])
        other = change(body)
        text = json.dumps(body if other is None else other).encode()
        (folder / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])

    return case


def tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Case:
    """Other weights, written by the library."""

    def case(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        found = load_file(folder / WEIGHTS)
        change(found)
        save_file({name: tensor.contiguous() for name, tensor in found.items()}, folder / WEIGHTS)

    return case


def entry(key: str, value: Any) -> Case:
    """A value in what the head says of the first tensor."""
    return header(lambda body: next(v for k, v in body.items() if k != "__metadata__").update({key: value}))


def replaced(name: str, how: str) -> Case:
    """Another kind of thing in a file's place."""
    return lambda folder: replace(folder, name, how)


def _size(value: int) -> Case:
    def case(folder: Path) -> None:
        data = (folder / WEIGHTS).read_bytes()
        (folder / WEIGHTS).write_bytes(value.to_bytes(8, "little") + data[8:])

    return case


def _wants_code(folder: Path) -> None:
    field("model_type", "evil")(folder)
    field("auto_map", {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"})(folder)
    (folder / "evil.py").write_text("open('../canary/x', 'w')")


def _shape(body: dict[str, torch.Tensor]) -> None:
    body["model.norm.weight"] = torch.zeros(17)


FIELDS: dict[str, tuple[Any, ...]] = {
    "hidden_size": ("16", -16, 0, 2**40, 16.5, None, [16], {}, True, 17),
    "num_hidden_layers": ("1", -1, 10**9, None, [1], 1.5),
    "num_attention_heads": (0, -2, "x", None, 10**12, [2]),
    "num_key_value_heads": (0, -1, "x", 3),
    "vocab_size": (0, -1, "x", None, 2**50, [320], 5),
    "intermediate_size": (-1, "x", None, 2**33),
    "max_position_embeddings": ("x", -5, [], 2**62),
    "hidden_act": ("no such", 3, None, [], "__import__('os').system('x')"),
    "rms_norm_eps": ("x", None, [], float("nan")),
    "rope_theta": ("x", 0, None, -1),
    "rope_parameters": ("x", [], {"rope_type": "no such"}, {"rope_type": 3}, {"rope_type": "yarn"}),
    "model_type": ("no such", 3, None, [], "../../x", "", "bert\n"),
    "tie_word_embeddings": ("x", None, 3, []),
    "torch_dtype": ("no such", 3, [], "load"),
    "dtype": ("no such", "nn", [], {"x": "y"}),
    "architectures": ("x", 3, [3], ["../x"]),
    "pad_token_id": ("x", -7, 10**9, [1]),
    "eos_token_id": ("x", {}, [["x"]]),
    "attention_dropout": ("x", 5, -1, None),
    "attention_bias": ("x", [], 3),
    "layer_types": ("x", ["no such"], [3], ["full_attention"] * 10**5),
    "transformers_version": (3, [], "x"),
    "quantization_config": ("x", {"quant_method": "no such"}, {"quant_method": "bitsandbytes"}, []),
    "auto_map": (
        {"AutoConfig": "evil.Config"},
        "x",
        {"AutoConfig": "a--b.C", "AutoModelForCausalLM": "a--b.C"},
    ),
}

CASES: dict[str, Case] = {
    "a config that is a list": holds(CONFIG, [1, 2]),
    "a config that is a number": holds(CONFIG, 3),
    "a config that is null": holds(CONFIG, None),
    "a config without anything": holds(CONFIG, {}),
    "a config that is no JSON": holds(CONFIG, b"{"),
    "a config of bytes": holds(CONFIG, b"\xff\xfe\x00"),
    "a config of a million brackets": holds(CONFIG, b"[" * 10**6),
    "a config of many digits": holds(CONFIG, b'{"model_type": "llama", "hidden_size": ' + b"9" * 5000 + b"}"),
    "a config of a hundred levels": field("x", json.loads("[" * 100 + "]" * 100)),
    "a config that wants code, of a family that is none": _wants_code,
    "an index that is null": index(None),
    "an index that is a list": index([]),
    "an index without a map": index({}),
    "an index whose map is null": index({"weight_map": None}),
    "an index whose map is a list": index({"weight_map": []}),
    "an index whose map is empty": index({"weight_map": {}}),
    "an index of numbers": index({"weight_map": {"model.norm.weight": 3}}),
    "an index that leads up": index({"weight_map": {"model.norm.weight": "../../etc/passwd"}}),
    "an index with an absolute path": index({"weight_map": {"model.norm.weight": "/etc/passwd"}}),
    "an index with a null byte": index({"weight_map": {"model.norm.weight": "a\0b"}}),
    "an index of a file that is not there": index(
        {"weight_map": {"model.embed_tokens.weight": "x.safetensors"}}
    ),
    "an index of this folder": index({"weight_map": {"model.embed_tokens.weight": "."}}),
    "an index of the config": index({"weight_map": {"model.embed_tokens.weight": CONFIG}}),
    "an index that is no JSON": holds(INDEX, b"{"),
    "an index of a million brackets": holds(INDEX, b"{" * 10**6),
    "a head larger than the file": _size(2**40),
    "a head of the largest number": _size(2**64 - 1),
    "a head of no bytes": _size(0),
    "a head of ninety megabytes": _size(9 * 10**7),
    "a head that is a list": header(lambda body: [1]),
    "a head that is no JSON": holds(WEIGHTS, (16).to_bytes(8, "little") + b"{" * 16),
    "a head of many levels": holds(WEIGHTS, (10**5).to_bytes(8, "little") + b"[" * 10**5),
    "a shape below zero": entry("shape", [-320, 16]),
    "a shape of an exabyte": entry("shape", [2**40, 2**20]),
    "a shape of texts": entry("shape", ["320", 16]),
    "no shape": entry("shape", None),
    "an element type that is none": entry("dtype", "F33"),
    "an element type that is a number": entry("dtype", 3),
    "bytes beyond the file": entry("data_offsets", [0, 2**40]),
    "bytes that end before they begin": entry("data_offsets", [100, 0]),
    "bytes of others": entry("data_offsets", [64, 128]),
    "bytes that are texts": entry("data_offsets", ["0", "1"]),
    "no tensors": header(lambda body: {}),
    "metadata that is a number": header(lambda body: body.update({"__metadata__": 3})),
    "a tensor less": tensors(lambda found: found.pop("model.norm.weight")),
    "a tensor of another shape": tensors(_shape),
    "a tensor of whole numbers of a byte": tensors(
        lambda found: found.update({"model.norm.weight": torch.ones(16, dtype=torch.int8)})
    ),
    "a tensor of 8-bit floats": tensors(
        lambda found: found.update({"model.norm.weight": torch.ones(16).to(torch.float8_e4m3fn)})
    ),
    "a tensor of other dims": tensors(lambda found: found.update({"model.norm.weight": torch.ones(4, 4)})),
    **{f"{name}: {value!r:.40}": field(name, value) for name, values in FIELDS.items() for value in values},
    **{
        f"{name}: {how}": replaced(name, how)
        for name in (CONFIG, WEIGHTS, INDEX, "tokenizer.json")
        for how in ("pipe", "folder", "loop", "nowhere", "zeros", "cut", "empty", "sparse", "longer")
    },
    "a pipe beside the weights": replaced("generation_config.json", "pipe"),
}


def mutated(draw: random.Random) -> tuple[str, Case]:
    """Some bytes of a file exchanged."""
    name, count = draw.choice((CONFIG, WEIGHTS)), draw.choice((1, 3, 30))
    places, values = [draw.random() for _ in range(count)], draw.randbytes(count)

    def case(folder: Path) -> None:
        data = bytearray((folder / name).read_bytes())
        head = len(data) if name == CONFIG else 8 + int.from_bytes(data[:8], "little")
        for place, value in zip(places, values, strict=True):
            data[int(place * head)] = value
        (folder / name).write_bytes(data)

    return f"{name}: {count} bytes exchanged", case
