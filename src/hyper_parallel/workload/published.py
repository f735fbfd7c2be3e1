"""Shapes of published models by name, each with the place that states it.

A name is found whatever its case and punctuation: `Llama-3.1-405B`, `llama3-405b` and `LLAMA_3_405B` are one model.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import Any

from hyper_parallel.errors import ConfigError, nearest
from hyper_parallel.workload.shape import Latent, Shape

_LATENT = Latent(query_rank=1536, key_rank=512, plain=128, rotary=64, value=128)
"""DeepSeek-V2's; its successors kept it."""
_LATENT_LITE = replace(_LATENT, query_rank=0)

_SOURCES: dict[str, str] = {
    "llama": "arXiv 2302.13971, table 2, and the config of huggyllama's copies",
    "llama-2": "arXiv 2307.09288, and config.json of meta-llama/Llama-2",
    "llama-3": "arXiv 2407.21783, table 3, and config.json of meta-llama/Meta-Llama-3",
    "codellama": "config.json of codellama/CodeLlama-34b-hf",
    "mistral": "config.json of mistralai's models",
    "mixtral": "arXiv 2401.04088, table 1, and config.json of mistralai's models",
    "qwen": "arXiv 2309.16609 and config.json of Qwen's models",
    "qwen-2": "arXiv 2407.10671, table 1, and config.json of Qwen's models",
    "qwen-2.5": "arXiv 2412.15115 and config.json of Qwen's models",
    "qwen-3": "arXiv 2505.09388, tables 1 and 2, and config.json of Qwen's models",
    "gemma": "arXiv 2403.08295, table 1",
    "gemma-2": "arXiv 2408.00118, table 1",
    "gemma-3": "arXiv 2503.19786 and config.json of google's models, the language model alone",
    "phi": "config.json of microsoft's models",
    "gpt-oss": "OpenAI's model card (2025), table 1, and config.json of openai's models",
    "deepseek": "config.json of deepseek-ai's models",
    "deepseek-v2": "arXiv 2405.04434, section 3.1, and config.json of deepseek-ai's models",
    "deepseek-v3": "arXiv 2412.19437, section 4.2, without the module that predicts two tokens",
    "kimi": "arXiv 2507.20534, table 2, and config.json of moonshotai/Kimi-K2-Base",
    "moonlight": "arXiv 2502.16982 and config.json of moonshotai/Moonlight-16B-A3B",
    "gpt-2": "Radford et al. (2019), table 2, and config.json of openai-community's models",
    "gpt-3": "arXiv 2005.14165, table 2.1",
    "megatron": "arXiv 2104.04473, table 1",
    "megatron-22b": "arXiv 2205.05198, table 3",
    "nemotron": "NVIDIA NeMo 24.07, recipes of Nemotron 3",
    "nemotron-4": "arXiv 2402.16819 and 2406.11704, their tables of dimensions",
    "pangu": "arXiv 2504.07866, table 1",
    "pangu-moe": "arXiv 2505.04519 and config.json of openPangu-Ultra-MoE-718B, without the module of two tokens",
    "telechat": "arXiv 2407.20157 and config.json of Tele-AI/TeleChat2-115B",
    "mpt": "mosaicml/llm-foundry, scripts/train/yamls/pretrain",
    "nanotron": "huggingface/nanotron, scripts/scaling_benchmarks.py",
    "hypertron": "Hypertron (SC 2025): the dense model is Megatron's of 310.1 billion parameters",
    "hypertron-sparse": "Hypertron (SC 2025): the sparse model has the dimensions of Mixtral 8x22B",
    "glm": "config.json of zai-org's models",
    "baichuan": "config.json of baichuan-inc's models",
    "bloom": "arXiv 2211.05100, table 3",
    "internlm": "config.json of internlm's models",
    "yi": "arXiv 2403.04652, table 1",
    "aquila": "config.json of BAAI's models",
    "minicpm": "config.json of openbmb/MiniCPM-MoE-8x2B",
    "neox": "arXiv 2204.06745, section 2",
    "olmo": "arXiv 2501.00656 and 2409.02060, and config.json of allenai's models",
    "smollm": "config.json of HuggingFaceTB's models",
    "dbrx": "config.json of databricks/dbrx-base",
}

# Name, source, layers, hidden, heads, heads of keys, features, vocabulary; then what differs from a dense model with
# gates, an untied head, and heads of hidden / heads.
_Line = tuple[str, str, int, int, int, int, int, int, dict[str, Any]]


def _moe(experts: int, chosen: int, features: int, shared: int = 0, dense: int = 0) -> dict[str, Any]:
    return {
        "experts": experts,
        "chosen": chosen,
        "expert_ffn": features,
        "shared_ffn": shared,
        "dense_layers": dense,
    }


def _windows(tokens: int, windowed: int, layers: int) -> dict[str, Any]:
    return {"window": tokens, "windowed": windowed / layers}


_TIED = {"tied": True}
_GPT = {"gated": False, "tied": True}

_LINES: tuple[_Line, ...] = (
    ("llama-7b", "llama", 32, 4096, 32, 32, 11008, 32000, {"positions": 2048}),
    ("llama-13b", "llama", 40, 5120, 40, 40, 13824, 32000, {"positions": 2048}),
    ("llama-33b", "llama", 60, 6656, 52, 52, 17920, 32000, {"positions": 2048}),
    ("llama-65b", "llama", 80, 8192, 64, 64, 22016, 32000, {"positions": 2048}),
    ("llama-2-7b", "llama-2", 32, 4096, 32, 32, 11008, 32000, {"positions": 4096}),
    ("llama-2-13b", "llama-2", 40, 5120, 40, 40, 13824, 32000, {"positions": 4096}),
    ("llama-2-70b", "llama-2", 80, 8192, 64, 8, 28672, 32000, {"positions": 4096}),
    ("codellama-34b", "codellama", 48, 8192, 64, 8, 22016, 32000, {"positions": 16384}),
    ("llama-3-8b", "llama-3", 32, 4096, 32, 8, 14336, 128256, {"positions": 8192}),
    ("llama-3-70b", "llama-3", 80, 8192, 64, 8, 28672, 128256, {"positions": 8192}),
    ("llama-3-405b", "llama-3", 126, 16384, 128, 8, 53248, 128256, {"positions": 131072}),
    ("llama-3.1-8b", "llama-3", 32, 4096, 32, 8, 14336, 128256, {"positions": 131072}),
    ("llama-3.1-70b", "llama-3", 80, 8192, 64, 8, 28672, 128256, {"positions": 131072}),
    ("llama-3.1-405b", "llama-3", 126, 16384, 128, 8, 53248, 128256, {"positions": 131072}),
    ("llama-3.2-1b", "llama-3", 16, 2048, 32, 8, 8192, 128256, _TIED | {"positions": 131072}),
    ("llama-3.2-3b", "llama-3", 28, 3072, 24, 8, 8192, 128256, _TIED | {"positions": 131072}),
    ("llama-3.3-70b", "llama-3", 80, 8192, 64, 8, 28672, 128256, {"positions": 131072}),
    ("mistral-7b", "mistral", 32, 4096, 32, 8, 14336, 32000, _windows(4096, 32, 32) | {"positions": 32768}),
    ("mistral-nemo-12b", "mistral", 40, 5120, 32, 8, 14336, 131072, {"head_dim": 128, "positions": 131072}),
    ("mistral-small-24b", "mistral", 40, 5120, 32, 8, 32768, 131072, {"head_dim": 128, "positions": 32768}),
    ("mistral-large-123b", "mistral", 88, 12288, 96, 8, 28672, 32768, {"positions": 131072}),
    ("mixtral-8x7b", "mixtral", 32, 4096, 32, 8, 14336, 32000, _moe(8, 2, 14336) | {"positions": 32768}),
    ("mixtral-8x22b", "mixtral", 56, 6144, 48, 8, 16384, 32768, _moe(8, 2, 16384) | {"positions": 65536}),
    ("qwen-7b", "qwen", 32, 4096, 32, 32, 11008, 151936, {"positions": 8192}),
    ("qwen-14b", "qwen", 40, 5120, 40, 40, 13696, 152064, {"positions": 8192}),
    ("qwen-72b", "qwen", 80, 8192, 64, 64, 24576, 152064, {"positions": 32768}),
    ("qwen-1.5-0.5b", "qwen", 24, 1024, 16, 16, 2816, 151936, _TIED | {"positions": 32768}),
    ("qwen-1.5-1.8b", "qwen", 24, 2048, 16, 16, 5504, 151936, {"positions": 32768}),
    ("qwen-1.5-4b", "qwen", 40, 2560, 20, 20, 6912, 151936, {"positions": 32768}),
    ("qwen-1.5-7b", "qwen", 32, 4096, 32, 32, 11008, 151936, {"positions": 32768}),
    ("qwen-1.5-14b", "qwen", 40, 5120, 40, 40, 13696, 152064, {"positions": 32768}),
    ("qwen-1.5-32b", "qwen", 64, 5120, 40, 8, 27392, 152064, {"positions": 32768}),
    ("qwen-1.5-72b", "qwen", 80, 8192, 64, 64, 24576, 152064, {"positions": 32768}),
    ("qwen-1.5-110b", "qwen", 80, 8192, 64, 8, 49152, 152064, {"positions": 32768}),
    ("qwen-2-0.5b", "qwen-2", 24, 896, 14, 2, 4864, 151936, _TIED | {"positions": 131072}),
    ("qwen-2-1.5b", "qwen-2", 28, 1536, 12, 2, 8960, 151936, _TIED | {"positions": 131072}),
    ("qwen-2-7b", "qwen-2", 28, 3584, 28, 4, 18944, 152064, {"positions": 131072}),
    ("qwen-2-72b", "qwen-2", 80, 8192, 64, 8, 29568, 152064, {"positions": 131072}),
    ("qwen-2-57b-a14b", "qwen-2", 28, 3584, 28, 4, 18944, 151936, _moe(64, 8, 2560, 20480)),
    ("qwen-2.5-0.5b", "qwen-2.5", 24, 896, 14, 2, 4864, 151936, _TIED | {"positions": 32768}),
    ("qwen-2.5-1.5b", "qwen-2.5", 28, 1536, 12, 2, 8960, 151936, _TIED | {"positions": 131072}),
    ("qwen-2.5-3b", "qwen-2.5", 36, 2048, 16, 2, 11008, 151936, _TIED | {"positions": 32768}),
    ("qwen-2.5-7b", "qwen-2.5", 28, 3584, 28, 4, 18944, 152064, {"positions": 131072}),
    ("qwen-2.5-14b", "qwen-2.5", 48, 5120, 40, 8, 13824, 152064, {"positions": 131072}),
    ("qwen-2.5-32b", "qwen-2.5", 64, 5120, 40, 8, 27648, 152064, {"positions": 131072}),
    ("qwen-2.5-72b", "qwen-2.5", 80, 8192, 64, 8, 29568, 152064, {"positions": 131072}),
    ("qwen-3-0.6b", "qwen-3", 28, 1024, 16, 8, 3072, 151936, _TIED | {"head_dim": 128, "positions": 40960}),
    ("qwen-3-1.7b", "qwen-3", 28, 2048, 16, 8, 6144, 151936, _TIED | {"head_dim": 128, "positions": 40960}),
    ("qwen-3-4b", "qwen-3", 36, 2560, 32, 8, 9728, 151936, _TIED | {"head_dim": 128, "positions": 40960}),
    ("qwen-3-8b", "qwen-3", 36, 4096, 32, 8, 12288, 151936, {"head_dim": 128, "positions": 40960}),
    ("qwen-3-14b", "qwen-3", 40, 5120, 40, 8, 17408, 151936, {"head_dim": 128, "positions": 40960}),
    ("qwen-3-32b", "qwen-3", 64, 5120, 64, 8, 25600, 151936, {"head_dim": 128, "positions": 40960}),
    (
        "qwen-3-30b-a3b",
        "qwen-3",
        *(48, 2048, 32, 4, 6144, 151936),
        _moe(128, 8, 768) | {"head_dim": 128, "positions": 40960},
    ),
    (
        "qwen-3-235b-a22b",
        "qwen-3",
        *(94, 4096, 64, 4, 12288, 151936),
        _moe(128, 8, 1536) | {"head_dim": 128, "positions": 40960},
    ),
    ("gemma-2b", "gemma", 18, 2048, 8, 1, 16384, 256000, _TIED | {"head_dim": 256, "positions": 8192}),
    ("gemma-7b", "gemma", 28, 3072, 16, 16, 24576, 256000, _TIED | {"head_dim": 256, "positions": 8192}),
    (
        "gemma-2-2b",
        "gemma-2",
        *(26, 2304, 8, 4, 9216, 256000),
        _TIED | _windows(4096, 13, 26) | {"head_dim": 256, "positions": 8192},
    ),
    (
        "gemma-2-9b",
        "gemma-2",
        *(42, 3584, 16, 8, 14336, 256000),
        _TIED | _windows(4096, 21, 42) | {"head_dim": 256, "positions": 8192},
    ),
    (
        "gemma-2-27b",
        "gemma-2",
        *(46, 4608, 32, 16, 36864, 256000),
        _TIED | _windows(4096, 23, 46) | {"head_dim": 128, "positions": 8192},
    ),
    (
        "gemma-3-1b",
        "gemma-3",
        *(26, 1152, 4, 1, 6912, 262144),
        _TIED | _windows(512, 22, 26) | {"head_dim": 256, "positions": 32768},
    ),
    (
        "gemma-3-4b",
        "gemma-3",
        *(34, 2560, 8, 4, 10240, 262208),
        _TIED | _windows(1024, 29, 34) | {"head_dim": 256, "positions": 131072},
    ),
    (
        "gemma-3-12b",
        "gemma-3",
        *(48, 3840, 16, 8, 15360, 262208),
        _TIED | _windows(1024, 40, 48) | {"head_dim": 256, "positions": 131072},
    ),
    (
        "gemma-3-27b",
        "gemma-3",
        *(62, 5376, 32, 16, 21504, 262208),
        _TIED | _windows(1024, 52, 62) | {"head_dim": 128, "positions": 131072},
    ),
    ("phi-2", "phi", 32, 2560, 32, 32, 10240, 51200, {"gated": False, "positions": 2048}),
    ("phi-3-mini", "phi", 32, 3072, 32, 32, 8192, 32064, _windows(2047, 32, 32) | {"positions": 4096}),
    ("phi-3-medium", "phi", 40, 5120, 40, 10, 17920, 32064, _windows(2047, 40, 40) | {"positions": 4096}),
    ("phi-3.5-moe", "phi", 32, 4096, 32, 8, 6400, 32064, _moe(16, 2, 6400) | {"positions": 131072}),
    ("phi-4", "phi", 40, 5120, 40, 10, 17920, 100352, {"positions": 16384}),
    ("phi-4-mini", "phi", 32, 3072, 24, 8, 8192, 200064, _TIED | {"positions": 131072}),
    (
        "gpt-oss-20b",
        "gpt-oss",
        *(24, 2880, 64, 8, 2880, 201088),
        _moe(32, 4, 2880) | _windows(128, 12, 24) | {"head_dim": 64, "positions": 131072},
    ),
    (
        "gpt-oss-120b",
        "gpt-oss",
        *(36, 2880, 64, 8, 2880, 201088),
        _moe(128, 4, 2880) | _windows(128, 18, 36) | {"head_dim": 64, "positions": 131072},
    ),
    ("deepseek-7b", "deepseek", 30, 4096, 32, 32, 11008, 102400, {"positions": 4096}),
    ("deepseek-67b", "deepseek", 95, 8192, 64, 8, 22016, 102400, {"positions": 4096}),
    (
        "deepseek-moe-16b",
        "deepseek",
        *(28, 2048, 16, 16, 10944, 102400),
        _moe(64, 6, 1408, 2816, 1) | {"positions": 4096},
    ),
    (
        "deepseek-v2-lite",
        "deepseek-v2",
        *(27, 2048, 16, 16, 10944, 102400),
        _moe(64, 6, 1408, 2816, 1) | {"latent": _LATENT_LITE, "positions": 163840},
    ),
    (
        "deepseek-v2",
        "deepseek-v2",
        *(60, 5120, 128, 128, 12288, 102400),
        _moe(160, 6, 1536, 3072, 1) | {"latent": _LATENT, "positions": 163840},
    ),
    (
        "deepseek-v3",
        "deepseek-v3",
        *(61, 7168, 128, 128, 18432, 129280),
        _moe(256, 8, 2048, 2048, 3) | {"latent": _LATENT, "positions": 163840},
    ),
    (
        "kimi-k2",
        "kimi",
        *(61, 7168, 64, 64, 18432, 163840),
        _moe(384, 8, 2048, 2048, 1) | {"latent": _LATENT, "positions": 131072},
    ),
    (
        "moonlight-16b",
        "moonlight",
        *(27, 2048, 16, 16, 11264, 163840),
        _moe(64, 6, 1408, 2816, 1) | {"latent": _LATENT_LITE, "positions": 8192},
    ),
    ("gpt-2", "gpt-2", 12, 768, 12, 12, 3072, 50257, _GPT | {"positions": 1024}),
    ("gpt-2-medium", "gpt-2", 24, 1024, 16, 16, 4096, 50257, _GPT | {"positions": 1024}),
    ("gpt-2-large", "gpt-2", 36, 1280, 20, 20, 5120, 50257, _GPT | {"positions": 1024}),
    ("gpt-2-xl", "gpt-2", 48, 1600, 25, 25, 6400, 50257, _GPT | {"positions": 1024}),
    ("gpt-3-6.7b", "gpt-3", 32, 4096, 32, 32, 16384, 50257, _GPT | {"positions": 2048}),
    ("gpt-3-13b", "gpt-3", 40, 5120, 40, 40, 20480, 50257, _GPT | {"positions": 2048}),
    ("gpt-3-175b", "gpt-3", 96, 12288, 96, 96, 49152, 50257, _GPT | {"positions": 2048}),
    ("megatron-1.7b", "megatron", 24, 2304, 24, 24, 9216, 51200, _GPT | {"positions": 2048}),
    ("megatron-3.6b", "megatron", 30, 3072, 32, 32, 12288, 51200, _GPT | {"positions": 2048}),
    ("megatron-7.5b", "megatron", 36, 4096, 32, 32, 16384, 51200, _GPT | {"positions": 2048}),
    ("megatron-18b", "megatron", 40, 6144, 48, 48, 24576, 51200, _GPT | {"positions": 2048}),
    ("megatron-22b", "megatron-22b", 48, 6144, 64, 64, 24576, 51200, _GPT | {"positions": 2048}),
    ("megatron-39b", "megatron", 48, 8192, 64, 64, 32768, 51200, _GPT | {"positions": 2048}),
    ("megatron-76b", "megatron", 60, 10240, 80, 80, 40960, 51200, _GPT | {"positions": 2048}),
    ("megatron-145b", "megatron", 80, 12288, 96, 96, 49152, 51200, _GPT | {"positions": 2048}),
    ("megatron-310b", "megatron", 96, 16384, 128, 128, 65536, 51200, _GPT | {"positions": 2048}),
    ("megatron-530b", "megatron", 105, 20480, 128, 128, 81920, 51200, _GPT | {"positions": 2048}),
    ("megatron-1t", "megatron", 128, 25600, 160, 160, 102400, 51200, _GPT | {"positions": 2048}),
    ("nemotron-8b", "nemotron", 32, 4096, 32, 32, 16384, 256000, {"gated": False, "positions": 4096}),
    ("nemotron-22b", "nemotron", 40, 6144, 48, 48, 24576, 256000, {"gated": False, "positions": 4096}),
    ("nemotron-4-15b", "nemotron-4", 32, 6144, 48, 8, 24576, 256000, {"gated": False, "positions": 4096}),
    ("nemotron-4-340b", "nemotron-4", 96, 18432, 96, 8, 73728, 256000, {"gated": False, "positions": 4096}),
    ("pangu-ultra-135b", "pangu", 94, 12288, 96, 8, 28672, 153376, {"positions": 131072}),
    (
        "pangu-ultra-moe-718b",
        "pangu-moe",
        *(61, 7680, 128, 128, 18432, 153600),
        _moe(256, 8, 2048, 2048, 3) | {"latent": _LATENT, "positions": 131072},
    ),
    ("telechat-2-115b", "telechat", 96, 8192, 64, 8, 40960, 131072, {"positions": 8192}),
    ("mpt-125m", "mpt", 12, 768, 12, 12, 3072, 50368, _GPT | {"positions": 2048}),
    ("mpt-350m", "mpt", 24, 1024, 16, 16, 4096, 50368, _GPT | {"positions": 2048}),
    ("mpt-760m", "mpt", 24, 1536, 12, 12, 6144, 50368, _GPT | {"positions": 2048}),
    ("mpt-1b", "mpt", 24, 2048, 16, 16, 8192, 50368, _GPT | {"positions": 2048}),
    ("mpt-3b", "mpt", 32, 2560, 20, 20, 10240, 50368, _GPT | {"positions": 2048}),
    ("mpt-7b", "mpt", 32, 4096, 32, 32, 16384, 50368, _GPT | {"positions": 2048}),
    ("mpt-13b", "mpt", 40, 5120, 40, 40, 20480, 50368, _GPT | {"positions": 2048}),
    ("mpt-30b", "mpt", 48, 7168, 56, 56, 28672, 50368, _GPT | {"positions": 2048}),
    ("mpt-70b", "mpt", 80, 8192, 64, 64, 32768, 50368, _GPT | {"positions": 2048}),
    ("nanotron-1b", "nanotron", 16, 2048, 32, 32, 8192, 131072, _TIED | {"positions": 4096}),
    ("nanotron-3b", "nanotron", 28, 3072, 32, 32, 8192, 131072, _TIED | {"positions": 4096}),
    ("nanotron-8b", "nanotron", 32, 4096, 32, 32, 14336, 131072, {"positions": 4096}),
    ("hypertron-310b", "hypertron", 96, 16384, 128, 128, 65536, 51200, _GPT | {"positions": 4096}),
    (
        "hypertron-141b",
        "hypertron-sparse",
        56,
        6144,
        48,
        8,
        16384,
        32768,
        _moe(8, 2, 16384) | {"positions": 8192},
    ),
    ("chatglm-3-6b", "glm", 28, 4096, 32, 2, 13696, 65024, {"positions": 32768}),
    ("glm-4-9b", "glm", 40, 4096, 32, 2, 13696, 151552, {"positions": 131072}),
    (
        "glm-4.5",
        "glm",
        *(92, 5120, 96, 8, 12288, 151552),
        _moe(160, 8, 1536, 1536, 3) | {"head_dim": 128, "positions": 131072},
    ),
    (
        "glm-4.5-air",
        "glm",
        *(46, 4096, 96, 8, 10944, 151552),
        _moe(128, 8, 1408, 1408, 1) | {"head_dim": 128, "positions": 131072},
    ),
    ("baichuan-13b", "baichuan", 40, 5120, 40, 40, 13696, 64000, {"positions": 4096}),
    ("baichuan-2-7b", "baichuan", 32, 4096, 32, 32, 11008, 125696, {"positions": 4096}),
    ("baichuan-2-13b", "baichuan", 40, 5120, 40, 40, 13696, 125696, {"positions": 4096}),
    ("bloom-7b", "bloom", 30, 4096, 32, 32, 16384, 250880, _GPT | {"positions": 2048}),
    ("bloom-176b", "bloom", 70, 14336, 112, 112, 57344, 250880, _GPT | {"positions": 2048}),
    ("internlm-2-7b", "internlm", 32, 4096, 32, 8, 14336, 92544, {"positions": 32768}),
    ("internlm-2-20b", "internlm", 48, 6144, 48, 8, 16384, 92544, {"positions": 32768}),
    ("yi-6b", "yi", 32, 4096, 32, 4, 11008, 64000, {"positions": 4096}),
    ("yi-34b", "yi", 60, 7168, 56, 8, 20480, 64000, {"positions": 4096}),
    ("aquila-7b", "aquila", 32, 4096, 32, 32, 11008, 100008, {"positions": 2048}),
    ("aquila-2-34b", "aquila", 60, 6144, 48, 8, 24576, 100008, {"positions": 4096}),
    (
        "minicpm-8x2b",
        "minicpm",
        40,
        2304,
        36,
        36,
        5760,
        122753,
        _TIED | _moe(8, 2, 5760) | {"positions": 4096},
    ),
    ("gpt-neox-20b", "neox", 44, 6144, 64, 64, 24576, 50432, {"gated": False, "positions": 2048}),
    ("olmo-2-7b", "olmo", 32, 4096, 32, 32, 11008, 100352, {"positions": 4096}),
    ("olmo-2-13b", "olmo", 40, 5120, 40, 40, 13824, 100352, {"positions": 4096}),
    ("olmo-2-32b", "olmo", 64, 5120, 40, 8, 27648, 100352, {"positions": 4096}),
    ("olmoe-1b-7b", "olmo", 16, 2048, 16, 16, 1024, 50304, _moe(64, 8, 1024) | {"positions": 4096}),
    ("smollm-2-1.7b", "smollm", 24, 2048, 32, 32, 8192, 49152, _TIED | {"positions": 8192}),
    ("smollm-3-3b", "smollm", 36, 2048, 16, 4, 11008, 128256, _TIED | {"positions": 65536}),
    ("dbrx-132b", "dbrx", 40, 6144, 48, 8, 10752, 100352, _moe(16, 4, 10752) | {"positions": 32768}),
)

_ALIASES = {
    "llama-30b": "llama-33b",
    "gpt-2-small": "gpt-2",
    "gpt-3": "gpt-3-175b",
    "gpt-1t": "megatron-1t",
    "megatron-1008b": "megatron-1t",
    "megatron-18.4b": "megatron-18b",
    "megatron-39.1b": "megatron-39b",
    "megatron-310.1b": "megatron-310b",
    "mt-nlg-530b": "megatron-530b",
    "nemotron-3-8b": "nemotron-8b",
    "nemotron-3-22b": "nemotron-22b",
    "nemotron-340b": "nemotron-4-340b",
    "nemotron-15b": "nemotron-4-15b",
    "moonlight-16b-a3b": "moonlight-16b",
    "kimi-k2-1t-a32b": "kimi-k2",
    "deepseek-v3-671b": "deepseek-v3",
    "deepseek-r1": "deepseek-v3",
    "deepseek-v2-236b": "deepseek-v2",
    "deepseek-v2-lite-16b": "deepseek-v2-lite",
    "deepseek-llm-7b": "deepseek-7b",
    "deepseek-llm-67b": "deepseek-67b",
    "pangu-135b": "pangu-ultra-135b",
    "pangu-718b": "pangu-ultra-moe-718b",
    "hypertron-dense-310b": "hypertron-310b",
    "hypertron-sparse-141b": "hypertron-141b",
    "phi-4-14b": "phi-4",
    "phi-3-mini-3.8b": "phi-3-mini",
    "phi-3-medium-14b": "phi-3-medium",
    "mistral-nemo": "mistral-nemo-12b",
    "mistral-large": "mistral-large-123b",
    "glm-4.5-355b-a32b": "glm-4.5",
    "glm-4.5-air-106b-a12b": "glm-4.5-air",
    "dbrx": "dbrx-132b",
}

_ENDINGS = re.compile(r"(-(instruct|chat|base|hf|it|pt|v0\.\d|\d+k))+$")
"""Of a model's variants that have the same dimensions."""


def names() -> list[str]:
    """The models' names."""
    return [line[0] for line in _LINES]


def shape(name: str) -> Shape:
    """A published model's shape. Raises ConfigError for a name that is not known, with the nearest.

    >>> shape("Llama-3.1-405B").layers
    126
    """
    found = known(name)
    if found is None:
        hint = nearest(name.lower(), [*names(), *_ALIASES])
        # All names are a long line: they are told where none is near.
        known_ones = f"; give one of {', '.join(names())}" if not hint else ""
        raise ConfigError(
            f"there is no model {name!r} among the published ones{hint}{known_ones}; or give the folder of a "
            "Transformers model with its config.json"
        )
    return found


def known(name: str) -> Shape | None:
    """The shape of a published model, or None where the name is none."""
    plain = name.rsplit("/", 1)[-1].lower().replace("_", "-")
    shapes = _shapes()
    return shapes.get(_key(plain)) or shapes.get(_key(_ENDINGS.sub("", plain)))


def _key(name: str) -> str:
    """What is left of a name without case and punctuation."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


@cache
def _shapes() -> dict[str, Shape]:
    made = {line[0]: _shape(*line) for line in _LINES}
    made |= {alias: made[name] for alias, name in _ALIASES.items()}
    keyed = {_key(name): shape for name, shape in made.items()}
    assert len(keyed) == len(made), "no two names are one without punctuation"
    return keyed


def _shape(
    name: str,
    source: str,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    ffn: int,
    vocabulary: int,
    rest: dict[str, Any],
) -> Shape:
    fields: dict[str, Any] = {"gated": True, "head_dim": hidden // heads, **rest}
    latent = fields.get("latent")
    if latent is not None:
        fields["head_dim"] = latent.plain + latent.rotary
    return Shape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        ffn=ffn,
        vocabulary=vocabulary,
        source=_SOURCES[source],
        **fields,
    )
