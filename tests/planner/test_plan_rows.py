"""Rows of published runs as columns: what fills empty cells, what is refused and why, and that no result is seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fit_constants.published_runs import RECIPES, RUNS, TRANSCRIBED

from hyper_parallel.errors import DataError
from hyper_parallel.planner.csv_runs.cells import INPUTS, MEASURED, blind, records
from hyper_parallel.planner.csv_runs.model_and_machine import network_rate, preset_of
from hyper_parallel.planner.csv_runs.rows import RunRow, rows
from hyper_parallel.planner.table import COLUMNS, Table
from planner.plan_cases import code_names
from planner.published_run import RUN

DENSE_MLP = 3 * 14336 / (3 * 14336 + 2 * 4096 + 2 * 1024)
"""Of the products of a layer of llama-3-8b: those of its MLP."""


def one(**cells: Any) -> tuple[Table, RunRow]:
    table, found = rows([{**RUN, **cells}])
    return table, found[0]


def taken(**cells: Any) -> Table:
    table, row = one(**cells)
    assert row.unsupported == ""
    assert row.index == 0 and table.n == 1
    return table


def refused(**cells: Any) -> str:
    table, row = one(**cells)
    assert row.index is None and table.layers.size == 0
    return row.unsupported


def test_a_row_is_what_it_states() -> None:
    table = taken()
    assert (table.layers, table.tensor_x, table.pipeline, table.shard, table.batch) == (32, 2, 2, 4, 64)
    assert (table.devices, table.node, table.peak16, table.sequence) == (16, 8, 989e12, 8192)
    assert code_names(table, "recompute") == ["none"] and code_names(table, "architecture") == ["hopper"]


def test_each_filled_cell_is_named_with_where_it_is_from() -> None:
    _, row = one(kv_heads="", vocab="", precision="")
    assert row.profile == "megatron-lm" and row.cluster == "h100"
    assert row.filled["kv_heads"] == "8, of the published llama-3-8b"
    assert row.filled["vocab"] == "128256, of the published llama-3-8b"
    assert row.filled["zero"] == "1, the default of megatron-lm"
    assert row.filled["precision"] == "bf16, the default of megatron-lm"
    assert "tp" not in row.filled and "layers" not in row.filled


def test_dimensions_that_no_column_has_come_from_the_published_model() -> None:
    moe = {"experts": "128", "topk": "8", "moe_ffn": "768", "ep": "8", "pp": "1"}
    qwen = taken(model="Qwen3_30B_a3B", layers="48", hidden="2048", kv_heads="4", ffn="6144", **moe)
    assert (qwen.head_dim, qwen.expert, qwen.dense_layers) == (128, 8, 0)
    moonlight = taken(
        model="Moonlight-16B", **dict.fromkeys(("layers", "hidden", "heads", "kv_heads", "ffn"), "")
    )
    assert (moonlight.layers, moonlight.key_rank, moonlight.shared_ffn) == (27, 512, 2816)


def test_a_name_whose_dimensions_differ_gives_nothing() -> None:
    table, row = one(
        model="gpt3-175b", layers="24", hidden="1024", heads="16", kv_heads="", ffn="", ffn_gated=""
    )
    assert "not the published gpt-3-175b" in row.filled["model"]
    assert (table.ffn, table.gated, table.tied, table.kv_heads) == (4096, 0, 1, 16)


def test_a_model_that_was_cut_keeps_its_sorts_of_layers() -> None:
    moe = {"experts": "256", "topk": "8", "moe_ffn": "2048", "kv_heads": "", "ffn": "18432", "pp": "1"}
    table = taken(model="deepseekv3-L4", layers="4", hidden="7168", heads="128", **moe)
    assert (table.layers, table.dense_layers, table.query_rank) == (4, 1, 1536)


def test_what_contradicts_the_rest_of_its_row_is_named() -> None:
    table, row = one(dp="8", mbs="32")
    assert (table.shard, table.micro) == (4, 16)
    assert "and not 8" in row.filled["dp"] and "and not 32" in row.filled["mbs"]
    moe = {"experts": "8", "topk": "2", "moe_ffn": "14336", "ep": "3", "model": "mine"}
    table, row = one(**moe)
    assert table.expert == 1 and row.filled["ep"].startswith("1: 3 divides neither")


def test_scores_are_stored_where_no_fused_kernel_is() -> None:
    assert taken().flash == 1
    assert taken(recompute="selective").flash == 0
    assert taken(recompute="selective", framework="Megatron-Bridge").flash == 1
    assert taken(hardware="V100").flash == 0


def test_micro_batches_that_are_not_stated() -> None:
    assert taken(mbs="").micro == 1
    assert taken(mbs="", grad_accum="4").micro == 4
    assert taken(mbs="", fsdp="FULL_SHARD").micro == 16
    assert taken(gbs="", mbs="2", grad_accum="3").batch == 24


def test_one_expert_is_none() -> None:
    assert taken(experts="1", topk="1").experts == 0


def test_stated_parameters_say_whether_the_head_is_tied() -> None:
    plain = {"model": "mine", "vocab": "100000"}
    assert taken(**plain, params_b="7.39").tied == 1
    assert taken(**plain, params_b="7.80").tied == 0
    assert taken(model="mine", vocab="4000", params_b="6.9").tied == 0, (
        "a rounded total does not tell a small head"
    )


@pytest.mark.parametrize(
    ("cells", "spread"),
    [
        ({"zero": "0"}, (4, 1, 0)),
        ({"zero": "2"}, (1, 4, 2)),
        ({"fsdp": "FULL_SHARD"}, (1, 4, 3)),
        ({"fsdp": "2"}, (2, 2, 3)),
        ({"fsdp": "0"}, (1, 4, 1)),
        ({"fsdp": "SHARD_GRAD_OP"}, (1, 4, 2)),
        ({"framework": "Megatron-DeepSpeed"}, (4, 1, 0)),
        ({"framework": "Megatron-DeepSpeed ZeRO-2"}, (1, 4, 2)),
        ({"framework": "DeepSpeed"}, (1, 4, 3)),
        ({"framework": "metaseq: FSDP and Megatron"}, (1, 4, 3)),
        ({"framework": "DeepSpeed", "fsdp": "0"}, (4, 1, 0)),
    ],
)
def test_what_is_sharded(cells: dict[str, str], spread: tuple[int, int, int]) -> None:
    table = taken(**cells)
    assert (table.replicate, table.shard, table.zero) == spread


@pytest.mark.parametrize(
    ("cells", "virtual", "schedule"),
    [
        ({"vp": "4"}, 4, "interleaved"),
        ({"pp_schedule": "interleaved-1f1b"}, 8, "interleaved"),
        ({"pp_schedule": "1f1b"}, 1, "1f1b"),
        ({"pp_schedule": "GPipe"}, 1, "gpipe"),
        ({"vp": "4", "pp": "1"}, 1, "1f1b"),
        ({"framework": "HAI-LLM"}, 1, "dualpipe"),
        ({"framework": "Meta internal"}, 8, "interleaved"),
        ({"framework": "Meta internal", "pp_schedule": "1f1b"}, 1, "1f1b"),
        ({"framework": "HAI-LLM", "vp": "2"}, 2, "dualpipe"),
    ],
)
def test_pipelines(cells: dict[str, str], virtual: int, schedule: str) -> None:
    table = taken(**cells)
    assert table.virtual == virtual and code_names(table, "schedule") == [schedule]


@pytest.mark.parametrize(
    ("words", "kind", "share"),
    [
        ("full (use_checkpoint=true)", "full", 1),
        ("none", "none", 1),
        ("core_attn", "selective", 1),
        ("moe_act", "none", 1),
        ("layernorm,moe_act", "none", 1),
        ("mlp", "full", DENSE_MLP),
        ("moe,mla_up_proj", "none", 1),  # which a dense model with plain attention has not
        ("--recompute-method block --recompute-num-layers 4", "full", 0.25),
    ],
)
def test_what_is_computed_again(words: str, kind: str, share: float) -> None:
    table = taken(recompute=words)
    assert code_names(table, "recompute") == [kind] and table.recomputed[0] == pytest.approx(share, rel=1e-4)


def test_modules_of_a_mixture_are_computed_again_by_their_share_of_the_products() -> None:
    cells = dict.fromkeys(("layers", "hidden", "heads", "kv_heads", "ffn"), "") | {"tp": "1", "pp": "1"}
    moe = {**cells, "model": "deepseek-v3", "ep": "8"}
    up = 128 * (1536 * 192 + 512 * 256)  # of queries and of keys and values, all heads
    experts = 58 * 3 * 7168 * 2048 * 9
    attention = 7168 * (1536 + 576) + up + 128 * 128 * 7168
    layers = 61 * attention + experts + 58 * 7168 * 256 + 3 * 3 * 7168 * 18432
    for words, part in (("mla_up_proj", 61 * up), ("moe,layernorm", experts)):
        table = taken(recompute=words, **moe)
        assert code_names(table, "recompute") == ["full"]
        assert table.recomputed[0] == pytest.approx(part / layers, rel=1e-3)


def test_notes_say_what_a_recipe_does() -> None:
    moe = {
        "model": "Qwen3_30B_a3B",
        "layers": "48",
        "hidden": "2048",
        "kv_heads": "4",
        "ffn": "6144",
        "pp": "1",
    }
    moe |= {
        "experts": "128",
        "topk": "8",
        "moe_ffn": "768",
        "ep": "8",
        "framework": "Megatron-Bridge NeMo 26.04",
    }

    def said(notes: str) -> tuple[float, ...]:
        t = taken(notes=notes, **moe)
        return tuple(float(one[0]) for one in (t.dedup, t.overlap_expert, t.graphs, t.fused_routing, t.even))

    assert said("") == (0.5, 0.5, 0.5, 1, 1)
    assert said("hybridep; no a2a overlap; recorded graphs attn+moe_router") == (1, 0, 1, 1, 1)
    assert said("hybridep; a2a overlap; no recorded graphs") == (1, 1, 0, 1, 1)
    # The host waits for the counts of an all-to-all whose experts have no capacity.
    assert said("alltoall; no a2a overlap; recorded graphs moe_router") == (0, 0, 0, 1, 1)
    assert said("(tokendrop) alltoall; recorded graphs") == (0, 0.5, 1, 1, 1)
    assert taken(notes="fused router", **moe | {"framework": "Megatron-LM"}).fused_routing[0] == 1
    assert taken(**moe | {"framework": "Megatron-LM"}).fused_routing[0] == 0.5
    assert taken(notes="no tp overlap", **moe).overlap_tensor[0] == 0 < taken(**moe).overlap_tensor[0]


def test_modules_that_predict_are_trained_unless_a_row_says_not() -> None:
    cells = dict.fromkeys(("layers", "hidden", "heads", "kv_heads", "ffn"), "") | {"tp": "1", "pp": "1"}
    moe = {**cells, "model": "deepseek-v3", "ep": "8"}
    frameworks = {"Megatron-Bridge NeMo 26.04": 1, "NeMo 2": 1, "NeMo AutoModel": 0, "Megatron-LM": 0}
    for framework, modules in frameworks.items():
        assert taken(framework=framework, **moe).prediction_modules[0] == modules
    assert taken(framework="NeMo 2", notes="DeepSeekV3 (w/o MTP)", **moe).prediction_modules[0] == 0


def test_tokens_of_packed_sequences_attend_to_their_own_piece() -> None:
    whole, packed = taken(), taken(notes="task=LoRA; packed=200")
    assert (whole.window[0], packed.window[0], packed.windowed[0]) == (0, 100, 1)


def test_an_adapter_is_of_the_rank_that_a_row_states() -> None:
    stated, usual = taken(notes="task=LoRA; rank=16"), taken(notes="task=LoRA")
    assert (stated.adapter_rank[0], stated.adapted_down[0]) == (16, 1)
    assert (usual.adapter_rank[0], usual.adapted_down[0]) == (32, 0)
    assert "rank=" in refused(notes="task=LoRA; rank=low")


@pytest.mark.parametrize(
    ("words", "hardware", "precision"),
    [
        ("amp_bf16", "H100", "bf16"),
        ("FP8-CS", "B200", "fp8"),
        ("FP8-MX", "B200", "mxfp8"),
        ("FP8 alt-recipe", "GB200-NVL72", "mxfp8"),
        ("FP8 alt-recipe", "H100", "fp8"),
        ("NVFP4", "GB300", "nvfp4"),
        ("tf32", "A100", "fp32"),
    ],
)
def test_precisions(words: str, hardware: str, precision: str) -> None:
    assert code_names(taken(precision=words, hardware=hardware), "precision") == [precision]


@pytest.mark.parametrize(
    ("hardware", "preset"),
    [
        ("a100_40gb", "a100-40gb"),
        ("a100_80gb", "a100"),
        ('A100-class ("NVIDIA Ampere")', "a100"),
        ("GB200-NVL72", "gb200-nvl72"),
        ("B300", "b300"),
        ("NVIDIA H20", "h20"),
        ("H200", "h200"),
        ("H800", "h800"),
        ("MI300X", "mi300x"),
        ("Tesla V100-SXM2-32GB", "v100"),
        ("Ascend 910B (Atlas 900 A2 PODc)", "910b"),
        ("CloudMatrix384 / Ascend 910C", "cloudmatrix384"),
    ],
)
def test_hardware_as_published_runs_write_it(hardware: str, preset: str) -> None:
    assert preset_of(hardware) == preset


def test_a_device_with_more_or_less_memory() -> None:
    assert taken(hardware="H100 SXM (95 GiB)").capacity == 95 * 2**30
    assert taken(hardware="V100-SXM2-16GB").capacity == 16e9
    assert taken(hardware="GB200-NVL72").capacity == 186e9


def test_a_device_that_may_draw_less_has_a_slower_clock() -> None:
    plain, limited = taken(hardware="H100-96GB HBM2e"), taken(hardware="H100-96GB HBM2e 500W")
    assert limited.peak16 / plain.peak16 == limited.peak8 / plain.peak8 == pytest.approx((5 / 7) ** (1 / 3))
    assert plain.peak16 == 989e12 and plain.hbm == limited.hbm == 2.4e12
    _, row = one(hardware="H100 500W")
    assert row.filled["hardware"] == "89% of the clock, for 500 W of 700"


def test_what_torchtitan_means_by_its_words() -> None:
    titan = {"framework": "torchtitan", "tp": "1", "pp": "1", "recompute": "selective (op)"}
    selective = taken(**titan)
    assert code_names(selective, "recompute") == ["full"] and selective.recomputed == 0.5
    compiled = taken(**titan | {"framework": "torchtitan, torch.compile"})
    assert (selective.fused, compiled.fused) == (-0.6, 1) and selective.logit_bytes > compiled.logit_bytes
    assert one(**titan, precision="FP8")[1].profile == "torchtitan-compiled"
    assert selective.zero == 3
    piped = taken(**titan | {"pp": "2"})
    assert (piped.zero, piped.weight_bytes, piped.state_bytes) == (1, 2, 12)


def test_networks_as_published_runs_write_them() -> None:
    assert network_rate("A100 40GB with 1600 Gbps node-node interconnect (RoCE)", 8) == 25e9
    assert network_rate("8x200G NIC per node, Tomahawk4", 8) == 25e9
    assert network_rate("400 Gb/s per GPU", 8) == 50e9
    assert network_rate("NVLink intra; inter-node fabric not stated", 8) is None
    assert taken(interconnect="NVLink; inter-node 800 Gb/s per node").network_rate == 12.5e9
    # An H100's preset has InfiniBand, an Ascend's RoCE.
    assert [taken(interconnect=words).shared_paths[0] for words in ("", "8x400G NIC per node")] == [0, 0]
    assert [taken(interconnect=words).shared_paths[0] for words in ("4x100G RoCE per node", "EFA")] == [1, 1]
    assert taken(hardware="Ascend 910B").shared_paths[0] == 1
    assert taken(hardware="Ascend 910B", interconnect="InfiniBand 8x50 GB/s").shared_paths[0] == 0


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        ({"tp": "two"}, "line 2, column tp: got 'two', needed is a whole number"),
        ({"tp": "0"}, "column tp"),
        ({"hidden": "4096.5"}, "column hidden"),
        ({"layers": "-3"}, "column layers"),
        ({"seq_len": "nan"}, "column seq_len"),
        ({"gbs": "1e300"}, "column gbs"),
        ({"gbs": ""}, "gbs is empty"),
        ({"gbs": "3"}, "3 sequences leaves some of 4"),
        ({"n_devices": ""}, "n_devices is empty"),
        ({"n_devices": "15"}, "15 devices are no multiple"),
        ({"tp": "1_0"}, "column tp"),
        ({"hardware": "TPU v5p"}, "nothing is published of the device 'TPU v5p'"),
        ({"hardware": "H110"}, "the nearest of the published machines is 'h100'"),
        ({"hardware": ""}, "hardware is empty"),
        ({"model": "mine", "layers": ""}, "layers of the model 'mine' are not stated"),
        ({"model": "mine", "seq_len": ""}, "seq_len is empty"),
        ({"model": "Nemotron_3_Nano"}, "neither attention nor MLPs"),
        ({"heads": "31", "kv_heads": ""}, "no multiple of heads"),
        ({"kv_heads": "5"}, "kv_heads 5 of heads 32"),
        ({"experts": "8", "model": "mine"}, "topk is empty"),
        ({"precision": "posit"}, "column precision"),
        ({"fsdp": "perhaps"}, "column fsdp"),
        ({"zero": "4"}, "column zero"),
        ({"ffn_gated": "2"}, "column ffn_gated"),
        ({"offload": "somewhere"}, "column offload"),
        ({"model": "mamba-9b"}, "none of the published models of that kind"),
    ],
)
def test_what_cannot_be_is_unsupported_with_the_reason(cells: dict[str, str], said: str) -> None:
    assert said in refused(**cells)


def test_rows_keep_their_order_and_each_knows_its_place() -> None:
    table, found = rows([RUN, {**RUN, "tp": "x"}, {**RUN, "tp": "4"}])
    assert [row.index for row in found] == [0, None, 1]
    assert [row.line for row in found] == [2, 3, 4]
    assert table.tensor_x.tolist() == [2, 4]


def test_nothing_measured_is_seen() -> None:
    """With every measured cell scrambled, and results told in the notes, rows and table are the same."""
    plain = [RUN, {**RUN, "notes": "mp_mode=PURE"}]
    scrambled = [
        {**RUN, **dict.fromkeys(MEASURED, "31337"), "notes": "reached 31337 tokens/s"},
        {**RUN, **dict.fromkeys(MEASURED, "crash_or_oom"), "notes": "57% of peak; mp_mode=PURE"},
    ]
    (one_table, one_rows), (other_table, other_rows) = rows(plain), rows(scrambled)
    assert one_rows == other_rows
    assert all((getattr(one_table, name) == getattr(other_table, name)).all() for name in COLUMNS)
    assert one_table.gradient_bytes.tolist() == [4, 2]


def test_blind_keeps_inputs_alone() -> None:
    kept = blind({**dict.fromkeys((*INPUTS, *MEASURED), "5"), "notes": "fast: 99 tokens/s"})
    assert set(kept) == set(INPUTS)
    assert kept["notes"] == ""


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_a_file_is_read_as_its_records_are(tmp_path: Path) -> None:
    text = ",".join(RUN) + "\n" + ",".join(RUN.values()) + "\n" + ",".join(RUN.values()) + ",9\n"
    table, found = rows(write(tmp_path / "runs.csv", text))
    assert found[0].unsupported == "" and table.n == 1
    assert "line 3 has 1 cells more" in found[1].unsupported


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("hardwar,n_devices\nH100,8\n", "did you mean 'hardware'"),
        ("hardware,gbs\nH100,8\n", "lacks the column 'n_devices'"),
        ("hardware,n_devices,gbs,gbs\nH100,8,1,1\n", "more than once"),
        ("", "lacks the column 'hardware'"),
    ],
)
def test_a_file_that_is_no_such_csv_is_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(DataError, match=said):
        rows(write(tmp_path / "runs.csv", text))


def test_a_file_that_is_not_there_or_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot read"):
        rows(tmp_path / "none.csv")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="no text in UTF-8"):
        rows(tmp_path / "binary.csv")
    (tmp_path / "not.csv.gz").write_bytes(b"row_id,hardware")
    with pytest.raises(DataError, match="cannot be decompressed"):
        rows(tmp_path / "not.csv.gz")


def test_the_published_runs_that_state_shape_devices_and_batch_are_covered() -> None:
    given = records(RUNS)
    _, found = rows(given)
    stating = ("layers", "hidden", "heads", "n_devices", "gbs")
    stated = [row for row, record in zip(found, given, strict=True) if all(record[name] for name in stating)]
    assert len(given) == 4082 and len(stated) == 4023
    without = [row for row in stated if row.unsupported]
    assert len(without) == 1 and all(row.unsupported for row in without)
    assert {row.profile for row in stated} >= {"nanotron", "megatron-bridge-recipes", "mindspeed-llm"}


def test_the_transcribed_runs_are_all_covered() -> None:
    (_, found), (_, recipes) = rows(TRANSCRIBED), rows(RECIPES)
    assert (len(found), len(recipes)) == (102, 98)
    assert not [row for row in (*found, *recipes) if row.unsupported]
    assert {row.source for row in found} == {"M1", "M2", "M3", "P1", "P2", "P3", "P4", "P5", "P6"}


def test_scrambled_measurements_change_nothing_of_the_published_runs() -> None:
    given = records(RUNS)[::40]
    scrambled = [{**record, **dict.fromkeys(MEASURED, "31337")} for record in given]
    (table, found), (other, others) = rows(given), rows(scrambled)
    assert found == others
    assert all((getattr(table, name) == getattr(other, name)).all() for name in COLUMNS)


def test_maxtext_keeps_queries_keys_and_values() -> None:
    """Of Llama 3.1 70B's products its policy computes the attention's output, gate and up again: 63%."""
    run = {
        **RUN,
        "model": "llama-3.1-70b",
        "framework": "MaxText",
        "recompute": "save_qkv_proj",
        "hidden": "8192",
    }
    run |= {"layers": "80", "heads": "64", "ffn": "28672"}
    table, _ = rows([run])
    assert table.recompute.tolist() == [2.0]
    parts = {
        "qkv": 8192 * (8192 + 2 * 1024),
        "out": 8192 * 8192,
        "wide": 2 * 8192 * 28672,
        "down": 8192 * 28672,
    }
    assert table.recomputed[0] == pytest.approx((parts["out"] + parts["wide"]) / sum(parts.values()))
