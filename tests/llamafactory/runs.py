"""Runs of LlamaFactory in processes of their own: forked ones, which do not import it anew, or its command.

Each case of the table is LlamaFactory's own trainer in one process, the same run spread, and that one resumed at the
middle; and the folder that it leaves, in Transformers.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import multiprocessing
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import made
import torch

MIDDLE = 15
"""The step after which runs are resumed."""


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    name: str
    workers: int
    fields: Mapping[str, Any]
    """Of hyper_parallel_args."""
    model: str = "llama"
    options: Mapping[str, Any] = field(default_factory=dict)
    """LlamaFactory's own, of the run in one process too."""

    @property
    def data(self) -> int:
        """How many workers see different rows."""
        sizes = (self.fields.get(name, 1) for name in ("tp_size", "cp_size", "pp_size"))
        return self.workers // math.prod(sizes)


LORA = {"finetuning_type": "lora", "lora_rank": 8, "lora_target": "all"}
ACCUMULATED = {"gradient_accumulation_steps": 2}
CASES = [
    Case("fsdp 2", 2, {}),
    Case("tp 2", 2, {"tp_size": 2}),
    Case("cp 2", 2, {"cp_size": 2}),
    Case("ep 2", 2, {"ep_size": 2}, "qwen3_moe"),
    Case("LoRA, fsdp 2", 2, {}, options=LORA),
    Case("LoRA, tp 2", 2, {"tp_size": 2}, options=LORA),
    Case("packing, cp 2", 2, {"cp_size": 2}, options={"packing": True}),
    Case("neat_packing, cp 2", 2, {"cp_size": 2}, options={"packing": True, "neat_packing": True}),
    Case("ASFT's loss, fsdp 2", 2, {}, options={"use_asft_loss": True}),
    Case("pp 2", 2, {"pp_size": 2}),
    Case("LoRA, pp 2", 2, {"pp_size": 2}, options=LORA),
    Case("neat_packing, pp 2", 2, {"pp_size": 2}, options={"packing": True, "neat_packing": True}),
    Case("accumulation, pp 2", 2, {"pp_size": 2}, options=ACCUMULATED),
    Case("swap, fsdp 2", 2, {"activation_mode": "swap"}),
    Case("memory 2 MiB, fsdp 2", 2, {"memory": {"device": "2MiB", "host": "1GiB"}}),
    Case("fsdp 4", 4, {}),
    Case("fsdp 2 × tp 2", 4, {"fsdp_size": 2, "tp_size": 2}),
    Case("fsdp 2 × cp 2", 4, {"fsdp_size": 2, "cp_size": 2}),
    Case("replicate 2 × tp 2", 4, {"fsdp_size": 1, "tp_size": 2}),
    Case("pp 2 × fsdp 2", 4, {"pp_size": 2}),
    Case("pp 2 × tp 2", 4, {"pp_size": 2, "tp_size": 2}),
    Case("fsdp 4, ep 2", 4, {"ep_size": 2}, "qwen3_moe"),
    Case("LoRA, fsdp 2 × tp 2", 4, {"fsdp_size": 2, "tp_size": 2}, options=LORA),
]


@dataclass(frozen=True)
class Measured:
    """What a case came to."""

    steps: int
    loss: float
    """The largest difference of a step's loss from that of one process."""
    resumed: float
    """The same, of the steps after the middle, by a run that was resumed there."""
    logits: float
    """The largest difference of a logit, of the folders at the end, in Transformers."""


def measure(case: Case, place: Path, out: Path) -> Measured:
    """Run a case in `out`, with what `made.everything` put into `place`."""
    alone = one_process(place, out.parent, case.model, json.dumps(dict(case.options)))
    spread = {
        **made.options(place, case.model, out / "run", case.data, **case.options),
        "use_hyper_parallel": True,
        "hyper_parallel_args": dict(case.fields),
    }
    train(spread, case.workers, out / "run.log")
    middle = out / f"run/checkpoint-{MIDDLE}"
    again = {**spread, "output_dir": str(out / "resumed"), "resume_from_checkpoint": str(middle)}
    train(again, case.workers, out / "resumed.log")
    own, theirs, later = losses(alone), losses(out / "run"), losses(out / "resumed")
    assert sorted(own) == sorted(theirs) and sorted(later) == [step for step in own if step > MIDDLE]
    return Measured(
        len(theirs),
        max(abs(theirs[step] - own[step]) for step in theirs),
        max(abs(later[step] - own[step]) for step in later),
        difference(alone, out / "run", place / case.model),
    )


@functools.cache
def one_process(place: Path, out: Path, model: str, options: str) -> Path:
    """The folder of LlamaFactory's own run in one process; made once. `options` as JSON."""
    name = "-".join(["one", model, *(f"{key}={value}" for key, value in json.loads(options).items())])
    folder = out / name
    train(made.options(place, model, folder, **json.loads(options)), 1, out / f"{name}.log")
    return folder


def losses(folder: Path) -> dict[int, float]:
    """Step to loss, as LlamaFactory's log has them."""
    lines = map(json.loads, (folder / "trainer_log.jsonl").read_text().splitlines())
    return {line["current_steps"]: line["loss"] for line in lines if "loss" in line}


@torch.no_grad()
def difference(one: Path, other: Path, base: Path) -> float:
    """The largest difference of a logit of two folders, for a few tokens; `base` is what adapters are added to."""
    from transformers import AutoModelForCausalLM

    logits = []
    for folder in (one, other):
        if (folder / "adapter_config.json").exists():
            from peft import PeftModel

            model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
        else:
            model = AutoModelForCausalLM.from_pretrained(folder)
        tokens = torch.arange(64).view(2, 32) % model.config.vocab_size
        logits.append(model.eval()(input_ids=tokens).logits)
    return float((logits[0] - logits[1]).abs().max())


# Processes.


def train(options: Mapping[str, Any], workers: int, log: Path) -> None:
    """`llamafactory-cli train` in forked workers. Raises RuntimeError with the end of the log when one fails."""
    import llamafactory.train.tuner  # imported once, here, rather than in each worker

    assert llamafactory.train.tuner.run_exp
    log.parent.mkdir(parents=True, exist_ok=True)
    port = free_port()
    context = multiprocessing.get_context("fork")
    started = [
        context.Process(target=_worker, args=(dict(options), rank, workers, port, log))
        for rank in range(workers)
    ]
    for process in started:
        process.start()
    for process in started:
        process.join()
    if any(process.exitcode for process in started):
        raise RuntimeError(f"{log}: {log.read_text()[-4000:]}")


def _worker(options: dict[str, Any], rank: int, workers: int, port: int, log: Path) -> None:
    with log.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    # Pytest's own, by which nothing would reach the file.
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", buffering=1, closefd=False)
    logging.getLogger().handlers.clear()
    if workers > 1:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": workers, "LOCAL_WORLD_SIZE": workers}
        os.environ |= {key: str(value) for key, value in place.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    from llamafactory.train.tuner import run_exp

    run_exp(options)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def command(words: list[str], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command run in `folder`, with the environment's `bin` on the path."""
    bin = Path(sys.executable).parent
    return subprocess.run(
        words,
        cwd=folder,
        env={**os.environ, "PATH": f"{bin}:{os.environ['PATH']}", **environment},
        capture_output=True,
        text=True,
        timeout=280,
    )
