"""What a person runs beside the command, where HyperParallel is installed: Transformers' own Trainer on the same rows.

    python with_trainer.py plain RUN_FILE BASE OUT             Trainer, every weight
    python with_trainer.py lora RUN_FILE BASE OUT              Trainer, adapters
    torchrun … with_trainer.py spread RUN_FILE BASE OUT        HyperParallelTrainer, adapters
    python with_trainer.py look CHATS MODEL OTHER… [--adapters OF_MODEL OF_OTHER…]

With `then` between them, several follow each other in one process. `spread` also writes what it has after EARLY steps,
into OUT-early. `look` asks MODEL every question of CHATS and prints whether it gives the answers and stops by itself,
and how far its logits are from each other model's, as a share of the largest logit.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import SequentialSampler
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)

from hyper_parallel import config as run_files
from hyper_parallel.step.build import unsharded

EARLY = 4


class InOrder(Trainer):
    """Takes the rows as they stand."""

    def _get_train_sampler(self, *args: Any) -> Any:
        return SequentialSampler(self.train_dataset)


class Early(TrainerCallback):
    """Writes what there is after `EARLY` steps into a folder of its own."""

    def __init__(self, trainer: Trainer, out: str) -> None:
        self.trainer, self.out = trainer, out

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if state.global_step == EARLY < state.max_steps:
            self.trainer.save_model(self.out)


def rows(config: Any) -> list[dict[str, torch.Tensor]]:
    """The rows of a run in the order of its steps, with labels as Transformers has them: not shifted."""
    text = unsharded(config)[1]
    batch = text.train.batch(text.order.rows(0, config.train.steps * config.train.batch))
    labels = torch.full_like(batch["labels"], -100)
    labels[:, 1:] = batch["labels"][:, :-1]
    kept = {"input_ids": batch["input_ids"], "labels": labels, "position_ids": batch["position_ids"]}
    return [{key: value[row] for key, value in kept.items()} for row in range(len(labels))]


def train(kind: str, file: str, base: str, out: str) -> None:
    """Train as the run file says, with a Trainer."""
    config = run_files.load(file)
    model = AutoModelForCausalLM.from_pretrained(base)
    model.config.use_cache = False  # with a cache Transformers does not look where packed documents begin
    if kind != "plain":
        import peft

        torch.manual_seed(5)
        model = peft.get_peft_model(model, peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    optimizer = config.train.optimizer
    arguments = TrainingArguments(
        output_dir=f"{out}-run",
        per_device_train_batch_size=config.train.batch,
        max_steps=config.train.steps,
        learning_rate=optimizer.lr,
        adam_beta1=optimizer.betas[0],
        adam_beta2=optimizer.betas[1],
        adam_epsilon=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        max_grad_norm=config.train.clip,
        lr_scheduler_type="constant",
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    made: dict[str, Any] = {
        "model": model,
        "args": arguments,
        "train_dataset": rows(config),
        "data_collator": default_data_collator,
        "processing_class": AutoTokenizer.from_pretrained(base),
    }
    if kind == "spread":
        from hyper_parallel.integration.transformers import HyperParallelTrainer

        class SpreadInOrder(InOrder, HyperParallelTrainer):
            pass

        ranks = arguments.world_size
        arguments.per_device_train_batch_size = config.train.batch // ranks
        trainer: Any = SpreadInOrder(**made, strategy={"axes": {"shard": ranks}})
    else:
        trainer = InOrder(**made)
    trainer.add_callback(Early(trainer, f"{out}-early"))
    trainer.train()
    trainer.save_model(out)


def loaded(base: str, adapters: str | None = None) -> Any:
    """A model as a person loads it."""
    model = AutoModelForCausalLM.from_pretrained(base)
    if adapters is not None:
        import peft

        model = peft.PeftModel.from_pretrained(model, adapters).merge_and_unload()
    return model.eval()


def look(chats: str, *given: str) -> None:
    """Print what `MODEL` answers, and how far its logits are from each other one's."""
    at = given.index("--adapters") if "--adapters" in given else len(given)
    adapters = given[at + 1 :] or [None] * at
    model, *others = [loaded(base, own) for base, own in zip(given[:at], adapters, strict=True)]
    words = AutoTokenizer.from_pretrained(adapters[0] or given[0])
    right = []
    for line in Path(chats).read_text().splitlines():
        question, answer = json.loads(line)["messages"]
        asked = words.apply_chat_template(
            [question], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        ids = model.generate(**asked, max_new_tokens=64, do_sample=False)[0, asked["input_ids"].shape[1] :]
        right.append(len(ids) < 64 and words.decode(ids, skip_special_tokens=True) == answer["content"])
    ids = torch.arange(4 * 32).reshape(4, 32) % model.config.vocab_size
    with torch.no_grad():
        mine, *theirs = [one(ids).logits.double() for one in (model, *others)]
    apart = [float((mine - logits).abs().max() / mine.abs().max()) for logits in theirs]
    print(json.dumps({"right": right, "apart": apart}))


if __name__ == "__main__":
    import hyper_parallel

    assert Path.cwd() in Path(hyper_parallel.__file__).parents, f"not the wheel: {hyper_parallel.__file__}"
    for command, *given in (line.split("\n") for line in "\n".join(sys.argv[1:]).split("\nthen\n")):
        if command != "look":
            train(command, *given)
        else:
            look(*given)
