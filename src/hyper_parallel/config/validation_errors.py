"""Validation errors in terms of the file's keys, one line for each problem; and words of other frameworks for settings,
with what to write instead.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from hyper_parallel.config.launch import DEVICE_WORDS
from hyper_parallel.config.schema import Kinds, field_at, present, sections_at, value_at
from hyper_parallel.errors import nearest
from hyper_parallel.strategy import Strategy
from hyper_parallel.strategy.section import keys_of
from hyper_parallel.untrusted_files import printable

MOST_LINES = 20
"""Maximum number of reported problems; of the others only the number is reported."""

Where = tuple[str | int, ...]
_MAIN = ("name", "compute", "path", "train", "method")
"""Keys that a section is about."""
_THOUSANDS = re.compile(r"([0-9]{1,9})[kK]")

_EXPECTED: Mapping[str, str] = {
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "dict_type": "must be keys with values",
    "finite_number": "must be a finite number",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "int_from_float": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_type": "must be a whole number",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "list_type": "must be a list",
    "mapping_type": "must be keys with values",
    "model_attributes_type": "must be a section with keys",
    "model_type": "must be a section with keys",
    "string_type": "must be text",
    "tuple_type": "must be a list",
    "union_tag_invalid": "must be one of {expected_tags}",
}


def explain(
    error: ValidationError, model: type[BaseModel], data: Any, kinds: Kinds, source: Callable[[Where], str]
) -> list[str]:
    """One line for each problem; `source` names the file or the override that brought a value.

    ``run.yaml: train.optimizer.lr: must be greater than 0 (got -1)``
    """
    groups: dict[Any, list[tuple[Where, str, str]]] = {}
    for number, detail in enumerate(error.errors()):
        where, choice = _where(detail, data, kinds)
        message = _message_of(detail, model, where)
        groups.setdefault(number if choice is None else choice, []).append((where, *message))
    lines: list[str] = []
    more = 0
    for problems in groups.values():
        if len(lines) >= MOST_LINES:
            more += 1
            continue
        # A value that may be of several types is refused once by each: the type that got furthest is meant.
        depth = max(len(where) for where, _, _ in problems)
        meant = [problem for problem in problems if len(problem[0]) == depth]
        for place, got in {where: got for where, _, got in meant}.items():
            texts = dict.fromkeys(text for where, text, _ in meant if where == place)
            text = " or ".join(texts).replace(" or must be ", " or ")
            dotted = ".".join(map(str, place))
            dotted = printable(dotted if len(dotted) <= 200 else dotted[:197] + "...")
            lines.append(f"{source(place)}: {dotted + ': ' if dotted else ''}{text}{got}")
    if more:
        lines.append(f"{source(())}: and {more} more problems")
    return lines


def _where(detail: Any, data: Any, kinds: Kinds) -> tuple[Where, Where | None]:
    """The location in the file, without the type names that pydantic inserts, and the location of a union.

    A union is a value that may have several types, if the problem lies with one of these types.
    """
    loc: Where = tuple(detail["loc"])
    where: list[str | int] = []
    choice: Where | None = None
    named: set[Where] = set()
    for at, part in enumerate(loc):
        here = tuple(where)
        if here in kinds and here not in named:
            named.add(here)
            key, default = kinds[here]  # type: ignore[index]
            section = value_at(data, here)
            if isinstance(section, Mapping) and section.get(key, default) == part:
                continue
        absent = at == len(loc) - 1 and detail["type"] in ("missing", "unknown_key")
        if absent or present(data, (*here, part)) == len(here) + 1:
            where.append(part)
        elif part != "[key]" and choice is None:
            choice = here  # the outer one, where an element of a list may have several types too
    if detail["type"] == "union_tag_invalid":
        where.append(detail["ctx"]["discriminator"].strip("'"))
    return tuple(where), choice


def _message_of(detail: Any, model: type[BaseModel], where: Where) -> tuple[str, str]:
    """The requirement, and the actual value as `` (got …)`` or nothing."""
    kind, context, given = detail["type"], detail.get("ctx", {}), detail["input"]
    if kind == "unknown_key":
        return _unknown(detail["msg"], model, where), ""
    if kind == "missing":
        field = field_at(model, where)
        meaning = f": {field.description.splitlines()[0]}" if field and field.description else ""
        return f"is missing; give it a value{meaning}", ""
    if kind in ("value_error", "assertion_error"):
        return detail["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, "), ""
    if kind in ("literal_error", "enum", "union_tag_invalid"):
        choices = context.get("expected_tags") or context.get("expected", "")
        tag = context.get("tag", given)
        known = [choice.strip("' ") for choice in choices.replace(" or ", ", ").split(", ")]
        meant = foreign_value(tag, known)
        hint = nearest(str(tag), known) if meant is None else f"; write {meant}"
        one_of = "one of " if len(known) > 1 else ""
        return f"must be {one_of}{choices}", f" (got {_show(tag)}{hint})"
    if kind in ("too_short", "too_long"):
        bound = context.get("min_length", context.get("max_length"))
        return f"must have at {'least' if kind == 'too_short' else 'most'} {bound} elements", ""
    expected = _EXPECTED.get(kind)
    if expected is None:
        return detail["msg"], f" (got {_show(given)})"
    mend = "; put it in quotes" if kind == "string_type" and isinstance(given, bool | int | float) else ""
    if given is None and kind in ("model_type", "model_attributes_type"):
        mend = ", an empty section; give it keys or remove it"
    elif kind in ("model_type", "model_attributes_type") and (key := _main_key(model, where, given)):
        mend = f"; write {{{key}: {foreign_value(given, ['bfloat16', 'float32']) or given}}}"
    elif kind in ("model_type", "model_attributes_type") and isinstance(given, str) and given != "auto":
        mend = foreign_hint(model, (given,))
    elif kind in ("list_type", "tuple_type") and isinstance(given, str):
        mend = f"; write [{given}]"
    elif kind == "int_parsing" and (found := _THOUSANDS.fullmatch(str(given))):
        mend = f"; write {int(found[1]) * 1000} or {int(found[1]) * 1024}, in digits"
    elif given == "auto":
        mend = "; the planner chooses axes: set strategy, strategy.axes or single degrees to auto"
    return expected.format(**{k: _show(v) for k, v in context.items()}), f" (got {_show(given)}{mend})"


def _unknown(message: str, model: type[BaseModel], where: Where) -> str:
    """The message about an unknown key: the key that another framework's word means, else the nearest one here."""
    key, colon, value = str(where[-1]).partition(":")
    if colon and value and "://" not in str(where[-1]) and field_at(model, (*where[:-1], key)) is not None:
        return f"unknown key; a space belongs after the colon: '{key}: {value}'"
    # A section's own message about the key says more than a table or a similar name.
    general = message.startswith(("unknown key; the keys here", "unknown key; did you mean"))
    hint = foreign_hint(model, where) if general else ""
    return f"unknown key{hint}" if hint else message


def _main_key(model: type[BaseModel], where: Where, given: Any) -> str | None:
    """The key of a section that a single value is meant for: ``name`` for ``optimizer: adamw``."""
    field = field_at(model, where)
    if field is None or not isinstance(given, str) or given == "auto":
        return None
    known = {name for section in sections_at(field) for name in section.model_fields}
    return next((key for key in _MAIN if key in known), None)


def _show(value: Any) -> str:
    """A value as YAML, shortened."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return f"{value:.0f}"
    text = (
        json.dumps(value, ensure_ascii=False, default=str).replace('"', "'") if value is not None else "null"
    )
    return text if len(text) <= 60 else text[:57] + "..."


# Words of other frameworks for settings of a run file, and where a word that stands in the wrong place belongs.
#
# The tables serve the messages about unknown keys and values. Where a word has several counterparts, the first one that
# the file's format has is named, so that a message never advises a key that this release does not read.

_WORDS: Mapping[str, tuple[str, ...]] = {
    "strategy.axes.tensor": ("tp", "tp_size", "tensor_parallel", "tensor_parallel_size", "tensor_parallel_degree",
                             "tensor_model_parallel_size", "model_parallel", "mp"),
    "strategy.axes.replicate": ("dp", "ddp", "dp_size", "data_parallel", "data_parallel_size", "dp_replicate",
                                "dp_replicate_size", "data_parallel_replicate_degree"),
    "strategy.axes.shard": ("fsdp", "fsdp2", "fully_shard", "hsdp", "dp_shard", "dp_shard_size",
                            "data_parallel_shard_degree"),
    "strategy.axes.pipeline": ("pp", "pp_size", "pipeline_parallel", "pipeline_parallel_degree", "pipeline_stages",
                               "pipeline_model_parallel_size"),
    "strategy.axes.context": ("cp", "cp_size", "sp_size", "context_parallel", "context_parallel_size", "ulysses",
                              "context_parallel_degree", "sequence_parallel_size"),
    "strategy.axes.expert": ("ep", "ep_size", "expert_parallel", "expert_parallel_degree",
                             "expert_model_parallel_size"),
    "strategy.sequence": ("sequence_parallel", "sp"),
    "strategy.memory.shard": ("zero", "zero_stage", "zero_optimization", "zero_level"),
    "strategy.memory.device": ("offload", "cpu_offload", "offload_optimizer", "offload_param", "fsdp_offload_params"),
    "strategy.memory.recompute": ("gradient_checkpointing", "activation_checkpointing", "activation_checkpoint",
                                  "recompute_granularity", "checkpointing"),
    "strategy.precision.compute": ("bf16", "fp16", "mixed_precision", "dtype", "torch_dtype", "param_dtype", "amp",
                                   "pure_bf16", "precision"),
    "train.optimizer.lr": ("learning_rate", "max_lr", "base_lr"),
    "train.optimizer.weight_decay": ("wd", "decay_rate"),
    "train.optimizer.betas": ("adam_beta1", "adam_beta2", "beta1", "beta2"),
    "train.optimizer.eps": ("adam_epsilon", "adam_eps", "epsilon"),
    "train.optimizer.name": ("optim", "optimizer_name", "optimizer_type"),
    "train.schedule.name": ("lr_scheduler_type", "lr_scheduler", "lr_decay_style", "scheduler"),
    "train.schedule.warmup": ("warmup_steps", "warmup_ratio", "lr_warmup_iters", "num_warmup_steps"),
    "train.schedule.floor": ("min_lr", "min_lr_ratio", "min_lr_rate"),
    "train.steps": ("max_steps", "train_iters", "num_train_steps", "total_steps", "num_steps", "iterations",
                    "max_iters"),
    "train.epochs": ("num_train_epochs", "num_epochs", "n_epochs", "epochs", "max_epochs"),
    "train.batch": ("train_batch_size", "global_batch_size", "batch_size", "per_device_batch_size"),
    "train.micro_batch": ("gradient_accumulation_steps", "gradient_accumulation", "per_device_train_batch_size",
                          "grad_accum", "accumulate_grad_batches", "micro_batch_size", "local_batch_size",
                          "train_micro_batch_size_per_gpu"),
    "train.clip": ("max_grad_norm", "gradient_clipping", "clip_grad", "grad_clip", "max_norm"),
    "model.adapter": ("lora", "lora_r", "lora_rank", "lora_alpha", "lora_target", "use_peft", "peft", "finetuning_type",
                   "qlora"),
    "train.log_every": ("logging_steps", "log_interval", "log_freq"),
    "train.eval.every": ("eval_steps", "eval_interval", "evaluation_strategy", "eval_strategy"),
    "train.compile": ("torch_compile", "dynamo_config"),
    "data.sequence": ("max_seq_length", "max_seq_len", "max_length", "seq_length", "seq_len", "sequence_length",
                      "cutoff_len", "block_size", "context_length", "model_max_length"),
    "data.train": ("dataset", "dataset_name", "dataset_path", "train_file", "data_path", "train_data", "datasets",
                   "dataset_dir"),
    "data.eval": ("eval_dataset", "validation_file", "valid_data", "eval_data", "validation"),
    "data.pack": ("packing", "pack_sequences"),
    "data.tokenizer.path": ("tokenizer_name", "tokenizer_name_or_path", "tokenizer_path"),
    "data.tokenizer.chat_template": ("template", "chat_template"),
    "model.path": ("model_name_or_path", "name_or_path", "pretrained", "model_name", "model_path", "base_model",
                   "pretrained_model_name_or_path", "model_id"),
    "model.attention": ("attn_implementation", "flash_attn", "use_flash_attention_2", "flash_attention"),
    "out": ("output_dir", "save_dir", "project_dir", "output", "out_dir", "logging_dir"),
    "trackers": ("report_to", "log_with", "wandb", "loggers"),
    "checkpoint.every": ("save_steps", "save_interval", "save_strategy", "checkpoint_interval"),
    "checkpoint.keep": ("save_total_limit",),
    "checkpoint.resume": ("resume_from_checkpoint", "load"),
    "launch.workers": ("nproc_per_node", "num_processes", "gpus", "num_gpus", "n_gpus", "world_size"),
    "launch.nodes": ("nnodes", "num_nodes", "num_machines"),
    "launch.device": ("accelerator", "use_cpu"),
    "seed": ("random_seed", "data_seed"),
    "inference.max_tokens": ("max_new_tokens", "max_length", "num_tokens"),
    "inference.temperature": ("temp",),
}  # fmt: skip
"""Keys of a run file, and what other frameworks call them."""

_INSTEAD: Mapping[str, str] = {"train.epochs": "train.steps"}
"""The key to name in formats that do not have the first one."""

_REMARKS: Mapping[str, str] = {
    "train.steps": "updates of the optimizer",
    "strategy.axes.replicate": "with replicate, every rank holds all parameters; with shard, they are split (FSDP)",
    "strategy.memory.shard": "its values are optimizer (ZeRO-1), gradients (ZeRO-2) and parameters (ZeRO-3)",
    "strategy.memory.device": "the bytes that a step may hold on a device",
    "strategy.memory.recompute": "layer recomputes every layer",
    "strategy.precision.compute": "float32 or bfloat16",
    "train.schedule.warmup": "a number of steps, or below 1 a share of them",
    "train.batch": "the sequences of a step on all ranks together",
    "train.micro_batch": "the sequences that a rank computes at once; train.batch is the batch of all ranks, and the "
    "accumulation follows",
    "model.adapter": "LoRA: {rank: 8}, for example",
}  # fmt: skip

_VALUES: Mapping[str, str] = {
    **DEVICE_WORDS,
    "bf16": "bfloat16",
    "fp16": "bfloat16",
    "half": "bfloat16",
    "fp32": "float32",
    "adamw_torch": "adamw",
    "adam": "adamw",
}
"""Values of other frameworks with the one to write here."""


def foreign_hint(model: type[BaseModel], where: tuple[str | int, ...]) -> str:
    """A hint what to write instead of an unknown key: ``; write strategy.axes.tensor``. Empty where nothing is known.

    `model`: the file's format. The word is known as another framework's, or it is a key of another section.
    """
    word = str(where[-1]) if where else ""
    spelled = word.lower().replace("-", "_")
    if spelled == "data" and where[-2:-1] == ("axes",):
        spelled = "dp"
    found = next((key for key, words in _WORDS.items() if spelled in words and _known(model, key)), None)
    if found is None:
        found = next(
            (_INSTEAD[key] for key, words in _WORDS.items() if key in _INSTEAD and spelled in words), None
        )
    if found is not None and (key := _known(model, found)):
        remark = _REMARKS.get(found)
        return f"; write {key}{f' ({remark})' if remark else ''}"
    places = sorted({*_places(model, word)}, key=lambda place: (place.count("."), place)) if word else []
    return f"; write {' or '.join(places[:2])}" if places and len(places) <= 3 else ""


def foreign_value(value: Any, choices: list[str]) -> str | None:
    """The choice that another framework's word for a value means, or None."""
    meant = _VALUES.get(str(value).lower())
    return meant if meant in choices else None


def key_for(model: type[BaseModel], word: str) -> str | None:
    """The key that a word stands for: another framework's, or the last part of a key. None where it is not one."""
    hint = foreign_hint(model, (word,))
    return hint.removeprefix("; write ").split(" ")[0] or None


def _known(model: type[BaseModel], key: str) -> str | None:
    """The key as this format has it; None where it has not."""
    if issubclass(model, Strategy):
        key = key.removeprefix("strategy.")
    return key if field_at(model, tuple(key.split("."))) is not None else None


def _places(model: type[BaseModel], word: str, above: tuple[str, ...] = ()) -> Iterator[str]:
    """The dotted keys whose last part is `word`, in sections that are not nested deeper than a person would look."""
    for name, field in model.model_fields.items():
        if field.exclude:
            continue
        if word in keys_of(name, field):
            yield ".".join((*above, word))
        for section in sections_at(field) if len(above) < 2 else ():
            yield from _places(section, word, (*above, name))
