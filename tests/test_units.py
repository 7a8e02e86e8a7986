"""Counts, rates and sizes as text, and back."""

from __future__ import annotations

from typing import Any

import pytest

from flopcalc import WorkloadError
from flopcalc.errors import find_nearest, format_nearest, format_value
from flopcalc.units import (
    MAX_SIZE,
    check_size,
    format_bytes,
    format_count,
    format_flops,
    format_number,
    format_parameters,
    format_rate,
    format_seconds,
    format_share,
    parse_size,
    parse_sizes,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 FLOPs"),
        (999, "999 FLOPs"),
        (1000, "1.00 kFLOPs"),
        (12_345_678, "12.35 MFLOPs"),
        (999_999, "1000.00 kFLOPs"),
        (10**9, "1.00 GFLOPs"),
        (1_500_000_000_000, "1.50 TFLOPs"),
        (10**15, "1.00 PFLOPs"),
        (10**18, "1.00 EFLOPs"),
        (2**63 + 1, "9.22 EFLOPs"),
        (-(10**6), "-1.00 MFLOPs"),
        (123 * 10**21, "123000.00 EFLOPs"),
    ],
)
def test_format_flops(value: int, text: str) -> None:
    assert format_flops(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (3 << 19, "1.50 MiB"), (3 << 30, "3.00 GiB"),
        (5 << 40, "5.00 TiB"), (5 << 50, "5120.00 TiB"),
    ],
)  # fmt: skip
def test_format_bytes(value: int, text: str) -> None:
    assert format_bytes(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0.00 ms"), (0.0123, "12.30 ms"), (1.0, "1.00 s"), (1234.5, "1,234.50 s")]
)
def test_format_seconds(value: float, text: str) -> None:
    assert format_seconds(value) == text


def test_format_count_without_unit() -> None:
    assert format_count(12_345_678) == "12.35 M"
    assert format_count(12) == "12"


@pytest.mark.parametrize(
    ("value", "text"),
    [(12, "12"), (1000, "1.00K"), (8_030_261_248, "8.03B"), (671 * 10**9, "671.00B"), (10**12, "1.00T")],
)
def test_format_parameters(value: int, text: str) -> None:
    assert format_parameters(value) == text


def test_other_formats() -> None:
    assert format_share(1, 3) == "33.3 %"
    assert format_share(1, 0) == "-"
    assert format_rate(989.5e12) == "989.5 TFLOP/s"
    assert format_number(None) == "-"
    assert format_number(989.5) == "989.5"


@pytest.mark.parametrize(("text", "value"), [("1", 1), ("007", 7), ("2048", 2048), (str(MAX_SIZE), MAX_SIZE)])
def test_parse_size(text: str, value: int) -> None:
    assert parse_size(text, "--seq") == value


@pytest.mark.parametrize(
    "text", ["", " ", "0", "-1", "-", "1.5", "1e3", "2k", "1_024", "0x10", "+5", "five", "٣", "²", "9" * 30, "9" * 6000]
)
def test_parse_size_refuses(text: str) -> None:
    with pytest.raises(WorkloadError, match="--seq") as caught:
        parse_size(text, "--seq")
    assert len(str(caught.value)) < 150


def test_parse_size_minimum() -> None:
    assert parse_size("0", "--context", 0) == 0
    with pytest.raises(WorkloadError, match="at least 0, not -1"):
        parse_size("-1", "--context", 0)


def test_parse_sizes() -> None:
    assert parse_sizes("1, 36,52", "--image-grid", 3) == (1, 36, 52)
    assert parse_sizes("640x480", "--image", 2, "x") == (640, 480)
    for text in ("1,2", "1,2,3,4", "1,,3", "1;2;3", ""):
        with pytest.raises(WorkloadError, match="--image-grid"):
            parse_sizes(text, "--image-grid", 3)


class Index:
    def __init__(self, value: Any) -> None:
        self.value = value

    def __index__(self) -> int:
        if not isinstance(self.value, int):
            raise TypeError("only integer scalars")
        return self.value


def test_check_size_takes_what_is_exactly_an_int() -> None:
    value = check_size(Index(5), "seq")
    assert value == 5
    assert type(value) is int
    for bad in (Index(2.5), 2.0, None, "5", True, [5], 10**5000, Index(0)):
        with pytest.raises(WorkloadError, match="seq must be"):
            check_size(bad, "seq")


def test_nearest_words() -> None:
    assert find_nearest("lama", ["llama", "gpt2"]) == ["llama"]
    assert format_nearest("lama", ["llama", 5]) == " Did you mean llama?"  # type: ignore[list-item]
    assert format_nearest("zzz", ["llama"]) == ""


def test_format_value_is_short_and_never_fails() -> None:
    class Broken:
        def __repr__(self) -> str:
            raise RuntimeError

    assert format_value("4096") == "'4096'"
    assert format_value(10**5000) == "a very large int"
    assert format_value(Broken()) == "a Broken"
    assert len(format_value("x" * 10**6)) <= 60
