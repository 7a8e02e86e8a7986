"""The default config of every class of transformers, as save_pretrained writes it, is counted."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tiers import LIGHT_TYPES, mark_heavy

from flopcalc import bind
from flopcalc.base.errors import ConfigError
from flopcalc.cli.supported import load_catalogue
from flopcalc.core.estimate.estimate import Estimator
from flopcalc.core.model.config import load_config
from flopcalc.core.spec.aliases import list_types
from flopcalc.core.spec.spec import find_spec

ALIASES = ("EvollaModel", "mlcd", "qwen2_5_omni", "qwen3_omni_moe")  # read as other families
NO_DEFAULT = ("gemma4_assistant",)  # the class refuses its own
FAMILIES = [entry for entry in load_catalogue().families if entry["reference"].startswith("transformers")]
TYPES = sorted({*(entry["model_type"] for entry in FAMILIES), "step3p5", *ALIASES} - set(NO_DEFAULT))
CANNOT_RUN = {  # what we say of defaults that HF cannot build, or not run
    "aya_vision": "vision_config: attention hands on 1148 numbers, but self_attn.out_proj reads 1152",
    "deepseek_ocr2": "missing key 'mlp_layer_types'",
    "deepseek_v2": "missing key 'num_experts_per_tok'",
    "diffusion_gemma": "missing key 'num_experts'",
    "dots1": "missing keys 'num_local_experts', ",
    "esm": "missing key 'vocab_size'",
    "granite4_vision": "missing keys 'downsample_rate', ",
    "lfm2_moe": "missing key 'layer_types'",
    "pp_ocrv5_server_det": "missing keys 'intraclass_block_config', ",
    "qwen3_omni_moe": "head_dim must be even: rotary embeddings turn pairs of numbers, not 73",
    "qwen3_omni_moe_thinker": "head_dim must be even: rotary embeddings turn pairs of numbers, not 73",
    "qwen4_exp": "missing key 'indexer_n_heads'",
    "qwen4_exp_text": "missing keys 'indexer_n_heads', ",
    "vitmatte": "hidden_size must be that of backbone_config (hidden_size is 384, backbone_config.hidden_size is 768)",
}
NOT_DESCRIBED = {
    "inkling_mm_model": "only up to 6 layers are described: with more HF makes layers 614400 wide (n_layers is 24)",
    "perception_lm": "only timm's vit_pe_core and vit_pe_lang of sizes large and gigantic are described",
}


def save(model_type: str, folder: Path) -> None:
    from transformers import CONFIG_MAPPING

    CONFIG_MAPPING[model_type]().save_pretrained(folder)


def make_workload(model: Estimator) -> dict[str, Any]:
    """The smallest one that a model takes: text if it reads some, else one image or clip."""
    found: dict[str, Any] = {"decoder_seq_len": 4} if model.has_decoder else {}
    reads_text = model.has_text_encoder if model.has_decoder else model.needs_text
    if reads_text:
        return {**found, "seq_len": 8}
    if model.audio is not None:
        return {**found, "clips": [model.audio.most or 3000]}
    assert model.vision is not None
    vision = model.vision
    side = vision.side if vision.kind != "grid" else vision.merge * (64 // vision.merge)
    return {**found, "image_grid_thw": [(vision.frames or 1, side, side)]}


@pytest.mark.filterwarnings("ignore")  # some classes warn about their own defaults
@pytest.mark.parametrize(
    "model_type", mark_heavy((name for name in TYPES if name not in CANNOT_RUN | NOT_DESCRIBED), LIGHT_TYPES)
)
def test_default_is_counted(model_type: str, tmp_path: Path) -> None:
    save(model_type, tmp_path)
    model = bind(tmp_path)
    assert model.parameters()["total"] > 0
    assert model(1, **make_workload(model)).total > 0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", mark_heavy(NOT_DESCRIBED))
def test_default_is_not_described(model_type: str, tmp_path: Path) -> None:
    save(model_type, tmp_path)
    with pytest.raises(ConfigError, match=re.escape(NOT_DESCRIBED[model_type])):
        bind(tmp_path)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", mark_heavy(CANNOT_RUN, ("aya_vision",)))
def test_default_that_hf_cannot_run(model_type: str, tmp_path: Path) -> None:
    import torch

    from flopcalc.measure.hf.models import build_model, floats_on_meta
    from flopcalc.measure.hf.verify import prepare

    prepare()
    save(model_type, tmp_path)
    with pytest.raises(ConfigError, match=re.escape(CANNOT_RUN[model_type])):
        bind(tmp_path)
    spec = find_spec(model_type) or find_spec(f"{model_type}_thinker")
    assert spec is not None
    ids, images = {"input_ids": torch.arange(5, 13)[None]}, {"pixel_values": torch.empty(1, 3, 64, 64)}
    inputs = ids if spec.main_input == "input_ids" else images
    with pytest.raises((TypeError, ValueError, RuntimeError)), floats_on_meta(), torch.no_grad():
        build_model(load_config(tmp_path).config, architecture=spec.architecture, device="meta")(**inputs)


def test_every_known_class_is_among_them() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    known = set(CONFIG_MAPPING_NAMES) & set(list_types())
    towers = {name for name in known if getattr(find_spec(name), "is_tower", False)}
    assert (known - towers) | set(ALIASES) == {*TYPES, *NO_DEFAULT}
