"""Plans the layouts of published training runs and compares step times and memory with what was printed.

    python benchmarks/published_training.py            writes docs/plan-accuracy.md and the coverage that plan prints
    python benchmarks/published_training.py --all      prints every row

Protocol. Printed degrees, micro-batch, virtual stages and ZeRO are fixed, recomputation and what is not printed is
left to plan's first choice. Of a layout that several releases print, the newest counts. A row that plan says does not
fit is a miss. Constants of flopcalc were chosen on the rows that FITTED names; the others test them. The code was
written while looking at the errors of both, so the test is not blind. SimuMax's runs hide no communication (its
docs/b200/b200_real_repro_guide.md), so they are planned with overlap none. Data:
benchmarks/data/published_training.csv, each row with its source.
"""

from __future__ import annotations

import csv
import json
import re
import sys
import tomllib
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from flopcalc.api import plan
from flopcalc.base.data import find_data_dir
from flopcalc.base.errors import FlopcalcError
from flopcalc.core.model.config import load_config

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "plan-accuracy.md"
BEGIN, END = "<!-- table of published_training.py -->", "<!-- end of its table -->"
DEVICES = {
    "DGX-GB300": "gb300", "DGX-GB200": "gb200", "DGX-B200": "b200-sxm", "DGX-B300": "b300-sxm",
    "DGX-H100": "h100-sxm", "H100": "h100-sxm", "B200-SXM": "b200-sxm",
}  # fmt: skip
CUT = {
    "llama3_70b": "llama-3-70b",
    "llama3_405b": "llama-3.1-405b",
    "deepseekv3": "deepseek-v3",
    "deepseekv2": "deepseek-v2-lite",
}
# What SimuMax trained differs from the config of that name: configs/models/deepseekv2.json, over DeepSeek-V2-Lite's,
# has the sizes of the 236B model; its llama3-405b has 16 key heads (llama3-405b_padding_128.json); its
# DeepSeek-V3 has one dense layer ("formal rows use dense_layers=1", b200_release_v1.2_summary.json).
TRAINED: dict[str, dict[str, Any]] = {
    "deepseekv2": {
        "hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_attention_heads": 128,
        "num_key_value_heads": 128, "n_routed_experts": 160, "num_experts_per_tok": 6, "q_lora_rank": 1536,
        "n_group": 8, "topk_group": 3, "first_k_dense_replace": 1,
    },
    "deepseekv3": {"first_k_dense_replace": 1},
    "llama3_405b": {"num_key_value_heads": 16},
}  # fmt: skip
# Layers of multi-token prediction that the recipes train (Megatron-Bridge: perf_recipes, mtp_num_layers;
# Megatron-MoE-ModelZoo: model_configs, mtp-num-layers); the printed TFLOP/s count them. Without an entry, none.
MTP = {
    "DeepSeekV3": 1, "DeepSeekV3 (dropless)": 1, "DeepSeekV3 (tokendrop)": 1, "DeepSeekV4 Flash": 1,
    "Nemotron_3_Super": 1, "Nemotron_3_5_Lightning": 2, "Nemotron_3_Ultra": 2, "Nemotron V3 Ultra 550B (26.04)": 2,
    "Qwen3-Next-80B-A3B": 1,
}  # fmt: skip
# NeMo Automodel's benchmarks step bf16 weights and states (examples/llm_benchmark: torch.optim.Adam, or Transformer
# Engine's FusedAdam without master weights).
RECIPES = {"NeMo Automodel": {"optimizer": "adamw"}}
# Its router hands a token to consecutive experts (components/moe/layers.py: FakeBalancedGate), which lie in at most two
# of eight groups of them.
GATES = {"NeMo Automodel": {"n_group": 8, "topk_group": 2}}
EXPERT_MODELS = re.compile(r"DeepSeek|deepseek|GPT|Kimi|Nemotron|a22B|a3B|A22B|A3B|MoE", re.IGNORECASE)
GIB = 1 << 30
# Releases whose rows constants were chosen on, and of SimuMax the runs of 8 micro-batches; all other rows test them.
FITTED = re.compile(r"2(5\.\d\d|6\.0[24](\.01)?)$")
DROPS = "(tokendrop)"  # in a model's name: experts drop tokens beyond their capacity, which plan has no setting for
NEWEST = "26.08"  # the release of Megatron-Bridge that the constants describe
DISTINCT = ("model", "hardware", "gpus", "precision", "global_batch", "micro_batch", "seq", "tp", "pp", "virtual", "cp",
            "ep", "zero")  # fmt: skip
COLUMNS = "| runs | rows | median error | worst | inside the interval | do not fit |"
RUN_COLUMNS = "| run | devices | format | layout | published s | predicted s | error |"


class Row(NamedTuple):
    """One published run and its prediction; no layout where plan says that none fits."""

    source: str
    model: str
    hardware: str
    gpus: int
    precision: str
    layout: str
    published_s: float
    predicted_s: float
    low_s: float
    high_s: float
    memory_error: float | None
    has_experts: bool
    zero: int
    problem: str = ""
    is_fitted: bool = False  # constants were chosen on it

    @property
    def error(self) -> float:
        return self.predicted_s / self.published_s - 1

    @property
    def is_inside(self) -> bool:
        return self.low_s <= self.published_s <= self.high_s


def load_runs() -> list[dict[str, str]]:
    """The newest release of every layout, in the order of the file."""
    newest: dict[tuple[str, ...], dict[str, str]] = {}
    with open(HERE / "data" / "published_training.csv", encoding="utf-8", newline="") as file:
        for run in csv.DictReader(file):
            release = re.search(r"(\d\d\.\d\d(\.\d\d)?)$", run["source"])
            # A release that drops tokens is older than those that do not: one layout.
            layout = {**run, "model": re.sub(r" \((tokendrop|dropless)\)$", "", run["model"])}
            key = tuple(layout[name] for name in DISTINCT) + (() if release else (run["source"], run["step_time_s"]))
            run["release"] = release[1] if release else ""
            if key not in newest or run["release"] > newest[key]["release"]:
                newest[key] = run
    return list(newest.values())


def find_model(name: str, source: str = "") -> Any:
    models = tomllib.loads((HERE / "data" / "quoted_rows.toml").read_text(encoding="utf-8"))["model"]
    if name in models:
        gate = next((gate for start, gate in GATES.items() if source.startswith(start)), None)
        has_gate = gate and EXPERT_MODELS.search(name)
        preset = models[name]["preset"]
        return dict(load_config(preset).config) | gate if has_gate else preset
    base, layers = re.fullmatch(r"(.*) cut to (\d+) layers", name).groups()  # type: ignore[union-attr]
    return dict(load_config(CUT[base]).config) | TRAINED.get(base, {}) | {"num_hidden_layers": int(layers)}


def find_recipe(source: str) -> dict[str, str]:
    """What a source's recipes train with, if not with plan's default."""
    return next((recipe for name, recipe in RECIPES.items() if source.startswith(name)), {})


def predict(run: dict[str, str]) -> Row:
    fixed: dict[str, Any] = {name: int(run[name]) for name in ("tp", "pp", "cp", "micro_batch")}
    if run["virtual"]:
        fixed["virtual"] = int(run["virtual"])
    if run["ep"] != "1":
        fixed["ep"] = int(run["ep"])
    if run["zero"]:
        fixed["zero"] = int(run["zero"])
    if run["recompute"]:
        fixed["recompute"] = run["recompute"]
    published = float(run["step_time_s"])
    is_simumax = "SimuMax" in run["source"]
    batches = int(run["global_batch"]) * int(run["tp"]) * int(run["pp"]) * int(run["cp"]) // int(run["gpus"])
    is_fitted = batches == 8 if is_simumax else FITTED.search(run["release"]) is not None
    own = (run["source"], run["model"], run["hardware"], int(run["gpus"]), run["precision"])
    has_experts = EXPERT_MODELS.search(run["model"]) is not None
    try:
        found = plan(
            find_model(run["model"], run["source"]),
            tokens=1,
            device=DEVICES[run["hardware"]],
            gpus=int(run["gpus"]),
            seq_len=int(run["seq"]),
            global_batch=int(run["global_batch"]),
            dtype=run["precision"],
            top=1,
            overlap="none" if is_simumax else "all",
            mtp=MTP.get(run["model"]),
            **fixed,
            **find_recipe(run["source"]),
        ).best[0]
    except FlopcalcError as error:
        return Row(*own, "", published, 0.0, 0.0, 0.0, None, has_experts, 0, str(error), is_fitted)
    memory = found.memory.peak / GIB / float(run["memory_gib"]) - 1 if run["memory_gib"] else None
    step = found.step
    return Row(*own, str(found.layout), published, step.seconds, step.low, step.high, memory, has_experts,
               found.layout.zero, "", is_fitted)  # fmt: skip


def describe(name: str, rows: list[Row]) -> str:
    fitting = [row for row in rows if row.layout]
    if not fitting:
        return f"| {name} | {len(rows)} | | | | {len(rows)} |"
    errors = [abs(row.error) for row in fitting]
    inside = sum(row.is_inside for row in fitting) / len(fitting)
    shown = [name, len(rows), f"{median(errors):.1%}", f"{max(errors):.1%}", f"{inside:.0%}", len(rows) - len(fitting)]
    return f"| {' | '.join(map(str, shown))} |"


def name_kind(row: Row) -> str:
    return f"{'experts' if row.has_experts else 'dense'}, {'zero 3' if row.zero == 3 else 'zero 0 to 2'}"


def make_page(rows: list[Row]) -> str:
    lines = [
        BEGIN,
        "| runs | rows | median error | worst | inside the interval | do not fit |",
        "|---|---|---|---|---|---|",
    ]
    groups: dict[str, list[Row]] = {}
    for row in rows:
        kind = "experts" if row.has_experts else "dense"
        own = ", SimuMax B200" if "SimuMax" in row.source else ", tokens dropped" if DROPS in row.model else ""
        groups.setdefault(f"**{kind}{own}**", []).append(row)
        if DROPS not in row.model:
            groups.setdefault(f"**{kind}{own}**, {'fitted' if row.is_fitted else 'test'}", []).append(row)
        if not own:
            groups.setdefault(f"{kind}, {row.hardware} {row.precision}", []).append(row)
    lines += [describe(name, groups[name]) for name in sorted(groups, key=lambda name: (name.strip("*"), name))]
    memory = [abs(row.memory_error) for row in rows if row.memory_error is not None]
    lines += ["", f"Memory of SimuMax's runs: {median(memory):.1%} median, {max(memory):.1%} worst.", ""]
    lines += [f"Constants describe release {NEWEST} of Megatron-Bridge; *f* marks rows that they were chosen on.", ""]
    lines += [RUN_COLUMNS, "|---|---|---|---|---|---|---|"]
    for row in rows:
        end = f"{row.predicted_s:.3g} | {row.error:+.1%}" if row.layout else "does not fit | "
        outside = "" if not row.layout or row.is_inside else " **outside**"
        shown = [
            f"{row.model} *f*" if row.is_fitted else row.model,
            f"{row.gpus} {row.hardware}",
            row.precision,
            row.layout,
            f"{row.published_s:.3g}",
            end + outside,
        ]
        lines.append(f"| {' | '.join(shown)} |")
    return "\n".join([*lines, END])


def write_coverage(rows: list[Row]) -> None:
    """How often intervals held and how much longer steps took, by kind of layout, in these rows and those of
    published_runs.py: `plan` prints it."""
    groups: dict[str, list[tuple[bool, float]]] = {}
    for row in rows:
        if row.layout:
            groups.setdefault(name_kind(row), []).append((row.is_inside, row.published_s / row.predicted_s - 1))
    known = {(row.gpus, f"{row.published_s:.3g}") for row in rows}
    for each in json.loads((HERE / "results" / "published_runs.json").read_text(encoding="utf-8"))["rows"]:
        if (int(each["devices"].split()[0]), f"{each['published_s']:.3g}") not in known:
            kind = "experts" if " ep" in f" {each['layout']}" else "dense"
            zero = "zero 3" if "zero3" in each["layout"] else "zero 0 to 2"
            longer = each["published_s"] / each["predicted_s"]["mid"] - 1
            groups.setdefault(f"{kind}, {zero}", []).append((bool(each.get("is_inside")), longer))
    found = {
        name: {
            "runs": len(own),
            "inside": sum(is_inside for is_inside, _ in own),
            "longer": round(median(longer for _, longer in own), 3),
        }
        for name, own in sorted(groups.items())
    }
    path = Path(find_data_dir()) / "plan_coverage.json"
    text = {"made_by": "python benchmarks/published_training.py, after published_runs.py", "kinds": found}
    path.write_text(json.dumps(text, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    rows = [predict(run) for run in load_runs()]
    if "--all" in sys.argv:
        for row in rows:
            print(row.model, row.hardware, row.precision, row.layout or row.problem, f"{row.error:+.1%}")
    page = PAGE.read_text(encoding="utf-8")
    table = make_page(rows)
    start, end = page.index(BEGIN), page.index(END) + len(END)
    PAGE.write_text(page[:start] + table + page[end:], encoding="utf-8")
    write_coverage(rows)
    print(*(line for line in table.splitlines() if line.startswith(("| **", "Memory"))), sep="\n")


if __name__ == "__main__":
    main()
