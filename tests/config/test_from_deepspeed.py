"""A DeepSpeed JSON becomes sections that the loader takes; every key is converted or listed."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_parallel import config
from hyper_parallel.config import yaml12
from hyper_parallel.config.from_deepspeed import Conversion, convert, read
from hyper_parallel.config.from_deepspeed.source import ARGUMENTS
from hyper_parallel.config.schema import merge
from hyper_parallel.config.train import LionConfig
from hyper_parallel.errors import ConfigError

RUN = "version: 1\nout: runs/x\nmodel: {path: m}\ndata: {train: t}\n"
FILLED = {
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
}
WARMUP = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}
FLOAT16 = {
    "enabled": "auto",
    "loss_scale": 0,
    "loss_scale_window": 1000,
    "initial_scale_power": 16,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
STAGE_2 = {
    "stage": 2,
    "allgather_partitions": True,
    "allgather_bucket_size": 2e8,
    "overlap_comm": True,
    "reduce_scatter": True,
    "reduce_bucket_size": 2e8,
    "contiguous_gradients": True,
}
STAGE_3 = {
    "stage": 3,
    "overlap_comm": True,
    "contiguous_gradients": True,
    "sub_group_size": 1e9,
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": True,
}
EXAMPLES: dict[str, dict[str, Any]] = {
    "transformers_zero2": {
        "fp16": FLOAT16,
        "scheduler": {"type": "WarmupLR", "params": WARMUP},
        "zero_optimization": {**STAGE_2, "offload_optimizer": {"device": "none", "pin_memory": True}},
        **FILLED,
    },
    "transformers_zero3_offload": {
        "fp16": FLOAT16,
        "bf16": {"enabled": "auto"},
        "scheduler": {"type": "WarmupDecayLR", "params": {**WARMUP, "total_num_steps": "auto"}},
        "zero_optimization": {
            **STAGE_3,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "offload_param": {"device": "cpu", "pin_memory": True},
        },
        **FILLED,
    },
    "nvme": {
        "bf16": {"enabled": True},
        "zero_optimization": {
            **STAGE_3,
            "offload_optimizer": {"device": "nvme", "nvme_path": "/local_nvme", "buffer_count": 4},
            "offload_param": {"device": "nvme", "nvme_path": "/local_nvme", "max_in_cpu": 1e9},
        },
        "aio": {"block_size": 262144, "queue_depth": 32},
        "activation_checkpointing": {"partition_activations": False, "cpu_checkpointing": True},
        **FILLED,
    },
    "warmup_decay": {
        "train_batch_size": 256,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 8,
        "optimizer": {
            "type": "Adam",
            "params": {"lr": 1e-3, "betas": [0.8, 0.999], "weight_decay": 3e-7, "adam_w_mode": True},
        },
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "warmup_min_lr": 0,
                "warmup_max_lr": 2e-4,
                "warmup_num_steps": 500,
                "warmup_type": "linear",
                "total_num_steps": 10_000,
            },
        },
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": 1},
        "fp16": {**FLOAT16, "enabled": True},
        "tensorboard": {"enabled": True, "output_path": "logs", "job_name": "x"},
    },
    "bf16_cosine_split": {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "bf16": {"enabled": True},
        "communication_data_type": "fp32",
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {"total_num_steps": 5000, "warmup_num_steps": 100, "cos_min_ratio": 0.1},
        },
        "zero_optimization": {"stage": 3, "overlap_comm": False, "mics_shard_size": 2},
        "tensor_parallel": {"autotp_size": 2},
        "sequence_parallel_size": 2,
    },
    "lion": {
        "train_batch_size": 64,
        "optimizer": {"type": "Lion", "params": {"lr": 3e-5, "weight_decay": 0.3}},
    },
    "moe": {
        "train_batch_size": 64,
        "bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True},
        "zero_optimization": {"stage": 2},
        "expert_parallel": {"enabled": True, "autoep_size": 4, "preset_model": "mixtral"},
        "optimizer": {"type": "Muon", "params": {"lr": 1e-3, "momentum": 0.9}},
    },
}


def leaves(content: Any, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if isinstance(content, dict) and (content or not above):
        for key, value in content.items():
            yield from leaves(value, (*above, key))
    else:
        yield above


def loaded(done: Conversion, folder: Path) -> config.RunConfig:
    (folder / "converted.yaml").write_text(done.text)
    (folder / "run.yaml").write_text("extends: converted.yaml\n" + RUN)
    known = "steps" in done.fragment["train"]
    return config.load(folder / "run.yaml", [] if known else ["train.steps=2000"])


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("devices", [None, 8])
def test_an_example_loads_and_every_key_is_accounted_for(
    name: str, devices: int | None, tmp_path: Path
) -> None:
    done = convert(EXAMPLES[name], devices=devices)
    run = loaded(done, tmp_path)
    if devices or name == "warmup_decay":  # whose three batch keys say how many
        assert run.strategy.axes.world == 8
        assert not run.strategy.axes.open
    else:
        assert len(run.strategy.axes.open) == 1
    assert accounted(done) == set(leaves(EXAMPLES[name]))
    assert not [one for one in done.unconverted if "unknown key" in one.why]


def accounted(done: Conversion) -> set[tuple[str, ...]]:
    used = {path for one in done.settings for path in one.sources}
    listed = [one.path for one in done.unconverted]
    assert len(set(listed)) == len(listed)
    assert not used & set(listed)
    assert all(one.why and "\n" not in one.why for one in done.unconverted)
    return used | set(listed)


def test_zero_2_of_transformers(tmp_path: Path) -> None:
    run = loaded(convert(EXAMPLES["transformers_zero2"], devices=8), tmp_path)
    assert run.strategy.memory.shard == "gradients"
    assert (run.train.batch, run.train.micro_batch) == (64, 8)
    assert (run.train.optimizer.lr, run.train.clip, run.train.schedule.name) == (5e-5, 1.0, "constant")
    assert run.strategy.precision.compute == "float32"


def test_arguments_of_transformers_fill_auto(tmp_path: Path) -> None:
    arguments = ["bf16=true", "learning_rate=2e-5", "max_steps=400", "warmup_steps=20"]
    arguments += [
        "per_device_train_batch_size=2",
        "gradient_accumulation_steps=3",
        "gradient_checkpointing=true",
    ]
    run = loaded(convert(EXAMPLES["transformers_zero3_offload"], devices=8, arguments=arguments), tmp_path)
    assert (run.train.batch, run.train.micro_batch, run.train.steps) == (48, 2, 400)
    assert (run.train.optimizer.lr, run.train.schedule.warmup, run.train.schedule.floor) == (2e-5, 20, 0)
    assert (run.strategy.precision.compute, run.strategy.precision.param) == ("bfloat16", "float32")
    assert run.strategy.memory.recompute == "layer"
    assert "memory.device" in run.strategy.chosen


def test_a_budget_in_bytes_names_the_tiers(tmp_path: Path) -> None:
    done = convert(
        EXAMPLES["transformers_zero3_offload"], devices=8, device_memory=60 * 2**30, host_memory=2**37
    )
    memory = loaded(done, tmp_path).strategy.memory
    assert (memory.device, memory.host, memory.update) == (60 * 2**30, 2**37, "host")
    memory = loaded(convert(EXAMPLES["nvme"], devices=8, device_memory=2**34), tmp_path).strategy.memory
    assert (memory.device, memory.host, memory.flash, memory.update) == (2**34, None, "/local_nvme", "auto")


def test_float16_becomes_bfloat16_and_says_so() -> None:
    done = convert(EXAMPLES["warmup_decay"])
    [compute] = [one for one in done.settings if one.key == "strategy.precision.compute"]
    assert compute.value == "bfloat16"
    assert "float16 becomes bfloat16" in compute.comment
    assert "fp16.loss_scale = 0: for float16 only" in done.text


def test_the_scheduler_sets_the_peak(tmp_path: Path) -> None:
    run = loaded(convert(EXAMPLES["warmup_decay"]), tmp_path)
    assert (run.train.optimizer.lr, run.train.optimizer.weight_decay) == (2e-4, 3e-7)
    assert (run.train.schedule.warmup, run.train.steps, run.train.clip) == (500, 10_000, 0.5)
    assert run.strategy.axes.shard == 8  # 256 / (4 · 8)


def test_warmup_decay_has_a_peak_where_nobody_wrote_one() -> None:
    content = {
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-5}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 2000}},
    }
    done = convert(content)
    assert done.fragment["train"]["optimizer"]["lr"] == 1e-3
    assert "lr = 2e-05; the peak of the scheduler, DeepSpeed's default" in done.text
    content["scheduler"]["type"] = "WarmupCosineLR"
    assert convert(content).fragment["train"]["optimizer"]["lr"] == 2e-5


def test_axes_of_several_kinds(tmp_path: Path) -> None:
    axes = loaded(convert(EXAMPLES["bf16_cosine_split"], devices=16), tmp_path).strategy.axes
    assert (axes.replicate, axes.shard, axes.context, axes.tensor) == (2, 2, 2, 2)
    strategy = loaded(convert(EXAMPLES["moe"], devices=8), tmp_path).strategy
    assert (strategy.axes.shard, strategy.axes.expert, strategy.precision.param) == (8, 4, "bfloat16")


def test_the_defaults_of_auto_are_those_of_transformers() -> None:
    fields = pytest.importorskip("transformers").TrainingArguments.__dataclass_fields__
    for name, value in ARGUMENTS.items():
        assert (fields[name].default or 0) == value, name


def test_the_schedules_agree_with_deepspeeds(tmp_path: Path) -> None:
    """From the end of the warm-up on, at each step, up to one step's shift: DeepSpeed's formulas by hand."""
    from hyper_parallel.step.lr_schedule import schedule

    train = loaded(convert(EXAMPLES["warmup_decay"]), tmp_path).train
    ours = schedule(train.schedule, train.steps)
    for step in range(0, 10_000, 97):
        theirs = step / 500 if step < 500 else (10_000 - step) / 9_500
        assert ours(step) == pytest.approx(theirs, abs=1 / 499)
    train = loaded(convert(EXAMPLES["bf16_cosine_split"]), tmp_path).train
    ours = schedule(train.schedule, train.steps)
    for step in range(100, 5000, 97):
        theirs = 0.1 + 0.9 * (1 + math.cos(math.pi * (step - 99) / 4900)) / 2
        assert ours(step) == pytest.approx(theirs)


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ({"zero_optimization": {"stage": 4}}, {}, "zero_optimization.stage = 4: must be 0, 1, 2 or 3"),
        ({"zero_optimization": 3}, {}, "must be an object"),
        ({"bf16": {"enabled": "yes"}}, {}, 'bf16.enabled = "yes": must be true or false'),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, {}, "together with bf16"),
        (
            {"train_batch_size": 9, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1},
            {"devices": 4},
            "2 · 1 · 4 data ranks = 8",
        ),
        ({"train_batch_size": 9}, {"devices": 4}, "must be a multiple of 4"),
        ({"tensor_parallel": {"autotp_size": 3}}, {"devices": 4}, "give a multiple of 3"),
        ({}, {"device_memory": 1}, "offloads nothing"),
        (EXAMPLES["transformers_zero3_offload"], {"device_memory": 1}, "--host-memory"),
        ({}, {"arguments": ["learning_rate=1"]}, "no key of ds_config.json is 'auto' for it"),
        ({}, {"arguments": ["learning_rat=1"]}, "did you mean 'learning_rate'"),
        ({}, {"arguments": ["bf16=1"]}, "must be true or false"),
        (FILLED, {"devices": 8, "arguments": ["per_device_train_batch_size=0"]}, "not below 1"),
    ],
    ids=str,
)
def test_a_mistake_is_one_line(content: dict[str, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        convert(content, **options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unknown_key_is_listed_with_the_nearest() -> None:
    done = convert({"zero_optimisation": {"stage": 3}, "x\ny": 1})
    assert "zero_optimisation.stage = 3: unknown key; did you mean 'zero_optimization'?" in done.text
    assert "#   x\\ny = 1: unknown key" in done.text


@pytest.mark.parametrize(
    ("text", "message"),
    [("[]", "must be an object"), ("{", "not JSON"), ('{"a": 1, "a": 2}', "'a' stands twice")],
)
def test_a_file_that_is_no_json(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read(tmp_path / "ds.json")


def everything() -> dict[tuple[str, ...], Any]:
    found: dict[tuple[str, ...], Any] = {}
    for example in EXAMPLES.values():
        for path in leaves(example):
            value: Any = example
            for key in path:
                value = value[key]
            found[path] = value
    # Those of two examples that contradict each other.
    found["fp16", "enabled"] = "auto"
    found["train_batch_size",] = "auto"
    return found


KNOWN = everything()


@settings(max_examples=150, deadline=None, database=None)
@given(
    paths=st.sets(st.sampled_from(sorted(KNOWN))),
    autos=st.sets(
        st.sampled_from(["train_batch_size", "gradient_clipping", "train_micro_batch_size_per_gpu"])
    ),
    kind=st.sampled_from(["WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle"]),
    stage=st.integers(0, 3),
    devices=st.sampled_from([None, 4, 8, 16]),
)
def test_any_subset_of_the_known_keys_is_converted_or_listed(
    paths: set[tuple[str, ...]],
    autos: set[str],
    kind: str,
    stage: int,
    devices: int | None,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    content: dict[str, Any] = {}
    for path in sorted(paths):
        section = content
        for key in path[:-1]:
            section = section.setdefault(key, {})
        section[path[-1]] = KNOWN[path]
    if "type" in content.get("scheduler", {}):
        content["scheduler"]["type"] = kind
    if "stage" in content.get("zero_optimization", {}):
        content["zero_optimization"]["stage"] = stage
    content |= dict.fromkeys(autos & content.keys(), "auto")
    done = convert(content, devices=devices)
    assert accounted(done) == set(leaves(content))
    assert not [one for one in done.unconverted if "unknown key" in one.why]
    loaded(done, tmp_path_factory.mktemp("run"))


JUNK: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    0.5,
    1e300,
    math.nan,
    math.inf,
    "x",
    "auto",
    "",
    [],
    [1],
    {},
    {"a": {"b": 1}},
)


PREFIXES = sorted({path[: depth + 1] for path in KNOWN for depth in range(len(path))})


@pytest.mark.parametrize("name", ["transformers_zero3_offload", "warmup_decay", "bf16_cosine_split", "moe"])
def test_junk_is_refused_or_listed(name: str) -> None:
    refused = 0
    for path in PREFIXES:
        for junk in JUNK:
            content = copy.deepcopy(EXAMPLES[name])
            section = content
            for key in path[:-1]:
                section = section.setdefault(key, {})
            section[path[-1]] = junk
            try:
                done = convert(content, devices=8 if name != "warmup_decay" else None)
            except ConfigError:
                refused += 1
                continue
            assert accounted(done) == set(leaves(content)), (path, junk)
            whole = merge({"train": {"steps": 2000}}, {**done.fragment, **yaml12.parse(RUN, "run")}, {})
            config.from_dict(whole, source=f"{path} = {junk}")
    assert refused > len(PREFIXES)


def test_lion_has_its_own_defaults(tmp_path: Path) -> None:
    optimizer = loaded(convert(EXAMPLES["lion"]), tmp_path).train.optimizer
    assert optimizer == LionConfig(name="lion", lr=3e-5, betas=(0.9, 0.99), weight_decay=0.3)
