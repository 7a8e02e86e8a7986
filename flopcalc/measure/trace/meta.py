"""A module on meta, its example batch at other sizes, and one step of it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from flopcalc.base.errors import WorkloadError
from flopcalc.base.units import check_items
from flopcalc.base.vocabulary import Phase
from flopcalc.measure.hf.models import floats_on_meta
from flopcalc.measure.trace.forms import Point


@contextmanager
def on_meta(module: torch.nn.Module) -> Iterator[None]:
    """Inside, a live module's weights are meta tensors of the same shapes; its own are put back unchanged."""
    swapped: list[tuple[dict[str, Any], str, Any]] = []
    made: dict[int, torch.Tensor] = {}
    attributes = [(each, dict(each.__dict__)) for each in module.modules()]
    config: Any = getattr(module, "config", None)
    experts = getattr(config, "_experts_implementation", None)
    for each in module.modules():
        stores: tuple[dict[str, Any], ...] = (each._parameters, each._buffers)
        for store in stores:
            for name, tensor in store.items():
                if tensor is None or tensor.is_meta:
                    continue
                if id(tensor) not in made:
                    copy: torch.Tensor = tensor.detach().clone()  # integers keep their values
                    if tensor.is_floating_point():
                        copy = torch.empty_like(tensor, device="meta")
                    if isinstance(tensor, torch.nn.Parameter):
                        copy = torch.nn.Parameter(copy, requires_grad=tensor.requires_grad)
                    made[id(tensor)] = copy
                swapped.append((store, name, tensor))
                store[name] = made[id(tensor)]
    try:
        if experts is not None:
            config._experts_implementation = "batched_mm"  # HF's own choice wants values and bf16 on meta
        with floats_on_meta():
            yield
    finally:
        if experts is not None:
            config._experts_implementation = experts
        for store, name, tensor in swapped:
            store[name] = tensor
        for each, before in attributes:  # what forward assigned, training flags
            each.__dict__.clear()
            each.__dict__.update(before)


def _to_meta(value: object) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to("meta") if value.is_floating_point() else value.to("cpu")
    return value


class Resizer:
    """An example batch at other sizes: dim 0 is the batch, the length of the first 2-D tensor the sequence."""

    def __init__(
        self, example: Mapping[str, object], dims: Mapping[str, Sequence[str | None]] | None, config: object
    ) -> None:
        tensors = {name: value for name, value in example.items() if isinstance(value, torch.Tensor)}
        if not tensors:
            raise WorkloadError("the example batch holds no tensor")
        self.example = {name: _to_meta(value) for name, value in example.items()}
        self.config = config
        # Without text there are no places for images: pixels are an input like any other.
        named = ("pixel_values", "pixel_values_videos") if "input_ids" in tensors else ()
        self.pixels = next((name for name in named if name in tensors), None)
        self.grid = tensors.get("image_grid_thw")
        first = tensors.get(
            "input_ids", next((t for t in tensors.values() if t.dim() > 1), next(iter(tensors.values())))
        )
        self.batch = int(first.shape[0])
        # Of images and their like (batch, channels, height, width) no axis is a length.
        self.length = int(first.shape[1]) if 1 < first.dim() < 4 else 0
        if dims is None and self.batch == self.length:
            raise WorkloadError(
                f"batch and length of the example are both {self.batch}: give one of other sizes, or dims={{name: "
                "('b', 'n', None)} to say which is which"
            )
        _check_dims(dims, tensors)
        self.dims = {
            name: tuple(dims[name]) if dims and name in dims else self._guess(name, t) for name, t in tensors.items()
        }
        self.has_length = any("n" in axes for axes in self.dims.values()) or self.pixels is not None
        self.tokens = 0
        if self.pixels is not None and self.grid is None:
            images = int(tensors[self.pixels].shape[0])
            marked = int((tensors["input_ids"] == self._token()).sum()) if "input_ids" in tensors else 0
            if not marked or marked % images:
                raise WorkloadError(f"{marked} image tokens in the example do not divide into its {images} images")
            self.tokens = marked // images

    def _guess(self, name: str, tensor: torch.Tensor) -> tuple[str | None, ...]:
        if name in (self.pixels, "image_grid_thw"):
            return ()
        found = tuple(
            "b" if i == 0 and size == self.batch else "n" if i and size == self.length else None
            for i, size in enumerate(tensor.shape)
        )
        # What is neither would stay at the example's size: right for a width, wrong for a second length.
        has_length = "n" in found[1:] or not self.length
        is_unclear = tensor.dim() and (found[0] != "b" or not has_length or found.count("n") > 1)
        if is_unclear and not (name == "attention_mask" and found.count("n") == 2):
            raise WorkloadError(
                f"{name} of shape {tuple(tensor.shape)}: which axis is the batch ({self.batch}) and which the length "
                f"({self.length})? Give dims={{{name!r}: {('b', 'n', *[None] * tensor.dim())[: tensor.dim()]}}}, with "
                "None for 'n' where it has no length; a second length, a height or a width has a name of its own or "
                "None, and is traced anew at each size"
            )
        return found

    def describe_axes(self) -> dict[str, list[str | int | None]]:
        """Per axis of every tensor: 'b', 'n', or the size that it was traced at."""
        found: dict[str, list[str | int | None]] = {}
        for name, kinds in self.dims.items():
            if not kinds:  # images, which are placed by their grids
                found[name] = []
                continue
            shape = self.example[name].shape
            known = (*kinds, *[None] * (len(shape) - len(kinds)))
            found[name] = [kind if kind in ("b", "n") else int(size) for kind, size in zip(known, shape, strict=True)]
        return found

    def _token(self) -> int:
        for key in ("image_token_id", "image_token_index"):
            value = getattr(self.config, key, None)
            if isinstance(value, int):
                return value
        raise WorkloadError("images in the example, but the model's config names no image_token_id")

    @property
    def merge(self) -> int:
        return int(getattr(getattr(self.config, "vision_config", None), "spatial_merge_size", 1))

    def count_tokens(self, grid: Any) -> int:
        return self.tokens or math.prod(grid) // self.merge**2

    def list_grids(self) -> list[tuple[Any, ...]]:
        """Sets of images per sample to trace at: of several sizes where the model takes any grid."""
        if self.pixels is None:
            return []
        if self.grid is None:
            return [((1, 1, 1),), ((1, 1, 1), (1, 1, 1))]
        m = self.merge
        # Odd sides too, and one larger than a window: work that follows them is no polynomial in patches.
        a, b, c, d, e = ((1, h * m, w * m) for h, w in ((2, 2), (2, 5), (3, 3), (1, 7), (9, 6)))
        return [(a,), (b,), (c,), (a, b), (d,), (c, a), (e, d)]

    def make(self, point: Point) -> dict[str, Any]:
        """The batch at one point."""
        out: dict[str, object] = {}
        sizes: dict[str | None, int] = {"b": point["b"], "n": point["n"]}
        for name, value in self.example.items():
            if not isinstance(value, torch.Tensor):
                out[name] = value
                continue
            for axis, kind in enumerate(self.dims[name]):
                if kind in sizes:
                    value = resize(value, axis, sizes[kind])
            out[name] = value
        if self.pixels is not None:
            self._place(out, point)
        return out

    def _place(self, out: dict[str, Any], point: Point) -> None:
        grids, token = point.get("grids", ()), self._token()
        assert self.pixels is not None
        ids = out["input_ids"].clone()
        ids[ids == token] = find_word(self.config, int(ids[ids != token][0]) if (ids != token).any() else 3)
        types = torch.zeros_like(ids)
        at = 1
        for grid in grids:
            size = self.count_tokens(grid)
            ids[:, at : at + size] = token
            types[:, at : at + size] = 1
            at += size + 1
        out["input_ids"] = ids
        for name in ("labels", "mm_token_type_ids", "token_type_ids"):
            if name in out:
                out[name] = ids.clone() if name == "labels" else types
        pixels = self.example[self.pixels]
        many = point["b"] * (len(grids) if self.grid is None else sum(math.prod(grid) for grid in grids))
        out[self.pixels] = torch.empty((many, *pixels.shape[1:]), device="meta")
        if self.grid is not None:
            out["image_grid_thw"] = torch.tensor(list(grids) * point["b"])


def _check_dims(dims: Mapping[str, Sequence[str | None]] | None, tensors: Mapping[str, torch.Tensor]) -> None:
    for name, axes in (dims or {}).items():
        if name not in tensors:
            raise WorkloadError(f"dims names {name!r}, which is no tensor of the example batch ({', '.join(tensors)})")
        kinds = check_items(axes, f"dims of {name!r}")
        is_known = all(axis is None or (isinstance(axis, str) and axis.isidentifier()) for axis in kinds)
        if len(kinds) > tensors[name].dim() or not is_known:
            raise WorkloadError(
                f"dims of {name!r} must be 'b', 'n', another name or None for each of its axes, not {tuple(kinds)!r}"
            )
    if dims and not any("b" in tuple(axes) for axes in dims.values()):
        raise WorkloadError("dims names no axis 'b': every module is solved for its batch")


def find_word(config: object, fallback: int) -> int:
    special = {value for key, value in vars(config).items() if key.endswith(("token_id", "token_index"))}
    return next((i for i in range(3, 64) if i not in special), fallback)


def resize(value: torch.Tensor, axis: int, size: int) -> torch.Tensor:
    """Cut, or go on with the last entry; laid out in memory as a batch is."""
    if size <= value.shape[axis]:
        return value.narrow(axis, 0, size).contiguous()
    last = value.narrow(axis, value.shape[axis] - 1, 1)
    return torch.cat([value, *([last] * (size - value.shape[axis]))], axis)


def make_step(module: Any, batch: dict[str, Any], phase: Phase) -> Callable[[], Any]:
    takes = inspect.signature(unwrap(module).forward).parameters
    extra: dict[str, Any] = {}
    if "use_cache" in takes and "use_cache" not in batch:
        extra["use_cache"] = phase == "prefill"
    if phase == "prefill" and "logits_to_keep" in takes:
        extra["logits_to_keep"] = 1
    # A classifier's labels are not one for each token; its logits have all products of its loss.
    has_words = getattr(unwrap(module), "get_output_embeddings", lambda: True)() is not None
    if phase == "train" and has_words and "labels" in takes and "labels" not in batch and "input_ids" in batch:
        extra["labels"] = batch["input_ids"]
    if phase == "train":

        def train() -> None:
            _find_loss(module(**batch, **extra)).backward()  # type: ignore[no-untyped-call]

        return train

    def forward() -> None:
        with torch.no_grad():
            module(**batch, **extra)

    return forward


def unwrap(module: object) -> Any:
    return module.get_base_model() if hasattr(module, "get_base_model") else module


def _find_loss(out: object) -> torch.Tensor:
    """The loss of the output, else the sum of its first tensor that has a gradient."""
    loss = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    for leaf in torch.utils._pytree.tree_leaves(out):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            return leaf.sum()
    raise WorkloadError("nothing in the module's output has a gradient: trace it with phases=('forward',)")


def make_decode(module: Any, point: Point) -> Callable[[], Any]:
    """One new token after `c` cached ones; the cache is filled here, so that it is not counted."""
    ids = torch.full((point["b"], max(1, point["c"])), 3)
    with torch.no_grad():
        cached = module(input_ids=ids, use_cache=True)
    key = next((k for k in ("past_key_values", "cache_params", "state") if getattr(cached, k, None) is not None), None)
    if key is None:
        raise WorkloadError("decode: the module returns no cache")

    def generate() -> None:
        with torch.no_grad():
            module(input_ids=ids[:, :1], **{key: getattr(cached, key)}, use_cache=True)

    return generate
