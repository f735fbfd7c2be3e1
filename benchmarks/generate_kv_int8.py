"""What int8 pages of the KV cache cost in accuracy, and save in bytes: python benchmarks/generate_kv_int8.py

For each of twelve families, with a small model of new weights, and for a Llama that is trained
here on text of a Markov chain (as it is, and with channels of large keys): greedy answers from pages in the model's
dtype, and the log-probabilities that these and int8 pages give to their tokens (teacher forcing: prompt and answer are
replayed through the cache). Also how often both have the same most likely token, and how far greedy answers agree. Of
the trained models also with groups of other sizes. Writes ``benchmarks/results/generate_kv_int8.json`` and the table in
``docs/inference-int8.md``.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from commandline import run
from generate_logprobs import SPREAD, family_model, logprobs_of, spread
from generation import equal_tokens
from measure import quiet
from pages import Benchmark, table
from shapes import llama, random_prompts
from transformers import LlamaConfig, LlamaForCausalLM

from hyper_parallel.inference import Generator
from hyper_parallel.inference.kv_cache import pages
from hyper_parallel.inference.kv_cache.sizes import page_bytes

FAMILIES = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "gpt2", "gpt-oss"),
    *("mixtral", "qwen3-moe", "deepseek-v3"),
)
LENGTHS, TOKENS, PAGE = (1, 31, 33, 70, 200, 300, 12, 150), 32, 32
STEPS = 500
"""Of training."""
TRAINED, OUTLIERS = "llama, trained here", "the same, outlier channels"
OUTLIER, GROUPS = 16, (16, 32, 64)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def trained_model() -> tuple[Any, list[list[int]], float]:
    """A Llama that continues text of a Markov chain of second order, prompts of it, and the loss in nats. Each pair of
    24 tokens has 4 continuations; a model that knows them all has a loss of 1.21 nats, and one that knows none 3.18."""
    torch.manual_seed(0)
    draws = torch.Generator().manual_seed(0)
    size, shares = 24, torch.tensor([0.5, 0.25, 0.15, 0.1])
    following = torch.randint(size, (size, size, 4), generator=draws)

    def text(rows: int, length: int) -> torch.Tensor:
        found = torch.randint(size, (rows, length), generator=draws)
        which = torch.multinomial(shares, rows * length, replacement=True, generator=draws).view(rows, length)
        for place in range(2, length):
            found[:, place] = following[found[:, place - 2], found[:, place - 1], which[:, place]]
        return found

    model: Any = LlamaForCausalLM(LlamaConfig(**llama(128, 2, 2, inner=256, kv=2, vocabulary=size)))
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=STEPS)
    loss = torch.tensor(0.0)
    for _ in range(STEPS):
        row = text(16, 64)
        loss = model(row, labels=row).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model.eval(), [text(1, length)[0].tolist() for length in LENGTHS], float(loss.detach())


def with_outliers(model: Any) -> Any:
    """The same function, with keys that have a channel of `OUTLIER` times the others: its queries are as much smaller.
    A rotary embedding turns channels i and i + D / 2 together, which both are scaled."""
    found = copy.deepcopy(model)
    size = found.config.head_dim
    for layer in found.model.layers:
        for weight, factor in (
            (layer.self_attn.k_proj.weight, OUTLIER),
            (layer.self_attn.q_proj.weight, 1 / OUTLIER),
        ):
            with torch.no_grad():
                weight.view(-1, size, weight.size(1))[:, [3, 3 + size // 2]] *= factor
    return found


def replayed(model: Any, texts: list[list[int]], kv_dtype: str | None = None) -> list[torch.Tensor]:
    """Float32 logits [TOKENS, V] before each of the last tokens of each text."""
    engine = Generator(model, page=PAGE, kv_dtype=kv_dtype)._engine
    return [rows[:TOKENS] for rows in engine.replayed(texts, TOKENS, exact=False)]


def measured(model: Any, prompts: list[list[int]], groups: tuple[int, ...] = ()) -> dict[str, Any]:
    """Of one model, with scales for `groups` values, by default as many as pages have."""
    plain = Generator(model, max_tokens=TOKENS, page=PAGE)
    answers = [one.tokens for one in plain(prompts)]
    rounding = Generator(model, max_tokens=TOKENS, page=PAGE, kv_dtype="int8")
    tokens, default = TOKENS * len(prompts), pages.GROUP
    same = (equal_tokens(own.tokens, other) for own, other in zip(rounding(prompts), answers, strict=True))
    result: dict[str, Any] = {
        "page_bytes": page_bytes(plain._engine.cache.shapes, PAGE),
        "int8_page_bytes": page_bytes(rounding._engine.cache.shapes, PAGE),
        "greedy": sum(same) / tokens,
        "groups": {},
    }
    texts = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    exact = replayed(model, texts)
    for group in groups or (default,):
        pages.GROUP = group
        rounded = replayed(model, texts, "int8")
        off, chosen = [], 0
        for own, other, answer in zip(rounded, exact, answers, strict=True):
            off.append(logprobs_of(own, answer) - logprobs_of(other, answer))
            chosen += int((own.argmax(-1) == other.argmax(-1)).sum())
        result["groups"][str(group)] = {**spread(off), "chosen": chosen / tokens}
    pages.GROUP = default
    best = torch.cat([rows.log_softmax(-1).topk(2, -1).values for rows in exact])
    result["margin"] = float((best[:, 0] - best[:, 1]).median())
    return result


def page(result: Mapping[str, Any]) -> Iterator[str]:
    def row(family: str, dtype: str, one: Mapping[str, Any]) -> Iterator[str]:
        found = one["groups"][str(pages.GROUP)]
        ratio = one["page_bytes"] / one["int8_page_bytes"]
        yield from (family, dtype, f"{one['page_bytes']}, {one['int8_page_bytes']}: 1/{ratio:.2f}")
        yield from (off(found), f"{found['chosen']:.1%}", f"{one['greedy']:.1%}")
        yield f"{one['margin']:.2g}"

    def off(found: Mapping[str, float]) -> str:
        return ", ".join(f"{found[which]:.2g}" for which in SPREAD)

    yield from table(
        "Model | dtype | bytes of a page, in int8 | difference of log-probabilities: median, 99%, largest | same most "
        "likely token | greedy tokens before the first other one | margin",
        (tuple(row(family, *one)) for family, of in result["families"].items() for one in of.items()),
    )
    yield ""
    yield (
        f"The trained model's loss is {result['loss']:.2f} nats; 3.18 would know nothing of its text, 1.21 all that "
        "can be known. With scales for other numbers of values (its heads have 64):"
    )
    yield ""
    groups = {kind: result["families"][kind]["float32"]["groups"] for kind in (TRAINED, OUTLIERS)}
    yield from table(
        "Model, float32 | " + " | ".join(f"{group} values a scale" for group in GROUPS),
        ((kind, *(off(found[str(group)]) for group in GROUPS)) for kind, found in groups.items()),
    )


BENCHMARK = Benchmark("generate_kv_int8", {"inference-int8.md": page})


def main() -> bool:
    """Measure; whether the trained model's log-probabilities are off by more than 0.1 nats at the 99th percentile."""
    quiet(threads=1)
    model, prompts, loss = trained_model()
    found: dict[str, Any] = {}
    for kind, trained in ((TRAINED, model), (OUTLIERS, with_outliers(model))):
        found[kind] = {
            name: measured(copy.deepcopy(trained).to(dtype), prompts, GROUPS)
            for name, dtype in DTYPES.items()
        }
        print(kind, found[kind], flush=True)
    for family in FAMILIES:
        found[family] = {}
        for name in DTYPES:
            model = family_model(family, name)
            some = random_prompts(LENGTHS, model.config.get_text_config().vocab_size)
            found[family][name] = measured(model, some)
        print(family, found[family], flush=True)
    BENCHMARK.keep({"answers": len(LENGTHS), "tokens": TOKENS, "page": PAGE, "loss": loss, "families": found})
    return bool(found[TRAINED]["float32"]["groups"][str(pages.GROUP)]["p99"] > 0.1)


if __name__ == "__main__":
    run(main)
