"""Sixteen model types whose tiny configs are recorded under many recipes; tests of single features run on them."""

from __future__ import annotations

from lab.truth import Entry, load

FAMILIES = (
    "deepseek_v3", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "llama", "llava", "mistral", "mixtral", "phi3", "qwen2",
    "qwen2_5_vl", "qwen2_vl", "qwen3", "qwen3_moe", "qwen3_vl",
)  # fmt: skip


def load_tiny(family: str, number: int = 0) -> Entry:
    """One of the two tiny configs that have more cases than their example; the second has a tied head or biases."""
    return [entry for entry in load(family).entries if entry.more and not entry.preset][number]
