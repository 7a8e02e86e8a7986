"""Make the pictures of docs/web.md, and that of links to the page: the built page goes in, compact PNG files come out.

python docs/make_web_pictures.py [--out docs/pictures] [NAME …]    needs chromium, playwright, Pillow and a Chinese font
"""

from __future__ import annotations

import argparse
import io
import tempfile
import threading
from pathlib import Path
from typing import Any, NamedTuple

from flopcalc.web.build import STATIC, build_site
from flopcalc.web.serve import make_server

HERE = Path(__file__).resolve().parent
COLOURS = 256  # of a palette: a page has few, and the file becomes a third
START_MS = 300_000
CARD = "card"
# The card is the page's answer and picture alone, in large letters.
CARD_STYLE = """
#inputs, #views, #status, #headline p:not(.answer), #panel details { display: none }
.tools, .save, .scroll, .exports, .help, .explained, footer { display: none }
header { border: 0; padding: 1rem 2rem 0 } #headline .card { border: 0; padding: 0 1rem; background: none }
main { display: block; padding: 0 1rem } .answer { font-size: 1.6rem } .figure { font-size: 4rem }
h1 { font-size: 2.2rem } .tagline { font-size: 1.5rem } h2 { font-size: 1.8rem } svg text { font-size: 13px !important }
"""
STYLED = """text => {
  const sheet = new CSSStyleSheet();
  sheet.replaceSync(text);
  document.adoptedStyleSheets = [sheet];
}"""
LLAMA = "model=llama-3.1-8b&seq=4096&batch=2&device=h200-sxm"


class Shot(NamedTuple):
    """A picture: the page's state, the size of the window, and its colours."""

    state: str
    width: int = 1280
    height: int = 900
    scheme: str = "light"


SHOTS = {
    "flops": Shot(
        "model=qwen2-vl-7b&text=1024&image=1024x768&op=model.language_model.layers.*.mlp.down_proj", 1280, 1040
    ),
    "conventions": Shot("model=deepseek-v3&seq=4096&view=conventions"),
    "roofline": Shot(f"{LLAMA}&view=roofline", scheme="dark"),
    "time": Shot(
        f"{LLAMA}&view=time&b.model=llama-3.1-8b&b.seq=4096&b.batch=2&b.device=h200-sxm&b.execution=compiled", 1440
    ),
    "memory": Shot(f"{LLAMA}&view=memory"),
    "plan": Shot("model=llama-3.1-70b&seq=4096&device=h100-sxm&gpus=128&tokens=1T&view=plan", scheme="dark"),
    CARD: Shot("model=qwen2-vl-7b&seq=2048", 1200, 630),  # the default question, at the size that networks show
    "phone": Shot("model=llama-3.1-8b&seq=4096&lang=zh", 390, 1100),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE / "pictures")
    parser.add_argument("--pyodide", help="Pyodide's files, if they are already here")
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    parser.add_argument("names", nargs="*", help=f"of {', '.join(SHOTS)}; default all")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        site = str(Path(folder) / "site")
        build_site(site, options.pyodide)
        with make_server(site, 0) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            draw(options, f"http://127.0.0.1:{server.server_address[1]}/")
            server.shutdown()


def draw(options: argparse.Namespace, address: str) -> None:
    """All pictures from one page, so that Python starts once."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
        browser = driver.chromium.launch(executable_path=options.chromium, args=flags)
        page = browser.new_page(locale="en-US")
        page.set_default_timeout(START_MS)
        page.goto(address)
        page.wait_for_selector("html[data-python=ready]", state="attached")
        for name in options.names or SHOTS:
            path = Path(STATIC, "card.png") if name == CARD else options.out / f"web-{name}.png"
            take(page, SHOTS[name], path, CARD_STYLE if name == CARD else "")
        browser.close()


def take(page: Any, shot: Shot, path: Path, style: str = "") -> None:
    page.set_viewport_size({"width": shot.width, "height": shot.height})
    page.emulate_media(color_scheme=shot.scheme)
    for section in page.query_selector_all("form details[open]") if shot.width < 960 else ():
        section.evaluate("each => { each.open = false; }")  # as on a phone from the start
    page.evaluate(
        "state => { location.hash = state; }", shot.state if "lang=" in shot.state else f"{shot.state}&lang=en"
    )
    view = next((part[5:] for part in shot.state.split("&") if part.startswith("view=")), "flops")
    page.wait_for_selector(f"#tab-{view}[aria-selected=true]")
    page.wait_for_timeout(1000)
    page.wait_for_selector("#panel:not([aria-busy]) :is(svg, table)")
    if "op=" in shot.state:
        page.wait_for_selector(".explained pre")
    page.evaluate("() => scrollTo(0, 0)")
    page.evaluate(STYLED, style)  # the page's policy forbids style elements
    page.wait_for_timeout(1000)  # pictures are drawn anew for their width
    save(page.screenshot(), path)
    page.evaluate(STYLED, "")


def save(data: bytes, path: Path) -> None:
    """With a palette: a page has few colours."""
    from PIL import Image

    whole = Image.open(io.BytesIO(data)).convert("RGB")
    picture = whole.quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)  # keeps rare colours
    picture.save(path, optimize=True)
    print(f"{path.name}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
