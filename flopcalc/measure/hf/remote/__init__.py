"""Tiny torch models after published code that transformers does not hold: what the examples of such specs build.

Each class has the name, the module paths and the products of the published one; its docstring names the code that it
was written after. Inner models that transformers has are transformers' own. No remote code is run or copied.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["find_class"]

# Published class -> the file here that holds it.
CLASSES = {
    "KimiVLForConditionalGeneration": "grids",
    "DotsOCRForCausalLM": "grids",
    "KeyeForConditionalGeneration": "grids",
    "KeyeVL1_5ForConditionalGeneration": "grids",
    "LLaVAOneVision1_5_ForConditionalGeneration": "grids",
    "Ovis2_5": "grids",
    "MiniCPMV": "grids",
    "Sarashina2VisionForCausalLM": "grids",
    "KimiK3ForConditionalGeneration": "kimi",
    "MiniCPMO": "audio",
    "UltravoxModel": "audio",
    "Qwen3TTSForConditionalGeneration": "speech",
    "DeciLMForCausalLM": "text",
    "Rnj1ForCausalLM": "text",
    "Plamo3ForCausalLM": "text",
    "ArcticForCausalLM": "text",
    "Step3TextForCausalLM": "text",
    "Step3p5ForCausalLM": "text",
    "OpenELMForCausalLM": "text",
    "YuanForCausalLM": "yuan",
    "Phi3SmallForCausalLM": "sparse",
    "NVEmbedModel": "text",
    "IQuestLoopCoderForCausalLM": "loops",
    "mPLUGOwl3Model": "hyper",
    "LongcatFlashNgramForCausalLM": "text",
    "StepVLForConditionalGeneration": "tiles",
    "Step3VLForConditionalGeneration": "tiles",
    "MolmoForCausalLM": "tiles",
    "OLMoForCausalLM": "tiles",
    "Ovis": "tiles",
    "Phi3VForCausalLM": "tiles",
    "Phi4ForCausalLMV": "tiles",
    "BeeForConditionalGeneration": "tiles",
    "CogVLMForCausalLM": "experts",
    "CogVLMVideoForCausalLM": "experts",
    "Moondream3ForCausalLM": "crops",
    "Eagle2_5_VLForConditionalGeneration": "tiles",
    "SAILVLModel": "tiles",
    "DeepseekVLV2ForCausalLM": "timm",
    "OpenVLAForActionPrediction": "timm",
    "LlamaNemotronVLModel": "tiles",
    "LlamaNemotronVLForSequenceClassification": "tiles",
}


def find_class(name: str) -> Any:
    """The class of this name, None where none was written."""
    if name not in CLASSES:
        return None
    return getattr(import_module(f"{__name__}.{CLASSES[name]}"), name)
