"""The reader of recorded operators: bytes and calls of real configs, by hand; what trains, what is missing."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from flopcalc.api import bind
from flopcalc.base.data import find_data_dir
from flopcalc.base.errors import SpecError
from flopcalc.core.model.config import load_config
from flopcalc.core.workload.workload import make_workload
from flopcalc.measure.operator_kinds import KINDS, classify
from flopcalc.prediction import operators, recordings
from flopcalc.prediction.build_work import make_work
from flopcalc.prediction.operators import Operators, list_operators
from flopcalc.prediction.recordings import MissingSizeError, Scope

# What a trace tells apart beyond a name: elementwise kernels whose tensors do not lie alike in memory, and what is no
# operator at all.
RECORDED_KINDS = frozenset(KINDS) - {"wrapper", "optimizer", "fourier"} | {
    "pointwise_mixed", "pointwise_strided", "pointwise_strided_mixed", "pointwise_strided_wide",
    "pointwise_strided_across", "copy_strided", "copy_strided_wide", "copy_strided_across", "cast_strided",
    "cat_one", "cat_strided", "cat_strided_wide", "product_grouped", "attention_masked", "attention_biased",
    "attention_plain", "module", "node",
}  # fmt: skip
T, D, FF, V, LAYERS = 2 * 100, 4096, 14336, 128256, 32  # Llama 3.1 8B, two rows of a hundred tokens
X, F = T * D * 2, T * D * 4  # bytes of a hidden state in bf16 and in float32


def read(recipe: dict[str, Any] | None = None, **workload: Any) -> Operators:
    estimator = bind("llama-3.1-8b", recipe=recipe)
    return list_operators(estimator, make_workload(2, workload.pop("seq", 100), **workload))


def pick(found: Operators, module: str, direction: str) -> list[tuple[str, int, int, int]]:
    return sorted(
        (row.kind, row.reads, row.writes, row.count)
        for row in found.rows
        if (row.module, row.direction, row.is_again) == (module, direction, False)
    )


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::mul", "pointwise"),
        ("aten::mul_", "pointwise"),
        ("aten.mul.Tensor", "pointwise"),
        ("add", "pointwise"),
        ("aten::copy_", "copy"),
        ("aten::zero_", "fill"),
        ("aten::_to_copy", "cast"),
        ("aten::mm", "product"),
        ("transformers::grouped_mm_fallback", "product"),
        ("aten::_scaled_dot_product_cudnn_attention", "attention"),
        ("aten::index_put_", "scatter"),
        ("aten::item", "wrapper"),
        ("aten::_local_scalar_dense", "read"),
        ("aten::lift_fresh", "read"),
        ("aten::embedding_dense_backward", "embedding_backward"),
        ("aten::masked_scatter_backward", "scatter"),
        ("aten::_grouped_mm", "product"),
        ("aten::__and__", "pointwise"),
        ("aten::no_such_operator", "other"),
        ("cudaLaunchKernel", "other"),
    ],
)
def test_classify(name: str, kind: str) -> None:
    assert classify(name) == kind


def test_every_name_has_one_kind() -> None:
    assert [
        name for name, times in Counter(name for names in KINDS.values() for name in names).items() if times > 1
    ] == []


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", 0),
        ("x*tokens", 2 * 6),
        ("f*1/2*tokens*norm.size", 4 * 6 * 5 // 2),
        ("l*3*tokens + o*tokens*.size*.size", 8 * 3 * 6 + 6 * 25),
        ("x*~0.5000*tokens", 6),
        ("n*2 + n*3*tokens", 20),
    ],
)
def test_expressions(text: str, value: int) -> None:
    assert Scope({"tokens": 6}, {"norm.size": 5}, 2, "norm").evaluate(text) == value


def test_an_unknown_name_is_named() -> None:
    with pytest.raises(MissingSizeError, match=r"mlp\.n_out"):
        Scope({"tokens": 6}, {}).evaluate("x*tokens*mlp.n_out")


def test_a_norm_by_hand() -> None:
    """HF's RMSNorm: to float32, square, mean, add eps, rsqrt, scale, back to bf16, times the weight."""
    assert pick(read(), "model.layers.*.input_layernorm", "forward") == sorted(
        [
            ("cast", X, F, LAYERS),
            ("pointwise", F, F, LAYERS),
            ("reduce", F, T * 4, LAYERS),
            ("pointwise", T * 4, T * 4, 2 * LAYERS),
            ("pointwise_strided_wide", F + T * 4, F, LAYERS),
            ("cast", F, X, LAYERS),
            ("pointwise_strided", X + D * 2, X, LAYERS),
            ("module", 0, 0, LAYERS),
        ]
    )


def test_an_mlp_by_hand() -> None:
    wide = T * FF * 2
    found = read()
    assert pick(found, "model.layers.*.mlp", "backward") == [
        ("node", 0, 0, LAYERS),
        ("pointwise", 2 * wide, wide, 2 * LAYERS),
    ]
    assert pick(found, "model.layers.*.mlp.act_fn", "backward") == [
        ("node", 0, 0, LAYERS),
        ("pointwise", 2 * wide, wide, LAYERS),
    ]
    assert ("product", 0, 0, 2 * LAYERS) in pick(found, "model.layers.*.mlp.down_proj", "backward")


def test_the_loss_by_hand() -> None:
    """Logits in float32, log-softmax, and back: the head's output is what a small model moves most."""
    rows = pick(read(), "", "forward")
    assert ("cast", T * V * 2, T * V * 4, 1) in rows
    assert ("softmax", T * V * 4, T * V * 4, 1) in rows


def test_groups_and_places() -> None:
    found = read()
    assert {row.group for row in found.rows} == {"language"}
    assert found.is_recorded
    assert found.notes == ()


def sum_saved(found: Operators, is_again: bool = False) -> int:
    return sum(each.bytes * each.count for each in found.saved if each.is_again == is_again)


def test_frozen_layers_have_no_backward() -> None:
    found = read({"freeze": ["model.embed_tokens", "model.layers.*"]})
    assert not [row for row in found.rows if row.direction == "backward" and row.module.startswith("model.layers")]
    assert pick(found, "lm_head", "backward")
    assert sum_saved(found) < sum_saved(read()) / 5


def test_the_first_layers_frozen() -> None:
    found = read({"freeze": ["model.embed_tokens", *(f"model.layers.{i}" for i in range(30))]})
    assert ("pointwise", 2 * T * FF * 2, T * FF * 2, 4) in pick(found, "model.layers.*.mlp", "backward")


def test_nothing_trains_without_a_training_step() -> None:
    found = read(phase="forward")
    assert {row.direction for row in found.rows} == {"forward"}
    assert found.saved == ()


def test_lora_adds_what_peft_dispatches() -> None:
    found = read({"lora": {"r": 16, "targets": ["q_proj"]}})
    ahead = pick(found, "model.layers.*.self_attn.q_proj", "forward")
    assert ("cast", X, F, LAYERS) in ahead
    assert ("module", 0, 0, 5 * LAYERS) in ahead  # its own, the base layer's, two adapters' and their dropout's
    back = pick(found, "model.layers.*.self_attn.q_proj", "backward")
    assert [row for row in back if row[0] == "product"] == [("product", 0, 0, 5 * LAYERS)]
    assert Counter(each.bytes for each in found.saved if each.module.endswith("q_proj")) == {F: 1, T * 16 * 4: 1}
    assert pick(found, "model.embed_tokens", "backward") == []


def test_recomputation_runs_the_layers_again() -> None:
    found = read({"recompute": "full"})
    once = Counter[tuple[Any, ...]]()
    again = Counter[tuple[Any, ...]]()
    for row in found.rows:
        if row.direction == "forward" and row.module.startswith("model.layers"):
            (again if row.is_again else once)[row[:6]] += row.count
    assert again == once
    kept = [each for each in found.saved if each.module == "model.layers.*" and not each.is_again]
    assert [(each.bytes, each.count) for each in kept] == [(X, LAYERS)]
    assert sum_saved(found, True) + sum_saved(found) == sum_saved(read()) + X * LAYERS


def test_decoding_reads_the_cache() -> None:
    found = read(seq=1, phase="decode", context=50)
    keys = 8 * 128 * 2  # bytes of one position's keys
    rows = pick(found, "model.layers.*.self_attn", "forward")
    assert ("cat", 2 * 51 * keys, 2 * 51 * keys, 2 * LAYERS) in rows
    twice = read(seq=2, phase="decode", context=50)
    assert sum(row.count for row in twice.rows) == 2 * sum(row.count for row in found.rows)


def test_a_prefill_starts_its_cache() -> None:
    """Keys and values are put behind nothing: one tensor is copied."""
    keys = T * 8 * 128 * 2  # bytes
    rows = pick(read(phase="prefill"), "model.layers.*.self_attn", "forward")
    assert [row for row in rows if row[0].startswith("cat_one")] == [("cat_one", keys, keys, 2 * LAYERS)]


SEEN = {"image_grid_thw": [[1, 16, 16]]}


@pytest.mark.parametrize(
    ("preset", "workload", "kind", "expected"),
    [
        # Where the host waits: making a mask, where images enter the text and back, in layers of a tower.
        ("llama-3.1-8b", {}, "read", {("model", "forward"): 1}),
        ("llama-3.1-8b", {"phase": "prefill"}, "read", {}),
        ("paligemma-3b-224", SEEN, "read", {("model", "forward"): 3, ("model", "backward"): 1}),
        ("llava-1.5-7b", {}, "read", {("model.language_model", "forward"): 1}),
        ("qwen2-vl-2b", {}, "read", {}),  # positions of three kinds: nobody looks for packed rows
        # A mask is handed over for a prefix that sees itself; without images there is none.
        ("paligemma-3b-224", SEEN, "attention_masked", {("model.language_model.layers.*.self_attn", "forward"): 18}),
        ("paligemma-3b-224", {}, "attention_masked", {}),
        # Two products of each layer's experts, and two gradients of each.
        ("mixtral-8x7b", {}, "product_grouped",
         {("model.layers.*.mlp.experts", "forward"): 64, ("model.layers.*.mlp.experts", "backward"): 128}),
        ("llama-3.1-8b", {}, "product_grouped", {}),
        ("llama-3.1-8b", {}, "embedding_backward", {("model.embed_tokens", "backward"): 1}),
        # A weight in bf16 times a norm in float32; Llama's is made bf16 first.
        ("olmo-2-7b", {"phase": "forward"}, "pointwise_strided_mixed",
         {("model.norm", "forward"): 1, ("model.layers.*.self_attn", "forward"): 4 * 32,
          **{(f"model.layers.*.{name}", "forward"): 32 for name in (
              "self_attn.q_norm", "self_attn.k_norm", "post_attention_layernorm", "post_feedforward_layernorm")}}),
        ("llama-3.1-8b", {}, "pointwise_strided_mixed", {}),
        # Dropout runs in training alone, and where the config has any.
        ("gpt2", {}, "random",
         {("transformer.h.*.attn.resid_dropout", "forward"): 12, ("transformer.h.*.mlp.dropout", "forward"): 12,
          ("transformer.drop", "forward"): 1}),
        ("gpt2", {"phase": "forward"}, "random", {}),
        ("cerebras-gpt-590m", {}, "random", {}),
        ("starcoder2-3b", {}, "random",
         {("model", "forward"): 1, ("model.layers.*.self_attn", "forward"): 30, ("model.layers.*.mlp", "forward"): 30}),
        ("starcoder2-7b", {}, "random", {}),
        # A GELU of eight operators, and one of one.
        ("gpt2", {"phase": "forward"}, "pointwise",
         {("transformer", "forward"): 2, ("transformer.h.*", "forward"): 24,
          ("transformer.h.*.mlp.act", "forward"): 8 * 12}),
        ("cerebras-gpt-590m", {"phase": "forward"}, "pointwise",
         {("transformer", "forward"): 2, ("transformer.h.*", "forward"): 2 * 18,
          ("transformer.h.*.mlp.act", "forward"): 18}),
        # Heads that are rotated whole: nothing is put behind the rotated part.
        ("japanese-gpt-neox-3.6b", {"phase": "forward"}, "cat_one",
         {("gpt_neox.layers.*.attention", "forward"): 2 * 36}),
        ("pythia-1b", {"phase": "forward"}, "cat_one", {}),
    ],
)  # fmt: skip
def test_kinds_that_are_told_apart(
    preset: str, workload: dict[str, Any], kind: str, expected: dict[tuple[str, str], int]
) -> None:
    found = Counter[tuple[str, str]]()
    for row in list_operators(bind(preset), make_workload(1, 512, **workload)).rows:
        if row.kind == kind:
            found[row.module, row.direction] += row.count
    assert found == expected


USUAL = {"a": {"hidden_act": "silu", "attention_dropout": 0.0, "hidden_dropout": 0.1, "partial_rotary_factor": 0.25,
               "use_parallel_residual": True}}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "signed"),
    [
        ({}, ""),
        ({"hidden_act": "swish", "hidden_dropout": 0.5, "rotary_pct": 0.25}, ""),
        ({"hidden_activation": "gelu_new"}, "hidden_act=gelu_new"),
        ({"activation_function": "gelu_pytorch_tanh"}, "hidden_act=gelu"),
        ({"attn_pdrop": 0.1, "resid_pdrop": 0}, "attention_dropout=on hidden_dropout=off"),
        ({"embd_pdrop": 0.1}, ""),  # this type does not read it
        ({"hidden_act": None}, ""),
        ({"use_parallel_residual": False}, "use_parallel_residual=off"),
        ({"rotary_pct": 1.0}, "partial_rotary_factor=1"),
        ({"partial_rotary_factor": 1}, "partial_rotary_factor=1"),
        ({"rope_parameters": {"partial_rotary_factor": 0.4}}, "partial_rotary_factor=0.4"),
        ({"rope_scaling": {"partial_rotary_factor": float("nan")}}, "partial_rotary_factor=nan"),
        ({"model_type": "b", "hidden_act": "relu"}, ""),  # nothing is known of it
        ({"model_type": "b", "text_config": {"model_type": "a", "hidden_act": "relu"}}, "hidden_act=relu"),
        ({"hidden_act": "relu", "text_config": {}}, ""),
    ],
)
def test_switches_that_are_not_the_usual_ones(config: dict[str, Any], signed: str) -> None:
    assert recordings.sign_switches({"model_type": "a", **config}, USUAL) == signed


@pytest.mark.parametrize(
    ("preset", "change", "path"),
    [
        ("gpt2", {}, ""),
        ("gpt2", {"resid_pdrop": 0.3}, ""),
        ("gpt2", {"activation_function": "relu"}, "transformer.h"),
        ("gpt2", {"resid_pdrop": 0.0}, ""),  # recorded of a tiny one
        ("cerebras-gpt-590m", {}, ""),
        ("cerebras-gpt-590m", {"activation_function": "gelu_pytorch_tanh"}, ""),
        ("cerebras-gpt-590m", {"attn_pdrop": 0.1}, ""),  # inside a kernel
        ("starcoder2-3b", {}, ""),
        ("starcoder2-3b", {"residual_dropout": 0.0}, ""),  # layers of 7b, embeddings of 3b
        ("starcoder2-3b", {"embedding_dropout": 0.0}, ""),  # and the other way round
        ("phi-2", {"resid_pdrop": 0.1}, "model.layers"),
        ("starcoder2-7b", {}, ""),
        ("japanese-gpt-neox-3.6b", {}, ""),
        ("japanese-gpt-neox-3.6b", {"rotary_pct": 0.5}, "gpt_neox.layers"),
        ("pythia-1b", {"use_parallel_residual": False}, "gpt_neox.layers"),
        ("phi-1.5", {}, ""),
        ("phi-2", {}, ""),
        ("phi-2", {"partial_rotary_factor": 0.75}, "model.layers"),
        ("llama-2-7b", {}, ""),  # as many heads of keys as of queries
        ("llama-2-7b", {"hidden_act": "gelu"}, "model.layers"),
        ("llama-3.1-8b", {"attention_dropout": 0.1}, ""),
        ("llava-1.5-7b", {}, ""),
        ("bakllava-7b", {}, ""),  # a language model with a window
        ("qwen2-vl-2b", {"hidden_act": "gelu"}, "model.language_model.layers"),
    ],
)
def test_a_variant_that_was_not_recorded_is_named(preset: str, change: dict[str, Any], path: str) -> None:
    config = load_config(preset).config
    found = list_operators(bind({**config, **change}), make_workload(1, 64))
    told = f"layers of {path}: this kind was not recorded; the nearest is used"
    assert found.notes == ((told,) if path else ())
    assert found.is_recorded
    assert found.rows


def test_embeddings_that_drop_are_named() -> None:
    config = load_config("phi-2").config
    found = list_operators(bind({**config, "embd_pdrop": 0.1}), make_workload(1, 64))
    assert found.notes == ("embeddings: recorded only with another dropout setting; the nearest is used",)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    ("preset", "change"),
    [
        ("gpt2", {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}),
        ("phi-2", {"resid_pdrop": 0.1}),
        ("llama-3.1-8b", {"attention_dropout": 0.1}),
    ],
)
def test_dropout_is_nothing_outside_of_training(
    preset: str, change: dict[str, Any], attention: str, phase: str
) -> None:
    """The same operators as without it, and no note."""
    load = make_workload(1, 1 if phase == "decode" else 64, phase=phase, context=64 if phase == "decode" else None)
    config = load_config(preset).config
    told = list_operators(bind({**config, **change}), load, attention)
    assert told == list_operators(bind(preset), load, attention)


def test_attention_drops_eagerly_with_operators_of_its_own() -> None:
    config = load_config("llama-3.1-8b").config
    found = list_operators(bind({**config, "attention_dropout": 0.1}), make_workload(1, 64), "eager")
    assert found.notes == ("layers of model.layers: this kind was not recorded; the nearest is used",)


@pytest.mark.parametrize(
    ("preset", "change", "phase", "has_dropout"),
    [
        ("gpt2", {}, "train", True),  # as its class says
        ("gpt2", {}, "prefill", False),
        ("gpt2", {"attn_pdrop": 0}, "train", False),
        ("starcoder2-15b", {}, "train", True),
        ("starcoder2-7b", {}, "train", False),
        ("llama-3.1-8b", {"attention_dropout": 0.1}, "train", True),
        ("llama-3.1-8b", {"attention_dropout": None}, "train", False),
    ],
)
def test_configs_tell_whether_attention_drops(
    preset: str, change: dict[str, Any], phase: str, has_dropout: bool
) -> None:
    estimator = bind({**load_config(preset).config, **change})
    load = make_workload(1, 64, phase=phase)
    assert list_operators(estimator, load).has_dropout is has_dropout
    calls = make_work(estimator, load).attention
    assert calls
    assert {call.mask in ("dropout", "dropped") for call in calls} == {has_dropout}


def test_a_rotated_share_may_stand_with_its_kind_of_layer() -> None:
    inner = {"full_attention": {"partial_rotary_factor": 0.4}}
    assert recordings.read_switches({"rope_parameters": inner}) == {"partial_rotary_factor": 0.4}


def test_the_nearest_variant_stands_in() -> None:
    """One switch apart: another's operators, and the model's own sizes."""
    config = load_config("gpt2").config
    load = make_workload(1, 64)
    odd = list_operators(bind({**config, "activation_function": "relu"}), load)
    assert odd.rows == list_operators(bind("gpt2"), load).rows


def test_a_file_without_usual_switches_is_read_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    written = json.loads((Path(find_data_dir()) / "operators" / "llama.json").read_text())
    del written["usual"]
    data = recordings.unpack(written)
    monkeypatch.setattr(operators, "load_file", lambda _: data)
    config = load_config("llama-3.1-8b").config
    assert list_operators(bind({**config, "hidden_act": "gelu"}), make_workload(1, 64)).notes == ()


def test_a_tower_that_reads_in_every_layer() -> None:
    found = list_operators(bind("qwen2-vl-2b"), make_workload(1, 512, **SEEN))
    reads = Counter[str]()
    for row in found.rows:
        if row.kind == "read":
            reads[f"{row.direction} {row.module}"] += row.count
    assert reads["forward model.visual.blocks.*.attn"] % 32 == 0 < reads["forward model.visual.blocks.*.attn"]
    assert reads["backward model"] == 1


def test_eager_attention_forms_scores() -> None:
    estimator = bind("llama-3.1-8b")
    found = list_operators(estimator, make_workload(2, 100), "eager")
    scores = 2 * 32 * 100 * 100
    assert ("softmax", scores * 4, scores * 4, LAYERS) in pick(found, "model.layers.*.self_attn", "forward")
    assert not [row for row in found.rows if row.kind == "attention"]


def test_images_belong_to_the_tower() -> None:
    """Without images the tower does nothing; frozen, it has no backward pass."""
    estimator = bind("qwen2-vl-2b", recipe={"freeze": ["model.visual"]})
    text = list_operators(estimator, make_workload(1, 64))
    assert {row.group for row in text.rows} == {"language"}
    load = make_workload(1, 64, image_grid_thw=[[1, 8, 8]])
    seen = list_operators(estimator, load)
    vision = [row for row in seen.rows if row.module.startswith("model.visual.blocks.*")]
    assert vision
    assert {row.direction for row in vision} == {"forward"}
    assert {row.group for row in vision} == {"vision"}
    trained = list_operators(bind("qwen2-vl-2b"), load)
    (gelu,) = [
        row
        for row in trained.rows
        if (row.module, row.kind, row.direction) == ("model.visual.blocks.*.mlp.act", "pointwise", "backward")
        and row.writes == 64 * 5120 * 2
    ][:1]
    assert gelu.group == "vision"


def test_a_type_that_was_not_recorded_borrows() -> None:
    found = list_operators(bind("mamba-130m"), make_workload(1, 64))
    assert not found.is_recorded
    assert found.notes[0] == "operators of mamba were not recorded: those of llama are used"
    assert [row for row in found.rows if row.module.startswith("backbone.layers.*")]


@pytest.mark.parametrize(
    ("preset", "path"), [("mamba-130m", "backbone.layers"), ("deepseek-v3.2", "model.layers"), ("minicpm3-4b", "")]
)
def test_products_of_layers_that_were_not_recorded_are_named(preset: str, path: str) -> None:
    """A scan in HF's code is a loop over tokens: another family's layer says nothing of it."""
    notes = [note for note in list_operators(bind(preset), make_workload(1, 64)).notes if "far longer" in note]
    told = "what their scans or selections of keys dispatch was not recorded; they may take far longer"
    assert notes == ([f"layers of {path}: {told}"] if path else [])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"odd\.json: not valid JSON: .*python -m lab\.operators"),
        ("[1]", r"odd\.json: holds \[1\], not a recording"),
        ('{"rows": []}', r"odd\.json: damaged: no 'kept_rows'"),
        ('{"same": "odd"}', r"odd\.json: damaged: no 'rows'"),
        ('{"same": "gone"}', r"gone\.json: cannot be read: No such file"),
        (
            '{"rows": [], "kept_rows": [], "layouts": [], "parts": {}, "signatures": [], "kept": [], "saved": {}, '
            '"blocks": [[7]]}',
            r"odd\.json: damaged: list index out of range",
        ),
        (
            '{"rows": [], "kept_rows": [], "layouts": [], "parts": {}, "signatures": [], "kept": [], "saved": {}, '
            '"blocks": [], "usual": {"llama": 7}}',
            r"odd\.json: damaged: 'int' object is not iterable",
        ),
    ],
)
def test_a_broken_file_is_named(text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "operators").mkdir()
    (tmp_path / "operators" / "odd.json").write_text(text)
    monkeypatch.setattr(recordings, "find_data_dir", lambda: str(tmp_path))
    with pytest.raises(SpecError, match=message):
        recordings.load_file.__wrapped__("odd")


def test_a_missing_stand_in_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "load_file", lambda _: None)
    with pytest.raises(SpecError, match=r"operators.llama\.json is missing, which stands in for 'falcon'"):
        list_operators(bind("falcon-7b"), make_workload(1, 8))


def test_files_are_whole() -> None:
    folder = Path(find_data_dir()) / "operators"
    files = sorted(folder.glob("*.json"))
    assert sum(path.stat().st_size for path in files) < 3_600_000
    for path in files:
        data = json.loads(path.read_text())
        if "same" in data:
            assert (folder / f"{data['same']}.json").is_file()
            continue
        whole = recordings.unpack(data)
        used = {
            number
            for stages in whole["parts"].values()
            for kinds in stages.values()
            for places in kinds.values()
            for modules in places.values()
            for number in modules.values()
        }
        assert used == set(range(len(data["blocks"]))), path
        assert {row[1] for row in data["rows"]} <= RECORDED_KINDS, path


def count_ahead(preset: str, recipe: dict[str, Any], seq: int, **workload: Any) -> Counter[tuple[Any, ...]]:
    """Calls of the forward pass: module, kind, bytes of one row's reads and writes."""
    load = make_workload(2, seq, **workload)
    rows = 2 * (1 if load.phase == "decode" else seq)
    calls: Counter[tuple[Any, ...]] = Counter()
    for row in list_operators(bind(preset, recipe=recipe), load).rows:
        if row.direction == "forward" and not row.is_again:
            calls[row.module, row.kind, row.reads / rows, row.writes / rows] += row.count
    return calls


@pytest.mark.parametrize(
    ("workload", "times"),
    [
        ({"seq": 100, "phase": "prefill"}, 1),
        ({"seq": 100, "phase": "forward"}, 1),
        ({"seq": 1, "phase": "decode", "context": 50}, 1),
        ({"seq": 3, "phase": "decode", "context": 50}, 3),
    ],
)
@pytest.mark.parametrize(
    ("preset", "recipe", "modules"),
    [
        ("llama-3.1-8b", {"lora": {"r": 8, "targets": ["all-linear"]}}, 7 * LAYERS),
        ("llama-3.1-8b", {"lora": {"r": 8, "targets": ["q_proj"]}, "recompute": "full"}, LAYERS),
        ("llama-3.1-8b", {"lora": {"r": 8, "targets": ["q_proj"], "save": ["lm_head"]}}, LAYERS),
        ("mixtral-8x7b", {"lora": {"r": 8, "targets": ["all-linear"]}}, 5 * 32),  # the router's too, no expert's
        ("qwen2-vl-2b", {"lora": {"r": 8, "targets": ["q_proj", "fc1"]}}, 28),  # a tower that sees nothing
    ],
)
def test_adapters_run_without_training_too(
    preset: str, recipe: dict[str, Any], modules: int, workload: dict[str, Any], times: int
) -> None:
    """Each phase grows by what the forward pass of training grows."""
    more = count_ahead(preset, recipe, 100) - count_ahead(preset, {}, 100)
    assert sum(more.values()) == 16 * modules
    found = count_ahead(preset, recipe, **workload) - count_ahead(preset, {}, **workload)
    assert found == {key: times * calls for key, calls in more.items()}


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("name", ["q_proj", "q_proj.lora_A"])
def test_adapters_that_are_frozen_run_too(name: str, phase: str) -> None:
    load: dict[str, Any] = {"seq": 1, "phase": phase}
    lora = {"lora": {"r": 8, "targets": ["q_proj", "v_proj"]}}
    assert read({**lora, "freeze": [f"model.layers.*.self_attn.{name}"]}, **load) == read(lora, **load)
    assert read(lora, **load).saved == ()


def test_adapters_expand_a_latent_cache_in_its_middle() -> None:
    """kv_b_proj reads all of the keys: two rows of 50 + 1 before the second of three tokens, and that token."""
    recipe = {"lora": {"r": 8, "targets": ["kv_b_proj"]}}
    load = make_workload(2, 3, phase="decode", context=50)
    rows = list_operators(bind("deepseek-v3", recipe=recipe), load).rows
    read_once = 2 * 52 * 512 * 2
    assert [(row.reads, row.writes, row.count) for row in rows if row.kind == "cast" and row.reads == read_once] == [
        (read_once, 2 * read_once, 3 * 61)
    ]


def test_trained_biases_are_no_adapters() -> None:
    recipe = {"train_only": ["*.bias"]}
    load = make_workload(2, 100, phase="prefill")
    assert list_operators(bind("qwen2.5-3b", recipe=recipe), load) == list_operators(bind("qwen2.5-3b"), load)
