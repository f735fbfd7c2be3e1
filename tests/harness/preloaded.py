"""What the fork server of the tests has imported before it forks: the package, and what the tests' modules import.

A rank and a command are then a fork, which costs hundredths of a second, not an import of seconds. Nothing here may
compute or start a thread: a child forked after OpenMP has run hangs.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import pkgutil

import hyper_parallel

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

gc.freeze()  # the collector of a fork would walk through all of it, and so copy its pages
