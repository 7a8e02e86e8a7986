"""Workload: what one step processes (lengths, images, phase); its sums are what FLOPs are linear in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import TypeAlias, TypedDict, Unpack

from flopcalc.base.errors import WorkloadError, format_nearest, format_value
from flopcalc.base.frozen import Value, frozen
from flopcalc.base.spelling import spell
from flopcalc.base.units import check_items, check_size, parse_size, parse_sizes, read_size, read_sizes
from flopcalc.base.vocabulary import BATCH_LAYOUTS, PHASES, BatchLayout, Phase, check_word

Grid: TypeAlias = tuple[int, int, int]


@frozen()
class Workload(Value):
    """One micro-batch: `rows` sequences of `seq` positions. `documents` are the real lengths, if there are fewer.

    Values that no step can have raise a WorkloadError. In a grid of zeros, the model knows the size itself. `clips` are
    audio, in frames of the feature extractor. With a `decoder`, which has its own tokens, this is the encoder's side,
    and `seq` may be 0. For a denoiser, `grids` are its latents, and `seq` is the length of its text. For images without
    text, `seq` is 0 too.
    """

    rows: int
    seq: int
    documents: tuple[int, ...] | None
    layout: BatchLayout
    phase: Phase
    context: int
    logits: int | str
    grids: tuple[Grid, ...]
    videos: tuple[Grid, ...]
    clips: tuple[int, ...]
    decoder: Workload | None

    def __init__(
        self,
        rows: int = 1,
        seq: int = 1,
        documents: Iterable[int] | None = None,
        layout: BatchLayout = "unpadded",
        phase: Phase = "train",
        context: int = 0,
        logits: int | str | None = None,
        grids: Sequence[Grid] = (),
        videos: Sequence[Grid] = (),
        clips: Iterable[int] = (),
        decoder: Workload | None = None,
    ) -> None:
        put = object.__setattr__
        put(self, "rows", _check_quickly(rows, "rows", 1))
        put(self, "seq", _check_quickly(seq, "seq", 1 if decoder is None and grids == () and videos == () else 0))
        put(self, "documents", _check_each(documents, "documents") if documents is not None else None)
        put(self, "layout", check_word(layout, BATCH_LAYOUTS, "layout", WorkloadError))
        put(self, "phase", check_word(phase, PHASES, "phase", WorkloadError))
        put(self, "context", _check_quickly(context, "context", 0))
        if logits is None:
            logits = "last" if phase == "prefill" else "all"
        put(self, "logits", logits if logits in ("all", "last") else check_size(logits, "logits"))
        put(self, "grids", read_grids(grids, "grids", 0) if grids != () else ())
        put(self, "videos", read_grids(videos, "videos", 0) if videos != () else ())
        put(self, "clips", _check_each(clips, "clips") if clips != () else ())
        put(self, "decoder", decoder)
        self._check_together()

    def _check_together(self) -> None:
        if self.context and self.phase != "decode":
            raise WorkloadError(f"{spell('context')} belongs to phase decode, not {self.phase}")
        if self.decoder is not None:
            if not isinstance(self.decoder, Workload):
                raise WorkloadError(f"decoder must be a Workload, not {format_value(self.decoder)}")
            if self.decoder.phase != self.phase:
                raise WorkloadError(f"a decoder in phase {self.decoder.phase} cannot follow phase {self.phase}")
        elif self.phase == "decode":
            if self.logits != "all":
                raise WorkloadError("decode makes logits for each new token: logits cannot be chosen there")
            if self.documents is not None or self.grids or self.videos:
                raise WorkloadError("decode takes neither packed lengths nor images: their keys are in the context")
            if self.clips:
                raise WorkloadError("decode takes no audio: its keys are in the context")
        if (self.documents is None) != (self.layout == "unpadded"):
            needs = "no documents" if self.layout == "unpadded" else "documents, the real lengths"
            raise WorkloadError(f"layout {self.layout} takes {needs}")
        if not self.documents:
            return
        if self.layout == "padded" and (len(self.documents) > self.rows or max(self.documents) > self.seq):
            raise WorkloadError(f"padded documents must be at most {self.rows}, of at most {self.seq} tokens")
        if sum(self.documents) > self.rows * self.seq:
            raise WorkloadError(f"documents of {sum(self.documents)} tokens do not fit into {self.rows} x {self.seq}")

    @property
    def all_grids(self) -> tuple[Grid, ...]:
        return self.grids + self.videos if self.videos else self.grids

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

    def __repr__(self) -> str:
        extra = f", documents={self.documents}" if self.documents is not None else ""
        extra += f", context={self.context}" if self.phase == "decode" else ""
        extra += f", images={list(self.grids)}" if self.grids else ""
        extra += f", videos={list(self.videos)}" if self.videos else ""
        extra += f", clips={list(self.clips)}" if self.clips else ""
        extra += f", decoder={self.decoder}" if self.decoder is not None else ""
        return f"Workload({self.rows} x {self.seq} {self.layout}, {self.phase}{extra})"


def _check_quickly(value: int, what: str, minimum: int) -> int:
    return value if type(value) is int and minimum <= value < 10**9 else check_size(value, what, minimum)


def _check_each(values: Iterable[int], what: str) -> tuple[int, ...]:
    if not isinstance(values, Iterable) or isinstance(values, str):
        raise WorkloadError(f"{what} must be a list of lengths, not {format_value(values)}")
    found = tuple(values)
    if found and set(map(type, found)) == {int} and min(found) >= 1 and max(found) < 10**9:
        return found
    return tuple([_check_quickly(value, what, 1) for value in found])


class Media(TypedDict, total=False):
    """Images and videos in patches, audio in frames of the feature extractor; those of the whole batch."""

    image_grid_thw: object
    video_grid_thw: object
    clips: Iterable[int] | None


def make_workload(
    batch_size: int = 1,
    seq_len: int | None = None,
    *,
    lengths: Iterable[int] | None = None,
    phase: Phase = "train",
    context: int | None = None,
    logits: int | str | None = None,
    decoder_seq_len: int | None = None,
    **media: Unpack[Media],
) -> Workload:
    """A checked Workload from plain arguments: `make_workload(2, 4096, image_grid_thw=[(1, 36, 52)] * 2)`."""
    check_word(phase, PHASES, "phase", WorkloadError)
    for name in media:
        if name not in Media.__annotations__:
            raise WorkloadError(
                f"a workload takes no {name}.{format_nearest(name, Media.__annotations__)} It holds patches: "
                "pictures in pixels are given to estimate_flops()"
            )
    grids, videos, frames = _read_media(**media) if media else ((), (), ())
    if decoder_seq_len is not None:
        if lengths is not None:
            raise WorkloadError(
                f"an encoder-decoder takes no packed lengths: give {spell('seq')} and {spell('decoder_seq')}"
            )
        decoder = make_workload(batch_size, decoder_seq_len, phase=phase, context=context, logits=logits)
        seq = read_size(seq_len, "seq") if seq_len is not None else 0  # an encoder of audio has no tokens
        return Workload(decoder.rows, seq, None, "unpadded", phase, 0, "all", grids, videos, frames, decoder)
    if phase != "decode" and context is not None:
        raise WorkloadError(f"{spell('context')} belongs to phase decode, not {phase}")
    logits = check_logits(logits)
    if phase == "decode":
        past = read_size(context, "context", 0) if context is not None else 0
        rows, seq = read_size(batch_size, "batch"), read_size(1 if seq_len is None else seq_len, "seq")
        return Workload(rows, seq, lengths, "unpadded", phase, past, logits, grids, videos, frames)
    if lengths is not None:
        if seq_len is not None:
            raise WorkloadError(f"lengths describe a packed row: leave {spell('seq')} out, their sum is its length")
        documents = read_sizes(lengths, "lengths")
        if not documents:
            raise WorkloadError("lengths must hold at least one document")
        rows = read_size(batch_size, "batch")
        return Workload(rows, sum(documents), documents * rows, "packed", phase, 0, logits, grids, videos, frames)
    if seq_len is None and not (grids or videos):
        raise WorkloadError(f"{spell('seq')} is missing: the length that the language model sees per sample")
    rows, seq = read_size(batch_size, "batch"), 0 if seq_len is None else read_size(seq_len, "seq")
    return Workload(rows, seq, None, "unpadded", phase, 0, logits, grids, videos, frames)


def _read_media(
    image_grid_thw: object = None, video_grid_thw: object = None, clips: Iterable[int] | None = None
) -> tuple[tuple[Grid, ...], tuple[Grid, ...], tuple[int, ...]]:
    grids = () if image_grid_thw is None else read_grids(image_grid_thw, "image_grid_thw")
    videos = () if video_grid_thw is None else read_grids(video_grid_thw, "video_grid_thw")
    frames = () if clips is None else tuple(check_size(each, "clips") for each in check_items(clips, "clips"))
    return grids, videos, frames


def check_workload_alone(workload: object, others: Mapping[str, object]) -> Workload:
    """The Workload that was given; an error if other arguments repeat what it already says."""
    if not isinstance(workload, Workload):
        raise WorkloadError(
            f"workload must be a Workload, not {format_value(workload)}: "
            "sizes have names, as batch_size=8, seq_len=2048"
        )
    for name, value in others.items():
        if value is not None:
            raise WorkloadError(f"workload already says sizes, phase and images: leave {name} out")
    return workload


def check_logits(value: int | str | None) -> int | str | None:
    """'all', 'last', a number of positions, or None for what the phase needs."""
    if value is None or (isinstance(value, str) and value in ("all", "last")):
        return value
    if isinstance(value, str):
        return parse_size(value, f"{spell('logits')} (all, last or a number)")
    return read_size(value, "logits")


def check_load(value: object) -> Workload:
    """A Workload, or an error that says what was given in its place."""
    if not isinstance(value, Workload):
        raise WorkloadError(f"a workload is what make_workload() gives, not {format_value(value)}")
    return value


class _ReadGrids(tuple[Grid, ...]):
    """Grids that were read, and are not checked a second time: a training loop may have many."""

    __slots__ = ()


def read_grids(value: object, what: str, minimum: int = 1) -> tuple[Grid, ...]:
    """Rows of (t, h, w) from a tensor, an array, nested sequences, or texts such as '1,36,52'."""
    if type(value) is _ReadGrids:
        return value
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (tuple, list)) and {tuple, list}.issuperset(map(type, value)) and set(map(len, value)) == {3}:
        sizes = list(chain.from_iterable(value))  # the usual case
        if set(map(type, sizes)) == {int} and min(sizes) >= minimum and max(sizes) < 10**9:
            return _ReadGrids([(t, h, w) for t, h, w in value])
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, Sequence):
        raise WorkloadError(f"{what} must be rows of (t, h, w), not {type(value).__name__}")
    if value and not isinstance(value[0], (Sequence, Mapping)) and not hasattr(value[0], "tolist"):
        value = [value]
    grids = []
    for row in value:
        row = row.tolist() if hasattr(row, "tolist") else parse_sizes(row, what, 3) if isinstance(row, str) else row
        if not isinstance(row, Sequence) or len(row) != 3:
            raise WorkloadError(f"{what}: {format_value(row)} is not (t, h, w)")
        t, h, w = (_check_quickly(entry, what, minimum) for entry in row)
        grids.append((t, h, w))
    return tuple(grids)
