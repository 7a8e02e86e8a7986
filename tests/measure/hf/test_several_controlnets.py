"""Pipelines with several ControlNets: each counts, at every step, as a counter sees it."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
from tiers import mark_heavy

pytest.importorskip("diffusers")
import diffusers
import torch
import transformers
from diffusers.models.controlnets.controlnet_flux import FluxMultiControlNetModel
from diffusers.models.controlnets.controlnet_hunyuan import HunyuanDiT2DMultiControlNetModel
from diffusers.models.controlnets.controlnet_sd3 import SD3MultiControlNetModel
from diffusers.models.controlnets.multicontrolnet import MultiControlNetModel
from diffusers.models.controlnets.multicontrolnet_union import MultiControlNetUnionModel
from diffusion import TINY_TEXT, build
from test_more_pipeline_runs import CASES as MORE_CASES
from test_pipeline_runs import CASES as FIRST
from test_pipeline_runs import NEEDS_GUIDANCE, TEXT
from torch.nn.attention import SDPBackend, sdpa_kernel

from flopcalc import estimate_flops
from flopcalc.measure.counters.flop_counter import count_flops

CASES = {**FIRST, "sdxl, union": MORE_CASES["sdxl, union"]}
# The case with one ControlNet, the class of several, and what differs in the config of the second.
SEVERAL: dict[str, tuple[type[torch.nn.Module], dict[str, Any]]] = {
    "sd, controlnet": (MultiControlNetModel, {"conditioning_embedding_out_channels": [8, 6, 10, 4]}),
    "sdxl, controlnet": (MultiControlNetModel, {"conditioning_embedding_out_channels": [8, 6, 10, 4]}),
    "flux, controlnet": (FluxMultiControlNetModel, {"num_layers": 1}),
    "hunyuan-dit, controlnet": (HunyuanDiT2DMultiControlNetModel, {}),
    "sd3, controlnet": (SD3MultiControlNetModel, {"num_layers": 2}),
    "sdxl, union": (MultiControlNetUnionModel, {"conditioning_embedding_out_channels": [8, 6, 10, 4]}),
}
RUNS = [
    (name, guided)
    for name in SEVERAL
    for guided in (False, True)
    if (CASES[name].scale or not guided) and (guided or name not in NEEDS_GUIDANCE)
]


def make_pipeline(name: str) -> tuple[Any, torch.nn.ModuleDict]:
    case, (several, changes) = CASES[name], SEVERAL[name]
    kind = getattr(diffusers, case.name)
    needed = inspect.signature(kind.__init__).parameters
    net = "ControlNetUnionModel" if "union" in name else f"{case.kind}ControlNetModel"
    nets = [build(net, {**case.beside, **more}) for more in ({}, changes)]
    parts: dict[str, Any] = {
        next(key for key in ("unet", "transformer") if key in needed): build(case.denoiser, case.config),
        "vae": build(case.vae, case.vae_config),
        "controlnet": several(nets),
    }
    watched = torch.nn.ModuleDict(parts).eval()
    given = {key: None for key, each in needed.items() if key != "self" and each.default is inspect.Parameter.empty}
    if name.startswith("sdxl"):  # its width is read
        config = transformers.CLIPTextConfig(**TINY_TEXT["CLIPTextModelWithProjection"])
        given["text_encoder_2"] = transformers.CLIPTextModelWithProjection(config)
    parts["scheduler"] = getattr(diffusers, case.scheduler)(**case.options)
    pipeline = kind(**{**given, **parts, **{key: part for key, part in case.set.items() if key in needed}})
    for key, value in case.set.items():
        setattr(pipeline, key, value)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline, watched


@pytest.mark.filterwarnings("ignore")  # of third parties: sizes are tiny, and parts are missing
@pytest.mark.parametrize(("name", "guided"), mark_heavy(RUNS, [("sd, controlnet", False)]))
def test_each_of_several_controlnets_is_counted(name: str, guided: bool) -> None:
    case = CASES[name]
    pipeline, watched = make_pipeline(name)
    call = case.make_call(guided)
    for key in case.images:
        call[key] = [call[key]] * 2
    if "union" in name:
        call["control_mode"] = [0, 1]
    call["controlnet_conditioning_scale"] = [1.0, 1.0]

    def run() -> None:
        with torch.no_grad():
            pipeline(num_inference_steps=case.steps, output_type="np", **call)

    with sdpa_kernel(SDPBackend.MATH):
        counted = count_flops(watched, run)
    theirs: dict[str, int] = {}
    for path, row in counted.rows.items():
        part = ".".join(path.split(".")[: 3 if path.startswith("controlnet.") else 1])
        theirs[part] = theirs.get(part, 0) + sum(row)
    estimate = estimate_flops(
        pipeline, images=[case.size], sampling_steps=case.steps, guidance="on" if guided else "off", convention="full",
        attention_kernel="eager", parts=["denoiser", "vae", "controlnet.nets.0", "controlnet.nets.1"],
        **({"text": TEXT} if case.text else {}), **case.asked,
    )  # fmt: skip
    assert {part.name: part.flops.total for part in estimate.pipeline.parts} == theirs
    assert theirs["controlnet.nets.0"] > 0
    assert estimate.parameters["total"] == sum(each.numel() for each in watched.parameters())


def test_a_folder_with_several_controlnets(tmp_path: Path) -> None:
    pipeline, _ = make_pipeline("sd, controlnet")
    index: dict[str, Any] = {"_class_name": "StableDiffusionControlNetPipeline"}
    for part in ("unet", "vae"):
        index[part] = ["diffusers", type(getattr(pipeline, part)).__name__]
        getattr(pipeline, part).save_config(tmp_path / part)
    index["controlnet"] = ["diffusers", "MultiControlNetModel"]
    for number, net in enumerate(pipeline.controlnet.nets):
        net.save_config(tmp_path / ("controlnet" if not number else f"controlnet_{number}"))
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    asked: dict[str, Any] = {"images": [(64, 64)], "sampling_steps": 2}
    read, live = (estimate_flops(model, **asked) for model in (str(tmp_path), pipeline))
    assert read.pipeline.parts == live.pipeline.parts
    assert [part.name for part in read.pipeline.parts][1:3] == ["controlnet.nets.0", "controlnet.nets.1"]
