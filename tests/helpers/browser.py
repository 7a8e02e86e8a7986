"""A real Chromium on the built page: what it needs, how it is started, and a page that watches itself."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from flopcalc.base.errors import FlopcalcError
from flopcalc.web.build import build_site
from flopcalc.web.packages import find_package, load_lock
from flopcalc.web.serve import make_server

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
)
# Another state in place: done when the page has read it, so that what a test does next is not undone.
GO = """state => new Promise((done) => {
  addEventListener("hashchange", () => setTimeout(done, 100), {once: true});
  const before = location.href;
  location.hash = state;
  if (location.href === before) dispatchEvent(new HashChangeEvent("hashchange")); // a change is not in the address yet
})"""
START_MS = 300_000  # Pyodide takes seconds on an idle machine, minutes on one that is shared


def find_chromium() -> str:
    """Debian's Chromium, or whatever $FLOPCALC_CHROMIUM names."""
    found = os.environ.get("FLOPCALC_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None:
        pytest.skip("needs Chromium: apt-get install chromium, or $FLOPCALC_CHROMIUM")
    return found


def find_locked(lock: str) -> str:
    """The folder of an npm package, fetched once."""
    try:
        return find_package(load_lock(lock))
    except FlopcalcError as error:
        pytest.skip(str(error))


def build(folder: Path) -> Path:
    """The site, with $FLOPCALC_PYODIDE or what npm fetches."""
    site = folder / "site"
    try:
        build_site(str(site), os.environ.get("FLOPCALC_PYODIDE"))
    except FlopcalcError as error:
        pytest.skip(str(error))
    return site


@contextmanager
def serve(site: Path) -> Iterator[str]:
    with make_server(str(site), 0) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/"
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def launch(driver: Any, profile: Path, **options: Any) -> Iterator[Any]:
    """A browser context with a fresh profile."""
    context = driver.chromium.launch_persistent_context(
        str(profile),
        executable_path=find_chromium(),
        args=list(FLAGS),
        headless=True,
        accept_downloads=True,
        locale="en-US",
        **options,
    )
    try:
        yield context
    finally:
        context.close()


class Watched:
    """A page with what went wrong on it: console errors, uncaught errors, requests to other hosts."""

    def __init__(self, context: Any, address: str) -> None:
        self.address = address
        self.page = context.new_page()
        self.page.set_default_timeout(START_MS)
        self.problems: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self._hear(message))
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))

    def _hear(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(message.text)

    def list_others(self) -> list[str]:
        """Requests that left this machine."""
        return [url for url in self.requests if not url.startswith((self.address, "blob:", "data:"))]

    def open(self, state: str = "") -> None:
        """The page in a state; in place where it is open already, so that Python starts once."""
        if self.page.url.startswith(self.address):
            self.page.evaluate(GO, state)
        else:
            self.page.goto(f"{self.address}#{state}" if state else self.address)
        self.page.wait_for_selector("html[data-python=ready]", state="attached")

    def total(self, setup: int = 0) -> int:
        return int(self.page.locator("[data-total]").nth(setup).inner_text().replace(",", ""))

    def wait_for_total(self, value: int, setup: int = 0) -> None:
        self.page.locator("[data-total]").nth(setup).filter(has_text=f"{value:,}").wait_for()

    def wait_for_view(self, name: str, inside: str = "svg, table") -> Any:
        """The panel of a view, once it is filled."""
        self.page.wait_for_selector(f"#tab-{name}[aria-selected=true]")
        self.page.wait_for_selector(f"#panel:not([aria-busy]) :is({inside})")
        return self.page.locator("#panel")
