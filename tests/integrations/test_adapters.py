"""The adapters' own side: signatures of the frameworks, exact counts, NaN and one warning where none can be made."""

from __future__ import annotations

import importlib
import math
import subprocess
import sys
import types
import warnings
from typing import Any

import pytest
import torch
from tiny import make_llama

from flopcalc import bind, estimate_flops
from flopcalc.base.errors import ConfigError
from flopcalc.integrations import composer, llamafactory, megatron_bridge, ms_swift, nemo_automodel, torchtitan, veomni
from flopcalc.integrations import verl as verl_adapter
from flopcalc.integrations.counting import make_grid

NAMES = ("verl", "veomni", "torchtitan", "nemo_automodel", "megatron_bridge", "composer", "llamafactory", "ms_swift")
LENGTHS = [100, 0, 2048, 777]
DOCUMENTS = [100, 2048, 777]


class Theirs:
    """What verl's and VeOmni's counters look like from outside."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def estimate_flops(self, batch_seqlens: list[int], delta_time: float, **_: Any) -> tuple[float, float]:
        return sum(batch_seqlens) / delta_time, 1.0


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> type[Theirs]:
    """The frameworks' modules with counters that are wrong."""
    theirs = type("Counter", (Theirs,), dict(vars(Theirs)))
    for path, name in (
        ("verl.utils.flops_counter", "FlopsCounter"),
        ("veomni.utils.count_flops", "VeomniFlopsCounter"),
    ):
        parts = path.split(".")
        for end in range(1, len(parts) + 1):
            monkeypatch.setitem(sys.modules, ".".join(parts[:end]), types.ModuleType(parts[end - 1]))
        module = sys.modules[path]
        setattr(module, name, theirs)
        module.get_device_flops = lambda: 989.0  # type: ignore[attr-defined]
    return theirs


def get_config(name: str) -> dict[str, Any]:
    return dict(bind(name).source.config)


def test_adapters_are_imported_without_their_frameworks() -> None:
    modules = ", ".join(f"flopcalc.integrations.{name}" for name in NAMES)
    script = f"import sys, {modules}; print([name for name in ('torch', *{NAMES!r}) if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    for name in NAMES:
        assert callable(importlib.import_module(f"flopcalc.integrations.{name}").install)


@pytest.mark.parametrize("adapter", [verl_adapter, veomni])
def test_counters_of_documents_are_replaced_and_put_back(adapter: Any, stand_ins: type[Theirs]) -> None:
    undo = adapter.install()
    expected = estimate_flops("llama-3.1-8b", lengths=DOCUMENTS).total
    counter: Any = stand_ins(get_config("llama-3.1-8b"))
    assert counter.estimate_flops(LENGTHS, 2.0) == (expected / 2.0 / 1e12, 989.0)
    assert counter.estimate_flops([], 2.0) == (0.0, 989.0)
    undo()
    assert stand_ins({}).estimate_flops([10], 2.0) == (5.0, 1.0)


@pytest.mark.usefixtures("stand_ins")
def test_patch_counts_are_exact_where_shapes_do_not_matter() -> None:
    counter = verl_adapter.FlopsCounter(get_config("qwen2-vl-7b"))
    grids = [(1, 36, 52), (1, 28, 20), (1, 28, 20)]
    found, _ = counter.estimate_flops([2048, 777], 1.0, images_seqlens=[36 * 52, 560, 560])
    assert found == estimate_flops("qwen2-vl-7b", lengths=[2048, 777], image_grid_thw=grids).total / 1e12
    windows = verl_adapter.FlopsCounter(get_config("qwen2.5-vl-7b"))
    with pytest.warns(RuntimeWarning, match="attends within windows"):
        windows.estimate_flops([2048], 1.0, images_seqlens=[36 * 52])
    with pytest.warns(RuntimeWarning, match="7 patches of a picture are no multiple of 4"):
        assert math.isnan(counter.estimate_flops([2048], 1.0, images_seqlens=[7])[0])


@pytest.mark.parametrize(
    ("patches", "expected"), [(4, (1, 2, 2)), (1872, (1, 36, 52)), (8, (1, 2, 4)), (1024, (1, 32, 32))]
)
def test_grids_are_near_squares(patches: int, expected: tuple[int, int, int]) -> None:
    assert make_grid(patches, 2) == expected


@pytest.mark.usefixtures("stand_ins")
def test_an_unknown_model_is_nan_with_one_warning() -> None:
    with pytest.warns(RuntimeWarning, match="flopcalc in verl: .*no_such_type"):
        counter = verl_adapter.FlopsCounter({"model_type": "no_such_type"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert math.isnan(counter.estimate_flops([10], 1.0)[0])
    named = verl_adapter.FlopsCounter({"model_type": "no_such_type"}, model="gpt2", convention="full")
    assert named.estimate_flops([10], 1.0)[0] == estimate_flops("gpt2", seq_len=10, convention="full").total / 1e12


@pytest.mark.usefixtures("stand_ins")
def test_veomni_says_what_trains() -> None:
    config = get_config("qwen2-vl-7b")
    counter = veomni.VeomniFlopsCounter(config)
    frozen, _ = counter.estimate_flops([2048], 1.0, images_seqlens=[1872], freeze_vit=True)
    sizes: dict[str, Any] = {"seq_len": 2048, "image_grid_thw": [(1, 36, 52)]}
    recipe = {"freeze": ["vision", "projector"]}
    assert frozen == estimate_flops("qwen2-vl-7b", **sizes, recipe=recipe).total / 1e12
    plain = {"target_parameters": None, "modules_to_save": None, "exclude_modules": None, "bias": "none"}
    lora = types.SimpleNamespace(r=8, target_modules=["q_proj", "v_proj"], rank_pattern={}, **plain)
    adapted, _ = counter.estimate_flops([2048], 1.0, lora_config=lora)
    assert adapted == estimate_flops("qwen2-vl-7b", seq_len=2048, lora="r=8,targets=q_proj+v_proj").total / 1e12
    for changes, message in (({"bias": "all"}, "bias='all'"), ({"target_modules": ".*"}, "a pattern")):
        with pytest.warns(RuntimeWarning, match=message):
            assert math.isnan(
                counter.estimate_flops([9], 1.0, lora_config=types.SimpleNamespace(**{**vars(lora), **changes}))[0]
            )


def test_nemo_automodel_formulas() -> None:
    config = get_config("gpt2")
    formula = nemo_automodel.get_flops_formula_for_hf_config(config)
    assert formula is not None
    assert formula(config, gbs=3, seq_len=100) == estimate_flops("gpt2", batch_size=3, seq_len=100).total
    other = get_config("llama-3.1-8b")
    assert formula(other, gbs=1, seq_len=100) == estimate_flops("llama-3.1-8b", seq_len=100).total
    with pytest.warns(RuntimeWarning, match="no_such_type"):
        assert nemo_automodel.get_flops_formula_for_hf_config({"model_type": "no_such_type"}) is None


def test_composer_and_trainer_count_real_batches() -> None:
    model = make_llama()
    ids = torch.ones(2, 12, dtype=torch.long)
    mask = ids.clone()
    mask[0, 6:] = 0
    batch = {"input_ids": ids, "attention_mask": mask}
    expected = bind(model)(batch=batch).total
    wrapped = types.SimpleNamespace(model=model)
    composer.install(wrapped)
    assert wrapped.flops_per_batch(batch) == expected
    assert ms_swift.floating_point_ops(types.SimpleNamespace(model=model), batch) == expected
    from transformers import Trainer

    undo = ms_swift.install()
    try:
        trainer = object.__new__(Trainer)
        trainer.model = model
        assert trainer.floating_point_ops(batch) == expected
        assert bind(model.config)(batch_size=1, lengths=[6, 12]).total == expected
    finally:
        undo()
    assert Trainer.floating_point_ops.__module__ == "transformers.trainer"


def test_llamafactory_script() -> None:
    count = llamafactory.compute_model_flops
    assert count("gpt2", 2, 100) == estimate_flops("gpt2", batch_size=2, seq_len=100).total
    forward = estimate_flops("gpt2", batch_size=2, seq_len=100, phase="forward")
    assert count("gpt2", 2, 100, include_backward=False) == forward.total
    kernels = {"convention": "hardware", "recompute": "full", "attention_kernel": "flash"}
    assert count("gpt2", 2, 100, True, True, True) == estimate_flops("gpt2", batch_size=2, seq_len=100, **kernels).total  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no preset"):
        count("no-such-model", 1, 1)


# --- configs in a framework's own words -------------------------------------------------------------------------------
def make_provider(**changes: Any) -> Any:
    fields = {
        "num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 32,
        "ffn_hidden_size": 96, "vocab_size": 1000, "seq_length": 128, "gated_linear_unit": True,
        "make_vocab_size_divisible_by": 128, "tensor_model_parallel_size": 2,
    }  # fmt: skip
    return types.SimpleNamespace(**{**fields, **changes})


SHARED = {
    "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "intermediate_size": 96, "vocab_size": 1024,
}  # fmt: skip
EXPERTS = {"num_moe_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 48}
LATENT = {
    "multi_latent_attention": True,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 16,
}
PROVIDERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dense": ({}, {**SHARED, "model_type": "llama"}),
    "two products": ({"gated_linear_unit": False}, {**SHARED, "model_type": "nemotron"}),
    "experts": (
        {**EXPERTS, "moe_layer_freq": 2},
        {**SHARED, "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
         "mlp_only_layers": [1, 3]},
    ),
    "gated shared expert": (
        {**EXPERTS, "moe_shared_expert_intermediate_size": 40, "moe_shared_expert_gate": True},
        {**SHARED, "model_type": "qwen2_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
         "shared_expert_intermediate_size": 40},
    ),
    "shared experts": (
        {**EXPERTS, "moe_shared_expert_intermediate_size": 96, "moe_layer_freq": [0, 1, 1, 1]},
        {**SHARED, "model_type": "glm4_moe", "n_routed_experts": 8, "num_experts_per_tok": 2,
         "moe_intermediate_size": 48, "n_shared_experts": 2, "first_k_dense_replace": 1},
    ),
    "latent attention": (
        {**EXPERTS, **LATENT, "moe_shared_expert_intermediate_size": 48},
        {**SHARED, "model_type": "deepseek_v3", "num_key_value_heads": 4, "n_routed_experts": 8,
         "num_experts_per_tok": 2, "moe_intermediate_size": 48, "n_shared_experts": 1, "first_k_dense_replace": 0,
         "q_lora_rank": None, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
         "head_dim": 8},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PROVIDERS)
def test_megatron_providers(name: str) -> None:
    changes, config = PROVIDERS[name]
    cfg = types.SimpleNamespace(model=make_provider(**changes))
    expected = estimate_flops(config, batch_size=3, seq_len=128).total
    assert megatron_bridge.num_floating_point_operations(cfg, 3) == expected


def test_megatron_lora_and_what_is_not_mapped() -> None:
    lora = type("LoRA", (), {"dim": 8, "target_modules": ["linear_qkv", "linear_fc2"]})()
    cfg = types.SimpleNamespace(model=make_provider(), peft=lora)
    config = PROVIDERS["dense"][1]
    expected = estimate_flops(config, seq_len=128, lora="r=8,targets=q_proj+k_proj+v_proj+down_proj").total
    assert megatron_bridge.num_floating_point_operations(cfg) == expected
    for changes, message in (
        ({"is_hybrid_model": True}, "hybrid"),
        ({"mtp_num_layers": 1}, "mtp_num_layers=1"),
        ({**EXPERTS, "gated_linear_unit": False}, "experts without a gated MLP"),
        ({**EXPERTS, "moe_shared_expert_intermediate_size": 50}, "no multiple"),
    ):
        other = types.SimpleNamespace(model=make_provider(**changes))
        with pytest.warns(RuntimeWarning, match=message):
            assert math.isnan(megatron_bridge.num_floating_point_operations(other))
        assert megatron_bridge.num_floating_point_operations(other, model="gpt2") > 0
    with pytest.warns(RuntimeWarning, match="DoRA is not counted"):
        megatron_bridge.num_floating_point_operations(
            types.SimpleNamespace(model=make_provider(), peft=type("DoRA", (), {})())
        )


def make_titan(**changes: Any) -> Any:
    def make_layer(**parts: Any) -> Any:
        attention = types.SimpleNamespace(n_heads=4, n_kv_heads=2, head_dim=32)
        return types.SimpleNamespace(**{"attention": attention, "feed_forward": None, "moe": None, **parts})

    ffn = types.SimpleNamespace(w1=types.SimpleNamespace(out_features=96))
    layers = changes.pop("layers", None) or [make_layer(feed_forward=ffn) for _ in range(4)]
    return types.SimpleNamespace(dim=64, vocab_size=1024, layers=layers, **changes)


def test_torchtitan_configs() -> None:
    model = torch.nn.Linear(3, 5)
    parameters, flops = torchtitan.get_nparams_and_flops(make_titan(), model, 128)
    assert parameters == 20
    assert flops == estimate_flops(PROVIDERS["dense"][1], seq_len=128).total // 128
    windowed = make_titan()
    windowed.layers[0].attention.sliding_window_size = 16
    with pytest.raises(ConfigError, match="sliding windows in this model are not described"):
        torchtitan.get_nparams_and_flops(windowed, model, 128)
    for config, message in (
        (types.SimpleNamespace(), "is no decoder of torchtitan's own"),
        (make_titan(mtp_layers=[1]), "multi-token"),
    ):
        with pytest.raises(ConfigError, match=message):
            torchtitan.get_nparams_and_flops(config, model, 128)
