"""Presets bind alike raw and through transformers' own config class, and build the model that they describe."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from presets import IMAGES, MODELS
from tiers import mark_heavy

from flopcalc import bind
from flopcalc.base.data import load_toml
from flopcalc.core.model.config import load_preset

FILES = MODELS
PRESETS = [name for name, path in FILES.items() if "alias" not in load_toml(path)]
ALIASES = [name for name in FILES if name not in PRESETS]
PUBLISHED = [name for name in PRESETS if "published_parameters" in load_toml(FILES[name])]
# One of each kind: dense, experts, scan, images, encoder-decoder, masked words.
LIGHT = ("qwen3-0.6b", "granite-3.1-1b-a400m", "mamba-130m", "qwen2-vl-2b", "t5-v1.1-xl", "modernbert-base")
UNITS = {"M": 10**6, "B": 10**9, "T": 10**12}


def make_workload(estimator: Any) -> dict[str, Any]:
    """A workload of any kind that a preset takes."""
    decoder = {"decoder_seq_len": 55} if estimator.has_decoder else {}
    if decoder and estimator.audio is not None:
        return {"batch_size": 2, "audio": [30, 30], **decoder}
    return {"batch_size": 2, "seq_len": min(77 if decoder else 777, estimator.model.position_limit or 777), **decoder}


@pytest.mark.parametrize("name", mark_heavy(PRESETS, LIGHT))
def test_raw_and_through_autoconfig(name: str) -> None:
    from transformers import AutoConfig

    source = load_preset(FILES[name])
    config = AutoConfig.for_model(**source.config)
    raw, through = bind(source), bind(config)
    assert raw.stages == through.stages
    # What a pixel rule reads, `dims`, is the config itself, which differs by the defaults that were filled in.
    assert (raw.vision is None) == (through.vision is None)
    if raw.vision is not None and through.vision is not None:
        assert raw.vision.replace(dims=None, outer=None) == through.vision.replace(dims=None, outer=None)
    load = make_workload(raw)
    assert raw(**load).to_dict()["modules"] == through(**load).to_dict()["modules"]


@pytest.mark.parametrize("name", mark_heavy(PRESETS, LIGHT))
def test_parameters_equal_the_hf_model(name: str) -> None:
    import torch
    import transformers

    from flopcalc.measure.hf.models import build_model

    source = load_preset(FILES[name])
    # The class that the published file names; where transformers has none so named, the one that the config picks.
    named = [one for one in source.config.get("architectures", ()) if hasattr(transformers, one)]
    with torch.device("meta"):
        model = build_model(source.config, device="meta", architecture=named[0] if named else None)
    assert bind(source).parameters()["total"] == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_total(name: str) -> None:
    """Within half a unit of the published figure's last digit, unless a note says what that figure leaves out."""
    table = load_toml(FILES[name])
    if "published_note" in table:
        assert table["published_note"].strip()
        return
    text = table["published_parameters"]
    figure, unit = Decimal(text[:-1]), UNITS[text[-1]]
    half = Decimal(1).scaleb(int(figure.as_tuple().exponent)) / 2
    assert abs(Decimal(bind(name).parameters()["total"]) / unit - figure) <= half
    assert "published_parameters: " in table["source"]


@pytest.mark.parametrize("name", ALIASES)
def test_alias_is_its_target(name: str) -> None:
    target = load_toml(FILES[name])["alias"]
    assert target in PRESETS
    assert bind(name)(1, 128).to_dict() == bind(target)(1, 128).to_dict()


# --- models of images -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", mark_heavy([name for name in IMAGES if "alias" not in load_toml(IMAGES[name])], ()))
def test_models_of_images(name: str) -> None:
    import torch
    from transformers import AutoConfig

    from flopcalc.measure.hf.models import build_model

    source = load_preset(IMAGES[name])
    raw, through = bind(source), bind(AutoConfig.for_model(**source.config))
    assert raw.stages == through.stages
    modules = [each(images=[(640, 480)]).to_dict()["modules"] for each in (raw, through)]
    assert modules[0] == modules[1]
    if source.config.get("use_timm_backbone"):
        pytest.importorskip("timm")
    with torch.device("meta"):
        model = build_model(source.config, device="meta", architecture=source.config["architectures"][0])
    assert raw.parameters()["total"] == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "parameters", "forward"),
    [
        ("vit-base", 86_567_656, 35_127_656_448),
        ("dinov2-large", 304_368_640, 162_023_964_672),
        ("clip-vit-large-patch14", 427_616_513, 162_025_537_536),
        ("siglip-so400m", 877_960_498, 670_346_449_920),
        ("sam-vit-huge", 641_090_864, 5_632_959_172_608),
        ("convnext-tiny-224", 28_589_128, 8_911_062_528),
        ("detr-resnet-50", 41_524_768, 162_334_464_000),
        ("depth-anything-small", 24_785_089, 167_465_068_800),
    ],
)
def test_one_image(name: str, parameters: int, forward: int) -> None:
    model = bind(name)
    assert model.parameters()["total"] == parameters
    assert model(images=[(640, 480)], phase="forward").total == forward
