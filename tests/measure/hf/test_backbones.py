"""Models over backbones that a config leaves out, or of other types: equal to HF's trace, or refused in words."""

from __future__ import annotations

from typing import Any

import pytest
from tiers import mark_heavy, thin

from flopcalc import bind
from flopcalc.base.errors import ConfigError
from flopcalc.measure.hf.examples import find_example
from flopcalc.measure.hf.verify import prepare, verify

Json = dict[str, Any]
HYBRID: Json = {
    "model_type": "dpt", "is_hybrid": True, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
    "intermediate_size": 48, "image_size": 64, "backbone_out_indices": [0, 1, 2, 3], "fusion_hidden_size": 12,
    "neck_hidden_sizes": [256, 512, 16, 20],
}  # fmt: skip

STAGES = ["stage1", "stage2", "stage3", "stage4"]
DINO: Json = {
    "model_type": "dinov2", "hidden_size": 24, "num_hidden_layers": 5, "num_attention_heads": 3, "image_size": 28,
    "patch_size": 4, "out_features": STAGES, "reshape_hidden_states": False,
}  # fmt: skip
BEIT: Json = {
    **DINO,
    "model_type": "beit",
    "intermediate_size": 34,
    "out_features": ["stage1", "stage2", "stage3", "stage5"],
}
SWIN: Json = {
    "model_type": "swinv2", "embed_dim": 12, "depths": [1, 2, 1, 2], "num_heads": [1, 2, 2, 4], "window_size": 4,
    "image_size": 64, "patch_size": 4, "out_features": STAGES,
}  # fmt: skip
DPT: Json = {"model_type": "dpt", "neck_hidden_sizes": [6, 10, 14, 18], "fusion_hidden_size": 8}
NULLS = dict.fromkeys(  # in published configs
    (
        "num_hidden_layers",
        "num_attention_heads",
        "intermediate_size",
        "image_size",
        "patch_size",
        "num_channels",
        "qkv_bias",
        "hidden_dropout_prob",
        "backbone_out_indices",
    )
)


# Backbones of four stages, the pixels of a patch of the workload, and an image.
WIDE: Json = {"embed_dim": 8, "depths": [1, 2, 1, 1], "num_heads": [1, 2, 2, 4], "out_features": STAGES}
DEEP: Json = {"hidden_sizes": [8, 12, 16, 20], "depths": [1, 2, 1, 1], "out_features": STAGES}
BACKBONES: list[tuple[Json, int, list[int]]] = [
    ({**WIDE, "model_type": "swin", "window_size": 3, "image_size": 32}, 4, [1, 9, 11]),
    ({**WIDE, "model_type": "swinv2", "window_size": 4, "image_size": 64}, 4, [1, 16, 13]),
    ({**WIDE, "model_type": "dinat", "kernel_size": 3, "dilations": [[1], [1, 2], [1], [1]]}, 1, [1, 67, 45]),
    ({**DEEP, "model_type": "convnext"}, 4, [1, 17, 11]),
    ({**DEEP, "model_type": "convnextv2"}, 4, [1, 17, 11]),
    ({**DEEP, "model_type": "resnet", "embedding_size": 6}, 1, [1, 67, 45]),
    ({**DEEP, "model_type": "resnet", "embedding_size": 6, "layer_type": "basic"}, 1, [1, 64, 96]),
    (
        {**DEEP, "model_type": "pvt_v2", "num_attention_heads": [1, 2, 2, 4], "mlp_ratios": [2, 2, 2, 2]},
        1,
        [1, 67, 45],
    ),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("frozen", mark_heavy([False, True], [True]))
@pytest.mark.parametrize(("backbone", "cell", "grid"), thin(BACKBONES, 5))
@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("upernet", "backbone"),
        ("maskformer", "model.pixel_level_module.encoder"),
        ("mask2former", "model.pixel_level_module.encoder"),
    ],
)
def test_segmentation_over_a_backbone_equals_hf(
    name: str, path: str, backbone: Json, cell: int, grid: list[int], frozen: bool
) -> None:
    prepare()
    example = find_example(name)
    shapes = {"pixel_values": ["images", "3"], "labels": ["images"]}
    inputs = {
        key: {**entry, "shape": [*shapes[key], f"height * {cell}", f"width * {cell}"]}
        for key, entry in example.inputs.items()
    }
    kernels = find_example(backbone["model_type"]).kernels
    third = backbone.get("hidden_sizes", [0, 0, 32])[2]
    config = {**example.configs[0], "backbone_config": backbone, "auxiliary_in_channels": third}
    workload = {"batch": 2, "images": [grid], "phase": "train"}
    recipe = {"freeze": [path]} if frozen else {}
    verdict = verify(config, workload, recipe, example=example._replace(inputs=inputs, kernels=kernels))
    assert verdict.is_equal, (verdict.different, verdict.parameters, verdict.not_counted)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "cell", "grid"),
    thin(
        [
            ("upernet", 1, [1, 64, 96]),  # a ResNet
            ("maskformer", 4, [1, 24, 24]),  # and others a Swin
            ("mask2former", 4, [1, 16, 16]),
            ("depth_anything", 14, [1, 5, 6]),  # a DINOv2
            ("prompt_depth_anything", 14, [1, 5, 6]),
            ("zoedepth", 16, [1, 6, 6]),  # a BEiT
        ],
        3,
    ),
)
@pytest.mark.parametrize("left_out", thin([{}, {"backbone_config": None}], 2))
def test_a_backbone_that_is_left_out_is_that_of_hf(name: str, cell: int, grid: list[int], left_out: Json) -> None:
    prepare()
    example = find_example(name)
    inputs = {
        key: {**entry, "shape": [_scale(str(size), cell) for size in entry["shape"]]} if "shape" in entry else entry
        for key, entry in example.inputs.items()
    }
    workload = {"batch": 1, "images": [grid], "phase": "forward"}
    config = {"model_type": name, **left_out}
    verdict = verify(config, workload, example=example._replace(inputs=inputs), device="meta")
    assert verdict.is_equal, (verdict.different, verdict.parameters, verdict.not_counted)
    with pytest.raises(ConfigError, match="backbone: one that is named beside backbone_config is not described"):
        bind({**config, "backbone": "resnet50"})


def _scale(size: str, cell: int) -> str:
    """A size of an example's input, whose config says the pixels of a patch and the channels."""
    side = size.partition(" ")[0]
    return f"{side} * {cell}" if side in ("height", "width") else "3" if size.endswith("num_channels") else size


@pytest.mark.parametrize("name", ["upernet", "maskformer", "mask2former"])
@pytest.mark.parametrize(
    ("backbone", "words"),
    [
        ({"model_type": "dinov2"}, "'dinov2' is not described as a backbone; these are: convnext, convnextv2, dinat,"),
        ({**DEEP, "model_type": "resnet", "out_features": ["stage4"]}, "must hand on its four stages"),
        ({**DEEP, "model_type": "resnet", "downsample_in_first_stage": True}, "downsample_in_first_stage"),
        ({**DEEP, "model_type": "convnext", "patch_size": 2}, "patch_size must be 4|the first of 4 pixels"),
    ],
)
def test_segmentation_over_others_is_refused(name: str, backbone: Json, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        bind({**find_example(name).configs[0], "backbone_config": backbone})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("recipe", thin([{}, {"recompute": "full"}, {"freeze": ["backbone"]}], 3))
@pytest.mark.parametrize(
    ("config", "grid"),
    [
        ({**DPT, "backbone_config": DINO}, [1, 7, 5]),
        ({**DPT, **NULLS, "backbone_config": {**DINO, "apply_layernorm": False}}, [1, 7, 5]),
        (
            {
                **DPT,
                "neck_hidden_sizes": [6, 10, 14],
                "reassemble_factors": [2, 1, 0.5],
                "backbone_config": {**DINO, "out_features": None, "out_indices": [1, 2, 4]},
            },
            [1, 6, 8],
        ),
        ({**DPT, "backbone_config": BEIT, "readout_type": "ignore"}, [1, 7, 7]),
        (
            {
                **DPT,
                "backbone_config": {**BEIT, "use_relative_position_bias": True},
                "readout_type": "add",
                "head_in_index": 1,
            },
            [1, 7, 7],
        ),
        ({**DPT, "backbone_config": SWIN, "neck_hidden_sizes": [12, 24, 48, 96]}, [1, 16, 16]),
        (
            {**DPT, "backbone_config": SWIN, "neck_hidden_sizes": [12, 24, 48, 96], "head_in_index": 2},
            [1, 16, 13],
        ),
    ],
)
def test_depth_over_a_backbone_equals_hf(config: Json, grid: list[int], recipe: Json) -> None:
    prepare()
    pixels = {"shape": ["images", "3", "height * 4", "width * 4"]}
    example = find_example("dpt")._replace(inputs={"pixel_values": pixels})
    verdict = verify(config, {"batch": 2, "images": [grid], "phase": "train"}, recipe, example=example)
    assert verdict.is_equal, (verdict.different, verdict.parameters, verdict.not_counted)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("example", "config"),
    [
        ("dpt", HYBRID),  # the BiT that DPTConfig has then
        ("dpt", {**HYBRID, "backbone_config": None}),
        ("dpt-semantic", HYBRID),
        ("dpt-body", HYBRID),
    ],
)
def test_a_model_over_its_backbone_equals_hf(example: str, config: Json) -> None:
    prepare()
    found = find_example(example)
    named = {**config, **({"architectures": [found.architecture]} if found.architecture else {})}
    verdict = verify(named, {"batch": 1, "images": [[1, 64, 64]], "phase": "train"}, example=found)
    assert verdict.is_equal, (verdict.different, verdict.parameters, verdict.not_counted)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"backbone_config": {}}, "needs a BiT of three stages"),  # BitConfig's own defaults, which are four
        ({"num_channels": 4}, "a hybrid without backbone_config has a BiT of 3 channels"),
        ({"backbone_config": {"depths": [3, 4, 9]}}, "must have global_padding same and embedding_dynamic_padding"),
        ({"backbone_config": {"depths": [3, 4, 9], "global_padding": "same"}}, "and embedding_dynamic_padding"),
    ],
)
def test_hybrids_that_do_not_fit(changed: Json, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        bind({**HYBRID, **changed})


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"model_type": "resnet"}, "only a dinov2, a beit or a swinv2 is described"),
        ({"out_features": None}, "must hand on as many layers or stages"),
        ({"out_features": ["stem", *STAGES[:3]]}, "and without its stem"),
        ({"out_features": ["stage2", "stage1", "stage3", "stage4"]}, "from the first on"),
        ({"out_features": ["stage1", "stage1", "stage3", "stage4"]}, "from the first on"),
        (
            {"out_features": None, "out_indices": [1, 2, 3, 6]},
            "must hand on as many layers or stages",
        ),
        ({"reshape_hidden_states": True}, "reshape_hidden_states must be false"),
        ({"patch_size": [4, 4]}, "patch_size must be one number"),
    ],
)
def test_backbones_that_do_not_fit(changed: Json, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        bind({**DPT, "backbone_config": {**DINO, **changed}})


@pytest.mark.parametrize("named", ["DPTModel", "DPTForSemanticSegmentation"])
def test_other_classes_of_dpt_have_no_such_backbone(named: str) -> None:
    with pytest.raises(ConfigError, match="only DPTForDepthEstimation has such a backbone"):
        bind({**DPT, "backbone_config": DINO, "architectures": [named]})
