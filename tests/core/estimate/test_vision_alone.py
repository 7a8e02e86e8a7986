"""Models of images alone: their workload is images, and what has no meaning for them is refused in words."""

from __future__ import annotations

from typing import Any

import pytest

from flopcalc import bind, estimate_flops, plan, predict
from flopcalc.base.errors import FlopcalcError
from flopcalc.core.estimate.inputs import Inputs, make_load

VIT = {
    "model_type": "vit", "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 34,
    "image_size": 14, "patch_size": 4, "id2label": {str(i): str(i) for i in range(5)},
}  # fmt: skip
TOWER = {"hidden_size": 24, "intermediate_size": 34, "num_hidden_layers": 1, "num_attention_heads": 3}
CLIP = {
    "model_type": "clip",
    "projection_dim": 18,
    "vision_config": {**TOWER, "image_size": 12, "patch_size": 4},
    "text_config": {**TOWER, "vocab_size": 99, "max_position_embeddings": 16},
}


def test_images_are_the_workload() -> None:
    two = estimate_flops(VIT, images=[(640, 480), (20, 20)], phase="forward")
    one = bind(VIT)(image_grid_thw=[[1, 3, 3]], phase="forward")
    assert (two.total, two.tokens, two.describe()) == (2 * one.total, 0, "forward, 2 images")
    rows = {row.path: row.forward for row in one.by_module()}
    assert rows["classifier"] == 2 * 24 * 5
    assert rows["vit.layers.*.mlp.fc1"] == 2 * 2 * 10 * 24 * 34
    assert two.to_dict()["workload"]["images"] == 2


def test_architectures_name_the_head() -> None:
    body = bind({**VIT, "architectures": ["ViTModel"]})
    assert (body.spec.name, body.spec.architecture) == ("vit-body", "ViTModel")
    assert body.parameters()["total"] - bind(VIT).parameters()["total"] == 24 * 25 - 5 * 25  # pooler, classifier


def test_a_batch_of_pixels() -> None:
    torch = pytest.importorskip("torch")
    whole = bind(VIT)(image_grid_thw=[[1, 3, 3]] * 4)
    assert bind(VIT)(batch={"pixel_values": torch.zeros(4, 3, 14, 14)}).total == whole.total
    assert bind(CLIP)(batch={"pixel_values": torch.zeros(2, 3, 12, 12)}).total == bind(CLIP)(images=[(9, 9)] * 2).total


def test_text_of_two_towers_is_optional() -> None:
    clip = bind(CLIP)
    alone = clip(images=[(30, 20)], phase="forward")
    both = clip(2, 7, images=[(30, 20)] * 2, phase="forward")
    assert any("no text given" in note for note in alone.notes)
    rows = {row.path: row.forward for row in both.by_module()}
    assert rows[""] == 2 * 18 * 2 * 2
    assert rows["text_projection"] == 2 * 2 * 24 * 18
    assert 2 * alone.total == sum(flops for path, flops in rows.items() if path.startswith("vis"))


@pytest.mark.parametrize(
    ("config", "sizes", "words"),
    [
        (VIT, {"seq_len": 8, "image_grid_thw": [[1, 3, 3]]}, "takes images alone: leave seq_len out"),
        (VIT, {"seq_len": 8}, 'takes images: give images=."WxH".'),
        (VIT, {}, "seq_len is missing"),
        (VIT, {"batch_size": 3, "image_grid_thw": [[1, 3, 3]]}, "3 samples need an image each: 1 given"),
        (VIT, {"image_grid_thw": [[1, 3, 3]], "phase": "prefill"}, "there is no phase prefill"),
        (CLIP, {"seq_len": 8, "phase": "decode"}, "there is no phase decode"),
        (CLIP, {"image_grid_thw": [[1, 4, 4]]}, "takes images of one size, 1,3,3"),
    ],
)
def test_refused(config: dict[str, Any], sizes: dict[str, Any], words: str) -> None:
    with pytest.raises(FlopcalcError, match=words):
        bind(config)(**sizes)


def test_what_is_counted_in_tokens() -> None:
    step = estimate_flops(VIT, images=[(9, 9)])
    found = predict(VIT, device="h100-sxm", images=[(9, 9)])
    assert (found.tokens_per_s, found.rate) == (None, (1 / found.step_time_s.mid, "samples"))
    assert "samples/s" in repr(found)
    with pytest.raises(FlopcalcError, match="a plan is counted in tokens"):
        plan(VIT, tokens="1B", device="h100-sxm", gpus=8, workload=step.terms[0].load)
    assert step.per_token == 0


def test_detectors_pad_to_the_largest_image() -> None:
    config = {
        "model_type": "yolos",
        **TOWER,
        "image_size": [12, 12],
        "patch_size": 4,
        "num_detection_tokens": 6,
        "architectures": ["YolosModel"],
    }
    rows = {}
    for convention in ("model", "full"):
        step = bind(config, convention=convention)(image_grid_thw=[[1, 3, 2], [1, 2, 5]], phase="forward")
        rows[convention] = {row.path: row.forward for row in step.by_module()}
    fc1 = "encoder.layer.*.intermediate.dense"
    assert rows["model"][fc1] == 2 * 24 * 34 * (6 + 7 + 10 + 7)
    assert rows["full"][fc1] == 2 * 24 * 34 * 2 * (15 + 7)
    assert rows["full"]["encoder.layer.*.attention.attention"] == 4 * 24 * 2 * (15 + 7) ** 2


VIDEOMAE = {"model_type": "videomae", **TOWER, "image_size": 12, "patch_size": 4, "num_frames": 4, "num_labels": 5}


def test_clips_are_the_workload_of_models_of_videos() -> None:
    torch = pytest.importorskip("torch")
    model = bind(VIDEOMAE)
    step = model(video_grid_thw=[[2, 3, 3]], phase="forward")
    rows = {row.path: row.forward for row in step.by_module()}
    assert rows["videomae.encoder.layer.*.attention.attention"] == 4 * 24 * 18**2
    assert rows["classifier"] == 2 * 24 * 5
    two = model(batch={"pixel_values": torch.zeros(2, 4, 3, 12, 12)}, phase="forward")
    assert (two.total, two.describe()) == (2 * step.total, "forward, 2 clips")


def test_a_class_that_no_config_describes_is_refused() -> None:
    named = {**VIDEOMAE, "architectures": ["VideoMAEForPreTraining"]}
    with pytest.raises(FlopcalcError, match=r"VideoMAEForPreTraining is not described: .*bool_masked_pos"):
        bind(named)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"images": [(12, 12)]}, 'takes videos: give videos=."WxHxFRAMES".'),
        ({"seq_len": 8}, 'takes videos: give videos=."WxHxFRAMES".'),
        ({"video_grid_thw": [[1, 3, 3]]}, "video grid 1,3,3: this model takes videos of one size, 2,3,3"),
    ],
)
def test_models_of_videos_refuse(sizes: dict[str, Any], words: str) -> None:
    with pytest.raises(FlopcalcError, match=words):
        bind(VIDEOMAE)(**sizes)


def test_every_patch_is_compared_with_the_texts() -> None:
    rows = {
        row.path: row.forward
        for row in bind({**CLIP, "model_type": "owlv2", "projection_dim": 24})(
            4, 7, images=[(30, 20)] * 2, phase="forward"
        ).by_module()
    }
    assert rows["class_head"] == 2 * 24 * 9 * 4  # nine patches an image; two texts each
    assert rows["objectness_head.dense2"] == 2 * 24 * 9 * 2


# --- towers inside other models ---------------------------------------------------------------------------------------
TEXT = {
    "num_hidden_layers": 2,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 101,
}


def make_llava(tower: str, text: str, **more: Any) -> dict[str, Any]:
    vision = {"model_type": tower, **TOWER, "image_size": 12, "patch_size": 4}
    return {
        "model_type": "llava",
        "vision_feature_select_strategy": "full",
        "vision_config": {**vision, **more},
        "text_config": {"model_type": text, **TEXT},
    }


def test_images_are_cut_as_the_tower_does() -> None:
    llava = bind(make_llava("pixtral", "llama", patch_size=16))
    assert llava.cut_images([(768, 512)])[0] == [(1, 32, 48)]
    assert llava(1, 1600, image_grid_thw=[[1, 32, 48]]).to_dict()["workload"]["visual_tokens"] == 32 * 48
    fixed = bind(make_llava("clip_vision_model", "llama"))
    assert fixed.cut_images([(768, 512)])[0] == [(1, 3, 3)]
    assert fixed.vision is not None
    assert fixed.vision.count_tokens((1, 3, 3)) == 10
    naflex = bind(make_llava("siglip2_vision_model", "llama", num_patches=64))
    assert naflex.cut_images([(768, 512)])[0] == [(1, 6, 9)]


@pytest.mark.parametrize(("text", "is_tied"), [("llama", False), ("gemma", True), ("gemma2", True)])
def test_a_head_is_tied_as_the_text_model_says(text: str, is_tied: bool) -> None:
    rows = {row.path: row for row in bind(make_llava("siglip_vision_model", text))(1, 8).by_module()}
    assert rows["lm_head"].forward == 2 * 8 * 24 * 101
    assert rows["lm_head"].parameters == (0 if is_tied else 24 * 101)


def test_a_tower_without_layers_to_read_is_refused() -> None:
    with pytest.raises(FlopcalcError, match="has no hidden states for 'llava' to read"):
        bind(make_llava("swin", "llama", num_attention_heads=[3, 6, 12, 24]))


@pytest.mark.parametrize("model_type", ["convnext", "resnet", "regnet"])
def test_a_shortest_side_means_a_square(model_type: str) -> None:
    model = bind({"model_type": model_type, "hidden_sizes": [8, 12], "depths": [1, 1], "num_stages": 2})
    sides = 56 if model_type == "convnext" else 384  # the default of ConvNextImageProcessor, which both others use
    grid = model(image_grid_thw=[[1, sides, sides]], phase="forward")
    assert model(images=[(640, 480)], phase="forward").total == grid.total


def test_a_live_model_may_have_empty_parameters() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.DINOv3ViTConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_register_tokens=0,
        image_size=32,
        patch_size=8,
    )
    live = bind(transformers.DINOv3ViTModel(config))(images=[(32, 32)])
    assert live.total == bind({**config.to_dict(), "architectures": ["DINOv3ViTModel"]})(images=[(32, 32)]).total


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        (Inputs(), 'takes images: give images=."WxH".'),
        (Inputs(phase="decode"), 'takes images: give images=."WxH".'),
        (Inputs(phase="decode", image=((64, 64),)), "there is no phase decode; forward is one pass"),
    ],
)
def test_what_a_model_of_images_asks_for(inputs: Inputs, words: str) -> None:
    """It has no language model, whose seq or context could be asked for."""
    estimator = bind(VIT)
    with pytest.raises(FlopcalcError, match=words):
        estimator.estimate(make_load(estimator, inputs)[0])


def test_an_image_that_the_processor_cuts_to_nothing() -> None:
    with pytest.raises(FlopcalcError, match="an image of 99999x1 is too thin"):
        estimate_flops({"model_type": "mask2former"}, images=[(99999, 1)])


@pytest.mark.parametrize("sizes", [{}, {"images": [(64, 64)]}])
def test_a_plan_is_counted_in_tokens(sizes: dict[str, Any]) -> None:
    with pytest.raises(FlopcalcError, match=r"this sample has images alone$"):
        plan(VIT, tokens=1e9, device="h200", gpus=8, **sizes)
