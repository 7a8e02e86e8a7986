"""Key heads and caches come from the attention ops, whatever a model's modules are called."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flopcalc import bind, plan
from flopcalc.api import predict
from flopcalc.base.data import find_data_dir
from flopcalc.core.workload.workload import make_workload
from flopcalc.prediction.build_work import make_work
from flopcalc.prediction.memory.peak import predict_memory
from flopcalc.prediction.tensor_parallel import find_sides, find_widths


@pytest.mark.parametrize(
    ("model", "key_heads"),
    [
        ("llama-3.1-8b", {8}),
        ("phi-4", {10}),
        ("phi-3-medium", {10}),
        ("falcon-7b", {1}),
        ("gpt2", {12}),
        ("deepseek-v3", {128}),
        ("gemma-4-31b", {4, 16}),  # full and sliding layers
    ],
)
@pytest.mark.parametrize("phase", ["train", "decode"])
def test_attention_has_the_key_heads_of_the_config(model: str, key_heads: set[int], phase: str) -> None:
    work = make_work(bind(model), make_workload(1, 64, phase=phase))
    assert {call.kv_heads for call in work.attention} == key_heads


def test_decoding_reads_as_many_keys_as_there_are() -> None:
    """phi-4, 8 rows of 16k: 26.3 ms of attention when its key heads were guessed as 40."""
    found = predict("phi-4", device="h200", batch_size=8, seq_len=1, phase="decode", context=16000, advise=False)
    assert found.breakdown["attention"] == pytest.approx(7.0e-3, rel=0.01)
    assert found.memory is not None
    assert found.memory.kv_cache == 8 * 16001 * 40 * 2 * 10 * 128 * 2


@pytest.mark.parametrize(
    ("model", "kv_cache", "bytes_"),
    [
        # 12 layers of attention, 2 key heads of 256; 36 with a state of 32 x 128 x 128 and 4 inputs of 8192 channels.
        ("qwen3-next-80b-a3b", None, 4 * (12 * 1024 * 2 * 2 * 256 * 2 + 36 * (32 * 128 * 128 * 4 + 8192 * 4 * 2))),
        ("qwen3-next-80b-a3b", "fp8", 4 * (12 * 1024 * 2 * 2 * 256 + 36 * (32 * 128 * 128 * 4 + 8192 * 4 * 2))),
        ("falcon-mamba-7b", "fp8", 4 * 64 * (8192 * 16 * 4 + 8192 * 4 * 2)),  # 8192 channels, 16 states each
        ("lfm2-1.2b", None, 4 * (6 * 1024 * 2 * 8 * 64 * 2 + 10 * 2048 * 3 * 2)),  # convolutions alone
    ],
)
def test_recurrent_states_are_cached_whatever_the_length(model: str, kv_cache: str | None, bytes_: int) -> None:
    found = predict_memory(bind(model, kv_cache=kv_cache), make_workload(4, 1024, phase="prefill"))
    assert found.kv_cache == bytes_


SIZES = {
    "hidden_size": 6144, "intermediate_size": 16384, "num_hidden_layers": 48, "num_attention_heads": 48,
    "num_key_value_heads": 8, "vocab_size": 92544,
}  # fmt: skip


def write_spec(folder: Path) -> Path:
    """Llama as InternLM2 writes it: one product of queries, keys and values, and other names."""
    text = (Path(find_data_dir()) / "specs" / "llama.toml").read_text(encoding="utf-8")
    start, end = text.index("  [ # siblings"), text.index('  { op = "attend", name = "self_attn"')
    joined = (
        '  { op = "linear", name = "self_attn.wqkv", in = "d", out = "(h + 2 * kv) * hd", '
        'part = "attention_projections" },\n'
    )
    text = text[:start] + joined + text[end:]
    names = {
        "self_attn": "attention", "o_proj": "wo", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2",
        "mlp.": "feed_forward.", "input_layernorm": "attention_norm",
    }  # fmt: skip
    for old, new in names.items():
        text = text.replace(old, new)
    path = folder / "internlm2.toml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "load",
    [
        {"batch_size": 16, "seq_len": 1, "phase": "decode", "context": 16384},
        {"batch_size": 4, "seq_len": 4096, "phase": "prefill"},
    ],
)
def test_a_joined_projection_of_any_name_caches_as_much(tmp_path: Path, load: dict[str, Any]) -> None:
    """268 GiB, as if every head had keys of its own, for what takes Llama of the same sizes 78."""
    own = bind({**SIZES, "model_type": "internlm2"}, spec=write_spec(tmp_path))
    llama = bind({**SIZES, "model_type": "llama"})
    one, other = (predict_memory(model, make_workload(**load)) for model in (own, llama))
    assert one.kv_cache == other.kv_cache
    assert one.fits("h200") is other.fits("h200") is True
    assert one.peak == pytest.approx(other.peak, rel=0.02)


def test_a_joined_projection_of_any_name_takes_as_long(tmp_path: Path) -> None:
    given: dict[str, Any] = {"device": "h200", "batch_size": 16, "phase": "decode", "context": 16384, "advise": False}
    one = predict({**SIZES, "model_type": "internlm2"}, spec=write_spec(tmp_path), seq_len=1, **given)
    other = predict({**SIZES, "model_type": "llama"}, seq_len=1, **given)
    assert one.breakdown["attention"] == other.breakdown["attention"]
    assert one.fits is True
    assert "model.layers.*.attention.wqkv" in one.modules
    assert not any("self_attn" in name or "q_proj" in name for name in one.modules)


def test_a_plan_takes_a_spec_too(tmp_path: Path) -> None:
    given: dict[str, Any] = {"device": "h200", "gpus": 8, "tokens": "1B", "seq_len": 2048, "tp": 1, "pp": 1, "cp": 1}
    config, path = {**SIZES, "model_type": "internlm2"}, write_spec(tmp_path)
    assert plan(config, spec=path, **given).best == plan(bind(config, spec=path), **given).best


@pytest.mark.parametrize(
    ("model", "sides"),
    [
        ("llama-3.1-8b", {"q_proj": ("column", 0, 0), "k_proj": ("column", 1024, 8), "v_proj": ("column", 1024, 8)}),
        ("phi-4", {"qkv_proj": ("column", 2560, 10), "o_proj": ("row", 0, 0)}),
        ("falcon-7b", {"query_key_value": ("column", 128, 1), "dense": ("row", 0, 0)}),
        ("gpt2", {"c_attn": ("column", 1536, 12), "c_fc": ("column", 0, 0)}),
        (
            "deepseek-v3",
            {"q_a_proj": ("whole", 0, 0), "q_b_proj": ("column", 0, 0), "kv_a_proj_with_mqa": ("whole", 0, 0),
             "kv_b_proj": ("column", 0, 0), "o_proj": ("row", 0, 0), "experts": ("expert", 0, 0)},
        ),
    ],
)  # fmt: skip
def test_how_tensor_parallelism_cuts_projections(model: str, sides: dict[str, tuple[str, int, int]]) -> None:
    from flopcalc.core.model.ops import iterate

    estimator = bind(model)
    stage = next(stage for stage in estimator.stages if stage.repeated)
    found = find_sides(list(iterate(stage.layers[-1])), find_widths(estimator)[stage.path])
    named = {op.name.rpartition(".")[2]: tuple(sided) for op, sided in found.items()}
    assert {name: named[name] for name in sides} == sides
