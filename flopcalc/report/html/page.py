"""One self-contained HTML page: its head, styles, sections, tables and lists; every value is escaped."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence

from flopcalc._version import __version__
from flopcalc.base.units import format_bytes, format_count, format_seconds

# Fills of pictures. Each has a contrast of at least 3 with both backgrounds, and of 4.5 with the text on it.
PALETTE = ("#4e8fd0", "#e0702a", "#3d9e6e", "#c9729f", "#b58a1b", "#a678c8", "#2f9ca6", "#d4686a", "#8d9196")
ON_FILL = "#0b0f14"
LIGHT = {"bg": "#ffffff", "fg": "#1b1f24", "muted": "#57606a", "line": "#d0d7de", "soft": "#f3f5f8"}
DARK = {"bg": "#11161c", "fg": "#e6edf3", "muted": "#a3adb8", "line": "#39424d", "soft": "#1a212a"}


class Html(str):
    """Text that is HTML already, and not escaped again."""

    __slots__ = ()


def escape(value: object) -> Html:
    """HTML stays; everything else becomes text."""
    return value if isinstance(value, Html) else Html(html.escape(str(value)))


def join(parts: Iterable[object], between: str = "") -> Html:
    return Html(between.join(escape(part) for part in parts))


def element(tag: str, *children: object, **attributes: object) -> Html:
    """A tag with its content; `class_` stands for class, `aria_label` for aria-label, None leaves one out."""
    shown = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"'
        for name, value in attributes.items()
        if value is not None
    )
    return Html(f"<{tag}{shown}>{join(children)}</{tag}>")


def number(value: float | None, text: str) -> Html:
    """A value as in the JSON, shown as `text`; a dash if there is none."""
    is_known = value is not None and value == value  # NaN is unequal to itself
    return element("data", text, value=repr(value)) if is_known else Html("–")


def swatch(at: int) -> Html:
    """A small square of a picture's colour."""
    return element("span", class_=f"swatch c{at % len(PALETTE)}")


def table(
    headers: Sequence[str], rows: Iterable[Sequence[object]], *, caption: str = "", text_columns: int = 1
) -> Html:
    """A table; its first `text_columns` columns are aligned left, the others right. The first cell names its row."""

    def side(at: int) -> str | None:
        return None if at < text_columns else "n"

    head = element("tr", *(element("th", name, scope="col", class_=side(at)) for at, name in enumerate(headers)))
    body = [
        element(
            "tr",
            element("th", row[0], scope="row"),
            *(element("td", cell, class_=side(at)) for at, cell in enumerate(row[1:], start=1)),
        )
        for row in rows
    ]
    title = [element("caption", caption)] if caption else []
    whole = element("table", *title, element("thead", head), element("tbody", *body))
    # A wide table scrolls by itself, so that the page does not; with the keyboard, too.
    return element("div", whole, class_="scroll", tabindex=0, role="region", aria_label=caption or "table")


def beside(*parts: object) -> Html:
    """Side by side where the window is wide enough."""
    return element("div", *parts, class_="beside")


def tiles(values: Iterable[tuple[str, object] | tuple[str, object, object]]) -> Html:
    """The most important figures: label, value and perhaps a remark."""
    shown = []
    for label, value, *remark in values:
        more = [element("dd", remark[0], class_="remark")] if remark else []
        shown.append(element("div", element("dt", label), element("dd", value), *more))
    return element("dl", *shown, class_="tiles")


def bullets(entries: Iterable[object]) -> Html:
    return element("ul", *(element("li", entry) for entry in entries))


def paragraph(*parts: object) -> Html:
    return element("p", *parts)


def section(title: str, *parts: object) -> Html:
    return element("section", element("h2", title), *parts)


def list_notes(notes: Sequence[str]) -> list[Html]:
    return [section("Notes", bullets(notes))] if notes else []


def make_page(title: str, subtitle: str, parts: Iterable[object]) -> str:
    """The whole document."""
    meta = [
        element_alone("meta", charset="utf-8"),
        element_alone("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element_alone("meta", name="color-scheme", content="light dark"),
        # Nothing is loaded and nothing runs, whatever a model's name holds.
        element_alone(
            "meta", http_equiv="Content-Security-Policy", content="default-src 'none'; style-src 'unsafe-inline'"
        ),
    ]
    head = element("head", *meta, element("title", title), element("style", Html(_STYLE)))
    header = element("header", element("h1", title), paragraph(subtitle))
    footer = element("footer", paragraph(f"flopcalc {__version__}"))
    body = element("body", element("main", header, *parts), footer)
    text = f"<!DOCTYPE html>\n{element('html', head, body, lang='en')}\n"
    return text.encode("utf-8", "backslashreplace").decode("utf-8")  # a path may hold bytes that are no UTF-8


def element_alone(tag: str, **attributes: object) -> Html:
    """A tag without content."""
    return Html(element(tag, **attributes).removesuffix(f"</{tag}>"))


def _set(colours: Mapping[str, object]) -> str:
    return "".join(f"--{name}:{colour};" for name, colour in colours.items())


_FILLS = "".join(f".c{at}{{fill:{colour};background:{colour}}}" for at, colour in enumerate(PALETTE))
_LINES = "".join(f".l{at}{{stroke:{colour}}}" for at, colour in enumerate(PALETTE))
_STYLE = f"""
:root{{color-scheme:light dark;{_set(LIGHT)}}}
@media (prefers-color-scheme:dark){{:root{{{_set(DARK)}}}}}
*{{box-sizing:border-box}}
body{{margin:0;background:var(--bg);color:var(--fg);font:16px/1.5 system-ui,sans-serif}}
main,footer{{max-width:62rem;margin:0 auto;padding:1rem}}
h1{{font-size:1.6rem;line-height:1.25;margin:.5rem 0;overflow-wrap:anywhere}}
h2{{font-size:1.2rem;margin:2rem 0 .5rem}}
p,li{{max-width:48rem;overflow-wrap:anywhere}}
header p,footer,.remark,figcaption,caption{{color:var(--muted)}}
ul{{padding-left:1.2rem}}
.tiles{{display:grid;grid-template-columns:repeat(auto-fill,minmax(10.5rem,1fr));gap:.6rem;margin:1rem 0}}
.tiles div{{background:var(--soft);border:1px solid var(--line);border-radius:.4rem;padding:.5rem .7rem}}
.tiles dt{{color:var(--muted);font-size:.85rem}}
.tiles dd{{margin:0;font-size:1.15rem;font-weight:600;overflow-wrap:anywhere}}
.tiles .remark{{font-size:.8rem;font-weight:400}}
.beside{{display:flex;flex-wrap:wrap;gap:0 2.5rem;align-items:flex-start}}.beside>*{{max-width:100%}}
.scroll{{overflow-x:auto;margin:.6rem 0}}
table{{border-collapse:collapse;font-size:.9rem;font-variant-numeric:tabular-nums}}
caption{{text-align:left;padding:.2rem 0}}
th,td{{padding:.25rem .7rem .25rem 0;border-bottom:1px solid var(--line);text-align:left;vertical-align:top}}
thead th{{border-bottom:2px solid var(--line);vertical-align:bottom}}
tbody th{{font-weight:400}}
th.n,td.n{{text-align:right;white-space:nowrap}}
figure{{margin:.8rem 0}}
figcaption{{font-size:.85rem}}
svg{{display:block;width:100%;height:auto;font-family:system-ui,sans-serif}}
svg text{{fill:var(--fg);font-size:12px}}
svg .muted{{fill:var(--muted)}}
svg .on{{fill:{ON_FILL}}}
svg .edge{{stroke:var(--bg);fill:none}}
svg .axis{{stroke:var(--line);stroke-width:1;fill:none}}
svg .mark{{stroke:var(--fg);stroke-width:1.5;fill:none}}
svg .dash{{stroke-dasharray:4 3}}
svg .dots{{stroke-linecap:round;stroke-width:3;stroke-opacity:.45;fill:none}}
svg .curve{{stroke-width:2;fill:none}}
.swatch{{display:inline-block;width:.8em;height:.8em;margin-right:.4em;border-radius:.15em}}
.narrow{{display:none}}
{_FILLS}{_LINES}
@media (max-width:38rem){{.wide{{display:none}}.narrow{{display:block}}main,footer{{padding:.7rem}}}}
@media print{{:root{{color-scheme:light;{_set(LIGHT)}}}body{{font-size:10pt}}main{{max-width:none;padding:0}}
.scroll{{overflow:visible}}figure,tr,.tiles div{{break-inside:avoid}}h2{{break-after:avoid}}
svg,.swatch,.tiles div{{print-color-adjust:exact;-webkit-print-color-adjust:exact}}}}
"""


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
