"""Sums of the workload that FLOPs are linear in: tokens, pairs under a mask, patches, and the rest."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from itertools import combinations
from typing import Any, TypeAlias

from flopcalc.core.spec.expressions import Names, evaluate
from flopcalc.core.workload.workload import Grid, Workload
from flopcalc.errors import SpecError, WorkloadError, format_value

# A sum over the workload that FLOPs are linear in: ("tokens",), ("pairs", "causal", 4096), ("merged", 4), …
Feature: TypeAlias = tuple[Any, ...]


# A fused causal kernel works in blocks of this many positions, until a calibration table says better.
BLOCK = 128


# --- sums -------------------------------------------------------------------------------------------------------------
def causal_pairs(length: int, window: int = 0) -> int:
    """Query-key pairs of one causal document: sum of min(i, window) over i = 1…length."""
    if not window or window >= length:
        return length * (length + 1) // 2
    return window * (window + 1) // 2 + (length - window) * window


def block_pairs(length: int, window: int = 0, block: int = BLOCK) -> int:
    """Pairs that a fused causal kernel executes in blocks: those needed times (S + block) / (S + 1), rounded down."""
    executed = length * (length + block)
    skipped = (length - window) * (length - window - block) if window and length - window > block else 0
    return (executed - skipped) // 2


def decode_pairs(new: int, context: int, window: int = 0) -> int:
    """Sum of min(context + j, window) over the new tokens j = 1…new."""
    if not window or window >= context + new:
        return new * context + new * (new + 1) // 2
    growing = max(0, window - context)  # tokens whose keys still all fit
    return growing * context + growing * (growing + 1) // 2 + (new - growing) * window


def window_pairs(grid: Grid, merge: int, window: int) -> int:
    """Pairs inside square windows of `window` merged patches, ragged at the edges, per temporal patch."""
    t, h, w = grid
    side = window * merge
    # Sum over windows of (a·b)² = (sum of a²)(sum of b²), a and b the window's height and width in patches.
    rows = h // side * side * side + (h % side) ** 2
    columns = w // side * side * side + (w % side) ** 2
    return t * rows * columns


_WRAPPERS = ("decoder", "sum", "either", "minus", "needed", "executed")  # features that hold others, or choose a side


def evaluate_feature(feature: Feature, load: Workload, counting: str) -> int:
    """The value of one sum; counting is 'model' (needed), 'full' (eager code) or a fused kernel's name."""
    kind = feature[0]
    if load.decoder is not None and load.phase == "decode" and kind not in _WRAPPERS:
        return 0  # the encoder has run already
    if kind == "tokens":
        if counting == "model" and load.documents is not None:
            return sum(load.documents)
        return load.rows * load.seq
    if kind == "pairs":
        block = int(feature[3]) if len(feature) > 3 else BLOCK
        return _sequence_pairs(load, str(feature[1]), int(feature[2]), counting, block)
    if kind == "logits":
        return _logit_rows(load, counting)
    if kind == "cached":
        if load.phase == "decode" and counting != "model":
            return load.rows * decode_pairs(load.seq, load.context)
        return evaluate_feature(("tokens",), load, counting)
    if kind == "calls":
        return load.seq if load.phase == "decode" else 1
    if kind == "folds":
        # torch's parametrization computes a folded weight once more when it is registered, at every call.
        return evaluate_feature(("calls",), load, counting) * 2
    if kind == "sum":
        return _sum_expression(feature, load, counting)
    if kind == "only":  # one of two towers: it sees the images, or the videos
        which = {"grids" if feature[1] == "videos" else "videos": ()}
        return evaluate_feature(feature[2:], load.replace(**which), counting)
    if kind == "decoder":
        return evaluate_feature(feature[1:], _get_decoder(load), counting)
    if kind == "either":
        # What the model needs, and what HF executes.
        needed, executed = feature[1:]
        return evaluate_feature(needed if counting == "model" else executed, load, counting)
    if kind == "minus":
        rows, less = (evaluate_feature(part, load, counting) for part in feature[1:])
        return rows - less
    if kind in ("needed", "executed"):
        # What the model needs and what HF executes are different products here: each counts under its convention.
        is_counted = (counting == "model") == (kind == "needed")
        return evaluate_feature(feature[1:], load, counting) if is_counted else 0
    if kind in ("samples", "each", "squares", "products"):
        return _count_samples(kind, feature[1:], load, counting)
    grids = load.grids + load.videos if load.videos else load.grids
    if kind == "images":
        return len(grids)
    if kind == "tiles":
        return sum([grid[0] for grid in grids])
    if not grids:
        return 0
    if kind == "patches":
        return sum([t * h * w for t, h, w in grids])
    if kind == "merged":
        return sum([t * h * w for t, h, w in grids]) // int(feature[1])
    if kind == "frames":
        return sum([t * h * w * h * w for t, h, w in grids])
    if kind == "windows":
        return sum([window_pairs(grid, int(feature[1]), int(feature[2])) for grid in grids])
    raise AssertionError(f"feature {feature!r}")


def _count_samples(kind: str, feature: Feature, load: Workload, counting: str) -> int:
    """What clipping works on, a sample being a row of the batch: samples, their rows, the pairs of their rows.

    torch.einsum makes no product of a sum over one entry: a batch of one sample has no sum over samples, and a
    sample of one row none over rows.
    """
    if kind == "samples":
        return load.rows if load.rows > 1 else 0
    each = evaluate_feature(feature, load, counting) // load.rows
    if kind == "squares":
        return load.rows * each * each
    if each == 1:
        return 0
    return load.rows * each * (each if kind == "products" else 1)


def _get_decoder(load: Workload) -> Workload:
    if load.decoder is None:
        raise WorkloadError("this model has a decoder: give its length too (--decoder-seq N, decoder_seq_len=N)")
    return load.decoder


def _sum_expression(feature: Feature, load: Workload, counting: str) -> int:
    """An expression of a spec, summed over every unit of the workload."""
    _, unit, text, constants = feature
    total = 0
    for values, many in _list_units(str(unit), load, counting):
        total += _evaluate_unit(text, constants, values) * many
    return total


@lru_cache(maxsize=65536)
def _evaluate_unit(text: str, constants: tuple[tuple[str, Any], ...], values: tuple[tuple[str, int], ...]) -> int:
    value = evaluate(text, Names({**dict(constants), **dict(values)}))
    if isinstance(value, bool) or getattr(value, "denominator", None) != 1 or value < 0:
        raise SpecError(f"rows {text!r} must be a whole number, not {format_value(value)}, where {dict(values)}")
    return int(value)


def _list_units(unit: str, load: Workload, counting: str) -> list[tuple[tuple[tuple[str, int], ...], int]]:
    """(names with values, how many units have them)."""
    grids = load.all_grids
    if load.decoder is not None and load.phase == "decode" and unit != "decoder":
        return []  # the encoder has run already
    if unit == "image":
        return [
            ((("t", t), ("h", h), ("w", w), ("video", video)), 1)
            for video, listed in enumerate((load.grids, load.videos))
            for t, h, w in listed
        ]
    if unit == "pair":
        each = -(-len(grids) // load.rows)
        samples = [grids[i : i + each] for i in range(0, len(grids), each)] if each else []
        names = ("t", "h", "w", "t2", "h2", "w2")
        return [
            (tuple(zip(names, (*first, *second), strict=True)), 1)
            for sample in samples
            for first, second in combinations(sample, 2)
        ]
    if unit == "clip":
        # A batch is padded to its longest clip.
        longest = max(load.clips, default=0)
        shared = (("longest", longest), ("images", len(grids)))
        return [((("n", n if counting == "model" else longest), ("own", n), *shared), 1) for n in load.clips]
    if unit == "call":
        sums = (("tiles", sum(t for t, _, _ in grids)), ("patches", sum(t * h * w for t, h, w in grids)))
        largest = (*_find_largest(grids), ("most", max((t for t, _, _ in grids), default=0)))
        clips = (("clips", len(load.clips)), ("longest", max(load.clips, default=0)))
        return [
            ((("b", load.rows), *names, ("images", len(grids)), *sums, *largest, *clips), 1)
            for names, _ in _list_calls(load, load.seq, 1)
        ]
    if unit == "document":
        real = load.documents if load.documents is not None else (load.seq,) * load.rows
        is_padded = load.layout == "padded" and counting != "model"
        return [
            ((*names, ("pad", load.seq - n if is_padded else 0)), many)
            for n, rows in Counter(real).items()
            for names, many in _list_calls(load, n, rows)
        ]
    if unit == "decoder":
        return _list_decoder(_get_decoder(load), load, counting)
    lengths: list[tuple[int, int]] = [(load.seq, load.rows)]
    if counting == "model" and load.documents is not None:
        lengths = [(length, 1) for length in load.documents]
    images = ("images", -(-len(grids) // load.rows))
    tiles = ("tiles", -(-sum(t for t, _, _ in grids) // load.rows))
    keep = 0 if load.logits == "all" or load.phase == "decode" else 1 if load.logits == "last" else int(load.logits)
    rest = (images, tiles, ("last", keep), ("began", load.context))
    return [((*names, *rest), many) for n, rows in lengths for names, many in _list_calls(load, n, rows)]


def _list_decoder(
    load: Workload, encoder: Workload, counting: str
) -> list[tuple[tuple[tuple[str, int], ...], int]]:  # fmt: skip
    """As _list_units: every row of the decoder with the length of its encoder's."""
    frames = encoder.clips if counting == "model" else (max(encoder.clips, default=0),) * len(encoder.clips)
    sides = [
        side.documents if counting == "model" and side.documents is not None else (side.seq,) * side.rows
        for side in (load, encoder)
    ]
    sizes = [t * h * w for t, h, w in encoder.all_grids]
    each = len(sizes) // load.rows  # images of a row, if all have as many
    patches = [sum(sizes[i * each : (i + 1) * each]) for i in range(load.rows)]
    if sum(patches) != sum(sizes):
        patches = [sum(sizes) // load.rows] * load.rows
    images = ("images", -(-len(sizes) // load.rows))
    rows = Counter(zip(*sides, frames or (0,) * load.rows, patches, strict=True))
    return [
        ((*names, ("m", m), ("frames", audio), images, ("patches", visual), *_find_largest(encoder.all_grids)), many)
        for (n, m, audio, visual), count in rows.items()
        for names, many in _list_calls(load, n, count)
    ]


def _find_largest(grids: Iterable[Grid]) -> tuple[tuple[str, int], tuple[str, int]]:
    sides = [(h, w) for _, h, w in grids] or [(0, 0)]
    return ("tallest", max(h for h, _ in sides)), ("widest", max(w for _, w in sides))


def _list_calls(load: Workload, length: int, rows: int) -> list[tuple[tuple[tuple[str, int], ...], int]]:
    """One call over a whole sequence; in decoding one per new token, with all before it cached."""
    if load.phase != "decode":
        return [((("n", length), ("c", 0), ("decoding", 0), ("training", int(load.phase == "train"))), rows)]
    return [((("n", 1), ("c", load.context + j), ("decoding", 1), ("training", 0)), rows) for j in range(length)]


def attention_calls(feature: Feature, load: Workload, times: int) -> dict[tuple[str, int], int]:
    """(mask, length) -> how many sequences of it one attention op runs over: what a table of calls is asked for."""
    kind = feature[0]
    calls: dict[tuple[str, int], int] = {}
    if kind == "pairs":
        is_packed = load.layout == "packed" and load.documents is not None
        lengths = load.documents if is_packed and load.documents else (load.seq,)
        mask = "window" if int(feature[2]) and int(feature[2]) < max(lengths) else str(feature[1])
        for length in lengths:
            calls[(mask, length)] = calls.get((mask, length), 0) + 1
        return calls if is_packed and load.documents else {(mask, load.seq): load.rows}
    if kind not in ("images", "tiles", "frames", "windows"):
        return calls
    for t, h, w in load.all_grids:
        if kind in ("images", "tiles"):
            found = {math.isqrt(times): t if kind == "tiles" else 1}
        elif kind == "frames":
            found = {h * w: t}
        else:
            found = {}
            side = int(feature[1]) * int(feature[2])
            for height, rows in _split_side(h, side):
                for width, columns in _split_side(w, side):
                    found[height * width] = found.get(height * width, 0) + rows * columns * t
        for length, many in found.items():
            calls[("full", length)] = calls.get(("full", length), 0) + many
    return calls


def _split_side(size: int, side: int) -> list[tuple[int, int]]:
    """(length, how many) of the windows along one side, the ragged last one apart."""
    return [(length, many) for length, many in ((side, size // side), (size % side, 1)) if length and many]


def _sequence_pairs(load: Workload, mask: str, window: int, counting: str, block: int) -> int:
    if load.phase == "decode":
        # One query a call: eager code attends to the cache, which a window has already cut.
        return load.rows * decode_pairs(load.seq, load.context, window)
    if mask == "full":
        if counting == "model" and load.documents is not None:
            return sum([length * length for length in load.documents])
        return load.rows * load.seq * load.seq
    if counting == "model":
        if load.documents is not None:
            return sum([causal_pairs(length, window) for length in load.documents])
        return load.rows * causal_pairs(load.seq, window)
    if counting == "full":
        return load.rows * load.seq * load.seq
    if counting == "flash":
        if load.layout == "packed" and load.documents is not None:
            return sum([block_pairs(length, window, block) for length in load.documents])
        return load.rows * block_pairs(load.seq, window, block)
    # SDPA's other kernels take windows and documents as an explicit mask, which skips nothing.
    has_mask = load.documents is not None or (window and window < load.seq)
    return load.rows * (load.seq * load.seq if has_mask else block_pairs(load.seq, 0, block))


def _logit_rows(load: Workload, counting: str) -> int:
    if load.logits == "all" or load.phase == "decode":
        return evaluate_feature(("tokens",), load, counting)
    keep = 1 if load.logits == "last" else int(load.logits)
    if counting == "model" and load.layout == "padded" and load.documents is not None:
        return sum([min(keep, length) for length in load.documents])
    # A packed row has one last position: HF keeps logits per row, not per document.
    return load.rows * min(keep, load.seq)
