"""The page as a static Space: `scripts/space` makes the folder, and it works below any path of any file server."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from browser import Watched, find_chromium, find_locked, launch
from places import ROOT

from flopcalc import estimate_flops
from flopcalc.web.packages import LOCK


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def serve_plainly(folder: Path) -> Iterator[str]:
    """Python's own file server, which knows nothing of the page."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.heavy
def test_the_space_works_under_a_path(tmp_path: Path) -> None:
    sync_api = pytest.importorskip("playwright.sync_api")
    find_chromium()
    find_locked(LOCK)
    space = tmp_path / "served" / "spaces" / "flopcalc"
    path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
    subprocess.run(
        [ROOT / "scripts" / "space", space],
        check=True,
        capture_output=True,
        env={"PATH": path, "HOME": str(Path.home()), "PYTHONPATH": str(ROOT)},
    )
    assert (space / "README.md").read_text(encoding="utf-8").startswith("---\ntitle: flopcalc\n")
    assert (space / "index.html").exists()
    with serve_plainly(tmp_path / "served") as root, sync_api.sync_playwright() as driver:
        address = f"{root}spaces/flopcalc/"
        with launch(driver, tmp_path / "profile") as context:
            page = Watched(context, address)
            page.open("model=llama-3.2-1b&seq=1024")
            page.wait_for_total(estimate_flops("llama-3.2-1b", seq_len=1024).total)
            assert (page.problems, page.list_others()) == ([], [])
