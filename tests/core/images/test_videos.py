"""Videos become grids as transformers' video processors cut them; their own resizing functions are the witness."""

from __future__ import annotations

import ast
import importlib.util
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest

from flopcalc import FlopcalcError, WorkloadError, bind
from flopcalc.base.data import list_data_files
from flopcalc.base.errors import ConfigError
from flopcalc.core.images.videos import Video, cut_video, load_processors, parse_video
from flopcalc.core.images.vision import Vision
from flopcalc.core.model.config import load_config
from flopcalc.core.spec.spec import find_spec

SIZES = [(1280, 720), (640, 480), (33, 1000), (30, 20), (1920, 1080), (224, 224), (97, 113)]
FRAMES = [2, 3, 5, 8, 16, 61, 180]


def make_vision(patch: int = 14, merge: int = 2, side: int = 27) -> Vision:
    return Vision("grid", merge, patch, side, 0, True)


# --- what is written --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "video"),
    [
        ("30s@2fps", Video("30s@2fps", 60, is_sampled=True)),
        ("30@2", Video("30@2", 60, is_sampled=True)),
        ("1.5min@0.5fps", Video("1.5min@0.5fps", 45, is_sampled=True)),
        ("100s@0.57fps", Video("100s@0.57fps", 57, is_sampled=True)),  # floats would give 56
        ("1280x720:10s@1fps", Video("1280x720:10s@1fps", 10, 1280, 720, is_sampled=True)),
        ("640x480x16", Video("640x480x16", 16, 640, 480)),
        (" 640X480X16 ", Video("640X480X16", 16, 640, 480)),
    ],
)
def test_parse(text: str, video: Video) -> None:
    assert parse_video(text) == video


@pytest.mark.parametrize(
    "text",
    [
        "",
        "10",
        "640x480",
        "30s",
        "@2fps",
        "30s@",
        "30s@0fps",
        "-5s@2fps",
        "0x480x3",
        "640x480x0",
        "1s@0.1fps",
        "axbxc",
        "30s@2fps@3",
        "640x480:640x480:3s@1fps",
        "9999999999999s@9fps",
        "30k@2fps",
    ],
)
def test_parse_refuses(text: str) -> None:
    with pytest.raises(FlopcalcError) as caught:
        parse_video(text)
    assert len(str(caught.value)) < 200


# --- against transformers ---------------------------------------------------------------------------------------------
def load_function(model: str, kind: str, name: str) -> Any:
    """A function of a processor's file, without importing the file: that needs torchvision."""
    found = importlib.util.find_spec("transformers")
    if found is None or found.origin is None:
        pytest.skip("transformers is not installed")
    path = Path(found.origin).parent / "models" / model / f"{kind}_processing_{model}.py"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    chosen = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    space: dict[str, Any] = {"math": math, "itertools": itertools}
    exec(compile(ast.Module(chosen, []), str(path), "exec"), space)
    return space[name]


@pytest.mark.parametrize("frames", FRAMES)
@pytest.mark.parametrize(
    ("model", "patch"), [("qwen3_vl", 16), ("glm4v", 14), ("glm46v", 14), ("cosmos3_edge", 16), ("cohere_compass", 16)]
)
def test_limits_of_the_whole_video(model: str, patch: int, frames: int) -> None:
    smart_resize = load_function(model, "video", "smart_resize")
    values = load_processors()[model].read_values(None)
    temporal = values["temporal_patch_size"]
    for width, height in SIZES:
        high, wide = smart_resize(
            frames,
            height,
            width,
            temporal_factor=temporal,
            factor=2 * patch,
            min_pixels=values["min_pixels"],
            max_pixels=values["max_pixels"],
        )
        grids, notes = cut_video(Video("v", frames, width, height), make_vision(patch), model)
        assert grids == [(-(-frames // temporal), high // patch, wide // patch)]
        assert f"video v: {frames} frames of {wide}x{high} pixels" in notes


@pytest.mark.parametrize("frames", FRAMES)
@pytest.mark.parametrize(
    ("model", "family", "kind", "temporal"),
    [
        ("qwen2_vl", "qwen2_vl", "video", 2),
        ("qwen2_5_vl", "qwen2_vl", "video", 2),
        ("ernie4_5_vl_moe", "ernie4_5_vl_moe", "image", 1),
        ("video_llama_3", "video_llama_3", "video", 1),
    ],
)
def test_limits_of_each_frame(model: str, family: str, kind: str, temporal: int, frames: int) -> None:
    smart_resize = load_function(family, kind, "smart_resize")
    values = load_processors()[model].read_values(None)
    most = values["max_pixels"] // (frames if model == "video_llama_3" else 1)
    patches = frames + frames % 2 if model == "ernie4_5_vl_moe" else -(-frames // temporal)
    for width, height in SIZES:
        if most < values["min_pixels"] and width * height < values["min_pixels"]:
            continue  # more frames than such limits are made for
        high, wide = smart_resize(height, width, factor=28, min_pixels=values["min_pixels"], max_pixels=most)
        grids, _ = cut_video(Video("v", frames, width, height), make_vision(), model)
        assert grids == [(patches, high // 14, wide // 14)]


@pytest.mark.parametrize("frames", [1, 4, 6])
def test_chunks(frames: int) -> None:
    navit_resize = load_function("kimi_k25", "video", "navit_resize")
    for width, height in SIZES:
        _, (high, wide) = navit_resize(height, width, 14, 2, 4096, 512)
        grids, _ = cut_video(Video("v", frames, width, height), make_vision(), "kimi_k25")
        chunks = [4] * (frames // 4) + [frames % 4] * (frames % 4 > 0)
        assert grids == [(chunk, high // 14, wide // 14) for chunk in chunks]


def test_nearest_aspect() -> None:
    smart_resize = load_function("muse_glimmer", "video", "smart_resize")
    for width, height in SIZES:
        high, wide = smart_resize(height, width, patch_size=28, max_tokens=144)
        grids, _ = cut_video(Video("v", 7, width, height), make_vision(), "muse_glimmer")
        assert grids == [(4, high // 14, wide // 14)]


def test_every_processor_is_of_a_type_that_takes_videos() -> None:
    for model in load_processors():
        spec = find_spec(model)
        assert spec is not None, model
        assert spec.vision["videos"] == "true", model
    takers = {
        name
        for name, path in list_data_files("specs").items()
        if (spec := find_spec(name)) is not None and spec.vision.get("videos") == "true" and not spec.is_tower and path
    }
    assert set(load_processors()) <= takers


# --- sampling, sizes that are not said, limits of a config ------------------------------------------------------------
@pytest.mark.parametrize(
    ("model", "text", "t", "words"),
    [
        ("qwen2_vl", "61s@1fps", 30, "60 frames of"),  # sampled down to whole temporal patches
        ("qwen2_vl", "448x448x61", 31, "61 frames of"),  # the last frame is repeated
        ("qwen3_vl", "448x448:61s@1fps", 31, "61 frames of"),
        ("qwen2_vl", "1s@2fps", 2, "2 frames asked for, 4 is the processor's least"),
        ("qwen2_vl", "1h@1fps", 384, "3600 frames asked for, 768 is the processor's most"),
        ("muse_glimmer", "1h@1fps", 48, "96 is the processor's most"),
        ("smolvlm", "10s@2fps", 20, "20 frames, each resized to one square"),
    ],
)
def test_frames(model: str, text: str, t: int, words: str) -> None:
    grids, notes = cut_video(parse_video(text), make_vision(), model)
    assert grids[0][0] == t
    assert any(words in note for note in notes)


@pytest.mark.parametrize(
    ("model", "preprocessor", "most", "size"),
    [
        ("qwen2_vl", None, None, (54, 54)),  # 768 tokens a frame
        ("qwen2_vl", {"max_pixels": 28 * 28 * 100, "min_pixels": 28 * 28}, None, (20, 20)),
        ("qwen2_vl", {"max_pixels": 12845056, "min_pixels": 3136}, None, (56, 56)),  # an image's limits
        ("qwen2_vl", None, 28 * 28 * 144, (24, 24)),
        ("qwen3_vl", {"size": {"longest_edge": 60 * 28 * 28 * 100, "shortest_edge": 784}}, None, (20, 20)),
        ("kimi_k25", None, None, (64, 64)),
        ("muse_glimmer", None, None, (24, 24)),
    ],
)
def test_without_a_size(model: str, preprocessor: Any, most: int | None, size: tuple[int, int]) -> None:
    grids, notes = cut_video(parse_video("30s@2fps"), make_vision(), model, preprocessor, most)
    assert grids[0][1:] == size
    assert any("no size given, the largest that the processor keeps: 60 frames of" in note for note in notes)
    assert any("class's defaults" in note for note in notes) == (preprocessor is None)


@pytest.mark.parametrize(
    ("model", "video", "arguments", "error", "words"),
    [
        ("glm5_next", "30s@2fps", {}, WorkloadError, r"give video_grid_thw=\[\(T,H,W\)\] instead"),
        ("smolvlm", "30s@2fps", {"max_pixels": 9}, WorkloadError, "video processor has no such limit"),
        ("qwen2_vl", "30s@2fps", {"max_pixels": 9}, WorkloadError, "below the video processor's min_pixels, 100352"),
        ("qwen3_vl", "64x64x1", {}, WorkloadError, "at least 2 frames here, not 1"),
        ("qwen2_vl", "64x64x2", {"preprocessor": {"max_pixels": "many"}}, ConfigError, "positive whole number"),
        ("qwen2_vl", "4000x10x2", {}, WorkloadError, "more than 200 times"),
    ],
)
def test_refused(model: str, video: str, arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        cut_video(parse_video(video), make_vision(), model, **arguments)


def test_files_of_a_folder(tmp_path: Path) -> None:
    """A video processor's own file wins; without one transformers reads the image processor's."""
    config = {"model_type": "qwen2_vl", "hidden_size": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_config(tmp_path).video_preprocessor is None
    (tmp_path / "preprocessor_config.json").write_text('{"max_pixels": 5}')
    assert load_config(tmp_path).video_preprocessor == {"max_pixels": 5}
    (tmp_path / "video_preprocessor_config.json").write_text('{"max_pixels": 6}')
    source = load_config(tmp_path)
    assert (source.preprocessor, source.video_preprocessor) == ({"max_pixels": 5}, {"max_pixels": 6})


def test_presets_with_published_video_limits() -> None:
    estimator = bind("qwen3-vl-4b")
    assert estimator.vision is not None
    grids, notes = cut_video(
        parse_video("1280x720:30s@2fps"), estimator.vision, "qwen3_vl", estimator.source.video_preprocessor
    )
    # 25,165,824 pixels for 60 frames: 1280x720 shrinks to multiples of 32 within 419,430 pixels a frame.
    assert grids == [(30, 30, 52)]
    assert not any("defaults" in note for note in notes)
