"""Typical mistakes of a first hour: each ends with exit code 2 and one line that names the place and the mend.

Each row has what a person types (by default after ``train run.yaml``), what the line says, and, where the mend is
mechanical, what she types next, which is then accepted. The real command runs in this process.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from pydantic import BaseModel

from harness.chat_model import write_chats, write_model
from hyper_parallel.cli.main import main
from hyper_parallel.cli.preflight import check
from hyper_parallel.config import RunConfig, load, validation_errors
from hyper_parallel.config.generate import GenerateConfig
from hyper_parallel.config.schema import field_at

pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).parents[2]
RUN = """\
version: 1
out: runs/x
model:
  config: {model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4,
           num_key_value_heads: 2, max_position_embeddings: 64}
data: {train: text.txt, sequence: 32, tokenizer: {vocab_size: 300}}
train: {steps: 2, batch: 4}
"""
CHATS = """\
version: 1
out: runs/chats
model: {path: base}
data: {train: chats.jsonl, sequence: 48}
train: {steps: 2, batch: 4}
"""


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """One mistake: what is typed, a pattern of the one line, and what is typed next."""

    types: tuple[str, ...]
    says: str
    then: tuple[str, ...] | None = None
    """Accepted overrides of the same file; for a file of another text, see `text`."""
    text: str | None = None
    """The run file, where the mistake is in it."""
    mended: str | None = None
    """The run file without the mistake."""
    extra: dict[str, str] | None = None
    """Environment variables."""


def key(typed: str, says: str, then: str | None = None) -> Mistake:
    """A wrong override of a run file."""
    return Mistake(types=("train", "run.yaml", typed), says=says, then=None if then is None else (then,))


def file(text: str, says: str, mended: str | None = None) -> Mistake:
    """A wrong run file."""
    return Mistake(types=("train", "wrong.yaml"), says=says, text=text, mended=mended)


def line(*typed: str, says: str) -> Mistake:
    """A wrong command line."""
    return Mistake(types=typed, says=says)


def chats(says: str, **changed: str) -> Mistake:
    """A run on conversations with other data or another model folder."""
    text = CHATS
    for what, value in changed.items():
        text = text.replace({"data": "chats.jsonl", "model": "base"}[what], value)
    return Mistake(types=("train", "wrong.yaml"), says=says, text=text, mended=CHATS)


def swap(old: str, new: str) -> str:
    assert old in RUN
    return RUN.replace(old, new)


MISTAKES = {
    # Keys
    "a misspelt key": key(
        "train.stpes=3", r"train\.stpes: unknown key; did you mean 'steps'\?", "train.steps=3"
    ),
    "a misspelt section": file(
        swap("model:", "mdoel:"), r"wrong\.yaml: mdoel: unknown key; did you mean 'model'\?", RUN
    ),
    "a key of another section": key(
        "train.lr=1e-3", r"train\.lr: unknown key; write train\.optimizer\.lr", "train.optimizer.lr=1e-3"
    ),
    "a key without its section": key("lr=1e-3", r"write train\.optimizer\.lr", "train.optimizer.lr=1e-3"),
    "tp": key(
        "strategy.axes.tp=2", r"axes\.tp: unknown key; write strategy\.axes\.tensor", "strategy.axes.tensor=2"
    ),
    "dp": key("strategy.axes.dp=2", r"write strategy\.axes\.replicate .*shard", "strategy.axes.replicate=2"),
    "fsdp": key("strategy.axes.fsdp=2", r"write strategy\.axes\.shard", "strategy.axes.shard=2"),
    "pp": key("strategy.axes.pp=2", r"write strategy\.axes\.pipeline", "strategy.axes.pipeline=2"),
    "zero": key(
        "strategy.zero=3", r"write strategy\.memory\.shard .*ZeRO-3", "strategy.memory.shard=parameters"
    ),
    "tensor_parallel": key(
        "strategy.tensor_parallel=2", r"write strategy\.axes\.tensor", "strategy.axes.tensor=2"
    ),
    "data parallel by name": key(
        "strategy=ddp", r"write strategy\.axes\.replicate", "strategy.axes.replicate=2"
    ),
    "learning_rate": key(
        "train.learning_rate=1e-4", r"write train\.optimizer\.lr", "train.optimizer.lr=1e-4"
    ),
    "gradient_accumulation_steps": key(
        "train.gradient_accumulation_steps=2",
        r"write train\.micro_batch .*accumulation",
        "train.micro_batch=2",
    ),
    "per_device_train_batch_size": key(
        "train.per_device_train_batch_size=1", r"write train\.micro_batch", "train.micro_batch=1"
    ),
    "num_train_epochs": key("train.num_train_epochs=3", r"write (train\.)?(epochs|steps)"),
    "bf16": key(
        "train.bf16=true",
        r"write strategy\.precision\.compute .*bfloat16",
        "strategy.precision.compute=bfloat16",
    ),
    "lora": key("lora={rank: 8}", r"write (train\.lora|model\.adapter)"),
    "max_seq_length": key("data.max_seq_length=32", r"write data\.sequence", "data.sequence=32"),
    "gradient_checkpointing": key(
        "train.gradient_checkpointing=true",
        r"write strategy\.memory\.recompute .*layer",
        "strategy.memory.recompute=layer",
    ),
    "output_dir": key("output_dir=here", r"output_dir: unknown key; write out", "out=here"),
    "warmup_steps": key("train.warmup_steps=1", r"write train\.schedule\.warmup", "train.schedule.warmup=1"),
    # Values
    "text for a number": key(
        "train.steps=five", r"train\.steps: must be a whole number \(got 'five'\)", "train.steps=5"
    ),
    "a fraction of a step": key(
        "train.steps=2.5", r"train\.steps: must be a whole number \(got 2\.5\)", "train.steps=2"
    ),
    "a number with a unit": key(
        "data.sequence=2k", r"data\.sequence: .*got '2k'; write 2000 or 2048, in digits"
    ),
    "a negative rate": key(
        "train.optimizer.lr=-1", r"optimizer\.lr: must be greater than 0 \(got -1\)", "train.optimizer.lr=1"
    ),
    "no batch": key("train.batch=0", r"train\.batch: must be at least 1 \(got 0\)", "train.batch=1"),
    "bf16 as a value": key(
        "strategy.precision.compute=bf16",
        r"got 'bf16'; write bfloat16",
        "strategy.precision.compute=bfloat16",
    ),
    "a name for a section": key(
        "train.optimizer=muon",
        r"train\.optimizer: must be a section.*write \{name: muon\}",
        "train.optimizer={name: muon}",
    ),
    "a dtype for a section": key(
        "strategy.precision=bf16", r"write \{compute: bfloat16\}", "strategy.precision={compute: bfloat16}"
    ),
    "a path for a section": key("model=base", r"model: must be a section.*write \{path: base\}"),
    "an unknown schedule": key(
        "train.schedule.name=cosin", r"schedule\.name: .*did you mean 'cosine'", "train.schedule.name=cosine"
    ),
    "gpu": key("launch.device=gpu", r"launch\.device: .*got 'gpu'; write cuda"),
    "one name for a list": key(
        "trackers=tensorboard", r"trackers: must be a list .*write \[tensorboard\]", "trackers=[tensorboard]"
    ),
    "bytes without a unit": key(
        "strategy.memory.device=10 gigs", r"memory\.device: '10 gigs' is no number of bytes; write 10GiB"
    ),
    "a budget without a tier": key(
        "strategy.memory.device=1GiB",
        r"needs a place to go; set host or pool .*or flash",
        "strategy.memory={device: 1GiB, host: 1GiB}",
    ),
    # YAML
    "a tab": file(
        swap("train: {steps: 2, batch: 4}", "train:\n\tsteps: 2"),
        r"wrong\.yaml:8: .*tab stands there: indent with spaces",
        swap("train: {steps: 2, batch: 4}", "train:\n  steps: 2"),
    ),
    "no colon": file(swap("out: runs/x", "out runs/x"), r"line 2 has no colon: write 'key: value'", RUN),
    "a key twice": file(
        RUN + "train: {steps: 3}\n", r"'train' stands twice, on lines 7 and 8; remove one", RUN
    ),
    "indented too deep": file(
        "version: 1\nout: x\ntrain:\n  steps: 5\n   batch: 3\n",
        r"wrong\.yaml:5: .*keys of one section begin in the same column",
    ),
    "no comma": file(
        swap("steps: 2, batch", "steps: 2 batch"),
        r"wrong\.yaml:7: .*a comma is missing between two keys",
        RUN,
    ),
    "no space after a colon": file(
        swap("{steps: 2,", "{steps:2,"), r"a space belongs after the colon: 'steps: 2'", RUN
    ),
    "a bracket that stays open": file(
        swap("batch: 4}", "batch: 4"), r"a bracket that opens on line 7 is not closed", RUN
    ),
    "a quote that stays open": file(
        swap("text.txt", '"text.txt'), r"a quote that opens on line 6 is not closed", RUN
    ),
    "no version": file(swap("version: 1\n", ""), r"version: is missing; add the line 'version: 1'", RUN),
    "an empty file": file("", r"the file is empty; start from examples/quickstart\.yaml", RUN),
    # Axes
    "workers that are not the product": key(
        "launch.workers=3",
        r"axes multiply to 1 .*'launch\.workers' is 3; make them equal",
        "launch.workers=1",
    ),
    "a batch that does not divide": key(
        "strategy.axes.shard=3",
        r"'train\.batch' \(4\) must be a multiple of replicate · shard \(3\)",
        "strategy.axes.shard=2",
    ),
    "heads that do not divide": key(
        "strategy.axes.tensor=3",
        r"4 attention heads cannot be split over axes\.tensor = 3; use a divisor",
        "strategy.axes.tensor=4",
    ),
    "a sequence that does not divide": key(
        "strategy.axes.context=3", r"data\.sequence: rows of 32 .*use a multiple of 6"
    ),
    "more stages than micro-batches": key(
        "strategy.axes.pipeline=8", r"a pipeline of 8 needs at least 8; make .*batch"
    ),
    "experts without ranks": key(
        "strategy.axes.expert=2", r"expert is 2, which does not divide shard · context · tensor = 1"
    ),
    "an axis of no degree": key(
        "strategy.axes.shard=-1", r"axes\.shard: must be at least 1 \(got -1\)", "strategy.axes.shard=auto"
    ),
    # Command lines
    "no equals sign": line(
        "train",
        "run.yaml",
        "train.steps",
        "5",
        says=r"override train\.steps: write key=value, here train\.steps=5",
    ),
    "a colon for an equals sign": key(
        "train.steps:5", r"write key=value, here train\.steps=5", "train.steps=5"
    ),
    "dashes before a key": line(
        "train", "run.yaml", "--train.steps=5", says=r"keys are set without dashes: train\.steps=5"
    ),
    "one dash before a key": line(
        "train", "run.yaml", "-train.steps=5", says=r"keys are set without dashes: train\.steps=5"
    ),
    "another trainer's option": line(
        "train", "run.yaml", "--learning_rate", "1e-4", says=r"without dashes: train\.optimizer\.lr=1e-4"
    ),
    "braces without a space": key(
        "strategy.axes={shard:2}", r"a space belongs after the colon: 'shard: 2'", "strategy.axes={shard: 2}"
    ),
    "braces that a shell took apart": key(
        "strategy.axes={shard: 2", r"override strategy\.axes=\{shard: 2: not valid YAML"
    ),
    "a misspelt command": line("trian", "run.yaml", says=r"no command 'trian'; did you mean 'train'\?"),
    "another program's command": line(
        "finetune", "run.yaml", says=r"no command 'finetune'; did you mean 'train'\?"
    ),
    "no command": line("run.yaml", says=r"hyper-parallel train run\.yaml"),
    "a misspelt option": line(
        "train", "--hlep", says=r"no such option '?--hlep'?; did you mean '?--help'?\?"
    ),
    "no file": line(
        "train", says=r"hyper-parallel train: missing argument 'FILE'; see hyper-parallel train --help"
    ),
    "generate without a prompt": line(
        "generate", "base", says=r"give --prompt, --chat or --input, one of them"
    ),
    "max_new_tokens": line(
        "generate",
        "base",
        "--prompt",
        "x",
        "--max-new-tokens",
        "5",
        says=r"without dashes: inference\.max_tokens=5",
    ),
    # Files
    "a file that is not there": line("train", "none.yaml", says=r"none\.yaml: no such file"),
    "a model's folder for a file": line(
        "train", "base", says=r"it is a model: name it in a run file as model: \{path: base\}"
    ),
    "a model's config for a file": line(
        "train",
        "base/config.json",
        says=r"config of a Transformers model; write a run file that names its folder",
    ),
    "JSON lines for a file": line(
        "train", "chats.jsonl", says=r"JSON lines are data: name the file as data\.train"
    ),
    "a file of rl": line(
        "train", "rl.yaml", says=r"a file of reinforcement learning .*run: hyper-parallel rl rl\.yaml"
    ),
    "a file of train": line(
        "rl", "run.yaml", says=r"a run file of `train` .*run: hyper-parallel train run\.yaml"
    ),
    "data that is not there": key(
        "data.train=texd.txt",
        r"'texd\.txt' does not exist; did you mean 'text\.txt'\?",
        "data.train=text.txt",
    ),
    "data without text": key("data.train=empty.txt", r"'empty\.txt' holds no text"),
    "a table": key(
        "data.train=table.csv",
        r"table\.csv is a table.*write each as a line of JSON.*or set data\.format to text",
    ),
    "binary data": key("data.train=picture.png", r"picture\.png is not UTF-8 text .*convert it"),
    "a broken line": chats(
        r"broken\.jsonl, line 2: broken JSON.*each line must be one whole JSON object", data="broken.jsonl"
    ),
    "ShareGPT's keys": chats(
        r"sharegpt\.jsonl, line 1: .*rename it to 'messages'.*'from' and 'value' are 'role' and 'content'",
        data="sharegpt.jsonl",
    ),
    "Alpaca's keys": chats(
        r"alpaca\.jsonl, line 1: .*write the question as 'prompt' and the answer as 'response'",
        data="alpaca.jsonl",
    ),
    "weights of another format": chats(r"pytorch_model\.bin is not read.*save_pretrained", model="bin"),
    "no weights": chats(r"neither model\.safetensors nor .*copy the whole folder", model="bare"),
    "a pointer of Git LFS": chats(r"pointer of Git LFS; run git lfs pull there", model="lfs"),
    "no tokenizer": chats(r"wordless has no tokenizer\.json.*data\.tokenizer\.path", model="wordless"),
    "no chat template": chats(r"'messages' need a chat template.*'builtin' for a simple one", model="plain"),
    "too small a vocabulary": file(
        swap("num_hidden_layers: 2", "num_hidden_layers: 2, vocab_size: 100"),
        r"vocab_size is 100, but .*at least 2\d\d",
        RUN,
    ),
    "a misspelt field of the model": file(
        swap("hidden_size: 32,", "hiden_size: 32,"),
        r"llama has no 'hiden_size'; did you mean 'hidden_size'\?",
        RUN,
    ),
    "a misspelt family": file(
        swap("llama", "lama"), r"Transformers knows no 'lama'; did you mean 'llama'\?", RUN
    ),
    "too long a sequence": key(
        "data.sequence=65", r"65 tokens are more than the 64 positions", "data.sequence=64"
    ),
    "out is a file": key(
        "out=text.txt", r"text\.txt is a file, not a folder; name another folder", "out=runs/y"
    ),
    # Machines
    "a device that is not there": key(
        "launch.device=npu",
        r"'npu' was asked for, but PyTorch finds none here.*launch\.device=auto",
        "launch.device=auto",
    ),
    "a rendezvous without a port": key(
        "launch.rendezvous=localhost", r"host:port, for example", "launch.rendezvous=localhost:0"
    ),
    "a secret that is too short": Mistake(
        types=("train", "run.yaml"),
        says=r"HYPER_PARALLEL_TOKEN has 5 characters and needs 16; make one with",
        extra={"HYPER_PARALLEL_TOKEN": "short"},
    ),
    # Other commands
    "a cluster by a wrong name": line(
        "simulate", "run.yaml", "--cluster", "h10x8", says=r"no cluster 'h10'; did you mean 'h100'\?"
    ),
    "no cluster": line(
        "simulate", "run.yaml", says=r"missing option '--cluster'; see hyper-parallel simulate --help"
    ),
    "a model that plan does not know": line(
        "plan",
        "--model",
        "llama-3-9b",
        "--cluster",
        "h100x8",
        "--batch",
        "8",
        says=r"'llama-3-9b'.*did you mean 'llama-3-8b'",
    ),
    "a model that is not there": line(
        "generate", "nothing", "--prompt", "x", says=r"nothing: no such folder; give a Transformers folder"
    ),
    "a folder without a model": line(
        "generate", "folder", "--prompt", "x", says=r"folder holds no checkpoint; give a run's folder"
    ),
    "an export of a model": line(
        "export", "base", "out", says=r"base holds no checkpoint; give a run's folder"
    ),
    "a convert of a model's config": line(
        "convert", "base/config.json", says=r"is no DeepSpeed JSON: .*deepspeed_config"
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run file, text, chats and a model, and broken variants of each."""
    place = tmp_path_factory.mktemp("mistakes")
    (place / "run.yaml").write_text(RUN)
    (place / "text.txt").write_text("some words to train on, and some more\n" * 50)
    (place / "empty.txt").touch()
    (place / "folder").mkdir()
    (place / "table.csv").write_text("text,label\na,b\n")
    (place / "picture.png").write_bytes(b"\x89PNG\x00\xff")
    shutil.copy(ROOT / "examples/rl/grpo-sort.yaml", place / "rl.yaml")
    write_model(place / "base")
    good = write_chats(place / "chats.jsonl").read_text()
    (place / "broken.jsonl").write_text(good.splitlines()[0] + '\n{"messages": \n')
    (place / "sharegpt.jsonl").write_text('{"conversations": [{"from": "human", "value": "hi"}]}\n')
    (place / "alpaca.jsonl").write_text('{"instruction": "a", "input": "", "output": "b"}\n')
    for name in ("bin", "bare", "lfs", "wordless", "plain"):
        shutil.copytree(place / "base", place / name)
    for name in ("bin", "bare", "lfs"):
        (place / name / "model.safetensors").unlink()
    (place / "bin/pytorch_model.bin").write_bytes(b"PK")
    (place / "lfs/model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\nsize 10\n")
    (place / "wordless/tokenizer.json").unlink()
    (place / "plain/chat_template.jinja").unlink()
    return place


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(folder)
    yield folder
    shutil.rmtree(folder / "runs", ignore_errors=True)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line with which a command ends."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    shown = capsys.readouterr().err
    assert ended.value.code == 2, shown
    [only] = shown.splitlines()
    assert only.startswith("hyper-parallel: error: ")
    return only


@pytest.mark.parametrize("name", MISTAKES)
def test_one_line_with_the_mend(
    name: str, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake = MISTAKES[name]
    for variable, value in (mistake.extra or {}).items():
        monkeypatch.setenv(variable, value)
    if mistake.text is not None:
        (here / "wrong.yaml").write_text(mistake.text)
    said = refused(capsys, *mistake.types)
    assert re.search(mistake.says, said), said
    if mistake.then is not None:
        check(load("run.yaml", mistake.then))
    if mistake.mended is not None:
        (here / "wrong.yaml").write_text(mistake.mended)
        check(load("wrong.yaml"))


def test_the_words_of_others_lead_to_keys_that_are_read() -> None:
    """A mend that names a key of no format would be worse than none."""
    formats: tuple[type[BaseModel], ...] = (RunConfig, GenerateConfig)
    for word in sorted({word for words in validation_errors._WORDS.values() for word in words}):
        for model in formats:
            key = validation_errors.key_for(model, word)
            assert key is None or field_at(model, tuple(key.split("."))) is not None, (word, key)
        assert any(validation_errors.key_for(model, word) for model in formats), word


def test_there_are_enough() -> None:
    assert len(MISTAKES) >= 60
    assert sum(one.then is not None or one.mended is not None for one in MISTAKES.values()) >= 25


def test_a_folder_that_is_written_for_another_model(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["train", "run.yaml", "train.sample.tokens=0"])
    assert ended.value.code == 0
    wider = "model.config.hidden_size=64"
    said = refused(capsys, "train", "run.yaml", wider)
    assert re.search(
        r"is of another run: model\.config\..*hidden_size was 32 and is 64.*choose another 'out'", said
    )
    said = refused(capsys, "export", "runs/x", "base")
    assert re.search(r"base exists and is not an empty folder; export to a new one", said)


def test_a_budget_that_is_too_small(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "train", "run.yaml", "strategy.memory={device: 1KiB, host: 1GiB}")
    assert re.search(r"budget of 1\.0 KiB is too small .*set memory\.device to .* or more", said)


def test_a_port_that_is_taken(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = refused(
            capsys, "train", "run.yaml", "strategy.axes.shard=2", f"launch.rendezvous=127.0.0.1:{port}"
        )
    assert str(port) in said


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    locked = here / "locked"
    locked.mkdir(mode=0o500, exist_ok=True)
    said = refused(capsys, "train", "run.yaml", "out=locked/run")
    assert re.search(r"cannot write to .*locked; name another folder or change its permissions", said)


def test_a_line_of_json_is_what_the_examples_show(here: Path) -> None:
    """The mends of the records of other tools are accepted as they are written."""
    first = {
        "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello to you!"}]
    }
    (here / "mended.jsonl").write_text(
        json.dumps(first) + "\n" + json.dumps({"prompt": "a", "response": "b"}) + "\n"
    )
    check(load("run.yaml", ["data.train=mended.jsonl"]))
