"""The products that transformers' code computes in float32 are those that the count takes so."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from tiers import mark_heavy

from flopcalc import bind
from flopcalc.core.model.ops import join
from tests.measure.hf.test_quantized_modules import load_config

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

TYPES = [
    "deepseek_v3", "glm4_moe", "ernie4_5_moe", "nemotron_h", "deepseek_v4", "longcat_flash", "hy_v4", "glm5_next",
    "kolibri1", "mixtral", "mistral4",
]  # fmt: skip
CASES = [(name, cast) for name in TYPES for cast in (False, True)]
# transformers' reference code computes scans in float32; its GPU kernels read the model's own format.
SCANS = ("mixer", "linear_attn")


def shorten(path: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", path)


def find_computed(model: Any, autocast: bool) -> set[str]:
    """Modules whose products a forward pass computes in float32."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from flopcalc.measure.counters.flop_counter import FORMULAS, watch_modules

    running = [""]
    found = set()

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = func._schema.name
            if name in FORMULAS or name in ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"):
                factor = next(each for each in args if isinstance(each, torch.Tensor) and each.dim() > 1)
                if factor.dtype == torch.float32 and "rotary" not in running[-1]:
                    found.add(shorten(running[-1]))
            return func(*args, **(kwargs or {}))

    ids = torch.full((1, 16), 3)
    casting = torch.autocast("cpu", dtype=torch.bfloat16) if autocast else nullcontext()

    def enter(path: str, _module: Any) -> None:
        running.append(path)

    def leave() -> None:
        running.pop()

    with torch.no_grad(), casting, watch_modules(model, enter, leave), Recorder():
        model(input_ids=ids, use_cache=False)
    return {path for path in found if path.rpartition(".")[2] not in SCANS}


def find_counted(config: dict[str, Any], autocast: bool) -> set[str]:
    estimator = bind({**config, "dtype": "bfloat16"}, autocast=autocast or None)
    load = estimator(1, 16, phase="forward").terms[0].load
    found = set()
    for block, row, values in estimator.rows(load, "full"):
        if any(values) and any(product.format == "fp32" for product in row.products):
            path = f"{block.path}.*" if block.layers is not None else block.path
            found.add(shorten(join(path, getattr(row.op, "at", "") or row.op.name)))
    return found


@pytest.mark.parametrize(("name", "autocast"), mark_heavy(CASES))
def test_modules(name: str, autocast: bool, tmp_path: Path) -> None:
    from flopcalc.measure.hf.models import build_model

    config = load_config(name)
    architecture = bind(config).spec.architecture
    built = build_model(config, "eager", "eager", dtype=torch.bfloat16, architecture=architecture)
    built.save_pretrained(tmp_path)  # loading keeps some parameters in float32
    model = type(built).from_pretrained(
        tmp_path, dtype=torch.bfloat16, attn_implementation="eager", experts_implementation="eager"
    )
    counted = find_counted(config, autocast)
    assert counted == find_computed(model, autocast)
    # Autocast casts back what is cast, unless the code turns it off.
    casts = name not in ("mixtral", "mistral4")
    assert bool(counted) == (casts and (not autocast or name in ("ernie4_5_moe", "hy_v4")))


def test_what_the_user_says_comes_first() -> None:
    """A router counts in float32 beside bf16 weights, but not where a format is given or the model has its own."""
    config = load_config("deepseek_v3")
    cases: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
        "config": ({}, {"dtype": "bfloat16"}, ["bf16", "fp32"]),
        "fp16": ({}, {"dtype": "float16"}, ["fp16", "fp32"]),
        "float32 model": ({}, {"dtype": "float32"}, ["fp32"]),
        "dtype": ({"dtype": "bf16"}, {}, ["bf16"]),
        "compute": ({"compute": "fp8"}, {}, ["bf16", "fp8"]),
        "autocast": ({"autocast": True}, {"dtype": "float32"}, ["bf16"]),
        "weights": ({"weights": "bf16"}, {"dtype": "float32"}, ["bf16", "fp32"]),
    }
    for name, (options, keys, formats) in cases.items():
        estimate = bind({**config, **keys}, **options)(1, 16)
        assert (name, sorted(estimate.by_dtype())) == (name, formats)
        noted = any("computes gate in float32" in note for note in estimate.notes)
        assert (name, noted) == (name, formats[-1] == "fp32" and len(formats) == 2)
    d, experts, layers = 24, 8, 3
    assert bind(config)(1, 16).by_dtype()["fp32"].forward == 2 * 16 * d * experts * layers
