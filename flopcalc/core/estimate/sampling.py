"""What was asked of a diffusion pipeline, and what each of its parts does."""

from __future__ import annotations

from typing import Any, NamedTuple

from flopcalc.base.vocabulary import PipelinePhase
from flopcalc.core.count.flops import Flops


class PartRun(NamedTuple):
    """What one part of a diffusion pipeline does: which class it is, how often it runs, and all of its FLOPs."""

    name: str  # as in the pipeline: transformer, text_encoder_2, vae
    kind: str  # denoiser, text_encoder or vae
    architecture: str
    runs: int
    flops: Flops


class Sampling(NamedTuple):
    """A training step or the sampling of a diffusion pipeline: what was asked of it, part by part."""

    phase: PipelinePhase
    width: int
    height: int
    frames: int
    text: int
    sampling_steps: int | None  # None in training
    guidance: bool | None
    parts: tuple[PartRun, ...]
    joined: int = 1  # passes of guidance that are one call: rows of it for each sample

    def to_dict(self) -> dict[str, Any]:
        parts = [
            {
                "name": part.name,
                "kind": part.kind,
                "class": part.architecture,
                "runs": part.runs,
                "forward": part.flops.forward,
                "backward": part.flops.total - part.flops.forward,
                "total": part.flops.total,
            }
            for part in self.parts
        ]
        sizes = {name: value for name, value in self._asdict().items() if name not in ("phase", "joined")}
        return {**sizes, "parts": parts}

    def times(self, many: int) -> Sampling:
        """These counts, multiplied by `many`."""
        return self._replace(
            parts=tuple(part._replace(runs=part.runs * many, flops=part.flops * many) for part in self.parts)
        )
