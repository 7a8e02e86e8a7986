"""A real batch, as a model is given it, becomes a Workload."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from flopcalc.base.errors import WorkloadError, format_value
from flopcalc.base.units import check_size
from flopcalc.base.vocabulary import PHASES, BatchLayout, Phase, check_word
from flopcalc.core.workload.workload import Grid, Workload, check_logits, read_grids


def read_batch(
    batch: Mapping[str, Any],
    *,
    phase: Phase = "train",
    logits: int | str | None = None,
    read_device: bool = True,
    has_decoder: bool = False,
    audio: tuple[str, int | None] | None = None,
    images: tuple[Grid, ...] = (),
    needs_text: bool = True,
) -> tuple[Workload, list[str]]:
    """A workload from what is given to the model, and notes on what could not be read from it.

    With read_device=False, values on a device are not read: that would make the host wait for it.
    `audio` is the key of a model's audio and the axis of its frames, None if it is a mask of them; `images` what a
    model reads without text.
    """
    if not isinstance(batch, Mapping):
        raise WorkloadError(f"batch must be a mapping as given to the model, not {format_value(batch)}")
    phase = check_word(phase, PHASES, "phase", WorkloadError)
    if phase == "decode":
        raise WorkloadError("decode is described by sizes (seq_len, context), not by a batch")
    logits = check_logits(logits)
    notes: list[str] = []

    def is_readable(tensor: object) -> bool:
        device = getattr(getattr(tensor, "device", None), "type", "cpu")
        return device not in ("meta",) and (read_device or device == "cpu")

    ids = batch.get("input_ids")
    if ids is None:
        ids = batch.get("inputs_embeds")
    clips = _read_clips(batch, *audio, is_readable, notes) if audio is not None else ()
    if ids is None and clips and has_decoder:
        decoder = _read_decoder(batch, len(clips), phase, logits, is_readable, notes)
        return Workload(len(clips), 0, None, "unpadded", phase, 0, "all", clips=clips, decoder=decoder), notes
    if ids is None and images and has_decoder:
        decoder = _read_decoder(batch, len(images), phase, logits, is_readable, notes)
        return Workload(len(images), 0, None, "unpadded", phase, 0, "all", images, decoder=decoder), notes
    if ids is None and not needs_text and not images and batch.get("pixel_values") is not None:
        images = ((0, 0, 0),) * _count_images(batch["pixel_values"])
    if ids is None and images and not needs_text:
        return Workload(len(images), 0, None, "unpadded", phase, 0, logits, images), notes
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
        raise WorkloadError("pixel_values_videos need video_grid_thw too")
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


def _read_clips(
    batch: Mapping[str, object], key: str, axis: int | None, is_readable: Any, notes: list[str]
) -> tuple[int, ...]:
    """Frames of every clip, padding included: the batch holds a rectangle, or a mask of each sample's frames."""
    value = batch.get(key)
    if value is None:
        return ()
    shape = _shape(value)
    if axis is None:
        if not is_readable(value):
            notes.append(f"{key} lies on the device and was not read: no audio counted")
            return ()
        if len(shape) != 2:
            raise WorkloadError(f"{key} must be (batch, length), not of shape {tuple(shape)}")
        return tuple(length for length in _row_lengths(value, key) if length)
    if len(shape) <= axis:
        raise WorkloadError(f"{key} of shape {tuple(shape)}: frames should lie along axis {axis}")
    return (check_size(shape[axis], key),) * check_size(shape[0], key)


def _read_decoder(
    batch: Mapping[str, Any], rows: int, phase: Phase, logits: int | str | None, is_readable: Any, notes: list[str]
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
        lengths = _row_lengths(value, what) if what != "labels" else tuple(map(_label_length, _list(value, what)))
    if lengths is None or all(length == seq for length in lengths):
        return Workload(rows, seq, None, "unpadded", phase, 0, logits)
    return Workload(rows, seq, lengths, "padded", phase, 0, logits)


def _label_length(row: Sequence[int]) -> int:
    """A row of labels ends where only -100 follows: that is how collators pad it."""
    return max((i for i, label in enumerate(row, 1) if label != -100), default=0)


def _read_layout(
    batch: Mapping[str, Any], rows: int, seq: int, is_readable: Any, notes: list[str]
) -> tuple[tuple[int, ...] | None, BatchLayout]:
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
            lengths = _row_lengths(mask, "attention_mask")
            if not any(lengths):
                raise WorkloadError("attention_mask masks every position: there is nothing to count")
            if any(length < seq for length in lengths):
                return tuple(length for length in lengths if length), "padded"
    elif mask is not None:
        if len(_shape(mask)) < 2 and not isinstance(mask, Mapping):
            raise WorkloadError(f"attention_mask must be (batch, length), not {format_value(mask)}")
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


def _row_lengths(mask: Any, what: str) -> tuple[int, ...]:
    """Real positions of every row: a mask holds 0 where there is none, and 1, or a document's number, elsewhere."""
    if not hasattr(mask, "sum"):
        wrong = next((entry for row in mask for entry in row if entry < 0), None)
        if wrong is not None:
            raise WorkloadError(f"{what} holds {wrong}: 0 masks a position, 1 or a document's number keeps it")
        return tuple(sum(1 for entry in row if entry) for row in mask)
    try:
        kind = str(getattr(mask, "dtype", "bool"))
        is_odd = "int" in kind and bool((mask < 0).any())
        if "bool" not in kind and "int" not in kind:
            is_odd = not bool(((mask == 0) | ((mask >= 1) & (mask < 2**31))).all())  # no comparison holds for a NaN
        lengths = tuple((mask != 0).sum(-1).tolist())
    except (TypeError, ValueError, RuntimeError):  # an array of something else than numbers
        raise WorkloadError(f"{what} of dtype {format_value(mask.dtype)} is no mask of numbers") from None
    if is_odd:
        raise WorkloadError(f"{what} holds values such as -1, 0.5 or NaN: 0 masks a position, 1 keeps it")
    return lengths


def _has_restart(positions: Any) -> bool:
    if hasattr(positions, "shape"):
        try:
            return bool((positions[:, 1:] != positions[:, :-1] + 1).any())
        except (TypeError, ValueError, RuntimeError):  # an array of something else than numbers
            raise WorkloadError(f"position_ids of dtype {format_value(positions.dtype)} are no numbers") from None
    return any(b != a + 1 for row in positions for a, b in pairwise(row))


def _split_documents(positions: list[int]) -> list[int]:
    """Lengths of the runs of rising positions: HF starts a new document wherever the next is not one more."""
    starts = [0] + [i for i in range(1, len(positions)) if positions[i] != positions[i - 1] + 1]
    return [end - start for start, end in zip(starts, [*starts[1:], len(positions)], strict=True)]


def _count_images(pixels: object) -> int:
    shape = _shape(pixels)
    if len(shape) == 4:
        return int(shape[0])
    if len(shape) in (5, 6):
        return int(shape[0]) * int(shape[1])  # of six, the third counts an image's tiles
    raise WorkloadError(f"pixel_values of shape {tuple(shape)} need image_grid_thw too")


def _shape(value: object) -> Sequence[int]:
    if hasattr(value, "shape"):
        return tuple(int(size) for size in value.shape)
    sizes = []
    while isinstance(value, Sequence) and not isinstance(value, str):
        sizes.append(len(value))
        if not value:
            break
        value = value[0]
    return tuple(sizes)


def _list(value: object, what: str) -> list[Any]:
    value = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise WorkloadError(f"{what} must be a list or an array, not {format_value(value)}")
    return list(value)
