"""The only place that formats or parses a count, a rate, a time, or a list of sizes."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

from flopcalc.base.errors import FlopcalcError, WorkloadError, format_value
from flopcalc.base.frozen import Value, frozen
from flopcalc.base.spelling import spell

if TYPE_CHECKING:
    from fractions import Fraction

_PREFIXES = ((10**18, "E"), (10**15, "P"), (10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k"))
# The largest size a flag or field may hold: far above any real workload, low enough that sums stay printable.
MAX_SIZE = 10**12


def format_count(value: int, unit: str = "") -> str:
    """12345678 -> '12.35 M'; exact below 1,000."""
    for size, prefix in _PREFIXES:
        if abs(value) >= size:
            # Integer division first: a float cannot hold a count above 2**53 exactly.
            return f"{(value * 1000 // size) / 1000:.2f} {prefix}{unit}"
    return f"{value} {unit}".rstrip()


def format_flops(value: int) -> str:
    return format_count(value, "FLOPs")


def format_parameters(value: int) -> str:
    for size, prefix in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K")):
        if value >= size:
            return f"{(value * 1000 // size) / 1000:.2f}{prefix}"
    return str(value)


def format_share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def format_difference(share: float | None) -> str:
    """+1.20 %, with a sign; what rounds to nothing has none."""
    if share is None:
        return "-"
    text = f"{100 * share:+.2f} %"
    return "0.00 %" if text[1:] == "0.00 %" else text


def format_rate(flops_per_s: float) -> str:
    return f"{flops_per_s / 1e12:,.1f} TFLOP/s"


def format_bytes(value: int) -> str:
    """3221225472 -> '3.00 GiB'."""
    for size, unit in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if value >= size:
            return f"{value / size:.2f} {unit}"
    return f"{value} B"


def format_seconds(value: float) -> str:
    """0.0123 -> '12.30 ms'; from one second on, seconds."""
    return f"{value:,.2f} s" if value >= 1 else f"{1000 * value:.2f} ms"


def format_amount(value: float) -> str:
    """12345.6 -> '12,346'; below 100, three digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def format_duration(days: float) -> str:
    """0.0014 -> '2 min', 1.234 -> '1.2 days': the largest unit of which there is at least one."""
    for unit, size in (("years", 365.25), ("days", 1.0), ("h", 1 / 24), ("min", 1 / 1440)):
        if days >= size * (2 if unit == "years" else 1):
            return f"{_format_short(days / size)} {unit}"
    return f"{_format_short(86400 * days)} s"


def format_money(usd: float) -> str:
    """0.78 -> '$0.78', 32800 -> '$32.8k', 1.777e8 -> '$178M'."""
    for prefix, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if usd >= size:
            return f"${_format_short(usd / size)}{prefix}"
    digits = 2 if usd >= 0.01 or not usd else 1 - math.floor(math.log10(usd))
    return f"${usd:.{digits}f}"


def _format_short(value: float) -> str:
    """12.34 -> '12.3', 123.4 -> '123', 2.0 -> '2'."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}".removesuffix(".0")


def format_energy(wh: float) -> str:
    """0.0123 -> '12.3 mWh', 1234.5 -> '1.23 kWh'."""
    return _format_metric(wh, "Wh", ("m", "", "k", "M", "G"))


def format_mass(grams: float) -> str:
    """0.5 -> '500 mg', 1234.5 -> '1.23 kg', 2e6 -> '2 t'."""
    return _format_metric(grams, "g", ("m", "", "k")) if grams < 1e6 else f"{format_amount(grams / 1e6)} t"


def _format_metric(value: float, unit: str, steps: Sequence[str]) -> str:
    """In the largest step that leaves at least 1; the first one is a thousandth."""
    at = 0
    value *= 1000
    while value >= 999.5 and at < len(steps) - 1:
        value, at = value / 1000, at + 1
    return f"{format_amount(value)} {steps[at]}{unit}"


def format_number(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


@frozen()
class Unit(Value):
    """Suffixes of a number, and what they multiply it by; upper and lower case are alike."""

    suffixes: Mapping[str, int | str]
    example: str
    name: str = ""  # after a value that is printed in full


_BINARY = Unit({"k": 1 << 10, "m": 1 << 20}, "4096 or 4k")
_DECIMAL = Unit({"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}, "2000000000 or 2T, 300B, 50M")
_TIME = Unit({"us": "1/1000000", "µs": "1/1000000", "ms": "1/1000", "s": 1, "min": 60, "h": 3600}, "0.5 or 500ms")
_SHARE = Unit({"%": "1/100"}, "40% or 0.4")
_PRICE = Unit({"$": 1, "usd": 1, **_DECIMAL.suffixes}, "2.5 or 2.50$", " USD")
_DAYS = Unit({"d": 1, "day": 1, "days": 1, "h": "1/24", "week": 7, "weeks": 7}, "30 or 12h", " days")
_CARBON = Unit({"g/kwh": 1, "kg/kwh": 1000}, "400g/kWh or 0.4kg/kWh")
_PLAIN = Unit({}, "")
# Every field whose value may have a suffix; all others take plain numbers.
UNITS = {
    **dict.fromkeys(
        (
            "seq",
            "text",
            "context",
            "decoder_seq",
            "lengths",
            "gpus",
            "batch",
            "input_len",
            "output_len",
            "concurrency",
            "max_batched_tokens",
            "max_seqs",
            "prefix_hit",
            "users",
        ),
        _BINARY,
    ),
    "global_batch": _BINARY.replace(name=" sequences; 4Mtok is in tokens"),
    **dict.fromkeys(("tokens", "tokens_per_second", "peak", "tflops", "max_pixels"), _DECIMAL),
    "price": _PRICE,
    "budget": _PRICE.replace(example="50000 or 50k"),
    "days": _DAYS,
    **dict.fromkeys(("step_time", "audio", "video", "pause_s"), _TIME),
    "mfu": _SHARE,
    "grid": _CARBON,
}
_NUMBER = r"([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d{1,3})?)\s*([a-zµ%$/]*)"
_MOST_CHARACTERS = 40
_LEAST, _MOST = 1e-60, 1e60


def is_digits(value: object) -> TypeGuard[str]:
    """Whether a text is a number in plain digits; str.isdigit also takes ² and ①, which int refuses."""
    return isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 20


def parse_size(text: str, what: str, minimum: int = 1) -> int:
    """A whole number of at least `minimum`; '4k' where the field takes suffixes, never '1e3' or '1_024'."""
    digits = text[1:] if text[:1] == "-" else text
    if is_digits(digits):
        return check_size(int(text), _name(what), minimum)
    found = _split(digits, what) if text[:1] != "-" and "e" not in digits.lower() else None
    if found is None or not found[1] or found[0].denominator != 1:
        why = "is a list; one number is needed here" if "," in text else f"is not a whole number{_write_like(what)}"
        raise WorkloadError(f"{_name(what)}: {format_value(text)} {why}")
    return check_size(int(found[0]), _name(what), minimum)


def _name(what: str) -> str:
    """A field as the reader writes it; several words stay as they are."""
    return spell(what) if what.isidentifier() else what


def _write_like(field: str) -> str:
    return f"; write {UNITS[field].example}" if field in UNITS else ""


def parse_number(text: str, field: str) -> float:
    """A positive number, with a suffix where the field takes one: '1e15', '989T', '500ms', '40%'."""
    found = _split(text.strip(), field)
    if found is None:
        raise WorkloadError(f"{_name(field)}: {format_value(text)} is not a number{_write_like(field)}")
    try:
        value = float(found[0])
    except OverflowError:
        value = math.inf
    _check_range(value, _name(field), text)
    return value


def parse_exact(text: str, field: str) -> Fraction:
    """As parse_number, without rounding."""
    parse_number(text, field)
    found = _split(text.strip(), field)
    assert found is not None  # parse_number would have refused it
    return found[0]


def parse_share(text: str, field: str) -> float:
    """'40%' or '0.4' -> 0.4; '40' may mean either, and is refused."""
    value = parse_number(text, field)
    if value > 1:
        raise FlopcalcError(f"{_name(field)}: {format_value(text)} is more than 100 %{_write_like(field)}")
    return value


def parse_tokens(value: float | str) -> int:
    """2000000000000, 2e12, '2T' or '15.6T' -> a number of tokens."""
    number: Fraction | float = 0
    if isinstance(value, str):
        found = _split(value.strip().replace(",", "").replace("_", ""), "tokens")
        if found is None:
            raise WorkloadError(f"tokens: {format_value(value)} is not a number; write {_DECIMAL.example}")
        number = found[0]
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        number = value
    if not 1 <= number <= 10**18:
        raise WorkloadError(f"tokens must be a number from 1 to 1e18, not {format_value(value)}")
    return round(number)


def format_tokens(value: int) -> str:
    """1 -> '1 token', 2 * 10**12 -> '2.00T tokens', 10**18 -> '1,000,000T tokens'."""
    number = f"{value // 10**12:,}T" if value >= 10**15 else format_parameters(value)
    return f"{number} token{'s' * (value != 1)}"


def describe_suffixes(given: Mapping[str, str]) -> list[str]:
    """What values in thousands or more stand for: '--seq 4k = 4,096'; `given` is field -> what was written."""
    notes = []
    for field, text in given.items():
        if field not in UNITS or text.isdigit():
            continue
        pieces = [_split(piece.strip(), field) for piece in text.split(",")]
        if any(piece is not None and piece[1] in _DECIMAL.suffixes for piece in pieces):
            shown = " and ".join(f"{float(piece[0]):,.15g}" for piece in pieces if piece is not None)
            notes.append(f"{spell(field, text)} = {shown}{UNITS[field].name}")
    return notes


def _split(text: str, field: str) -> tuple[Fraction, str] | None:
    """A number times what its suffix stands for, and the suffix; None if it is neither."""
    if text[:1] == "$" and "$" in UNITS.get(field, _PLAIN).suffixes:
        text = text[1:]
    match = re.fullmatch(_NUMBER, text.lower(), re.ASCII) if len(text) <= _MOST_CHARACTERS else None
    if match is None:
        return None
    suffixes = UNITS.get(field, _PLAIN).suffixes
    if match[2] and match[2] not in suffixes:
        return None
    from fractions import Fraction  # plain sizes need none

    return Fraction(match[1]) * Fraction(suffixes.get(match[2], 1)), match[2]


def check_size(value: object, what: str, minimum: int = 1) -> int:
    """A Python int (or something that is exactly one) of at least `minimum`, else an error that names it."""
    if type(value) is not int:
        index = getattr(value, "__index__", None)
        if index is None or isinstance(value, bool):
            raise WorkloadError(f"{what} must be a whole number, not {format_value(value)}")
        try:
            value = int(index())
        except Exception:  # an array of several entries, or of floats
            raise WorkloadError(f"{what} must be a whole number, not {format_value(value)}") from None
    if not minimum <= value <= MAX_SIZE:
        bound = f"at least {minimum}" if value < minimum else f"at most {MAX_SIZE}"
        raise WorkloadError(f"{what} must be {bound}, not {format_value(value)}")
    return value


def read_size(value: object, field: str, minimum: int = 1) -> int:
    """A size as a person gives it: a whole number, or a text such as 4k."""
    if type(value) is int and minimum <= value < 10**9:  # at once, in a training loop
        return value
    if isinstance(value, str):
        return parse_size(value, field, minimum)
    return check_size(value, _name(field), minimum)


def read_number(value: object, field: str, *, or_zero: bool = False) -> float:
    """A quantity as a person gives it: a number, or a text such as 500ms."""
    if isinstance(value, str):
        return parse_number(value, field)
    return check_positive(value, _name(field), or_zero=or_zero)


def read_sizes(value: object, field: str) -> tuple[int, ...]:
    """A list of sizes, or a text such as 512,1k."""
    if isinstance(value, str):
        return parse_sizes(value, field)
    return tuple([read_size(each, field) for each in check_items(value, _name(field))])


def check_positive(value: Any, what: str, *, or_zero: bool = False) -> float:
    """A float above 0, or 0 where that is allowed, else an error that names it; also from an array of one number."""
    try:
        is_number = not isinstance(value, (bool, str, bytes)) and hasattr(value, "__float__")
        number = float(value) if is_number else math.nan
    except Exception:  # an array of several entries, or an int beyond all floats
        number = math.nan
    if number or not or_zero:
        _check_range(number, what, value)
    return number


def _check_range(number: float, what: str, given: object) -> None:
    """An error for what is no quantity; products of those that are stay far below the largest float."""
    if not _LEAST <= number <= _MOST:
        form = "a positive number" if not 0 < number < math.inf else f"between {_LEAST:g} and {_MOST:g}"
        raise WorkloadError(f"{what} must be {form}, not {format_value(given)}")


def check_items(value: Any, what: str, error: type[FlopcalcError] = WorkloadError, form: str = "a list") -> list[Any]:
    """The entries of a list, an array or another iterable; text, bytes and mappings are none."""
    try:
        if isinstance(value, (str, bytes, bytearray, Mapping)):
            raise TypeError
        return list(value)
    except Exception:  # whatever an object does that is no list
        raise error(f"{what} must be {form}, not {format_value(value)}") from None


def parse_sizes(text: str, what: str, count: int | None = None, separator: str = ",") -> tuple[int, ...]:
    """'1,36,52' -> (1, 36, 52)."""
    values = tuple(parse_size(piece.strip(), what) for piece in text.split(separator))
    if count is not None and len(values) != count:
        raise WorkloadError(f"{_name(what)}: {format_value(text)} must hold {count} numbers separated by {separator!r}")
    return values
