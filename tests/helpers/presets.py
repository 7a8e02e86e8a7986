"""Presets by kind: models that transformers builds, models whose workload is images, and diffusion pipelines."""

from __future__ import annotations

from typing import Any

from flopcalc.base.data import list_data_files, load_toml
from flopcalc.core.estimate.estimate import Estimator
from flopcalc.core.model.components import is_pipeline
from flopcalc.core.spec.spec import find_spec

FILES = list_data_files("presets")


def read_config(path: str) -> dict[str, Any]:
    """The config of a preset; that of its target, if it is an alias."""
    table = load_toml(path)
    config: dict[str, Any] = load_toml(FILES[table["alias"]] if "alias" in table else path).get("config", {})
    return config


def _takes_images(config: dict[str, Any]) -> bool:
    """Whether images alone are a workload of it."""
    spec = find_spec(str(config.get("model_type")))
    return spec is not None and spec.vision.get("text") in ("none", "optional")


PIPELINES = [name for name, path in FILES.items() if is_pipeline(read_config(path))]
IMAGES = {name: path for name, path in FILES.items() if _takes_images(read_config(path))}
MODELS = {name: path for name, path in FILES.items() if name not in PIPELINES and name not in IMAGES}


def make_sizes(estimator: Estimator, seq: int, decoder_seq: int) -> dict[str, Any]:
    """Sizes of a sample; an encoder of audio alone takes a clip, whose length is its own."""
    if not estimator.has_decoder:
        return {"seq_len": seq}
    encoder = {"seq_len": seq} if estimator.model.has_text_encoder else {"audio": [30]}
    return {**encoder, "decoder_seq_len": decoder_seq}
