"""The choices of the fit that no measurement backs: model_specs/fit_choices.toml."""

from __future__ import annotations

import os
from types import SimpleNamespace

from flopcalc.base.data import find_data_dir, load_toml

CHOICES = SimpleNamespace(**load_toml(os.path.join(find_data_dir(), "fit_choices.toml")))
