"""Attention kernels find the constants that their calls were made of."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flopcalc.measure.predictor import single_calls
from flopcalc.measure.predictor.fit.points import AttentionPoint, read_single_calls
from flopcalc.measure.predictor.fit.products import fit_attention
from flopcalc.prediction.kernels.attention import attention_features, name_mask
from flopcalc.prediction.kernels.machine import Machine
from flopcalc.prediction.work import Attention


def _list_features(
    direction: str, mask: str, batch: int, heads: int, kv_heads: int, dim: int, length: int, keys: int
) -> tuple[float, ...]:
    call = Attention("", "", direction, mask, batch, heads, kv_heads, dim, dim, length, keys)
    return attention_features(132, call, "cudnn", dim)


def _list_sizes() -> Iterator[tuple[str, int, int, tuple[int, ...]]]:
    for row in single_calls.list_rows("quick").values():
        for mask, sizes in row.get("sizes", {}).items():
            yield from ((mask, row["qk"], row["v"], tuple(size)) for size in sizes)


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_attention_finds_what_calls_were_made_of(scale: float) -> None:
    """Every kernel of the calibration's grid determines its four constants."""
    truth = [scale * value for value in (6e-6, 1.2e-10, 8e-13, 5e-9)]
    calls = [
        {
            "kernel": "cudnn", "direction": "forward", "mask": mask, "batch": batch, "heads": heads,
            "kv_heads": kv_heads, "qk": qk, "v": v, "length": length, "keys": keys,
            "seconds": sum(
                value * size
                for value, size in zip(
                    truth,
                    _list_features("forward", mask, batch, heads, kv_heads, (qk + v) // 2, length, keys),
                    strict=True,
                )
            ),
        }
        for mask, qk, v, (batch, heads, kv_heads, length, keys) in _list_sizes()
    ]  # fmt: skip
    found = fit_attention(read_single_calls(calls).attention, 132)["cudnn"]
    assert "forward/causal/160" in found  # 192 and 128
    masks = [mask for row in single_calls.list_rows("quick").values() for mask in row.get("sizes", ())]
    assert len(found) == len(masks) + 2 * masks.count("window")  # and those whose rows start anywhere
    for call in calls:
        dim = (call["qk"] + call["v"]) // 2
        values = found[f"forward/{name_mask(call['mask'], call['keys'])}/{dim}"]
        sizes = _list_features(
            "forward", *(call[key] for key in ("mask", "batch", "heads", "kv_heads")), dim, call["length"], call["keys"]
        )
        seconds = sum(value * size for value, size in zip(values, sizes, strict=True))
        assert seconds == pytest.approx(call["seconds"], rel=0.08)  # the shortest call stands for one without queries


@pytest.mark.parametrize(
    "sizes",
    [
        [(16, 32, 1024), (8, 32, 2048), (4, 32, 4096), (1, 32, 16384)],  # as many tokens in each
        [(1, 16, 1872)] * 9,
        [(4, 16, 577)],
    ],
)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_calls_that_do_not_determine_all_do_not_explode(sizes: list[tuple[int, int, int]], direction: str) -> None:
    def time_call(batch: int, heads: int, length: int) -> float:
        _, queries, pairs, longest = _list_features(direction, "full", batch, heads, heads, 64, length, length)
        last = 3e-9 if direction == "forward" else 1e-10  # of the longest row, or of all queries
        return 6e-6 + 6e-11 * queries + 7e-13 * pairs + last * longest

    points = [
        AttentionPoint(
            "flash", direction, "full", batch, heads, heads, 64, length, length, time_call(batch, heads, length), 1
        )
        for batch, heads, length in sizes
    ]
    short = AttentionPoint("cudnn", direction, "causal", 1, 8, 8, 64, 48, 48, 6e-6, 1)
    values = fit_attention([*points, short], 132)["flash"][f"{direction}/full/64"]
    for size in ((1, 16, 64), (1, 16, 577), (8, 16, 729), (1, 16, 2300), (4, 32, 4096)):
        features = _list_features(direction, "full", size[0], size[1], size[1], 64, size[2], size[2])
        seconds = sum(value * feature for value, feature in zip(values, features, strict=True))
        assert seconds == pytest.approx(time_call(*size), rel=0.35)


def test_attention_that_drops_is_a_kernel_of_its_own() -> None:
    """Few calls determine a pair's seconds; a model's own calls are found under the same name."""
    plain = [AttentionPoint("cudnn", "forward", "causal", 1, 8, 8, 64, n, n, n * 1e-8, 1) for n in (64, 512, 2048)]
    dropping = [point._replace(mask="dropout", seconds=2 * point.seconds) for point in plain]
    found = fit_attention([*plain, *dropping], 132)["cudnn"]
    assert set(found) == {"forward/causal/64", "forward/dropout/64"}
    (_, query, pair, row), (_, slower_query, slower_pair, slower_row) = found.values()
    assert slower_pair > 2 * pair
    assert (slower_query / slower_pair, slower_row / slower_pair) == pytest.approx((query / pair, row / pair), rel=1e-3)


@pytest.mark.parametrize(
    ("device", "dim", "length"),
    [("h200", 64, 1024), ("h200", 96, 1024), ("h200", 256, 1024), ("h200", 128, 4096), ("a100-sxm-80gb", 64, 1024)],
)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_dropping_takes_longer_everywhere(device: str, dim: int, length: int, direction: str) -> None:
    """At head dims and on kernels where it was not measured too."""
    machine = Machine(device)
    call = Attention("attn", "language", direction, "causal", 8, 12, 12, dim, dim, length, length)
    plain, dropping = (machine.time_attention(each).seconds for each in (call, call._replace(mask="dropout")))
    assert 1.1 < dropping / plain < 2.5
