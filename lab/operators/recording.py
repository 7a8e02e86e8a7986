"""Everything recorded of one model type, and its file: model_specs/operators/TYPE.json."""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from importlib import import_module
from typing import Any

import torch

from flopcalc.base.errors import FlopcalcError
from flopcalc.measure.hf.examples import Example, find_example, make_estimator
from flopcalc.prediction.recordings import find_language, list_sizes
from lab.operators import denoisers
from lab.operators.configs import (
    Json,
    find_attention,
    find_share,
    find_usual,
    list_variants,
    set_window,
)
from lab.operators.dispatch import Kept
from lab.operators.fitting import Fitter, Row, fit_events, fit_tensors
from lab.operators.gathering import Spot, gather, gather_kept
from lab.operators.runs import CACHELESS, PHASES, Run, is_masked, list_workloads, run, sees_images_alone

# Types whose steps under autocast over float32 weights are recorded too: those that people train so most.
AUTOCAST = {
    "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma3_text", "phi3", "gpt2", "gpt_neox", "olmo2", "smollm3",
    "granite", "bert", "roberta", "modernbert", "t5", "vit", "whisper", "dinov2", "xlm-roberta", "distilbert",
    "deberta-v2", "electra", "bart", "marian", "m2m_100", "deit", "clip", "siglip", "mt5", "umt5", "albert",
    "camembert", "mpnet", "esm", "beit", "dinov3_vit", "mbart", "pegasus", "gemma2", "olmo3", "qwen3_moe", "opt", "phi",
    "bloom", "falcon", "starcoder2", "gptj", "gpt_neo",
}  # fmt: skip


class Recording:
    """Everything recorded of one model type, as it stands in its file."""

    def __init__(self, library: str = "transformers") -> None:
        self.library = library  # whose code was run
        self.blocks: dict[tuple[Row, ...], int] = {}
        self.usual: dict[str, Json] = {}  # language's model type -> its config class's switches
        self.signatures: dict[str, int] = {}
        self.parts: dict[str, Any] = {}
        self.saved: dict[str, Any] = {}
        self.kept: dict[str, int] = {}  # lists of what is kept, as JSON, each once
        self.approximate = 0
        self.total = 0

    def add(self, key: str, runs: list[Run]) -> None:
        """Rows of all modules of one phase, one attention; layers of a kind once, and apart where they differ."""
        gathered = [gather(each) for each in runs]
        for spot in self._list_new(self.parts, key, gathered):
            chosen = [(each, found[spot]) for each, found in zip(runs, gathered, strict=True) if spot in found]
            modules = dict.fromkeys(name for _, (_, lists) in chosen for name in lists)
            fitter = make_fitter([(each, chain) for each, (chain, _) in chosen])
            widest = list_widths([each for each, _ in chosen])
            blocks: dict[str, int] = {}
            for module in modules:
                rows = fit_events([lists.get(module, []) for _, (_, lists) in chosen], fitter, module, widest)
                self.total += sum(len(row[3].split(" + ")) + len(row[4].split(" + ")) for row in rows)
                blocks[module] = self.blocks.setdefault(tuple(rows), len(self.blocks))
            self.approximate += fitter.approximate
            self._put(self.parts, key, spot, blocks)

    def keep(self, key: str, train: list[Run], flow: list[Run]) -> None:
        """What autograd keeps: which modules keep it when their weights train, and which when gradients only pass."""
        pairs = [(each, gather_kept(each), gather_kept(b)) for each, b in zip(train, flow, strict=True)]
        for spot in self._list_new(self.saved, key, [found for _, found, _ in pairs]):
            chosen = [(each, a[spot], b.get(spot, (None, {}))) for each, a, b in pairs if spot in a]
            fitter = make_fitter([(each, chain) for each, (chain, _), _ in chosen])
            widest = list_widths([each for each, _, _ in chosen])
            rows: Counter[tuple[str, str, str]] = Counter()
            tables = [{made: (a.get(made), b.get(made)) for made in [*a, *b]} for _, (_, a), (_, b) in chosen]
            # A module that keeps more in one run than in another has a loop: its operators' numbers say nothing.
            counts = [Counter(made[:2] for made in table) for table in tables]
            shared = [
                made
                for made in tables[0]
                if all(made in table for table in tables) and len({each[made[:2]] for each in counts}) == 1
            ]
            for made in shared:
                found = [table.pop(made) for table in tables]
                sizes = [((each.letter, each.elements),) for a, b in found for each in [a or b] if each is not None]
                savers = [_name_savers(each) for each in found[0]]
                rows[fit_tensors(sizes, fitter, savers[0].partition(" ")[0], widest), savers[0], savers[1]] += 1
            # What a loop over images keeps: all of a kind together.
            for name in sorted({_name_kept(found) for table in tables for found in table.values()}):
                letter, first, second = name
                own = [
                    [kept.elements for a, b in table.values() if (kept := a or b) and _name_kept((a, b)) == name]
                    for table in tables
                ]
                for sums in sum_sizes(own):
                    text = fit_tensors([((letter, each),) for each in sums], fitter, first.partition(" ")[0], widest)
                    rows[text, first, second] += 1
            self.approximate += fitter.approximate
            listed = json.dumps(sorted([text, a, b, count] for (text, a, b), count in rows.items()))
            self._put(self.saved, key, spot, self.kept.setdefault(listed, len(self.kept)))

    def _list_new(self, tables: dict[str, Any], key: str, gathered: list[Any]) -> list[Spot]:
        """What no earlier set of configs has recorded; the published ones come first."""
        spots = sorted({spot for each in gathered for spot in each})
        known = tables.get(key, {})
        return [spot for spot in spots if str(self.signatures.get(spot[1])) not in known.get(spot[0], {})]

    def _put(self, tables: dict[str, Any], key: str, spot: Spot, entry: object) -> None:
        stage, signature, where = spot
        number = self.signatures.setdefault(signature, len(self.signatures))
        table = tables.setdefault(key, {}).setdefault(stage, {}).setdefault(str(number), {})
        if "*" not in table:  # sorted: those of the middle come first, if there are any
            table["*"] = entry
        elif table["*"] != entry and where not in table:
            table[where] = entry

    def _prune(self) -> list[tuple[Row, ...]]:
        """The blocks that are used, numbered anew in every part."""
        blocks, numbers = list(self.blocks), dict[int, int]()
        for stages in self.parts.values():
            for kinds in stages.values():
                for places in kinds.values():
                    for modules in places.values():
                        for module, number in modules.items():
                            modules[module] = numbers.setdefault(number, len(numbers))
        return [blocks[number] for number in numbers]

    def to_json(self) -> str:
        """Every row once, and one per line, so that a change shows where it is."""
        versions = {"torch": torch.__version__.partition("+")[0], self.library: import_module(self.library).__version__}
        kept = [json.loads(text) for text in self.kept]
        return pack(versions, self.usual, list(self.signatures), self._prune(), self.parts, kept, self.saved)


def pack(
    versions: Json,
    usual: Json,
    signatures: list[str],
    blocks: list[Any],
    parts: dict[str, Any],
    kept: list[Any],
    saved: Json,
) -> str:
    """The text of a file; flopcalc.prediction.recordings.unpack reads it."""
    rows: dict[str, int] = {}
    kept_rows: dict[str, int] = {}
    layouts: dict[str, int] = {}
    numbered = [[rows.setdefault(json.dumps(row), len(rows)) for row in block] for block in blocks]
    kept_numbers = [[kept_rows.setdefault(json.dumps(row), len(kept_rows)) for row in block] for block in kept]
    short = {
        key: {
            path: {
                kind: {
                    where: [layouts.setdefault(json.dumps(list(modules)), len(layouts)), *modules.values()]
                    for where, modules in places.items()
                }
                for kind, places in kinds.items()
            }
            for path, kinds in stages.items()
        }
        for key, stages in sorted(parts.items())
    }
    tables = {
        "signatures": map(json.dumps, signatures),
        "rows": rows,
        "blocks": map(json.dumps, numbered),
        "layouts": layouts,
        "kept_rows": kept_rows,
        "kept": map(json.dumps, kept_numbers),
    }
    lines = [f'"versions": {json.dumps(versions)}', f'"usual": {json.dumps(usual)}']
    for name, texts in tables.items():
        inside = ",\n".join(texts)
        lines.append(f'"{name}": [\n{inside}\n]')
    for name, table in (("parts", short), ("saved", saved)):
        inside = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in sorted(table.items()))
        lines.append(f'"{name}": {{\n{inside}\n}}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def sum_sizes(lists: list[list[int]]) -> list[list[int]]:
    """Per size, where every run has as many different ones, else of all together: the sum of each run."""
    sizes = [list(dict.fromkeys(each)) for each in lists]  # in order of execution, which is every run's
    if len({len(each) for each in sizes}) != 1:
        return [[sum(each) for each in lists]]
    return [
        [sum(n for n in each if n == own[place]) for each, own in zip(lists, sizes, strict=True)]
        for place in range(len(sizes[0]))
    ]


def _name_savers(kept: Kept | None) -> str:
    return " ".join(kept.savers) if kept is not None else ""


def _name_kept(found: tuple[Any, Any]) -> tuple[str, str, str]:
    return (found[0] or found[1]).letter, _name_savers(found[0]), _name_savers(found[1])


def make_fitter(chosen: list[tuple[Run, Any]]) -> Fitter:
    return Fitter(
        [each.features for each, _ in chosen],
        [list_sizes(each.estimator.stages, chain) for each, chain in chosen],
        find_share(chosen[0][0].estimator.source.config).denominator,
        "*".join(find_base(chosen[0][0])),
    )


def find_base(run: Run) -> tuple[str, str]:
    """What grows as most tensors do: tokens and the width, or a denoiser's tokens and the length of its heads."""
    sizes = list_sizes(run.estimator.stages, None)
    if run.estimator.is_diffusion:
        return "joint", next(name for name in sizes if name.endswith(".qk"))
    features = [name for name, value in run.features.items() if value]
    feature = next(name for name in features if name in ("tokens", "patches") or ":" in name)
    return feature, "width" if "width" in sizes else next(name for name in sizes if name.endswith(".n_out"))


def list_widths(runs: list[Run]) -> tuple[int, ...]:
    feature, size = find_base(runs[0])
    return tuple(each.features[feature] * list_sizes(each.estimator.stages, None).get(size, 1) for each in runs)


def record_denoiser(name: str) -> Recording:
    """Everything recorded of one of diffusers' transformers."""
    recording = Recording("diffusers")
    for configs in denoisers.DENOISERS[name].sets:
        runs = {phase: denoisers.run_all(configs, phase) for phase in denoisers.PHASES}
        for phase, own in runs.items():
            recording.add(f"{phase} sdpa images", own)
        recording.keep("sdpa images", runs["train"], runs["flow"])
    return recording


def record(model_type: str) -> Recording:
    if model_type in denoisers.DENOISERS:
        return record_denoiser(model_type)
    example = find_example(model_type)
    recording = Recording()
    default, variants = find_attention(model_type), list(list_variants(example))
    has_whole = any(is_whole for _, is_whole in variants)
    for configs, is_whole in variants:
        for name in (model_type, find_language(configs[0])[0]):  # a config may leave out what its inner one is
            recording.usual[name] = find_usual(name)
        for attention in ("sdpa", "eager") if is_whole else ("sdpa",):
            sights = (True,) if sees_images_alone(example) else (True, False) if example.images else (False,)
            for has_images in sights:
                kept: dict[str, dict[str, list[Run]]] = defaultdict(dict)
                for phase in PHASES:
                    is_rare = not has_images and (attention == "eager" or "text" in example.skip)
                    if example.images and (is_rare or (has_images and phase == "decode")):
                        continue
                    # Eager attention makes a mask in any case.
                    modes = ["", " masked"] if is_whole and attention == "sdpa" else [""]
                    is_cast = model_type in AUTOCAST and phase in CACHELESS
                    if (is_whole or not has_whole) and attention == default and is_cast:
                        modes.append(" autocast")
                    for mode in modes:
                        runs = run_all(example, configs, phase, attention, has_images, mode)
                        if runs:
                            flags = f"{attention}{mode}{' images' if has_images else ''}"
                            recording.add(f"{phase} {flags}", runs)
                            kept[flags][phase] = runs
                for flags, both in kept.items():
                    flow = both.get("flow") or both.get("train", [])  # where frozen weights let no gradient pass
                    if flow and len(both["train"]) == len(flow):
                        recording.keep(flags, both["train"], flow)
    return recording


FAILURES = (ValueError, RuntimeError, TypeError, AttributeError, LookupError, FlopcalcError)


def run_all(
    example: Example, configs: list[Json], phase: str, attention: str, has_images: bool, mode: str
) -> list[Run]:
    """Runs of every config that HF can build and run; "masked" has windows shorter than the text, all others none."""
    runs = []
    workloads = list_workloads(example, phase, has_images)
    for number, config in enumerate(configs):
        for workload in workloads if not number else workloads[number % 2 :][:1]:
            keys = workload.get("seq", 0) + workload.get("context", 0)
            chosen = set_window(config, 5 if mode == " masked" else 4096)
            try:
                if is_masked(make_estimator(example, chosen), keys) == (mode == " masked"):
                    runs.append(run(example, chosen, phase, attention, workload, mode == " autocast"))
            except FAILURES as error:
                print("   ", example.model_type, phase, attention, str(error)[:150].replace("\n", " "), file=sys.stderr)
    return runs
