"""The only place that formats or parses a count, a rate, or a list of sizes."""

from __future__ import annotations

from flopcalc.errors import WorkloadError, format_value

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


def format_number(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


def parse_size(text: str, what: str, minimum: int = 1) -> int:
    """A whole number of at least `minimum` from a flag; '2k' and '1_024' are not sizes, so that nothing is guessed."""
    digits = text[1:] if text[:1] == "-" else text
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 20):
        raise WorkloadError(f"{what}: {format_value(text)} is not a whole number")
    return check_size(int(text), what, minimum)


def check_size(value: object, what: str, minimum: int = 1) -> int:
    """A Python int (or something that is exactly one) of at least `minimum`, else an error that names it."""
    if type(value) is not int:
        index = getattr(value, "__index__", None)
        if index is None or isinstance(value, bool):
            raise WorkloadError(f"{what} must be a whole number, not {format_value(value)}")
        try:
            value = int(index())
        except (TypeError, ValueError, RuntimeError):  # an array of several entries, or of floats
            raise WorkloadError(f"{what} must be a whole number, not {format_value(value)}") from None
    if not minimum <= value <= MAX_SIZE:
        bound = f"at least {minimum}" if value < minimum else f"at most {MAX_SIZE}"
        raise WorkloadError(f"{what} must be {bound}, not {format_value(value)}")
    return value


def parse_sizes(text: str, what: str, count: int | None = None, separator: str = ",") -> tuple[int, ...]:
    """'1,36,52' -> (1, 36, 52)."""
    values = tuple(parse_size(piece.strip(), what) for piece in text.split(separator))
    if count is not None and len(values) != count:
        raise WorkloadError(f"{what}: {format_value(text)} must hold {count} numbers separated by {separator!r}")
    return values


_TOKENS = {"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


def parse_tokens(value: float | str) -> int:
    """2000000000000, 2e12, '2T' or '15.6T' -> a number of tokens."""
    number: object = value
    if isinstance(value, str):
        text = value.strip().lower().replace(",", "").replace("_", "")
        factor = _TOKENS.get(text[-1:], 1)
        try:
            number = float(text[:-1] if factor > 1 else text) * factor
        except ValueError:
            raise WorkloadError(
                f"tokens: {format_value(value)} is no number; write 2000000000 or 2T, 300B, 50M"
            ) from None
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not 1 <= number <= 10**18:
        raise WorkloadError(f"tokens must be a number from 1 to 1e18, not {format_value(value)}")
    return round(number)


def format_tokens(value: int) -> str:
    """1 -> '1 token', 2 * 10**12 -> '2.00T tokens', 10**18 -> '1,000,000T tokens'."""
    number = f"{value // 10**12:,}T" if value >= 10**15 else format_parameters(value)
    return f"{number} token{'s' * (value != 1)}"
