"""Patches for other projects: upstream's number as its own code printed it, and that the change gives ours."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from places import ROOT

from flopcalc import estimate_flops

UPSTREAM = ROOT / "docs" / "upstream"
sys.path.insert(0, str(UPSTREAM))

import compare  # noqa: E402
from hf_mem_kv_cache import count_cached_values  # noqa: E402

# Printed by upstream's code at compare.COMMITS, with stand-ins for what it imports. Our repetition gives the same.
VLLM = {
    "llama-3.1-8b": 369436957605888,
    "gemma-3-27b": 1111488815857664,
    "gpt-oss-20b": 204703594561536,
    "deepseek-v3": 2507667901251584,
    "qwen3-vl-8b": 385929826009088,
}
VERL = {
    "llama-3.1-8b": (842157187399680, 790514500632576),
    "qwen3-8b": (864525377077248, 803347862913024),
    "qwen3-30b-a3b": (408760627494912, 378171870412800),
    "gemma-3-1b": (130749541908480, 102054865403904),
    "gpt-oss-20b": (431937344765952, 375605359017984),
    "qwen3-vl-8b": (891040051494912, 825796545478656),
    "qwen3-vl-4b": (455547316862976, 471601904615424),
}
HF_MEM = {"llama-3.1-8b": 2147483648, "deepseek-v3": 28655484928, "gemma-3-27b": 8321499136, "gpt-oss-20b": 404226048,
          "mistral-7b": 2147483648, "qwen3-next-80b-a3b": 1610612736}  # fmt: skip
PATCH_FILES = sorted(UPSTREAM.glob("*.patch"))


@pytest.mark.parametrize(("preset", "printed"), VLLM.items())
def test_vllm(preset: str, printed: int) -> None:
    config = compare.load_config(preset)
    images: dict[str, Any] = {"image_grid_thw": compare.GRIDS} if preset == "qwen3-vl-8b" else {}
    patches = compare.PATCHES if images else ()
    assert compare.count_vllm(config, 16384, patches=patches) == printed
    ours = estimate_flops(preset, seq_len=16384, phase="forward", logits="last", **images).total
    assert compare.count_vllm(config, 16384, is_patched=True, patches=patches) == ours < printed


def test_vllm_draft() -> None:
    config = compare.load_config("deepseek-v3")
    ours = estimate_flops("deepseek-v3", seq_len=16384, phase="forward", logits="last", mtp=1).total
    assert compare.count_vllm(config, 16384, is_patched=True, mtp=1) == ours


def test_pairs_of_the_patch_are_those_of_the_mask() -> None:
    attended = compare.load_added("vllm-attention.patch", "attended_pairs")
    for context in range(1, 9):
        for tokens in range(1, context + 1):
            queries = range(context - tokens, context)
            assert attended(tokens, context) == sum(query + 1 for query in queries)
            for window in range(10):
                assert attended(tokens, context, window) == sum(min(query + 1, window) for query in queries)


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        ({}, [None, None, None]),
        ({"sliding_window": 8}, [8, 8, 8]),
        ({"sliding_window": 8, "use_sliding_window": False}, [None, None, None]),
        (
            {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention", "linear_attention"]},
            [8, None, 0],
        ),
    ],
)
def test_windows_of_the_patch(config: dict[str, Any], windows: list[int | None]) -> None:
    get = compare.load_added("vllm-attention.patch", "get_layer_windows")
    assert get(types.SimpleNamespace(**config), 3) == windows


@pytest.mark.parametrize(("preset", "printed"), VERL.items())
def test_verl(preset: str, printed: tuple[int, int]) -> None:
    config, lengths = compare.load_config(preset), [4096] * 4
    images: dict[str, Any] = {"image_grid_thw": compare.GRIDS} if "vision_config" in config else {}
    patches = compare.PATCHES if images else ()
    counts = [compare.count_verl(config, lengths, is_patched=patched, patches=patches) for patched in (False, True)]
    assert tuple(counts) == printed
    ours = estimate_flops(preset, lengths=lengths, **images).total
    assert abs(counts[0] / ours - 1) > 0.03
    assert abs(counts[1] / ours - 1) < 1e-4  # the mask's diagonal, and the gradient of pixels


class StandInFlops:
    """As much of verl-omni's base class as the drop-in uses."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config


@pytest.fixture
def omni(monkeypatch: pytest.MonkeyPatch) -> dict[str, type]:
    """What the drop-in registers, by pipeline."""
    registered: dict[str, type] = {}

    def register(*names: str) -> Callable[[type], type]:
        def keep(cls: type) -> type:
            registered.update(dict.fromkeys(names, cls))
            return cls

        return keep

    for name in ("verl_omni", "verl_omni.utils", "verl_omni.utils.mfu"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    core = types.ModuleType("verl_omni.utils.mfu.diffusion_flops_counter")
    core.DiffusionModelFlops = StandInFlops  # type: ignore[attr-defined]
    core.register_diffusion_architecture = register  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, core.__name__, core)
    monkeypatch.delitem(sys.modules, "verl_omni_flopcalc", raising=False)
    import verl_omni_flopcalc

    monkeypatch.delitem(sys.modules, "verl_omni_flopcalc")
    registered["lora"] = verl_omni_flopcalc.register(
        "QwenImageTransformer2DModel", "QwenImagePipeline", lora="r=64,targets=to_q+to_k+to_v+to_out.0"
    )
    return registered


@pytest.mark.parametrize(
    ("pipeline", "preset", "sizes", "options"),
    [
        ("QwenImagePipelineWithLogProb", "qwen-image", {"images": [(1024, 1024)]}, {}),
        ("lora", "qwen-image", {"images": [(1024, 1024)]}, {"lora": "r=64,targets=to_q+to_k+to_v+to_out.0"}),
        ("StableDiffusion3Pipeline", "sd3-medium", {"images": [(1024, 1024)]}, {}),
        ("FluxPipeline", "flux.1-dev", {"images": [(1024, 1024)]}, {}),
        ("WanPipeline", "wan2.1-1.3b", {"videos": [(832, 480, 81)]}, {}),
    ],
)
def test_verl_omni(
    omni: dict[str, type], pipeline: str, preset: str, sizes: dict[str, Any], options: dict[str, Any]
) -> None:
    counter = omni[pipeline](compare.load_published(preset)["transformer"])
    latents = 4096 if "images" in sizes else 52 * 30 * 21
    ours = estimate_flops(preset, **sizes, text=64, parts="denoiser", **options).total
    prompt = 64 + 77 * (preset == "sd3-medium")  # its denoiser reads CLIP's tokens too
    found = counter.estimate_flops([latents] * 3, [prompt] * 3, 2.0, num_timesteps=5, num_forward_passes=2)
    assert found == ours * 3 * 5 * 2 / 2.0 / 1e12


def test_verl_omni_today() -> None:
    config = compare.load_published("qwen-image")["transformer"]
    assert compare.count_verl_omni(config, [4096, 4096], [64, 64]) == 415858799149056  # printed by its own code
    assert (
        estimate_flops("qwen-image", images=[(1024, 1024)], batch_size=2, text=64, parts="denoiser").total
        == 415812437409792
    )


@pytest.mark.parametrize("preset", ["qwen3.5-4b", "qwen3.5-27b", "qwen3-vl-8b"])
def test_torchtitan_images(preset: str) -> None:
    count = compare.load_added("torchtitan-vision.patch", "vit_flops")
    parts = estimate_flops(preset, seq_len=4096, image_grid_thw=compare.GRIDS).by_component()
    ours = sum(parts["vision"][:3]) + sum(parts["projector"][:3])
    assert count(compare.PATCHES, **compare.read_vision(compare.load_config(preset))) == ours
    assert count([], **compare.read_vision(compare.load_config(preset))) == 0


def test_torchtitan_peaks() -> None:
    today = {name: compare.find_peak(name) for name in compare.DEVICES}
    patched = {name: compare.find_peak(name, is_patched=True) for name in compare.DEVICES}
    ours = {name: compare.peak_flops_per_s(name, "bf16") / 1e12 for name in compare.DEVICES}
    wrong = {name for name, peak in today.items() if peak is None or abs(peak / ours[name] - 1) > 0.02}
    assert len(wrong) == 8
    assert [name for name, peak in patched.items() if peak is not None and abs(peak / ours[name] - 1) > 0.02] == []
    assert {name for name, peak in patched.items() if peak is None} < wrong
    added = (UPSTREAM / "torchtitan-peaks.patch").read_text(encoding="utf-8")
    for name in ("A800", "H800", "MI350X", "L40S"):
        assert re.search(rf'^\+.*"{name}" in device_name', added, re.MULTILINE)


@pytest.mark.parametrize(("preset", "printed"), HF_MEM.items())
def test_hf_mem(preset: str, printed: int) -> None:
    config = compare.load_published(preset)
    assert compare.count_hf_mem(config, 32768) == printed
    assert count_cached_values(config, 32768) == compare.count_cached(preset, 32768) <= printed


@pytest.mark.parametrize(
    ("config", "values"),
    [
        ({"sliding_window": 4}, 2 * 4 * 4 * 8),
        ({"sliding_window": 4, "use_sliding_window": False}, 2 * 4 * 10 * 8),
        ({"sliding_window": 4, "sliding_window_pattern": 2}, 2 * (2 * 4 + 2 * 10) * 8),
        ({"layer_types": ["mamba", "conv", "linear_attention", "attention"]}, 2 * 10 * 8),
        ({"kv_lora_rank": 5, "qk_rope_head_dim": 3}, 4 * 10 * 8),
    ],
)
def test_kinds_of_layers(config: dict[str, Any], values: int) -> None:
    base = {"hidden_size": 32, "num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 4}
    assert count_cached_values({**base, **config}, 10) == values


@pytest.mark.parametrize("page", compare.TABLES)
def test_pages_are_fresh(page: str) -> None:
    text = (UPSTREAM / f"{page}.md").read_text(encoding="utf-8")
    assert compare.write_page(text, compare.make_block(page)) == text, "run python docs/upstream/compare.py --write"


def list_hunks(path: Path) -> Sequence[tuple[str, list[str]]]:
    """Head and lines of every hunk."""
    text = re.sub(r"^(diff|---|\+\+\+) .*\n", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    parts = re.split(r"^(@@ .*@@)\n", text, flags=re.MULTILINE)
    return [(head, body.splitlines()) for head, body in zip(parts[1::2], parts[2::2], strict=True)]


@pytest.mark.parametrize("path", PATCH_FILES, ids=lambda path: path.stem)
def test_a_patch_holds_only_what_changes(path: Path) -> None:
    hunks = list_hunks(path)
    assert hunks
    for head, lines in hunks:
        found = re.fullmatch(r"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@", head)
        assert found is not None
        assert {line[0] for line in lines} <= {"+", "-"}  # no line of another project's that stays
        signs = [line[0] for line in lines]
        assert (signs.count("-"), signs.count("+")) == tuple(int(count or 1) for count in found.groups())
    assert sum(line.startswith("-") for _, lines in hunks for line in lines) <= 20
    assert f"{path.stem.split('-')[0]}" in compare.COMMITS
