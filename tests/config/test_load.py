"""Files, inheritance and overrides become a RunConfig; every mistake is told in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from hyper_parallel.config import RunConfig, dump, from_dict, load, load_strategy
from hyper_parallel.config.train import AdamWConfig, MuonConfig
from hyper_parallel.errors import ConfigError
from hyper_parallel.strategy import Strategy

MINIMAL = """\
version: 1
out: runs/x
model: {config: {model_type: llama, hidden_size: 64}}
data: {train: text.txt}
"""


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    return write(tmp_path / "run.yaml", MINIMAL)


def order(strategy: Strategy) -> tuple[str, ...]:
    """The data and tensor axes, outer to inner."""
    return tuple(axis for axis in strategy.axes.order if axis in ("replicate", "shard", "tensor_x"))


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def problems(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        load(path, overrides)
    return str(raised.value).replace(f"{path.parent}/", "").splitlines()


def test_a_minimal_file_gets_the_defaults(run_file: Path) -> None:
    config = load(run_file)
    assert config.train.steps == 100
    assert config.strategy.axes.world == 1
    assert config.data.train == "text.txt"


def test_the_examples_load() -> None:
    examples = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))
    assert examples
    for example in examples:
        assert load(example).version == 1


class TestOverrides:
    def test_every_kind_of_value(self, run_file: Path) -> None:
        config = load(
            run_file,
            [
                "train.steps=7",
                "train.optimizer.lr=1e-3",
                "train.clip=null",
                "strategy.sequence=true",
                "data.train=[a, b]",
                "train.schedule={name: wsd, warmup: 2}",
                "train.sample.prompt=def f(x=1)",
            ],
        )
        assert config.train.steps == 7
        assert config.train.optimizer.lr == 1e-3
        assert config.train.clip is None
        assert config.strategy.sequence is True
        assert config.data.train == ["a", "b"]
        assert (config.train.schedule.name, config.train.schedule.warmup) == ("wsd", 2)
        assert config.train.sample.prompt == "def f(x=1)"

    def test_new_keys_of_open_mappings(self, run_file: Path) -> None:
        config = load(
            run_file, ["model.config.rope_parameters.factor=8.0", "model.config.num_hidden_layers=2"]
        )
        assert config.model.config == {
            "model_type": "llama",
            "hidden_size": 64,
            "rope_parameters": {"factor": 8.0},
            "num_hidden_layers": 2,
        }

    def test_a_module_pattern_is_one_key_dots_included(self, run_file: Path) -> None:
        config = load(
            run_file, ["strategy.rules.model.*.q_proj=colwise", "strategy.precision.modules.*.norm=float32"]
        )
        assert config.strategy.rules == {"model.*.q_proj": "colwise"}
        assert config.strategy.precision.modules == {"*.norm": "float32"}

    def test_the_later_of_two_holds(self, run_file: Path) -> None:
        assert load(run_file, ["train.steps=1", "train.steps=2"]).train.steps == 2

    def test_a_degree_keeps_the_order_of_the_axes(self, tmp_path: Path) -> None:
        path = write(tmp_path / "run.yaml", MINIMAL + "strategy: {axes: {tensor: 2, shard: 2}}\n")
        assert order(load(path, ["strategy.axes.tensor=4"]).strategy) == ("replicate", "tensor_x", "shard")
        assert order(load(path, ["strategy.axes.replicate=2"]).strategy) == ("tensor_x", "shard", "replicate")

    def test_another_optimizer_replaces_the_section_whatever_the_order(self, tmp_path: Path) -> None:
        path = write(tmp_path / "run.yaml", MINIMAL + "train: {optimizer: {lr: 1, betas: [0.9, 0.99]}}\n")
        for overrides in (
            ["train.optimizer.name=muon", "train.optimizer.lr=3"],
            ["train.optimizer.lr=3", "train.optimizer.name=muon"],
        ):
            assert load(path, overrides).train.optimizer == MuonConfig(name="muon", lr=3)
        assert load(path, ["train.optimizer.name=adamw"]).train.optimizer == AdamWConfig(
            lr=1, betas=(0.9, 0.99)
        )

    @pytest.mark.parametrize("text", ["train.steps", "=3", "train..steps=3", ".steps=3"])
    def test_what_is_not_key_and_value_is_refused(self, run_file: Path, text: str) -> None:
        assert problems(run_file, text) == [f"override {text}: write key=value, for example train.steps=100"]

    def test_a_value_that_is_not_yaml(self, run_file: Path) -> None:
        (line,) = problems(run_file, "data.train=[a")
        assert line.startswith("override data.train=[a: not valid YAML: ")


class TestInheritance:
    def test_sections_merge_and_lists_replace(self, tmp_path: Path) -> None:
        write(tmp_path / "base.yaml", MINIMAL + "train: {steps: 5, batch: 8}\ntrackers: [wandb, mlflow]\n")
        child = write(
            tmp_path / "below" / "child.yaml",
            "extends: ../base.yaml\ntrain: {steps: 6}\ntrackers: [tensorboard]\nout: runs/y\n",
        )
        config = load(child)
        assert (config.train.steps, config.train.batch, config.out) == (6, 8, "runs/y")
        assert config.trackers == ["tensorboard"]

    def test_another_model_type_replaces_the_config(self, tmp_path: Path) -> None:
        write(tmp_path / "base.yaml", MINIMAL)
        child = write(
            tmp_path / "child.yaml", "extends: base.yaml\nmodel: {config: {model_type: gpt2, n_embd: 8}}\n"
        )
        assert load(child).model.config == {"model_type": "gpt2", "n_embd": 8}
        same = write(tmp_path / "same.yaml", "extends: base.yaml\nmodel: {config: {vocab_size: 8}}\n")
        assert load(same).model.config == {"model_type": "llama", "hidden_size": 64, "vocab_size": 8}

    def test_axes_named_again_stand_in_the_order_of_the_later_file(self, tmp_path: Path) -> None:
        write(tmp_path / "base.yaml", MINIMAL + "strategy: {axes: {shard: 2, replicate: 1, tensor: 2}}\n")
        child = write(
            tmp_path / "child.yaml", "extends: base.yaml\nstrategy: {axes: {tensor: 4, shard: 1}}\n"
        )
        assert order(load(child).strategy) == ("tensor_x", "replicate", "shard")

    def test_a_circle_is_refused(self, tmp_path: Path) -> None:
        write(tmp_path / "a.yaml", "extends: b.yaml\n")
        b = write(tmp_path / "b.yaml", "extends: a.yaml\n")
        assert problems(b) == [
            "b.yaml: 'extends' forms a cycle: b.yaml -> a.yaml -> b.yaml; remove one of them"
        ]

    def test_a_missing_base_names_the_file_that_names_it(self, tmp_path: Path) -> None:
        child = write(tmp_path / "child.yaml", "extends: nowhere.yaml\n")
        assert problems(child) == ["nowhere.yaml: no such file ('extends' in child.yaml names it)"]

    def test_the_file_that_brought_a_value_is_named(self, tmp_path: Path) -> None:
        write(tmp_path / "base.yaml", MINIMAL + "train: {steps: 0, batch: 0}\n")
        child = write(tmp_path / "child.yaml", "extends: base.yaml\ntrain: {batch: -1}\n")
        assert problems(child) == [
            "base.yaml: train.steps: must be at least 1 (got 0)",
            "child.yaml: train.batch: must be at least 1 (got -1)",
        ]


class TestMistakes:
    @pytest.mark.parametrize(
        ("override", "told"),
        [
            ("train.optimizer.lr=-1", "train.optimizer.lr: must be greater than 0 (got -1)"),
            ("train.optimizer.lr=.inf", "train.optimizer.lr: must be a finite number (got Infinity)"),
            ("train.stpes=5", "train.stpes: unknown key; did you mean 'steps'?"),
            ("trian.steps=5", "trian: unknown key; did you mean 'train'?"),
            (
                "strategy.axes.exprt=2",
                "strategy.axes.exprt: unknown key; did you mean 'expert'?",
            ),
            (
                "strategy.axes.zzz=2",
                "strategy.axes.zzz: unknown key; the keys here are context, expert, pipeline, replicate, shard, "
                "tensor, "
                "tensor_x, tensor_y",
            ),
            ("train.optimizer.name=muo", "train.optimizer.name: must be one of 'adamw', 'adamw_8bit', 'lion', "
             "'adafactor', 'muon' (got 'muo'; did you mean 'muon'?)"),
            ("train.optimizer.fused=true", "train.optimizer.fused: unknown key; PyTorch's fused kernel is always used; "
             "leave it out"),
            *((f"{key}={{rank: 8}}", f"{key}: unknown key; write model.adapter (LoRA: {{rank: 8}}, for example)")
              for key in ("lora", "peft", "model.lora", "model.peft", "train.lora")),
            ("model.adapter={r: 8, rank: 8}", "model.adapter.r: unknown key; write rank"),
            ("train.max_steps=3", "train.max_steps: unknown key; write train.steps (updates of the optimizer)"),
            ("train={epochs: 3, steps: 5}", "train: give either 'steps' (5) or 'epochs' (3), and leave the other out "
             "or set it to null"),
            ("train={steps: 3, schedule: {warmup: 20}}", "train: 'schedule.warmup' (20) is longer than 'steps' (3); "
             "add train.schedule.warmup=0, or a share of the steps such as train.schedule.warmup=0.1"),
            ("train.schedule.name=cosin", "train.schedule.name: must be one of 'cosine', 'linear', 'constant' or "
             "'wsd' (got 'cosin'; did you mean 'cosine'?)"),
            ("train.steps=2.5", "train.steps: must be a whole number (got 2.5)"),
            ("train=3", "train: must be a section with keys (got 3)"),
            ("train=", "train: must be a section with keys (got null, an empty section; give it keys or remove it)"),
            ("data.train=3", "data.train: must be text (got 3; put it in quotes)"),
            ("data.train=[a, 3]", "data.train.1: must be text (got 3; put it in quotes)"),
            ("strategy.axes={tensor: 2, tensor_x: 2}", "strategy.axes: tensor and tensor_x are the same axis; write "
             "one of them"),
            ("strategy.axes.expert=3", "strategy.axes: expert is 3, which does not divide shard · context · tensor "
             "= 1; experts are spread over the ranks of these axes"),
            ("strategy.axes.tensor=atuo", "strategy.axes.tensor: must be a whole number (got 'atuo')"),
            ("train=auto", "train: must be a section with keys (got 'auto'; the planner chooses axes: set strategy, "
             "strategy.axes or single degrees to auto)"),
            ("strategy.cluster=h100", "strategy: 'cluster' is the machine by which open axes are planned, and every "
             "degree is written; leave it out, or set axes to auto"),
            ("strategy={axes: auto, placement: {node: [shard]}}", "strategy: placement says on which level each axis "
             "lies, and 'auto' leaves axes open; leave the axes out of placement (its devices may stay), or write "
             "their degrees"),
            ("train.optimizer={name: muon, adamw: {lr: 0}}", "train.optimizer.adamw.lr: must be greater than 0 "
             "(got 0)"),
        ],
    )  # fmt: skip
    def test_one_line_says_what_is_wrong(self, run_file: Path, override: str, told: str) -> None:
        assert problems(run_file, override) == [f"override {override}: {told}"]

    def test_the_advice_on_epochs_and_adapters_works(self, run_file: Path) -> None:
        train = load(run_file, ["train={steps: null, epochs: 3}", "model.adapter={rank: 8}"]).train
        again = write(run_file.with_name("again.yaml"), dump(load(run_file, ["train.epochs=3"])))
        assert (train.epochs, load(again).train.epochs) == (3, 3)
        for share in ("0", "0.1"):
            load(run_file, ["train={steps: 3, schedule: {warmup: 20}}", f"train.schedule.warmup={share}"])

    def test_all_problems_are_told_at_once(self, tmp_path: Path) -> None:
        path = write(tmp_path / "run.yaml", MINIMAL + "train: {stpes: 1, batch: 0}\nsede: 3\n")
        assert sorted(problems(path)) == [
            "run.yaml: sede: unknown key; did you mean 'seed'?",
            "run.yaml: train.batch: must be at least 1 (got 0)",
            "run.yaml: train.stpes: unknown key; did you mean 'steps'?",
        ]

    def test_a_key_that_is_missing_for_its_spelling_is_told_once(self, tmp_path: Path) -> None:
        path = write(tmp_path / "run.yaml", MINIMAL.replace("out:", "outt:"))
        assert problems(path) == ["run.yaml: outt: unknown key; did you mean 'out'?"]

    def test_a_missing_key_says_what_it_is_for(self, tmp_path: Path) -> None:
        path = write(tmp_path / "run.yaml", MINIMAL.replace("out: runs/x\n", ""))
        (line,) = problems(path)
        assert line.startswith("run.yaml: out: is missing; give it a value: The run's folder")

    def test_a_problem_between_keys_names_the_file(self, run_file: Path) -> None:
        (line,) = problems(run_file, "strategy.axes.tensor=2", "launch.workers=3")
        assert line.startswith("run.yaml: the strategy's axes multiply to 2 (")

    @pytest.mark.parametrize("missing", ["version: 1\n"])
    def test_the_version_is_asked_for(self, tmp_path: Path, missing: str) -> None:
        path = write(tmp_path / "run.yaml", MINIMAL.replace(missing, ""))
        assert problems(path) == [
            "run.yaml: version: is missing; add the line 'version: 1', the format's version"
        ]

    @pytest.mark.parametrize("version", ["2", "true", "one"])
    def test_another_version_is_explained(self, tmp_path: Path, version: str) -> None:
        path = write(tmp_path / "run.yaml", MINIMAL.replace("version: 1", f"version: {version}"))
        (line,) = problems(path)
        assert line.startswith("run.yaml: version: must be 1, the format that this release reads (got ")

    @pytest.mark.parametrize(
        ("text", "told"),
        [
            ("", "run.yaml: the file is empty; start from examples/quickstart.yaml"),
            ("- a\n", "run.yaml: must be keys with values, as in 'version: 1'; got a list"),
            ("extends: [a, b]\n", "run.yaml: extends: must be the name of one file, relative to this one (got ['a', "
             "'b'])"),
        ],
    )  # fmt: skip
    def test_what_is_no_run_file(self, tmp_path: Path, text: str, told: str) -> None:
        assert problems(write(tmp_path / "run.yaml", text)) == [told]

    def test_a_file_that_is_not_there_or_not_text(self, tmp_path: Path) -> None:
        assert problems(tmp_path / "none.yaml") == ["none.yaml: no such file"]
        (tmp_path / "bytes.yaml").write_bytes(b"version: \xff")
        assert problems(tmp_path / "bytes.yaml") == [
            "bytes.yaml: not UTF-8 text (byte 9); is this a YAML file?"
        ]
        (line,) = problems(tmp_path)
        assert "cannot be read: it is a folder, and a file is needed" in line


def test_plain_data_is_read_as_a_file_is() -> None:
    data = {"version": 1, "out": "x", "model": {"config": {"model_type": "llama"}}, "data": {"train": "t"}}
    config = from_dict(data, ["train.steps=3"])
    assert isinstance(config, RunConfig)
    assert config.train.steps == 3
    with pytest.raises(ConfigError, match=r"^config: seeed: unknown key; did you mean 'seed'\?$"):
        from_dict({**data, "seeed": 1})


def test_a_strategy_has_files_of_its_own(tmp_path: Path) -> None:
    write(tmp_path / "base.yaml", "version: 1\naxes: {tensor: 2, shard: 4}\n")
    path = write(tmp_path / "strategy.yaml", "extends: base.yaml\nsequence: true\n")
    strategy = load_strategy(path, ["axes.shard=2", "rules.model.norm=replicate"])
    assert order(strategy) == ("replicate", "tensor_x", "shard")
    assert (strategy.axes.world, strategy.sequence, strategy.rules) == (4, True, {"model.norm": "replicate"})
    write(tmp_path / "base.yaml", "axes: {tensor: 2}\n")
    with pytest.raises(ConfigError, match="version: is missing"):
        load_strategy(path)


def test_an_override_with_a_mapping_is_all_that_its_key_is(tmp_path: Path) -> None:
    path = tmp_path / "axes.yaml"
    path.write_text("version: 1\naxes: {shard: 2, tensor: 2}\nsequence: true\n")
    strategy = load_strategy(path, ["axes={replicate: 2}", "sequence=false"])
    assert {axis: n for axis, n in strategy.axes.model_dump().items() if n > 1} == {"replicate": 2}
    assert load_strategy(path, ["axes={replicate: 2}", "axes.tensor=3", "sequence=false"]).axes.world == 6
    assert load_strategy(path, ["axes.replicate=2"]).axes.world == 8
