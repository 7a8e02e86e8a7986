"""Presets by kind: models that transformers builds, and diffusion pipelines."""

from __future__ import annotations

from flopcalc.core.model.components import is_pipeline
from flopcalc.data import list_data_files, load_toml

FILES = list_data_files("presets")
PIPELINES = [name for name, path in FILES.items() if is_pipeline(load_toml(path).get("config", {}))]
MODELS = {name: path for name, path in FILES.items() if name not in PIPELINES}
