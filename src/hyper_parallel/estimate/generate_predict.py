"""Prediction of generation from a file: its passes are captured, and then simulated on a cluster, one by one and as a
run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from hyper_parallel.cluster import Cluster
from hyper_parallel.config.generate import GenerationRun
from hyper_parallel.errors import ConfigError
from hyper_parallel.estimate.generate_capture import captured_pass, refuse_axes
from hyper_parallel.estimate.generate_report import GenerationPrediction
from hyper_parallel.estimate.generate_trace import simulate_run
from hyper_parallel.graph.capture_overrides import uncollected
from hyper_parallel.simulator.generation.choose_split import (
    SplitChoice,
    SplitQuestion,
    choose_split,
    whole_run,
)
from hyper_parallel.simulator.generation.pass_model import PassModel
from hyper_parallel.simulator.generation.pass_trace import simulated
from hyper_parallel.simulator.generation.tier_split import TierSplit
from hyper_parallel.step.build import transformers_config
from hyper_parallel.strategy import Memory, Precision, Strategy

Progress = Callable[[str], None]


@uncollected()
def predict_generation(
    config: GenerationRun,
    cluster: Cluster,
    *,
    model: nn.Module | None = None,
    split: TierSplit | None = None,
    progress: Progress | None = None,
) -> GenerationPrediction:
    """What generation would take on a cluster. Nothing is allocated, and no weights are read.

    `cluster` is as `for_workers` of the axes' ranks gives it. `model`: on the meta device, in place of the one that
    the file describes. `split`: what lies where, in place of the choice for `strategy.memory`.

    Raises ConfigError, StrategyError, or CaptureError for a model that cannot be written down as a graph.
    """
    say = progress or (lambda _: None)
    strategy = strategy_of(config)
    plain = model if model is not None else meta_model(config)
    whole: Any = plain
    name = str(getattr(whole.config, "model_type", "")) if hasattr(whole, "config") else ""
    strategy = in_dtype(strategy, plain)
    passes = captured_pass(plain, strategy, name, say)
    question = question_of(passes, config, cluster)
    choice = choose_split(question) if split is None else _given(question, split)
    if choice.split.any or choice.split.idle:
        say(f"lies in {choice.split.tier}: chosen")
    pricer = question.pricer(choice.split)
    say("simulating a pass of prompts and one of answers")
    prompt = simulated(pricer, choice.run.prompt_load)
    answer = simulated(pricer, choice.run.answer_load)
    say("simulating the run")
    tier = choice.split.tier
    room = max(0.0, question.tiers.get(tier, 0.0) - choice.footprint.of(tier) + _idle(choice, tier))
    run = simulate_run(pricer, config.workload, config.inference, room=room, say=say)
    return GenerationPrediction(
        config=config,
        cluster=cluster,
        model=passes,
        question=question,
        choice=choice,
        prompt=prompt,
        answer=answer,
        run=run,
        notes=tuple(_notes(passes, config, choice)),
    )


def strategy_of(config: GenerationRun) -> Strategy:
    """The strategy whose passes are captured. Raises ConfigError for what generation does not do."""
    strategy = config.strategy
    if strategy.open:
        raise ConfigError(
            "strategy: axes or budgets that are 'auto' are chosen by hyper-parallel plan --generate; write them out"
        )
    refuse_axes(strategy)
    return strategy.model_copy(update={"check": False, "memory": Memory()})


def in_dtype(strategy: Strategy, model: nn.Module) -> Strategy:
    """The strategy, in the model's dtype. Raises ConfigError for a dtype that strategies do not know."""
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    if dtype not in ("float32", "bfloat16"):
        raise ConfigError(f"model.config.dtype: {dtype} is not predicted; give float32 or bfloat16")
    return strategy.model_copy(update={"precision": Precision(param=dtype, compute=dtype)})


def meta_model(config: GenerationRun) -> nn.Module:
    """The model that a file describes, without values. Raises ConfigError where Transformers cannot build it."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    hf = transformers_config(config.model)
    if type(hf) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(f"model: Transformers has no causal language model of {hf.model_type}")
    dtype = getattr(hf, "dtype", None) or torch.bfloat16
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(hf, dtype=dtype, trust_remote_code=False)
    except Exception as error:  # what its classes make of a field of another type or size is of any kind
        told = " ".join(str(error).split())[:300]
        raise ConfigError(f"model: Transformers cannot build it: {type(error).__name__}: {told}") from error
    assert isinstance(model, nn.Module)
    return model.eval()


def question_of(model: PassModel, config: GenerationRun, cluster: Cluster) -> SplitQuestion:
    """What each tier may hold of one rank: `strategy.memory`; without `device`, or where that is `auto`, all of the
    device."""
    memory = config.strategy.memory
    device = cluster.tier("device")
    tiers: dict[str, float] = {}
    world = model.world
    for name, given in (("host", memory.host), ("pool", memory.pool and memory.pool / world)):
        if given:
            cluster.tier(name)
            tiers[name] = float(given)
    if memory.flash:
        flash = cluster.tier("flash")
        tiers["flash"] = flash.bytes / min(flash.ranks, world)
    held = float(memory.device) if isinstance(memory.device, int) else device.bytes / device.ranks
    return SplitQuestion(model, cluster, config.workload, config.inference, held, tiers)


def _given(question: SplitQuestion, split: TierSplit) -> SplitChoice:
    whole_question = replace(question, tiers={})
    nothing = TierSplit()
    whole = whole_run(whole_question.pricer(nothing), question.work, question.settings)
    held = question.footprint(split)
    run = whole_run(question.pricer(split), question.work, question.settings)
    return SplitChoice(split, run, held, question.fits(held), whole, whole_question.footprint(nothing))


def _idle(choice: SplitChoice, tier: str) -> float:
    parts: Mapping[str, float] = choice.footprint.by_tier.get(tier, {})
    return parts.get("idle contexts", 0.0)


def _notes(model: PassModel, config: GenerationRun, choice: SplitChoice) -> list[str]:
    found = [
        f"the pass was captured from the model's code, {len(model.kinds)} kind{'s' * (len(model.kinds) > 1)} of "
        "layers; "
        "passes are composed by the engine's scheduler"
    ]
    if any(layer.attention and layer.attention.latent for layer in model.kinds):
        found.append(
            "requests that generate attend to cached latents, with the weights that expand them absorbed, as "
            "`generate` does; an engine that expands every context in each pass takes longer"
        )
    if model.experts:
        skew = config.workload.expert_skew
        told = f"follows a Zipf distribution of exponent {skew:g}" if skew else "is balanced"
        found.append(f"the choice of experts {told} (workload.expert_skew), and every rank gets as many rows")
    if config.workload.selected_tokens:
        found.append(
            f"sparse attention reads {config.workload.selected_tokens:,} tokens of a context, "
            f"{config.workload.selected_again:.0%} of which the token before read too (assumed), and knows them "
            "one layer "
            "ahead; this release's models attend to all"
        )
    return found
