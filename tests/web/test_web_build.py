"""The site's builder without a browser: what it writes, what it fetches, and its one-line errors."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import stat
import struct
import subprocess
import tarfile
import threading
import zipfile
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from flopcalc.base.errors import FlopcalcError
from flopcalc.cli import main
from flopcalc.core.estimate.published_conventions import load_quoted
from flopcalc.web.build import MARK, POLICY, STATIC, build_site, describe_choices, make_page
from flopcalc.web.compiled import compile_python
from flopcalc.web.packages import Package, find_package, load_lock
from flopcalc.web.serve import make_server
from flopcalc.web.setups import list_page_fields

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def pyodide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files with the names of Pyodide's."""
    folder = tmp_path_factory.mktemp("pyodide")
    for name in load_lock().files:
        (folder / name).write_text(f"// {name}\n", encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, pyodide: Path) -> Path:
    folder = tmp_path_factory.mktemp("web") / "site"
    notes = build_site(str(folder), str(pyodide))
    assert notes[0] == f"{pyodide} is not the tested pyodide@{load_lock().version}"
    return folder


def test_default_answer_stands_in_the_page(site: Path) -> None:
    page = (site / "index.html").read_text(encoding="utf-8")
    assert "data-total>89,406,346,100,736</span>" in page
    assert '<strong class="figure">89.41 TFLOPs</strong>' in page
    assert "{{" not in page
    data = re.search(r'<script type="application/json" id="default">(.*?)</script>', page, re.DOTALL)
    assert data is not None
    assert json.loads(data[1])["estimate"]["flops"]["total"] == 89_406_346_100_736


def test_a_link_to_the_page_has_a_title_with_the_number_and_a_picture(site: Path) -> None:
    page = (site / "index.html").read_text(encoding="utf-8")
    assert 'property="og:title" content="flopcalc: 89.41 TFLOPs for a training step of qwen2-vl-7b' in page
    assert 'property="og:image" content="card.png"' in page
    template = (Path(STATIC) / "index.html").read_text(encoding="utf-8")
    default = json.dumps({"estimate": {"flops": {"total": 3, "forward": 1, "backward": 2}}})
    assert 'content="https://example.org/f/card.png"' in make_page(template, default, "https://example.org/f/")
    picture = (site / "card.png").read_bytes()
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", picture[16:24]) == (1200, 630)


def test_python_is_compressed(site: Path) -> None:
    with zipfile.ZipFile(site / "flopcalc.zip") as archive:
        infos = archive.infolist()
    assert sum(info.compress_size for info in infos) < 0.45 * sum(info.file_size for info in infos)


def test_policy_names_one_other_host(site: Path) -> None:
    page = (site / "index.html").read_text(encoding="utf-8")
    assert POLICY.replace("'", "&#x27;") in page
    assert re.findall(r"https?://[^\s;]+", POLICY) == ["https://huggingface.co"]
    assert "unsafe-inline" not in POLICY
    assert "'unsafe-eval'" not in POLICY


def test_page_loads_nothing_from_elsewhere(site: Path) -> None:
    for path in site.rglob("*"):
        if path.suffix in (".js", ".html", ".css") and "pyodide" not in path.parts:
            text = path.read_text(encoding="utf-8")
            hosts = set(re.findall(r"https?://([\w.-]+)", text)) - {"huggingface.co", "www.w3.org", "d3js.org"}
            if path.name == "index.html":  # the default answer names its sources
                continue
            assert hosts == set(), path
            assert " style=" not in text, path
    page = re.sub(
        r'<script type="application/json".*?</script>', "", (site / "index.html").read_text(), flags=re.DOTALL
    )
    assert re.findall(r"<script(?! type=\"module\" src=\"(?:boot|app).js\")", page) == []
    assert "onclick=" not in page


def test_python_is_zipped_without_what_needs_torch(site: Path) -> None:
    with zipfile.ZipFile(site / "flopcalc.zip") as archive:
        names = archive.namelist()
    for wanted in (
        "flopcalc/web/answers.py",
        "yaml/__init__.py",
        "flopcalc/model_specs/presets/qwen2-vl-7b.toml",
        "flopcalc/setup/launch/axolotl.toml",
        "flopcalc/model_specs/predictors/h200-sxm.json",
        "flopcalc/model_specs/catalogue.json",  # which family a config is that does not say it, and near names
    ):
        assert wanted in names
    left_out = (
        "flopcalc/cli",
        "flopcalc/integrations",
        "flopcalc/measure",
        "flopcalc/monitor",
        "flopcalc/web/static",
        "click",
    )
    assert not [name for name in names if name.startswith(left_out)]
    assert not [name for name in names if name.endswith((".pyc", ".so"))]


def test_build_is_the_same_each_time(site: Path, pyodide: Path, tmp_path: Path) -> None:
    build_site(str(tmp_path / "again"), str(pyodide))
    for path in site.rglob("*"):
        if path.is_file():
            assert path.read_bytes() == (tmp_path / "again" / path.relative_to(site)).read_bytes(), path


def test_service_worker_keeps_every_file(site: Path) -> None:
    worker = (site / "sw.js").read_text(encoding="utf-8")
    listed = json.loads(re.search(r"const FILES = (\[.*?\]);", worker)[1])  # type: ignore[index]
    files = {path.relative_to(site).as_posix() for path in site.rglob("*") if path.is_file()}
    assert set(listed) == {"./", *files} - {"sw.js", MARK}
    assert "__VERSION__" not in worker


def test_out_writes_only_where_it_may(site: Path, pyodide: Path, tmp_path: Path, capsys: Capture) -> None:
    def run(*arguments: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as end:
            main(["web", *arguments])
        return int(end.value.code or 0), capsys.readouterr().err

    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("…", encoding="utf-8")
    code, err = run("--out", str(tmp_path / "mine"), "--pyodide", str(pyodide))
    assert (code, "holds other files" in err) == (2, True)
    assert (tmp_path / "mine" / "thesis.tex").exists()
    code, err = run("--out", str(tmp_path / "new"), "--pyodide", str(tmp_path))
    assert (code, err) == (
        2,
        f"flopcalc: {tmp_path}: no pyodide.mjs; it should hold the files of npm's pyodide@{load_lock().version}\n",
    )
    code, err = run("--out", str(tmp_path / "new"), "--port", "80")
    assert (code, "leave --port and --no-browser out" in err) == (2, True)
    (site / "stale.js").write_text("", encoding="utf-8")
    code, err = run("--out", str(site), "--pyodide", str(pyodide))
    assert (code, err.startswith(f"written: {site} (")) == (0, True)
    assert not (site / "stale.js").exists()


def test_without_npm_one_line_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("FLOPCALC_CACHE", str(tmp_path))
    with pytest.raises(FlopcalcError, match=r"fetched with npm, which is not here: install Node, or give pyodide=DIR"):
        find_package(load_lock())


def make_tool(folder: Path, name: str, body: str) -> None:
    """A command that does what is asked."""
    tool = folder / name
    tool.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)


def test_python_is_compiled_once_and_kept(tmp_path: Path, pyodide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Node, or where it fails, the sources stay; what was compiled is taken from the cache."""
    monkeypatch.setenv("FLOPCALC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    path = tmp_path / "flopcalc.zip"
    path.write_text("sources", encoding="utf-8")
    assert not compile_python(str(path), str(pyodide))
    make_tool(tmp_path, "node", "exit 1")
    assert not compile_python(str(path), str(pyodide))
    assert path.read_text() == "sources"
    kept = tmp_path / "cache" / "web"
    (kept / "older.zip").write_text("older", encoding="utf-8")
    make_tool(tmp_path, "node", 'echo "compiled" > "$4"')
    assert compile_python(str(path), str(pyodide))
    assert path.read_text() == "compiled\n"
    assert [each.suffix for each in kept.iterdir()] == [".zip"]
    make_tool(tmp_path, "node", "exit 1")
    path.write_text("sources", encoding="utf-8")
    assert compile_python(str(path), str(pyodide))
    path.write_text("other sources", encoding="utf-8")
    assert not compile_python(str(path), str(pyodide))


ENGINE = """
import { Dropped, Engine } from "./engine.js";
const sent = [];
const worker = Object.assign(new EventTarget(), { postMessage: (each) => sent.push(each) });
const engine = new Engine(() => {}, worker);
const say = (data) => engine.hear(data);
const name = (error) => (error instanceof Dropped ? "dropped" : error.message);
const asked = [1, 2, 3].map((seq) => engine.ask("time", { seq }).catch(name));
const other = engine.ask("count", { seq: 3 });
say({ ready: true, times: {} });
say({ id: 1, answer: "three" });
say({ id: 2, answer: "count" });
const late = engine.ask("plan", { seq: 4 }, (done) => sent.push(`progress ${done}`)).catch(name);
say({ id: 3, progress: [5, 9] });
const found = [...(await Promise.all(asked)), await other];
engine.fail("broken");
console.log(JSON.stringify({ found, late: await late, sent }));
"""


def test_newer_question_drops_the_older(tmp_path: Path) -> None:
    """Of each channel only the newest question reaches Python; channels do not wait for each other's older ones."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs Node")
    (tmp_path / "package.json").write_text('{"type": "module"}', encoding="utf-8")
    shutil.copy(Path(STATIC) / "engine.js", tmp_path)
    (tmp_path / "ask.js").write_text(ENGINE, encoding="utf-8")
    done = subprocess.run([node, "ask.js"], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True)
    found = json.loads(done.stdout)
    assert found["found"] == ["dropped", "dropped", "three", "count"]
    assert found["sent"] == [
        {"id": 1, "question": {"seq": 3}},
        {"id": 2, "question": {"seq": 3}},
        {"id": 3, "question": {"seq": 4}},
        "progress 5",
    ]
    assert found["late"] == "broken"


def test_npm_fills_the_cache_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as tar:
        for name, text in (("package/a.js", b"a"), ("package/other.js", b"b")):
            info = tarfile.TarInfo(name)
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text))
    (tmp_path / "source.tgz").write_bytes(archive.getvalue())
    sha256 = hashlib.sha256(archive.getvalue()).hexdigest()
    package = Package("thing", "1.0", sha256, {"a.js": hashlib.sha256(b"a").hexdigest()})
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FLOPCALC_CACHE", str(tmp_path / "cache"))
    make_tool(tmp_path, "npm", f'echo "$@" >> {tmp_path}/log; cp {tmp_path}/source.tgz "$5/thing-1.0.tgz"')
    folder = Path(find_package(package))
    assert [path.name for path in folder.iterdir()] == ["a.js"]
    assert find_package(package) == str(folder)
    assert (tmp_path / "log").read_text().startswith("pack thing@1.0 --silent --pack-destination ")
    assert (tmp_path / "log").read_text().count("\n") == 1
    (folder / "a.js").write_text("changed", encoding="utf-8")  # a damaged cache is filled again
    assert (Path(find_package(package)) / "a.js").read_text() == "a"
    with pytest.raises(FlopcalcError, match=r"has SHA-256 .* not 00: it is not used"):
        find_package(package._replace(sha256="00", version="1.1"))
    make_tool(tmp_path, "npm", "echo 'npm error 404 not found' >&2; exit 1")
    with pytest.raises(FlopcalcError, match=r"npm pack thing@1.2 failed: npm error 404 not found"):
        find_package(package._replace(version="1.2"))


def test_choices_are_what_the_command_line_knows() -> None:
    found = describe_choices()
    assert {"qwen2-vl-7b", "llama-3.1-8b"} <= {preset["name"] for preset in found["presets"]}
    assert "h200-sxm" in {device["id"] for device in found["devices"]}
    assert "6nd" in found["quoted"]
    fields = {field["name"]: field for section in found["form"] for field in section["fields"]}
    assert list(fields["phase"]["words"]) == ["train", "forward", "prefill", "decode", "sample"]
    assert (fields["batch"]["slider"], fields["image"]["kind"], fields["autocast"]["kind"]) == ((0, 10), "list", "flag")
    hidden = {"dtype", "gradient_checkpointing", "compile", "top"}  # another field of the form says it
    assert fields.keys() == {*list_page_fields()} - hidden


def test_data_cannot_end_its_element() -> None:
    default = json.dumps({"estimate": {"flops": {"total": "1", "forward": 1, "backward": 0}}, "work": "</script>"})
    page = make_page('<p>{{TOTAL}}</p><script>"__DEFAULT__"</script>', default)
    assert page.count("</script>") == 1


def test_languages_have_the_same_words() -> None:
    folder = Path(STATIC) / "strings"
    words = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*.json")}
    assert set(words) == {"en", "zh"}
    assert words["en"].keys() == words["zh"].keys()
    for key, text in words["en"].items():
        assert set(re.findall(r"\{\w+\}", text)) == set(re.findall(r"\{\w+\}", words["zh"][key])), key
    used = set()
    for path in Path(STATIC).rglob("*.js"):
        used |= set(re.findall(r'\bt\("([\w.]+)"', path.read_text(encoding="utf-8")))
    assert used <= words["en"].keys()


def test_chinese_has_words_for_what_python_says() -> None:
    words = json.loads((Path(STATIC) / "strings" / "python" / "zh.json").read_text(encoding="utf-8"))
    assert words["counts"].keys() == words["leaves_out"].keys() == load_quoted().conventions.keys()
    for pattern, by in words["work"]:
        groups = re.compile(pattern).groups
        assert all(int(number) <= groups for number in re.findall(r"\$(\d)", by)), pattern


@pytest.mark.parametrize(
    ("work", "said"),
    [
        ("train, 1 × 4096 tokens", "训练，1 × 4096 个 token"),
        ("decode, 8 × 1 new tokens after 4096 cached", "解码，8 × 1 个新 token（已缓存 4096 个）"),
        ("train, 2 × 64 tokens (padded), 4 micro-batches", "训练，2 × 64 个 token（含填充），4 个微批"),
        (
            "train, 4 × 8192 tokens, 8 GPUs in 4 groups × 4 = 1,024 sequences a step, vision frozen, recompute full",
            "训练，4 × 8192 个 token，8 块 GPU 分 4 组 × 4 = 每步 1,024 条序列，冻结 vision，全部重计算",
        ),
        (
            "sample, 1 × 1024x1024, 512 text tokens, 28 sampling steps without guidance",
            "采样，1 × 1024x1024，512 个文本 token，28 步采样，无引导",
        ),
    ],
)
def test_chinese_says_a_step(work: str, said: str) -> None:
    words = json.loads((Path(STATIC) / "strings" / "python" / "zh.json").read_text(encoding="utf-8"))
    for pattern, by in words["work"]:
        work = re.sub(pattern, re.sub(r"\$(\d)", r"\\g<\1>", by), work)
    assert work == said


def test_server_sends_types_and_policy(site: Path) -> None:
    with make_server(str(site), 0) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        address = f"http://127.0.0.1:{server.server_address[1]}"
        for path, kind in (
            ("/", "text/html"),
            ("/app.js", "text/javascript"),
            ("/pyodide/pyodide.asm.wasm", "application/wasm"),
        ):
            with urlopen(address + path) as response:
                assert response.headers["Content-Type"].startswith(kind)
                assert response.headers["Content-Security-Policy"] == f"{POLICY}; frame-ancestors 'none'"
        with pytest.raises(HTTPError) as problem:
            urlopen(f"{address}/views/")
        problem.value.close()
        assert problem.value.code == 404
        with pytest.raises(FlopcalcError, match=r"port \d+ of 127.0.0.1 cannot be used"):
            make_server(str(site), server.server_address[1])
        server.shutdown()
        thread.join()


def test_the_documentation_knows_the_size_of_the_scripts() -> None:
    size = sum(path.stat().st_size for path in Path(STATIC).rglob("*") if path.is_file() and "vendor" not in path.parts)
    page = Path(__file__).parents[2] / "docs" / "web.md"
    row = r"own scripts, styles, words and the picture of links \| (\d+) kB"
    told = re.search(row, page.read_text(encoding="utf-8"))
    assert told is not None
    assert float(told.group(1)) == pytest.approx(size / 1000, rel=0.1)
