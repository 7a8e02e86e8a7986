"""Values of the JSON as pages show them: rounded for people, and exact for programs in a data element."""

from __future__ import annotations

from flopcalc.base.units import format_bytes, format_count, format_seconds
from flopcalc.report.html.page import Html, element, join, number


def show_flops(value: int | None) -> Html:
    return number(value, format_count(value) if value else "0")


def show_seconds(value: float | None) -> Html:
    return number(value, "" if value is None else format_seconds(value))


def show_bytes(value: int | None) -> Html:
    return number(value, "" if value is None else format_bytes(value))


def show_percent(value: float | None) -> Html:
    return number(value, "" if value is None else f"{100 * value:.1f} %")


def show_exact(value: int | None) -> Html:
    return number(value, "" if value is None else f"{value:,}")


def show_code(path: str) -> Html:
    """A module's path, which may be broken at its dots."""
    return element("code", join(path.split("."), ".<wbr>"))
