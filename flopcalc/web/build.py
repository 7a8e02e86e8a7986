"""Build the page as a static site: its files, Pyodide, the Python side as one zip, and the default answer."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
import zipfile
from collections.abc import Iterable, Iterator
from html import escape
from typing import Any

from flopcalc._version import __version__
from flopcalc.base.data import describe_install, find_data_dir
from flopcalc.base.errors import FlopcalcError
from flopcalc.base.number_formats import load_computed
from flopcalc.base.units import format_flops
from flopcalc.base.vocabulary import DTYPES, RECOMPUTE
from flopcalc.core.estimate.published_conventions import load_quoted
from flopcalc.core.formats.stored import load_stored
from flopcalc.core.model.gguf import load_tables
from flopcalc.hardware.devices import load_devices
from flopcalc.planning.network import load_interconnects
from flopcalc.web.answers import answer
from flopcalc.web.compiled import compile_python
from flopcalc.web.packages import find_package, is_locked, load_lock
from flopcalc.web.setups import describe_form

STATIC = os.path.join(os.path.dirname(os.path.abspath(__file__)), "static")
DEFAULT = {"model": "qwen2-vl-7b", "seq": "2048"}  # the question whose answer the page shows at the start
HUB = "https://huggingface.co"  # the one other host that the page may ask, and only after a click
POLICY = (
    "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; worker-src 'self'; style-src 'self'; "
    f"img-src 'self' blob: data:; connect-src 'self' {HUB}; manifest-src 'self'; base-uri 'none'; form-action 'none'"
)
MARK = "flopcalc-site.json"  # what says that a folder is a site of ours, and may be written anew
# Any file server knows .js; .mjs is unknown to some, and a browser runs no module of an unknown type.
_PYODIDE = {
    "pyodide.mjs": "pyodide.js",
    "pyodide.asm.mjs": "pyodide.asm.js",
    "pyodide.asm.wasm": "pyodide.asm.wasm",
    "python_stdlib.zip": "python_stdlib.zip",
}
_SKIPPED = (
    "__main__.py",
    "cli/",
    "integrations/",
    "measure",
    "monitor",
    "web/static",
    "web/build.py",
    "web/compiled.py",
    "web/packages.py",
    "web/serve.py",
    "model_specs",
)
_SKIPPED_DATA = ("examples", "coverage.toml", "coverage_diffusers.toml", "launch_ids.toml", "registries")
_MOMENT = (1980, 1, 1, 0, 0, 0)  # of every file in the zip: the same input gives the same bytes


def build_site(out: str, pyodide: str | None = None, address: str = "") -> list[str]:
    """Write the site into a folder, whole; what the reader should know comes back as notes.

    `address` is where it will be found: previews of links need the whole address of their picture.
    """
    package = load_lock()
    source = find_package(package, pyodide)
    notes = []
    is_tested = pyodide is None or is_locked(source, package)
    if not is_tested:
        notes.append(f"{pyodide} is not the tested {package.spec}")
    if importlib.util.find_spec("yaml") is None:
        notes.append(f"without PyYAML the page reads no launch files: {describe_install('web')}")
    _check_folder(out)
    part = f"{os.path.abspath(out)}.{os.getpid()}.new"
    try:
        if not _write(part, source, is_tested, address) and is_tested:
            notes.append("without Node the page's Python is not compiled ahead: it starts about a fifth more slowly")
        if os.path.isdir(out):
            shutil.rmtree(out)
        os.rename(part, out)
    except OSError as error:
        raise FlopcalcError(f"{out}: cannot be written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return notes


def _check_folder(out: str) -> None:
    """Only an empty folder, a new one or an older site is written to."""
    if os.path.isdir(out):
        if os.listdir(out) and not os.path.isfile(os.path.join(out, MARK)):
            raise FlopcalcError(f"{out}: holds other files: give a new folder, an empty one, or an older site")
    elif os.path.exists(out):
        raise FlopcalcError(f"{out}: is not a folder")


def _write(out: str, pyodide: str, compiles: bool, address: str) -> bool:
    """Write all files; whether Python's are compiled."""
    shutil.copytree(STATIC, out)
    os.makedirs(os.path.join(out, "pyodide"))
    for name, new in _PYODIDE.items():
        shutil.copyfile(os.path.join(pyodide, name), os.path.join(out, "pyodide", new))
    python = os.path.join(out, "flopcalc.zip")
    write_python(python)
    is_compiled = compiles and compile_python(python, pyodide)
    _compress(python)
    default = answer(json.dumps({"what": "flops", "setup": DEFAULT}))
    data = json.dumps({**describe_choices(), "default": {"setup": DEFAULT}}, ensure_ascii=False, separators=(",", ":"))
    _put(out, "data.json", data)
    page = make_page(_read(os.path.join(STATIC, "index.html")), default, address)
    _put(out, "index.html", page)
    files = sorted(name for name in _list_files(out) if name != "sw.js")
    digest = hashlib.sha256()
    for name in files:
        with open(os.path.join(out, name), "rb") as file:
            digest.update(name.encode() + b"\0" + file.read() + b"\0")
    version = digest.hexdigest()[:16]
    worker = _read(os.path.join(STATIC, "sw.js")).replace("__VERSION__", version)
    _put(out, "sw.js", worker.replace('"__FILES__"', json.dumps(["./", *files])))
    _put(out, MARK, json.dumps({"flopcalc": __version__, "version": version}) + "\n")
    return is_compiled


def make_page(template: str, default: str, address: str = "") -> str:
    """index.html with the default question's answer in it, as text and as data."""
    found = json.loads(default)["estimate"]
    flops = {name: int(value) for name, value in found["flops"].items()}
    values = {
        "POLICY": POLICY,
        "VERSION": __version__,
        "TOTAL": f"{flops['total']:,}",
        "SHORT": format_flops(flops["total"]),
        "FORWARD": format_flops(flops["forward"]),
        "BACKWARD": format_flops(flops["backward"]),
        "MODEL": DEFAULT["model"],
        "SEQ": f"{int(DEFAULT['seq']):,}",
        "CARD": f"{address.rstrip('/')}/card.png" if address else "card.png",
    }
    page = re.sub(r"\{\{([A-Z]+)\}\}", lambda found: escape(values[found[1]], quote=True), template)
    # A closing tag inside the data would end the element early.
    return page.replace('"__DEFAULT__"', default.replace("<", "\\u003c"))


def write_python(path: str) -> None:
    """The package without its command line, its data and PyYAML, if it is installed, as one zip with fixed bytes."""
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    entries = {f"flopcalc/{name}": os.path.join(root, name) for name in _list_python(root)}
    data = find_data_dir()
    for name in _list_files(data):
        if not name.startswith(_SKIPPED_DATA) and not name.endswith(".pyc"):
            entries[f"flopcalc/model_specs/{name}"] = os.path.join(data, name)
    found = importlib.util.find_spec("yaml")
    for folder in (found.submodule_search_locations or ())[:1] if found is not None else ():
        entries |= {f"yaml/{name}": os.path.join(folder, name) for name in _list_files(folder) if name.endswith(".py")}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:  # compile.mjs reads it so; _compress comes last
        for name, source in sorted(entries.items()):
            info = zipfile.ZipInfo(name, _MOMENT)
            info.external_attr = 0o644 << 16
            with open(source, "rb") as file:
                archive.writestr(info, file.read())


def _compress(path: str) -> None:
    """The same zip with its entries deflated: a quarter of the bytes to fetch."""
    with zipfile.ZipFile(path) as archive:
        entries = [(info.filename, archive.read(info)) for info in archive.infolist()]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, data in entries:
            archive.writestr(zipfile.ZipInfo(name, _MOMENT), data, zipfile.ZIP_DEFLATED, 9)


def _list_python(root: str) -> Iterator[str]:
    for name in _list_files(root):
        if name.endswith((".py", ".json", ".toml")) and not name.startswith(_SKIPPED):
            yield name


def _list_files(folder: str) -> Iterator[str]:
    """Every file below a folder, by its path inside, with forward slashes."""
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        for name in sorted(names):
            yield os.path.relpath(os.path.join(place, name), folder).replace(os.sep, "/")


def describe_choices() -> dict[str, Any]:
    """What the page's form offers: presets, devices, and the closed vocabularies."""
    with open(os.path.join(find_data_dir(), "catalogue.json"), encoding="utf-8") as file:
        catalogue = json.load(file)
    inputs = {family["spec"]: family["input"] for family in catalogue["families"]}
    return {
        "version": __version__,
        "hub": HUB,
        "has_yaml": importlib.util.find_spec("yaml") is not None,
        "presets": [
            {
                "name": preset["name"],
                "parameters": preset["parameters"],
                "hub_id": preset["hub_id"],
                "aliases": preset["aliases"],
                "type": preset["model_type"],
                "input": inputs.get(preset["spec"], "text"),
            }
            for preset in catalogue["presets"]
            if inputs.get(preset["spec"]) != "images"  # the form asks for tokens
        ],
        "devices": [
            {
                "id": device.id,
                "name": device.name,
                "memory_gb": device.memory_gb,
                "is_timed": device.bandwidth_gb_per_s is not None
                and bool(device.peak_tflops.keys() & {"bf16", "fp16"}),
            }
            for device in load_devices()[0]
        ],
        "interconnects": [{"id": each.id, "name": each.name} for each in load_interconnects().values()],
        "quoted": list(load_quoted().conventions),
        "formats": sorted({**load_computed()[0], **load_stored(), **load_tables()["mixes"]["rows"]}),
        "form": describe_form({"recompute": RECOMPUTE, "compute": DTYPES}),
    }


def _read(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read()


def _put(out: str, name: str, text: str) -> None:
    with open(os.path.join(out, name), "w", encoding="utf-8", newline="\n") as file:
        file.write(text)


def list_sizes(out: str) -> Iterable[tuple[str, int]]:
    """Every file of a site and its bytes."""
    return [(name, os.path.getsize(os.path.join(out, name))) for name in _list_files(out)]
