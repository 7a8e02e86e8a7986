"""The built page in a real Chromium, as a person uses it, with the network off."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import re
import shlex
import shutil
import struct
import zipfile
import zlib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from browser import Watched, build, find_chromium, find_locked, launch, serve

from flopcalc.cli import main
from flopcalc.web.build import HUB, POLICY

pytestmark = pytest.mark.heavy
LLAMA = {
    "model_type": "llama", "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 50,
}  # fmt: skip
SMALL = "model=llama-3.2-1b&seq=1024"
VIEWS = {
    "flops": SMALL,
    "conventions": f"{SMALL}&view=conventions",
    "roofline": f"{SMALL}&device=h200-sxm&view=roofline",
    "time": f"{SMALL}&device=h200-sxm&view=time",
    "memory": f"{SMALL}&device=h200-sxm&view=memory",
    "plan": f"{SMALL}&device=h200-sxm&gpus=4&tokens=10B&tp=1&pp=1&view=plan",
}
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
    find_chromium()
    with playwright.sync_playwright() as driver:
        yield driver


@pytest.fixture(scope="module")
def site(driver: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: ARG001  # nothing is built without one
    return build(tmp_path_factory.mktemp("web"))


@pytest.fixture(scope="module")
def context(driver: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with launch(driver, tmp_path_factory.mktemp("profile"), viewport={"width": 1280, "height": 900}) as context:
        context.set_default_timeout(300_000)
        yield context


@pytest.fixture(scope="module")
def opened(site: Path, context: Any) -> Iterator[Watched]:
    """One page for all tests, at the default question first."""
    with serve(site) as address:
        watched = Watched(context, address)
        watched.open()
        yield watched


@pytest.fixture
def page(opened: Watched) -> Iterator[Watched]:
    opened.problems.clear()
    opened.page.set_viewport_size({"width": 1280, "height": 900})
    yield opened
    assert opened.problems == []
    assert opened.list_others() == []


def run_line(capsys: Capture, line: str) -> Any:
    with pytest.raises(SystemExit) as end:
        main([*shlex.split(line)[1:], "--json"])
    assert end.value.code == 0
    return json.loads(capsys.readouterr().out)


def check_same(one: Any, other: Any) -> None:
    """Counts, words and keys are equal; seconds to twelve digits, for Python 3.12 and later add floats otherwise."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            check_same(one[key], other[key])
    elif isinstance(one, list):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            check_same(left, right)
    elif isinstance(one, float):
        assert one == pytest.approx(other, rel=1e-12)
    elif isinstance(one, str) and "model_specs" in one:  # a path, which differs in front
        assert one.partition("model_specs")[2] == other.partition("model_specs")[2]
    else:
        assert one == other


def read_line(page: Watched) -> str:
    """The command that the view shows."""
    return str(page.page.locator(".exports .line pre").first.inner_text())


def drop(page: Watched, name: str, data: bytes, kind: str) -> None:
    """Drop a file onto the page."""
    page.page.evaluate(
        """([name, data, kind]) => {
            const bytes = Uint8Array.from(atob(data), (each) => each.charCodeAt(0));
            const transfer = new DataTransfer();
            transfer.items.add(new File([bytes], name, {type: kind}));
            const options = {dataTransfer: transfer, bubbles: true, cancelable: true};
            document.body.dispatchEvent(new DragEvent("drop", options));
        }""",
        [name, base64.b64encode(data).decode(), kind],
    )


def make_png(width: int, height: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = zlib.compress((b"\0" + b"\0" * width) * height)
    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def test_python_is_compiled_where_node_is(site: Path) -> None:
    """The zip of the tested Pyodide holds compiled files alone: the first answer comes sooner."""
    with zipfile.ZipFile(site / "flopcalc.zip") as archive:
        names = archive.namelist()
    if shutil.which("node") is not None:
        assert "flopcalc/web/answers.pyc" in names
        assert not [name for name in names if name.endswith(".py")]


def test_default_question(page: Watched) -> None:
    page.wait_for_total(89_406_346_100_736)
    page.page.locator("#status").filter(has_text="Ready").wait_for()
    headline = page.page.locator("#headline").inner_text()
    assert headline.index("89.41 TFLOPs") < headline.index("89,406,346,100,736")  # the number for people first
    assert "weights 15.44 GiB in bf16" in headline
    for field in ("model", "seq", "batch", "device", "gpus", "step_time"):  # on the first screen
        box = page.page.locator(f"#f-{field}").bounding_box()
        assert box["y"] + box["height"] < 900


@pytest.mark.parametrize("view", VIEWS)
def test_view_equals_the_command_line(page: Watched, view: str, capsys: Capture) -> None:
    page.open(VIEWS[view])
    panel = page.wait_for_view(view)
    printed = run_line(capsys, read_line(page))
    gpus = " --gpus 4" if view == "plan" else ""  # a step is that of all GPUs
    total = run_line(capsys, f"flopcalc estimate llama-3.2-1b --seq 1024{gpus}")["flops"]["total"]
    page.wait_for_total(total)
    with page.page.expect_download() as download:
        panel.get_by_role("button", name="JSON").click()
    saved = json.loads(Path(download.value.path()).read_text(encoding="utf-8"))
    if view == "memory":
        assert saved["memory_bytes"]["peak"] == printed["memory_bytes"]["peak"]
        assert f"{printed['memory_bytes']['peak']:,}" in panel.inner_text()
    elif view == "conventions":
        assert [saved["totals"][name] for name in printed["totals"]] == list(printed["totals"].values())
        assert f"{printed['totals']['hardware']:,}" in panel.inner_text()
    elif view == "roofline":
        assert saved["device"] == printed["device"]
    else:
        check_same(saved, printed)
    if view == "plan":
        assert printed["best"][0]["name"] in panel.inner_text()


def test_explain_and_zoom(page: Watched, capsys: Capture) -> None:
    page.open(SMALL)
    panel = page.wait_for_view("flops")
    panel.locator("g.leaf[data-path$=gate_proj] > rect").click()
    line = "flopcalc explain llama-3.2-1b --seq 1024 --op 'model.layers.*.mlp.gate_proj'"
    (explained,) = run_line(capsys, line)["operations"]
    page.page.locator(".explained pre").filter(has_text=explained["lines"][-1]).wait_for()
    assert page.page.locator(".explained pre").inner_text() == "\n".join(explained["lines"])
    panel.locator("g.group[data-path$=mlp] > rect").focus()
    page.page.keyboard.press("Enter")
    panel.locator(".crumbs [aria-current=location]").filter(has_text="mlp").wait_for()
    assert panel.locator("g.leaf").count() == 3
    panel.get_by_role("button", name="whole model").click()
    assert panel.locator("g.leaf").count() > 3


def test_dropped_config_and_its_link(page: Watched, context: Any, tmp_path: Path, capsys: Capture) -> None:
    page.open("seq=16")
    drop(page, "config.json", json.dumps(LLAMA).encode(), "application/json")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    total = run_line(capsys, f"flopcalc estimate {tmp_path}/config.json --seq 16")["flops"]["total"]
    page.wait_for_total(total)
    page.page.wait_for_url("**/#*files=*")
    other = Watched(context, page.address)
    other.page.goto(page.page.url)
    other.page.wait_for_selector("html[data-python=ready]", state="attached")
    other.wait_for_total(total)
    assert other.problems == []
    other.page.close()


def test_dropped_folder_with_its_processor(page: Watched, context: Any, tmp_path: Path, capsys: Capture) -> None:
    """A real folder, by the browser's own drag and drop: the processor's file says how an image is cut."""
    folder = tmp_path / "mine"
    folder.mkdir()
    config = {"model_type": "qwen2_vl", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
              "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 160,
              "vision_config": {"depth": 2, "embed_dim": 32, "num_heads": 2, "hidden_size": 64}}  # fmt: skip
    processor = {"min_pixels": 3136, "max_pixels": 28 * 28 * 16, "patch_size": 14, "merge_size": 2,
                 "temporal_patch_size": 2, "image_processor_type": "Qwen2VLImageProcessor"}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "preprocessor_config.json").write_text(json.dumps(processor), encoding="utf-8")
    (folder / "README.md").write_text("not read", encoding="utf-8")
    page.open("text=32&image=640x480")
    session = context.new_cdp_session(page.page)
    data = {"items": [], "files": [str(folder)], "dragOperationsMask": 1}
    for kind in ("dragEnter", "dragOver", "drop"):
        session.send("Input.dispatchDragEvent", {"type": kind, "x": 300, "y": 300, "data": data})
    printed = run_line(capsys, f"flopcalc estimate {folder} --text 32 --image 640x480")
    assert printed["workload"]["visual_tokens"] <= 16
    page.wait_for_total(printed["flops"]["total"])


def test_bad_config_has_the_command_lines_error(page: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page.open("seq=16")
    page.page.locator("summary", has_text="Paste a config.json").click()
    for text in ("{bad", "{}", json.dumps({**LLAMA, "model_type": "lama"})):
        (tmp_path / "config.json").write_text(text, encoding="utf-8")
        page.page.fill("#f-paste", text)
        page.page.click("#use-paste")
        expected = run_failing("estimate", "config.json", "--seq", "16")
        expected = re.sub("--model-type( TYPE)?", "“Model type”", expected)  # the page's own name, at its field
        page.page.locator("[role=alert]").filter(has_text=expected).wait_for()
        assert page.page.locator("[role=alert]").inner_text() == expected


def run_failing(*arguments: str) -> str:
    """The one line of a command that must fail."""
    err = io.StringIO()
    with contextlib.redirect_stderr(err), pytest.raises(SystemExit) as end:
        main(list(arguments))
    assert end.value.code == 2
    return err.getvalue().removeprefix("flopcalc: ").rstrip("\n")


def test_dropped_image_is_cut_as_the_processor_does(page: Watched, capsys: Capture) -> None:
    page.open("model=qwen2-vl-7b&text=128")
    drop(page, "photo.png", make_png(640, 480), "image/png")
    printed = run_line(capsys, "flopcalc estimate qwen2-vl-7b --text 128 --image 640x480")
    page.wait_for_total(printed["flops"]["total"])
    assert f"{printed['workload']['visual_tokens']:,} visual tokens" in page.page.locator("#headline").inner_text()


def test_dropped_launch_file(page: Watched, tmp_path: Path, capsys: Capture) -> None:
    text = "base_model: Qwen/Qwen3-8B\nsequence_len: 512\nmicro_batch_size: 2\nadapter: lora\nlora_r: 8\n"
    text += "lora_target_modules: [q_proj, v_proj]\n"
    page.open("seq=16&model=sweep-tiny")
    drop(page, "axolotl.yml", text.encode(), "text/yaml")
    (tmp_path / "axolotl.yml").write_text(text, encoding="utf-8")
    page.wait_for_total(run_line(capsys, f"flopcalc estimate --launch {tmp_path}/axolotl.yml")["flops"]["total"])
    assert "taken from axolotl.yml (axolotl)" in page.page.locator("#status").inner_text()
    assert page.page.input_value("#f-lora") == "r=8,targets=q_proj+v_proj"


def test_slider_under_load(page: Watched, capsys: Capture) -> None:
    """A long plan runs in its own worker: the slider's counts arrive, and the last one is the slider's."""
    page.open("model=llama-3.1-8b&seq=512&device=h100-sxm&gpus=256&tokens=1T&view=plan")
    page.page.wait_for_selector("#panel progress")
    page.page.click("#tab-flops")
    slider = page.page.locator("#f-seq-slider")
    slider.focus()
    for _ in range(24):
        page.page.keyboard.press("ArrowRight")
    seq = page.page.input_value("#f-seq")
    assert seq == "4096"
    line = f"flopcalc estimate llama-3.1-8b --seq {seq} --gpus 256"
    page.wait_for_total(run_line(capsys, line)["flops"]["total"])
    page.page.wait_for_url("**/#*seq=4096*")


def test_plan_shows_progress_and_can_be_cancelled(page: Watched) -> None:
    page.open("model=llama-3.1-70b&seq=4096&device=h100-sxm&gpus=1024&tokens=2T&view=plan")
    page.page.locator("#panel .progress").filter(has_text="layouts").wait_for()
    page.page.click("#cancel")
    page.page.locator("#panel").filter(has_text="Cancelled.").wait_for()
    page.open(VIEWS["time"])
    page.wait_for_view("time")


def test_two_set_ups(page: Watched, capsys: Capture) -> None:
    page.open(f"{SMALL}&b.model=qwen2.5-0.5b&b.seq=512&b.lora=r%3D8%2Ctargets%3Dq_proj")
    other = "flopcalc estimate qwen2.5-0.5b --seq 512 --lora r=8,targets=q_proj"
    page.wait_for_total(run_line(capsys, "flopcalc estimate llama-3.2-1b --seq 1024")["flops"]["total"])
    page.wait_for_total(run_line(capsys, other)["flops"]["total"], 1)
    assert page.page.locator("#panel svg.treemap").count() == 2
    page.page.click("[data-setup=B]")
    assert page.page.input_value("#f-lora") == "r=8,targets=q_proj"
    page.page.click("#remove-setup")
    page.page.locator("#panel .column").nth(1).wait_for(state="detached")


def test_pictures_and_tables_are_saved(page: Watched, capsys: Capture) -> None:
    page.open(SMALL)
    panel = page.wait_for_view("flops")
    saved = {}
    for name in ("PNG", "SVG", "CSV"):
        with page.page.expect_download() as download:
            panel.get_by_role("button", name=name).click()
        assert download.value.suggested_filename == f"flopcalc-flops.{name.lower()}"
        saved[name] = Path(download.value.path()).read_bytes()
    assert saved["PNG"].startswith(b"\x89PNG\r\n\x1a\n")
    root = ElementTree.fromstring(saved["SVG"])
    assert len(root.findall(".//{http://www.w3.org/2000/svg}rect")) > 5
    with pytest.raises(SystemExit):
        main(["estimate", "llama-3.2-1b", "--seq", "1024", "--by", "module", "--format", "csv"])
    assert saved["CSV"].decode().splitlines() == capsys.readouterr().out.splitlines()


def test_hub_is_asked_only_after_a_click(opened: Watched, tmp_path: Path, capsys: Capture) -> None:
    asked: list[str] = []

    def give(route: Any) -> None:
        asked.append(route.request.url)
        if route.request.url.endswith("/config.json") and "preprocessor" not in route.request.url:
            route.fulfill(status=200, body=json.dumps(LLAMA), headers={"Access-Control-Allow-Origin": "*"})
        else:
            route.fulfill(status=404, body="", headers={"Access-Control-Allow-Origin": "*"})

    opened.page.route(f"{HUB}/**", give)
    opened.open("seq=32")
    opened.page.locator("summary", has_text="Take a config from the hub").click()
    opened.page.fill("#f-hub", "someone/tiny")
    opened.page.keyboard.press("Tab")
    assert asked == []
    opened.page.click("#use-hub")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    total = run_line(capsys, f"flopcalc estimate {tmp_path}/config.json --seq 32")["flops"]["total"]
    opened.wait_for_total(total)
    assert asked[0] == f"{HUB}/someone/tiny/resolve/main/config.json"
    assert all(url.startswith(f"{HUB}/someone/tiny/resolve/main/") for url in asked)
    opened.page.unroute(f"{HUB}/**")
    opened.requests.clear()


def test_keyboard_and_languages(page: Watched) -> None:
    page.open(SMALL)
    page.wait_for_view("flops")
    page.page.focus("#tab-flops")
    page.page.keyboard.press("ArrowRight")
    page.wait_for_view("curves")
    assert page.page.evaluate("() => document.activeElement.id") == "tab-curves"
    page.page.select_option("#language", "zh")
    page.page.locator("#tab-time").filter(has_text="时间").wait_for()
    assert page.page.evaluate("() => document.documentElement.lang") == "zh-Hans"
    page.page.wait_for_url("**/#*lang=zh*")
    page.page.select_option("#language", "en")
    page.page.locator("#tab-time").filter(has_text="Time").wait_for()
    page.open("lang=zh")  # a language alone: the default question
    page.wait_for_total(89_406_346_100_736)
    page.open("lang=en")
    page.page.locator("#tab-time").filter(has_text="Time").wait_for()


@pytest.mark.parametrize("width", [360, 768, 1920])
def test_nothing_runs_over_the_edge(page: Watched, width: int) -> None:
    for view, state in {**VIEWS, "curves": f"{SMALL}&view=curves"}.items():
        page.open(state)
        page.wait_for_view(view)
        page.page.set_viewport_size({"width": width, "height": 900})
        page.page.wait_for_function("() => document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize(
    ("scheme", "language", "width"),
    [("light", "en", 1280), ("dark", "zh", 390), ("light", "zh", 1920), ("dark", "en", 390)],
)
def test_axe_finds_nothing_serious(page: Watched, scheme: str, language: str, width: int) -> None:
    folder = find_locked(str(Path(__file__).with_name("axe.lock.json")))
    page.page.emulate_media(color_scheme=scheme)
    page.page.set_viewport_size({"width": width, "height": 900})
    page.page.evaluate(Path(folder, "axe.min.js").read_text(encoding="utf-8"))
    for view, state in VIEWS.items():
        page.open(f"{state}&lang={language}")
        page.wait_for_view(view)
        assert page.page.evaluate("() => document.documentElement.lang.slice(0, 2)") == language
        found = page.page.evaluate("async () => (await axe.run()).violations")
        serious = [
            (each["id"], [node["html"][:200] for node in each["nodes"]])
            for each in found
            if each["impact"] in ("serious", "critical")
        ]
        assert serious == [], view
    page.page.emulate_media(color_scheme="light")
    page.page.select_option("#language", "en")


def test_answer_stands_before_python(site: Path, opened: Watched, context: Any) -> None:
    """With the worker held back, and without any script."""
    held = context.new_page()
    held.route("**/worker.js", lambda route: route.abort())
    held.goto(opened.address)
    assert "89,406,346,100,736" in held.locator("#headline").inner_text()
    held.close()
    assert "89,406,346,100,736" in (site / "index.html").read_text(encoding="utf-8")


def test_second_visit_needs_no_server(driver: Any, site: Path, tmp_path: Path) -> None:
    with launch(driver, tmp_path / "profile") as context:
        with serve(site) as address:
            first = Watched(context, address)
            first.open()
            first.page.locator("#status").filter(has_text="Ready").wait_for()
            first.page.evaluate("async () => { await navigator.serviceWorker.ready; }")
            first.page.close()
        context.set_offline(True)
        again = Watched(context, address)
        again.page.goto(f"{address}#{SMALL}")
        again.page.wait_for_selector("html[data-python=ready]", state="attached")
        again.wait_for_view("flops")
        assert again.total() > 0
        assert again.problems == []


def test_a_link_with_another_view_and_language_into_an_open_tab(page: Watched) -> None:
    page.open(VIEWS["time"])
    page.wait_for_view("time")
    page.open(f"{VIEWS['memory']}&lang=zh")
    page.page.locator("#panel").filter(has_text="峰值时显存的组成").wait_for()
    page.open(f"{VIEWS['flops']}&lang=en")
    page.wait_for_view("flops")


@pytest.mark.parametrize(
    "state",
    [
        "files=zzzz",
        "files=bnVsbA&seq=8",
        "lang=toString&model=sweep-tiny&seq=8",
        "view=__proto__",
        "b.b.x=3&%",
        "f.model=",
    ],
)
def test_a_link_with_odd_state_is_answered(page: Watched, state: str) -> None:
    page.open(state)
    page.page.locator("#headline").filter(has_not_text="Computing").locator(".figure, .error, .link").first.wait_for()
    page.open(SMALL)
    page.wait_for_view("flops")


def test_nothing_changes_by_looking(page: Watched, capsys: Capture) -> None:
    """A view without its device asks for one; the address and the headline stay as they were."""
    page.open(f"{SMALL}&convention=hardware")
    total = run_line(capsys, "flopcalc estimate llama-3.2-1b --seq 1024 --convention hardware")["flops"]["total"]
    page.wait_for_total(total)
    for view in ("time", "roofline", "plan", "serving"):
        page.page.click(f"#tab-{view}")
        page.page.wait_for_selector(f"#tab-{view}[aria-selected=true]")
        page.page.locator("#panel .missing #ask-device").wait_for()
        assert page.total() == total
        assert "device=" not in page.page.url
    page.page.click("#tab-time")
    page.page.select_option("#ask-device", "h200-sxm")
    page.wait_for_view("time")
    page.page.wait_for_url("**/#*device=h200-sxm*")


def test_step_time_gives_the_mfu(page: Watched, capsys: Capture) -> None:
    page.open("model=llama-3.1-8b&seq=4096")
    page.page.select_option("#f-device", "h100-sxm")
    page.page.fill("#f-gpus", "8")
    page.page.fill("#f-step_time", "500ms")
    line = "flopcalc estimate llama-3.1-8b --seq 4096 --device h100-sxm --gpus 8 --step-time 500ms"
    printed = run_line(capsys, line)
    page.page.locator("[data-mfu]").filter(has_text=f"MFU {100 * printed['mfu']['value']:.1f} %").wait_for()
    page.page.locator("[data-hfu]").filter(has_text=f"HFU {100 * printed['hfu']['value']:.1f} %").wait_for()


def test_fields_take_what_the_command_line_takes(page: Watched) -> None:
    page.open("model=llama-3.1-8b&seq=4k&device=h100-sxm&tokens_per_second=9k&view=conventions")
    panel = page.wait_for_view("conventions")
    panel.locator("table.quoted").filter(has_text="TFLOP/s").wait_for()


@pytest.mark.parametrize(
    ("state", "field", "text"),
    [
        ("model=llama-3.2-1b&seq=abc", "seq", "“Sequence length”: 'abc' is not a whole number; write 4096 or 4k"),
        ("model=Qwen/Qwen3-8B&seq=abc", "seq", "“Sequence length”: 'abc' is not a whole number; write 4096 or 4k"),
        ("model=some/thing&seq=8", "model", "some/thing is no preset, so its config is not known here."),
    ],
)
def test_an_error_stands_once_at_its_field(page: Watched, state: str, field: str, text: str) -> None:
    page.open(state)
    message = page.page.locator(f"#e-{field}")
    message.filter(has_text=text).wait_for()
    assert page.page.locator("[role=alert]").count() == 1
    assert page.page.locator("[data-total]").count() == 0
    page.page.locator("#headline button.link").click()
    assert page.page.evaluate("() => document.activeElement.id") == f"f-{field}"


@pytest.mark.parametrize(
    ("state", "field", "text"),
    [
        ("step_time=1", "device", "MFU needs a peak: name a “Device”, or give “Peak of one GPU (FLOP/s)”"),
        (
            "device=h100-sxm&step_time=abc",
            "step_time",
            "“Measured step time”: 'abc' is not a number; write 0.5 or 500ms",
        ),
    ],
)
def test_a_step_time_without_an_mfu_leaves_the_count(
    page: Watched, capsys: Capture, state: str, field: str, text: str
) -> None:
    page.open(f"{SMALL}&{state}")
    page.page.locator(f"#e-{field}").filter(has_text=text).wait_for()
    assert page.page.locator(f"#e-{field}").inner_text() == text
    page.wait_for_total(run_line(capsys, "flopcalc estimate llama-3.2-1b --seq 1024")["flops"]["total"])
    assert page.page.locator("[role=alert]").count() == 1
    page.page.locator("#headline button.link").filter(has_text="No MFU yet").click()
    assert page.page.evaluate("() => document.activeElement.id") == f"f-{field}"
    page.wait_for_view("flops")


@pytest.mark.parametrize("blocked", ["WebAssembly", "workers"])
def test_a_failed_start_is_said(
    driver: Any, site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocked: str
) -> None:
    """No view says that it computes."""
    broken = shutil.copytree(site, tmp_path / "site")
    if blocked == "workers":
        (broken / "worker.js").unlink()
    else:
        monkeypatch.setattr("flopcalc.web.serve.POLICY", POLICY.replace(" 'wasm-unsafe-eval'", ""))
    with launch(driver, tmp_path / "profile") as context, serve(broken) as address:
        page = context.new_page()
        page.goto(f"{address}#{VIEWS['memory']}")
        page.locator("#status.error").filter(has_text="Python did not start").wait_for()
        page.locator("#headline [role=alert]").filter(has_text="Python did not start").wait_for()
        assert "Computing" not in page.locator("main").inner_text()


def test_fields_follow_the_model(page: Watched) -> None:
    page.open("model=llama-3.2-1b&seq=8")
    page.wait_for_view("flops")
    page.page.locator("[data-field=audio]").wait_for(state="hidden")
    assert page.page.locator("details[data-section=media]").is_hidden()
    page.open("model=qwen2-vl-7b&seq=8")
    page.page.locator("details[data-section=media]").wait_for()
    page.open("model=flux.1-dev&sampling_steps=4")
    page.page.locator("#f-phase option:checked").filter(has_text="default: sample").wait_for(state="attached")
    page.page.locator("[data-field=seq]").wait_for(state="hidden")
    assert "visual tokens" not in page.page.locator("#headline").inner_text()


def test_packed_lengths_take_the_place_of_the_length(page: Watched, capsys: Capture) -> None:
    page.open(SMALL)
    page.wait_for_total(run_line(capsys, "flopcalc estimate llama-3.2-1b --seq 1024")["flops"]["total"])
    page.page.locator("details[data-section=work] summary").click()
    page.page.fill("#f-lengths", "512,1024,512")
    page.wait_for_total(run_line(capsys, "flopcalc estimate llama-3.2-1b --lengths 512,1024,512")["flops"]["total"])


def test_picker_searches_by_family_and_size(page: Watched, capsys: Capture) -> None:
    page.open(SMALL)
    page.wait_for_total(run_line(capsys, "flopcalc estimate llama-3.2-1b --seq 1024")["flops"]["total"])
    page.page.fill("#f-model", "mixtral 8x22b")
    page.page.keyboard.press("Escape")  # the model stays
    assert page.page.input_value("#f-model") == "llama-3.2-1b"
    page.page.fill("#f-model", "sound")  # a kind
    page.page.locator("#presets [role=option]").first.filter(has_text="sound").wait_for()
    page.page.fill("#f-model", "qwen3 8b")
    page.page.locator("#presets [role=option]").first.filter(has_text="qwen3-8b").wait_for()  # not one of 14.8b
    page.page.fill("#f-model", "mixtral 8x7b")
    page.page.locator("#presets [role=option]").filter(has_text="mixtral-8x7b").first.wait_for()
    page.page.keyboard.press("ArrowDown")
    page.page.keyboard.press("Enter")
    page.wait_for_total(run_line(capsys, "flopcalc estimate mixtral-8x7b --seq 1024")["flops"]["total"])


def test_curves_of_three_set_ups(page: Watched, capsys: Capture) -> None:
    page.open(f"{SMALL}&b.model=qwen2.5-0.5b&b.seq=1k&c.model=llama-3.1-8b&c.seq=1k&view=curves&over=seq&of=flops")
    panel = page.wait_for_view("curves")
    panel.locator("polyline.curve").nth(2).wait_for()
    assert panel.locator("tbody tr").count() == 10
    for over, words in (("batch", "samples"), ("gpus", "GPUs")):
        page.page.select_option("#curve-over", over)
        panel.locator("th", has_text=words).first.wait_for()
    for at, name in enumerate(("llama-3.2-1b", "qwen2.5-0.5b", "llama-3.1-8b")):
        page.wait_for_total(run_line(capsys, f"flopcalc estimate {name} --seq 1024")["flops"]["total"], at)


def test_a_curve_over_images(page: Watched, capsys: Capture) -> None:
    page.open("model=qwen2-vl-7b&text=128&view=curves&over=images")
    panel = page.wait_for_view("curves")
    line = "flopcalc estimate qwen2-vl-7b --text 128 --image 1024x1024"
    total = run_line(capsys, line)["flops"]["total"]
    panel.locator(f"[title='{total:,}']").wait_for()


def test_six_set_ups_with_their_shares(page: Watched) -> None:
    others = "".join(
        f"&{letter}.model=llama-3.2-1b&{letter}.seq={seq}"
        for letter, seq in zip("bcdef", (1, 2, 4, 8, 16), strict=True)
    )
    page.open(f"{SMALL}{others}")
    page.page.locator("#panel table").filter(has_text="F: llama-3.2-1b").first.wait_for()
    assert page.page.locator("#headline .card").count() == 6
    assert page.page.locator("#add-setup").count() == 0


def test_memory_says_what_fits_and_how_long(page: Watched) -> None:
    page.open(f"{SMALL}&view=memory")  # without a device
    panel = page.wait_for_view("memory")
    panel.filter(has_text="Fits on").wait_for()
    page.open(f"{SMALL}&device=v100-sxm2-16gb&view=memory")  # it has no bf16
    panel.filter(has_text="The longest sequence that fits").wait_for()
    panel.filter(has_text="executed FLOPs").wait_for()


def test_memory_says_what_makes_a_step_fit(page: Watched) -> None:
    page.open("model=qwen3-8b&seq=32k&view=memory")
    panel = page.wait_for_view("memory")
    panel.filter(has_text="Fits on 0 of").wait_for()
    panel.locator(".devices").filter(has_text="With full gradient checkpointing on").locator("button").first.click()
    page.page.wait_for_url("**/#*recompute=full*device=h200-sxm*")
    panel.locator(".answer").filter(has_text="fits into the device's").wait_for()
    page.open("model=llama-3.1-405b&seq=4k&view=memory")
    panel.get_by_role("button", name="Plan it for several GPUs").click()
    page.page.locator("#panel .missing #ask-device").wait_for()


def test_csv_has_units_in_columns_of_their_own(page: Watched) -> None:
    page.open(VIEWS["time"])
    panel = page.wait_for_view("time")
    with page.page.expect_download() as download:
        panel.get_by_role("button", name="CSV").click()
    head, first, *_ = Path(download.value.path()).read_text(encoding="utf-8").splitlines()
    assert head == "kind,time,time unit,share,share unit"
    name, value, unit, share, percent = first.split(",")
    assert (name, unit, percent) == ("matrix products", "ms", "%")
    assert float(value) > 0
    assert 0 < float(share) <= 100


def test_a_saved_picture_says_what_it_shows(page: Watched) -> None:
    page.open(VIEWS["memory"])
    panel = page.wait_for_view("memory")
    with page.page.expect_download() as download:
        panel.get_by_role("button", name="SVG").click()
    texts = [each.text for each in ElementTree.parse(download.value.path()).iter("{http://www.w3.org/2000/svg}text")]
    assert "Memory: llama-3.2-1b" in texts
    assert any((text or "").startswith("weights 2.30 GiB") for text in texts)


def test_serving_view(page: Watched, capsys: Capture) -> None:
    page.open("model=llama-3.2-1b&device=h100-sxm&input_len=1k&output_len=64&concurrency=4&view=serving")
    panel = page.wait_for_view("serving")
    printed = run_line(capsys, read_line(page))
    assert f"{round(printed['tokens_per_s']['mid']):,} tokens/s" in panel.inner_text()


def test_several_degrees_are_a_plans_to_try(page: Watched, capsys: Capture) -> None:
    """The headline counts a step all the same; the plan's best layout stands in words, its time on a log axis."""
    page.open(f"{SMALL}&device=h200-sxm&gpus=4&tokens=10B&tp=1,2&pp=1&view=plan")
    panel = page.wait_for_view("plan")
    page.wait_for_total(run_line(capsys, "flopcalc estimate llama-3.2-1b --seq 1024 --gpus 4")["flops"]["total"])
    printed = run_line(capsys, read_line(page))
    best = printed["best"][0]["layout"]
    words = panel.inner_text()
    assert f"{best['dp']} data-parallel replicas" in words
    assert f"micro-batches of {best['micro_batch']}" in words
    heights = [float(each.get_attribute("y")) for each in panel.locator("svg.chart text.tick[text-anchor=end]").all()]
    gaps = [one - other for one, other in pairwise(heights)]
    assert len(gaps) > 1
    assert max(gaps) > 1.05 * min(gaps)


def test_roofline_names_its_points(page: Watched) -> None:
    page.open(VIEWS["roofline"])
    panel = page.wait_for_view("roofline")
    names = panel.locator("svg.chart text.tag:not(.roof)").all_text_contents()
    assert panel.locator("svg.chart text.tag.roof").all_text_contents() == ["989.40 TFLOP/s"]
    assert 2 <= len(names) <= 6
    assert set(names) <= {
        "gate_proj",
        "up_proj",
        "down_proj",
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "self_attn",
        "lm_head",
    }


def test_curves_carry_the_letters_of_their_set_ups(page: Watched) -> None:
    page.open(f"{SMALL}&b.model=qwen2.5-0.5b&b.seq=1k&view=curves&of=memory")
    panel = page.wait_for_view("curves")
    assert panel.locator("svg.chart text.letter").all_text_contents() == ["A", "B"]
    assert read_line(page) == "flopcalc predict llama-3.2-1b --seq 1024 --memory"


def test_the_answer_stands_on_a_phones_first_screen(driver: Any, site: Path, tmp_path: Path) -> None:
    """Settings that few change are folded; a field that is asked for unfolds them."""
    size = {"width": 390, "height": 844}
    with launch(driver, tmp_path / "profile", viewport=size) as context, serve(site) as address:
        page = Watched(context, address)
        page.open(f"{SMALL}&lora=r")
        page.page.locator("#e-lora").wait_for()
        assert page.page.locator("details.more[open]").count() == 1
        page.page.goto("about:blank")
        page.open(SMALL)
        page.wait_for_view("flops")
        assert page.page.locator("details.more[open]").count() == 0
        box = page.page.locator("#headline .figure").bounding_box()
        assert box["y"] + box["height"] < size["height"]
        assert page.problems == []


def test_chinese_has_chinese_marks(page: Watched) -> None:
    page.open(f"{VIEWS['plan']}&lang=zh")
    panel = page.wait_for_view("plan")
    headline = page.page.locator("#headline").inner_text()
    words = panel.inner_text()
    page.open(f"{SMALL}&lang=en")
    page.wait_for_view("flops")
    assert "训练，1 × 1024 个 token，4 块 GPU × 1 = 每步 4 条序列：前向" in headline
    assert "，反向" in headline
    assert "路数据并行，" in words or "微批大小" in words
    assert re.search(r"[\u4e00-\u9fff] ?[:,;(]", headline + words) is None


def test_chinese_says_what_conventions_count(page: Watched) -> None:
    page.open(f"{SMALL}&view=conventions&lang=zh")
    panel = page.wait_for_view("conventions")
    panel.filter(has_text="每个激活参数、每个 token 计 6 次").wait_for()
    quoted = panel.locator("table.quoted").inner_text()
    page.open(f"{SMALL}&lang=en")
    page.wait_for_view("flops")
    assert "without" not in quoted
    assert "；不含" in quoted


def test_print_keeps_the_number_in_one_line(page: Watched) -> None:
    page.open(SMALL)
    page.wait_for_view("flops")
    page.page.emulate_media(media="print")
    exact = page.page.locator("#headline .exact").bounding_box()
    hidden = [
        page.page.locator(each).is_hidden()
        for each in ("#inputs", "#views", ".exports", ".save", "#status", "#headline .link")
    ]
    page.page.emulate_media(media="screen")
    assert exact["height"] < 30
    assert all(hidden)


def test_a_quote_without_a_peak_names_the_field(page: Watched) -> None:
    page.open(f"{SMALL}&mfu=40%25&from=palm&view=conventions")
    panel = page.wait_for_view("conventions")
    panel.locator("[role=alert]").filter(has_text="“Device”").wait_for()
    panel.locator("table.quoted").filter(has_text="megatron").wait_for()  # what can be said is said


def test_a_view_that_is_left_before_its_answer_leaves_no_mark(page: Watched) -> None:
    page.open(f"{VIEWS['time']}&lang=en")
    page.wait_for_view("time")
    page.page.evaluate(
        "() => { document.getElementById('tab-curves').click(); document.getElementById('tab-flops').click(); }"
    )
    page.wait_for_view("flops")
    assert page.page.locator("#panel[aria-busy]").count() == 0
