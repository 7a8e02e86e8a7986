"""Frozen parts of launch files: LoRA adapts the modules that LLaMA-Factory and ms-swift adapt, counted by PEFT."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flopcalc import estimate_flops
from flopcalc.base.data import load_toml

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")

EXAMPLES = Path(__file__).parents[2] / "model_specs" / "examples"
# LLaMA-Factory 0.9.5, model_utils/visual.py: the names of the projector, of the towers and of the language model.
VISUAL = (("visual.merger",), ("visual.patch_embed", "visual.blocks"), ("language_model", "lm_head"))
USUAL = (("multi_modal_projector",), ("vision_tower",), ("language_model", "lm_head"))
COMPOSITE = {
    "qwen2_vl": VISUAL,
    "qwen2_5_vl": VISUAL,
    "qwen3_vl": (VISUAL[0], (*VISUAL[1], "visual.pos_embed", "visual.deepstack_merger_list"), VISUAL[2]),
    "llava": USUAL,
    "gemma3": USUAL,
    "internvl": USUAL,
    "qwen2_audio": (USUAL[0], ("audio_tower",), USUAL[2]),
}
DEFAULTS = {"freeze_vision_tower": True, "freeze_multi_modal_projector": True, "freeze_language_model": False}
OPEN = {"freeze_vision_tower": False}
CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    *((name, {}) for name in COMPOSITE),
    *((name, OPEN) for name in COMPOSITE if name != "qwen3_vl"),  # whose deepstack mergers are towers there
    ("qwen2_vl", {"freeze_multi_modal_projector": False}),
    ("qwen2_vl", {**OPEN, "freeze_language_model": True}),
    ("llava", {"lora_target": "q_proj,v_proj"}),  # names that the tower has too
    ("llava", {**OPEN, "lora_target": "q_proj,v_proj"}),
    ("llava", {"lora_target": "linear_1,q_proj", "freeze_multi_modal_projector": False}),
)


def make_example(name: str) -> dict[str, Any]:
    return {"model_type": name, **load_toml(str(EXAMPLES / f"{name}.toml"))["configs"][0]}


def find_targets(model: Any, name: str, settings: dict[str, Any]) -> list[str]:
    """The modules that LLaMA-Factory adapts: find_all_linear_modules, then patch_target_modules."""
    projector, towers, language = COMPOSITE[name]
    said = {**DEFAULTS, **settings}
    targets = said.get("lora_target", "all").split(",")
    if targets == ["all"]:
        hidden = {"lm_head", *projector, *(towers if said["freeze_vision_tower"] else ())}
        targets = list({
            path.rpartition(".")[2]
            for path, module in model.named_modules()
            if isinstance(module, torch.nn.Linear) and not any(word in path for word in hidden)
        })  # fmt: skip
    frozen = {"patch_embed"}
    for key, words in zip(DEFAULTS, (towers, projector, language), strict=True):
        frozen |= set(words) if said[key] else set()
    return [
        path
        for path, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
        and any(word in path for word in targets)
        and not any(word in path for word in frozen)
    ]


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_llama_factory(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    from flopcalc.measure.hf.models import build_model

    config = make_example(name)
    path = tmp_path / "lf.json"
    path.write_text(
        json.dumps({"template": "x", "stage": "sft", "model_name_or_path": "x", "lora_rank": 3, **settings})
    )
    expected = estimate_flops(config, seq_len=16, launch=path)
    model = build_model(config, architecture="Qwen2AudioForConditionalGeneration" if name == "qwen2_audio" else None)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=3, target_modules=find_targets(model, name, settings)))
    assert expected.parameters["trainable"] == sum(each.numel() for each in adapted.parameters() if each.requires_grad)


SWIFT: tuple[tuple[dict[str, Any], tuple[str, ...]], ...] = (
    ({}, ("vision", "projector")),
    ({"freeze_vit": False}, ("projector",)),
    ({"freeze_vit": False, "freeze_aligner": False}, ()),
    ({"freeze_llm": True, "freeze_aligner": False}, ("vision", "language")),
    ({"target_modules": ["q_proj"]}, ()),  # names are PEFT's own: in towers too
)


@pytest.mark.parametrize(("settings", "without"), SWIFT)
def test_swift(settings: dict[str, Any], without: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "swift.json"
    path.write_text(json.dumps({"tuner_type": "lora", "model": "x", "torch_dtype": "bfloat16", **settings}))
    lora = {"r": 8, "targets": settings.get("target_modules", ["all-linear"]), "exclude": without}
    config = make_example("qwen2_vl")
    plain = estimate_flops(config, seq_len=16, lora=lora, recompute="full", compute="bf16")
    assert estimate_flops(config, seq_len=16, launch=path).total == plain.total


def test_a_text_model_has_no_towers(tmp_path: Path) -> None:
    path = tmp_path / "lf.json"
    path.write_text(json.dumps({"template": "x", "stage": "sft", "model_name_or_path": "qwen3-0.6b"}))
    step = estimate_flops(seq_len=16, launch=path)
    assert step.notes[0].endswith("lora r=8,targets=all-linear from LLaMA-Factory's default")
