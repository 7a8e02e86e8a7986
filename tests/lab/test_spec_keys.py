"""Keys of specs that tell an op's role, held against what the sizes of every shipped example suggest."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiers import LIGHT_TYPES, mark_heavy

from flopcalc import SpecError, bind
from flopcalc.base.data import list_data_files, load_toml
from flopcalc.core.estimate.notes import describe_inferred
from flopcalc.core.model.ops import Attend, Linear, Norm, Op, Pointwise, iterate
from flopcalc.core.spec.spec import load_spec
from flopcalc.prediction.rows import count_queries
from flopcalc.prediction.tensor_parallel import find_sides
from flopcalc.prediction.work import TensorSplit
from lab.spec_keys import compare, infer_keys, infer_rotation, write_key

EXAMPLES = list_data_files("examples")
# Specs that describe a class of another type: that type's own example speaks for them.
VARIANTS = {name for path in list_data_files("specs").values() for name in load_toml(path).get("variants", {}).values()}
TYPES = sorted(EXAMPLES.keys() - VARIANTS)
# Type -> op and key where sizes mislead, with what the spec says of it.
OTHERWISE: dict[str, dict[str, str]] = {
    "bailing_hybrid": {"self_attn.o_norm over": "its weight"},
    "bitnet": {"self_attn.o_proj split": "row"},
    "blip": {"crossattention.self.key split": "keys", "crossattention.self.value split": "keys"},
    "cogvlm": {"self_attn.language_expert_dense split": "row"},
    "convbert": {
        "attention.self.conv_kernel_layer split": "row",
        "attention.self.key_conv_attn_layer.depthwise split": "whole",
    },
    "d_fine": {"act gate": "plain"},
    "dab-detr": {" gate": "plain", "/model.decoder gate": "plain"},
    "deberta-v2": {"attention.self.scale gate": "plain"},
    "deformable_detr": {" gate": "plain"},
    "diffllama": {"self_attn.q_proj split": "column"},
    "funnel": {
        "/funnel.encoder.blocks.0.0.attention split": "row",
        "/funnel.encoder.blocks.1.0.attention split": "row",
        "attention split": "row",
    },
    "glm5_next": {"self_attn.o_norm over": "its weight"},
    "granitemoe_swa": {"self_attn.o_proj split": "row"},
    "grounding-dino": {" gate": "plain"},
    "idefics": {"cross_attn.k_proj split": "keys", "cross_attn.v_proj split": "keys"},
    "inkling_mm_model": {
        "self_attn.k_norm over": "all",
        "self_attn.k_proj split": "keys",
        "self_attn.v_proj split": "keys",
    },
    "inkling_text": {
        "self_attn.k_norm over": "all",
        "self_attn.k_proj split": "keys",
        "self_attn.v_proj split": "keys",
    },
    "iquestloopcoder": {
        "/model.layers.0.self_attn.k_proj split": "column",
        "/model.layers.0.self_attn.v_proj split": "column",
        "/model.layers.1.self_attn.k_proj split": "column",
        "/model.layers.1.self_attn.v_proj split": "column",
    },
    "kimi_k3": {"self_attn.o_norm over": "its weight"},
    "kimi_linear": {"self_attn.o_norm over": "its weight"},
    "kosmos-2": {"self_attn.out_proj split": "row"},
    "led": {"self_attn.output split": "row"},
    "lfm2": {"conv.conv split": "column", "conv.out_proj split": "row"},
    "lfm2_moe": {"conv.conv split": "column", "conv.out_proj split": "row"},
    "lfm2_vl": {"conv.conv split": "column", "conv.out_proj split": "row"},
    "longformer": {"attention.output.dense split": "row"},
    "mask2former": {"/model.transformer_module.decoder.mask_predictor.mask_embedder gate": "plain"},
    "minicpm_ocr": {"linear_attn.norm over": "its weight"},
    "minicpmv4_6": {"linear_attn.norm over": "its weight"},
    "minicpmv4_7": {"linear_attn.norm over": "its weight"},
    "mm-grounding-dino": {" gate": "plain"},
    "nystromformer": {"attention.self.conv split": "row"},
    "olmo_hybrid": {"linear_attn.o_norm over": "its weight"},
    "pegasus_x": {"self_attn.out_proj split": "row"},
    "perceiver": {
        "/perceiver.encoder.self_attends.0.attention.output.dense split": "row",
        "/perceiver.encoder.self_attends.0.mlp.dense2 split": "row",
        "/perceiver.encoder.self_attends.1.attention.output.dense split": "row",
        "/perceiver.encoder.self_attends.1.mlp.dense2 split": "row",
    },
    "qwen3_5": {"linear_attn.norm over": "its weight"},
    "qwen3_5_moe": {"linear_attn.norm over": "its weight"},
    "qwen3_5_moe_text": {"linear_attn.norm over": "its weight"},
    "qwen3_5_text": {"linear_attn.norm over": "its weight"},
    "qwen4_exp": {"linear_attn.norm over": "its weight", "self_attn.indexer.q_layernorm over": "its weight"},
    "qwen4_exp_text": {"linear_attn.norm over": "its weight", "self_attn.indexer.q_layernorm over": "its weight"},
    "recurrent_gemma": {"temporal_block.rg_lru split": "column"},
    "rt_detr": {" gate": "plain"},
    "rt_detr_v2": {" gate": "plain"},
    "squeezebert": {"attention.key split": "column", "attention.query split": "column"},
    "step3_text": {"self_attn.k_proj split": "keys", "self_attn.v_proj split": "keys"},
    "step3_vl": {"self_attn.k_proj split": "keys", "self_attn.v_proj split": "keys"},
    "xlnet": {"rel_attn split": "row"},
    "youtu": {"self_attn.kv_b_proj split": "keys"},
    "zamba": {"mamba split": "column", "mamba_decoder.mamba split": "column"},
    "zaya": {
        "self_attn.qkv_proj.conv_qk_depthwise split": "whole",
        "self_attn.qkv_proj.v_proj_current split": "keys",
        "self_attn.qkv_proj.v_proj_delayed split": "keys",
    },
}


@pytest.mark.parametrize("model_type", mark_heavy(TYPES, LIGHT_TYPES))
def test_a_shipped_spec_says_what_the_sizes_of_its_examples_do(model_type: str) -> None:
    found = infer_keys(model_type, EXAMPLES[model_type])
    assert {f"{each.name} {each.key}": each.said for each in found} == OTHERWISE.get(model_type, {})


@pytest.mark.parametrize("model_type", mark_heavy(TYPES, LIGHT_TYPES))
def test_no_shipped_spec_leaves_its_width_to_be_inferred(model_type: str) -> None:
    for config in load_toml(EXAMPLES[model_type]).get("configs", [])[:1]:
        given = {"model_type": model_type, **{key: value for key, value in config.items() if key != "null_keys"}}
        bound = bind({**given, **dict.fromkeys(config.get("null_keys", []))})
        assert [stage.path for stage in bound.stages if stage.is_width_inferred] == []
        assert all(stage.width > 0 for stage in bound.stages)


def test_recordings_with_eager_attention_alone_are_of_types_without_sdpa() -> None:
    from flopcalc.prediction.recordings import load_file

    def is_eager(name: str) -> bool:
        recorded = load_file(name)
        return recorded is not None and not any(key.split()[0] == "sdpa" for key in recorded["saved"])

    specs = list_data_files("specs")
    said = {name for name in specs if not load_spec(specs[name]).has_sdpa}
    assert said == {name for name in specs if is_eager(name)}


@pytest.mark.parametrize("model_type", mark_heavy(TYPES, LIGHT_TYPES))
def test_a_shipped_spec_rotates_what_its_recorded_operators_do(model_type: str) -> None:
    for config in load_toml(EXAMPLES[model_type]).get("configs", [])[:1]:
        given = {key: value for key, value in config.items() if key != "null_keys"}
        found = infer_rotation(model_type, {**given, **dict.fromkeys(config.get("null_keys", []))})
        assert found is None or found[0] == found[1]


def test_groups_of_experts_come_from_the_spec() -> None:
    def find(preset: str) -> tuple[int, int]:
        ops = (op for stage in bind(preset).stages for chain in stage.kinds for op in iterate(chain))
        return max(op.groups for op in ops if isinstance(op, Linear))

    names = ("deepseek-v3", "glm-4.5", "kimi-k2.5", "mixtral-8x7b")
    assert [find(name) for name in names] == [(8, 4), (1, 1), (1, 1), (1, 1)]


@pytest.mark.parametrize(
    ("preset", "queries"),
    [("flux.1-dev", 2 * (512 + 4096)), ("sd3-medium", 2 * (333 + 4096)), ("pixart-alpha", 2 * 4096)],
)
def test_queries_of_streams_that_attend_together(preset: str, queries: int) -> None:
    estimate = bind(preset)(images=["1024x1024"] * 2, batch_size=2)
    estimator, load, _ = estimate.terms[0]
    blocks = [block for block, row, _ in estimator.rows(load, "full") if isinstance(row.op, Attend)]
    ops = [row.op for row in blocks[0].rows]
    core = next(op for op in ops if isinstance(op, Attend))
    assert count_queries(core, ops, load) == queries


# --- what a place says ------------------------------------------------------------------------------------------------
HEAD = """
architecture = "Mine"
source       = "mine"
required     = ["h"]
[dims]
DIM = "48"
[[stack]]
path = "model.layers"
repeat = 2
"""
ATTEND = '{ op = "attend", name = "attn", heads = "h", kv_heads = 2, qk = 8, v = 8 }'
QKV = """[{ op = "linear", name = "q", in = 48, out = 48, part = "attention_projections" },
  { op = "linear", name = "k", in = 48, out = 16, part = "attention_projections" },
  { op = "linear", name = "v", in = 48, out = 16, part = "attention_projections" }]"""
OUT = '{ op = "linear", name = "o", in = 48, out = 48, part = "attention_projections" }'
LOW = """[[{ op = "linear", name = "q_a", in = 48, out = 12, part = "attention_projections" },
  { op = "norm", name = "q_norm", dim = 12 },
  { op = "linear", name = "q_b", in = 12, out = 48, part = "attention_projections" }],
  { op = "linear", name = "kv", in = 48, out = 32, part = "attention_projections" }]"""
MLP = """[{ op = "linear", name = "gate", in = 48, out = 96, part = "mlp" },
  { op = "linear", name = "up", in = 48, out = 96, part = "mlp" }],
  { op = "pointwise", name = "act" }, { op = "linear", name = "down", in = 96, out = 48, part = "mlp" }"""
EXPERTS = """{ op = "linear", name = "in", in = 48, out = 48, part = "mlp", copies = 4, active = 2, times = 2 },
  { op = "pointwise", name = "act", gate = "fused" },
  { op = "linear", name = "out", in = 24, out = 48, part = "mlp", copies = 4, active = 2, times = 2 }"""


def make(tmp_path: Path, ops: str, dim: str = "d") -> list[Op]:
    path = tmp_path / "mine.toml"
    path.write_text(f"{HEAD.replace('DIM', dim)}ops = [{ops}]\n")
    (stage,) = bind({"model_type": "mine", "h": 6}, spec=path).stages
    return list(iterate(stage.layers[0]))


@pytest.mark.parametrize(
    ("ops", "splits"),
    [
        (f"{QKV}, {ATTEND}, {OUT}", {"q": "column", "k": "keys", "v": "keys", "o": "row"}),
        (f"{LOW}, {ATTEND}, {OUT}", {"q_a": "whole", "q_b": "column", "kv": "keys", "o": "row"}),
        (
            f'{{ op = "linear", name = "qkv", in = 48, out = 80, part = "attention_projections" }}, {ATTEND}',
            {"qkv": "fused"},
        ),
        (MLP, {"gate": None, "up": None, "down": "row"}),
        (EXPERTS, {"in": None, "out": "row"}),
        ('{ op = "linear", name = "router", in = 48, out = 4, part = "router" }', {"router": "whole"}),
        ('{ op = "linear", name = "x", in = 48, out = 4, part = "mlp", split = "whole" }', {"x": "whole"}),
        # A norm without a weight, or a modulation, makes nothing that is summed up.
        (f'{{ op = "pointwise", name = "ln" }}, {MLP}', {"gate": None, "up": None, "down": "row"}),
    ],
)
def test_splits(tmp_path: Path, ops: str, splits: dict[str, str | None]) -> None:
    assert {op.name: op.split for op in make(tmp_path, ops) if isinstance(op, Linear)} == splits


@pytest.mark.parametrize(
    ("ops", "name", "split"),
    [
        (f"{QKV}, {ATTEND}, {OUT}", "q", TensorSplit("column")),
        (f"{QKV}, {ATTEND}, {OUT}", "k", TensorSplit("column", 16, 2)),
        (f"{QKV}, {ATTEND}, {OUT}", "o", TensorSplit("row")),
        (f"{QKV}, {ATTEND.replace('kv_heads = 2', 'kv_heads = 6')}, {OUT}", "k", TensorSplit("column")),
        (f"{LOW}, {ATTEND}, {OUT}", "q_a", TensorSplit("whole")),
        (EXPERTS, "in", TensorSplit("expert")),
    ],
)
def test_how_tensor_parallelism_cuts(tmp_path: Path, ops: str, name: str, split: TensorSplit) -> None:
    made = make(tmp_path, ops)
    assert {op.name: own for op, own in find_sides(made).items()}[name] == split


@pytest.mark.parametrize(
    ("ops", "gate"),
    [
        (MLP, "pair"),
        (EXPERTS, "fused"),
        ('{ op = "linear", name = "up", in = 48, out = 96 }, { op = "pointwise", name = "act" }', "plain"),
        (MLP.replace('name = "act"', 'name = "act", gate = "plain"'), "plain"),
    ],
)
def test_gates(tmp_path: Path, ops: str, gate: str) -> None:
    assert [op.gate for op in make(tmp_path, ops) if isinstance(op, Pointwise)] == [gate]


@pytest.mark.parametrize(
    ("ops", "over"),
    [
        (f"{LOW}, {ATTEND}, {OUT}", 12),
        ('{ op = "linear", name = "q", in = 48, out = 40 }, { op = "norm", name = "n", dim = 8 }', 40),
        ('{ op = "linear", name = "q", in = 48, out = 40 }, { op = "norm", name = "n", dim = 8, over = 16 }', 16),
        ('{ op = "norm", name = "n", dim = 48 }', 0),
        (f'{MLP}, {{ op = "norm", name = "n", dim = 48 }}', 0),
    ],
)
def test_what_norms_run_over(tmp_path: Path, ops: str, over: int) -> None:
    assert [op.over for op in make(tmp_path, ops) if isinstance(op, Norm)] == [over]


def test_a_width_that_no_spec_says_is_inferred_with_a_note(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    text = f'{HEAD.replace("DIM", "x")}ops = [{{ op = "norm", name = "n", dim = 40 }}, {QKV}, {ATTEND}, {OUT}]\n'
    path.write_text(text)
    bound = bind({"model_type": "mine", "h": 6}, spec=path)
    assert (bound.stages[0].width, bound.stages[0].is_width_inferred) == (40, True)
    assert describe_inferred(bound)[-1] == (
        "mine.toml says no width for model.layers, and has no dim d: 40 was inferred from its first op; add width to "
        "the stack"
    )
    path.write_text(text.replace("repeat = 2", 'repeat = 2\nwidth = "x"'))
    bound = bind({"model_type": "mine", "h": 6}, spec=path)
    assert bound.stages[0].width == 48
    assert not any("width" in note for note in describe_inferred(bound))


def test_roles_that_a_users_spec_leaves_out_are_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(f"{HEAD.replace('DIM', 'd')}ops = [{QKV}, {ATTEND}, {OUT}, {MLP}]\n")
    assert describe_inferred(bind({"model_type": "mine", "h": 6}, spec=path)) == [
        "mine.toml says no split for q, k, v, o and 3 more; no gate for act: taken from the order of its ops; add what "
        "is wrong (docs/specs.md, Roles)"
    ]


def test_roles_of_shipped_ops_are_not_named(tmp_path: Path) -> None:
    """A user's spec that extends a shipped one answers for its own ops alone."""
    assert describe_inferred(bind("llama-3.1-8b")) == []
    path = tmp_path / "mine.toml"
    path.write_text('extends = "llama"\narchitecture = "Mine"\nsource = "mine"\n')
    config = {"model_type": "mine", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2,
              "intermediate_size": 128, "vocab_size": 100}  # fmt: skip
    assert describe_inferred(bind(config, spec=path)) == []


@pytest.mark.parametrize(
    ("op", "words"),
    [
        ('{ op = "linear", name = "x", in = 4, out = 4, split = "colum" }', "split 'colum' unknown. Did you mean"),
        ('{ op = "pointwise", name = "x", gate = "fuse" }', "gate 'fuse' unknown. Did you mean fused"),
        ('{ op = "linear", name = "x", in = 4, out = 4, shared = "yes" }', "shared must be a bool, not 'yes'"),
        ('{ op = "attend", name = "x", heads = 1, qk = 1, v = 1, split = "row" }', "unknown key 'split'"),
    ],
)
def test_unknown_words_are_errors(tmp_path: Path, op: str, words: str) -> None:
    with pytest.raises(SpecError) as error:
        make(tmp_path, op)
    assert words in str(error.value)


def test_sizes_tell_a_wrong_key_and_it_is_written_into_the_text(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    text = f'{HEAD.replace("DIM", "d")}ops = [{QKV}, {ATTEND}, # {{ op = "linear", name = "o" }}\n  {OUT}]\n'
    path.write_text(text.replace('name = "o", in = 48', 'name = "o", split = "whole", in = 48'))
    stages = bind({"model_type": "mine", "h": 6}, spec=path).stages
    assert [(each.name, each.key, each.said, each.inferred) for each in compare(stages)] == [
        ("o", "split", "whole", "row")
    ]
    path.write_text(text)
    assert write_key(path, "linear", "o", "split", '"row"') == 1
    assert path.read_text() == text.replace(OUT, OUT.replace(" }", ', split = "row" }'))
    assert write_key(path, "linear", "o", "split", '"row"') == 0  # it says one already
    assert any(isinstance(op, Attend) for op in iterate(stages[0].layers[0]))


def test_add_writes_what_sizes_suggest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from lab.add import write_keys

    monkeypatch.setenv("FLOPCALC_DATA", str(tmp_path))
    ops = """{ op = "linear", name = "up", in = 48, out = 96, part = "mlp" },
  { op = "linear", name = "down", in = 96, out = 48, part = "mlp" }"""
    for folder, text in (("specs", f"{HEAD.replace('DIM', 'd')}ops = [{ops}]\n"), ("examples", "[[configs]]\nh = 6\n")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.toml").write_text(text)
    words = "the spec says otherwise than sizes suggest: split row of down"
    assert write_keys("mine", True) == ("keys", "done", words)
    assert write_keys("mine", False) == ("keys", "left", "read the diff: sizes suggest split of down")
    assert ', part = "mlp", split = "row" }]' in (tmp_path / "specs" / "mine.toml").read_text()
