"""Image classifiers: published sizes, images as their processors cut them, and configs that are refused in words."""

from __future__ import annotations

from typing import Any

import pytest

from flopcalc import Lora, bind
from flopcalc.base.errors import FlopcalcError

LABELS = {"id2label": {str(i): str(i) for i in range(1000)}}


# Parameters and multiply-adds of the config class's defaults: published sizes of MobileViT-S, MobileViTv2-1.0, BiT-50,
# CvT-13 at 384, LeViT's default, PVTv2-B0, FocalNet-T, SwiftFormer-XS, DiNAT-Mini, PP-LCNet x1.0, iGPT-S; timm's own.
@pytest.mark.parametrize(
    ("config", "grid", "parameters", "macs"),
    [
        ({"model_type": "mobilevit"}, (1, 256, 256), 5_578_632, 2_000_831_488),
        ({"model_type": "mobilevitv2"}, (1, 256, 256), 4_901_841, 1_812_090_880),
        ({"model_type": "bit"}, (1, 224, 224), 25_549_352, 4_089_184_256),
        ({"model_type": "cvt"}, (1, 384, 384), 19_997_480, 16_269_359_616),
        ({"model_type": "levit"}, (1, 14, 14), 8_828_168, 404_937_728),
        ({"model_type": "pvt_v2"}, (1, 224, 224), 3_666_760, 566_065_664),
        ({"model_type": "focalnet"}, (1, 224, 224), 28_427_116, 4_403_335_680),
        ({"model_type": "swiftformer"}, (1, 224, 224), 3_475_360, 602_434_988),
        ({"model_type": "dinat"}, (1, 224, 224), 19_984_174, 2_694_812_672),
        ({"model_type": "textnet"}, (1, 640, 864), 11_217_832, 25_932_124_160),
        ({"model_type": "pp_lcnet"}, (1, 224, 224), 2_952_520, 155_700_480),
        ({"model_type": "hgnet_v2"}, (1, 224, 224), 15_602_376, 2_729_954_048),
        ({"model_type": "imagegpt"}, (1, 32, 32), 76_932_096, 90_207_408_128),
        ({"model_type": "timm_wrapper", "num_classes": 1000}, (1, 224, 224), 25_557_032, 4_089_184_256),
        (
            {"model_type": "timm_wrapper", "num_classes": 1000, "architecture": "vit_base_patch16_384"},
            (1, 384, 384),
            86_859_496,
            55_484_350_464,
        ),
    ],
)
def test_published_sizes(config: dict[str, Any], grid: tuple[int, int, int], parameters: int, macs: int) -> None:
    model = bind({**LABELS, **config})
    assert model.cut_images([(640, 480)])[0] == [grid]
    assert model.parameters()["total"] == parameters
    assert model(images=[(640, 480)], phase="forward").total == 2 * macs


@pytest.mark.parametrize(
    ("kind", "classes"),
    [
        ("mobilevitv2", "MobileViTV2"),
        ("imagegpt", "ImageGPT"),
        ("donut-swin", "DonutSwin"),
        ("timm_wrapper", "TimmWrapper"),
    ],
)
def test_architectures_decide(kind: str, classes: str) -> None:
    head = bind({"model_type": kind, "architectures": [f"{classes}ForImageClassification"]})
    body = bind({"model_type": kind, "architectures": [f"{classes}Model"]})
    assert (head.spec.name, body.spec.name) == (kind, f"{kind}-body")
    assert body.parameters()["total"] < head.parameters()["total"]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "mobilevit", "conv_kernel_size": 4}, "conv_kernel_size must be odd"),
        ({"model_type": "mobilevitv2", "n_attn_blocks": [2, 9, 3]}, "n_attn_blocks: at most 8 blocks"),
        ({"model_type": "bit", "global_padding": "valid"}, "global_padding valid: HF's layers add"),
        ({"model_type": "bit", "width_factor": 2}, "width_factor: the last of hidden_sizes"),
        ({"model_type": "cvt", "cls_token": [False, False, False]}, "cls_token must be true for the last stage"),
        ({"model_type": "cvt", "qkv_projection_method": ["avg", "dw_bn", "dw_bn"]}, "qkv_projection_method must be"),
        ({"model_type": "cvt", "depth": [1, 2, 2]}, "depth: HF's code needs more layers"),
        ({"model_type": "levit", "patch_size": 8}, "kernel_size, stride and padding must make"),
        ({"model_type": "focalnet", "focal_windows": [4, 3, 3, 3]}, "focal_windows must be odd"),
        ({"model_type": "dinat", "patch_size": 8}, "patch_size must be 4"),
        ({"model_type": "hgnet_v2", "stem_strides": [2, 2, 1, 2, 1]}, "stem_strides must be 1 in its second"),
        ({"model_type": "textnet", "conv_layer_kernel_sizes": [[[2, 3]]]}, "hidden_sizes one more"),
        (
            {
                "model_type": "textnet",
                "conv_layer_kernel_sizes": [[3]],
                "conv_layer_strides": [[1]],
                "hidden_sizes": [64, 64],
            },
            "pairs of odd numbers",
        ),
        ({"model_type": "textnet", "conv_layer_kernel_sizes": [3]}, "a list for each stage"),
        (
            {
                "model_type": "textnet",
                "conv_layer_kernel_sizes": [[[3, 3]]],
                "conv_layer_strides": [[0]],
                "hidden_sizes": [64, 64],
            },
            "whole numbers above 0",
        ),
        ({"model_type": "pp_lcnet", "block_configs": [[[3, 16, 32, 1]]] * 5}, "lists of an odd kernel"),
        ({"model_type": "pp_lcnet", "block_configs": [[[3, 64, 64, 1, False]]] * 5}, "the one before has 16"),
        ({"model_type": "imagegpt", "add_cross_attention": True}, "add_cross_attention is not described"),
        ({"model_type": "timm_wrapper", "architecture": "convnext_base"}, "architecture: only plain ResNets"),
        ({"model_type": "timm_wrapper", "model_args": {"depth": 3}}, "model_args are not described"),
    ],
)
def test_refused(config: dict[str, Any], words: str) -> None:
    with pytest.raises(FlopcalcError, match=words):
        bind(config)


def test_a_config_of_timm_names_no_type() -> None:
    config = {"architecture": "resnet18", "num_classes": 1000, "pretrained_cfg": {"input_size": [3, 288, 288]}}
    found = bind(config)(images=[(640, 480)], phase="forward")
    assert any("taken as timm_wrapper" in note for note in found.notes)
    same = bind({"model_type": "timm_wrapper", **config})
    assert found.total == same(image_grid_thw=[[1, 288, 288]], phase="forward").total


def test_patches_cover_an_image_that_they_do_not_fit() -> None:
    swin = bind({"model_type": "swin", "image_size": 225})
    assert swin.cut_images([(640, 480)])[0] == [(1, 57, 57)]


@pytest.mark.parametrize(("images", "grids"), [([(1000, 333)], [(1, 640, 1952)]), ([(320, 641)], [(1, 1312, 640)])])
def test_textnet_rounds_sides_up(images: list[tuple[int, int]], grids: list[tuple[int, int, int]]) -> None:
    assert bind({"model_type": "textnet"}).cut_images(images)[0] == grids


def test_a_stage_is_one_to_checkpointing() -> None:
    """LoRA adapts only the last block of a stage; checkpointing runs the frozen blocks before it again."""
    config = {"model_type": "swiftformer", "depths": [2, 1], "embed_dims": [6, 8]}
    recipe = {"lora": Lora(3, "all-linear"), "recompute": "full", "convention": "hardware"}
    step = bind(config, **recipe)(images=[(64, 64)])
    rows = {row.path: row.recompute for row in step.by_module()}
    assert rows["swiftformer.encoder.network.0.blocks.0.depth_wise_conv"] == 2 * 56**2 * 9 * 6
