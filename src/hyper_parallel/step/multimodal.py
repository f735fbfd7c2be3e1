"""Runs on rows with images or sound: the model's class, and refusals.

Rows differ in the number and size of images, so that each step has other shapes: nothing is captured. Strategies are
those that are proved for such rows: axes `replicate`, `shard` and `tensor`, and recomputation. A rank whose rows have
no image takes part in all collectives, since FSDP gathers encoders with the root (`shard.vision_and_audio_towers`).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn

from hyper_parallel.config import RunConfig
from hyper_parallel.data import MultimodalData
from hyper_parallel.errors import ConfigError, StrategyError
from hyper_parallel.shard.memory import compute_dtypes
from hyper_parallel.shard.vision_and_audio_towers import towers_of
from hyper_parallel.workload import Flops, flops_of_model

EAGER = "rows with images or sound have other shapes in each step, and are not captured"

_SUBMODELS = (
    "hp.submodels spreads such a model over devices of their own in a loop of yours (docs/submodels.md)"
)


def model_class(hf: Any) -> Any:
    """Transformers' class of models of a config that write text; None where there is none."""
    import transformers as t

    mappings = ("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING", "MODEL_FOR_MULTIMODAL_LM_MAPPING")
    for name in mappings:
        mapping = getattr(t, name, {})
        if type(hf) in mapping:
            found = mapping[type(hf)]
            return found[0] if isinstance(found, (tuple, list)) else found
    return None


def media_kinds(model: Any) -> Collection[str]:
    """What a model, or its class, takes beside text, of what a run can read: ``image``, ``audio``."""
    told = getattr(model, "input_modalities", ())
    named = {told} if isinstance(told, str) else {*told}
    return named & {"image", "audio"}


def check_run(config: RunConfig) -> None:
    """Raise StrategyError or ConfigError for what cannot be done, or is not proved, on rows with images or sound."""
    strategy, train = config.effective_strategy, config.train
    axes = strategy.axes
    use = "use the axes replicate, shard and tensor"
    unplanned = (
        "a budget is planned for one order of a step's micro-batches, and with submodels it follows from the rows"
        if strategy.submodels
        else "a budget is kept by a captured step"
    )
    refusals = {
        "axes.pipeline": (axes.pipeline > 1, f"stages are cut from a captured step; {use}, or: {_SUBMODELS}"),
        "axes.context": (axes.context > 1, f"images would be cut between ranks; {use}"),
        "axes.expert": (axes.expert > 1, f"it is not proved there yet; {use}"),
        "axes.tensor_y": (axes.tensor_y > 1, f"it is not proved there yet; {use}"),
        "memory.device": (
            strategy.memory.device is not None,
            f"{unplanned}; leave it out, and lower train.micro_batch or use memory.recompute instead",
        ),
    }
    for key, (asked, why) in refusals.items():
        if asked:
            raise StrategyError(f"strategy.{key} does not work with rows of images or sound: {why}")
    if strategy.sequence:
        raise StrategyError(
            "strategy.sequence is not proved with rows of images or sound yet; set it to false"
        )
    if train.compile is True and not strategy.submodels:
        raise ConfigError(f"train.compile: {EAGER}, and only captured steps are compiled; set it to false")
    if train.profile is not None and not strategy.submodels:
        raise ConfigError(f"train.profile: {EAGER}, and only captured steps are measured; leave it out")


def check_text(hf: Any) -> None:
    """Raise ConfigError for a model that a run trains on rows with images or sound alone, and there are none."""
    if _needs_media(hf):
        raise ConfigError(
            f"model: {hf.model_type} is trained on rows with images or sound, and no row of data.train has any; "
            "give it some, or train its language model alone"
        )


def refuse_media_model(hf: Any, what: str) -> None:
    """Raise ConfigError for a model of images or sound, which `what` does not know."""
    if _needs_media(hf):
        raise ConfigError(
            f"{what} does not know models of images or sound yet ({hf.model_type}); write a strategy with the axes "
            "replicate, shard and tensor, or let `hyper-parallel plan RUN.yaml --cluster NAME` find one, and train"
        )


def _needs_media(hf: Any) -> bool:
    """Whether a model takes images or sound, and is none of Transformers' causal language models."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    return type(hf) not in MODEL_FOR_CAUSAL_LM_MAPPING and bool(media_kinds(model_class(hf)))


def check_precision(config: RunConfig, model: nn.Module) -> None:
    """Raise StrategyError where part of an encoder would be gathered by itself, since a rank without images would leave
    the others waiting."""
    strategy = config.effective_strategy
    dtypes = compute_dtypes(model, strategy.precision)
    inside = {id(module) for tower in towers_of(model) for module in tower.modules()}
    for name, module in model.named_modules():
        if id(module) in inside and dtypes[name] != dtypes[""] and strategy.axes.data > 1:
            raise StrategyError(
                f"strategy.precision.modules: {name} has another dtype than the model, so that it is gathered by "
                "itself, and ranks without an image would not take part; leave encoders out of the patterns"
            )


def check_placeholders(config: RunConfig, hf: Any, data: MultimodalData) -> None:
    """The model's placeholder ids are the processor's: filled in where new weights leave them out.

    Raises ConfigError.
    """
    given = config.model.config or {}
    for name, found in data.processor.placeholder_ids.items():
        own = getattr(hf, name, None)
        if own is None:
            continue
        if (
            config.model.config is not None
            and name not in given
            and name.replace("_id", "_index") not in given
        ):
            setattr(hf, name, found)
        elif own != found:
            raise ConfigError(
                f"model: its config has {name} {own}, and the processor of {data.processor.folder} has {found}; use "
                "the processor that belongs to the model"
            )


def language_flops(model: nn.Module) -> Flops:
    """FLOPs for a position of the language model of a multimodal model, without its encoders."""
    core: Any = model
    text = core.config.get_text_config(decoder=True)
    if text is core.config:
        return flops_of_model(model)
    return flops_of_model(nn.ModuleList([core.get_decoder(), core.get_output_embeddings()]), text.to_dict())
