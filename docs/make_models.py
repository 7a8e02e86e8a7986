"""Specs, examples and recorded truth go in; docs/models.md and model_specs/catalogue.json come out.

python docs/make_models.py              write both
python docs/make_models.py --check      exit 1 if one of them is stale
python docs/make_models.py --mappings   write model_specs/coverage.toml from the installed transformers
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flopcalc.base.data import list_data_files, load_toml
from flopcalc.cli.supported import FILE, make_catalogue
from flopcalc.core.spec.coverage import AutoMapping, describe_specs, load_coverage
from lab import truth

HERE = Path(__file__).resolve().parent
PAGE = HERE / "models.md"
RECORDED = set(truth.list_types())
COVERAGE = HERE.parent / "model_specs" / "coverage.toml"
CATALOGUE = HERE.parent / "model_specs" / FILE
AUTO = {
    "causal": "AutoModelForCausalLM",
    "image-text": "AutoModelForImageTextToText",
    "masked": "AutoModelForMaskedLM",
    "seq2seq": "AutoModelForSeq2SeqLM",
    "speech": "AutoModelForSpeechSeq2Seq",
}
_NAMES = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "image-text": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "speech": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
}
DIFFUSERS = COVERAGE.with_name("coverage_diffusers.toml")
_FOLDERS = ("transformers", "unets", "autoencoders", "controlnets")
_DENOISERS = (
    "transformer",
    "unet",
    "prior",
    "decoder",
    "controlnet",
    "vae",
)  # a pipeline's parts, the first that it has
HEAD = """# Model types

Every `model_type` in transformers' auto mappings, with the spec that counts it. `flopcalc models --coverage` prints the
same. "Traces" is the number of recorded runs of HF's own model (tests/truth). The spec equals each of them to the FLOP,
row by row. "Not run" names the usual cases that HF's model cannot run. `python docs/make_models.py` writes this page
from `model_specs/`.
"""


def read_mappings() -> dict[str, dict[str, str]]:
    """Type -> class of the installed transformers, per mapping."""
    from transformers.models.auto import modeling_auto

    return {name: dict(sorted(getattr(modeling_auto, key).items())) for name, key in _NAMES.items()}


def read_diffusers() -> dict[str, dict[str, str]]:
    """The classes of the installed diffusers by folder, and its pipelines, each with the class of its denoiser."""
    import diffusers
    from diffusers import models

    found: dict[str, dict[str, str]] = {}
    for folder in _FOLDERS:
        names = [name for key, names in models._import_structure.items() if key.startswith(folder) for name in names]
        found[folder] = {name: name for name in sorted(names)}
    named = [
        name for name in dir(diffusers) if name.endswith("Pipeline") and not name.startswith(("Auto", "Diffusion"))
    ]
    found["pipelines"] = {name: find_denoiser_class(getattr(diffusers, name)) for name in named}
    return found


def find_denoiser_class(pipeline: type) -> str:
    """The class of what a pipeline runs at each step, as its constructor or default blocks say it; empty: neither."""
    if pipeline.__name__.endswith("ModularPipeline") and pipeline.default_blocks_name:
        hints = {spec.name: spec.type_hint.__name__ for spec in pipeline().blocks.expected_components}
        return next((hints[part] for part in _DENOISERS if part in hints), "")
    parameters = inspect.signature(pipeline.__init__).parameters
    kinds = next((str(parameters[part].annotation) for part in _DENOISERS if part in parameters), "")
    words = re.findall(r"(\w+)(?='>|$| \|)", kinds)
    return words[0] if words else ""


def format_coverage(
    release: str, mappings: dict[str, dict[str, str]], reasons: dict[str, str], apart: Sequence[str] = ()
) -> str:
    lines = ["# Made by `python docs/make_models.py --mappings`, except apart and [reasons].", f'release = "{release}"']
    if apart:
        lines.append(
            "# Reasons of types that make no images or videos by themselves: the second totals leave them out."
        )
        lines += ["apart = [", *(f"  {json.dumps(reason)}," for reason in apart), "]"]
    lines.append("")
    for name, types in mappings.items():
        lines += [f"[mappings.{name}]", f'auto_class = "{AUTO.get(name, name)}"', f"[mappings.{name}.types]"]
        lines += [f'"{model_type}" = "{architecture}"' for model_type, architecture in types.items()]
        lines.append("")
    lines += ["[reasons] # types that have no spec, and why", *(f'"{k}" = {json.dumps(v)}' for k, v in reasons.items())]
    return "\n".join(lines) + "\n"


def count_traces(spec: str) -> int:
    return len(truth.load(spec).cases) if spec in RECORDED else 0


def make_page() -> str:
    coverage = load_coverage()
    specs = describe_specs()
    examples = {name: load_toml(path) for name, path in list_data_files("examples").items()}
    lines = [HEAD, f"Release: {coverage.release}. {len(specs)} specs.", ""]
    rows = [[f"[{m.auto_class}](#{m.auto_class.lower()})", m.supported, len(m.entries)] for m in coverage.mappings]
    lines += [format_table(["mapping", "with a spec", "types"], rows), ""]
    for mapping in coverage.mappings:
        lines += [f"## {mapping.auto_class}", "", format_mapping(mapping, specs, examples), ""]
    listed = {entry.spec for mapping in coverage.mappings for entry in mapping.entries}
    others = [f"`{name}` ({described.spec.architecture})" for name, described in specs.items() if name not in listed]
    if others:
        lines += ["## Beside the mappings", "", "Classes that no mapping names: " + ", ".join(others) + ".", ""]
    lines += ["## Family tree", "", "Which spec extends which; a line's own file holds only what differs.", ""]
    lines += ["```text", *format_tree(specs), "```", ""]
    return "\n".join(lines)


def format_catalogue() -> str:
    """What `flopcalc models` lists; an entry a line, so that a diff shows what changed."""
    lists = (
        f'"{key}": [\n' + ",\n".join(json.dumps(entry, ensure_ascii=False) for entry in entries) + "\n]"
        for key, entries in make_catalogue()._asdict().items()
    )
    return "{" + ",\n".join(lists) + "}\n"


def format_mapping(mapping: AutoMapping, specs: dict[str, Any], examples: dict[str, Any]) -> str:
    rows: list[list[Any]] = []
    for entry in mapping.entries:
        if entry.spec is None:
            rows.append([f"`{entry.model_type}`", entry.architecture, "", "", "", entry.reason or "no spec yet"])
            continue
        skipped = "; ".join(f"{case}: {why}" for case, why in examples.get(entry.spec, {}).get("skip", {}).items())
        rows.append(
            [
                f"`{entry.model_type}`",
                entry.architecture,
                f"`{entry.spec}`",
                specs[entry.spec].inputs,
                count_traces(entry.spec),
                skipped,
            ]
        )
    return format_table(["model_type", "class", "spec", "input", "traces", "not run"], rows)


def format_tree(specs: dict[str, Any]) -> list[str]:
    children: dict[str, list[str]] = {}
    for name, described in specs.items():
        children.setdefault(described.parents[0] if described.parents else "", []).append(name)
    lines: list[str] = []

    def walk(name: str, depth: int) -> None:
        lines.append("  " * depth + name)
        for child in children.get(name, []):
            walk(child, depth + 1)

    known = set(specs)
    for root in sorted({name for name in children if name and name not in known} | set(children.get("", []))):
        walk(root, 0)
    return lines


def format_table(headers: list[str], rows: list[list[Any]]) -> str:
    shown = [headers, ["---"] * len(headers), *rows]
    return "\n".join(f"| {' | '.join(str(cell).replace('|', '/') for cell in row)} |" for row in shown)


def main() -> int:
    if "--mappings" in sys.argv:
        from importlib.metadata import version

        reasons = load_toml(str(COVERAGE)).get("reasons", {}) if COVERAGE.exists() else {}
        text = format_coverage(f"transformers {version('transformers')}", read_mappings(), reasons)
        COVERAGE.write_text(text, encoding="utf-8")
        kept = load_toml(str(DIFFUSERS)) if DIFFUSERS.exists() else {}
        text = format_coverage(
            f"diffusers {version('diffusers')}", read_diffusers(), kept.get("reasons", {}), kept.get("apart", ())
        )
        DIFFUSERS.write_text(text, encoding="utf-8")
        return 0
    made = {PAGE: make_page(), CATALOGUE: format_catalogue()}
    if "--check" in sys.argv:
        is_fresh = all(file.exists() and file.read_text(encoding="utf-8") == text for file, text in made.items())
        print("fresh" if is_fresh else "stale: run python docs/make_models.py")
        return int(not is_fresh)
    for file, text in made.items():
        file.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
