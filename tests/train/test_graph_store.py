"""Captured steps that are kept on disk: what is read is what was captured, and nothing that decides a step is left out
of its key.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from harness.captured import recipe_of
from harness.equivalence import build_model, family_config
from harness.families import FAMILIES
from harness.forked_command import run_command
from hyper_parallel.compat.fake_tensors import fake_ranks
from hyper_parallel.config import RunConfig
from hyper_parallel.errors import HyperParallelError
from hyper_parallel.graph import StepGraph
from hyper_parallel.graph.graph_file import Unreadable, Unwritable, from_bytes, to_bytes
from hyper_parallel.graph.host_nodes import HostPoint
from hyper_parallel.offloading.pass_pipeline import passes
from hyper_parallel.shard import parallelize
from hyper_parallel.step import graph_key
from hyper_parallel.step.capture_train_step import BatchShape, batch_inputs, state
from hyper_parallel.step.graph_cache import Captured, Graphs
from hyper_parallel.step.graph_store import GraphStore
from hyper_parallel.step.micro_batch import blank_micro_batch
from hyper_parallel.step.recipe import CONTROL_VECTOR, Recipe

FOUR = BatchShape(((2, 32),) * 4, (False,) * 4)
SHARD = {"axes": {"shard": 2}}


@pytest.fixture(autouse=True)
def _sources_may_be_young(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of this repository may have been written a moment ago; a test of its own covers those that were."""
    monkeypatch.setattr(graph_key, "_BEGUN", time.time() + 3600)
    graph_key.versions.cache_clear()


def _recipe(family: str, strategy: Mapping[str, Any], train: Mapping[str, Any] | None = None) -> Recipe:
    config: RunConfig = family_config(FAMILIES[family], strategy, train)
    model = build_model(FAMILIES[family])
    parallelize(model, config.strategy, lowering="traceable")
    return Recipe.of(config, model)


def _captured(
    store: Path | None,
    family: str,
    strategy: Mapping[str, Any],
    shape: BatchShape = FOUR,
    *,
    whole: bool = False,
) -> Captured:
    """Of rank 0."""
    world = family_config(FAMILIES[family], strategy).strategy.axes.world
    with fake_ranks(world, 0):
        graphs = Graphs(
            _recipe(family, strategy), "cpu", whole=whole, store=None if store is None else GraphStore(store)
        )
        graphs.stored(shape)  # as the other ranks say too
        assert graphs.ready(shape), graphs.refused
    (found,) = graphs.captured
    return found


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Of each step, whether it was captured or read."""
    lines = [record.getMessage() for record in caplog.records if record.name.endswith("graph_cache")]
    return ["read" if "from the cache" in line else "captured" for line in lines if "as a graph" in line]


def _rows(step: StepGraph) -> list[Any]:
    """All that a graph has, with nodes and process groups by what they are and not by their names in this process."""

    def plain(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return ("node", value.name)
        if isinstance(value, str) and value in step.groups:
            return ("group", step.groups[value].axis, step.groups[value].ranks)
        if isinstance(value, tuple | list):
            return (type(value) is tuple, [plain(one) for one in value])
        if isinstance(value, torch.SymInt):
            return str(value)
        if isinstance(value, float):
            return value.hex()  # which is equal to itself, unlike NaN
        return value

    nodes = [
        (
            (
                node.op,
                node.name,
                node.target,
                plain(node.args),
                [(k, plain(v)) for k, v in node.kwargs.items()],
            ),
            str(sorted((key, str(value)) for key, value in node.meta.items())),
        )
        for node in step.graph.nodes
    ]
    storages = [(one.index, str(one.bytes), one.device, one.name) for one in step.storages]
    sizes = [(str(symbol), node.name) for symbol, node in step.sizes.items()]
    even = [(str(symbol), even) for symbol, even in step.even.items()]
    constants = [(name, str(tensor.dtype), tensor.tolist()) for name, tensor in step.constants.items()]
    groups = {(group.axis, group.ranks) for group in step.groups.values()}
    return [nodes, storages, sizes, even, constants, step.inputs, step.outputs, step.gradients, groups]


CASES: dict[str, tuple[str, Mapping[str, Any], BatchShape, bool]] = {
    "one": ("llama", SHARD, BatchShape(((2, 32),), (True,)), False),
    "loop": ("llama", SHARD, FOUR, False),
    "ordered": (
        "llama",
        {"axes": {"shard": 2, "tensor": 2}, "sequence": True, "overlap": {"cluster": "h100x4"}},
        FOUR,
        False,
    ),
    "whole, recomputed": ("gemma3", {"axes": {"shard": 2}, "memory": {"recompute": "selective"}}, FOUR, True),
    "experts": ("deepseek-v3", {"axes": {"shard": 2, "expert": 2}}, FOUR, False),
    "dropout": ("gpt2", {"axes": {"tensor": 2}}, FOUR, False),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_read_is_what_was_captured(case: str, tmp_path: Path) -> None:
    family, strategy, shape, whole = CASES[case]
    first = _captured(None, family, strategy, shape, whole=whole)
    content = to_bytes(first.plain)
    read, _ = from_bytes(content, first.plain.groups)
    assert _rows(read) == _rows(first.plain)
    assert to_bytes(read) == content


def test_a_second_run_reads_the_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        first = _captured(tmp_path, "llama", SHARD)
        second = _captured(tmp_path, "llama", SHARD)
    assert _told(caplog) == ["captured", "read"]
    assert _rows(first.plain) == _rows(second.plain)
    assert first.loop is not None
    assert second.loop is not None
    assert {name: node.name for name, node in first.loop.added.items()} == {
        name: node.name for name, node in second.loop.added.items()
    }
    assert first.loop.totals == second.loop.totals
    assert (first.loop.batch, first.loop.width) == (second.loop.batch, second.loop.width)


def test_a_step_that_was_read_computes_the_same_bits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The captured and the read step, run on the same values."""
    config = family_config(FAMILIES["llama"], {"axes": {}})
    found: list[dict[str, Tensor]] = []
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            recipe = recipe_of(FAMILIES["llama"], config)
            graphs = Graphs(recipe, "cpu", store=GraphStore(tmp_path))
            assert graphs.ready(FOUR), graphs.refused
            tensors = {
                name: given.tensor.detach() for name, given in state(recipe.handle, recipe.optimizer).items()
            }
            micro = [blank_micro_batch(2, 32, "cpu") for _ in range(4)]
            for number, batch in enumerate(micro):
                generator = torch.Generator().manual_seed(number)
                batch.input_ids.copy_(torch.randint(0, 100, (2, 32), generator=generator))
                batch.labels.copy_(batch.input_ids.roll(-1, 1))
                batch.position_ids.copy_(torch.arange(32).expand(2, 32))
            given = batch_inputs(
                micro, torch.tensor(0), torch.tensor(256.0), torch.tensor(1.0, dtype=torch.float64)
            )
            shown: list[Tensor] = []

            def host(point: HostPoint, values: Any, shown: list[Tensor] = shown) -> Tensor | None:
                if point is HostPoint.LOAD:
                    return torch.zeros(CONTROL_VECTOR)
                shown.extend(value.clone() for value in values)
                return None

            graphs[FOUR].executable.run({**tensors, **given}, host)
            found.append({**tensors, **{f"shown {at}": one for at, one in enumerate(shown)}})
    assert _told(caplog) == ["captured", "read"]
    first, second = found
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert first["shown 0"][0] > 0


def _key(
    strategy: Mapping[str, Any] = SHARD,
    family: str = "llama",
    train: Mapping[str, Any] | None = None,
    *,
    shape: BatchShape = FOUR,
    rank: int = 0,
    device: str = "cpu",
    whole: bool = False,
    ordered: bool = True,
    seed: int = 0,
    changed: Callable[[nn.Module], object] = lambda model: None,
) -> str | None:
    config = family_config(FAMILIES[family], strategy, train)
    with fake_ranks(config.strategy.axes.world, rank):
        model = build_model(FAMILIES[family])
        changed(model)
        parallelize(model, config.strategy, lowering="traceable")
        recipe = replace(Recipe.of(config, model), seed=seed)
        steps = passes(config.strategy, None, "cpu", ordered=ordered)
        return GraphStore(Path("unused")).key(recipe, shape, torch.device(device), steps, whole)


_KEY = """
import time
from hyper_parallel.step import graph_key
graph_key._BEGUN = time.time() + 3600
import test_graph_store
print(test_graph_store._key())
"""


def test_another_process_has_the_same_key() -> None:
    """Whatever the seed of its hashes, by which sets and dictionaries of types are ordered."""
    found = set()
    for seed in ("1", "2"):
        path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
        environ = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path}
        done = subprocess.run(
            [sys.executable, "-c", _KEY], env=environ, capture_output=True, text=True, check=True
        )
        found.add(done.stdout.strip())
    (key,) = found
    assert len(key) == 32


def _frozen(model: nn.Module) -> None:
    next(model.parameters()).requires_grad_(False)


def _configured(model: nn.Module) -> None:
    config: Any = model.config
    config.rms_norm_eps = 1e-3


def _attribute(model: nn.Module) -> None:
    model.get_submodule("model.layers.0.mlp").scale = 2.0  # type: ignore[assignment]


def _hooked(model: nn.Module) -> None:
    model.get_submodule("model.layers.0").register_forward_pre_hook(_hook)


def _hook(module: nn.Module, args: Any) -> None:
    return None


OTHERS: dict[str, dict[str, Any]] = {
    "degree": {"strategy": {"axes": {"shard": 4}}},
    "axis": {"strategy": {"axes": {"replicate": 2}}},
    "key of the strategy": {"strategy": {**SHARD, "memory": {"reshard_after_forward": False}}},
    "precision": {"strategy": {**SHARD, "precision": {"compute": "bfloat16"}}},
    "order": {"strategy": {**SHARD, "overlap": {"schedule": "none"}}},
    "cluster of the order": {"strategy": {**SHARD, "overlap": {"cluster": "h100x8"}}},
    "no order": {"ordered": False},
    "family": {"family": "gpt2"},
    "rows": {"shape": BatchShape(((4, 32),) * 4, (False,) * 4)},
    "positions": {"shape": BatchShape(((2, 16),) * 4, (False,) * 4)},
    "micro-batches": {"shape": BatchShape(((2, 32),) * 2, (False,) * 2)},
    "documents": {"shape": BatchShape(((2, 32),) * 4, (True,) * 4)},
    "rank": {"rank": 1},
    "device": {"device": "meta"},
    "whole": {"whole": True},
    "seed": {"seed": 1},
    "clip": {"train": {"clip": None}},
    "optimizer": {"train": {"optimizer": {"name": "muon"}}},
    "setting of the optimizer": {"train": {"optimizer": {"name": "adamw", "weight_decay": 0.5}}},
    "loss": {"train": {"loss": {"z_loss": 0.1}}},
    "bias of the router": {"train": {"router_bias_rate": 0.5}},
    "frozen parameter": {"changed": _frozen},
    "config of the model": {"changed": _configured},
    "attribute of a module": {"changed": _attribute},
    "hook": {"changed": _hooked},
}


@pytest.fixture(scope="module")
def key() -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(graph_key, "_BEGUN", time.time() + 3600)
        found = _key()
        assert found is not None
        assert found == _key(), "the same step has the same key"
        yield found


@pytest.mark.parametrize("other", OTHERS)
def test_whatever_decides_a_step_changes_its_key(other: str, key: str) -> None:
    found = _key(**OTHERS[other])
    assert found is not None
    assert found != key


def test_versions_settings_and_exchanged_functions_change_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    # Here and not in a fixture: what other tests import meanwhile is part of the key.
    key = _key()
    with monkeypatch.context() as patched:
        patched.setattr(torch, "__version__", "2.99")
        graph_key.versions.cache_clear()
        assert _key() != key
    graph_key.versions.cache_clear()
    with monkeypatch.context() as patched:
        patched.setenv("TORCH_SOMETHING", "1")
        assert _key() != key
    with monkeypatch.context() as patched:
        modeling = sys.modules["transformers.models.llama.modeling_llama"]
        patched.setattr(modeling, "rotate_half", _hook)
        assert _key() != key
    with monkeypatch.context() as patched:
        patched.setattr(modeling.LlamaMLP, "forward", _hook)
        assert _key() != key
    with monkeypatch.context() as patched:
        patched.setattr(torch.nn.functional, "silu", _hook)
        assert _key() != key
    assert _key() == key


def _local(model: nn.Module) -> None:
    class Local(nn.Module):
        pass

    model.extra = Local()


def _main(model: nn.Module) -> None:
    model.extra = type("Own", (nn.Module,), {"__module__": "__main__"})()


@pytest.mark.parametrize("changed", [_local, _main])
def test_what_has_no_digest_is_not_kept(
    changed: Callable[[nn.Module], object], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert _key(changed=changed) is None
    assert "the captured step is not cached: the class" in caplog.text


def test_a_function_without_a_name_is_not_kept(caplog: pytest.LogCaptureFixture) -> None:
    def changed(model: nn.Module) -> None:
        model.get_submodule("model").shown = lambda x: x  # type: ignore[assignment]

    with caplog.at_level(logging.INFO):
        assert _key(changed=changed) is None
    assert "<lambda>" in caplog.text


def test_a_damaged_file_is_captured_anew_and_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = BatchShape(((2, 32),), (False,))
    with caplog.at_level(logging.INFO):
        _captured(tmp_path, "llama", SHARD, one)
        (path,) = _files(tmp_path)
        whole = path.read_bytes()
        middle = len(whole) // 2
        damaged = {
            "flipped": whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :],
            "cut": whole[:middle],
            "empty": b"",
            "other version": b"hyper_parallel step graph 0\n" + whole[28:],
        }
        for content in damaged.values():
            path.write_bytes(content)
            _captured(tmp_path, "llama", SHARD, one)
            assert path.read_bytes() == whole
        _captured(tmp_path, "llama", SHARD, one)
    assert _told(caplog) == ["captured", *["captured"] * len(damaged), "read"]
    assert caplog.text.count("cannot be read and is captured anew") >= len(damaged)
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


@pytest.fixture
def own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A module of the user's that is loaded, in a file that is older than this process."""
    path = tmp_path / "code_of_the_user.py"
    path.write_text("def scaled(x):\n    return x * 2\n")
    os.utime(path, (1e9, 1e9))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("code_of_the_user")
    del sys.modules["code_of_the_user"]


def test_a_changed_line_of_the_users_code_is_captured_anew(
    own_code: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one, store = BatchShape(((2, 32),), (False,)), tmp_path / "store"
    with caplog.at_level(logging.INFO):
        _captured(store, "llama", SHARD, one)
        _captured(store, "llama", SHARD, one)
        path = Path(str(own_code.__file__))
        path.write_text("def scaled(x):\n    return x * 3\n")
        _captured(store, "llama", SHARD, one)
    assert _told(caplog) == ["captured", "read", "captured"]
    assert "code_of_the_user.py has changed" in caplog.text


def test_code_that_is_younger_than_the_process_is_not_kept(
    own_code: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    os.utime(str(own_code.__file__))
    monkeypatch.setattr(graph_key, "versions", lambda: ())
    monkeypatch.setattr("hyper_parallel.step.graph_key.versions", lambda: ())
    monkeypatch.setattr(graph_key, "_BEGUN", os.stat(str(own_code.__file__)).st_mtime - 0.001)
    store = tmp_path / "store"
    with caplog.at_level(logging.INFO):
        _captured(store, "llama", SHARD, BatchShape(((2, 32),), (False,)))
    assert not _files(store)
    assert "has changed since this process began" in caplog.text


def test_ranks_and_runs_may_write_at_once(tmp_path: Path) -> None:
    found = _captured(None, "llama", SHARD)
    store = GraphStore(tmp_path)
    threads = [
        threading.Thread(target=store.save, args=("a" * 32, found.plain, found.loop)) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [path.name for path in _files(tmp_path)] == ["a" * 32 + ".graph"]
    with fake_ranks(2, 0):
        content = store.find("a" * 32)
        assert content is not None
        (path,) = _files(tmp_path)
        path.with_name("b" * 32 + ".graph").write_bytes(content)
        assert store.find("b" * 32) is None  # another step's graph
        read = store.read(content, _recipe("llama", SHARD).handle)
    assert read is not None
    assert _rows(read[0]) == _rows(found.plain)


def test_a_folder_that_cannot_be_written_to_is_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.INFO):
        _captured(tmp_path / "file", "llama", SHARD, BatchShape(((2, 32),), (False,)))
    assert "is not cached" in caplog.text


def test_only_plain_data_and_operators_are_written_and_read() -> None:
    found = _captured(None, "llama", SHARD, BatchShape(((2, 32),), (False,)))
    step = found.plain
    content = to_bytes(step)
    with pytest.raises(Unreadable, match="KeyError"):
        from_bytes(content, {})
    node = next(iter(step.nodes))
    node.meta["note"] = "of a pass that nobody told of"
    with pytest.raises(Unwritable, match="note"):
        to_bytes(step)
    del node.meta["note"]
    node.target = os.getcwd
    with pytest.raises(Unwritable, match="no operator"):
        to_bytes(step)


def test_a_refused_step_is_not_kept(tmp_path: Path) -> None:
    with fake_ranks(2, 0):
        recipe = _recipe("llama", SHARD)
        graphs = Graphs(recipe, "cpu", store=GraphStore(tmp_path))

        def stops(*_: Any, **__: Any) -> None:
            raise HyperParallelError("no")

        recipe.model.forward = stops  # type: ignore[method-assign]
        with pytest.raises(HyperParallelError):
            graphs.ready(FOUR)
    assert not _files(tmp_path)


def _workers(folder: Path) -> tuple[list[str], list[Any]]:
    """Of a run of two workers: whether each captured its step or read it, and the losses."""
    shutil.rmtree(folder / "out", ignore_errors=True)
    done = run_command("train", "run.yaml", folder=folder)
    assert done.returncode == 0, done.stderr
    logs = "".join(path.read_text() for path in (folder / "out" / "logs").rglob("*") if path.is_file())
    told = re.findall(r"the step as a graph: \d+ nodes, (captured|from the cache)", logs)
    rows = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    return told, [row["loss"] for row in rows if "loss" in row]


def test_workers_read_their_steps_where_all_have_them(tmp_path: Path) -> None:
    """One that reads would wait for ever for one that captures."""
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    (tmp_path / "run.yaml").write_text(
        """\
version: 1
out: out
model: {config: {model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2,
                 num_attention_heads: 2, num_key_value_heads: 2, max_position_embeddings: 32}}
data: {train: text.txt, sequence: 32, tokenizer: {vocab_size: 260}, cache: cache}
train: {steps: 2, batch: 4, sample: false}
launch: {device: cpu, threads: 1, workers: 2}
strategy: {axes: {shard: 2}}
trackers: []
"""
    )
    captured, losses = _workers(tmp_path)
    assert captured == ["captured", "captured"]
    files = list((tmp_path / "cache" / "graphs").rglob("*.graph"))
    assert len(files) == 2
    assert _workers(tmp_path) == (["from the cache"] * 2, losses)
    files[0].unlink()
    assert _workers(tmp_path) == (["captured", "captured"], losses)
