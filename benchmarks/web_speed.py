"""How fast the page is: a bare Pyodide's start, the first live answer, and what its questions take beside plain Python.

python benchmarks/web_speed.py [--pyodide DIR] [--rounds N]    needs chromium and playwright

Times depend on the machine; the ratio of the first answer to a bare Pyodide in the same Chromium hardly does.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from flopcalc.web.answers import answer
from flopcalc.web.build import build_site
from flopcalc.web.serve import make_server

BARE = """<!DOCTYPE html><meta charset="utf-8"><title>bare</title><link rel="icon" href="icon.svg">
<script type="module" src="bare.js"></script>"""
BARE_SCRIPT = """const worker = new Worker("bare-worker.js", {type: "module"});
worker.addEventListener("message", () => { document.documentElement.dataset.python = "ready"; });"""
BARE_WORKER = """import createPyodideModule from "./pyodide/pyodide.asm.js";
import { loadPyodide } from "./pyodide/pyodide.js";
const lockFileContents = {packages: {}, info: {
  abi_version: "2026_0", arch: "wasm32", platform: "emscripten_5_0_3", python: "3.14.2"}};
await loadPyodide({indexURL: new URL("./pyodide/", import.meta.url).href, createPyodideModule, lockFileContents});
postMessage("ready");"""
ASK = """async ([question, field, times]) => {
  const { Engine } = await import("./engine.js");
  const engine = window.bench ??= new Engine();
  const found = [];
  for (let round = 0; round < times + 1; round += 1) {
    question.setup[field] = String(1024 + 128 * round);
    const started = performance.now();
    const answer = await engine.ask("bench", question);
    if (answer.error) throw new Error(answer.error);
    if (round) found.push(performance.now() - started);
  }
  return found;
}"""
START_MS = 600_000
SERVED = {"model": "llama-3.1-8b", "device": "h200-sxm", "output_len": "256", "concurrency": "16"}
PLANNED = {"model": "llama-3.1-70b", "device": "h100-sxm", "gpus": "1024", "tokens": "2T"}
# What is asked, the field that each round changes, and how many rounds.
QUESTIONS: dict[str, tuple[str, dict[str, str], str, int]] = {
    "FLOPs after a slider": ("flops", {"model": "qwen2-vl-7b"}, "seq", 20),
    "prediction": ("time", {"model": "llama-3.1-8b", "device": "h200-sxm"}, "seq", 5),
    "prediction of an MoE": ("time", {"model": "deepseek-v3", "device": "h200-sxm"}, "seq", 5),
    "serving": ("serving", SERVED, "input_len", 5),
    "plan of 1,024 GPUs": ("plan", PLANNED, "seq", 1),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pyodide", help="Pyodide's files, if they are already here")
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    import playwright.sync_api  # noqa: F401 - before the site is built, which takes half a minute

    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder) / "site"
        build_site(str(site), options.pyodide)
        for name, text in (("bare.html", BARE), ("bare.js", BARE_SCRIPT), ("bare-worker.js", BARE_WORKER)):
            (site / name).write_text(text, encoding="utf-8")
        with make_server(str(site), 0) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            measure(options, f"http://127.0.0.1:{server.server_address[1]}/")
            server.shutdown()


def measure(options: argparse.Namespace, address: str) -> None:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
        browser = driver.chromium.launch(executable_path=options.chromium, args=flags)
        bare, live = [], []
        for _ in range(options.rounds):  # one after the other, so that both meet the same load
            bare.append(start(browser, f"{address}bare.html", "html[data-python=ready]"))
            live.append(start(browser, address, "html[data-live]"))
            print(f"bare {bare[-1]:.2f} s, first live answer {live[-1]:.2f} s", flush=True)
        print(f"bare Pyodide          {statistics.median(bare):8.2f} s")
        print(f"first live answer     {statistics.median(live):8.2f} s")
        ratio = statistics.median(one / other for one, other in zip(live, bare, strict=True))
        print(f"ratio                 {ratio:8.2f}")
        page = browser.new_page()
        page.set_default_timeout(START_MS)
        page.goto(f"{address}bare.html")
        for name, (what, setup, field, times) in QUESTIONS.items():
            found = statistics.median(page.evaluate(ASK, [{"what": what, "setup": setup}, field, times]))
            plain = statistics.median(ask_plain(what, setup, field, times))
            print(f"{name:22}{found:8.0f} ms, {found / plain:4.1f} x plain Python", flush=True)
        browser.close()


def ask_plain(what: str, setup: dict[str, str], field: str, times: int) -> list[float]:
    """Milliseconds of the same questions in this Python."""
    found = []
    for round_ in range(times + 1):
        question = json.dumps({"what": what, "setup": {**setup, field: str(1024 + 128 * round_)}})
        started = time.perf_counter()
        answer(question)
        found.append(1000 * (time.perf_counter() - started))
    return found[1:]


def start(browser: Any, address: str, selector: str) -> float:
    """Seconds until a page without any cache has what is waited for."""
    context = browser.new_context()
    page = context.new_page()
    page.set_default_timeout(START_MS)
    page.goto(address)
    page.wait_for_selector(selector, state="attached")
    seconds = page.evaluate("() => performance.now()") / 1000
    context.close()
    return float(seconds)


if __name__ == "__main__":
    main()
