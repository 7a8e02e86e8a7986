"""What a bound model is and counts; an Estimator (estimate.py) makes estimates of it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

from flopcalc.base.errors import WorkloadError, format_value
from flopcalc.base.frozen import Value, frozen
from flopcalc.base.spelling import spell
from flopcalc.base.units import check_items, check_size
from flopcalc.base.vocabulary import Convention, PickedKernel
from flopcalc.core.count.flops import Flops
from flopcalc.core.count.products import Block, CountedRow, Weights
from flopcalc.core.formats.formats import Formats
from flopcalc.core.images.vision import Vision
from flopcalc.core.model.config import Source
from flopcalc.core.model.ops import Stage, list_routed
from flopcalc.core.recipe.recipe import Recipe
from flopcalc.core.spec.spec import Spec
from flopcalc.core.workload.workload import Grid, Workload
from flopcalc.hardware.routing import EVEN, Routing

if TYPE_CHECKING:
    from flopcalc.core.model.audio import Audio

Picture: TypeAlias = str | os.PathLike[str] | tuple[int, int]  # a file, or width and height in pixels


@frozen()
class Identity(Value):
    """What decides an estimator's counts: the model under one recipe, however often it was bound."""

    name: str
    recipe: Recipe
    convention: Convention
    attention_kernel: PickedKernel
    formats: Formats
    device: str | None = None
    stages: tuple[Stage, ...] = ()
    routing: Routing = EVEN

    def __hash__(self) -> int:
        # To hash every op of the stages costs more than to count them.
        return hash((self.name, self.recipe, self.formats))


class ModelCounts(Protocol):
    """A model bound once, counted from its spec or traced: what it is, and its counts of a workload."""

    origin: str  # "spec" or "trace"
    source: Source
    spec: Spec
    stages: tuple[Stage, ...]
    vision: Vision | None
    audio: Audio | None
    has_decoder: bool
    has_text_encoder: bool
    head: str  # as --head says it
    mtp: int  # layers of multi-token prediction that are counted
    renamed: tuple[str, str] | None  # with another head than the spec's: the body's module there, and here
    needs_text: bool = True  # False: images alone are a workload
    recipe: Recipe
    convention: Convention
    attention_kernel: PickedKernel
    formats: Formats
    identity: Identity
    asked_routing: Routing = EVEN

    def count(self, load: Workload, convention: Convention) -> Flops: ...

    def count_formats(self, load: Workload, convention: Convention) -> dict[str, Flops]: ...

    def count_weights(self) -> list[Weights]: ...

    def rows(self, load: Workload, convention: Convention) -> list[CountedRow]: ...

    def parameters(self) -> dict[str, int]: ...

    def trains(self, load: Workload) -> bool:
        """Whether a step has a backward pass: it is a training step, and the recipe leaves something to train."""
        return load.phase == "train" and self.parameters()["trainable"] > 0

    def notes(self, load: Workload) -> list[str]: ...

    def count_visual_tokens(self, load: Workload) -> int: ...

    @property
    def is_diffusion(self) -> bool:
        """Whether it is a diffusion model's denoiser, or another part of its pipeline."""
        return False

    @property
    def routing(self) -> Routing | None:
        """How its routers deal rows out to experts; None for a model without experts."""
        return self.asked_routing if list_routed(self.stages) else None

    @property
    def routing_name(self) -> str | None:
        """The same in words, for results."""
        return None if self.routing is None else str(self.routing)

    def find_routing(self, block: Block) -> Routing:
        """The routing of a block's layers."""
        routing = self.asked_routing
        if len(routing.rows) < 2 or block.layers is None:
            return routing
        places = enumerate(list_routed(self.stages))
        own = [i for i, (path, layer) in places if path == block.path and layer in block.layers]
        return routing.take(own) if own else EVEN

    def count_tokens(self, load: Workload) -> int:
        """Real tokens of a workload."""
        return load.tokens

    def count_frames(self, seconds: Iterable[float]) -> list[int]:
        """Frames of clips that are given in seconds, as the model's feature extractor makes them."""
        if self.audio is None:
            raise WorkloadError(f"{self.source.name} takes no audio")
        return [self.audio.frames_of_seconds(length) for length in check_items(seconds, "audio")]

    def count_hooks(self, load: Workload) -> dict[str, int]:  # noqa: ARG002  # a trace knows none
        """FLOPs of a training step that frozen towers (vision, audio) owe to gradient checkpointing alone."""
        return {}

    def cut_images(
        self, images: Iterable[Picture], batch_size: int = 1, max_pixels: int | None = None
    ) -> tuple[list[Grid], tuple[str, ...]]:
        """Grids of a batch's images, each a file or (width, height) in pixels, and notes on the processor's limits."""
        from flopcalc.core.images.pictures import read_picture_size  # only where pictures are given

        if self.vision is None:
            what = "takes no images" if self.audio is not None else "is a text model: it takes no images"
            raise WorkloadError(f"{self.source.name} {what}")
        grids: list[Grid] = []
        notes: dict[str, None] = {}
        preprocessor = self.source.preprocessor
        given = check_items(images, "images")
        sizes = [read_picture_size(each) if isinstance(each, (str, os.PathLike)) else each for each in given]
        samples = check_size(batch_size, "batch")
        if max_pixels is not None and sizes:
            if not self.vision.has_pixel_limit:
                raise WorkloadError(
                    f"{spell('max_pixels')}: {self.source.name}'s processor has no such limit"
                    + f"; {spell('image_grid', '1,H,W')} takes another size in patches" * (self.vision.kind == "grid")
                )
            preprocessor = {**(preprocessor or {}), "max_pixels": check_size(max_pixels, "max_pixels")}
        for size in sizes:
            if not isinstance(size, Sequence) or len(size) != 2:
                raise WorkloadError(f"images: {format_value(size)} is not (width, height)")
            each = -(-len(sizes) // samples)  # some processors cut only an image that is alone in its sample
            width, height = size
            made, found = self.vision.grids_of_pixels(width, height, preprocessor, each)
            if any(side < 1 for grid in made for side in grid):
                raise WorkloadError(f"an image of {width}x{height} is too thin: the processor leaves it no pixels")
            grids += made
            notes |= dict.fromkeys(found)
        return grids, tuple(notes)

    def count_patches(self, load: Workload) -> int:
        return sum(self.vision.count_patches(grid) for grid in load.all_grids) if self.vision else 0
