"""A blind test of predicted step times and executed FLOPs on a GPU: 20 models that nothing was fitted on.

    python -m lab.blind.steps predict|measure|report [--round N]
    python -m lab.blind.steps summary

The protocol, fixed before anything was measured:

- rounds/NN.json holds the models: five dense, five with experts, five with LoRA adapters, five that see images, and
  one or two training steps of each. `predict` writes what this code says about every step to
  benchmarks/results/blind_predictions.json; the file is committed before `measure` runs.
- Weights are HF's own random ones in bf16. Large steps are timed without pause by the device's clock, the middle of all
  steps. Small ones are timed between runs of the probe: the middle ratio, times the middle probe.
- The probe says how many times longer than the calibrated host this one takes. Predictions are written for several such
  factors, and `report` reads between them: nothing is predicted after the measurement. What the shipped predictor says
  without a factor is shown too.
- A step is called device-bound or host-bound by its prediction. All steps count; a step that fails says why.
- Further parts, in this order: `host` runs `flopcalc calibrate --host` through the command line; `decode` times tokens
  of `generate` at lengths that no call has met before, with a mask and without, then again, then a static cache and a
  CUDA graph; `executed` counts the FLOPs of twelve other steps with the GPU's own counter, whose predictions are in the
  same file; `pieces` counts single products at odd sizes, for a later fit.
- README.md says what later rounds changed.
- `measure` stops by itself after --budget-s seconds, keeps what is there after each case, and goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import decode_steps
from even_routers import deal_evenly
from expert_steps import find_routes
from predict_error import calibrated_here

from flopcalc import bind
from flopcalc.core.estimate.estimate import Estimator
from flopcalc.hardware.tiles import DIRECTIONS
from flopcalc.measure.predictor.fit.cases import ModelledCase, find_random, model_cases
from flopcalc.measure.predictor.runs import Runner, cut_config, make_case, name_case
from flopcalc.prediction.kernels.defaults import load_defaults
from lab.blind.rounds import NUMBERS, Adapter, Model, Step, load_round, put_between

Json = dict[str, Any]
FITTED = (1, 2, 3, 5, 6, 7, 8, 9)  # rounds whose large steps were known when the shipped predictor was fitted
FOLLOWS = load_defaults().device.host_follows
ROUND = load_round(1)  # the one that was chosen
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
VERSION = "5.17"  # of transformers on the device
FACTORS = (0.7, 0.9, 1.0, 1.1, 1.25, 1.6)  # of the host, that predictions are written for
SUMMARY_MARKS = ("<!-- summary of lab.blind.steps -->", "<!-- end of the summary -->")
_BOUNDS = ("device", "host")
PARTS = ("steps", "host", "decode", "executed", "pieces")
_SMALL_STEPS = 12
_FRESH = {"generate-mask": 300, "generate-plain": 400}  # way -> length of the prompt, apart from each other's
_ROWS = (700, 850, 1000, 1150, 1330, 1500, 1700, 1900, 2200, 2700, 3300, 3450, 4500, 5200)
_WIDTHS = (
    (2304, 2304), (6912, 2304), (2304, 6912), (768, 2304), (1792, 1792), (5376, 1792), (1792, 5376), (1536, 1536),
    (8960, 1536), (1536, 8960), (256, 1536), (4096, 4096), (14336, 4096), (4096, 14336), (1024, 4096), (3072, 3072),
    (9216, 3072), (16384, 3072), (3072, 8192), (1280, 1280), (5120, 1280), (1280, 5120), (3840, 1280), (2560, 2560),
    (10240, 2560), (2560, 10240), (1024, 1024), (4096, 1024), (1024, 4096), (896, 896), (4864, 896), (896, 4864),
)  # fmt: skip


def choose_round(number: int) -> None:
    """The round whose models every function here reads."""
    global ROUND
    ROUND = load_round(number)


def get_config(name: str) -> Json:
    """The config of a model of the round."""
    return dict(ROUND.models[name].config)


def shrink(config: Json) -> Json:
    """A stand-in for a CPU: the same code, hardly any work."""
    from flopcalc.measure.predictor.narrow import narrow

    made = narrow(config, 4)
    part = made.get("text_config", made)
    if part.get("vocab_size", 0) > 100_000 and "image_token_id" not in made and "vision_config" not in made:
        part["vocab_size"] = 4096
    return made


def make_step_case(name: str, step: Step) -> Json:
    grids = [list(grid) for grid in ROUND.models[name].grids]
    return make_case(name, "train", step.batch, step.seq, grids, recompute=step.recompute)


def list_steps() -> Iterator[tuple[str, Model, Step, Json]]:
    for name in ROUND.take_turns():
        for step in ROUND.models[name].steps:
            yield name, ROUND.models[name], step, make_step_case(name, step)


def read_steps() -> list[ModelledCase]:
    """Large steps without adapters of the rounds that the shipped predictor's time between kernels is fitted on."""
    found: list[ModelledCase] = []
    for number in FITTED:
        choose_round(number)
        measured = json.loads((RESULTS / ROUND.name_result("steps")).read_text())
        cases = [case for case in measured["cases"] if not case["is_small"]]
        cases = [case for case in cases if ROUND.models[case["model"]].adapter is None]
        found += model_cases(cases, get_config, measured["provenance"]["device_id"], VERSION)
    return found


# --- predict ----------------------------------------------------------------------------------------------------------
def predict_step(
    model: Model, step: Step, case: Json, factor: float, probe_s: float, pause_s: float | None = None
) -> Any:
    """What `flopcalc predict` says of one step; a small one has the probe's pause behind it."""
    from flopcalc import predict

    options: Json = {"routing": find_random(get_config(case["model"]))}
    if model.adapter is not None:
        options |= {
            "lora": {"r": model.adapter.rank, "targets": list(model.adapter.targets)},
            "autocast": model.adapter.is_autocast,
        }
    images = [grid for _ in range(step.batch) for grid in case["grids"]] or None
    return predict(
        get_config(case["model"]),
        device="h200",
        batch_size=step.batch,
        seq_len=step.seq,
        image_grid_thw=images,
        recompute=step.recompute,
        advise=False,
        memory=factor == 1.0,
        host_factor=factor,
        transformers=VERSION,
        pause_s=pause_s if pause_s is not None else factor ** (1 / FOLLOWS) * probe_s if step.is_small else 0.0,
        **options,
    )


def bind_counted(name: str, routing: Any) -> Estimator:
    """A counted step's model under `--convention hardware --device h200`; `routing` is for models with experts."""
    config = ROUND.get_counted_config(name)
    given = {"routing": routing} if find_random(config) is not None else {}
    return bind(config, convention="hardware", device="h200", attention_kernel="auto", **given)


def count_executed(name: str, routing: object = "even") -> int:
    """FLOPs of a counted step, whose router deals evenly or gave experts these rows."""
    _, _, batch, seq, grids = ROUND.executed[name]
    images = [grid for _ in range(batch) for grid in grids] or None
    return int(bind_counted(name, routing)(batch, seq, image_grid_thw=images).total)


def count_experts(name: str, routing: object = "even") -> int:
    """FLOPs of a counted step's experts, of all that count_executed counts."""
    from flopcalc.core.workload.workload import Workload

    _, _, batch, seq, _ = ROUND.executed[name]
    rows = bind_counted(name, routing).rows(Workload(batch, seq), "hardware")
    return sum(each.flops.total * each.block.copies for each in rows if each.row.op.copies > 1)


def predict_graph(preset: str, layers: int) -> float:
    """Seconds of a token in a CUDA graph without torch.compile, as a note of `predict --execution graphs` says."""
    from flopcalc import predict

    found = predict(
        cut_config(preset, layers), device="h200", batch_size=1, seq_len=1, phase="decode",
        context=decode_steps.PROMPT, execution="graphs", memory=False, advise=False, transformers=VERSION,
    )  # fmt: skip
    (said,) = [match[1] for note in found.notes if (match := re.search(r"without torch.compile, takes (.+) ms", note))]
    return float(said) / 1e3


def write_predictions(out: Path) -> None:
    """Every step at every factor of the host, graphs of decoded tokens, and the FLOPs of the counted steps."""
    from flopcalc.base.data import find_commit
    from flopcalc.prediction.kernels.constants import load_predictor

    constants = load_predictor("h200-sxm")
    assert constants is not None
    probe_s = constants["probe_s"]["train"]
    steps = {}
    for _, model, step, case in list_steps():
        found = {factor: predict_step(model, step, case, factor, probe_s) for factor in FACTORS}
        usual = found[1.0]
        steps[name_case(case)] = {
            "kind": model.kind,
            "is_small": step.is_small,
            "predicted_s": {
                str(factor): [round(value, 6) for value in each.step_time_s] for factor, each in found.items()
            },
            "bound": {str(factor): each.bound for factor, each in found.items()},
            "memory_bytes": usual.memory.peak if usual.memory else None,
            "recorded": usual.evidence["operators_recorded"],
            "host_measured": usual.evidence["host_measured"],
        }
        print(f"{name_case(case):44} {usual.bound:6} {1e3 * usual.step_time_s.mid:8.2f} ms", flush=True)
    kept = {
        "commit": find_commit(), "date": _tell_date(), "transformers": VERSION, "probe_s": probe_s, "steps": steps,
        "executed_flops": {name: count_executed(name) for name in ROUND.executed},
        "experts_flops": {name: count_experts(name) for name in ROUND.executed}, "follows": FOLLOWS,
        "graph_s": {preset: predict_graph(preset, layers) for preset, layers in ROUND.decoded},
    }  # fmt: skip
    out.write_text(json.dumps(kept, indent=1) + "\n")


def _tell_date() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


# --- measure ----------------------------------------------------------------------------------------------------------
class BlindRunner(Runner):
    """A runner whose models may have adapters."""

    def _take(self, name: str, lora: Json | None = None) -> None:
        if name == self.name:
            return
        super()._take(name, lora)
        adapter = ROUND.models[name].adapter
        if adapter is not None:
            self.model = add_adapter(self.model, adapter)

    def _set_optimizer(self, name: str) -> None:
        if name != self.optimizer_name:
            trained = [each for each in self.model.parameters() if each.requires_grad]
            self.optimizer = self.bench.torch.optim.AdamW(trained, lr=1e-5, fused=True)
            self.optimizer_name = name

    def make_step(self, case: Json) -> Callable[[], Any]:
        step = super().make_step(case)
        torch, adapter = self.bench.torch, ROUND.models[case["model"]].adapter
        if adapter is None or not adapter.is_autocast:
            return step

        def run() -> None:
            with torch.autocast("cuda" if self.bench.is_gpu else "cpu", torch.bfloat16):
                step()

        return run


def add_adapter(model: Any, adapter: Adapter) -> Any:
    """PEFT's LoRA, adapters in float32 as PEFT keeps them."""
    from peft import LoraConfig, get_peft_model

    model.enable_input_require_grads()
    made = get_peft_model(model, LoraConfig(r=adapter.rank, lora_alpha=32, target_modules=list(adapter.targets)))
    return made.base_model.model


class Kept:
    """A file of results that is written after every case and read again by a run that goes on."""

    def __init__(self, path: Path, device: str) -> None:
        from flopcalc.measure.calibrate.provenance import describe_machine

        self.path = path
        command = "python -m lab.blind.steps measure"
        self.data: Json = {
            "provenance": {**describe_machine(device), "command": command, "date": _tell_date()},
            "cases": [],
            "failures": [],
        }
        if path.exists():
            self.data = {**json.loads(path.read_text()), "failures": []}
        self.done = {
            (case["name"], case.get("pass", 0)) if isinstance(case, dict) else case[0] for case in self.data["cases"]
        }

    def add(self, name: str, measure: Callable[[], Json], begun: float) -> bool:
        """Measure a case and keep it, or why it failed; whether it was measured."""
        start = time.monotonic()
        try:
            self.data["cases"].append({"name": name, **measure()})
            reason = ""
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"[:300]
            self.data["failures"].append({"name": name, "reason": reason})
        self.write()
        failed = f"  failed: {reason}" if reason else ""
        print(f"{start - begun:6.1f} s  +{time.monotonic() - start:5.1f} s  {name}{failed}", flush=True)
        return not reason

    def write(self) -> None:
        self.path.write_text(json.dumps(self.data, indent=1) + "\n")


class Limits(NamedTuple):
    """When a run began and must end by time.monotonic; `is_tiny`: stand-ins for a CPU."""

    begun: float
    end: float
    device: str
    is_tiny: bool

    def allow(self, seconds: float) -> bool:
        """Whether a case that takes so long ends in time."""
        return time.monotonic() + seconds < self.end


def measure(out: Path, parts: tuple[str, ...], budget_s: float, device: str, is_tiny: bool) -> None:
    """Run the parts in the order of PARTS until the time is over."""
    begun = time.monotonic()
    limits = Limits(begun, begun + budget_s, device, is_tiny)
    out.mkdir(parents=True, exist_ok=True)
    for part in PARTS:
        if part in parts:
            try:
                _MEASURED[part](out, limits)
                ended = "done"
            except Exception as error:  # the other parts go on
                ended = f"failed: {type(error).__name__}: {error}"[:300]
            print(f"{time.monotonic() - begun:6.1f} s  {part} {ended}", flush=True)


def measure_steps(out: Path, limits: Limits) -> None:
    """The steps of all models."""
    kept = Kept(out / "blind_steps.json", limits.device)
    configs = (lambda name: shrink(get_config(name))) if limits.is_tiny else get_config
    runner = BlindRunner(limits.device, configs, work_s=0.6)
    for turn, (_, model, step, case) in ((turn, each) for turn in range(ROUND.passes) for each in list_steps()):
        name = name_case(case)
        if (name, turn) in kept.done:
            continue
        if not limits.allow(12):
            kept.data["failures"].append({"name": name, "reason": "no time was left"})
            continue
        if limits.is_tiny:
            case = {**case, "batch": 1, "seq": min(case["seq"], 900 if model.grids else 64)}

        def run(case: Json = case, step: Step = step, kind: str = model.kind, turn: int = turn) -> Json:
            found = runner.measure_host(case, _SMALL_STEPS) if step.is_small else runner.measure(case)
            return {**found, "kind": kind, "is_small": step.is_small, **({"pass": turn} if ROUND.passes > 1 else {})}

        if not kept.add(name, run, limits.begun):
            runner.drop()
    runner.drop()
    kept.write()


def measure_host(out: Path, limits: Limits) -> None:
    """`flopcalc calibrate --host` as a user calls it."""
    if (out / "host" / "h200-sxm.host.json").exists() or not limits.allow(75):
        return
    start = time.monotonic()
    asked = [sys.executable, "-m", "flopcalc", "calibrate", "--host", "--out", str(out / "host")]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=90, check=False)
    said = {
        "command": "flopcalc calibrate --host --out host",
        "exit_code": done.returncode,
        "seconds": round(time.monotonic() - start, 1),
        "output": (done.stdout + done.stderr)[-600:],
    }
    (out / "blind_host.json").write_text(json.dumps(said, indent=1) + "\n")
    print(said, flush=True)


def measure_decode(out: Path, limits: Limits) -> None:
    """Tokens of generate at lengths met first and met again, and over a static cache."""
    import torch

    from flopcalc.measure.calibrate.tables import Bench, counts

    kept = Kept(out / "blind_decode.json", limits.device)
    bench = Bench(limits.device)
    for preset, layers in ROUND.decoded:
        ways = ("generate-mask", "generate-plain", "generate-mask-again", "generate-plain-again", "static", "graph")
        left = [way for way in ways if (f"{preset} {way}", 0) not in kept.done]
        if not left or not limits.allow(25):
            continue
        config = cut_config(preset, layers)
        model = counts.build(bench, shrink(config) if limits.is_tiny else config)
        model.eval()
        for way in left:
            kept.add(f"{preset} {way}", partial(time_way, torch, model, way), limits.begun)
        del model
        bench.free()


def time_way(torch: Any, model: Any, way: str) -> Json:
    """Seconds of one token; the first ways meet their lengths first."""
    short = way.removesuffix("-again")
    prompt = _FRESH.get(short, decode_steps.PROMPT)
    vocabulary = min(4096, model.config.get_text_config().vocab_size)
    ids = torch.randint(3, vocabulary, (1, prompt), device=model.device)
    if short == "generate-mask":
        seconds = decode_steps.time_generate(torch, model, ids, attention_mask=torch.ones_like(ids))
    elif short == "generate-plain":
        seconds = decode_steps.time_generate(torch, model, ids)
    elif short == "static":
        seconds = decode_steps.time_static(torch, model, ids)
    else:
        seconds = decode_steps.time_graph(torch, model, ids, False)
    return {"way": way, "prompt": prompt, "layers": model.config.num_hidden_layers, "token_s": seconds}


def measure_executed(out: Path, limits: Limits) -> None:
    """One step of each counted case under the GPU's counter."""
    kept = Kept(out / "blind_executed.json", limits.device)
    configs = (lambda name: shrink(ROUND.get_counted_config(name))) if limits.is_tiny else ROUND.get_counted_config
    runner = Runner(limits.device, configs)
    for name, (_, _, batch, seq, grids) in ROUND.executed.items():
        if (name, 0) in kept.done or not limits.allow(8):
            continue
        if limits.is_tiny:
            batch, seq = 1, min(seq, 900 if grids else 64)

        def run(name: str = name, batch: int = batch, seq: int = seq, grids: Any = grids) -> Json:
            case = make_case(name, "train", batch, seq, grids)
            step = runner.make_step(case)
            if find_random(runner.config) is not None:
                deal_evenly(runner.model)
            runner.optimizer.step = lambda: None  # products alone
            step()
            runner.bench.synchronize()
            executed = runner.bench.count_executed(step)
            return {"executed_flops": executed, "rows_per_expert": find_routes(runner, case)}

        kept.add(name, run, limits.begun)
        runner.drop()


def measure_pieces(out: Path, limits: Limits) -> None:
    """Single products at rows that fill no tiles, in an order of chance: any part of them is a fair sample."""
    from flopcalc.measure.calibrate.tables import Bench
    from flopcalc.measure.calibrate.tables.counts import _make_linear

    path = out / "blind_pieces.json"
    kept = Kept(path, limits.device)
    bench = Bench(limits.device)
    asked = [(m, n, k, way) for m in _ROWS for n, k in dict.fromkeys(_WIDTHS) for way in DIRECTIONS]
    random.Random(25).shuffle(asked)
    asked = asked[:2] if limits.is_tiny else asked
    for m, n, k, way in asked:
        name = f"{m}x{n}x{k} {way}"
        if name in kept.done:
            continue
        if not limits.allow(3):
            break
        call = _make_linear(bench, way, m, n, k)
        call()
        bench.synchronize()
        kept.data["cases"].append([name, bench.count_executed(call)])
        if len(kept.data["cases"]) % 50 == 0:
            kept.write()
    kept.write()


_MEASURED: dict[str, Callable[[Path, Limits], None]] = {
    "steps": measure_steps,
    "host": measure_host,
    "decode": measure_decode,
    "executed": measure_executed,
    "pieces": measure_pieces,
}


# --- report -----------------------------------------------------------------------------------------------------------
def read_between(table: dict[str, list[float]], factor: float) -> tuple[float, float, float]:
    """Low, middle and high at a host's factor, between the two factors that were written."""
    known = sorted(map(float, table))
    factor = min(max(factor, known[0]), known[-1])
    above = next(each for each in known if each >= factor)
    below = max((each for each in known if each <= factor), default=above)
    share = (factor - below) / (above - below) if above > below else 0.0
    ends = zip(table[str(below)], table[str(above)], strict=True)
    low, mid, high = (one + share * (two - one) for one, two in ends)
    return low, mid, high


def compare(case: Json, said: Json, probe_s: float, follows: float = 1.0) -> Json:
    """One step: measured, predicted with the probe's factor and without."""
    factor = (case["probe_s"] / probe_s) ** follows
    seconds = case["ratio"] * case["probe_s"] if case["is_small"] else case["seconds"]
    low, mid, high = read_between(said["predicted_s"], factor)
    plain_low, plain, plain_high = said["predicted_s"]["1.0"]
    near = min(said["bound"], key=lambda each: abs(float(each) - factor))
    return {
        "name": case["name"],
        "kind": case["kind"],
        "bound": said["bound"][near],
        "host_factor": factor,
        "measured_s": seconds,
        "predicted_s": mid,
        "error": mid / seconds - 1,
        "is_inside": low <= seconds <= high,
        "plain_error": plain / seconds - 1,
        "is_plain_inside": plain_low <= seconds <= plain_high,
    }


def list_rows(measured: Path, predicted: Path) -> list[Json]:
    kept, said = json.loads(measured.read_text()), json.loads(predicted.read_text())
    follows = said.get("follows", 1.0)
    found: dict[str, list[Json]] = {}
    for case in kept["cases"]:
        row = compare(case, said["steps"][case["name"]], said["probe_s"], follows)
        found.setdefault(case["name"], []).append(row)
    return [take_middle(rows) for rows in found.values()]


def list_own_rows(measured: Path, predictor: Path) -> list[Json]:
    """The same steps by a predictor that was measured on the same machine: the host follows its probe fully there."""
    steps = {name_case(case): (model, step, case) for _, model, step, case in list_steps()}
    found: dict[str, list[Json]] = {}
    with calibrated_here(predictor) as constants:
        probe_s = constants["probe_s"]["train"]
        for case in json.loads(measured.read_text())["cases"]:
            factor = case["probe_s"] / probe_s
            pause_s = case["probe_s"] if case["is_small"] else 0.0
            each = predict_step(*steps[case["name"]], factor, probe_s, pause_s)
            said = {"predicted_s": {"1.0": list(each.step_time_s)}, "bound": {"1.0": each.bound}}
            row = {**compare(case, said, probe_s), "host_factor": factor}
            found.setdefault(case["name"], []).append(row)
    return [take_middle(rows) for rows in found.values()]


def take_middle(rows: list[Json]) -> Json:
    """Of a step's passes, the one with the middle error."""
    return sorted(rows, key=lambda row: row["error"])[(len(rows) - 1) // 2]


def summarize(rows: list[Json], error: str = "error", inside: str = "is_inside") -> str:
    if not rows:
        return "none"
    errors = [abs(row[error]) for row in rows]
    within = sum(row[inside] for row in rows)
    return f"{100 * statistics.median(errors):.1f} % / {100 * max(errors):.1f} % / {within} of {len(rows)}"


def split_kinds(rows: list[Json]) -> Iterator[tuple[str, str, list[Json]]]:
    """Each kind of model and what bounds its steps, with these steps."""
    for kind in dict.fromkeys(model.kind for model in ROUND.models.values()):
        for bound in ("device", "host"):
            if own := [row for row in rows if (row["kind"], row["bound"]) == (kind, bound)]:
                yield kind, bound, own


def report_own(measured: Path, predictor: Path) -> str:
    """Each kind apart, by a predictor of the same machine."""
    from flopcalc.base.text_table import format_grid

    rows = list_own_rows(measured, predictor)
    sums = [[kind, bound, len(own), summarize(own)] for kind, bound, own in split_kinds(rows)]
    return format_grid(["kind", "bound by", "steps", "median / worst / inside"], sums, "github")


def report(measured: Path, predicted: Path) -> str:
    """Each kind apart: median error, worst error, steps inside the interval; then every step."""
    from flopcalc.base.text_table import format_grid

    rows = list_rows(measured, predicted)
    sums = [
        [kind, bound, len(own), summarize(own), summarize(own, "plain_error", "is_plain_inside")]
        for kind, bound, own in split_kinds(rows)
    ]
    head = ["kind", "bound by", "steps", "median / worst / inside", "without the host's factor"]
    lines = [
        [
            row["name"],
            row["bound"],
            f"{row['host_factor']:.2f}",
            f"{1e3 * row['measured_s']:.2f}",
            f"{1e3 * row['predicted_s']:.2f}",
            f"{100 * row['error']:+.1f} %",
            "yes" if row["is_inside"] else "no",
            f"{100 * row['plain_error']:+.1f} %",
        ]
        for row in rows
    ]
    names = ["step", "bound", "host factor", "measured ms", "predicted ms", "error", "inside", "without factor"]
    return format_grid(head, sums, "github") + "\n\n" + format_grid(names, lines, "github")


def report_executed(measured: Path, predicted: Path) -> str:
    """Counted steps: executed, predicted before, how far that is off; also for the router's rows, if these are kept."""
    from flopcalc.base.text_table import format_grid

    said = json.loads(predicted.read_text())
    cases = json.loads(measured.read_text())["cases"]
    has_rows = any(case.get("rows_per_expert") for case in cases)
    lines = []
    for case in cases:
        counted, executed = said["executed_flops"][case["name"]], case["executed_flops"]
        line = [
            case["name"],
            f"{executed / 1e12:.3f} T",
            f"{counted / 1e12:.3f} T",
            f"{100 * (counted / executed - 1):+.2f} %",
        ]
        if has_rows:
            draw, rows = said.get("draw", {}).get(case["name"]), case["rows_per_expert"]
            if rows:
                counted += count_experts(case["name"], rows) - said["experts_flops"][case["name"]]
            line += [f"± {100 * draw:.2f} %" if draw else "", f"{100 * (counted / executed - 1):+.2f} %"]
        lines.append(line)
    head = ["step", "executed", "predicted", "error", *(("draw", "error with the router's rows") if has_rows else ())]
    return format_grid(head, lines, "github")


def summarize_rounds() -> str:
    """A line per round: steps by what bounds them, and counted steps."""
    from flopcalc.base.text_table import format_grid

    lines = []
    for number in NUMBERS:
        choose_round(number)
        measured, counted, predicted = (
            RESULTS / ROUND.name_result(kind) for kind in ("steps", "executed", "predictions")
        )
        rows = list_rows(measured, predicted) if ROUND.models else []
        times = [summarize([row for row in rows if row["bound"] == bound]) if rows else "" for bound in _BOUNDS]
        said, cases = json.loads(predicted.read_text())["executed_flops"], json.loads(counted.read_text())["cases"]
        errors = [abs(said[case["name"]] / case["executed_flops"] - 1) for case in cases]
        lines.append([number, len(rows) or "", *times, f"{sum(error < 0.01 for error in errors)} of {len(errors)}"])
    head = ["round", "steps", "GPU-bound: median / worst / inside", "host-bound", "executed FLOPs within 1 %"]
    return format_grid(head, lines, "github")


def make_page() -> str:
    """The tables of the round in README.md."""
    predicted = RESULTS / ROUND.name_result("predictions")
    tables = [report(RESULTS / ROUND.name_result("steps"), predicted)] if ROUND.models else []
    return "\n\n".join([*tables, report_executed(RESULTS / ROUND.name_result("executed"), predicted)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("command", choices=("predict", "measure", "report", "summary"))
    parser.add_argument("--out", type=Path, help="measure: folder of the results; predict: file")
    parser.add_argument("--parts", default=",".join(PARTS), help="measure: which, with commas between")
    parser.add_argument("--budget-s", type=float, default=470, help="measure: seconds after which it stops")
    parser.add_argument("--page", type=Path, help="report, summary: write the tables between their marks in this page")
    parser.add_argument("--round", type=int, choices=NUMBERS, default=1, help="which models")
    parser.add_argument("--predictor", type=Path, help="report: sums by a predictor that was measured on that machine")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="measure: stand-ins of hardly any work, to try the script")
    given = parser.parse_args()
    choose_round(given.round)
    predicted = RESULTS / ROUND.name_result("predictions")
    if given.command == "predict":
        write_predictions(given.out or predicted)
    elif given.command == "report" and given.predictor is not None:
        print(report_own(RESULTS / ROUND.name_result("steps"), given.predictor))
    elif given.command in ("report", "summary"):
        start, end = ROUND.marks if given.command == "report" else SUMMARY_MARKS
        shown = make_page() if given.command == "report" else summarize_rounds()
        print(shown)
        if given.page is not None:
            put_between(given.page, start, end, shown)
    else:
        if given.out is None:
            parser.error("measure needs --out DIR")
        measure(given.out, tuple(given.parts.split(",")), given.budget_s, given.device, given.tiny)
    return 0


if __name__ == "__main__":
    sys.exit(main())
