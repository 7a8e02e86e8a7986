"""Any torch module and an example batch in; exact polynomials of its FLOPs out, solved from a few traces and checked.

Nothing runs for real: floats live on meta, integers keep their values. The trace at a handful of small workloads gives
as many equations; the solution must then hold at fresh ones, else the module is refused.
"""

from __future__ import annotations

import copy
import inspect
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flopcalc.core.estimate.traced import (
    Polynomials,
    Traced,
    TracedEstimator,
    load_trace,
    make_key,
    read_versions,
    save_trace,
)
from flopcalc.core.model.config import Source
from flopcalc.core.recipe.recipe import Recipe, make_recipe
from flopcalc.core.spec.expressions import Names, evaluate
from flopcalc.errors import FlopcalcError, WorkloadError, format_value
from flopcalc.measure.counters.flop_counter import Counted, count_flops
from flopcalc.measure.hf.models import apply_recipe, build_model, count_parameters, floats_on_meta
from flopcalc.units import check_items
from flopcalc.words import PHASES, check_word

__all__ = ["copy_to_meta", "count_copy", "trace_config", "trace_module"]

Point = dict[str, Any]  # b, n, c and grids
_LENGTHS = (6, 9, 14, 23, 31)
_FRESH = 4  # points that the solution must predict
_DEFAULT_CHUNK = 64  # gated delta nets fix it in their code
_LARGEST = 4096  # a chunk or window beyond this is not traced, and lengths beyond it are refused
_FAR = 1003  # every solution must hold at this length, too
_HF = ("transformers.", "peft.")  # modules of these have a version: their traces can be kept


class NoPolynomialError(FlopcalcError):
    """The traced FLOPs follow none of the forms that are tried."""


# --- Solving ------------------------------------------------------------------------------------------------


def _solve(matrix: list[list[Fraction]]) -> list[list[Fraction]] | None:
    """The inverse of a square matrix by elimination, or None if it has none."""
    size = len(matrix)
    work = [[*row, *(Fraction(int(i == j)) for j in range(size))] for i, row in enumerate(matrix)]
    for column in range(size):
        pivot = next((row for row in range(column, size) if work[row][column]), None)
        if pivot is None:
            return None
        work[column], work[pivot] = work[pivot], work[column]
        scale = work[column][column]
        work[column] = [value / scale for value in work[column]]
        for row in range(size):
            factor = work[row][column]
            if row != column and factor:
                work[row] = [a - factor * b for a, b in zip(work[row], work[column], strict=True)]
    return [row[size:] for row in work]


def _choose_points(monomials: Sequence[str], candidates: Sequence[Point]) -> tuple[list[Point], list[list[Fraction]]]:
    """As many candidates as monomials, such that their equations have one solution; and the inverse."""
    chosen: list[Point] = []
    basis: list[list[Fraction]] = []
    for point in candidates:
        row = [Fraction(_evaluate(text, point)) for text in monomials]
        reduced = _reduce(row, basis)
        if any(reduced):
            chosen.append(point)
            basis.append(reduced)
        if len(chosen) == len(monomials):
            inverse = _solve([[Fraction(_evaluate(text, p)) for text in monomials] for p in chosen])
            if inverse is not None:
                return chosen, inverse
    raise AssertionError("the candidate points do not tell the monomials apart")


def _reduce(row: list[Fraction], basis: list[list[Fraction]]) -> list[Fraction]:
    for known in basis:
        lead = next(i for i, value in enumerate(known) if value)
        if row[lead]:
            factor = row[lead] / known[lead]
            row = [a - factor * b for a, b in zip(row, known, strict=True)]
    return row


def _evaluate(text: str, point: Point) -> int:
    grids = point.get("grids", ())
    names = {
        "b": point["b"], "n": point["n"], "c": point.get("c", 0), "images": point["b"] * len(grids),
        "patches": point["b"] * sum(t * h * w for t, h, w in grids),
        "pairs": point["b"] * sum(t * (h * w) ** 2 for t, h, w in grids),
    }  # fmt: skip
    return int(evaluate(text, Names(names)))


@dataclass(frozen=True)
class _Sizes:
    """Sizes in a config at which a count may change its form."""

    chunks: tuple[int, ...]
    windows: tuple[int, ...]
    chunk_limit: int  # the least that is too large to trace beyond; 0: none
    window_limit: int


@dataclass(frozen=True)
class _Form:
    """A set of monomials, and the points that are traced to solve for them."""

    monomials: tuple[str, ...]
    candidates: tuple[Point, ...]
    far: int = 0  # so many of the last candidates lie beyond chunks and windows: all of them are checked


def _list_forms(
    phase: str, grids: Sequence[tuple[Any, ...]], tokens: Callable[[Any], int], chunks: _Sizes
) -> list[_Form]:
    """Polynomials to try: plain ones first, then with ceil terms of each chunk size (or a cache's window)."""
    if phase == "decode":
        return _list_cached(chunks)
    if grids:
        return [_list_visual(grids, tokens)]
    plain = ("b", "b * n", "b * n * n", "1", "n", "n * n")
    points = [{"b": b, "n": n} for n in _LENGTHS for b in (1, 2, 3)]
    points.sort(key=lambda point: (point["b"] * point["n"], point["b"]))
    # Beyond every chunk last: what holds below one alone is refused there.
    far = [{"b": 2, "n": n} for n in sorted({2 * size + 1 for size in chunks.chunks if size > 16} | {_FAR})]
    forms = [_Form(plain, (*points, *far), len(far))]
    for chunk in chunks.chunks:
        k = f"ceil(n / {chunk})"
        extra = (f"b * {k}", f"b * n * {k}", f"b * {k} * {k}")
        lengths = {chunk // 2 + 1, chunk - 1, chunk, chunk + 1, 2 * chunk - 1, 3 * chunk, 3 * chunk + 2, 4 * chunk + 1}
        near = [{"b": b, "n": n} for n in sorted(lengths) for b in (1, 2) if n > 0]
        forms.append(_Form((*plain[:3], *extra, *plain[3:]), (*points, *near, *far), len(far)))
    return forms


def _list_cached(sizes: _Sizes) -> list[_Form]:
    """Decoding: linear in the cached keys, of which a window keeps so many."""
    windows = sizes.windows
    points = [{"b": b, "n": 1, "c": c} for c in (5, 11, 7, 17, 23, 9) for b in (1, 2, 3)]
    beyond = sorted({1, _FAR, *(size + 3 for size in windows), *(size + 3 for size in sizes.chunks)})
    far = [{"b": 1, "n": 1, "c": c} for c in beyond]
    plain = ("1", "b", "c", "b * c")
    forms = [_Form(plain, (*points, *far), len(far))]
    for size in windows:
        near = [{"b": b, "n": 1, "c": c} for c in (size - 2, size, size + 2, size + 5) for b in (1, 2) if c > 0]
        forms.append(_Form((*plain, f"b * min(c + 1, {size})"), (*points, *near, *far), len(far)))
    return forms


def _list_visual(grids: Sequence[tuple[Any, ...]], tokens: Callable[[Any], int]) -> _Form:
    monomials = ["b", "b * n", "b * n * n", "1", "images", "n", "n * n"]
    if len({grid for each in grids for grid in each}) > 1:  # images of several sizes
        monomials += ["patches", "pairs", "patches * patches"]
    points = []
    for number, each in enumerate(grids):
        least = sum(tokens(grid) for grid in each) + len(each) + 2
        points += [
            {"b": b, "n": least + extra, "grids": each} for extra in (3, 8, 17, 30)[number % 2 :] for b in (1, 2)
        ]
    points.append({"b": 1, "n": _FAR, "grids": grids[0]})
    return _Form(tuple(monomials), tuple(points), 1)


def _fit(form: _Form, trace: Callable[[Point], dict[str, tuple[int, int, int]]]) -> dict[str, Any] | None:
    """Solve for every module's coefficients; None if the solution fails at fresh points."""
    chosen, inverse = _choose_points(form.monomials, form.candidates)
    fresh = [point for point in reversed(form.candidates) if point not in chosen][: max(_FRESH, form.far)]
    assert len(fresh) >= _FRESH
    traces = [trace(point) for point in chosen]
    paths = list(dict.fromkeys(path for each in traces for path in each))
    rows = {}
    for path in paths:
        rows[path] = tuple(
            tuple(
                sum((inverse[i][j] * traces[j].get(path, (0, 0, 0))[way] for j in range(len(chosen))), Fraction(0))
                for i in range(len(chosen))
            )
            for way in range(3)
        )
    for point in fresh:
        values = [_evaluate(text, point) for text in form.monomials]
        found = trace(point)
        for path in dict.fromkeys((*paths, *found)):
            for way in range(3):
                told = sum(
                    (c * v for c, v in zip(rows.get(path, ((), (), ()))[way], values, strict=False)), Fraction(0)
                )
                if told != found.get(path, (0, 0, 0))[way]:
                    return None
    return rows


# --- A module on meta ---------------------------------------------------------------------------------------


@contextmanager
def _on_meta(module: torch.nn.Module) -> Iterator[None]:
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


def _to_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to("meta") if value.is_floating_point() else value.to("cpu")
    return value


class _Resizer:
    """An example batch at other sizes: dim 0 is the batch, the length of the first 2-D tensor the sequence."""

    def __init__(
        self, example: Mapping[str, Any], dims: Mapping[str, Sequence[str | None]] | None, config: Any
    ) -> None:
        tensors = {name: value for name, value in example.items() if isinstance(value, torch.Tensor)}
        if not tensors:
            raise WorkloadError("the example batch holds no tensor")
        self.example = {name: _to_meta(value) for name, value in example.items()}
        self.config = config
        self.pixels = next((name for name in ("pixel_values", "pixel_values_videos") if name in tensors), None)
        self.grid = tensors.get("image_grid_thw")
        first = tensors.get(
            "input_ids", next((t for t in tensors.values() if t.dim() > 1), next(iter(tensors.values())))
        )
        self.batch = int(first.shape[0])
        self.length = int(first.shape[1]) if first.dim() > 1 else 0
        if dims is None and self.batch == self.length:
            raise WorkloadError(
                f"batch and length of the example are both {self.batch}: give one of other sizes, or dims={{name: "
                "('b', 'n', None)} to say which is which"
            )
        _check_dims(dims, tensors)
        self.dims = {
            name: tuple(dims[name]) if dims and name in dims else self._guess(name, t) for name, t in tensors.items()
        }
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
        is_unclear = tensor.dim() and (found[0] != "b" or "n" not in found[1:] or found.count("n") > 1)
        if is_unclear and not (name == "attention_mask" and found.count("n") == 2):
            raise WorkloadError(
                f"{name} of shape {tuple(tensor.shape)}: which axis is the batch ({self.batch}) and which the length "
                f"({self.length})? Give dims={{{name!r}: ('b', 'n', None, …)}}; a second length, as a decoder's, "
                "cannot be solved for"
            )
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
        out: dict[str, Any] = {}
        sizes = {"b": point["b"], "n": point["n"]}
        for name, value in self.example.items():
            if not isinstance(value, torch.Tensor):
                out[name] = value
                continue
            for axis, kind in enumerate(self.dims[name]):
                if kind is not None:
                    value = _resize(value, axis, sizes[kind])
            out[name] = value
        if self.pixels is not None:
            self._place(out, point)
        return out

    def _place(self, out: dict[str, Any], point: Point) -> None:
        grids, token = point.get("grids", ()), self._token()
        assert self.pixels is not None
        ids = out["input_ids"].clone()
        ids[ids == token] = _find_word(self.config, int(ids[ids != token][0]) if (ids != token).any() else 3)
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
        is_known = all(axis is None or (isinstance(axis, str) and axis in ("b", "n")) for axis in kinds)
        if len(kinds) > tensors[name].dim() or not is_known:
            raise WorkloadError(f"dims of {name!r} must be 'b', 'n' or None for each of its axes, not {tuple(kinds)!r}")


def _find_word(config: Any, fallback: int) -> int:
    special = {value for key, value in vars(config).items() if key.endswith(("token_id", "token_index"))}
    return next((i for i in range(3, 64) if i not in special), fallback)


def _resize(value: torch.Tensor, axis: int, size: int) -> torch.Tensor:
    """Cut, or go on with the last entry."""
    if size <= value.shape[axis]:
        return value.narrow(axis, 0, size)
    last = value.narrow(axis, value.shape[axis] - 1, 1)
    return torch.cat([value, *([last] * (size - value.shape[axis]))], axis)


def _make_step(module: Any, batch: dict[str, Any], phase: str) -> Callable[[], Any]:
    takes = inspect.signature(_unwrap(module).forward).parameters
    extra: dict[str, Any] = {}
    if "use_cache" in takes and "use_cache" not in batch:
        extra["use_cache"] = phase == "prefill"
    if phase == "prefill" and "logits_to_keep" in takes:
        extra["logits_to_keep"] = 1
    if phase == "train" and "labels" in takes and "labels" not in batch and "input_ids" in batch:
        extra["labels"] = batch["input_ids"]
    if phase == "train":

        def train() -> None:
            _find_loss(module(**batch, **extra)).backward()  # type: ignore[no-untyped-call]

        return train

    def forward() -> None:
        with torch.no_grad():
            module(**batch, **extra)

    return forward


def _unwrap(module: Any) -> Any:
    return module.get_base_model() if hasattr(module, "get_base_model") else module


def _find_loss(out: Any) -> torch.Tensor:
    """The loss of the output, else the sum of its first tensor that has a gradient."""
    loss = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    for leaf in torch.utils._pytree.tree_leaves(out):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            return leaf.sum()
    raise WorkloadError("nothing in the module's output has a gradient: trace it with phases=('forward',)")


def _make_decode(module: Any, point: Point) -> Callable[[], Any]:
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


# --- Tracing ------------------------------------------------------------------------------------------------


def _trace(module: Any, phase: str, resizer: _Resizer | None, say: Callable[[str], None], sizes: _Sizes) -> Polynomials:
    """Polynomials of one phase; NoPolynomialError when no form holds."""
    grids = resizer.list_grids() if resizer is not None and phase != "decode" else []
    forms = _list_forms(phase, grids, resizer.count_tokens if resizer is not None else lambda _: 0, sizes)
    kept: dict[str, dict[str, tuple[int, int, int]]] = {}

    def trace(point: Point) -> dict[str, tuple[int, int, int]]:
        key = repr(sorted(point.items()))
        if key not in kept:
            say(f"tracing {phase} at {', '.join(f'{name}={value}' for name, value in point.items())}")
            counted = _count_point(module, phase, resizer, point)
            for parameter in module.parameters():
                parameter.grad = parameter.grad if not getattr(parameter.grad, "is_meta", False) else None
            if counted.not_counted:
                names = ", ".join(counted.not_counted)
                raise NoPolynomialError(
                    f"the counter has no formula for {names}, and does not know it as no product: only a spec can "
                    "describe this"
                )
            kept[key] = counted.rows
        return kept[key]

    for form in forms:
        rows = _fit(form, trace)
        if rows is not None:
            reached = max(point.get("c", 0) if phase == "decode" else point["n"] for point in form.candidates)
            # Eager attention forms every pair, so a window shows in a cache alone.
            limits = [sizes.chunk_limit, sizes.window_limit if phase == "decode" else 0]
            limit = min((each for each in limits if each), default=0)
            return Polynomials(phase, bool(grids), form.monomials, rows, reached, limit)
    tried = "; ".join(", ".join(form.monomials) for form in forms)
    raise NoPolynomialError(
        f"the traced FLOPs of {type(module).__name__} are no polynomial in {tried}: only a spec can describe it"
    )


def _count_point(module: Any, phase: str, resizer: _Resizer | None, point: Point) -> Counted:
    """One counted step at a point; the module is as before when it ends, however it ends."""
    is_training = module.training
    try:
        with _on_meta(module):
            for each in module.modules():  # a part that is kept in eval mode stays so
                each.training = phase == "train" and (each.training or not is_training)
            if phase == "decode":
                step = _make_decode(module, point)
            else:
                assert resizer is not None
                step = _make_step(module, resizer.make(point), phase)
            return count_flops(module, step)
    except FlopcalcError:
        raise
    except Exception as error:  # the module's own code: whatever it raises is why it cannot be traced
        reason = (str(error).splitlines() or [""])[0][:200]
        raise FlopcalcError(
            f"{type(module).__name__} could not be traced at {point}: {type(error).__name__}: {reason}; work that "
            "depends on values cannot be traced, and an axis taken wrongly for batch or length is told by dims={…}"
        ) from None


# --- A live module at one batch -----------------------------------------------------------------------------

_HOOKS = (
    "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks", "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called", "_backward_pre_hooks", "_backward_hooks", "_state_dict_hooks",
    "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip


def copy_to_meta(module: torch.nn.Module) -> torch.nn.Module:
    """A copy that takes no memory and runs eager attention; the live module, its hooks and gradients are not touched.

    Floats are fp32 on meta, so that no autocast is needed, integers keep their values, and what checkpoints still does.
    """
    if any(type(tensor).__name__ == "DTensor" for tensor in module.parameters()):
        raise WorkloadError("its parameters are sharded (DTensor): a rank holds no whole model to copy")
    memo: dict[int, Any] = {}
    for each in module.modules():
        for name in _HOOKS:  # a hook may belong to anything: a monitor, a trainer
            hooks = each.__dict__.get(name)
            if hooks is not None:
                memo[id(hooks)] = type(hooks)((key, hook) for key, hook in hooks.items() if _is_hf(hook))
        for leaf in torch.utils._pytree.tree_leaves(list(vars(each).values())):
            if isinstance(leaf, torch.Tensor) and id(leaf) not in memo:
                memo[id(leaf)] = _make_twin(leaf)
    made = copy.deepcopy(module, memo)
    for each in made.modules():
        config: Any = getattr(each, "config", None)
        if getattr(config, "_attn_implementation", None) is not None:
            config._attn_implementation = "eager"
        if getattr(config, "_experts_implementation", None) is not None:
            config._experts_implementation = "batched_mm"  # HF's own choice wants values and bf16 on meta
    return made


def _is_hf(hook: Any) -> bool:
    """A hook that HF set to change what runs: inputs of a checkpoint that require gradients."""
    return getattr(hook, "__name__", "") == "make_inputs_require_grads"


def _make_twin(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_floating_point():
        twin = torch.empty(tensor.shape, dtype=torch.float32, device="meta")
    else:
        twin = tensor.detach().cpu().clone()
    if isinstance(tensor, torch.nn.Parameter):
        twin = torch.nn.Parameter(twin, requires_grad=tensor.requires_grad)
    return twin


class _Alone(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses what talks to other ranks: they do not run this step, and would never answer."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if "c10d" in func.namespace:
            raise WorkloadError(f"its forward pass talks to other ranks ({func})")
        return func(*args, **(kwargs or {}))


def count_copy(made: torch.nn.Module, batch: Mapping[str, Any]) -> Counted:
    """A training step of what copy_to_meta made, at a batch: floats on meta, integers on the host."""
    random = torch.random.get_rng_state()  # the live step's numbers go on as if nothing had been
    is_training = made.training
    for each in made.modules():  # a part that is kept in eval mode stays so
        each.training = each.training or not is_training
    try:
        with (
            torch.inference_mode(False), torch.enable_grad(), torch.device("cpu"), torch.autocast("cpu", enabled=False),
            _Alone(), floats_on_meta(),  # type: ignore[no-untyped-call]
        ):  # fmt: skip
            return count_flops(made, _make_step(made, _keep_arguments(made, batch), "train"))
    finally:
        torch.random.set_rng_state(random)


def _keep_arguments(module: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
    """What the forward takes: a collator's batch may hold more than that."""
    takes = inspect.signature(_unwrap(module).forward).parameters
    if any(each.kind is each.VAR_KEYWORD for each in takes.values()):
        return dict(batch)
    return {name: value for name, value in batch.items() if name in takes}


def _find_sizes(config: Any) -> _Sizes:
    """Sizes that a config calls a chunk or a window, smallest first, and the chunk that delta nets fix."""
    found: dict[str, set[int]] = {"chunk": {_DEFAULT_CHUNK}, "block_size": set(), "window": set()}
    limits: dict[str, int] = {}
    for part in (config, getattr(config, "text_config", None)):
        for key, value in (vars(part) if part is not None and hasattr(part, "__dict__") else {}).items():
            for word, sizes in found.items():
                if word in key and type(value) is int and value > 1:
                    if value <= _LARGEST:
                        sizes.add(value)
                    else:
                        limits[word] = min(limits.get(word, value), value)
    chunks = found["chunk"] | found["block_size"]
    limit = min((limits[word] for word in ("chunk", "block_size") if word in limits), default=0)
    return _Sizes(tuple(sorted(chunks)), tuple(sorted(found["window"])), limit, limits.get("window", 0))


def _say(text: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[K{text[:110]}")
        sys.stderr.flush()


def _describe_module(module: torch.nn.Module) -> dict[str, Any]:
    """What decides a HF module's FLOPs: its config, its tree, its shapes, what trains, what is checkpointed."""
    config: Any = getattr(module, "config", None)
    return {
        "class": type(module).__qualname__,
        "tree": repr(module),
        "parameters": [(n, tuple(p.shape), p.requires_grad) for n, p in module.named_parameters()],
        "config": config.to_dict() if hasattr(config, "to_dict") else repr(config),
        "attention": getattr(config, "_attn_implementation", None),
        "modes": [(m.training, getattr(m, "gradient_checkpointing", False)) for m in module.modules()],
    }


def _describe_batch(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Shapes, and the values of integers: placeholders and masks decide what runs."""
    out: dict[str, Any] = {}
    for name, value in batch.items():
        if not isinstance(value, torch.Tensor):
            out[name] = repr(value)
        else:
            values = None if value.is_floating_point() or value.is_meta else value.tolist()
            out[name] = (list(value.shape), str(value.dtype), values)
    return out


def trace_module(
    module: Any,
    example_batch: Mapping[str, Any],
    *,
    phases: Sequence[str] = ("train", "forward"),
    dims: Mapping[str, Sequence[str | None]] | None = None,
) -> TracedEstimator:
    """The estimator of any torch module: `example_batch` holds its keyword arguments, at any small size."""
    if not isinstance(module, torch.nn.Module):
        raise WorkloadError(f"an example batch goes with a torch.nn.Module, not with {type(module).__name__}")
    if not isinstance(example_batch, Mapping):
        raise WorkloadError(f"example_batch is a mapping of the module's arguments, not {type(example_batch).__name__}")
    phases = tuple(check_word(phase, PHASES, "phase", WorkloadError) for phase in check_items(phases, "phases"))
    if not phases:
        raise WorkloadError(f"phases must be some of {', '.join(PHASES)}, not none")
    if dims is not None and not isinstance(dims, Mapping):
        raise WorkloadError(f"dims maps names of the batch to their axes, not {format_value(dims)}")
    config = getattr(module, "config", None)
    # Other code can change without its source showing it (a function, a closure): then nothing is kept.
    is_kept = all(type(each).__module__.startswith(("torch.", *_HF)) for each in module.modules())
    is_kept = is_kept and type(module).__module__.startswith(_HF)
    key = make_key({"module": _describe_module(module), "batch": _describe_batch(example_batch), "dims": dims,
                    "phases": phases, **read_versions()}) if is_kept else None  # fmt: skip
    name = type(module).__name__
    model_type = str(getattr(config, "model_type", name))
    source = Source(name, {"model_type": model_type}, name, reference="traced", module=module)
    traced = load_trace(key) if key is not None else None
    if traced is None:
        resizer = _Resizer(example_batch, dims, config)
        found = [_trace(module, phase, resizer, _say, _find_sizes(config)) for phase in phases]
        if resizer.pixels is not None:  # and the same model without images
            text = {n: v for n, v in example_batch.items() if n not in (resizer.pixels, "image_grid_thw")}
            plain = _Resizer({**text, "input_ids": _remove_images(text["input_ids"], resizer)}, dims, config)
            found += [_trace(module, phase, plain, _say, _find_sizes(config)) for phase in phases]
        traced = _keep(module, name, model_type, found, resizer, key)
    return TracedEstimator(traced, source, make_recipe())


def _remove_images(ids: torch.Tensor, resizer: _Resizer) -> torch.Tensor:
    ids = ids.cpu().clone()
    ids[ids == resizer._token()] = _find_word(resizer.config, 3)
    return ids


def _keep(
    module: Any, name: str, model_type: str, found: list[Polynomials], resizer: _Resizer | None, key: str | None
) -> Traced:
    total, trainable = count_parameters(module)
    visual: dict[str, Any] = {}
    if resizer is not None and resizer.pixels is not None:
        visual = {"tokens": resizer.tokens, "merge": resizer.merge}
    parameters = {"total": total, "trainable": trainable}
    axes = {key: list(each) for key, each in resizer.dims.items()} if resizer is not None else {}
    traced = Traced(name, model_type, parameters, read_versions(), visual, tuple(found), axes)
    _say("")
    if key is not None:
        problem = save_trace(key, traced)
        if problem:
            sys.stderr.write(f"flopcalc: {problem}\n")
    return traced


def trace_config(source: Source, recipe: Recipe, phase: str, has_images: bool, key: str) -> Traced:
    """A config that no spec knows: HF's own model is built without memory, traced, and kept under the key."""
    adapted = {name: value for name, value in recipe.to_dict().items() if value and value != "none"}
    try:
        with floats_on_meta():
            model = build_model(source.config, device="meta", architecture=_choose_class(source))
            module = apply_recipe(model, adapted)
    except FlopcalcError:
        raise
    except Exception as error:  # HF's own code: whatever it raises is why there is no model
        raise FlopcalcError(
            f"{source.where}: transformers cannot build this model: {type(error).__name__}: {str(error)[:160]}"
        ) from None
    module.train(phase == "train")
    batch: dict[str, Any] = {"input_ids": torch.full((2, 9), 3)}
    if has_images:
        batch |= _make_pixels(module)
    resizer = _Resizer(batch, None, module.config)
    found = _trace(module, phase, None if phase == "decode" else resizer, _say, _find_sizes(module.config))
    model_type = str(source.config["model_type"])
    return _keep(module, source.name, model_type, [found], resizer if has_images else None, key)


def _choose_class(source: Source) -> str:
    """The HF class of a config: the one that it names, else its type's in the mappings that are tried in turn."""
    import transformers
    from transformers.models.auto import modeling_auto

    named = source.config.get("architectures")
    if isinstance(named, (list, tuple)) and named and hasattr(transformers, str(named[0])):
        return str(named[0])
    model_type = source.config["model_type"]
    for mapping in (
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    ):
        if model_type in mapping:
            return str(mapping[model_type])
    if model_type in modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES:
        raise FlopcalcError(f"{source.where}: {model_type!r} is an encoder-decoder: two lengths cannot be traced")
    raise FlopcalcError(
        f"{source.where}: transformers {transformers.__version__} knows no language model of type {model_type!r}; give "
        'its class in "architectures", or trace the module itself: bind(module, example_batch)'
    )


def _make_pixels(module: Any) -> dict[str, Any]:
    """An image in one of the two usual forms: rows of patches with a grid, or squares of one size."""
    config = module.config
    vision = getattr(config, "vision_config", None)
    token = next((getattr(config, k) for k in ("image_token_id", "image_token_index") if hasattr(config, k)), None)
    if vision is None or token is None:
        raise WorkloadError(
            "this config names no vision_config and image token: give bind(module, example_batch) a batch"
        )
    merge, temporal = getattr(vision, "spatial_merge_size", None), getattr(vision, "temporal_patch_size", None)
    if merge and temporal:
        grid = (1, 2 * merge, 2 * merge)
        width = getattr(vision, "in_channels", 3) * temporal * vision.patch_size**2
        rows, tokens = 2 * math.prod(grid), math.prod(grid) // merge**2
        ids = torch.full((2, tokens + 5), 3)
        ids[:, 1 : 1 + tokens] = token
        pixels = torch.empty((rows, width), device="meta")
        types = (ids == token).long()
        batch = {"input_ids": ids, "pixel_values": pixels, "image_grid_thw": torch.tensor([grid] * 2)}
        takes = inspect.signature(_unwrap(module).forward).parameters
        return batch | ({"mm_token_type_ids": types} if "mm_token_type_ids" in takes else {})
    side = getattr(vision, "image_size", None)
    if not isinstance(side, int):
        raise WorkloadError(
            "this config's images have neither a grid nor one size: give bind(module, example_batch) a batch"
        )
    pixels = torch.empty((2, getattr(vision, "num_channels", 3), side, side), device="meta")
    with floats_on_meta(), torch.no_grad():
        features = _unwrap(module).get_image_features(pixel_values=pixels)
    leaf = next(leaf for leaf in torch.utils._pytree.tree_leaves(getattr(features, "pooler_output", features)))
    tokens = int(leaf.shape[-2] if leaf.dim() > 2 else leaf.shape[0] // (2 if leaf.shape[0] % 2 == 0 else 1))
    ids = torch.full((2, tokens + 5), 3)
    ids[:, 1 : 1 + tokens] = token
    return {"input_ids": ids, "pixel_values": pixels}
