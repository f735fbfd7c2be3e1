"""Random byte budgets of generation.

Each case is a family with random widths, prompts, answers, settings, tiers and a budget between the smallest and what
holds everything. The model is read from a folder into the tiers. From the first weight that is read to the last answer
an observer, which knows nothing of plans, counts the bytes of live storages after every operator: they may never exceed
the budget. The tokens must be those of a run without a budget.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from harness.families import FAMILIES, WITH_IMAGES
from harness.observer import OfPyTorch
from hyper_parallel import Generator
from hyper_parallel.inference.weights import units

NAMES = sorted(set(FAMILIES) - set(WITH_IMAGES))


def model_of(draw: random.Random, folder: Path) -> tuple[str, Any]:
    """A family with MLPs of a random width, written to a folder."""
    name = draw.choice(NAMES)
    fields = {**FAMILIES[name], "max_position_embeddings": 512}
    for key in ("intermediate_size", "n_inner"):
        if fields.get(key):
            fields[key] *= draw.choice((4, 16, 64))
    kind, attention = fields.pop("model_type"), fields.pop("attn_implementation", "sdpa")
    torch.manual_seed(draw.randrange(1000))
    config = AutoConfig.for_model(kind, **fields)
    model: Any = AutoModelForCausalLM.from_config(
        config, attn_implementation=attention, experts_implementation="eager", dtype=torch.float32
    )
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    model.save_pretrained(folder)
    return name, model


def case(seed: int) -> dict[str, Any]:
    """One case, and what was found."""
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="generate-budget-") as temporary:
        name, model = model_of(draw, Path(temporary) / "model")
        # Layers as a whole, or in as many parts as they have.
        units.SPLIT = draw.choice((1, 16 << 20))
        vocabulary = model.config.get_text_config().vocab_size
        del model
        prompts = [
            [draw.randrange(vocabulary) for _ in range(draw.choice((1, 3, 17, 33, 70, 120)))]
            for _ in range(draw.randint(1, 8))
        ]
        settings: dict[str, Any] = {
            "max_tokens": draw.choice((1, 4, 9)),
            "page": draw.choice((16, 32)),
            "batch": draw.choice((1, 3, 32)),
            "logprobs": draw.random() < 0.3,
        }
        if draw.random() < 0.4:
            settings |= {
                "temperature": 0.8,
                "top_k": draw.choice((None, 5)),
                "top_p": draw.choice((None, 0.9)),
            }
        folder = Path(temporary) / "model"
        plain = [answer.tokens for answer in Generator(folder, **settings)(prompts)]
        tiers: dict[str, Any] = draw.choice(
            (
                {"host": "64MiB"},
                {"flash": f"{temporary}/spill"},
                {"host": "60KiB", "flash": f"{temporary}/spill"},
            )
        )
        with Generator(folder, memory={"device": "1GiB", **tiers}, **settings) as generator:
            generator(prompts)
            assert generator.memory is not None
            assert generator.memory.plan is not None
            whole = generator.memory.plan.device
            least = generator.smallest_budget(prompts)
        share = draw.choice((0.0, 0.0, 0.3 * draw.random(), draw.random(), 1.0))
        budget = least + int(share * max(whole - least, 0))
        with (
            OfPyTorch([]) as seen,
            Generator(folder, memory={"device": budget, **tiers}, **settings) as generator,
        ):
            same = [answer.tokens for answer in generator(prompts)] == plain
            assert generator.memory is not None
            plan = generator.memory.plan
            assert plan is not None
            return {
                "seed": seed,
                "family": name,
                "budget": budget,
                "smallest": least,
                "whole": whole,
                "peak": seen.peak,
                "planned": plan.device,
                "read_by_a_pass": plan.read,
                "contexts_moved": sum(one.written + one.read for one in generator.cache_report.tiers),
                "requests_at_once": plan.requests,
                "tiers": sorted(tiers),
                "kept": seen.peak <= budget,
                "same_tokens": same,
            }
