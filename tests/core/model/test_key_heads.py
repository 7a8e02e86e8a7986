"""Key heads and caches: what a spec says of an attention, held against the config and the widths of its projections."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from presets import MODELS

from flopcalc import SpecError, bind, plan, predict
from flopcalc.base.data import list_data_files, load_toml
from flopcalc.core.estimate.notes import describe_inferred
from flopcalc.core.model.config import load_config
from flopcalc.core.model.ops import Chain, Op, Stage
from flopcalc.core.spec.spec import Spec, keeps_keys, load_spec
from flopcalc.core.workload.sums import Expression
from flopcalc.core.workload.workload import make_workload

PRESETS = [name for name, path in MODELS.items() if "alias" not in load_toml(path)]
# Config keys that say how many heads of keys and values a layer has, by hand: the first that is there counts.
KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
HEADS = ("decoder_attention_heads", "num_attention_heads", "n_head", "n_heads", "num_heads")
KEYS = ("k_proj", "key", "k", "kv_b_proj")  # projections that write keys alone, or a head's keys and values
FUSED = ("qkv_proj", "query_key_value", "qkv", "Wqkv", "c_attn")  # queries, keys and values in one


def list_ops(chain: Chain) -> Iterator[Op]:
    for item in chain:
        if isinstance(item, Op):
            yield item
        else:
            for branch in item:
                yield from list_ops(branch)


def list_layers(stages: tuple[Stage, ...]) -> Iterator[tuple[Stage, int, list[Op]]]:
    for stage in stages:
        for layer, chain in enumerate(stage.layers):
            yield stage, layer, list(list_ops(chain))


def read_key_heads(config: dict[str, Any], layer: int) -> int:
    """Key heads of a layer of the language model, from its config alone."""
    text = {**config, **config.get("text_config", {})}
    kind = text["model_type"]
    if kind == "falcon" and text.get("multi_query", True) and not text.get("new_decoder_architecture"):
        return 1
    if kind in ("deepseek_v4",):
        return 1
    heads = next((int(text[key]) for key in HEADS if key in text), 32)  # a LLaVA config leaves llama's default out
    if "kv_lora_rank" in text:
        return heads  # latent attention: every head has its own keys
    if kind == "gemma4_text" and text["layer_types"][layer] == "full_attention" and text.get("attention_k_eq_v"):
        return int(text["num_global_key_value_heads"])
    return next((int(text[key]) for key in KEY_HEADS if text.get(key) is not None), heads)


@pytest.mark.parametrize("name", PRESETS)
def test_key_heads_are_those_of_the_config(name: str) -> None:
    source = load_config(name)
    seen = 0
    for stage, layer, ops in list_layers(bind(name).stages):
        for i, op in enumerate(ops):
            if op.kind != "attend":
                continue
            if stage.group == "language":
                assert op.kv_heads == read_key_heads(source.config, layer), (stage.path, layer)
                seen += 1
            assert op.heads % op.kv_heads == 0
            check_widths(ops[:i], op)
    assert seen or source.config["model_type"] in ("mamba", "falcon_mamba")


def check_widths(before: list[Op], op: Op) -> None:
    """The projections before an attention are as wide as its key heads."""
    for other in before:
        module, _, last = other.name.rpartition(".")
        if other.kind != "linear" or module != op.name:
            continue
        if last == "kv_b_proj":
            assert other.n_out >= op.kv_heads * op.v
        elif last in KEYS:
            assert other.n_out == op.kv_heads * op.qk
        elif last in FUSED:
            assert other.n_out == op.heads * op.qk + op.kv_heads * (op.qk + op.v)


@pytest.mark.parametrize(
    ("model", "layers", "kv_heads", "cache", "latent"),
    [
        ("phi-4", 40, 10, 2 * 10 * 128, 0),
        ("phi-3-medium", 40, 10, 2 * 10 * 128, 0),
        ("falcon-7b", 32, 1, 2 * 64, 0),
        ("llama-3.1-8b", 32, 8, 2 * 8 * 128, 0),
        ("gpt2", 12, 12, 2 * 768, 0),
        ("deepseek-v3", 61, 128, 512 + 64, 512 + 64),
        ("deepseek-v3.2", 61, 128, 512 + 64 + 128, 512 + 64),  # and the indexer's keys
    ],
)
def test_known_models(model: str, layers: int, kv_heads: int, cache: int, latent: int) -> None:
    found = [op for _, _, ops in list_layers(bind(model).stages) for op in ops if op.kind == "attend"]
    assert [(op.kv_heads, op.cache, op.latent) for op in found] == [(kv_heads, cache, latent)] * layers


def test_an_encoder_decoder_keeps_the_encoder_s_keys_once() -> None:
    stages = bind("t5-v1.1-xl").stages
    found = {(stage.path, op.name): op for stage, _, ops in list_layers(stages) for op in ops if op.kind == "attend"}
    load = make_workload(2, 30, decoder_seq_len=1, phase="decode", context=9)
    own = found["decoder.block", "layer.0.SelfAttention"]
    cross = found["decoder.block", "layer.1.EncDecAttention"]
    assert found["encoder.block", "layer.0.SelfAttention"].cache == 0
    assert (own.cache, own.cache_rows.count(load, "full")) == (2 * 2048, 2 * 10)
    assert (cross.cache, cross.cache_rows.count(load, "full")) == (2 * 2048, 2 * 30)


def test_layers_that_share_keys_leave_nothing_and_windows_leave_a_window() -> None:
    stages = bind("gemma-4-e2b").stages
    found = [
        op
        for stage, _, ops in list_layers(stages)
        if stage.group == "language"
        for op in ops
        if op.kind == "attend" and op.cache
    ]
    load = make_workload(1, 1, phase="decode", context=9999)
    assert len(found) == 15  # of 35 layers: 20 read the keys of earlier ones
    assert [op.cache_rows.count(load, "full") for op in found[:5]] == [512, 512, 512, 512, 10000]


# --- the grammar ------------------------------------------------------------------------------------------------------
HEAD = 'architecture = "A"\nsource = "S"\n[[stack]]\npath = "model.layers"\n'


def make_op(folder: Path, op: str) -> Op:
    path = folder / "mine.toml"
    path.write_text(f'{HEAD}ops = [{{ op = "attend", name = "attn", {op} }}]\n')
    (stage,) = bind({"model_type": "mine", "h": 6, "kv": 2, "w": 5}, spec=path).stages
    (made,) = list_ops(stage.layers[0])
    return made


SIZES = 'heads = "h", qk = 8, v = 4'
OWN = Expression("sequence", "n + c")


@pytest.mark.parametrize(
    ("op", "kv_heads", "cache", "rows", "latent"),
    [
        ('kv_heads = "kv"', 2, 2 * 12, OWN, 0),
        ('kv_heads = "kv", window = "w"', 2, 2 * 12, Expression("sequence", "min(n + c, 5)"), 0),
        ('kv_heads = 2, cache = "0"', 2, 0, None, 0),
        ('kv_heads = "h", cache = "w + 2", latent = "w"', 6, 7, OWN, 5),
        ('kv_heads = 2, rows = "sequence: n * n"', 2, 24, OWN, 0),
        ('kv_heads = 2, cache_rows = "decoder: m + w"', 2, 24, Expression("decoder", "m + w", (("w", 5),)), 0),
        ('mask = "full"', 6, 0, None, 0),
        ('mask = "full", kv_heads = 3', 3, 0, None, 0),
        ('span = "frames"', 6, 0, None, 0),
        ('rows = "image: h * w"', 6, 0, None, 0),
    ],
)
def test_defaults(tmp_path: Path, op: str, kv_heads: int, cache: int, rows: Any, latent: int) -> None:
    made = make_op(tmp_path, f"{SIZES}, {op}")
    assert (made.kv_heads, made.cache, made.cache_rows, made.latent) == (kv_heads, cache, rows, latent)


@pytest.mark.parametrize(
    ("op", "words"),
    [
        (", kvheads = 2", "unknown key 'kvheads'. Did you mean kv_heads, heads?"),
        (", kv_heads = true", "kv_heads must be a str or int"),
        (', kv_heads = 2, cache_rows = "tokens"', 'cache_rows must be "UNIT: EXPRESSION"'),
        (', kv_heads = 2, cache_rows = "decodr: m"', "no unit 'decodr'. Did you mean decoder?"),
    ],
)
def test_what_must_be_said(tmp_path: Path, op: str, words: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(f'{HEAD}ops = [{{ op = "attend", name = "attn", {SIZES}{op} }}]\n')
    with pytest.raises(SpecError) as caught:
        load_spec(str(path))
    assert words in str(caught.value)


# --- specs that say nothing -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("projections", "kv_heads"),
    [
        ('{ op = "linear", name = "attn.qkv", in = 48, out = "(h + 2 * kv) * 8" }', 2),  # all in one
        ('[{ op = "linear", name = "q", in = 48, out = 48 }, { op = "linear", name = "kv", in = 48, out = 16 }]', 1),
        (
            '[[{ op = "linear", name = "q", in = 48, out = 48 }, { op = "norm", name = "n", dim = 8 }], '
            '{ op = "linear", name = "k", in = 48, out = 24 }, { op = "linear", name = "v", in = 48, out = 24 }]',
            3,
        ),
        ('{ op = "linear", name = "other", in = 48, out = 50 }', 6),  # no such heads: every head has its own keys
        ('{ op = "norm", name = "n", dim = 48 }', 6),
    ],
)
def test_key_heads_from_the_widths_of_the_projections(tmp_path: Path, projections: str, kv_heads: int) -> None:
    path = tmp_path / "mine.toml"
    attend = '{ op = "attend", name = "attn", heads = "h", qk = 8, v = 8 }'
    path.write_text(f"{HEAD}ops = [{projections}, {attend}]\n")
    config = {"model_type": "mine", "h": 6, "kv": 2}
    bound = bind(config, spec=path)
    (stage,) = bound.stages
    (found,) = [op for op in list_ops(stage.layers[0]) if op.kind == "attend"]
    assert (found.kv_heads, found.cache) == (kv_heads, kv_heads * 16)
    note = (
        f"mine.toml says no kv_heads for attn: {kv_heads} were inferred from the widths of its projections; "
        "add kv_heads to the spec"
    )
    assert describe_inferred(bound)[0] == note
    said = tmp_path / "said" / "mine.toml"
    said.parent.mkdir()
    said.write_text(f"{HEAD}ops = [{projections}, {attend.replace('qk', f'kv_heads = {kv_heads}, qk')}]\n")
    assert not any("kv_heads" in each for each in describe_inferred(bind(config, spec=said)))


def test_predict_and_plan_say_that_key_heads_were_inferred(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    projection = '{ op = "linear", name = "attn.qkv", in = 48, out = "(h + 2 * kv) * 8" }'
    attend = '{ op = "attend", name = "attn", heads = "h", qk = 8, v = 8 }'
    path.write_text(f"{HEAD}repeat = 2\nops = [{projection}, {attend}]\n")
    config = {"model_type": "mine", "h": 6, "kv": 2}
    note = "mine.toml says no kv_heads for attn: 2 were inferred"
    for found in (
        predict(config, spec=path, device="h200", batch_size=1, seq_len=8),
        plan(bind(config, spec=path), device="h200", gpus=1, tokens=1, seq_len=8, global_batch=1),
    ):
        assert [each for each in found.notes if each.startswith(note)]


def test_shipped_specs_say_their_key_heads() -> None:
    silent = [
        f"{name}: {op.get('name')}"
        for name, path in list_data_files("specs").items()
        for op in _list_items(load_spec(path))
        if op.get("op") == "attend" and keeps_keys(op) and "kv_heads" not in op
    ]
    assert not silent


def _list_items(spec: Spec) -> Iterator[dict[str, Any]]:
    waiting: list[Any] = [*(stack.get("ops", []) for stack in spec.stacks), *spec.blocks.values()]
    while waiting:
        item = waiting.pop()
        if isinstance(item, list):
            waiting += item
        elif isinstance(item, dict):
            yield item


@pytest.mark.parametrize(("seq", "buckets"), [(48, 8), (104, 16), (248, [4, 8])])
def test_reformer_s_buckets_follow_the_length(seq: int, buckets: Any) -> None:
    """transformers 5.22: models/reformer/modeling_reformer.py, _set_num_buckets."""
    config = {
        "model_type": "reformer", "attention_head_size": 8, "attn_layers": ["local", "lsh", "lsh"], "hidden_size": 24,
        "axial_pos_embds": False, "feed_forward_size": 40, "num_attention_heads": 3, "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8, "max_position_embeddings": 256, "num_hashes": 2, "is_decoder": True,
        "vocab_size": 101,
    }  # fmt: skip
    for convention in ("model", "full"):
        found, given = (bind({**config, "num_buckets": each}, convention=convention) for each in (None, buckets))
        assert found(2, seq).by_module() == given(2, seq).by_module()
