"""Everything that only an accelerator can show, in one call: python benchmarks/gpu.py

First correctness, each against the CPU or against one device: families and strategies, the step's graph and the graph
compiled beside eager steps, steps within a memory budget, streams and events, copies through pinned memory, a
checkpoint written while the step goes on, greedy tokens beside Transformers' `generate`, log-probabilities of a
rollout. Then measurements: our one-device step beside a plain eager loop on a wider Llama in bf16, its MFU and memory,
the graph and the compiled graph beside eager steps, the bandwidth of copies, tokens per second of `Generator` beside
static batches and Transformers' continuous batching.

A failed check ends with 1.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterable
from functools import partial
from typing import Annotated, Any

import torch
from commandline import run
from gpu_generate import check_generation, measure_generation
from gpu_steps import Check, check_budgets, check_engines, measure_engines, recipe
from measure import in_turns, paired_ratio, timed_on, write
from pages import table
from processes import scratch
from rl_logprobs import FAMILIES as POLICIES
from shapes import Fields, gpt2, llama, run_file
from torch import Tensor, nn
from training import engine_step, step_batch
from transformers import AutoConfig, AutoModelForCausalLM

from harness import families
from harness.equivalence import build_model
from hyper_parallel import checkpoint, compat, shard
from hyper_parallel.checkpoint import Piece, Writer
from hyper_parallel.compat import Backend
from hyper_parallel.compat.local_tensor import one_device, simulated_ranks
from hyper_parallel.config.load import from_dict
from hyper_parallel.strategy import Strategy
from hyper_parallel.verify.report import compare
from hyper_parallel.verify.step import StepOutcome, run_step
from hyper_parallel.workload import flops_of_model, mfu

SMALL = llama(128, 2, 8, inner=352, kv=2, vocabulary=515, positions=128)
FAMILIES: dict[str, Fields] = {
    "llama": SMALL,
    "qwen3, tied": {**SMALL, "model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True},
    "gemma3": {**SMALL, "model_type": "gemma3_text", "head_dim": 16, "sliding_window": 32},
    "phi3, fused": {**SMALL, "model_type": "phi3", "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    "gpt2, dropout": gpt2(128, 2, 8, vocabulary=515, positions=128, bos_token_id=1, eos_token_id=2),
    **{name: families.FAMILIES[name] for name in ("gemma2", "gpt-oss", "mixtral", "deepseek-v3")},
}
STRATEGIES: list[dict[str, Any]] = [
    {"axes": {"tensor": 2}},
    {"axes": {"tensor": 4}, "sequence": True},
    {"axes": {"shard": 2, "tensor": 2}},
    {"axes": {"replicate": 2, "shard": 2}},
    {"axes": {"tensor_x": 2, "tensor_y": 2}},
    {"axes": {"context": 2}, "context": {"method": "ring"}},
    {"axes": {"context": 2, "tensor": 2}, "context": {"method": "ulysses"}},
    {"axes": {"shard": 2, "tensor": 2, "expert": 4}},
]
# What the step is timed on: 1.1 billion parameters, which fit every current data-centre accelerator with AdamW.
WIDE = llama(2048, 22, 32, inner=5632, kv=4, vocabulary=32000, positions=4096)


def outcome(
    fields: dict[str, Any],
    strategy: Strategy,
    device: torch.device | str,
    update_from: dict[str, Tensor] | None = None,
) -> StepOutcome:
    config = from_dict(run_file(fields, sequence=64, train={"batch": 4}, strategy=strategy.model_dump()))
    model = build_model(fields)
    shard.parallelize(model, strategy, lowering="traceable", alone=strategy.axes.world == 1)
    shard.init_weights(model, 0, device)
    with one_device():
        draw = torch.Generator().manual_seed(1)
        ids = torch.randint(int(fields["vocab_size"]), (4, 65), generator=draw)
        positions = torch.cat([torch.arange(20), torch.arange(44)]).repeat(4, 1)
        shifted = {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}
    return run_step(model, config, {**shifted, "position_ids": positions}, update_from)


def check_equivalence(device: torch.device, names: Iterable[str] = tuple(FAMILIES)) -> list[Check]:
    checks = []
    for family in names:
        fields = FAMILIES[family]
        reference = outcome(fields, Strategy(), "cpu")
        alone = outcome(fields, Strategy(), device, reference.gradients)
        report = compare(reference, alone, "one device", device.type, "float32")
        checks.append((f"{family}: {device.type} against cpu", report.ok, worst(report)))
        for declared in STRATEGIES:
            spread = declared["axes"].keys()
            # Attention that drops weights is refused under context.
            if ("expert" in spread and family not in families.WITH_EXPERTS) or (
                "context" in spread and "dropout" in family
            ):
                continue
            strategy = Strategy(**declared)
            with simulated_ranks(strategy.axes.world):
                many = outcome(fields, strategy, device, reference.gradients)
            report = compare(reference, many, "", "", "float32")
            name = " · ".join(f"{axis} {size}" for axis, size in declared["axes"].items())
            checks.append((f"{family}: {name}, ranks simulated on {device.type}", report.ok, worst(report)))
    return checks


def worst(report: Any) -> str:
    first = report.parameters[0]
    return f"{first.gradient:.1e} in {first.name}"


def check_streams(backend: Backend, device: torch.device) -> list[Check]:
    stream, done = backend.Stream(), backend.Event()
    big = torch.ones(4096, 4096, device=device)
    seen: list[Tensor] = []

    def work() -> None:
        x = big
        for _ in range(20):
            x = x @ big / 4096
        seen.append(x)

    backend.synchronize()
    stream.run(work)
    done.record(stream)
    early = not done.query()
    done.wait()
    total = float(seen[0].sum())
    backend.synchronize()
    right = total == 4096.0 * 4096
    return [
        ("an event is not reached before its work is done", early, "asked at once"),
        ("a stream that waits for an event sees the work", right and done.query(), f"sum {total:.0f}"),
    ]


def check_copies(backend: Backend, device: torch.device) -> tuple[list[Check], dict[str, float]]:
    size = 2**28 if device.type != "cpu" else 2**20
    host = backend.host_buffer((size,), torch.uint8)
    source = torch.randint(256, (size,), dtype=torch.uint8, device=device)
    back = torch.empty_like(source)
    copies = {
        "device to host": lambda: host.copy_(source, non_blocking=True),
        "host to device": lambda: back.copy_(host, non_blocking=True),
    }
    rates = {}
    for name, copy in copies.items():
        seconds = [timed_on(backend, copy) for _ in range(5)]
        rates[f"{name}, GB/s"] = size / statistics.median(seconds) / 1e9
    pinned = bool(host.is_pinned()) or device.type == "cpu"
    same = bool(torch.equal(source, back))
    return [
        ("host buffers are pinned", pinned, ""),
        ("bytes come back as they went", same, f"{size} bytes"),
    ], rates


def check_checkpoint(device: torch.device) -> list[Check]:
    model = build_model(FAMILIES["llama"])
    shard.parallelize(model, Strategy())
    shard.init_weights(model, 0, device)
    handle = shard.sharded(model)
    expected = {p.name: p.local.clone() for p in handle.parameters()}
    with scratch() as folder:
        with Writer(folder, handle.mesh.world, 0) as writer:
            writer.save(1, {p.name: Piece(p.local, p.layout) for p in handle.parameters()}, {})
            for p in handle.parameters():
                p.local.zero_()  # what is saved is what was there at the call
        found = checkpoint.newest(folder)
        assert found is not None
        checkpoint.read(found.path, {p.name: Piece(p.local, p.layout) for p in handle.parameters()})
    same = all(torch.equal(p.local, expected[p.name]) for p in handle.parameters())
    return [("a checkpoint holds the values at the call", same, "")]


def measure_step(
    backend: Backend, device: torch.device, pairs: int, batch: int, sequence: int
) -> dict[str, Any]:
    """Our step in bf16 mixed precision beside a plain loop under autocast-free bf16 weights with fp32 masters."""
    strategy = Strategy(precision={"compute": "bfloat16"})
    own = recipe(WIDE, device, strategy)
    flops = flops_of_model(own.model).per_token(sequence) * batch * sequence
    given = step_batch(own, batch, sequence, WIDE["vocab_size"], device=device)
    micro = given.micro[0]
    ours = engine_step("eager", own, lambda: own, given)
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(AutoConfig.for_model(**WIDE)).train().to(device)
    optimizer = torch.optim.AdamW(
        plain.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )

    def by_hand() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            logits = plain(input_ids=micro.input_ids, position_ids=micro.position_ids, use_cache=False).logits
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), micro.labels.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        float(loss.detach())

    times = in_turns({"ours": ours, "by hand": by_hand}, pairs, partial(timed_on, backend), warm=3)
    ratio = paired_ratio(times["ours"], times["by hand"])
    peak = backend.peak_flops(torch.bfloat16)
    result: dict[str, Any] = {**ratio, "batch": batch, "sequence": sequence}
    result["mfu"] = mfu(flops, ratio["ours_s"], 1, peak) if peak else None
    backend.reset_memory_peak()
    ours()
    result["memory_peak_gib_both_models_resident"] = backend.memory_peak() / 2**30
    return result


def checked(
    backend: Backend, device: torch.device, names: Iterable[str], policies: Iterable[str], longest: int
) -> tuple[list[Check], dict[str, float]]:
    """Every check, and the rates of copies."""
    checks = check_equivalence(device, names) + check_engines(device, FAMILIES, names)
    checks += check_streams(backend, device) + check_checkpoint(device)
    copied, rates = check_copies(backend, device)
    checks += copied + check_budgets(backend, device, FAMILIES, names)
    return checks + check_generation(device, FAMILIES, names, policies, longest), rates


def main(
    pairs: int = 20,
    batch: int = 4,
    sequence: int = 2048,
    rehearse: Annotated[bool, "every part once, small, on the CPU; keeps nothing"] = False,
) -> int:
    """Check, and measure where every check is right; 1 where one is not, 2 without an accelerator."""
    found = compat.accelerators()
    if not found and not rehearse:
        print("no accelerator here; this benchmark measures what only one can show", file=sys.stderr)
        return 2
    backend = compat.backend("cpu") if rehearse else found[0]
    names, policies, longest, rounds = tuple(FAMILIES), tuple(POLICIES), (64, 512), max(2, pairs // 4)
    if rehearse:
        print("rehearsal on the CPU: the checks are real, the figures mean nothing")
        WIDE.update({**SMALL, "vocab_size": 32000})
        pairs, batch, sequence = 2, 1, 32
        names, policies, longest, rounds = ("llama", "mixtral"), ("llama",), (16, 16), 2
    device = backend.device(0)
    backend.set_device(device)
    torch.backends.fp32_precision = "ieee"  # type: ignore[attr-defined]  # of what replaces the module
    checks, rates = checked(backend, device, names, policies, longest[0])
    rows = [(name, "right" if passed else "WRONG", note) for name, passed, note in checks]
    print(*table("check | | worst", rows), sep="\n", flush=True)
    right = all(passed for _, passed, _ in checks)
    result: dict[str, Any] = {
        "checks": [{"name": name, "right": passed, "note": note} for name, passed, note in checks],
        **rates,
    }
    if right:
        result["step"] = measure_step(backend, device, pairs, batch, sequence)
        print(result["step"], flush=True)
        result["engines"] = measure_engines(backend, device, WIDE, pairs, batch, sequence)
        print(result["engines"], flush=True)
        result["generation"] = measure_generation(backend, device, WIDE, policies, rounds, longest[1])
        print(result["generation"])
    print(rates)
    if not rehearse:
        print(write(f"gpu-{backend.device_name(0).replace(' ', '-').lower()}", result))
    return int(not right)


if __name__ == "__main__":
    run(main)
