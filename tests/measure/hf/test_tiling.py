"""Pixels to tiles and visual tokens: ours equal those of transformers' own image processors and processing code."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import math
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image

from flopcalc import bind
from flopcalc.base.errors import WorkloadError
from flopcalc.core.images.vision import Vision

SIZES = [(336, 336), (640, 480), (480, 641), (1000, 333), (97, 1013), (30, 20), (1999, 1501), (1500, 301), (3, 170)]


def list_sizes(sizes: list[tuple[int, int]]) -> list[Any]:
    """The cases for `parametrize`, a tuple as one value; every third runs by default."""
    return [pytest.param(size, marks=pytest.mark.heavy if at % 3 else ()) for at, size in enumerate(sizes)]


SOME = [size if size in SIZES[1:5:3] else pytest.param(size, marks=pytest.mark.heavy) for size in SIZES]
TEXT = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 99}


def tower(kind: str, image: int, patch: int, **keys: Any) -> dict[str, Any]:
    sizes = {"image_size": image, "patch_size": patch, "hidden_size": 64, "num_hidden_layers": 2}
    return {"model_type": kind, **sizes, **keys}


def bind_vision(model_type: str, vision: dict[str, Any], **keys: Any) -> Vision:
    keys = {"text_config": {"model_type": "llama", **TEXT}, **keys}
    bound = bind({"model_type": model_type, "vision_config": vision, **keys}).vision
    assert bound is not None
    return bound


def load(model_type: str, name: str, kind: str = "processing") -> Any:
    return getattr(importlib.import_module(f"transformers.models.{model_type}.{kind}_{model_type}"), name)


def make_bare(processor: type, **attributes: Any) -> Any:
    """A processor without a tokenizer: only what its token arithmetic reads. '#' is the image's token."""
    bare = object.__new__(processor)
    for key, value in {"image_token": "#", **attributes}.items():
        setattr(bare, key, value)
    return bare


class Case(NamedTuple):
    model_type: str
    vision: dict[str, Any]
    keys: dict[str, Any]
    family: str  # whose PIL image processor it takes
    image_processor: str
    preprocessor: dict[str, Any]
    processor: str
    attributes: dict[str, Any]
    call: dict[str, Any] | None = None  # given to the image processor, as the processor's own defaults are


SQUARE_PINPOINTS = [[384, 768], [768, 384], [768, 768]]
PINPOINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
SPLIT = {"size": {"longest_edge": 1456}, "max_image_size": {"longest_edge": 364}}
CROP = {"crop_to_patches": True}
CASES = [
    Case(
        "llava_next", tower("clip_vision_model", 336, 14), {}, "llava_next", "LlavaNextImageProcessorPil",
        {"image_grid_pinpoints": PINPOINTS, "size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}},
        "LlavaNextProcessor",
        {"patch_size": 14, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"},
    ),
    Case(
        "llava_onevision", tower("siglip_vision_model", 384, 14), {}, "llava_onevision",
        "LlavaOnevisionImageProcessorPil", {"size": {"height": 384, "width": 384}}, "LlavaOnevisionProcessor",
        {"num_image_tokens": 729, "vision_aspect_ratio": "anyres_max_9", "vision_feature_select_strategy": "full"},
    ),
    Case(
        "granite4_vision", tower("siglip_vision_model", 384, 16, hidden_size=64),
        {"downsample_rate": "4/8", "deepstack_layer_map": [[-1, 0]], "image_grid_pinpoints": SQUARE_PINPOINTS},
        "llava_next", "LlavaNextImageProcessorPil",
        {
            "image_grid_pinpoints": SQUARE_PINPOINTS, "size": {"height": 384, "width": 384},
            "crop_size": {"height": 384, "width": 384},
        },
        "Granite4VisionProcessor",
        {
            "patch_size": 16, "num_additional_image_tokens": 0, "vision_feature_select_strategy": "full",
            "downsample_rate": "4/8",
        },
    ),
    Case(
        "internvl", tower("internvl_vision", 448, 14), {}, "got_ocr2", "GotOcr2ImageProcessorPil",
        {"size": {"height": 448, "width": 448}, "max_patches": 12}, "InternVLProcessor",
        {"image_seq_length": 256, "start_image_token": "", "end_image_token": ""}, CROP,
    ),
    Case(
        "qianfan_ocr", tower("qianfan_ocr_vision", 448, 14), {}, "got_ocr2", "GotOcr2ImageProcessorPil",
        {"size": {"height": 448, "width": 448}, "min_patches": 2, "max_patches": 7}, "QianfanOCRProcessor",
        {"image_seq_length": 256, "start_image_token": "", "end_image_token": ""}, CROP,
    ),
    Case(
        "aya_vision", tower("siglip_vision_model", 364, 14), {}, "got_ocr2", "GotOcr2ImageProcessorPil",
        {"size": {"height": 364, "width": 364}, "max_patches": 12}, "AyaVisionProcessor",
        {
            "img_size": 364, "patch_size": 28, "img_patch_token": "#", "start_of_img_token": "", "end_of_img_token": "",
            "tile_token": "", "tile_global_token": "",
        },
        CROP,
    ),
    Case(
        "ovis2", tower("ovis2_vision", 448, 14, hidden_stride=2), {"hidden_size": 64}, "ovis2",
        "Ovis2ImageProcessorPil", {"size": {"height": 448, "width": 448}, "max_patches": 9, "crop_to_patches": True},
        "Ovis2Processor", {"image_seq_length": 256},
    ),
    Case(
        "ovis2", tower("ovis2_vision", 448, 14, hidden_stride=2), {"hidden_size": 64}, "ovis2",
        "Ovis2ImageProcessorPil",
        {"size": {"height": 448, "width": 448}, "crop_to_patches": True, "use_covering_area_grid": False},
        "Ovis2Processor", {"image_seq_length": 256},
    ),
    Case(
        "idefics3", tower("idefics3_vision", 364, 14), {}, "idefics3", "Idefics3ImageProcessorPil", SPLIT,
        "Idefics3Processor", {"image_seq_len": 169, "fake_image_token": "", "global_image_tag": ""},
        {"return_row_col_info": True},
    ),
    Case(
        "idefics3", tower("idefics3_vision", 364, 14), {}, "idefics3", "Idefics3ImageProcessorPil",
        {**SPLIT, "do_image_splitting": False}, "Idefics3Processor",
        {"image_seq_len": 169, "fake_image_token": "", "global_image_tag": ""}, {"return_row_col_info": True},
    ),
    Case(
        "smolvlm", tower("smolvlm_vision", 512, 16), {"scale_factor": 4}, "smolvlm", "SmolVLMImageProcessorPil",
        {"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}}, "SmolVLMProcessor",
        {"image_seq_len": 64, "fake_image_token": "", "global_image_token": ""}, {"return_row_col_info": True},
    ),
]  # fmt: skip


@functools.cache
def bind_case(number: int) -> Vision:
    case = CASES[number]
    return bind_vision(case.model_type, case.vision, **case.keys)


@pytest.mark.parametrize("size", SOME, ids=lambda size: "x".join(map(str, size)))
@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda number: f"{number}-{CASES[number].model_type}")
def test_tiles_and_tokens_equal_the_processor(number: int, size: tuple[int, int]) -> None:
    case = CASES[number]
    image_processor = load(case.family, case.image_processor, "image_processing_pil")(**case.preprocessor)
    made = image_processor(Image.new("RGB", size, (200, 10, 90)), return_tensors="np", **(case.call or {}))
    bare = make_bare(load(case.model_type, case.processor), image_processor=image_processor, **case.attributes)
    tokens = bare.replace_image_token(made, 0).replace("<IMG_ATOM>", "#").count("#")
    pixels = made["pixel_values"]
    grids, notes = bind_case(number).grids_of_pixels(*size, case.preprocessor)
    assert sum(t for t, _, _ in grids) == math.prod(pixels.shape[:-3])
    assert sum(map(bind_case(number).count_tokens, grids)) == tokens
    assert notes == []


def test_several_images_are_one_tile_each() -> None:
    vision = bind_vision("llava_onevision", tower("siglip_vision_model", 384, 14))
    grids, _ = vision.grids_of_pixels(1024, 768, None, images=2)
    assert grids == [(1, 27, 27)]
    processor = load("llava_onevision", "LlavaOnevisionImageProcessorPil", "image_processing_pil")()
    images = [[Image.new("RGB", (1024, 768)), Image.new("RGB", (640, 480))]]
    made = processor(images, return_tensors="np")
    bare = make_bare(
        load("llava_onevision", "LlavaOnevisionProcessor"),
        image_processor=processor,
        num_image_tokens=729,
        vision_aspect_ratio="anyres_max_9",
        vision_feature_select_strategy="full",
    )
    assert len(made["pixel_values"][0]) == 1
    assert vision.count_tokens(grids[0]) == len(bare.replace_image_token(made, 0)) == 730


@pytest.mark.parametrize("size", list_sizes(SIZES), ids=str)
@pytest.mark.parametrize("tiles", [4, 6])
def test_mllama_tiles(size: tuple[int, int], tiles: int) -> None:
    given = {"size": {"height": 560, "width": 560}, "max_image_tiles": tiles}
    made = load("mllama", "MllamaImageProcessorPil", "image_processing_pil")(**given)(
        [[Image.new("RGB", size)]], return_tensors="np"
    )
    ratios = [[wide, high] for wide in range(1, tiles + 1) for high in range(1, tiles // wide + 1)]
    keys = {"max_num_tiles": tiles, "supported_aspect_ratios": ratios}
    vision = bind_vision("mllama", tower("mllama_vision_model", 560, 14, **keys), text_config=TEXT)
    (grid,), _ = vision.grids_of_pixels(*size, given)
    assert grid[0] == made["num_tiles"][0][0] == made["aspect_ratio_mask"].sum()
    assert made["pixel_values"].shape[2] == tiles  # padded tiles are handed over, and run
    assert vision.count_tokens(grid) == 0


@pytest.mark.parametrize("size", list_sizes(SIZES), ids=str)
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("most", [490, 980])
def test_aria_squares(size: tuple[int, int], split: bool, most: int) -> None:
    given = {"max_image_size": most, "min_image_size": 336, "split_image": split}
    processor = load("aria", "AriaImageProcessorPil", "image_processing_pil")(**given)
    made = processor(Image.new("RGB", size), return_tensors="np")
    vision = bind_vision("aria", tower("idefics3_vision", 980, 14), text_config=TEXT)
    grids, _ = vision.grids_of_pixels(*size, given)
    # A patch is real if any of its pixels is.
    masks = made["pixel_mask"].reshape(-1, most // 14, 14, most // 14, 14).any(axis=(2, 4))
    assert [h * w for _, h, w in grids] == masks.sum(axis=(1, 2)).tolist()
    assert {max(h, w) for _, h, w in grids} == {most // 14}
    bare = make_bare(load("aria", "AriaProcessor"), size_conversion={490: 128, 980: 256})
    assert sum(map(vision.count_tokens, grids)) == len(bare.replace_image_token(made, 0))


@pytest.mark.parametrize("size", list_sizes(SIZES), ids=str)
@pytest.mark.parametrize("split", [False, True])
def test_idefics2_images(size: tuple[int, int], split: bool) -> None:
    given = {"size": {"shortest_edge": 378, "longest_edge": 980}, "do_image_splitting": split}
    processor = load("idefics2", "Idefics2ImageProcessorPil", "image_processing_pil")(**given)
    mask = processor([[Image.new("RGB", size)]], return_tensors="np")["pixel_attention_mask"][0]
    vision = bind_vision("idefics2", tower("idefics2_vision", 980, 14))
    grids, _ = vision.grids_of_pixels(*size, given)
    # A patch is real if all of its pixels are, as the model's forward has it.
    assert [(h, w) for _, h, w in grids] == [(int(m[:, 0].sum()) // 14, int(m[0].sum()) // 14) for m in mask]
    assert sum(map(vision.count_tokens, grids)) == 64 * len(mask)


# --- Processors that exist for torchvision alone: their arithmetic is read from the source --------------------------


def load_functions(model_type: str, *names: str) -> dict[str, Any]:
    """Functions and methods of these names, none of which needs torchvision."""
    import transformers
    from transformers.image_utils import SizeDict

    folder = Path(inspect.getfile(transformers)).parent / "models" / model_type
    tree = ast.parse((folder / f"image_processing_{model_type}.py").read_text())
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name in names]
    assert len(found) == len(names)
    scope: dict[str, Any] = {
        "np": np, "torch": torch, "math": math, "lru_cache": functools.lru_cache, "defaultdict": defaultdict,
        "SizeDict": SizeDict, "reduce": functools.reduce,
    }  # fmt: skip
    code = ast.parse("from __future__ import annotations")
    code.body += found
    exec(compile(ast.fix_missing_locations(code), model_type, "exec"), scope)
    return scope


@pytest.mark.parametrize("most", [1, 5, 12])
@pytest.mark.parametrize("size", list_sizes([*SIZES, (512, 512), (2048, 1024), (4000, 3000)]), ids=str)
def test_cohere2_canvas(size: tuple[int, int], most: int) -> None:
    scope = load_functions("cohere2_vision", "get_all_supported_aspect_ratios", "get_optimal_tiled_canvas")
    columns, rows = scope["get_optimal_tiled_canvas"](size[::-1], (512, 512), 1, most)
    vision = bind_vision("cohere2_vision", tower("siglip_vision_model", 512, 16))
    (grid,), _ = vision.grids_of_pixels(*size, {"size": {"height": 512, "width": 512}, "max_patches": most})
    tiles = columns * rows + (columns * rows > 1)
    assert grid[0] == tiles
    words = dict.fromkeys(("img_line_break_token", "boi_token", "eoi_token"), "")
    bare = make_bare(load("cohere2_vision", "Cohere2VisionProcessor"), patch_size=16, **words)
    assert vision.count_tokens(grid) == len(bare.replace_image_token({"num_patches": [tiles]}, 0))


@pytest.mark.parametrize("largest", [False, True])
@pytest.mark.parametrize("size", list_sizes([*SIZES, (672, 336), (1344, 1344), (4000, 3000)]), ids=str)
def test_llama4_canvas(size: tuple[int, int], largest: bool) -> None:
    scope = load_functions("llama4", "get_factors", "find_supported_resolutions", "get_best_fit")
    tile = scope["SizeDict"](height=336, width=336)
    possible = torch.tensor(scope["find_supported_resolutions"](max_num_chunks=16, patch_size=tile))
    height, width = scope["get_best_fit"](size[::-1], possible, resize_to_max_canvas=largest).tolist()
    ratio = (height // 336, width // 336)
    given = {"size": {"height": 336, "width": 336}, "max_patches": 16, "resize_to_max_canvas": largest}
    vision = bind_vision("llama4", tower("llama4_vision_model", 336, 14), text_config=TEXT)
    (grid,), _ = vision.grids_of_pixels(*size, given)
    assert grid[0] == math.prod(ratio) + (math.prod(ratio) > 1)
    bare = make_bare(load("llama4", "Llama4Processor"), patch_size=14, downsample_ratio=4)
    text = bare.replace_image_token({"pixel_values": [np.zeros((3, 336, 336))], "aspect_ratios": [ratio]}, 0)
    assert vision.count_tokens(grid) == text.count("<|patch|>")


@pytest.mark.parametrize("most", [4, 36])
@pytest.mark.parametrize("size", list_sizes([*SIZES, (448, 448), (4000, 3000), (300, 20000), (9000, 90)]), ids=str)
def test_perception_lm_tiles(size: tuple[int, int], most: int) -> None:
    names = (
        "_factors",
        "_find_supported_aspect_ratios",
        "_get_image_height_width",
        "_fit_image_to_canvas",
        "_find_closest_aspect_ratio",
    )
    scope = load_functions("perception_lm", *names)
    stand_in = type("Processor", (), {name: scope[name] for name in names} | {"max_num_tiles": most})()
    sizes = {"img_width": size[0], "img_height": size[1], "tile_size": 448}
    canvas = stand_in._fit_image_to_canvas(**sizes) or stand_in._find_closest_aspect_ratio(**sizes)
    arguments = {"embed_dim": 64, "depth": 1, "num_heads": 1, "img_size": [448, 448]}
    tower = {"model_type": "timm_wrapper", "architecture": "vit_pe_lang_large_patch14_448", "model_args": arguments}
    vision = bind_vision("perception_lm", tower, projector_pooling_ratio=2)
    (grid,), _ = vision.grids_of_pixels(*size, {"tile_size": 448, "max_num_tiles": most})
    assert grid[0] == math.prod(canvas) + 1
    bare = make_bare(load("perception_lm", "PerceptionLMProcessor"), patch_size=14, pooling_ratio=2)
    text = bare.replace_image_token({"pixel_values": [np.zeros((grid[0], 3, 448, 448), np.uint8)]}, 0)
    assert vision.count_tokens(grid) == len(text)


class BareImage:
    """Sides alone, as torchvision's resize and pad would leave them."""

    device = "cpu"

    def __init__(self, height: int, width: int) -> None:
        self.shape = (3, height, width)


@pytest.mark.parametrize("most", [4, 36])
@pytest.mark.parametrize(
    "size", list_sizes([*SIZES[:5], *SIZES[6:8], (448, 448), (449, 896), (4000, 3000), (9000, 500)]), ids=str
)
def test_phi4_multimodal_crops(size: tuple[int, int], most: int) -> None:
    scope = load_functions("phi4_multimodal", "find_closest_aspect_ratio", "dynamic_preprocess")
    resize = staticmethod(lambda _, sides: BareImage(*sides))
    pad = staticmethod(lambda image, by, **_: BareImage(image.shape[1] + by[3], image.shape[2] + by[2]))
    scope["tvF"] = type("tvF", (), {"resize": resize, "pad": pad})
    stand_in = type("Processor", (), {"find_closest_aspect_ratio": scope["find_closest_aspect_ratio"]})()
    image, mask = scope["dynamic_preprocess"](stand_in, BareImage(*size[::-1]), 448, 14, 32, max_num=most)
    keys = {"model_type": "phi4_multimodal", **TEXT, "vision_config": {}, "audio_config": {}, "num_key_value_heads": 1}
    vision = bind(keys).vision
    assert vision is not None
    (grid,), _ = vision.grids_of_pixels(*size, {"dynamic_hd": most})
    tiles = mask.reshape(len(mask) // 32, 32, -1, 32).transpose(1, 2).reshape(-1, 32, 32)
    assert grid == (1 + len(tiles), int(mask[:, 0].sum()), int(mask[0].sum()))
    assert vision.count_tokens(grid) == 256 + 1 + 16 + int(mask[::2, ::2].sum()) + int(mask[::2, 0].sum())
    # A batch says the same: the image's pixels, and the mask of all tiles, padded to the most that an image has.
    masks = torch.cat([torch.ones(1, 32, 32), tiles, torch.ones(2, 32, 32)])[None]
    batch = {"image_sizes": torch.tensor([image.shape[1:]]), "image_attention_mask": masks}
    assert vision.read_sizes(batch, True) == (grid,)


def test_a_batch_says_its_tiles() -> None:
    ids = torch.zeros(2, 3000, dtype=torch.long)
    config = {"model_type": "llava_next", "vision_config": tower("clip_vision_model", 336, 14)}
    bound = bind({**config, "text_config": {"model_type": "llama", **TEXT}})
    assert bound.vision is not None
    pixels = torch.zeros(2, 5, 3, 336, 336, device="meta")  # padded to the most tiles; the model drops the padding
    batch = {"input_ids": ids, "pixel_values": pixels, "image_sizes": torch.tensor([[768, 1024], [300, 700]])}
    grids = [bound.vision.grid_of_pixels(w, h, None)[0] for h, w in ((768, 1024), (300, 700))]
    assert [grid[0] for grid in grids] == [5, 4]
    assert bound(batch=batch).total == bound(2, 3000, image_grid_thw=grids).total


def test_a_batch_of_padded_tiles() -> None:
    vision = tower("mllama_vision_model", 28, 14, attention_heads=2, max_num_tiles=4)
    bound = bind({"model_type": "mllama", "vision_config": vision, "text_config": TEXT})
    mask = torch.tensor([[[1, 1, 0, 0]], [[1, 1, 1, 0]]])
    batch = {
        "input_ids": torch.zeros(2, 9, dtype=torch.long),
        "aspect_ratio_mask": mask,
        "pixel_values": torch.zeros(2, 1, 4, 3, 28, 28),
    }
    assert bound(batch=batch).total == bound(2, 9, image_grid_thw=[[2, 2, 2], [3, 2, 2]]).total


def test_what_cannot_be_cut_is_refused() -> None:
    vision = bind_case(0)
    with pytest.raises(WorkloadError, match="nothing of it is left"):
        vision.grids_of_pixels(1, 5000, None)
    with pytest.raises(WorkloadError, match="'anyres' cannot cut it with"):
        vision.grids_of_pixels(640, 480, {"image_grid_pinpoints": 5})
