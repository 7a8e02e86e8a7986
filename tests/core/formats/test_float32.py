"""The list of parameters that stay in float32 is what the installed transformers says."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from places import ROOT

from flopcalc.core.formats.kept_float32 import _load_types, list_float32, list_unconverted


@pytest.mark.parametrize(
    ("config", "bf16", "fp16"),
    [
        ({"model_type": "llama"}, (), ()),
        ({"model_type": "t5"}, (), ("wo",)),
        ({"model_type": "zamba"}, ("A_log",), ("A_log",)),
        ({"model_type": "instructblip", "text_config": {"model_type": "t5"}}, (), ("query_tokens", "wo")),
    ],
)
def test_lists(config: dict[str, object], bf16: tuple[str, ...], fp16: tuple[str, ...]) -> None:
    assert list_float32(config, "bf16") == bf16
    assert list_float32(config, "fp16") == fp16
    assert list_unconverted(config) == tuple(name for name in fp16 if name not in bf16)


def test_every_layer_keeps_the_same() -> None:
    """`Formats.names_layers` counts on it."""
    kept = {name for names in _load_types().values() for listed in names.values() for name in listed}
    assert "e_score_correction_bias" in kept
    assert not [name for name in kept if re.search(r"\\d|\[|\.\d", name)]


@pytest.mark.heavy
def test_the_file_is_fresh() -> None:
    pytest.importorskip("transformers")
    script = ROOT / "docs" / "make_float32.py"
    run = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
