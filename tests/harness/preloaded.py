"""What the fork server of the tests has imported before it forks: the package, and what the tests' modules import.

A rank and a command are then a fork, which costs hundredths of a second, not an import of seconds. A step is computed,
too, so that PyTorch's caches (of dispatch, of DTensor's layouts) are full: a rank's first step takes a third of the
time. With one thread that is safe; a child that is forked after OpenMP has run with several hangs.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import pkgutil
import warnings

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import hyper_parallel
from hyper_parallel import Strategy, init_weights, parallelize
from hyper_parallel.compat.fake_tensors import fake_ranks

MODELS = (
    "deepseek_v3", "gemma2", "gemma3", "gpt2", "gpt_oss", "llama", "llava", "mistral", "mixtral", "olmoe", "opt",
    "phi3", "qwen2", "qwen2_5_vl", "qwen2_moe", "qwen3", "qwen3_moe", "t5",
)  # fmt: skip
OTHERS = (
    "hypothesis", "numpy", "peft", "pytest", "rich.live", "rich.table", "tokenizers", "yaml",
    "torch.distributed._local_tensor", "torch.distributed.checkpoint",
    "torch.distributed.fsdp", "torch.distributed.pipelining", "torch.distributed.tensor.parallel",
    "torch.fx.experimental.proxy_tensor", "transformers.models.auto.modeling_auto", "transformers.trainer",
    "transformers.trainer_seq2seq",
)  # fmt: skip


def _package() -> list[str]:
    walked = pkgutil.walk_packages(hyper_parallel.__path__, "hyper_parallel.", onerror=lambda name: None)
    return [module.name for module in walked if not module.name.endswith("__main__")]


for _name in (
    *OTHERS,
    *(f"transformers.models.{model}.modeling_{model}" for model in MODELS),
    *_package(),
):
    # A part that needs an extra which is not installed is imported by nobody else either.
    with contextlib.suppress(ImportError):
        importlib.import_module(_name)


def _compute_a_step() -> None:
    """A training step of a small Llama as one of four fake ranks, whose collectives return at once."""
    config = AutoConfig.for_model(
        "llama",
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    for axes in ({"shard": 2, "tensor": 2}, {"replicate": 2, "shard": 2}):
        with fake_ranks(4, 0):
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config).train()
            parallelize(model, Strategy(axes=axes, check=False))
            init_weights(model, seed=0)
            optimizer = torch.optim.AdamW(model.parameters())
            ids = torch.randint(64, (2, 16))
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()


# Said by every rank of every step: views that our gathers return are not changed in place.
warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
torch.set_num_threads(1)
# Autograd starts threads for the devices that its first backward pass finds, and a process that has them has no forks
# that compute gradients: none may be there, not even the ones that builds with CUDA see during our step.
if not torch.accelerator.is_available():
    torch.ones(1, requires_grad=True).sum().backward()
    with torch.random.fork_rng(), warnings.catch_warnings(action="ignore"):
        _compute_a_step()
gc.collect()
gc.freeze()  # the collector would touch, and so copy, the pages that forks share
