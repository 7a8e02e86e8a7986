"""What all adapters share: a model bound once, its batches counted without ever raising in a training step."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any

from flopcalc.api import bind
from flopcalc.base.errors import FlopcalcError, WorkloadError
from flopcalc.base.vocabulary import Phase
from flopcalc.core.estimate.estimate import Estimator
from flopcalc.core.workload.workload import Grid, Workload


def bind_options(get_model: Callable[[], Any], options: Mapping[str, Any]) -> Estimator:
    """The estimator that an adapter's options ask for: those of flopcalc.bind (lora, recompute, convention, …).

    `model=` among them is counted instead of what the framework says: a preset, a path, a HF config or a HF model.
    """
    given = {key: value for key, value in options.items() if key != "model"}
    return bind(options["model"] if "model" in options else get_model(), **given)


_SHAPES = ((1, 3, 12), (1, 6, 6))  # in merged patches: one area, two shapes


class StepCounter:
    """FLOPs of one model's training steps. Where they cannot be counted: NaN, and one warning that says why."""

    def __init__(self, bind_it: Callable[[], Estimator], framework: str) -> None:
        self.framework = framework
        self._warned: set[str] = set()
        self._depends_on_shape: bool | None = None
        try:
            self.estimator: Estimator | None = bind_it()
        except FlopcalcError as error:
            self.estimator = None
            self.warn(str(error))

    def warn(self, reason: str) -> None:
        """Say once why a number is NaN, or what was assumed."""
        if reason not in self._warned:
            self._warned.add(reason)
            warnings.warn(f"flopcalc in {self.framework}: {reason}", RuntimeWarning, stacklevel=4)

    def count_documents(self, lengths: Iterable[int], patches: Iterable[int] | None = None) -> float:
        """FLOPs of documents of these lengths, each attended to by itself; `patches` are those of each picture.

        A framework that knows no grids gives a number of patches for each image, or for each temporal patch of a video.
        """
        documents = tuple([length for length in lengths if length])  # samples that fill a batch up have no tokens
        if not documents:
            return 0
        return self._count(lambda bound: self._make_packed(bound, documents, patches))

    def count_rows(self, batch: int, seq: int, phase: Phase = "train") -> float:
        """FLOPs of a batch of full rows."""
        return self._count(lambda _: Workload(batch, seq, phase=phase))

    def count_batch(self, batch: Mapping[str, object], *, read_device: bool = False) -> float:
        """FLOPs of a real batch, as the model gets it; values on a GPU are read only if asked: that waits for it."""
        if self.estimator is None:
            return math.nan
        try:
            return self.estimator.estimate_batch(batch, read_device=read_device).total
        except FlopcalcError as error:
            self.warn(str(error))
            return math.nan

    def _count(self, make: Callable[[Estimator], Workload]) -> float:
        if self.estimator is None:
            return math.nan
        try:
            return self.estimator.estimate(make(self.estimator)).total
        except FlopcalcError as error:
            self.warn(str(error))
            return math.nan

    def _make_packed(self, bound: Estimator, documents: tuple[int, ...], patches: Iterable[int] | None) -> Workload:
        grids: tuple[Grid, ...] = ()
        if patches is not None and bound.vision is not None:
            merge = bound.vision.merge
            grids = tuple([make_grid(many, merge) for many in patches if many])
            if grids:
                self._note_shapes(bound, merge)
        return Workload(1, sum(documents), documents, "packed", grids=grids)

    def _note_shapes(self, bound: Estimator, merge: int) -> None:
        """Say once that a model's windows depend on the shape of a picture, which patch counts do not show."""
        if self._depends_on_shape is None:
            counts = {bound.estimate(Workload(1, 4096, grids=[(t, h * merge, w * merge)])).total for t, h, w in _SHAPES}
            self._depends_on_shape = len(counts) > 1
            if self._depends_on_shape:
                self.warn(
                    f"{bound.source.name} attends within windows, whose number depends on a picture's shape; "
                    f"{self.framework} gives patch counts, so pictures are counted as near squares"
                )


@lru_cache(maxsize=65536)
def make_grid(patches: int, merge: int) -> Grid:
    """The grid nearest to a square with this number of patches, its sides multiples of the merge size."""
    area, rest = divmod(patches, merge * merge)
    if rest or patches < 1:
        raise WorkloadError(f"{patches} patches of a picture are no multiple of {merge * merge} (merge size {merge})")
    height = next(side for side in range(math.isqrt(area), 0, -1) if area % side == 0)
    return 1, height * merge, area // height * merge


def replace_attributes(owner: object, **changes: object) -> Callable[[], None]:
    """Set attributes of a class or module; the function that comes back puts the old ones back."""
    before = {name: vars(owner).get(name) for name in changes}
    for name, value in changes.items():
        setattr(owner, name, value)

    def undo() -> None:
        for name, value in before.items():
            if value is None:
                delattr(owner, name)
            else:
                setattr(owner, name, value)

    return undo
