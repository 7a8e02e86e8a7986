"""Sums of the workload that FLOPs are linear in: tokens, pairs under a mask, patches; each counts itself."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, ClassVar, Literal

from flopcalc.base.errors import SpecError, format_value
from flopcalc.base.frozen import Value, frozen
from flopcalc.base.vocabulary import Convention, Counting, Mask
from flopcalc.core.spec.expressions import Names, evaluate
from flopcalc.core.workload.expression_units import Values, get_decoder, list_units, name_sequence, name_shared
from flopcalc.core.workload.pairs import causal_pairs, decode_pairs, nearby_pairs, window_pairs
from flopcalc.core.workload.workload import Grid, Workload
from flopcalc.hardware.attention_blocks import BLOCK, block_pairs

_MOST_LENGTHS = 65536  # that an expression's values are kept for


@frozen()
class Sum(Value):
    """One sum over a workload; `counting` is 'model' (needed), 'full' (eager code) or a fused kernel's name.

    Two sums are equal when their class and their fields are; those without fields inherit that from here.
    """

    words: ClassVar[str] = ""

    def count(self, load: Workload, counting: Counting) -> int:
        """The sum's value; an encoder's is 0 in decoding, because the encoder has run already."""
        is_done = load.decoder is not None and load.phase == "decode"
        return 0 if is_done else self._count(load, counting)

    def _count(self, load: Workload, counting: Counting) -> int:
        raise NotImplementedError

    def describe(self, convention: Convention = "model") -> str:
        """The sum in words, for `flopcalc explain`."""
        return self.words

    def attention_calls(self, load: Workload, times: int) -> dict[tuple[Mask, int], int]:
        """(mask, length) -> how many sequences of it one attention op runs over: what a table of calls is asked for."""
        return {}


class Tokens(Sum):
    """Positions of the language model, or of an encoder."""

    __slots__ = ()
    words: ClassVar[str] = "tokens"

    def _count(self, load: Workload, counting: Counting) -> int:
        if counting == "model" and load.documents is not None:
            return sum(load.documents)
        return load.rows * load.seq


@frozen()
class Pairs(Sum):
    """Query-key pairs of a sequence under a mask; window 0: none; of a full mask, how far a query sees both ways."""

    mask: Mask  # 'causal' or 'full'
    window: int = 0
    block: int = BLOCK  # of a fused kernel
    shows: bool = False  # in addition to the causal mask, tokens of an image see each other both ways

    def has_mask(self, load: Workload) -> bool:
        """Whether SDPA is handed a mask: for documents, windows, and images that see themselves both ways."""
        is_cut = bool(self.window) and self.window < load.seq
        return load.documents is not None or is_cut or (self.shows and bool(load.all_grids))

    def _count(self, load: Workload, counting: Counting) -> int:
        window, documents = self.window, load.documents
        if load.phase == "decode":
            # One query a call: eager code attends to the cache, which a window has already cut.
            return load.rows * decode_pairs(load.seq, load.context, window)
        if self.mask == "full":
            if counting == "model":
                if documents is not None:
                    return sum([nearby_pairs(length, window) for length in documents])
                return load.rows * nearby_pairs(load.seq, window)
            return load.rows * load.seq * load.seq
        if counting == "model":
            if documents is not None:
                if not window:  # the usual case, in a training loop with many documents
                    return (sum([length * length for length in documents]) + sum(documents)) // 2
                return sum([causal_pairs(length, window) for length in documents])
            return load.rows * causal_pairs(load.seq, window)
        if counting == "full":
            return load.rows * load.seq * load.seq
        if counting == "flash":
            if load.layout == "packed" and documents is not None:
                return sum([block_pairs(length, window, self.block) for length in documents])
            return load.rows * block_pairs(load.seq, window, self.block)
        # SDPA's other kernels skip nothing under an explicit mask.
        return load.rows * (load.seq * load.seq if self.has_mask(load) else block_pairs(load.seq, 0, self.block))

    def describe(self, convention: Convention = "model") -> str:
        window = f", window {self.window}" if self.window else ""
        return f"query-key pairs ({self.mask}{window})"

    def attention_calls(self, load: Workload, times: int) -> dict[tuple[Mask, int], int]:
        is_packed = load.layout == "packed" and bool(load.documents)
        lengths = load.documents if is_packed and load.documents else (load.seq,)
        is_cut = self.mask == "causal" and self.window and self.window < max(lengths)
        mask: Mask = "window" if is_cut else self.mask
        if not is_packed:
            return {(mask, load.seq): load.rows}
        return dict(Counter((mask, length) for length in lengths))


class Logits(Sum):
    """Positions that get logits."""

    __slots__ = ()
    words: ClassVar[str] = "positions with logits"

    def _count(self, load: Workload, counting: Counting) -> int:
        if load.logits == "all" or load.phase == "decode":
            return Tokens().count(load, counting)
        keep = 1 if load.logits == "last" else int(load.logits)
        if counting == "model" and load.layout == "padded" and load.documents is not None:
            return sum([min(keep, length) for length in load.documents])
        # A packed row has one last position: HF keeps logits per row, not per document.
        return load.rows * min(keep, load.seq)


class CachedKeys(Sum):
    """Positions whose keys HF's code forms anew at every call, from a cache of something else."""

    __slots__ = ()
    words: ClassVar[str] = "keys and values formed"

    def _count(self, load: Workload, counting: Counting) -> int:
        if load.phase == "decode" and counting != "model":
            return load.rows * decode_pairs(load.seq, load.context)
        return Tokens().count(load, counting)


class Calls(Sum):
    """Calls of the model: one, or one per new token."""

    __slots__ = ()
    words: ClassVar[str] = "calls"

    def _count(self, load: Workload, counting: Counting) -> int:
        return load.seq if load.phase == "decode" else 1


class Folds(Sum):
    """Foldings of an adapter into a weight: torch's parametrization computes one more when it is registered."""

    __slots__ = ()
    words: ClassVar[str] = "folds"

    def _count(self, load: Workload, counting: Counting) -> int:
        return Calls().count(load, counting) * 2


class Images(Sum):
    """Images and videos."""

    __slots__ = ()
    words: ClassVar[str] = "images"

    def _count(self, load: Workload, counting: Counting) -> int:
        return len(load.all_grids)

    def attention_calls(self, load: Workload, times: int) -> dict[tuple[Mask, int], int]:
        return _add_calls({math.isqrt(times): 1} for _ in load.all_grids)


class Tiles(Sum):
    """Tiles of all images."""

    __slots__ = ()
    words: ClassVar[str] = "tiles"

    def _count(self, load: Workload, counting: Counting) -> int:
        return sum([grid[0] for grid in load.all_grids])

    def attention_calls(self, load: Workload, times: int) -> dict[tuple[Mask, int], int]:
        return _add_calls({math.isqrt(times): t} for t, _, _ in load.all_grids)


class Patches(Sum):
    """Patches of all images and videos."""

    __slots__ = ()
    words: ClassVar[str] = "patches"

    def _count(self, load: Workload, counting: Counting) -> int:
        return sum([t * h * w for t, h, w in load.all_grids])


@frozen()
class MergedPatches(Patches):
    """Patches after `area` of them were merged into one."""

    words: ClassVar[str] = "merged patches"

    area: int

    def _count(self, load: Workload, counting: Counting) -> int:
        return Patches._count(self, load, counting) // self.area


class Frames(Sum):
    """Pairs of patches of the same temporal patch."""

    __slots__ = ()
    words: ClassVar[str] = "query-key pairs within temporal patches"

    def _count(self, load: Workload, counting: Counting) -> int:
        return sum([t * h * w * h * w for t, h, w in load.all_grids])

    def attention_calls(self, load: Workload, times: int) -> dict[tuple[Mask, int], int]:
        return _add_calls({h * w: t} for t, h, w in load.all_grids)


@frozen()
class Windows(Sum):
    """Pairs of patches of the same window of `window` merged patches a side."""

    words: ClassVar[str] = "query-key pairs within windows"

    merge: int
    window: int

    @property
    def side(self) -> int:
        """Patches along one side of a window."""
        return self.merge * self.window

    def _count(self, load: Workload, counting: Counting) -> int:
        return sum([window_pairs(grid, self.merge, self.window) for grid in load.all_grids])

    def attention_calls(self, load: Workload, times: int) -> dict[tuple[Mask, int], int]:
        return _add_calls(
            {height * width: rows * columns * t}
            for t, h, w in load.all_grids
            for height, rows in _split_side(h, self.side)
            for width, columns in _split_side(w, self.side)
        )


@frozen()
class Expression(Sum):
    """An expression of a spec, summed over every unit of the workload; the spec's own names have their values."""

    unit: str
    text: str
    constants: tuple[tuple[str, Any], ...] = ()

    def count(self, load: Workload, counting: Counting) -> int:
        is_whole = load.phase != "decode" and load.documents is not None and counting == "model"
        if is_whole and self.unit == "sequence" and load.documents is not None:
            values_of = _find_lengths(self.text, self.constants, load.phase == "train", name_shared(load))
            return sum([values_of[length] for length in load.documents])
        total = 0
        for values, many in list_units(self.unit, load, counting):
            total += _evaluate_unit(self.text, self.constants, values) * many
        return total

    def describe(self, convention: Convention = "model") -> str:
        return f"rows (per {self.unit}: {self.text})"


@frozen()
class InDecoder(Sum):
    """The same sum over an encoder-decoder's decoder."""

    inner: Sum

    def count(self, load: Workload, counting: Counting) -> int:
        return self.inner.count(get_decoder(load), counting)

    def describe(self, convention: Convention = "model") -> str:
        return self.inner.describe(convention)


@frozen()
class Only(Sum):
    """The same sum over the images alone, or the videos alone: one of two towers."""

    which: str  # 'images' or 'videos'
    inner: Sum

    def _count(self, load: Workload, counting: Counting) -> int:
        without: dict[str, tuple[Grid, ...]] = {"grids" if self.which == "videos" else "videos": ()}
        return self.inner.count(load.replace(**without), counting)

    def describe(self, convention: Convention = "model") -> str:
        return self.inner.describe(convention)


@frozen()
class Either(Sum):
    """What the model needs, and what HF executes, where the two are different sums."""

    needed: Sum
    executed: Sum

    def count(self, load: Workload, counting: Counting) -> int:
        return (self.needed if counting == "model" else self.executed).count(load, counting)

    def describe(self, convention: Convention = "model") -> str:
        return (self.needed if convention == "model" else self.executed).describe(convention)


@frozen()
class Minus(Sum):
    """One sum less another."""

    rows: Sum
    less: Sum

    def count(self, load: Workload, counting: Counting) -> int:
        return self.rows.count(load, counting) - self.less.count(load, counting)

    def describe(self, convention: Convention = "model") -> str:
        return f"{self.rows.describe(convention)} less {self.less.describe(convention)}"


@frozen()
class NeededSum(Sum):
    """A sum that counts under `model` alone: HF executes another product there."""

    inner: Sum

    def count(self, load: Workload, counting: Counting) -> int:
        return self.inner.count(load, counting) if counting == "model" else 0

    def describe(self, convention: Convention = "model") -> str:
        return self.inner.describe(convention)


@frozen()
class ExecutedSum(Sum):
    """A sum that counts wherever HF's code is counted, not under `model`."""

    inner: Sum

    def count(self, load: Workload, counting: Counting) -> int:
        return 0 if counting == "model" else self.inner.count(load, counting)

    def describe(self, convention: Convention = "model") -> str:
        return self.inner.describe(convention)


class Samples(Sum):
    """Samples that clipping sums over; torch.einsum makes no product of a sum over one entry."""

    __slots__ = ()
    words: ClassVar[str] = "samples"

    def _count(self, load: Workload, counting: Counting) -> int:
        return load.rows if load.rows > 1 else 0


@frozen()
class PerSample(Sum):
    """What clipping works on within each sample, a row of the batch: its rows, or the pairs of its rows.

    A sample of one row has no sum over rows, so no product that torch.einsum would make, except for 'squares'.
    """

    what: Literal["rows", "squares", "products"]
    inner: Sum

    def _count(self, load: Workload, counting: Counting) -> int:
        each = self.inner.count(load, counting) // load.rows
        if self.what == "squares":
            return load.rows * each * each
        if each == 1:
            return 0
        return load.rows * each * (each if self.what == "products" else 1)

    def describe(self, convention: Convention = "model") -> str:
        rows = self.inner.describe(convention)
        return rows if self.what == "rows" else f"{rows}² of each sample"


class Once(Sum):
    """One: what a table has measured of exactly this workload."""

    __slots__ = ()
    words: ClassVar[str] = "tile padding"

    def count(self, load: Workload, counting: Counting) -> int:
        return 1


def _add_calls(found: Iterable[dict[int, int]]) -> dict[tuple[Mask, int], int]:
    calls: Counter[tuple[Mask, int]] = Counter()
    for lengths in found:
        for length, many in lengths.items():
            calls["full", length] += many
    return dict(calls)


class _Lengths(dict[int, int]):
    """length of a document -> value of an expression: training loops meet the same lengths again and again."""

    def __init__(self, text: str, constants: tuple[tuple[str, object], ...], is_training: bool, shared: Values) -> None:
        super().__init__()
        self._terms = (text, constants, is_training, shared)

    def __missing__(self, length: int) -> int:
        if len(self) >= _MOST_LENGTHS:
            self.clear()
        text, constants, is_training, shared = self._terms
        value = self[length] = _evaluate_unit(text, constants, name_sequence(length, is_training, shared))
        return value


_find_lengths = lru_cache(maxsize=256)(_Lengths)


@lru_cache(maxsize=65536)
def _evaluate_unit(text: str, constants: tuple[tuple[str, object], ...], values: Values) -> int:
    value = evaluate(text, Names({**dict(constants), **dict(values)}))
    if isinstance(value, bool) or getattr(value, "denominator", None) != 1 or value < 0:
        raise SpecError(f"rows {text!r} must be a whole number, not {format_value(value)}, where {dict(values)}")
    return int(value)


def _split_side(size: int, side: int) -> list[tuple[int, int]]:
    """(length, how many) of the windows along one side, the ragged last one apart."""
    return [(length, many) for length, many in ((side, size // side), (size % side, 1)) if length and many]
