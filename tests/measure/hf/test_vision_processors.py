"""Pixels to patches: our grids equal those of transformers' own PIL image processors."""

from __future__ import annotations

import ast
import copy
import importlib
import importlib.util
import itertools
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tiers import mark_heavy
from transformers.image_transforms import get_size_with_aspect_ratio

from flopcalc import WorkloadError, bind
from flopcalc.base.data import list_data_files
from flopcalc.core.images.resizing import RULES
from flopcalc.core.images.vision import Vision
from flopcalc.core.model.config import load_preset
from flopcalc.measure.hf.examples import find_example

QWEN2_VL = "qwen2_vl.image_processing_pil_qwen2_vl.Qwen2VLImageProcessorPil"
SIZES = [
    (28, 28),
    (14, 300),
    (640, 480),
    (1024, 768),
    (1036, 1036),
    (3000, 40),
    (42, 42),
    (70, 98),
    pytest.param((4096, 2160), marks=pytest.mark.heavy),
    (1, 150),
]
PRESETS = ["qwen2-vl-7b", "qwen2.5-vl-3b", "qwen3-vl-4b"]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", PRESETS)
def test_grid_equals_the_processor(name: str, size: tuple[int, int]) -> None:
    source = load_preset(list_data_files("presets")[name])
    vision = bind(source).vision
    assert vision is not None
    assert source.preprocessor is not None
    processor = _load(QWEN2_VL)(**source.preprocessor)
    theirs = processor(Image.new("RGB", size), return_tensors="np")["image_grid_thw"][0].tolist()
    grid, notes = vision.grid_of_pixels(*size, source.preprocessor)
    assert list(grid) == theirs
    assert notes == []


@pytest.mark.parametrize("size", SIZES)
def test_class_defaults_are_used_with_a_note(size: tuple[int, int]) -> None:
    vision = bind("qwen2-vl-7b").vision
    assert vision is not None
    grid, notes = vision.grid_of_pixels(*size, None)
    theirs = _load(QWEN2_VL)()(Image.new("RGB", size), return_tensors="np")["image_grid_thw"][0].tolist()
    assert list(grid) == theirs
    assert len(notes) == 1


@pytest.mark.parametrize("size", [(336, 336), (1024, 768), (50, 700)])
def test_clip_crops_to_one_square(size: tuple[int, int]) -> None:
    source = load_preset(list_data_files("presets")["llava-1.5-7b"])
    vision = bind(source).vision
    assert vision is not None
    assert source.preprocessor is not None
    processor = _load("clip.image_processing_pil_clip.CLIPImageProcessorPil")(**source.preprocessor)
    pixels = processor(Image.new("RGB", size), return_tensors="np")["pixel_values"]
    patch = source.config["vision_config"]["patch_size"]
    assert vision.grid_of_pixels(*size, source.preprocessor)[0] == (
        1,
        pixels.shape[2] // patch,
        pixels.shape[3] // patch,
    )


# --- Grids of any size: the rules of [vision.pixels] ---------------------------------------------------------------

ODD_SIZES = [(28, 28), (13, 300), (641, 479), (1024, 767), (3001, 40), (5, 7), (71, 99), (1603, 899), (29, 3000)]
LIMITS: list[dict[str, Any] | None] = [None, {"size": {"shortest_edge": 50_000, "longest_edge": 400_000}}]
# model type -> module and class of its PIL processor
SMART = {
    "glm4v": "glm4v.image_processing_pil_glm4v.Glm4vImageProcessorPil",
    "glm46v": "glm46v.image_processing_pil_glm46v.Glm46VImageProcessorPil",
    "glmga": "glmga.image_processing_pil_glmga.GlmgaImageProcessorPil",
    "cosmos3_edge": "cosmos3_edge.image_processing_pil_cosmos3_edge.Cosmos3EdgeImageProcessorPil",
    "ernie4_5_vl_moe": "ernie4_5_vl_moe.image_processing_pil_ernie4_5_vl_moe.Ernie4_5_VLMoeImageProcessorPil",
    "hunyuan_vl": "hunyuan_vl.image_processing_pil_hunyuan_vl.HunYuanVLImageProcessorPil",
    "paddleocr_vl": "paddleocr_vl.image_processing_pil_paddleocr_vl.PaddleOCRVLImageProcessorPil",
    "exaone4_5": QWEN2_VL,
    "hyperclovax_vision_v2": QWEN2_VL,
}


def _find_vision(model_type: str, patch: int) -> Vision:
    """The image input of a type's first example, with the patches of its real models."""
    config = copy.deepcopy(find_example(model_type).configs[0])
    config["vision_config"] |= {"patch_size": patch, "window_size": 8 * patch}
    vision = bind(config).vision
    assert vision is not None
    return vision


def _load(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(f"transformers.models.{module}"), name)


def _list_grids(vision: Vision, size: tuple[int, int], preprocessor: dict[str, Any] | None) -> list[list[int]] | None:
    try:
        return [list(grid) for grid in vision.grids_of_pixels(*size, preprocessor)[0]]
    except WorkloadError:
        return None


@pytest.mark.parametrize("preprocessor", LIMITS)
@pytest.mark.parametrize("model_type", mark_heavy(SMART, ["glm4v", "hyperclovax_vision_v2"]))
def test_smart_rules(model_type: str, preprocessor: dict[str, Any] | None) -> None:
    processor = _load(SMART[model_type])(**(preprocessor or {}))
    vision = _find_vision(model_type, processor.patch_size)
    for size in ODD_SIZES:
        try:
            theirs = processor(Image.new("RGB", size), return_tensors="np")["image_grid_thw"].tolist()
        except ValueError:  # too long
            theirs = None
        assert _list_grids(vision, size, preprocessor) == theirs, size


@pytest.mark.parametrize("preprocessor", [None, {"min_image_tokens": 40, "max_image_tokens": 300}])
def test_budget_of_tokens(preprocessor: dict[str, Any] | None) -> None:
    processor = _load("glm5_next.image_processing_pil_glm5_next.Glm5NextImageProcessorPil")(**(preprocessor or {}))
    vision = _find_vision("glm5_next", 14)
    for size in ODD_SIZES:
        theirs = processor(Image.new("RGB", size), return_tensors="np")["image_grid_thw"].tolist()
        assert _list_grids(vision, size, preprocessor) == theirs, size


@pytest.mark.parametrize("preprocessor", [None, {"size": {"longest_edge": 1540}}])
@pytest.mark.parametrize("model_type", ["mistral3", "mistral_large4", "lighton_ocr"])
def test_longest_edge(model_type: str, preprocessor: dict[str, Any] | None) -> None:
    whole = {"height": 28, "width": 28}  # the processor's patch is the model's times its merge
    path = "pixtral.image_processing_pil_pixtral.PixtralImageProcessorPil"
    processor = _load(path)(patch_size=whole, **(preprocessor or {}))
    vision = _find_vision(model_type, 14)
    for size in ODD_SIZES:
        (height, width), *_ = processor(Image.new("RGB", size), return_tensors="np")["image_sizes"]
        assert _list_grids(vision, size, preprocessor) == [[1, height // 14, width // 14]], size


@pytest.mark.parametrize("preprocessor", [None, {"max_slice_nums": 4, "scale_resolution": 336}, {"slice_mode": False}])
@pytest.mark.parametrize("model_type", mark_heavy(["minicpmv4_6", "minicpmv4_7"], ["minicpmv4_6"]))
def test_slices(model_type: str, preprocessor: dict[str, Any] | None) -> None:
    path = "minicpmv4_6.image_processing_pil_minicpmv4_6.MiniCPMV4_6ImageProcessorPil"
    processor = _load(path)(**(preprocessor or {}))
    vision = _find_vision(model_type, 14)
    for size in ODD_SIZES:
        theirs = processor(Image.new("RGB", size), return_tensors="np")["target_sizes"].tolist()
        assert _list_grids(vision, size, preprocessor) == [[1, *grid] for grid in theirs], size


def _extract(module: str, name: str) -> Any:
    """A function or method of a processor that cannot be imported without torchvision."""
    spec = importlib.util.find_spec(f"transformers.models.{module.partition('.')[0]}")
    assert spec is not None
    assert spec.origin is not None
    source = (Path(spec.origin).parent / f"{module.partition('.')[2]}.py").read_text()
    nodes = ast.walk(ast.parse(source))
    functions: list[ast.stmt] = [node for node in nodes if isinstance(node, ast.FunctionDef) and node.name == name]
    scope = {"math": math, "itertools": itertools, "SizeDict": dict, "torch": torch}
    exec(compile(ast.Module(functions, []), module, "exec"), scope)
    return scope[name]


def test_rules_of_processors_that_need_torchvision() -> None:
    navit = _extract("kimi_k25.image_processing_kimi_k25", "navit_resize")
    muse = _extract("muse_glimmer.image_processing_muse_glimmer", "smart_resize")
    minimax = _extract("minimax_m3_vl.image_processing_minimax_m3_vl", "smart_resize")
    for size in [size for size in ODD_SIZES if max(size) / min(size) < 200] + [(8000, 7001)]:
        width, height = size
        found = {
            "kimi_k25": navit(height, width, 14, 2, 16384, 512)[1],
            "muse_glimmer": muse(height, width, 28, 4096),
            "muse_spark": muse(height, width, 28, 4096),
            "minimax_m3_vl": minimax(height, width, 28, 4 * 28 * 28, 451584),
        }
        for model_type, (high, wide) in found.items():
            grids = _list_grids(_find_vision(model_type, 14), size, None)
            assert grids == [[1, high // 14, wide // 14]], (model_type, size)


@pytest.mark.parametrize("given", [{}, {"limit_type": "min"}, {"limit_type": "resize_long", "max_side_limit": 700}])
def test_text_detectors_limit_a_side(given: dict[str, Any]) -> None:
    resize = _extract("pp_ocrv5_server_det.image_processing_pp_ocrv5_server_det", "get_image_size")
    vision = bind(find_example("pp_ocrv5_server_det").configs[0]).vision
    assert vision is not None
    limits = {"limit_side_len": 960, "limit_type": "max", "max_side_limit": 4000, **given}
    for width, height in [*ODD_SIZES, (960, 720), (5000, 900), (48, 30)]:
        size, _ = resize(None, torch.empty((3, height, width), device="meta"), *limits.values())
        assert _list_grids(vision, (width, height), given) == [[1, size["height"], size["width"]]], (width, height)


@pytest.mark.parametrize("given", [{}, {"ensure_multiple_of": 32}, {"do_pad": False, "keep_aspect_ratio": False}])
def test_zoedepth_pads_first(given: dict[str, Any]) -> None:
    processor = _load("zoedepth.image_processing_pil_zoedepth.ZoeDepthImageProcessorPil")(**given)
    vision = bind(find_example("zoedepth").configs[0]).vision
    assert vision is not None
    for size in [(641, 479), (71, 99), (30, 30)]:
        high, wide = processor(Image.new("RGB", size), return_tensors="np")["pixel_values"].shape[2:]
        assert _list_grids(vision, size, given) == [[1, high // 4, wide // 4]], size


def test_whole_and_crops() -> None:
    processor = _load("step3p7.image_processing_step3p7.Step3p7ImageProcessor")
    self = SimpleNamespace(max_image_size=3024, _is_extreme_aspect=processor._is_extreme_aspect)
    config = copy.deepcopy(find_example("step3p7").configs[0])
    config["vision_config"] |= {"patch_size": 14, "image_size": 728}
    vision = bind(config).vision
    assert vision is not None
    for size in ODD_SIZES:
        _, (wide, high), window, *_ = processor._plan_patches(self, *size, 728, 504)
        crops = len(range(0, high, window)) * len(range(0, wide, window)) if window else 0
        assert vision.grid_of_pixels(*size, None)[0][0] == 1 + crops, size


@pytest.mark.parametrize("size", ODD_SIZES)
def test_cut_into_patches(size: tuple[int, int]) -> None:
    from transformers.image_transforms import divide_to_patches

    vision = bind(find_example("inkling_mm_model").configs[0]).vision
    assert vision is not None
    patches = divide_to_patches(np.zeros((3, size[1], size[0])), 40)
    assert vision.count_tokens(vision.grid_of_pixels(*size, None)[0]) == len(patches)


@pytest.mark.parametrize("size", [*ODD_SIZES, (800, 800), (800, 1000), (1334, 601), (601, 1334), (640, 480)])
@pytest.mark.parametrize(("edge", "most"), [(800, 1333), (512, 512)])
def test_detectors_resize_by_edges(size: tuple[int, int], edge: int, most: int) -> None:
    width, height = size
    given = {
        "do_resize": True,
        "size.shortest_edge": edge,
        "size.longest_edge": most,
        "size.height": 0,
        "size.width": 0,
    }
    yolos = _load("yolos.image_processing_pil_yolos.get_size_with_aspect_ratio_yolos")((height, width), edge, most)
    assert RULES["edges"](width, height, {**given, "multiple": 16, "patch": 1}) == (1, *yolos)
    plain = get_size_with_aspect_ratio((height, width), edge, most)
    assert RULES["edges"](width, height, {**given, "multiple": 1, "patch": 1}) == (1, *plain)


# model type -> its PIL processor, and what a preprocessor_config.json may say
CLASSIFIERS: dict[str, tuple[str, dict[str, Any]]] = {
    "mobilevit": (
        "mobilevit.image_processing_pil_mobilevit.MobileViTImageProcessorPil",
        {"size": {"shortest_edge": 40}, "crop_size": {"height": 33, "width": 37}},
    ),
    "bit": (
        "bit.image_processing_pil_bit.BitImageProcessorPil",
        {"size": {"shortest_edge": 40}, "do_center_crop": False},
    ),
    "cvt": ("convnext.image_processing_pil_convnext.ConvNextImageProcessorPil", {"size": {"shortest_edge": 60}}),
    "pvt_v2": ("pvt.image_processing_pil_pvt.PvtImageProcessorPil", {"size": {"height": 30, "width": 50}}),
    "dinat": ("vit.image_processing_pil_vit.ViTImageProcessorPil", {"size": {"height": 30, "width": 50}}),
    "textnet": (
        "textnet.image_processing_pil_textnet.TextNetImageProcessorPil",
        {"size": {"shortest_edge": 50}, "size_divisor": 16},
    ),
    "donut-swin": ("donut.image_processing_pil_donut.DonutImageProcessorPil", {"size": {"height": 51, "width": 33}}),
    "resnet": ("convnext.image_processing_pil_convnext.ConvNextImageProcessorPil", {"size": {"shortest_edge": 60}}),
    "dpt": (
        "dpt.image_processing_pil_dpt.DPTImageProcessorPil",
        {
            "size": {"height": 51, "width": 33},
            "keep_aspect_ratio": True,
            "ensure_multiple_of": 4,
            "do_pad": True,
            "size_divisor": 7,
        },
    ),
    "detr": (
        "detr.image_processing_pil_detr.DetrImageProcessorPil",
        {"size": {"shortest_edge": 40, "longest_edge": 60}},
    ),
    "rt_detr": ("rt_detr.image_processing_pil_rt_detr.RTDetrImageProcessorPil", {"size": {"height": 64, "width": 96}}),
    "perceiver-fourier": (
        "perceiver.image_processing_pil_perceiver.PerceiverImageProcessorPil",
        {"size": {"height": 30, "width": 50}},
    ),
}


@pytest.mark.parametrize("model_type", CLASSIFIERS)
def test_classifiers(model_type: str) -> None:
    path, preprocessor = CLASSIFIERS[model_type]
    example = find_example(model_type)
    named = {"architectures": [example.architecture]} if example.architecture else {}
    config = {**example.configs[0], **named, "patch_size": 4}
    vision = bind(config).vision
    assert vision is not None
    patch = 4 if model_type == "donut-swin" else 1
    for given in (None, preprocessor) if model_type != "donut-swin" else (preprocessor,):
        processor = _load(path)(**(given or {}))
        for size in [(641, 479), (71, 99), (30, 30)]:
            pixels = processor(Image.new("RGB", size), return_tensors="np")["pixel_values"]
            sides = [math.ceil(side / patch) for side in pixels.shape[2:]]
            assert _list_grids(vision, size, given) == [[1, *sides]], (size, given)
