"""The Hugging Face model inside torch.compile, DDP, Opacus, PEFT and their like."""

from __future__ import annotations

from typing import Any


def strip(model: object) -> Any:
    """The model inside torch.compile, DDP, Opacus and their like; PEFT's wrapper stays, for its adapters are read."""
    inside = getattr(model, "_modules", {})
    inner = next((inside[name] for name in ("_orig_mod", "module", "_module") if inside.get(name) is not None), None)
    return model if inner is None else strip(inner)


def unwrap(model: object) -> Any:
    """The HF model inside those and PEFT."""
    model = strip(model)
    return unwrap(model.get_base_model()) if hasattr(model, "get_base_model") else model
