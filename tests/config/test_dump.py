"""A file that is written loads to an equal object, for any Strategy and any text."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_parallel.config import RunConfig, dump, from_dict, load, load_strategy
from hyper_parallel.config.model import implausible
from hyper_parallel.strategy import AXIS_NAMES, Axes, Memory, Precision, Strategy

dtypes = st.sampled_from(["float32", "bfloat16"])
# What YAML would read as something else, beside whatever hypothesis thinks of.
texts = st.one_of(
    st.sampled_from(
        [
            "1e-3",
            "no",
            "null",
            "~",
            "1_0",
            "0x1F",
            "2026-01-01",
            "<<",
            "a: b",
            "#",
            "",
            " x ",
            "10:30",
            "\x85",
            "a\u2028b",
        ]
    ),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
)
axes = st.permutations(AXIS_NAMES).flatmap(
    lambda order: st.tuples(*(st.integers(1, 64) for _ in order)).map(
        lambda degrees: Axes(**dict(zip(order, degrees, strict=True)))
    )
)
strategies = st.builds(
    Strategy,
    axes=axes,
    sequence=st.booleans(),
    rules=st.dictionaries(texts, st.sampled_from(["colwise", "rowwise", "vocab", "replicate"]), max_size=3),
    precision=st.builds(
        Precision,
        param=dtypes,
        compute=dtypes,
        reduce=dtypes,
        modules=st.dictionaries(texts, dtypes, max_size=3),
    ),
    memory=st.builds(
        Memory,
        recompute=st.sampled_from(["none", "layer"]),
        reshard_after_forward=st.none() | st.booleans() | st.dictionaries(texts, st.booleans(), max_size=2),
    ),
)
free = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)


def reloaded_strategy(text: str) -> Strategy:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "strategy.yaml"
        path.write_bytes(text.encode())
        return load_strategy(path)


def reloaded_run(text: str) -> RunConfig:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "run.yaml"
        path.write_bytes(text.encode())
        return load(path)


PATHS = texts.filter(lambda text: bool(text) and text.isprintable() and len(text.encode()) < 200)
"""A path with line breaks or control characters is refused."""


@given(strategies)
def test_any_strategy_survives_its_file(strategy: Strategy) -> None:
    again = reloaded_strategy(dump(strategy))
    assert again == strategy
    assert again.axes.order == strategy.axes.order
    assert list(again.rules) == list(strategy.rules)


@settings(max_examples=40)
@given(
    strategy=strategies,
    model=st.dictionaries(texts, free, max_size=4).filter(lambda fields: implausible(fields) is None),
    prompt=texts,
    lr=st.floats(min_value=1e-30, max_value=1e30),
    out=PATHS,
    files=PATHS | st.lists(PATHS, min_size=1, max_size=3),
)
def test_any_run_survives_its_file(
    strategy: Strategy, model: dict[str, object], prompt: str, lr: float, out: str, files: str | list[str]
) -> None:
    config = from_dict(
        {
            "version": 1,
            "out": out,
            "model": {"config": {**model, "model_type": "llama"}},
            "data": {"train": files, "sequence": strategy.axes.tensor},
            "train": {
                "batch": strategy.axes.data,
                "sample": {"prompt": prompt},
                "optimizer": {"name": "muon", "adamw": {"lr": lr}},
            },
            "strategy": strategy.model_dump(),
        }
    )
    assert reloaded_run(dump(config)) == config
