"""For verl-omni: FLOPs of every diffusers transformer that flopcalc counts, LoRA included (see verl-omni.md)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verl_omni.utils.mfu.diffusion_flops_counter import DiffusionModelFlops, register_diffusion_architecture

from flopcalc import bind


def make_size(tokens: int) -> tuple[int, int]:
    """An image of so many latent tokens: each is 16 by 16 pixels. With full attention the shape does not matter."""
    height = max(side for side in range(1, math.isqrt(tokens) + 1) if tokens % side == 0)
    return 16 * tokens // height, 16 * height


def register(class_name: str, *pipelines: str, video: bool = False, **recipe: Any) -> type[DiffusionModelFlops]:
    """Count a transformer class of diffusers for these pipelines; options such as `lora` go to flopcalc."""

    class FlopcalcFlops(DiffusionModelFlops):
        def __init__(self, config: Mapping[str, Any]) -> None:
            super().__init__(config)
            self.estimator: Callable[..., Any] = bind({**config, "_class_name": class_name}, **recipe)

        def estimate_flops(
            self,
            latent_seqlens: Sequence[int],
            prompt_seqlens: Sequence[int],
            delta_time: float,
            *,
            num_timesteps: int,
            num_forward_passes: int,
        ) -> float:
            total = 0
            for (latents, prompt), samples in Counter(zip(latent_seqlens, prompt_seqlens, strict=True)).items():
                size = make_size(latents)
                pictures = {"videos": [(*size, 1)]} if video else {"images": [size]}
                total += samples * self.estimator(**pictures, text=prompt).total
            return total * num_timesteps * num_forward_passes / delta_time / 1e12

    return register_diffusion_architecture(*pipelines)(FlopcalcFlops)


register("QwenImageTransformer2DModel", "QwenImagePipeline", "QwenImagePipelineWithLogProb")
register("SD3Transformer2DModel", "StableDiffusion3Pipeline")
register("FluxTransformer2DModel", "FluxPipeline")
register("WanTransformer3DModel", "WanPipeline", video=True)
