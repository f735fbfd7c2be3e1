"""Throughput of generation beside Transformers': python benchmarks/generate_throughput.py

64 prompts of 8 to 64 tokens, drawn at random, and answers of 16 to 256 tokens, in float32 on the CPU:
- ours: `Generator`, requests in the order in which they came, with its defaults;
- static: `generate` on batches of requests sorted by an oracle of their answers' lengths, the shortest first. A batch
  runs until its longest answer is there. Of several sizes of a batch the one that is fastest here;
- continuous: what `generate_batch` does, with each request's own length, a cache for all of them, and of two sizes of a
  page the one that is fastest here.

They take turns in one process. All give greedy tokens; those of ours and static are compared, with ties listed. Seconds
are of the clock, and of the processor, which says more where others use the machine. Writes
``benchmarks/results/generate_throughput.json``, unless flags shorten it.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from measure import machine, paired_ratio, without_notes, write
from pages import DOCS, put
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import set_verbosity_error

from hyper_parallel import Generator

REQUESTS, SHORTEST, LONGEST = 64, 16, 256
PROMPTS = (8, 64)
SIZES = (16, 32, 64)
"""Of static batches."""
PAGES = (32, 256)
"""Tokens of a page of `generate_batch`."""
Answers = list[list[int]]


@dataclass(frozen=True)
class Case:
    """A Llama."""

    layers: int
    hidden: int
    heads: int = 8
    vocabulary: int = 4096

    def model(self) -> Any:
        """With new weights; no token ends an answer."""
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.hidden * 11 // 4,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads // 2,
            max_position_embeddings=512,
            tie_word_embeddings=False,
        )
        model = LlamaForCausalLM(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(3)
        model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0, eos_token_id=None)
        return model


CASES = {"4 x 256": Case(4, 256), "12 x 512": Case(12, 512)}


@dataclass(frozen=True)
class Work:
    """Prompts, and the tokens of each answer."""

    prompts: list[list[int]]
    lengths: list[int]


def drawn(requests: int, longest: int, vocabulary: int) -> Work:
    """The requests."""
    draws = torch.Generator().manual_seed(7)
    sizes = torch.randint(PROMPTS[0], PROMPTS[1] + 1, (requests,), generator=draws).tolist()
    prompts = [torch.randint(4, vocabulary, (size,), generator=draws).tolist() for size in sizes]
    lengths = torch.randint(SHORTEST, longest + 1, (requests,), generator=draws).tolist()
    return Work(prompts, lengths)


def ours(model: Any, work: Work, **settings: Any) -> Callable[[], Answers]:
    """`Generator`, with the model from a folder, as the command has it."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        generator = Generator(folder, **settings)
    return answered(generator, work)


def answered(generator: Generator, work: Work) -> Callable[[], Answers]:
    """All requests at once, each with its own length."""
    one_by_one = [generator.settings.model_copy(update={"max_tokens": length}) for length in work.lengths]

    def run() -> Answers:
        requests = [
            generator.request(ids, chosen) for ids, chosen in zip(work.prompts, one_by_one, strict=True)
        ]
        found = dict(generator.run(requests))
        return [found[place].tokens for place in range(len(requests))]

    return run


def static(model: Any, work: Work, size: int) -> Callable[[], Answers]:
    """`generate` on batches sorted by the lengths of answers."""

    def run() -> Answers:
        order = sorted(range(len(work.prompts)), key=work.lengths.__getitem__)
        found: dict[int, list[int]] = {}
        for first in range(0, len(order), size):
            batch = order[first : first + size]
            longest = max(len(work.prompts[place]) for place in batch)
            ids = torch.zeros(len(batch), longest, dtype=torch.int64, device=model.device)
            mask = torch.zeros_like(ids)
            for row, place in enumerate(batch):
                prompt = work.prompts[place]
                ids[row, longest - len(prompt) :] = torch.tensor(prompt)
                mask[row, longest - len(prompt) :] = 1
            answer = model.generate(
                ids, attention_mask=mask, max_new_tokens=max(work.lengths[place] for place in batch)
            )
            for row, place in enumerate(batch):
                found[place] = answer[row, longest : longest + work.lengths[place]].tolist()
        return [found[place] for place in range(len(order))]

    return run


def continuous(model: Any, work: Work, page: int) -> Callable[[], Answers]:
    """`generate_batch` with each request's own length, which its own arguments have for all requests only."""
    tokens = [len(ids) + length for ids, length in zip(work.prompts, work.lengths, strict=True)]
    blocks = sum(-(-one // page) for one in tokens)

    def run() -> Answers:
        config = ContinuousBatchingConfig(
            page_size=page, num_blocks=blocks, max_batch_tokens=256, max_requests_per_batch=len(tokens)
        )
        found: dict[str, list[int]] = {}
        with (
            torch.no_grad(),
            model.continuous_batching_context_manager(continuous_batching_config=config) as manager,
        ):
            for place, (ids, length) in enumerate(zip(work.prompts, work.lengths, strict=True)):
                manager.add_request(ids, request_id=str(place), max_new_tokens=length)
            while len(found) < len(tokens):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    if result.error is not None:
                        raise RuntimeError(result.error)
                    found[result.request_id] = list(result.generated_tokens)
                elif result is None and not manager.is_running():
                    raise RuntimeError("the thread of generate_batch ended before its requests")
        model.set_attn_implementation("sdpa")
        return [found[str(place)] for place in range(len(tokens))]

    return run


def seconds(run: Callable[[], Answers]) -> tuple[float, float, Answers]:
    """Of the clock and of the processor, and the answers."""
    gc.collect()
    clock, processor = time.perf_counter(), time.process_time()
    answers = run()
    return time.perf_counter() - clock, time.process_time() - processor, answers


def fastest(runs: Sequence[tuple[str, Callable[[], Answers]]]) -> tuple[str, dict[str, float]]:
    """The one that takes the fewest seconds of the processor, of two runs each, and the seconds of each."""
    found = {name: min(seconds(run)[1] for _ in range(2)) for name, run in runs}
    return min(found, key=found.__getitem__), found


def differences(model: Any, work: Work, own: Answers, other: Answers) -> dict[str, Any]:
    """Answers that differ, and how near the two logits are where they first do."""
    gaps = []
    for prompt, ours_, theirs in zip(work.prompts, own, other, strict=True):
        place = next(
            (at for at, pair in enumerate(zip(ours_, theirs, strict=True)) if pair[0] != pair[1]), None
        )
        if place is not None:
            with torch.no_grad():
                ids = torch.tensor([prompt + ours_[:place]], device=model.device)
                logits = model(ids).logits[0, -1]
            gaps.append(float((logits[ours_[place]] - logits[theirs[place]]).abs()))
    return {"answers": len(gaps), "largest_gap": max(gaps, default=0.0)}


def measured(case: Case, work: Work, rounds: int, others: Sequence[str]) -> dict[str, Any]:
    """One model with the threads that are set."""
    model = case.model()
    result: dict[str, Any] = {"parameters": sum(one.numel() for one in model.parameters())}
    runs = {"ours": ours(model, work)}
    sizes = {
        "static": ((str(size), static(model, work, size)) for size in SIZES),
        "continuous": ((str(page), continuous(model, work, page)) for page in PAGES),
    }
    for name in others:
        candidates = list(sizes[name])
        best, taken = fastest(candidates)
        runs[name] = dict(candidates)[best]
        result[name] = {"chosen": int(best), "processor_s_by_size": taken}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    answers: dict[str, Answers] = {}
    seconds(runs["ours"])
    for _ in range(rounds):
        for name, run in runs.items():
            clock, processor, answers[name] = seconds(run)
            found[name].append((clock, processor))
    tokens = sum(work.lengths)
    for name, pairs in found.items():
        clock = statistics.median(one[0] for one in pairs)
        result.setdefault(name, {}).update(
            clock_s=clock, processor_s=statistics.median(one[1] for one in pairs), tokens_per_s=tokens / clock
        )
    for name in others:
        result[name]["faster"] = {
            kind: paired_ratio([one[which] for one in found[name]], [one[which] for one in found["ours"]])
            for which, kind in enumerate(("clock", "processor"))
        }
        result[name]["different"] = differences(model, work, answers["ours"], answers[name])
    return result


def page(result: Mapping[str, Any], rounds: int) -> Iterator[str]:
    """The table of the page."""
    yield f"{machine()['cpu']}, {rounds} rounds; medians, and of ratios a 95% interval."
    yield ""
    yield "| Llama, layers x width | threads | Generator | static, sorted | continuous (`generate_batch`) |"
    yield "|---|---|---|---|---|"
    for name, one in result["cases"].items():
        case, _, threads = name.partition(", ")
        cells = [f"{one['ours']['clock_s']:.2f} s, {one['ours']['tokens_per_s']:.0f} tokens/s"]
        for other in ("static", "continuous"):
            ratio = one[other]["faster"]["clock"]
            cells.append(
                f"{one[other]['clock_s']:.2f} s: {ratio['ratio']:.2f}x ({ratio['low']:.2f} to {ratio['high']:.2f})"
            )
        yield f"| {case} | {threads.split()[0]} | " + " | ".join(cells) + " |"


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cases", default=",".join(CASES), help="as '4 x 256', separated by commas")
    parser.add_argument("--threads", default="1")
    parser.add_argument("--others", default="static,continuous")
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--longest", type=int, default=LONGEST, help="tokens of an answer, at most")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    set_verbosity_error()
    result: dict[str, Any] = {
        "requests": given.requests,
        "prompts": PROMPTS,
        "answers": (SHORTEST, given.longest),
    }
    result["cases"] = {}
    for name in given.cases.split(","):
        for threads in map(int, given.threads.split(",")):
            torch.set_num_threads(threads)
            work = drawn(given.requests, given.longest, CASES[name].vocabulary)
            others = [one for one in given.others.split(",") if one]
            with without_notes():
                one = measured(CASES[name], work, given.rounds, others)
            result["cases"][f"{name}, {threads} threads"] = one
            print(
                f"{name}, {threads} threads: {one['ours']['processor_s']:.2f} s of the processor", flush=True
            )
            for other in others:
                ratio = one[other]["faster"]
                print(
                    f"  {other} ({one[other]['chosen']}): clock {ratio['clock']['ratio']:.2f}x "
                    f"({ratio['clock']['low']:.2f} to {ratio['clock']['high']:.2f}), processor "
                    f"{ratio['processor']['ratio']:.2f}x; {one[other]['different']}",
                    flush=True,
                )
    if all(
        getattr(given, key) == parser.get_default(key)
        for key in ("cases", "threads", "others", "requests", "longest")
    ):
        print(write("generate_throughput", result))
        put(DOCS / "inference.md", "generate_throughput.py", page(result, given.rounds))


if __name__ == "__main__":
    main()
