"""Workload: what one step processes (lengths, images, phase); its sums are what FLOPs are linear in."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import combinations, pairwise
from typing import Any, TypeAlias

from flopcalc.core.spec.expressions import Names, evaluate
from flopcalc.errors import SpecError, WorkloadError, format_value
from flopcalc.units import check_size

PHASES = ("train", "forward", "prefill", "decode")
# A sum over the workload that FLOPs are linear in: ("tokens",), ("pairs", "causal", 4096), ("merged", 4), …
Feature: TypeAlias = tuple[Any, ...]
Grid: TypeAlias = tuple[int, int, int]
# A fused causal kernel works in blocks of this many positions, until a calibration table says better.
BLOCK = 128
# What a spec's `rows = "UNIT: EXPRESSION"` is summed over, and the names that have values there.
UNITS: dict[str, tuple[str, ...]] = {
    # Of the language model, or of an encoder-decoder's encoder.
    # tiles: of its images; last: how many positions have logits, counted from the end, 0 for all; began: the context
    # that decoding started from.
    "sequence": ("n", "c", "decoding", "training", "images", "tiles", "last", "began"),
    # What a mask keeps apart: a packed document, or a row's real tokens and the padding behind them.
    "document": ("n", "c", "decoding", "training", "pad"),
    # Of an encoder-decoder's decoder; m: positions of its encoder's text, frames: of its audio; images, their patches,
    # and the sides of the call's largest.
    "decoder": ("n", "c", "decoding", "training", "m", "frames", "images", "patches", "tallest", "widest"),
    "image": ("t", "h", "w", "video"),  # or video (then 1); in patches
    "pair": ("t", "h", "w", "t2", "h2", "w2"),  # of different images of one sample, each pair once
    # Of audio; in the feature extractor's frames: as executed, its own, and those of the batch's longest; and how many
    # images the call has.
    "clip": ("n", "own", "longest", "images"),
    # of the model, as a whole; images may be padded to the tallest and the widest of them, or to the most tiles of one,
    # audio to the longest clip
    "call": (
        "b",
        "n",
        "c",
        "decoding",
        "training",
        "images",
        "tiles",
        "patches",
        "tallest",
        "widest",
        "most",
        "clips",
        "longest",
    ),
}


class Workload:
    """One micro-batch: `rows` sequences of `seq` positions; `documents` are the real lengths inside, if fewer."""

    __slots__ = (
        "clips", "context", "decoder", "documents", "grids", "layout", "logits", "phase", "rows", "seq", "videos",
    )  # fmt: skip

    def __init__(
        self,
        rows: int = 1,
        seq: int = 1,
        documents: tuple[int, ...] | None = None,
        layout: str = "unpadded",
        phase: str = "train",
        context: int = 0,
        logits: int | str | None = None,
        grids: tuple[Grid, ...] = (),
        videos: tuple[Grid, ...] = (),
        clips: tuple[int, ...] = (),
        decoder: Workload | None = None,
    ) -> None:
        self.rows = rows
        self.seq = seq
        self.documents = documents
        self.layout = layout
        self.phase = phase
        self.context = context
        self.logits = logits if logits is not None else ("last" if phase == "prefill" else "all")
        self.grids = grids
        self.videos = videos
        self.clips = clips  # audio, in frames of the feature extractor
        self.decoder = decoder  # of an encoder-decoder: then this one is its encoder's

    def replace(self, **changes: Any) -> Workload:
        return Workload(**{**{key: getattr(self, key) for key in self.__slots__}, **changes})

    @property
    def all_grids(self) -> tuple[Grid, ...]:
        return self.grids + self.videos

    @property
    def tokens(self) -> int:
        """Real tokens that the language model sees; of an encoder-decoder, of both sides."""
        own = sum(self.documents) if self.documents is not None else self.rows * self.seq
        if self.decoder is None:
            return own
        return self.decoder.tokens + (0 if self.phase == "decode" else own)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Workload) and all(getattr(self, k) == getattr(other, k) for k in self.__slots__)

    def __hash__(self) -> int:
        return hash(
            (self.rows, self.seq, self.documents, self.phase, self.grids, self.videos, self.clips, self.decoder)
        )

    def __repr__(self) -> str:
        extra = f", documents={self.documents}" if self.documents is not None else ""
        extra += f", context={self.context}" if self.phase == "decode" else ""
        extra += f", images={list(self.grids)}" if self.grids else ""
        extra += f", videos={list(self.videos)}" if self.videos else ""
        extra += f", clips={list(self.clips)}" if self.clips else ""
        extra += f", decoder={self.decoder}" if self.decoder is not None else ""
        return f"Workload({self.rows} x {self.seq} {self.layout}, {self.phase}{extra})"


def make_workload(
    batch_size: int = 1,
    seq_len: int | None = None,
    *,
    lengths: Iterable[int] | None = None,
    image_grid_thw: Any = None,
    video_grid_thw: Any = None,
    phase: str = "train",
    context: int | None = None,
    logits: int | str | None = None,
    decoder_seq_len: int | None = None,
    clips: Iterable[int] | None = None,
) -> Workload:
    """A checked Workload from plain arguments; grids and clips (audio, in frames) are the whole batch's."""
    frames = tuple(check_size(length, "clips") for length in clips) if clips is not None else ()
    if decoder_seq_len is not None:
        if lengths is not None:
            raise WorkloadError("an encoder-decoder takes no packed lengths: give seq and decoder_seq")
        decoder = make_workload(batch_size, decoder_seq_len, phase=phase, context=context, logits=logits)
        grids = read_grids(image_grid_thw, "image_grid_thw") if image_grid_thw is not None else ()
        videos = read_grids(video_grid_thw, "video_grid_thw") if video_grid_thw is not None else ()
        seq = check_size(seq_len, "seq") if seq_len is not None else 0  # an encoder of audio has no tokens
        return Workload(decoder.rows, seq, None, "unpadded", phase, 0, "all", grids, videos, frames, decoder)
    if phase not in PHASES:
        raise WorkloadError(f"phase {format_value(phase)} unknown; known: {', '.join(PHASES)}")
    if phase != "decode" and context is not None:
        raise WorkloadError(f"context belongs to phase decode, not {phase}")
    if logits is not None and logits not in ("all", "last"):
        logits = check_size(logits, "logits")
    grids = read_grids(image_grid_thw, "image_grid_thw") if image_grid_thw is not None else ()
    videos = read_grids(video_grid_thw, "video_grid_thw") if video_grid_thw is not None else ()
    if phase == "decode":
        if logits not in (None, "all"):
            raise WorkloadError("decode makes logits for each new token: logits cannot be chosen there")
        if lengths is not None or grids or videos:
            raise WorkloadError("decode takes neither packed lengths nor images: their keys are in the context")
        if frames:
            raise WorkloadError("decode takes no audio: its keys are in the context")
        past = check_size(context, "context", 0) if context is not None else 0
        return Workload(
            check_size(batch_size, "batch"), check_size(1 if seq_len is None else seq_len, "seq"),
            phase=phase, context=past, logits=logits,
        )  # fmt: skip
    if lengths is not None:
        if seq_len is not None or batch_size != 1:
            raise WorkloadError("lengths describe one packed row: give neither seq nor batch with them")
        if not isinstance(lengths, Iterable):
            raise WorkloadError(f"lengths must be a list of document lengths, not {format_value(lengths)}")
        documents = tuple(check_size(length, "lengths") for length in lengths)
        if not documents:
            raise WorkloadError("lengths must hold at least one document")
        return Workload(1, sum(documents), documents, "packed", phase, 0, logits, grids, videos, frames)
    if seq_len is None:
        raise WorkloadError("seq is missing: the length that the language model sees per sample")
    rows = batch_size if type(batch_size) is int and 0 < batch_size < 10**9 else check_size(batch_size, "batch")
    seq = seq_len if type(seq_len) is int and 0 < seq_len < 10**9 else check_size(seq_len, "seq")
    return Workload(rows, seq, None, "unpadded", phase, 0, logits, grids, videos, frames)


def read_grids(value: Any, what: str) -> tuple[Grid, ...]:
    """Rows of (t, h, w) from a tensor, an array or nested sequences."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise WorkloadError(f"{what} must be rows of (t, h, w), not {type(value).__name__}")
    if value and not isinstance(value[0], (Sequence, Mapping)) and not hasattr(value[0], "tolist"):
        value = [value]
    grids = []
    for row in value:
        row = row.tolist() if hasattr(row, "tolist") else row
        if not isinstance(row, Sequence) or isinstance(row, str) or len(row) != 3:
            raise WorkloadError(f"{what}: {format_value(row)} is not (t, h, w)")
        t, h, w = row
        if not (type(t) is type(h) is type(w) is int and 0 < t < 10**9 and 0 < h < 10**9 and 0 < w < 10**9):
            t, h, w = (check_size(entry, what) for entry in row)
        grids.append((t, h, w))
    return tuple(grids)


def read_batch(
    batch: Mapping[str, Any],
    *,
    phase: str = "train",
    logits: int | str | None = None,
    read_device: bool = True,
    has_decoder: bool = False,
    audio: tuple[str, int] | None = None,
    images: tuple[Grid, ...] = (),
) -> tuple[Workload, list[str]]:
    """A workload from what is given to the model, and notes on what could not be read from it.

    With read_device=False, values that lie on a device are not read: that would make the host wait for it.
    `audio` is the key of a model's audio and the axis of its frames; `images` what an encoder without text reads.
    """
    if not isinstance(batch, Mapping):
        raise WorkloadError(f"batch must be a mapping as given to the model, not {format_value(batch)}")
    if phase not in PHASES:
        raise WorkloadError(f"phase {format_value(phase)} unknown; known: {', '.join(PHASES)}")
    if phase == "decode":
        raise WorkloadError("decode is described by sizes (seq_len, context), not by a batch")
    if logits is not None and logits not in ("all", "last"):
        logits = check_size(logits, "logits")
    notes: list[str] = []

    def is_readable(tensor: Any) -> bool:
        device = getattr(getattr(tensor, "device", None), "type", "cpu")
        return device not in ("meta",) and (read_device or device == "cpu")

    ids = batch.get("input_ids")
    if ids is None:
        ids = batch.get("inputs_embeds")
    clips = _read_clips(batch, *audio) if audio is not None else ()
    if ids is None and clips and has_decoder:
        decoder = _read_decoder(batch, len(clips), phase, logits, is_readable, notes)
        return Workload(len(clips), 0, None, "unpadded", phase, 0, "all", clips=clips, decoder=decoder), notes
    if ids is None and images and has_decoder:
        decoder = _read_decoder(batch, len(images), phase, logits, is_readable, notes)
        return Workload(len(images), 0, None, "unpadded", phase, 0, "all", images, decoder=decoder), notes
    if ids is None:
        raise WorkloadError("batch needs input_ids or inputs_embeds")
    shape = _shape(ids)
    if len(shape) < 2:
        raise WorkloadError(f"input_ids must be (batch, length), not of shape {tuple(shape)}")
    rows, seq = check_size(shape[0], "batch"), check_size(shape[1], "seq")
    if not hasattr(ids, "shape") and not all(hasattr(row, "__len__") for row in ids):
        raise WorkloadError(f"input_ids must be (batch, length): not all of its {rows} rows are lists")
    if not hasattr(ids, "shape") and any(len(row) != seq for row in ids):
        raise WorkloadError(f"input_ids: rows of different lengths; pad them to {seq} and give an attention_mask")
    grids: list[tuple[Grid, ...]] = []
    for key in ("image_grid_thw", "video_grid_thw"):
        value = batch.get(key)
        if value is not None and not is_readable(value):
            raise WorkloadError(
                f"{key} lies on {value.device}: reading it would stall the device; pass {key} from the host"
            )
        grids.append(read_grids(value, key) if value is not None else ())
    documents, layout = _read_layout(batch, rows, seq, is_readable, notes)
    images = grids[0]
    if batch.get("pixel_values_videos") is not None and not grids[1]:
        raise WorkloadError("pixel_values_videos need video_grid_thw beside them")
    if logits is None and type(batch.get("logits_to_keep")) is int and batch["logits_to_keep"] > 0:
        logits = check_size(batch["logits_to_keep"], "logits_to_keep")
    pixels = batch.get("pixel_values")
    if pixels is not None and images and len(_shape(pixels)) == 2:
        patches = sum(t * h * w for t, h, w in images)
        if _shape(pixels)[0] != patches:
            raise WorkloadError(f"pixel_values hold {_shape(pixels)[0]} patches, image_grid_thw {patches}")
    if pixels is not None and not images and batch.get("image_grid_thw") is None:
        images = ((0, 0, 0),) * _count_images(pixels)  # a fixed-size tower: the model fills the grid in
    if not has_decoder:
        return Workload(rows, seq, documents, layout, phase, 0, logits, images, grids[1], clips), notes
    if documents is not None and len(documents) != rows:
        raise WorkloadError("an encoder-decoder's batch needs one sequence per row, none of them masked as a whole")
    decoder = _read_decoder(batch, rows, phase, logits, is_readable, notes)
    return Workload(rows, seq, documents, layout, phase, 0, "all", images, grids[1], clips, decoder), notes


def _read_clips(batch: Mapping[str, Any], key: str, axis: int) -> tuple[int, ...]:
    """Frames of every clip, padding included: the batch holds a rectangle."""
    value = batch.get(key)
    if value is None:
        return ()
    shape = _shape(value)
    if len(shape) <= axis:
        raise WorkloadError(f"{key} of shape {tuple(shape)}: frames should lie along axis {axis}")
    return (check_size(shape[axis], key),) * check_size(shape[0], key)


def _read_decoder(
    batch: Mapping[str, Any], rows: int, phase: str, logits: int | str | None, is_readable: Any, notes: list[str]
) -> Workload:
    """The decoder's side: its ids, or the labels that HF shifts into them."""
    labels = batch.get("labels")
    found = (batch.get(key) for key in ("decoder_input_ids", "decoder_inputs_embeds", "labels"))
    ids = next((value for value in found if value is not None), None)
    if ids is None:
        raise WorkloadError("batch needs decoder_input_ids or labels: this model has a decoder")
    shape = _shape(ids)
    if len(shape) < 2 or shape[0] != rows:
        raise WorkloadError(f"decoder_input_ids and labels must be ({rows}, length), not of shape {tuple(shape)}")
    seq = check_size(shape[1], "decoder_seq")
    mask = batch.get("decoder_attention_mask")
    lengths: tuple[int, ...] | None = None
    for what, value in (("decoder_attention_mask", mask), ("labels", labels)):
        if value is None or len(_shape(value)) != 2 or lengths is not None:
            continue
        if not is_readable(value):
            notes.append(f"{what} lie on {value.device} and were not read: every position of the decoder counted")
            break
        _check_rows(value, what, (rows,), seq)
        lengths = _row_lengths(value) if what != "labels" else tuple(map(_label_length, _list(value, what)))
    if lengths is None or all(length == seq for length in lengths):
        return Workload(rows, seq, None, "unpadded", phase, 0, logits)
    return Workload(rows, seq, lengths, "padded", phase, 0, logits)


def _label_length(row: Sequence[int]) -> int:
    """A row of labels ends where only -100 follows: that is how collators pad it."""
    return max((i for i, label in enumerate(row, 1) if label != -100), default=0)


def _read_layout(
    batch: Mapping[str, Any], rows: int, seq: int, is_readable: Any, notes: list[str]
) -> tuple[tuple[int, ...] | None, str]:
    for key in ("cu_seqlens", "cu_seq_lens_q", "cu_seqlens_q"):
        bounds = batch.get(key)
        if bounds is not None:
            if not is_readable(bounds):
                notes.append(f"{key} lies on {bounds.device} and was not read: counted as one document per row")
                continue
            marks = [check_size(mark, key, 0) for mark in _list(bounds, key)]
            steps = [b - a for a, b in pairwise(marks)]
            documents = tuple(step for step in steps if step)
            if min(steps, default=-1) < 0 or marks[0]:
                raise WorkloadError(f"{key} must rise from 0, not be {format_value(marks)}")
            if sum(documents) > rows * seq:
                raise WorkloadError(f"{key} ends at {sum(documents)}, beyond the batch's {rows * seq} positions")
            return documents, "packed"
    mask = batch.get("attention_mask")
    if mask is not None and len(_shape(mask)) == 2:
        if not is_readable(mask):
            notes.append(f"attention_mask lies on {mask.device} and was not read: every position counted as real")
        else:
            _check_rows(mask, "attention_mask", (rows,), seq)
            lengths = _row_lengths(mask)
            if not any(lengths):
                raise WorkloadError("attention_mask masks every position: there is nothing to count")
            if any(length < seq for length in lengths):
                return tuple(length for length in lengths if length), "padded"
    elif mask is not None:
        notes.append(f"attention_mask of shape {tuple(_shape(mask))} was not read: counted as plain rows")
    positions = batch.get("position_ids")
    if positions is not None and len(_shape(positions)) == 3 and _shape(positions)[0] == 4:
        positions = positions[0]  # Qwen-VL: text positions before the three rotary ones; HF packs by them
    if positions is not None and len(_shape(positions)) == 2:
        if not is_readable(positions):
            notes.append(f"position_ids lie on {positions.device} and were not read: one document per row")
        else:
            _check_rows(positions, "position_ids", (1, rows), seq)
            if not _has_restart(positions):
                return None, "unpadded"
            if mask is not None:
                notes.append(
                    "position_ids restart, but with an attention_mask HF does not keep documents apart: one per row"
                )
                return None, "unpadded"
            given = _list(positions, "position_ids")
            documents = tuple(length for row in given for length in _split_documents(row))
            return documents * (rows // len(given)), "packed"  # one row of positions may serve all
    return None, "unpadded"


def _check_rows(value: Any, what: str, rows: tuple[int, ...], seq: int) -> None:
    """A rectangle of whole numbers as large as input_ids, from an array or from lists."""
    shape = tuple(_shape(value))
    if shape[0] not in rows or shape[1] != seq:
        raise WorkloadError(f"{what} is of shape {shape}, input_ids ({rows[-1]}, {seq})")
    if not hasattr(value, "shape"):
        for row in value:
            if not isinstance(row, Sequence) or len(row) != seq or not all(isinstance(entry, int) for entry in row):
                raise WorkloadError(f"{what}: {format_value(row)} is not a row of {seq} whole numbers")


def _row_lengths(mask: Any) -> tuple[int, ...]:
    if hasattr(mask, "sum"):
        return tuple((mask != 0).sum(-1).tolist())
    return tuple(sum(1 for entry in row if entry) for row in mask)


def _has_restart(positions: Any) -> bool:
    if hasattr(positions, "shape"):
        return bool((positions[:, 1:] != positions[:, :-1] + 1).any())
    return any(b != a + 1 for row in positions for a, b in pairwise(row))


def _split_documents(positions: list[int]) -> list[int]:
    """Lengths of the runs of rising positions: HF starts a new document wherever the next is not one more."""
    starts = [0] + [i for i in range(1, len(positions)) if positions[i] != positions[i - 1] + 1]
    return [end - start for start, end in zip(starts, [*starts[1:], len(positions)], strict=True)]


def _count_images(pixels: Any) -> int:
    shape = _shape(pixels)
    if len(shape) == 4:
        return int(shape[0])
    if len(shape) in (5, 6):
        return int(shape[0]) * int(shape[1])  # of six, the third counts an image's tiles
    raise WorkloadError(f"pixel_values of shape {tuple(shape)} need image_grid_thw beside them")


def _shape(value: Any) -> Sequence[int]:
    if hasattr(value, "shape"):
        return tuple(int(size) for size in value.shape)
    sizes = []
    while isinstance(value, Sequence) and not isinstance(value, str):
        sizes.append(len(value))
        if not value:
            break
        value = value[0]
    return tuple(sizes)


def _list(value: Any, what: str) -> list[Any]:
    value = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise WorkloadError(f"{what} must be a list or an array, not {format_value(value)}")
    return list(value)


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
