"""The units that a spec's expression is summed over: sequences, documents, images, clips, calls, with their values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import combinations
from typing import TypeAlias

from flopcalc.base.errors import WorkloadError
from flopcalc.base.spelling import spell
from flopcalc.base.vocabulary import Counting
from flopcalc.core.workload.workload import Grid, Workload

# Names with their values in one unit.
Values: TypeAlias = tuple[tuple[str, int], ...]


def list_units(unit: str, load: Workload, counting: Counting) -> list[tuple[Values, int]]:
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
        return _list_decoder(get_decoder(load), load, counting)
    lengths: list[tuple[int, int]] = [(load.seq, load.rows)]
    if counting == "model" and load.documents is not None:
        lengths = [(length, 1) for length in load.documents]
    rest = name_shared(load) if unit == "sequence" else (name_shared(load)[0], *_find_largest(grids))
    return [((*names, *rest), many) for n, rows in lengths for names, many in _list_calls(load, n, rows)]


def name_shared(load: Workload) -> Values:
    """What every sequence of a workload has in common."""
    grids = load.all_grids
    images = ("images", -(-len(grids) // load.rows))
    tiles = ("tiles", -(-sum(t for t, _, _ in grids) // load.rows))
    keep = 0 if load.logits == "all" or load.phase == "decode" else 1 if load.logits == "last" else int(load.logits)
    return (images, tiles, ("last", keep), ("began", load.context))


def name_sequence(length: int, is_training: bool, shared: Values) -> Values:
    """The names of one whole sequence outside of decoding, as list_units gives them."""
    return (("n", length), ("c", 0), ("decoding", 0), ("training", int(is_training)), *shared)


def _list_decoder(load: Workload, encoder: Workload, counting: Counting) -> list[tuple[Values, int]]:
    """As list_units: every row of the decoder with the length of its encoder's."""
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


def _list_calls(load: Workload, length: int, rows: int) -> list[tuple[Values, int]]:
    """One call over a whole sequence; in decoding one per new token, with all before it cached."""
    if load.phase != "decode":
        return [((("n", length), ("c", 0), ("decoding", 0), ("training", int(load.phase == "train"))), rows)]
    return [((("n", 1), ("c", load.context + j), ("decoding", 1), ("training", 0)), rows) for j in range(length)]


def get_decoder(load: Workload) -> Workload:
    if load.decoder is None:
        raise WorkloadError(f"this model has a decoder: give its length too ({spell('decoder_seq', 'N')})")
    return load.decoder
