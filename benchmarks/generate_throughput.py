"""Throughput of generation beside Transformers': python benchmarks/generate_throughput.py

64 prompts of 8 to 64 tokens, drawn at random, and answers of 16 to 256 tokens, in float32 on the CPU:
- ours: `Generator`, requests in the order in which they came, with its defaults;
- static: `generate` on batches of requests sorted by an oracle of their answers' lengths, the shortest first. A batch
  runs until its longest answer is there. Of several sizes of a batch the one that is fastest here;
- continuous: what `generate_batch` does, with each request's own length, a cache for all of them, and of two sizes of a
  page the one that is fastest here.

They take turns in one process. All give greedy tokens; those of ours and static are compared, with ties listed. Seconds
are of the clock, and of the processor, which says more where others use the machine. Writes
``benchmarks/results/generate_throughput.json``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from commandline import run
from generation import Work, answered, continuous, differences, medians, ratios, static, turns
from generation import drawn as drawn_between
from measure import quiet, ratio_text, taken
from pages import Benchmark, table
from processes import scratch
from shapes import llama, new_model

from hyper_parallel import Generator

REQUESTS, SHORTEST, LONGEST = 64, 16, 256
PROMPTS = (8, 64)
SIZES = (16, 32, 64)
PAGES = (32, 256)
"""Tokens of a page of `generate_batch`."""
VOCABULARY = 4096
CASES = {
    "4 x 256": llama(256, 4, 8, vocabulary=VOCABULARY, tie_word_embeddings=False),
    "12 x 512": llama(512, 12, 8, vocabulary=VOCABULARY, tie_word_embeddings=False),
}
OTHERS = ("static", "continuous")


def drawn(requests: int, longest: int, vocabulary: int) -> Work:
    return drawn_between(requests, PROMPTS, (SHORTEST, longest), vocabulary)


def measured(fields: Mapping[str, Any], work: Work, rounds: int) -> dict[str, Any]:
    model = new_model(dict(fields))
    result: dict[str, Any] = {"parameters": sum(one.numel() for one in model.parameters())}
    with scratch() as folder:  # as the command has it
        model.save_pretrained(folder)
        runs = {"ours": answered(Generator(folder), work)}
    made = {
        "static": {str(size): static(model, work, size) for size in SIZES},
        "continuous": {str(page): continuous(model, work, page) for page in PAGES},
    }
    for name, others in made.items():
        seconds = {size: min(taken(one).processor for _ in range(2)) for size, one in others.items()}
        best = min(seconds, key=seconds.__getitem__)
        runs[name] = others[best]
        result[name] = {"chosen": int(best), "processor_s_by_size": seconds}
    runs["ours"]()
    found = turns(runs, rounds)
    for name, one in found.items():
        own = medians(one)
        result.setdefault(name, {}).update(own, tokens_per_s=sum(work.lengths) / own["clock_s"])
    for name in OTHERS:
        result[name]["faster"] = ratios(found[name], found["ours"])
        answers = (found[which][-1].result for which in ("ours", name))
        result[name]["different"] = differences(model, work, *answers)
    return result


def page(result: Mapping[str, Any]) -> Iterator[str]:
    cases = result["cases"]
    rounds = next(iter(cases.values()))["static"]["faster"]["clock"]["pairs"]
    yield f"{result['machine']['cpu']}, {rounds:.0f} rounds; medians, and of ratios a 95% interval."
    yield ""

    def row(name: str, one: Mapping[str, Any]) -> Iterator[str]:
        case, _, threads = name.partition(", ")
        yield from (case, threads.split()[0])
        yield f"{one['ours']['clock_s']:.2f} s, {one['ours']['tokens_per_s']:.0f} tokens/s"
        yield from (f"{one[o]['clock_s']:.2f} s: {ratio_text(one[o]['faster']['clock'])}" for o in OTHERS)

    yield from table(
        "Llama, layers x width | threads | Generator | static, sorted | continuous (`generate_batch`)",
        (tuple(row(name, one)) for name, one in cases.items()),
    )


BENCHMARK = Benchmark("generate_throughput", {"inference.md": page})


def main(rounds: int = 7) -> None:
    quiet(threads=1)
    found: dict[str, Any] = {}
    for case, fields in CASES.items():
        found[f"{case}, 1 threads"] = one = measured(fields, drawn(REQUESTS, LONGEST, VOCABULARY), rounds)
        print(case, one, flush=True)
    BENCHMARK.keep({"requests": REQUESTS, "prompts": PROMPTS, "answers": (SHORTEST, LONGEST), "cases": found})


if __name__ == "__main__":
    run(main)
