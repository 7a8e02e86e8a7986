"""Records the operators of diffusers' transformers: tiny models in several sizes, as for HF's."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from flopcalc.base.vocabulary import PHASES as STEP_PHASES
from flopcalc.base.vocabulary import check_word
from flopcalc.core.estimate.counted import CountedEstimator
from flopcalc.core.estimate.estimate import Estimator
from flopcalc.core.model.bound import bind_model
from flopcalc.core.model.config import load_config
from flopcalc.core.workload.workload import Workload
from lab.denoisers import build_denoiser, make_denoiser_inputs
from lab.operators.dispatch import trace_operators
from lab.operators.runs import Run, no_grad

Json = dict[str, Any]
PHASES = ("train", "flow", "forward")


class Denoiser(NamedTuple):
    """What is traced of one class: configs that differ in sizes alone, and the module that reads the latents."""

    images: str
    sets: tuple[tuple[Json, ...], ...]  # each of one kind; the last config of each is for --check


class Sample(NamedTuple):
    """The sizes of one step."""

    batch: int
    text: int
    grid: tuple[int, int, int]


# The first config is run with both of the first two, the others with one each.
SAMPLES = (Sample(2, 5, (1, 4, 6)), Sample(3, 7, (1, 6, 8)), Sample(2, 11, (1, 8, 8)), Sample(3, 9, (1, 10, 4)))
CHECKED = Sample(4, 13, (1, 8, 10))


def _size(heads: int, dim: int, text: int, pooled: int, channels: int) -> Json:
    return {
        "num_attention_heads": heads,
        "attention_head_dim": dim,
        "joint_attention_dim": text,
        "pooled_projection_dim": pooled,
        "in_channels": channels,
    }


def _make_flux(axes: list[int], guided: bool, *sizes: int) -> Json:
    layers = {"num_layers": 4, "num_single_layers": 4, "guidance_embeds": guided, "axes_dims_rope": axes}
    return {"_class_name": "FluxTransformer2DModel", **layers, **_size(*sizes)}


def _make_sd3(norm: str | None, dual: int, *sizes: int) -> Json:
    config = {
        "num_layers": 6, "sample_size": 16, "pos_embed_max_size": 12, "qk_norm": norm,
        "dual_attention_layers": list(range(dual)), "out_channels": sizes[-1], **_size(*sizes),
    }  # fmt: skip
    return {"_class_name": "SD3Transformer2DModel", **config, "caption_projection_dim": sizes[0] * sizes[1]}


# The axes of a head stand to each other as in published models.
_FLUX_SIZES = (
    ([4, 14, 14], 2, 32, 10, 9, 8),
    ([8, 28, 28], 3, 64, 14, 15, 20),
    ([12, 42, 42], 2, 96, 22, 21, 28),
    ([16, 56, 56], 2, 128, 26, 33, 44),
)
_SD3_SIZES = ((2, 12, 10, 9, 4), (3, 16, 14, 15, 5), (5, 20, 22, 21, 7), (4, 28, 26, 33, 3))
DENOISERS = {
    "FluxTransformer2DModel": Denoiser(
        "x_embedder",
        tuple(tuple(_make_flux(size[0], guided, *size[1:]) for size in _FLUX_SIZES) for guided in (True, False)),
    ),
    "SD3Transformer2DModel": Denoiser(
        "pos_embed",
        tuple(
            tuple(_make_sd3(norm, dual, *size) for size in _SD3_SIZES)
            for norm, dual in ((None, 0), ("rms_norm", 0), ("rms_norm", 3))
        ),
    ),
}


def make_load(sample: Sample, phase: str) -> Workload:
    name = check_word("train" if phase == "flow" else phase, STEP_PHASES, "phase")
    return Workload(sample.batch, sample.text, phase=name, grids=(sample.grid,) * sample.batch)


def run_denoiser(config: Json, phase: str, sample: Sample) -> Run:
    """One traced step; 'flow' is a training step in which no weight trains but gradients pass through the latents."""
    estimator: Estimator = CountedEstimator(bind_model(load_config(config)), None, "full", "eager")
    model = build_denoiser(config, torch.bfloat16)
    model.train(phase != "forward")
    inputs = make_denoiser_inputs(config, *sample, dtype=torch.bfloat16)

    def step() -> Any:
        return model(**inputs, return_dict=False)[0]

    if phase == "forward":
        return Run(estimator, make_load(sample, phase), trace_operators(model, no_grad(step)))
    if phase == "flow":
        model.requires_grad_(False)
        module = model.get_submodule(DENOISERS[str(config["_class_name"])].images)
        module.register_forward_hook(lambda _module, _args, output: output.requires_grad_(True))
    found = trace_operators(model, lambda: step().float().square().mean())
    return Run(estimator, make_load(sample, phase), found)


def run_all(configs: tuple[Json, ...], phase: str) -> list[Run]:
    """The runs that a set of configs is recorded from."""
    chosen = [(configs[0], SAMPLES[0]), *zip(configs[:-1], SAMPLES[1:], strict=True)]
    return [run_denoiser(config, phase, sample) for config, sample in chosen]
