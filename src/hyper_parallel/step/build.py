"""Builds a run: model config, data, and the parallelized model with values."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hyper_parallel.compat import backend
from hyper_parallel.config import ModelConfig, RunConfig
from hyper_parallel.config.model import read_config
from hyper_parallel.data import MultimodalData, Tokenizer, TrainingData, load_data
from hyper_parallel.data.export_assets import generation_config
from hyper_parallel.data.load import check_positions
from hyper_parallel.errors import ConfigError, nearest
from hyper_parallel.offloading.paging import lend
from hyper_parallel.report.wait_line import waiting
from hyper_parallel.shard import ShardedModel, init_weights, load_weights, parallelize, sharded
from hyper_parallel.shard.folder_weights import has_untied_weights
from hyper_parallel.shard.forward import first_position
from hyper_parallel.shard.model_structure import has_encoder
from hyper_parallel.shard.parallelize import Lowering, check_tokens
from hyper_parallel.shard.region_check.result_cache import unchanged
from hyper_parallel.step.adapters import with_adapters
from hyper_parallel.step.batches import Batches
from hyper_parallel.step.capture_train_step import BatchShape
from hyper_parallel.step.engine import check_length, try_graph
from hyper_parallel.step.epochs import with_steps
from hyper_parallel.step.graph_cache import Graphs, eagerly
from hyper_parallel.step.memory_budget import Budget
from hyper_parallel.step.multimodal import (
    EAGER,
    check_placeholders,
    check_precision,
    check_run,
    check_text,
    language_flops,
    media_kinds,
    model_class,
)
from hyper_parallel.step.owner_refusals import Prepared, against_owner
from hyper_parallel.step.pipeline_build import BuiltPipeline, build_pipeline
from hyper_parallel.step.pipeline_graphs import pipeline_graphs
from hyper_parallel.step.submodel_run import BuiltSubmodels, build_submodels
from hyper_parallel.step.train_step import Accumulate
from hyper_parallel.workload import Flops, flops_of_model

log = logging.getLogger(__name__)

# Names that Transformers reads from a config although `to_dict` of a default one does not show them.
_LEGACY = frozenset(
    {"rope_theta", "rope_scaling", "partial_rotary_factor", "rope_local_base_freq", "torch_dtype", "head_dim"}
)

_UNSUPPORTED = (
    "a run file trains decoder-only language models and their vision towers, and {!r} is none; "
    "hyper_parallel.parallelize spreads it in a loop of your own (docs/families.md)"
)


@dataclass(kw_only=True)
class Parallelized:
    """A model that is parallelized for its steps, and what runs them."""

    model: nn.Module
    fresh: bool
    """The values are still to be drawn or loaded: the model is on the meta device."""
    pipeline: BuiltPipeline | None = None
    """What the ranks of a pipeline run; None without one."""
    graphs: Graphs | None = None
    """What the engine `graph` runs; None for `eager`, also where the step cannot be captured."""

    @property
    def accumulate(self) -> Accumulate | None:
        """What gives gradients of a batch where parts of the model are on several ranks; None where each has all."""
        return None if self.pipeline is None else self.pipeline.train

    @property
    def budget(self) -> Budget | None:
        """What keeps the steps within so many bytes; None where nothing does."""
        return None if self.graphs is None else self.graphs.budget

    def settling(self) -> contextlib.AbstractContextManager[None]:
        """Inside, parameters and optimizer state go where they rest as soon as they have values."""
        return contextlib.nullcontext() if self.budget is None else self.budget.settling()


@dataclass(kw_only=True)
class Built(Parallelized):
    """What a run trains and on what."""

    model_config: dict[str, Any] | None
    """The Transformers config as JSON has it; None for a module of the user's that has none."""
    text: TrainingData
    flops: Flops
    generation: dict[str, Any] | None
    """How the model generates once it is exported; None for a module that is not Transformers'."""
    submodels: BuiltSubmodels | None = None
    """What the ranks of submodels run; None without them."""

    @property
    def accumulate(self) -> Accumulate | None:
        """As of `Parallelized`."""
        return super().accumulate if self.submodels is None else self.submodels.train


def build(config: RunConfig, model: nn.Module | None = None, device: torch.device | str = "cpu") -> Built:
    """The data and the parallelized model. `model` replaces the one that the run file describes.

    `device`: where the step will run. Every rank comes to the same engine. Raises ConfigError, StrategyError or
    DataError.
    """
    with unchanged():
        prepared = compared_with_owner(config, model)
        plain, text = prepared.model, prepared.text
        if not config.effective_strategy.submodels:
            check_tokens(plain, config.effective_strategy.of_stage, text.tokenizer.vocab_size)
    config = with_steps(prepared.config, text)
    # Counted before the weights are split.
    flops = language_flops(plain) if text.media else flops_of_model(plain)
    hf: Any = getattr(plain, "config", None)
    as_dict = json.loads(hf.to_json_string(use_diff=False)) if hasattr(hf, "to_json_string") else None
    known: dict[str, Any] = {
        "model_config": as_dict,
        "text": text,
        "flops": flops,
        "generation": generation_config(config, hf, text),
    }
    artifacts = artifacts_of(config, flops, device)
    if config.effective_strategy.submodels:
        parts = build_submodels(config, plain, text, device)
        parts.parts.runner.artifacts = artifacts
        return Built(model=plain, fresh=has_no_values(plain), submodels=parts, **known)

    def first_shape(handle: ShardedModel) -> BatchShape:
        train, cpu = config.train, torch.device("cpu")
        batches = Batches(text.train, text.order, train.batch, config.micro_batch, handle, cpu)
        return BatchShape.of(batches.load(0, 0).micro)

    if isinstance(text, MultimodalData) and config.effective_strategy.axes.pipeline == 1:
        check_precision(config, plain)
        if config.train.engine == "graph":
            log.warning("%s", eagerly(EAGER))
        config = eager(config)
    parallel = parallelized(config, plain, first_shape, text.train.several, device, artifacts)
    return Built(**vars(parallel), **known)


def parallelized(
    config: RunConfig,
    model: nn.Module,
    first_shape: Callable[[ShardedModel], BatchShape],
    documents: bool,
    device: torch.device | str,
    artifacts: Path | None = None,
) -> Parallelized:
    """Parallelize a run's model in place, whose steps are captured where they can be. A collective.

    `first_shape`: of the first step on this rank, from the handle of a copy of the model; `documents`: rows may hold
    several; `artifacts`: as of `artifacts_of`. Raises StrategyError or BudgetError.
    """
    strategy = config.effective_strategy
    if strategy.axes.pipeline > 1:
        pipeline = build_pipeline(config, model, documents, device)
        pipeline.runner.artifacts = artifacts
        staged = None if strategy.memory.device is None else pipeline_graphs(config, pipeline, device)
        return Parallelized(model=model, fresh=has_no_values(model), pipeline=pipeline, graphs=staged)
    graphs, handle = None, None
    if config.train.engine == "graph":
        graphs, handle = try_graph(config, model, first_shape, device, artifacts)
    lowering: Lowering = "fsdp" if graphs is None else "traceable"
    parallelize(model, strategy, lowering=lowering, like=handle)
    check_length(sharded(model), config)
    if graphs is not None and graphs.budget is not None:
        lend(model)
    return Parallelized(model=model, fresh=has_no_values(model), graphs=graphs)


def has_no_values(model: nn.Module) -> bool:
    """Whether a parallelized model has its values still to be drawn or loaded: parameters that this rank holds are on
    the meta device."""
    return any(one.parameter.is_meta for one in sharded(model).owned())


def eager(config: RunConfig) -> RunConfig:
    """The run with the engine `eager`."""
    return config.model_copy(update={"train": config.train.model_copy(update={"engine": "eager"})})


def compared_with_owner(
    config: RunConfig, model: nn.Module | None = None, *, always: bool = False
) -> Prepared:
    """The model before any strategy and the data, as `unsharded`, once the owner check is made. A collective.

    `always` and what is raised: as of `against_owner`.
    """
    plain, text = unsharded(config, model)
    return against_owner(config, plain, text, lambda changed: unsharded(changed, model)[1], always=always)


def unsharded(config: RunConfig, model: nn.Module | None = None) -> tuple[nn.Module, TrainingData]:
    """The model as it is before any strategy, on the meta device unless it is the user's, and the data."""
    if model is not None:
        text = _data(config, getattr(model, "config", None), model)
        _fit_embedding(model, text.tokenizer)
        return model, text
    hf = transformers_config(config.model)
    text = _data(config, hf, model_class(hf))
    _fit_vocabulary(hf, config, text.tokenizer)
    if isinstance(text, MultimodalData):
        check_placeholders(config, hf, text)
    else:
        check_text(hf)
    made = on_meta(hf, config, media=text.media)
    if skipped := first_position(made):
        # Its table of positions begins with rows that no token has.
        check_positions(config.data, hf.get_text_config(decoder=True).max_position_embeddings - skipped)
    return made, text


def fill(built: Parallelized, config: RunConfig, device: torch.device) -> None:
    """Give a model on the meta device its values: those of the folder, or new ones of the run's seed."""
    if built.fresh:
        fill_model(built.model, config, device)


def fill_model(model: nn.Module, config: RunConfig, device: torch.device | str) -> None:
    """Give a parallelized model on the meta device its values."""
    if config.model.folder is not None:
        load_weights(model, config.model.folder, device)
    else:
        init_weights(model, config.seed, device)


def transformers_config(declared: ModelConfig) -> Any:
    """The Transformers config object. Raises ConfigError for a family or a key that Transformers does not know."""
    from transformers import CONFIG_MAPPING, AutoConfig

    if (folder := declared.folder) is not None:
        fields, file = read_config(folder), f"{folder}/config.json"
        if fields["model_type"] not in CONFIG_MAPPING:
            hint = nearest(fields["model_type"], CONFIG_MAPPING.keys())
            code = "; the code that its auto_map names is not run" if fields.get("auto_map") else ""
            raise ConfigError(
                f"model.path: {file}: Transformers knows no {fields['model_type']!r}{hint}{code}"
            )
        if fields.get("auto_map"):
            log.warning("%s names code of its own (auto_map), which is not run: Transformers' own is", file)
        try:
            return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # its validation raises classes of huggingface_hub's own around the reason
            raise ConfigError(f"model.path: {file}: {_line(error.__cause__ or error)}") from error
    assert declared.config is not None
    settings = {key: value for key, value in declared.config.items() if key != "model_type"}
    family = declared.config["model_type"]
    if family not in CONFIG_MAPPING:
        raise ConfigError(
            f"model.config.model_type: Transformers knows no {family!r}{nearest(family, CONFIG_MAPPING.keys())}"
        )
    default = CONFIG_MAPPING[family]
    known = {*default().to_dict(), *default.attribute_map, *inspect.signature(default).parameters, *_LEGACY}
    for key in settings:
        if key not in known:
            raise ConfigError(f"model.config: {family} has no {key!r}{nearest(key, known)}")
    try:
        return AutoConfig.for_model(family, **settings)
    except Exception as error:  # its validation raises classes of huggingface_hub's own around the reason
        raise ConfigError(f"model.config: {_line(error.__cause__ or error)}") from error


def _data(config: RunConfig, hf: Any, model: Any) -> TrainingData:
    """`model`, or its class, says what it takes beside text."""
    language = hf.get_text_config(decoder=True) if hasattr(hf, "get_text_config") else hf
    with waiting("reading and tokenizing the data"):
        found = load_data(
            config.data,
            seed=config.seed,
            positions=getattr(language, "max_position_embeddings", None),
            model=config.model.folder,
            family=getattr(hf, "model_type", None) or "the model",
            kinds=media_kinds(model),
        )
    if isinstance(found, MultimodalData):
        check_run(config)
    return found


def _fit_vocabulary(hf: Any, config: RunConfig, tokenizer: Tokenizer) -> None:
    """Fill in the vocabulary and the special tokens that are left out; refuse a vocabulary that is too small."""
    given, source = config.model.config or {}, config.model.folder
    language = hf.get_text_config(decoder=True)
    if language is not hf:  # of a multimodal model, whose language model has a section of its own
        section = next((key for key in hf.sub_configs if getattr(hf, key, None) is language), "")
        hf, given = language, given.get(section) or {}
    if source is None and "vocab_size" not in given:
        hf.vocab_size = tokenizer.vocab_size
    if source is None or config.data.tokenizer.replace:
        # The families' defaults, and what a folder says, are ids of other tokenizers. Without a padding id no row of
        # the embedding is kept from training: padding bears no loss and is not attended to.
        bos = tokenizer.transformers.bos_token_id
        own = {
            "bos_token_id": tokenizer.eos if bos is None else int(bos),
            "eos_token_id": tokenizer.eos,
            "pad_token_id": None,
        }
        for key, value in own.items():
            if key not in given:
                setattr(hf, key, value)
    elif getattr(hf, "eos_token_id", None) is None:
        hf.eos_token_id = tokenizer.eos
    if type(getattr(hf, "vocab_size", None)) is not int:
        raise ConfigError("the model's config has no vocab_size that is a whole number")
    if hf.vocab_size < tokenizer.vocab_size:
        mend = (
            f"leave model.config.vocab_size out or make it at least {tokenizer.vocab_size}"
            if source is None
            else f"put the tokenizer that belongs to the weights into {source}, or enlarge their embedding "
            f"(resize_token_embeddings({tokenizer.vocab_size}))"
        )
        raise ConfigError(_too_small(hf.vocab_size, tokenizer, mend))


def _fit_embedding(model: nn.Module, tokenizer: Tokenizer) -> None:
    """Refuse a model of the user's whose embedding has no row for some id."""
    find: Any = getattr(model, "get_input_embeddings", None)
    embedding = find() if callable(find) else None
    rows = getattr(embedding, "num_embeddings", tokenizer.vocab_size)
    if rows < tokenizer.vocab_size:
        raise ConfigError(
            _too_small(rows, tokenizer, "give the tokenizer of this model with data.tokenizer.path")
        )


def _too_small(rows: int, tokenizer: Tokenizer, mend: str) -> str:
    return f"the model's vocab_size is {rows}, but the tokenizer has ids up to {tokenizer.vocab_size - 1}; {mend}"


def on_meta(hf: Any, config: RunConfig, *, media: bool = False) -> nn.Module:
    """The run's unsharded model without values; with `media`, the one that takes them. Raises ConfigError when
    Transformers cannot build it."""
    dtype = getattr(torch, config.effective_strategy.precision.param)
    attention = None if config.model.attention == "auto" else config.model.attention
    kind, folder = model_class(hf) if media else None, config.model.folder
    model = (
        causal_model(hf, dtype, attention, folder)
        if kind is None
        else _built(kind._from_config, hf, dtype, attention, folder)
    )
    if config.model.adapter is not None:
        model = with_adapters(model, config.model.adapter)
    if has_encoder(model):
        raise ConfigError(
            f"model: {_UNSUPPORTED.format(hf.model_type)}; as a decoder it takes is_decoder: true in model.config"
        )
    return model


def causal_model(
    hf: Any, dtype: torch.dtype, attention: str | None = None, folder: str | None = None
) -> nn.Module:
    """Transformers' causal language model of a config, on the meta device. Raises ConfigError when there is none.

    Where `folder` has a head of its own although the config ties it, the model has one too, and the config says so.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    if type(hf) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(f"model: {_UNSUPPORTED.format(hf.model_type)}")
    build = functools.partial(AutoModelForCausalLM.from_config, trust_remote_code=False)
    return _built(build, hf, dtype, attention, folder)


def _built(
    build: Callable[..., Any], hf: Any, dtype: torch.dtype, attention: str | None, folder: str | None
) -> nn.Module:
    """On the meta device, its weights tied as `from_pretrained` ties them. Raises ConfigError."""
    try:
        with torch.device("meta"):
            model = build(hf, attn_implementation=attention, dtype=dtype)
    except Exception as error:  # what its classes make of a field of another type or size is of any kind
        reason = f"{type(error).__name__}: {_line(error)}"
        raise ConfigError(f"model: Transformers cannot build it: {reason}") from error
    assert isinstance(model, nn.Module)
    if folder is None or not has_untied_weights(folder, model):
        return model
    log.warning(
        "%s: its config ties the head to the embedding, but it has values of its own for both: they are not tied",
        folder,
    )
    untie(hf)
    return _built(build, hf, dtype, attention, None)


def untie(hf: Any) -> None:
    """Have a config, and the configs in it, say that the head has weights of its own."""
    for config in (hf, *(getattr(hf, key, None) for key in getattr(hf, "sub_configs", ()))):
        if getattr(config, "tie_word_embeddings", False):
            config.tie_word_embeddings = False


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


# Compile options: whether graphs are compiled, and the artifact folder.
#
# Decided by the run file and the device alone, never by a clock: compiled sums come out a little different, and the
# same file must give the same numbers each time.

PAYS_FROM = 300.0
"""Seconds of computing from which `train.compile: auto` compiles: about ten times what a first compilation takes."""
_UTILISATION = 0.5
_UNKNOWN_PEAK = 1e11
"""FLOP/s of a device without a data sheet: a few processor cores with wide vectors."""


def artifacts_of(config: RunConfig, flops: Flops, device: torch.device | str) -> Path | None:
    """The folder of the artifacts, below the run's cache; None when nothing is to be compiled."""
    chosen = config.train.compile
    if config.effective_strategy.memory.device is not None:
        return None  # a compiled layer holds what no plan of the memory knows of
    if chosen == "auto":
        # What is measured operator by operator must be run so.
        chosen = config.train.profile is None and estimated_seconds(config, flops, device) >= PAYS_FROM
    return Path(config.data.cache).expanduser() / "compiled" if chosen else None


def estimated_seconds(config: RunConfig, flops: Flops, device: torch.device | str) -> float:
    """A rough estimate of how long the run computes, from its FLOPs and the device's peak."""
    tokens = config.train.steps * config.train.batch * config.data.sequence
    world = config.effective_strategy.world
    compute = getattr(torch, config.effective_strategy.precision.compute)
    peak = backend(torch.device(device).type).peak_flops(compute) or _UNKNOWN_PEAK
    return flops.per_token(config.data.sequence) * tokens / world / (peak * _UTILISATION)
