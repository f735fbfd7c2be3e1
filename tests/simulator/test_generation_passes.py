"""Passes of generation: their bound by hand, the closed form against the discrete-event engine, and what
hides behind what."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_parallel.cluster import Cluster
from hyper_parallel.cluster.collective_cost import distinct_experts, expert_shares
from hyper_parallel.cluster.device import Device, Link, Tier
from hyper_parallel.errors import ConfigError
from hyper_parallel.simulator.generation import PassLoad, Piece, TierSplit
from hyper_parallel.simulator.generation.pass_cost import PassPricer, Sparse
from hyper_parallel.simulator.generation.pass_model import PassModel
from hyper_parallel.simulator.generation.pass_trace import simulated
from hyper_parallel.simulator.generation.shape_pass import of_shape
from hyper_parallel.workload.mixers import Latent
from hyper_parallel.workload.published import shape
from hyper_parallel.workload.shape import Shape

TOY = Shape("toy", 4, 64, 4, 2, 16, ffn=256, gated=True, vocabulary=1024)
EXPERTS = Shape(
    "experts",
    4,
    64,
    4,
    2,
    16,
    ffn=256,
    gated=True,
    vocabulary=1024,
    experts=16,
    chosen=2,
    expert_ffn=32,
    dense_layers=1,
)
LATENT = Shape(
    "latent", 3, 64, 4, 4, 24, ffn=128, gated=True, vocabulary=512, latent=Latent(32, 32, 16, 8, 16)
)
WINDOWED = Shape("windowed", 4, 64, 4, 2, 16, ffn=128, gated=True, vocabulary=512, window=32, windowed=0.5)
SPLITS = [
    TierSplit(),
    TierSplit(layers=4),
    TierSplit(layers=2),
    TierSplit(contexts=1.0),
    TierSplit(contexts=0.3),
    TierSplit(layers=3, contexts=0.5),
    TierSplit(experts=5),
    TierSplit(experts=5, experts_computed="host"),
    TierSplit(experts=16, layers=1),
]
LOADS = [
    PassLoad.decode(5, 300),
    PassLoad.of([Piece(256, 512), Piece(1, 40)], 2),
    PassLoad.of([Piece(64)], 1),
]


def cluster(link: float = 1e9, memory: float = 1e11, latency: float = 1e-6) -> Cluster:
    """A device without launch times, whose link is slow."""
    device = Device("toy", {"bfloat16": 1e13}, {"bfloat16": 1e12}, Tier("device", 1e10, memory, memory))
    host = Tier("host", 1e12, 1e11, 1e11)
    node = Link("node", 1e10, 1e-6)
    return Cluster(
        device=device, links={"host": Link("host", link, latency), "node": node}, host=host, name="toy"
    )


@pytest.mark.parametrize("made", [TOY, EXPERTS, LATENT, WINDOWED], ids=lambda made: made.name)
def test_closed_form_is_what_the_engine_simulates(made: Shape) -> None:
    for split, load, tensor in itertools.product(SPLITS, LOADS, (1, 2)):
        pricer = PassPricer(of_shape(made, tensor=tensor), cluster(), split, Sparse(skew=0.7))
        cost = pricer.price(load)
        assert cost.seconds == pytest.approx(simulated(pricer, load).steady, rel=1e-9), (split, load)
        assert cost.bound <= cost.seconds * (1 + 1e-9)


def test_sparse_attention_is_what_the_engine_simulates() -> None:
    for again in (0.0, 0.9, 1.0):
        pricer = PassPricer(of_shape(TOY), cluster(), TierSplit(), Sparse(selected=64, again=again))
        load = PassLoad.decode(6, 4000)
        assert pricer.price(load).seconds == pytest.approx(simulated(pricer, load).steady, rel=1e-9)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 400), st.integers(0, 2000)), min_size=1, max_size=6),
    st.integers(0, 4),
    st.sampled_from([0.0, 0.4, 1.0]),
    st.floats(1e7, 1e12),
)
def test_no_pass_beats_its_bound(
    pieces: list[tuple[int, int]], layers: int, contexts: float, link: float
) -> None:
    load = PassLoad.of([Piece(*piece) for piece in pieces], len(pieces))
    pricer = PassPricer(of_shape(TOY), cluster(link), TierSplit(layers=layers, contexts=contexts))
    cost = pricer.price(load)
    assert cost.bound <= cost.seconds * (1 + 1e-9)


def test_bound_of_a_dense_decode_by_hand() -> None:
    # Attention 64·16·2·(4 + 2), MLP 3·64·256, head 1024·64: bfloat16, read once. Keys and values of 5 contexts of 301.
    weights = 2 * (4 * (64 * 16 * 12 + 3 * 64 * 256) + 1024 * 64)
    contexts = 4 * 5 * 301 * 2 * 2 * 16 * 2
    cost = PassPricer(of_shape(TOY), cluster()).price(PassLoad.decode(5, 300))
    assert cost.read == weights + contexts
    assert cost.bound == pytest.approx((weights + contexts) / 1e11)
    assert cost.limit == "bytes that must be read"


def test_weights_hide_behind_long_pieces_and_not_behind_decode() -> None:
    streamed = TierSplit(layers=32)
    llama = of_shape(shape("llama-3-8b"))
    here, away = (PassPricer(llama, Cluster.named("h100x1"), split) for split in (TierSplit(), streamed))
    long = PassLoad.of([Piece(4096, 8192)] * 4, 4)
    assert away.price(long).seconds <= here.price(long).seconds * 1.001
    decode = PassLoad.decode(32, 4096)
    slow, link = away.price(decode), sum(layer.weights for layer in llama.layers) / (63e9 * 0.85)
    assert slow.bound == pytest.approx(link)
    assert slow.limit == "the link"
    assert slow.seconds > 15 * here.price(decode).seconds


def test_what_is_cached_of_a_token() -> None:
    def of(name: str, **degrees: int) -> PassModel:
        return of_shape(shape(name), **degrees)

    assert of("llama-3-8b").token == 32 * 2 * 8 * 128 * 2
    assert of("llama-3-70b", tensor=8).token == 80 * 2 * 128 * 2
    # Latents of 512 and 64 elements, on every rank of the tensor axis.
    assert of("deepseek-v3", tensor=8).token == 61 * 576 * 2
    windowed = of_shape(WINDOWED)
    assert windowed.held(100) == 4 * 100 * 128
    assert windowed.held(100, past_windows=False) == (2 * 100 + 2 * 32) * 128


@pytest.mark.parametrize(
    ("count", "first", "window"), [(1, 0, 0), (7, 5, 0), (7, 5, 8), (7, 0, 4), (3, 90, 16)]
)
def test_keys_of_a_piece(count: int, first: int, window: int) -> None:
    seen = [
        [key for key in range(at + 1) if not window or key > at - window]
        for at in range(first, first + count)
    ]
    piece = Piece(count, first)
    assert piece.keys(window) == sum(map(len, seen))
    assert piece.read(window) == len({key for keys in seen for key in keys})


def test_expected_experts() -> None:
    assert distinct_experts(8, 2, 1) == pytest.approx(2)
    assert distinct_experts(8, 2, 1, 1.3) == pytest.approx(2)
    assert distinct_experts(8, 2, 1e6) == pytest.approx(8)
    shares = expert_shares(8, 2, 1.3)
    assert sum(shares) == pytest.approx(2)
    assert max(shares) <= 1
    assert list(shares) == sorted(shares, reverse=True)
    popular = distinct_experts(64, 4, 50, 1.0) - distinct_experts(64, 4, 50, 1.0, first=32)
    assert popular > distinct_experts(64, 4, 50, 1.0, first=32)


def test_weights_and_contexts_are_copied_beside_each_other() -> None:
    model, load = of_shape(TOY), PassLoad.decode(4, 256)
    weights, contexts, both = (
        PassPricer(model, cluster(), split).price(load).copied
        for split in (TierSplit(layers=3), TierSplit(contexts=0.5), TierSplit(layers=3, contexts=0.5))
    )
    assert min(weights, contexts) > 0
    assert both == pytest.approx(weights + contexts)


def test_experts_that_no_token_chooses_cost_nothing() -> None:
    few = PassLoad.decode(1, 64)
    model = of_shape(EXPERTS)
    balanced = PassPricer(model, cluster(), TierSplit(experts=8)).price(few)
    skewed = PassPricer(model, cluster(), TierSplit(experts=8), Sparse(skew=4.0)).price(few)
    assert balanced.copied > 100 * skewed.copied
    on_host = PassPricer(model, cluster(), TierSplit(experts=8, experts_computed="host")).price(few)
    assert on_host.copied == 0
    assert on_host.host > 0


def test_splits_that_are_refused() -> None:
    with pytest.raises(ConfigError, match="heads 4 is not divisible by tensor 3"):
        of_shape(TOY, tensor=3)
    with pytest.raises(ConfigError, match="recurrences"):
        of_shape(shape("qwen3-next-80b-a3b"))
    with pytest.raises(ConfigError, match="cannot be split over 4"):
        of_shape(TOY, tensor=4, expert=4)
