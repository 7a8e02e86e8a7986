"""Tiny modules after published code: each is named like its class and says what it was written after."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from flopcalc import bind
from flopcalc.base.data import list_data_files, load_toml
from flopcalc.base.errors import FlopcalcError
from flopcalc.core.spec.spec import find_spec

EXAMPLES = {name: load_toml(path) for name, path in list_data_files("examples").items()}
WITNESSES = {name: tables["witness"] for name, tables in EXAMPLES.items() if "witness" in tables}
SOURCE = r"[\w.-]+/[\w.-]+: \S+\.py"


def test_every_witness_is_the_class_of_its_spec_and_names_its_source() -> None:
    from transformers import PretrainedConfig

    from flopcalc.measure.hf.models import find_class

    assert len(WITNESSES) == 42
    for name, witness in WITNESSES.items():
        found, spec = find_class(witness), find_spec(name)
        assert spec is not None
        assert found.__name__ == spec.architecture
        assert re.match(SOURCE, found.__doc__), name
        assert hasattr(found, "make_config") or found.config_class is not PretrainedConfig, name


@pytest.mark.parametrize(
    ("witness", "words"),
    [
        ("LlamaForCausalLM", None),
        ("HerringForCausalLM", "transformers has no class HerringForCausalLM: write a tiny torch module"),
        ("lab.witnesses.text:Herring", "lab.witnesses.text has no class Herring"),
        ("herring.model:Herring", "witness herring.model:Herring: no module herring.model can be imported from here"),
    ],
)
def test_a_class_that_is_not_there_is_refused_in_words(witness: str, words: str | None) -> None:
    from flopcalc.measure.hf.models import find_class

    if words is None:
        assert find_class(witness).__name__ == witness
        return
    with pytest.raises(FlopcalcError, match=f"^{re.escape(words)}"):
        find_class(witness)


def test_a_witness_needs_a_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    from flopcalc.measure.hf.models import find_class

    monkeypatch.setitem(sys.modules, "lab", None)
    for name in [name for name in sys.modules if name.startswith("lab.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(FlopcalcError, match=r"Rnj1ForCausalLM is not in transformers; .* needs a checkout"):
        find_class("lab.witnesses.text:Rnj1ForCausalLM")


def test_a_witness_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from flopcalc.measure.hf.models import make_config

    (tmp_path / "sprat_model.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n\n"
        "class Sprat(LlamaForCausalLM):\n    config_class = LlamaConfig\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    made = make_config({"hidden_size": 64}, "sprat_model:Sprat")
    assert (type(made).__name__, made.hidden_size) == ("LlamaConfig", 64)


@pytest.mark.filterwarnings("ignore")  # torch advises on its own code
def test_a_published_module_is_built_and_counted() -> None:
    from flopcalc.measure.hf.examples import find_example
    from flopcalc.measure.hf.verify import verify

    example = find_example("kimi_vl")
    config = example.configs[0]
    workload = {"batch": 1, "seq": 14, "images": [[1, 4, 6]], "phase": "train"}
    verdict = verify(config, workload, example=example)
    assert verdict.is_equal
    assert 0 < verdict.traced[0] < verdict.traced[1]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "recipe",
    [
        {"lora": {"r": 2, "targets": ["v_proj"]}},
        {"lora": {"r": 2, "targets": ["k_proj"]}},
        {"freeze": ["model.embed_tokens", "model.layers.0"]},
        {"freeze": ["model.embed_tokens", "model.layers.*", "lm_head"]},
    ],
)
def test_a_later_pass_owes_gradients_to_the_keys_of_its_own_layer(recipe: dict[str, Any]) -> None:
    from flopcalc.measure.hf.examples import find_example
    from flopcalc.measure.hf.verify import verify

    example = find_example("iquestloopcoder")
    for config in example.configs:
        assert verify(config, {"batch": 2, "seq": 7, "phase": "train"}, recipe, example=example).is_equal


def test_the_total_of_kimi_k3_is_the_published_one() -> None:
    """Sizes of moonshotai/Kimi-K3 as NVIDIA-NeMo/Automodel's tests quote them; the tower's are SGLang's defaults."""
    full = [*range(4, 93, 4), 93]
    delta = [layer for layer in range(1, 94) if layer not in full]
    text = {
        "model_type": "kimi_linear", "hidden_size": 7168, "intermediate_size": 33792, "num_hidden_layers": 93,
        "num_attention_heads": 96, "num_key_value_heads": 96, "vocab_size": 163840, "hidden_act": "situ",
        "moe_intermediate_size": 3072, "num_experts": 896, "num_experts_per_token": 16, "num_shared_experts": 2,
        "first_k_dense_replace": 1, "routed_expert_hidden_size": 3584, "latent_moe_use_norm": True,
        "attn_res_block_size": 12, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "mla_use_nope": True, "mla_use_output_gate": True,
        "linear_attn_config": {
            "head_dim": 128, "num_heads": 96, "short_conv_kernel_size": 4, "use_full_rank_gate": True,
            "full_attn_layers": full, "kda_layers": delta,
        },
    }  # fmt: skip
    counted = bind({"model_type": "kimi_k3", "text_config": text, "vision_config": {}}).parameters()["total"]
    # The hub's files hold 128 numbers of each A_log; its 96 heads read the first (sglang/srt/models/kimi_k3.py).
    assert counted == 2_779_931_837_184 - len(delta) * (128 - 96)
