"""Workload: what one step processes (lengths, images, phase); its sums are what FLOPs are linear in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from flopcalc.errors import WorkloadError, format_value
from flopcalc.units import check_items, check_size
from flopcalc.words import PHASES, check_word

Grid: TypeAlias = tuple[int, int, int]


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

    @property
    def longest(self) -> int:
        """Positions of the longest sequence, cached ones included."""
        longest = max(self.documents) if self.layout == "packed" and self.documents else self.seq
        return longest + self.context

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
    check_word(phase, PHASES, "phase", WorkloadError)
    frames = tuple(check_size(each, "clips") for each in check_items(clips, "clips")) if clips is not None else ()
    if decoder_seq_len is not None:
        if lengths is not None:
            raise WorkloadError("an encoder-decoder takes no packed lengths: give seq and decoder_seq")
        decoder = make_workload(batch_size, decoder_seq_len, phase=phase, context=context, logits=logits)
        grids = read_grids(image_grid_thw, "image_grid_thw") if image_grid_thw is not None else ()
        videos = read_grids(video_grid_thw, "video_grid_thw") if video_grid_thw is not None else ()
        seq = check_size(seq_len, "seq") if seq_len is not None else 0  # an encoder of audio has no tokens
        return Workload(decoder.rows, seq, None, "unpadded", phase, 0, "all", grids, videos, frames, decoder)
    if phase != "decode" and context is not None:
        raise WorkloadError(f"context belongs to phase decode, not {phase}")
    logits = check_logits(logits)
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
        if seq_len is not None or check_size(batch_size, "batch") != 1:
            raise WorkloadError("lengths describe one packed row: give neither seq nor batch with them")
        given = check_items(lengths, "lengths", form="a list of document lengths")
        documents = tuple(check_size(length, "lengths") for length in given)
        if not documents:
            raise WorkloadError("lengths must hold at least one document")
        return Workload(1, sum(documents), documents, "packed", phase, 0, logits, grids, videos, frames)
    if seq_len is None:
        raise WorkloadError("seq is missing: the length that the language model sees per sample")
    rows = batch_size if type(batch_size) is int and 0 < batch_size < 10**9 else check_size(batch_size, "batch")
    seq = seq_len if type(seq_len) is int and 0 < seq_len < 10**9 else check_size(seq_len, "seq")
    return Workload(rows, seq, None, "unpadded", phase, 0, logits, grids, videos, frames)


def check_logits(value: int | str | None) -> int | str | None:
    """'all', 'last', a number of positions, or None for what the phase needs."""
    if value is None or (isinstance(value, str) and value in ("all", "last")):
        return value
    return check_size(value, "logits")


def check_load(value: object) -> Workload:
    """A Workload, or an error that says what was given in its place."""
    if not isinstance(value, Workload):
        raise WorkloadError(f"a workload is what make_workload() gives, not {format_value(value)}")
    return value


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
