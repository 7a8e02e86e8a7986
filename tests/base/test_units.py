"""Counts, rates and sizes as text, and back."""

from __future__ import annotations

from typing import Any

import pytest

from flopcalc import FlopcalcError, WorkloadError
from flopcalc.base.errors import find_nearest, format_nearest, format_value
from flopcalc.base.spelling import spell_option, use_spelling
from flopcalc.base.units import (
    MAX_SIZE,
    check_size,
    describe_suffixes,
    format_bytes,
    format_count,
    format_duration,
    format_flops,
    format_money,
    format_number,
    format_parameters,
    format_rate,
    format_seconds,
    format_share,
    parse_number,
    parse_share,
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
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (3 << 19, "1.50 MiB"),
        (3 << 30, "3.00 GiB"),
        (5 << 40, "5.00 TiB"),
        (5 << 50, "5120.00 TiB"),
    ],
)
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
    assert parse_size(text, "seq") == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "0",
        "-1",
        "-",
        "1.5",
        "1e3",
        "1.3k",
        "-2k",
        "1_024",
        "2g",
        "k",
        "1 k k",
        "0x10",
        "+5",
        "five",
        "٣",
        "²",
        "9" * 30,
        "9" * 6000,
    ],
)
def test_parse_size_refuses(text: str) -> None:
    with pytest.raises(WorkloadError, match="seq_len") as caught:
        parse_size(text, "seq")
    assert len(str(caught.value)) < 150


@pytest.mark.parametrize(
    ("flag", "text", "value"),
    [
        ("seq", "4k", 4096),
        ("seq", "4K", 4096),
        ("text", "1.5k", 1536),
        ("context", "2M", 2 << 20),
        ("decoder_seq", "1k", 1024),
        ("gpus", "16k", 16384),
        ("global_batch", "1 k", 1024),
        ("seq", "0.5k", 512),
    ],
)
def test_binary_suffixes(flag: str, text: str, value: int) -> None:
    assert parse_size(text, flag) == value
    with use_spelling(spell_option):
        more = " sequences; 4Mtok is in tokens" if flag == "global_batch" else ""
        assert describe_suffixes({flag: text}) == [f"--{flag.replace('_', '-')} {text} = {value:,}{more}"]


@pytest.mark.parametrize(
    ("flag", "text", "value", "shown"),
    [
        ("peak", "1e15", 1e15, None),
        ("peak", "989.4T", 989.4e12, "989,400,000,000,000"),
        ("tflops", "400", 400.0, None),
        ("tokens_per_second", "12.5k", 12500.0, "12,500"),
        ("price", "2.5", 2.5, None),
        ("price", "$2.50", 2.5, None),
        ("price", "2.50$", 2.5, None),
        ("step_time", "0.5", 0.5, None),
        ("step_time", "500ms", 0.5, None),
        ("step_time", "250us", 250e-6, None),
        ("step_time", "2 min", 120.0, None),
        ("step_time", "1h", 3600.0, None),
        ("audio", "30s", 30.0, None),
        ("mfu", "40%", 0.4, None),
        ("mfu", "0.4", 0.4, None),
        ("host_factor", "1.5", 1.5, None),
        ("peak", ".5B", 5e8, "500,000,000"),
    ],
)
def test_parse_number(flag: str, text: str, value: float, shown: str | None) -> None:
    assert parse_number(text, flag) == value
    with use_spelling(spell_option):
        spelled = f"--{flag.replace('_', '-')} {text} = {shown}"
        assert describe_suffixes({flag: text}) == ([spelled] if shown else [])


@pytest.mark.parametrize(
    ("flag", "text"),
    [
        ("peak", "0"),
        ("peak", "-1"),
        ("peak", "nan"),
        ("peak", "inf"),
        ("peak", ""),
        ("peak", "1Q"),
        ("peak", "1e999"),
        ("step_time", "5k"),
        ("step_time", "-5ms"),
        ("host_factor", "5k"),
        ("mfu", "40T"),
        ("price", "9" * 50),
        ("peak", "1,5"),
        ("step_time", "ms"),
    ],
)
def test_parse_number_refuses(flag: str, text: str) -> None:
    with pytest.raises(FlopcalcError, match=flag) as caught:
        parse_number(text, flag)
    assert len(str(caught.value)) < 150


def test_parse_share() -> None:
    assert parse_share("40%", "mfu") == parse_share("0.4", "mfu") == 0.4
    assert parse_share("100%", "mfu") == 1
    for text in ("40", "101%", "1.5"):
        with pytest.raises(FlopcalcError, match=r"is more than 100 %; write 40% or 0\.4"):
            parse_share(text, "mfu")


def test_lists_are_spelled_out() -> None:
    options = {"lengths": "1k,5", "seq": "1k,2k", "batch": "4", "model": "7b", "freeze": "vision"}
    assert describe_suffixes(options) == ['lengths="1k,5" = 1,024 and 5', 'seq_len="1k,2k" = 1,024 and 2,048']
    assert parse_sizes("1k, 5", "lengths") == (1024, 5)


def test_parse_size_minimum() -> None:
    assert parse_size("0", "context", 0) == 0
    with pytest.raises(WorkloadError, match="at least 0, not -1"):
        parse_size("-1", "context", 0)


def test_parse_sizes() -> None:
    assert parse_sizes("1, 36,52", "image_grid", 3) == (1, 36, 52)
    assert parse_sizes("640x480", "image", 2, "x") == (640, 480)
    for text in ("1,2", "1,2,3,4", "1,,3", "1;2;3", ""):
        with pytest.raises(WorkloadError, match="image_grid_thw"):
            parse_sizes(text, "image_grid", 3)


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
    plain = [1, "a", (1,), (), {"b": [None, 0.5]}, {}]
    assert format_value(plain) == repr(plain)
    doubled: list[Any] = [1]
    for _ in range(100):
        doubled = [doubled, doubled]
    assert format_value(doubled) == "[" * 57 + "…"
    doubled.append(doubled)
    assert format_value({"a": doubled}) == "{'a': " + "[" * 51 + "…"


@pytest.mark.parametrize(
    ("days", "text"),
    [(0.0001, "8.6 s"), (0.0014, "2 min"), (0.05, "1.2 h"), (1.234, "1.2 days"), (400, "400 days"), (1461, "4 years")],
)
def test_durations_have_a_unit_that_fits(days: float, text: str) -> None:
    assert format_duration(days) == text


@pytest.mark.parametrize(
    ("usd", "text"),
    [
        (0.00078, "$0.00078"),
        (0.78, "$0.78"),
        (999, "$999.00"),
        (32_800, "$32.8k"),
        (177_704_000, "$178M"),
        (2e9, "$2B"),
    ],
)
def test_money(usd: float, text: str) -> None:
    assert format_money(usd) == text
