"""The parameters that from_pretrained keeps in float32 are those that the count takes so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiers import mark_heavy

from flopcalc import bind
from tests.measure.hf.test_quantized_modules import load_config

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

# Formats in which a model of this type holds some parameters in float32.
TYPES = {
    "t5": ["fp16"], "gpt_oss": ["fp16"], "deepseek_v32": ["fp16"], "longcat_flash": ["fp16"],
    "ernie4_5_moe": ["fp16", "bf16"], "hunyuan_v1_moe": ["fp16", "bf16"], "zamba": ["fp16", "bf16"],
    "olmo_hybrid": ["fp16", "bf16"], "deepseek_v3": [],
}  # fmt: skip


def count(given: Any) -> dict[str, int]:
    return {held.format: held.parameters for held in bind(given).count_weights()}


@pytest.mark.parametrize("name", mark_heavy(TYPES))
def test_loaded_models(name: str, tmp_path: Path) -> None:
    from flopcalc.measure.hf.models import build_model

    config = load_config(name)
    model = build_model(config, architecture={"t5": "T5ForConditionalGeneration"}.get(name))
    model.save_pretrained(tmp_path)
    kept = []
    for dtype, plain in ((torch.float16, "fp16"), (torch.bfloat16, "bf16")):
        live = count(type(model).from_pretrained(tmp_path, dtype=dtype))
        assert count({**config, "dtype": plain}) == live
        kept += [plain] if "fp32" in live else []
    assert kept == TYPES[name]


def test_products_of_kept_parameters() -> None:
    """They are computed in float32, but not under autocast or where a format is given; quantizers leave them out."""
    config = load_config("t5")
    numbers = 2 * 24 * 41 + 3 * 24 * 41  # wo of two encoder and three decoder layers
    half = {**config, "dtype": "float16"}
    assert count(half)["fp32"] == numbers
    formats = {
        name: [*bind(half, **options)(1, 16, decoder_seq_len=7, phase="forward").by_dtype()]
        for name, options in {"": {}, "autocast": {"autocast": True}, "dtype": {"dtype": "fp16"}}.items()
    }
    assert formats == {"": ["fp16", "fp32"], "autocast": ["bf16"], "dtype": ["fp16"]}
    note = next(note for note in bind(half)(1, 16, decoder_seq_len=7).notes if "float32" in note)
    assert note.startswith('transformers keeps wo in float32 and computes it in float32: compute="fp16"')
    for method in ({"quant_method": "bitsandbytes", "load_in_8bit": True}, {"quant_method": "fp8"}):
        assert count({**half, "quantization_config": method})["fp32"] == numbers
        assert count({**config, "dtype": "bfloat16", "quantization_config": method}).get("fp32", 0) == 0
