"""Workloads from arguments and batches; every pair count equals a mask built cell by cell."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from flopcalc import WorkloadError, bind, make_workload
from flopcalc.core.workload.batch import read_batch
from flopcalc.core.workload.pairs import causal_pairs, decode_pairs, window_pairs
from flopcalc.core.workload.sums import Expression, Frames, Logits, Pairs, Patches, Tokens
from flopcalc.core.workload.workload import Workload, read_grids
from flopcalc.hardware.attention_blocks import block_pairs

Grid = tuple[int, int, int]
Mask = list[list[bool]]


# --- masks, cell by cell ----------------------------------------------------------------------------------------------
def causal_mask(seq: int, window: int = 0, documents: Sequence[int] | None = None, real: int | None = None) -> Mask:
    """mask[q][k]: k is not after q, at most window - 1 before it, in the same document, and neither is padding."""
    owner = [number for number, length in enumerate(documents or [seq]) for _ in range(length)]
    return [
        [
            k <= q
            and (not window or q - k < window)
            and owner[q] == owner[k]
            and (real is None or (q < real and k < real))
            for k in range(seq)
        ]
        for q in range(seq)
    ]


def decode_mask(new: int, context: int, window: int = 0) -> Mask:
    """Row j: the keys that new token j sees, itself included."""
    total = context + new
    return [[k <= context + j and (not window or context + j - k < window) for k in range(total)] for j in range(new)]


def vision_mask(grid: Grid, side: int | None) -> Mask:
    """Patches of one image that see each other: same temporal patch, and same square of `side` patches if given."""
    cells = list(itertools.product(*(range(size) for size in grid)))

    def home(cell: Grid) -> Grid:
        t, y, x = cell
        return (t, y // side, x // side) if side else (t, 0, 0)

    return [[home(a) == home(b) for b in cells] for a in cells]


def count_cells(mask: Mask) -> int:
    return sum(cell for row in mask for cell in row)


@pytest.mark.parametrize("seq", range(1, 12))
@pytest.mark.parametrize("window", [0, 1, 2, 5, 10, 11, 12, 40])
def test_causal_pairs_equal_the_mask(seq: int, window: int) -> None:
    expected = count_cells(causal_mask(seq, window))
    assert causal_pairs(seq, window) == expected
    load = make_workload(3, seq)
    assert Pairs("causal", window).count(load, "model") == 3 * expected
    assert Pairs("causal", window).count(load, "full") == 3 * seq * seq


@pytest.mark.parametrize("documents", [(4,), (1, 1), (3, 1, 8), (5, 9), (2, 7, 7, 1)])
@pytest.mark.parametrize("window", [0, 1, 3, 8, 30])
def test_packed_pairs_equal_the_mask(documents: tuple[int, ...], window: int) -> None:
    load = make_workload(lengths=documents)
    expected = count_cells(causal_mask(sum(documents), window, documents))
    assert Pairs("causal", window).count(load, "model") == expected
    assert Pairs("causal", window).count(load, "full") == sum(documents) ** 2
    bidirectional = sum(length * length for length in documents)
    assert Pairs("full", 0).count(load, "model") == bidirectional


@pytest.mark.parametrize("lengths", [(6, 11), (14, 1), (3, 3, 9)])
@pytest.mark.parametrize("window", [0, 4, 20])
def test_padded_pairs_equal_the_mask(lengths: tuple[int, ...], window: int) -> None:
    seq = 14
    load = Workload(len(lengths), seq, lengths, "padded")
    expected = sum(count_cells(causal_mask(seq, window, real=length)) for length in lengths)
    assert Pairs("causal", window).count(load, "model") == expected
    assert Tokens().count(load, "model") == sum(lengths) == load.tokens
    assert Tokens().count(load, "full") == len(lengths) * seq


@pytest.mark.parametrize("context", [0, 1, 4, 9])
@pytest.mark.parametrize("new", [1, 2, 6])
@pytest.mark.parametrize("window", [0, 1, 3, 5, 6, 10, 30])
def test_decode_pairs_equal_the_mask(new: int, context: int, window: int) -> None:
    expected = count_cells(decode_mask(new, context, window))
    assert decode_pairs(new, context, window) == expected
    load = make_workload(2, new, phase="decode", context=context)
    assert Pairs("causal", window).count(load, "model") == 2 * expected


@pytest.mark.parametrize("grid", [(1, 6, 6), (2, 6, 12), (1, 12, 18), (3, 18, 6)])
@pytest.mark.parametrize("merge", [1, 2, 3])
@pytest.mark.parametrize("window", [1, 2, 4, 9])
def test_window_pairs_equal_the_mask(grid: Grid, merge: int, window: int) -> None:
    assert window_pairs(grid, merge, window) == count_cells(vision_mask(grid, window * merge))


@pytest.mark.parametrize("grids", [[(1, 4, 4)], [(2, 2, 6), (1, 4, 2)], [(3, 1, 5)]])
def test_frame_pairs_equal_the_mask(grids: list[Grid]) -> None:
    load = make_workload(1, 100, image_grid_thw=grids)
    expected = sum(count_cells(vision_mask(grid, None)) for grid in grids)
    assert Frames().count(load, "model") == expected
    assert Patches().count(load, "full") == sum(t * h * w for t, h, w in grids)


@pytest.mark.parametrize(
    ("seq", "window", "pairs"), [(1, 0, 64), (128, 0, 16384), (1000, 0, 564000), (1000, 500, 471000)]
)
def test_block_pairs(seq: int, window: int, pairs: int) -> None:
    assert block_pairs(seq, window) == pairs
    assert block_pairs(seq, window) >= causal_pairs(seq, window)
    assert Pairs("causal", window).count(make_workload(2, seq), "flash") == 2 * pairs


def test_kernels_without_mask_support_execute_every_masked_pair() -> None:
    packed = make_workload(lengths=[100, 156])
    assert make_workload(2, lengths=[100, 156]).documents == (100, 156) * 2
    assert Pairs("causal", 0).count(packed, "efficient") == 256 * 256
    assert Pairs("causal", 0).count(packed, "flash") == block_pairs(100) + block_pairs(156)
    plain = make_workload(1, 256)
    assert Pairs("causal", 0).count(plain, "cudnn") == block_pairs(256)
    assert Pairs("causal", 64).count(plain, "cudnn") == 256 * 256
    assert Pairs("causal", 999).count(plain, "cudnn") == block_pairs(256)


@pytest.mark.parametrize(
    ("arguments", "model", "full"),
    [
        ({"batch_size": 2, "seq_len": 5}, 10, 10),
        ({"batch_size": 2, "seq_len": 5, "phase": "prefill"}, 2, 2),
        ({"batch_size": 2, "seq_len": 5, "phase": "prefill", "logits": "all"}, 10, 10),
        ({"batch_size": 2, "seq_len": 5, "logits": "last"}, 2, 2),
        ({"batch_size": 2, "seq_len": 5, "logits": 3}, 6, 6),
        ({"batch_size": 2, "seq_len": 5, "logits": 9}, 10, 10),
        ({"batch_size": 2, "seq_len": 5, "phase": "decode", "context": 7}, 10, 10),
        ({"lengths": [3, 4], "logits": "last"}, 1, 1),
    ],
)
def test_logit_rows(arguments: dict[str, Any], model: int, full: int) -> None:
    load = make_workload(**arguments)
    assert Logits().count(load, "model") == model
    assert Logits().count(load, "full") == full


def test_logit_rows_of_padded_rows() -> None:
    load = Workload(2, 8, (2, 5), "padded", logits=3)
    assert Logits().count(load, "model") == 2 + 3
    assert Logits().count(load, "full") == 6


# --- arguments --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "seq_len is missing"),
        ({"seq_len": 0}, "at least 1"),
        ({"seq_len": -3}, "at least 1"),
        ({"seq_len": 10**13}, "at most"),
        ({"seq_len": 10**5000}, "at most"),
        ({"seq_len": 1.5}, "whole number"),
        ({"seq_len": "12x"}, "whole number"),
        ({"seq_len": True}, "whole number"),
        ({"seq_len": 4, "batch_size": 0}, "batch_size must be at least 1"),
        ({"seq_len": 4, "batch_size": None}, "whole number"),
        ({"seq_len": 4, "phase": "backward"}, "train, forward, prefill, decode"),
        ({"seq_len": 4, "phase": []}, "unknown"),
        ({"seq_len": 4, "context": 3}, "context belongs to phase decode"),
        ({"seq_len": 4, "context": -1, "phase": "decode"}, "at least 0"),
        ({"seq_len": 4, "logits": 0}, "logits must be at least 1"),
        ({"seq_len": 4, "logits": "first"}, "logits (all, last or a number): 'first' is not a whole number"),
        ({"lengths": []}, "at least one document"),
        ({"lengths": [3, 0]}, "lengths must be at least 1"),
        ({"lengths": 3}, "lengths must be a list"),
        ({"lengths": [3], "seq_len": 3}, "leave seq_len out, their sum is its length"),
        ({"lengths": [3], "phase": "decode"}, "decode takes neither"),
        ({"seq_len": 4, "image_grid_thw": [[1, 2, 2]], "phase": "decode"}, "decode takes neither"),
        ({"seq_len": 4, "image_grid_thw": [[1, 2]]}, "is not (t, h, w)"),
        ({"seq_len": 4, "image_grid_thw": "1,2"}, "image_grid_thw: '1,2' must hold 3 numbers"),
        ({"seq_len": 4, "image_grid_thw": 7}, "rows of (t, h, w)"),
        ({"seq_len": 4, "image_grid_thw": [{}]}, "is not (t, h, w)"),
        ({"seq_len": 4, "video_grid_thw": [[1, 2, 0]]}, "video_grid_thw must be at least 1"),
        ({"seq_len": 4, "video_grid_thw": [[1, 2, 2.0]]}, "whole number"),
        ({"seq_len": 4, "video_grid_thw": [[1, 10**5000, 2]]}, "video_grid_thw must be at most"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        make_workload(**arguments)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 200


class Array:
    """The little of an array's face that flopcalc reads: shape, tolist, comparison, sum, any, slices."""

    def __init__(self, values: Any) -> None:
        self.values = values

    @property
    def shape(self) -> tuple[int, ...]:
        sizes, value = [], self.values
        while isinstance(value, list):
            sizes.append(len(value))
            value = value[0] if value else None
        return tuple(sizes)

    def tolist(self) -> Any:
        return self.values

    def _map(self, function: Any, values: Any) -> Any:
        return [self._map(function, value) for value in values] if isinstance(values, list) else function(values)

    def __ne__(self, other: object) -> Any:
        if isinstance(other, Array):
            pairs = zip(self.values, other.values, strict=True)
            return Array([[x != y for x, y in zip(a, b, strict=True)] for a, b in pairs])
        return Array(self._map(lambda value: value != other, self.values))

    __hash__ = None  # type: ignore[assignment]

    def __add__(self, other: int) -> Array:
        return Array(self._map(lambda value: value + other, self.values))

    def __getitem__(self, key: Any) -> Array:
        _, columns = key
        return Array([row[columns] for row in self.values])

    def sum(self, axis: int) -> Array:
        assert axis == -1
        return Array([sum(row) for row in self.values])

    def any(self) -> bool:
        return any(any(row) for row in self.values)


def as_array(batch: dict[str, Any]) -> dict[str, Any]:
    return {key: Array(value) for key, value in batch.items()}


ROW = [0] * 6
BATCHES: list[tuple[dict[str, Any], Workload]] = [
    ({"input_ids": [ROW, ROW]}, Workload(2, 6)),
    ({"input_ids": [ROW, ROW], "attention_mask": [[1] * 6, [1] * 6]}, Workload(2, 6)),
    (
        {"input_ids": [ROW, ROW], "attention_mask": [[1, 1, 1, 1, 0, 0], [0, 0, 0, 1, 1, 1]]},
        Workload(2, 6, (4, 3), "padded"),
    ),
    ({"input_ids": [ROW, ROW], "attention_mask": [[1] * 6, [0] * 6]}, Workload(2, 6, (6,), "padded")),
    ({"input_ids": [ROW], "position_ids": [[0, 1, 2, 0, 1, 0]]}, Workload(1, 6, (3, 2, 1), "packed")),
    ({"input_ids": [ROW, ROW], "position_ids": [[0, 1, 2, 3, 4, 5]]}, Workload(2, 6)),
    ({"input_ids": [ROW, ROW], "position_ids": [[0, 1, 0, 1, 2, 3]]}, Workload(2, 6, (2, 4, 2, 4), "packed")),
    ({"input_ids": [ROW], "cu_seqlens": [0, 2, 6]}, Workload(1, 6, (2, 4), "packed")),
    ({"input_ids": [ROW], "cu_seq_lens_q": [0, 2, 2, 5]}, Workload(1, 6, (2, 3), "packed")),
    ({"inputs_embeds": [[[0.0]] * 6]}, Workload(1, 6)),
    ({"input_ids": [ROW], "image_grid_thw": [[1, 2, 4], [1, 4, 4]]}, Workload(1, 6, grids=((1, 2, 4), (1, 4, 4)))),
    ({"input_ids": [ROW], "video_grid_thw": [[2, 2, 4]]}, Workload(1, 6, videos=((2, 2, 4),))),
]


@pytest.mark.parametrize(("batch", "expected"), BATCHES)
def test_batch_of_lists_and_of_arrays(batch: dict[str, Any], expected: Workload) -> None:
    assert read_batch(batch) == (expected, [])
    assert read_batch(as_array(batch)) == (expected, [])


def test_fixed_tower_counts_pixel_values() -> None:
    pixels = [[[[0.0]]]] * 3  # three images of one channel, one by one
    load, notes = read_batch({"input_ids": [ROW], "pixel_values": Array(pixels)})
    assert load.grids == ((0, 0, 0),) * 3
    assert notes == []


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({}, "needs input_ids"),
        (7, "must be a mapping"),
        ({"input_ids": []}, "(batch, length)"),
        ({"input_ids": [1, 2]}, "(batch, length)"),
        ({"input_ids": [[]]}, "seq must be at least 1"),
        ({"input_ids": [ROW], "attention_mask": [[1, 1]]}, "attention_mask is of shape (1, 2)"),
        ({"input_ids": [ROW, ROW], "attention_mask": [[1] * 6]}, "attention_mask is of shape (1, 6)"),
        ({"input_ids": [ROW, ROW], "attention_mask": [[1] * 6, [1] * 5]}, "row of 6 whole numbers"),
        ({"input_ids": [ROW, ROW], "attention_mask": [[1] * 6, 1]}, "row of 6 whole numbers"),
        ({"input_ids": [ROW, ROW, ROW], "position_ids": [[0] * 6, [0] * 6]}, "position_ids is of shape (2, 6)"),
        ({"input_ids": [ROW], "position_ids": [["a"] * 6]}, "row of 6 whole numbers"),
        ({"input_ids": [ROW], "cu_seqlens": [0]}, "must rise from 0"),
        ({"input_ids": [ROW], "cu_seqlens": [1, 6]}, "must rise from 0"),
        ({"input_ids": [ROW], "cu_seqlens": [0, 4, 2]}, "must rise from 0"),
        ({"input_ids": [ROW], "cu_seqlens": [0, 7]}, "beyond the batch's 6 positions"),
        ({"input_ids": [ROW], "cu_seqlens": [[0, 6]]}, "whole number"),
        ({"input_ids": [ROW], "cu_seqlens": 6}, "must be a list or an array"),
        ({"input_ids": [ROW], "pixel_values": [[0.0]]}, "need image_grid_thw"),
    ],
)
def test_bad_batch(batch: Any, words: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        read_batch(batch)
    assert words in str(caught.value)


def test_a_workload_holds_patches() -> None:
    with pytest.raises(WorkloadError, match=r"a workload takes no images\. Did you mean image_grid_thw.*in pixels"):
        make_workload(1, 8, images=[(640, 480)])  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"phase": "decode"}, "decode is described by sizes"), ({"phase": "x"}, "unknown"), ({"logits": 0}, "at least 1")],
)
def test_bad_batch_settings(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(WorkloadError, match=words):
        read_batch({"input_ids": [ROW]}, **settings)


class OnDevice(Array):
    """An array that says it lies on a GPU, and breaks when its values are read."""

    class device:
        type = "cuda"

        def __str__(self) -> str:
            return "cuda:0"

    device = device()  # type: ignore[assignment]

    def tolist(self) -> Any:
        raise AssertionError("read from the device")

    sum = any = __ne__ = tolist  # type: ignore[assignment]


@pytest.mark.parametrize("key", ["attention_mask", "position_ids", "cu_seqlens"])
def test_device_values_are_not_read_and_a_note_says_so(key: str) -> None:
    batch = {"input_ids": OnDevice([ROW]), key: OnDevice([ROW] if key != "cu_seqlens" else [0, 6])}
    load, notes = read_batch(batch, read_device=False)
    assert load == Workload(1, 6)
    assert len(notes) == 1
    assert key in notes[0]


def test_grids_on_a_device_are_an_error() -> None:
    with pytest.raises(WorkloadError, match="lies on cuda:0"):
        read_batch({"input_ids": [ROW], "image_grid_thw": OnDevice([[1, 2, 2]])}, read_device=False)


def test_read_grids_takes_one_row_or_many() -> None:
    assert read_grids([1, 2, 4], "x") == ((1, 2, 4),)
    assert read_grids(Array([[1, 2, 4], [2, 4, 4]]), "x") == ((1, 2, 4), (2, 4, 4))
    assert read_grids([Array([1, 2, 4])], "x") == ((1, 2, 4),)
    assert read_grids([], "x") == ()


def test_workload_equality_hash_and_repr() -> None:
    one, same = make_workload(2, 8), make_workload(2, 8)
    assert one == same
    assert hash(one) == hash(same)
    assert one != make_workload(2, 9)
    assert one != "2 x 8"
    assert repr(one) == "Workload(2 x 8 unpadded, train)"
    assert "context=3" in repr(make_workload(1, 2, phase="decode", context=3))
    assert "documents=(1, 2)" in repr(make_workload(lengths=[1, 2]))
    pictured = make_workload(1, 9, image_grid_thw=[[1, 2, 2]], video_grid_thw=[[2, 2, 2]])
    assert "images=[(1, 2, 2)], videos=[(2, 2, 2)]" in repr(pictured)


def test_a_batch_stands_alone() -> None:
    estimator = bind("sweep-tiny")
    batch = {"input_ids": [ROW]}
    assert estimator(batch=batch) == estimator(1, 6)
    for more in ({"seq_len": 6}, {"batch_size": 2}, {"lengths": [6]}, {"image_grid_thw": [[1, 2, 2]]}):
        with pytest.raises(WorkloadError, match="give it alone"):
            estimator(batch=batch, **more)


# --- what a batch says, and what of it cannot be counted --------------------------------------------------------------
IDS = [[1, 2, 3, 4], [5, 6, 7, 8]]


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({"input_ids": [[1, 2, 3], [1]]}, "rows of different lengths"),
        ({"input_ids": [[1, 2, 3], None]}, "not all of its 2 rows are lists"),
        ({"input_ids": IDS, "attention_mask": [[0] * 4, [0] * 4]}, "masks every position"),
        ({"input_ids": IDS, "pixel_values_videos": [[1.0]]}, "video_grid_thw"),
        ({"input_ids": IDS, "pixel_values": [[0.0]] * 99, "image_grid_thw": [[1, 4, 4]]}, "99 patches"),
    ],
)
def test_batches_that_contradict_themselves(batch: dict[str, Any], words: str) -> None:
    with pytest.raises(WorkloadError, match=words):
        read_batch(batch)


def test_restarting_positions_beside_a_mask_are_one_document() -> None:
    """HF keeps documents apart by position_ids only where no attention_mask is given."""
    positions = [[0, 1, 0, 1], [0, 1, 2, 3]]
    packed, notes = read_batch({"input_ids": IDS, "position_ids": positions})
    assert (packed.layout, packed.documents, notes) == ("packed", (2, 2, 4), [])
    plain, notes = read_batch({"input_ids": IDS, "position_ids": positions, "attention_mask": [[1] * 4, [1] * 4]})
    assert (plain.layout, plain.documents) == ("unpadded", None)
    assert "does not keep documents apart" in notes[0]


def test_positions_of_four_rows_and_masks_of_four_dims() -> None:
    rows = [[[0, 1, 0, 1], [0, 1, 2, 3]]] * 4
    assert read_batch({"input_ids": IDS, "position_ids": rows})[0].documents == (2, 2, 4)
    load, notes = read_batch({"input_ids": IDS, "attention_mask": [[[[1]]]] * 2})
    assert load.layout == "unpadded"
    assert "was not read" in notes[0]
    assert read_batch({"input_ids": IDS, "logits_to_keep": 3})[0].logits == 3


@pytest.mark.parametrize("logits", ["last", 2])
def test_decode_takes_no_choice_of_logits(logits: Any) -> None:
    with pytest.raises(WorkloadError, match="logits for each new token"):
        make_workload(1, 4, phase="decode", context=3, logits=logits)


def test_documents_are_apart_under_every_convention() -> None:
    def total(load: Workload, text: str, counting: str) -> int:
        return Expression("document", text).count(load, counting)

    packed = make_workload(lengths=[3, 5, 3])
    padded = Workload(2, 7, (4, 7), "padded")
    plain = make_workload(2, 6)
    decode = make_workload(2, 2, phase="decode", context=5)
    for counting in ("model", "full"):
        assert total(packed, "n * n", counting) == 9 + 25 + 9
        assert total(padded, "n * n", counting) == 16 + 49
        assert total(plain, "n * n", counting) == 72
        assert total(decode, "(n + c) * decoding", counting) == 2 * (6 + 7)
    assert total(padded, "pad", "full") == 3
    assert total(padded, "pad", "model") == total(packed, "pad", "full") == 0


def test_clips_know_their_own_frames() -> None:
    load = make_workload(1, 9, clips=[4, 6])
    for text, model, full in (("n", 10, 12), ("own", 10, 10), ("longest", 12, 12)):
        assert Expression("clip", text).count(load, "model") == model
        assert Expression("clip", text).count(load, "full") == full
