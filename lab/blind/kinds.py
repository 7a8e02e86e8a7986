"""A blind test of the kinds of steps that rounds of text models leave out: encoders, sound, images, autocast, heads.

    python -m lab.blind.kinds predict|measure|report|coverage [--round N] [--page PAGE]

The protocol, fixed before anything was measured:

- kinds/NN.json holds the steps: a config of published or own widths, the work, and what `flopcalc predict` is asked.
  `predict` writes what this code says to benchmarks/results/kinds_predictions_NN.json, which is committed before
  `measure` runs.
- Weights are random, of the model class that the config names; the optimizer is torch's fused AdamW. Steps are timed
  without pause by the device's clock, the middle of all steps of a run; each step is run in as many processes as
  `measure` is called.
- All steps count; a step that fails says why. `report` reads the host's pace from the probe, as in steps.py.
- `coverage` sums all blind rounds, those of steps.py too, by what a prediction rested on, with what this code says.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from flopcalc.base.errors import FlopcalcError
from flopcalc.measure.hf.compare import make_load
from flopcalc.measure.predictor.fit.cases import ModelledCase, bind_case
from flopcalc.measure.predictor.runs import Runner, make_case
from flopcalc.prediction.build_work import make_work
from lab.blind.makers import make_decode, make_denoiser, make_preference, narrow_linears, shrink_denoiser
from lab.blind.rounds import put_between
from lab.blind.steps import FOLLOWS, read_between

Json = dict[str, Any]
FOLDER = Path(__file__).parent / "kinds"
NUMBERS = sorted(int(path.stem) for path in FOLDER.glob("*.json"))
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
VERSION = "5.17"  # of transformers on the device
FACTORS = (0.7, 0.8, 1.0, 1.25)  # of the host, that predictions are written for


def load_steps(number: int) -> dict[str, Json]:
    """Name -> the step: its kind, config, work, and what else `predict` is asked."""
    found = json.loads((FOLDER / f"{number:02}.json").read_text())
    steps: dict[str, Json] = found["steps"]
    return {name: {**step, "config": {**found["models"][step["model"]]}} for name, step in steps.items()}


# --- predict ----------------------------------------------------------------------------------------------------------
def predict_step(step: Json, factor: float) -> Any:
    """What `flopcalc predict` says of it."""
    from flopcalc import estimate_flops, predict
    from flopcalc.prediction.step import predict_estimate

    work, asked = step["work"], dict(step.get("asked", {}))
    batch = work["batch"]
    sizes = {name: work[name] for name in ("text", "context") if name in work}
    sizes |= {"images": [tuple(work["pixels"])]} if "pixels" in work else {}
    given: Json = {
        "seq_len": work.get("seq"),
        "decoder_seq_len": work.get("decoder_seq"),
        "image_grid_thw": work["images"] * batch if "images" in work else None,
        "audio": work["audio"] * batch if "audio" in work else None,
    }
    given = {name: value for name, value in given.items() if value is not None} | sizes
    usual: Json = {
        "device": "h200", "host_factor": factor, "transformers": VERSION, "advise": False, "memory": factor == 1.0,
    }  # fmt: skip
    objective = asked.pop("objective", None)
    if objective is None:
        return predict(step["config"], batch_size=batch, phase=work.get("phase", "train"), **given, **usual, **asked)
    counted = estimate_flops(step["config"], batch_size=batch, objective=objective, **given, **asked)
    if "rollout" in counted.passes:  # an engine's work, not the trainer's
        left = {name: each for name, each in counted.passes.items() if name != "rollout"}
        counted = sum(left.values())  # type: ignore[assignment]
        counted = counted.replace(passes=left)
    return predict_estimate(counted, **usual)


def make_predictions(number: int) -> Json:
    steps: Json = {}
    for name, step in load_steps(number).items():
        try:
            found = {factor: predict_step(step, factor) for factor in FACTORS}
        except FlopcalcError as error:  # the answer is that there is none
            steps[name] = {"kind": step["kind"], "refused": str(error)}
            continue
        usual = found[1.0]
        steps[name] = {
            "kind": step["kind"],
            "is_recorded": usual.evidence["operators_recorded"],
            "bound": usual.bound,
            "memory_bytes": usual.memory.peak if usual.memory is not None else None,
            "seconds": {str(factor): list(each.step_time_s) for factor, each in found.items()},
        }
        print(f"{name}: {usual.step_time_s}", file=sys.stderr, flush=True)
    return steps


def _name_result(number: int, what: str) -> Path:
    return RESULTS / f"kinds_{what}_{number:02}.json"


def list_measured() -> list[int]:
    """The rounds whose results are there."""
    return [number for number in NUMBERS if _name_result(number, "steps").exists()]


# --- measure ----------------------------------------------------------------------------------------------------------
class KindsRunner(Runner):
    """A runner of one step of any class that transformers has."""

    def __init__(self, device: str, step: Json) -> None:
        super().__init__(device, lambda _: dict(step["config"]), work_s=0.6)
        self.step = step
        self.is_tried = not self.bench.is_gpu  # a try of the script: the same class and recipe, hardly any work

    def make_step(self, case: Json) -> Callable[[], Any]:
        from flopcalc.core.model.config import load_config
        from flopcalc.measure.hf.examples import find_example, make_estimator, make_inputs, read_config
        from flopcalc.measure.hf.models import apply_recipe, build_model
        from lab.operators.runs import list_workloads

        torch, device, asked = self.bench.torch, self.bench.device, self.step.get("asked", {})
        self.drop()
        trains = case["phase"] == "train"
        if "_class_name" in self.step["config"]:
            return self._make_denoiser_step(trains)
        config, work = dict(load_config(self.step["config"]).config), self.step["work"]
        example = find_example(config["model_type"])
        if self.is_tried:
            kept: Json = {
                name: config[name] for name in ("architectures", "num_labels", "pad_token_id") if name in config
            }
            kept |= {"pad_token_id": 0} if kept.get("pad_token_id", 0) > 1 else {}
            config = {**read_config(example.model_type, example.configs[0]), **kept}
            tiny = list_workloads(example, "train", "images" in work)[0]
            work = {**tiny, **{name: work[name] for name in ("phase",) if name in work}, "context": 3}
        estimator = make_estimator(example, config)
        dtype = torch.float32 if asked.get("weights") == "fp32" else torch.bfloat16
        architecture = config.get("architectures", [example.choose_class(estimator.spec.architecture)])[0]
        kernel = asked.get("attention_kernel", "sdpa" if estimator.spec.has_sdpa else "eager")
        with torch.device(device):
            model = build_model(config, kernel, None, device, dtype, architecture=architecture).to(device)
        recipe = {name: asked[name] for name in ("lora", "recompute") if name in asked}
        self.model = apply_recipe(model, recipe)
        if "audio" in work:
            work = {**work, "clips": [round(each * 100) for each in work["audio"]]}  # frames of 10 ms
        called = torch.compile(self.model) if asked.get("execution") == "compiled" else self.model
        if "Classification" in architecture and "images" not in work:  # its labels are no tokens
            example = example._replace(loss="logits")
        elif (
            not architecture.endswith(("LMHeadModel", "MTModel"))
            and architecture.endswith("Model")
            and example.loss == "labels"
        ):  # embeddings
            example = example._replace(loss="last_hidden_state")
        self.model.train(trains)
        few = "fp8" if asked.get("compute") == "fp8" else asked.get("weights", "").partition("-")[0]
        if few in ("fp8", "int8", "int4"):
            narrow_linears(torch, self.model, few)
        asked_rows = dict(work)
        if work.get("phase") == "decode" and not estimator.has_decoder:
            asked_rows["seq"] = work["context"]
        if asked.get("objective", "").startswith(("dpo", "reward")):  # a chosen and a rejected sequence
            asked_rows["batch"] = 2 * work["batch"]
        made = make_inputs(example, self.model.config, asked_rows, estimator)
        inputs = {name: each.to(device, dtype if each.is_floating_point() else None) for name, each in made.items()}
        cast = torch.float16 if asked.get("autocast") == "fp16" else torch.bfloat16
        scaler = torch.amp.GradScaler(device) if cast == torch.float16 else None
        scale = scaler.scale if scaler is not None else lambda loss: loss
        if "objective" in asked:
            inner = make_preference(torch, self.model, asked["objective"], inputs)
        elif work.get("phase") == "decode":
            inner = make_decode(torch, self.model, inputs, work, estimator.has_decoder)
        else:
            is_prompt = work.get("phase") == "prefill"
            inner = make_pass(self.model, called, example, inputs, estimator.has_decoder, trains, scale, is_prompt)
        if trains:
            self._set_optimizer("adamw")
        optimizer, micro = self.optimizer, asked.get("grad_accum", 1)

        def run() -> None:
            if trains:
                optimizer.zero_grad(set_to_none=True)
            for _ in range(micro):
                with torch.autocast(device, cast) if asked.get("autocast", False) else contextlib.nullcontext():
                    inner()
            if scaler is not None:
                scaler.step(optimizer)
                scaler.update()
            elif trains:
                optimizer.step()

        if not self.step.get("trainer"):
            return run
        self.drop_optimizer()
        labels = inputs["decoder_input_ids" if estimator.has_decoder else "input_ids"].clone()
        self.sample = {name: each.cpu() for name, each in {**inputs, "labels": labels}.items()}
        return run

    def _make_denoiser_step(self, trains: bool) -> Callable[[], Any]:
        """One call of a denoiser, or a training step of it."""
        config, work = self.step["config"], self.step["work"]
        if self.is_tried:
            work = {**work, "batch": 1, "text": 7, "grid": [work["grid"][0], 16, 16]}
            config = shrink_denoiser(config)
        self.model, inner = make_denoiser(self.bench.torch, config, work, self.step.get("asked", {}), self.bench.device)
        if not trains:
            return inner
        self._set_optimizer("adamw")
        optimizer = self.optimizer

        def run() -> None:
            optimizer.zero_grad(set_to_none=True)
            inner()
            optimizer.step()

        return run

    def drop_optimizer(self) -> None:
        """HF's Trainer makes its own."""
        self.optimizer, self.optimizer_name = None, ""
        self._free()

    def measure(self, case: Json, *, profiled: bool = False) -> Json:
        """A step's times; of HF's Trainer, between the ends of its steps in one run of thirty."""
        if not self.step.get("trainer"):
            return super().measure(case, profiled=profiled)
        from transformers import TrainerCallback

        self.make_step(case)
        torch, steps = self.bench.torch, 30
        ends: list[float] = []
        probe = self._get_probe(case)
        probed = [probe() for _ in range(6)][1:]

        class Watch(TrainerCallback):
            def on_step_end(self, *_: Any, **__: Any) -> None:
                if len(ends) in (9, steps - 1):
                    torch.cuda.synchronize() if torch.cuda.is_available() else None
                ends.append(time.perf_counter())

        if self.bench.is_gpu:
            torch.cuda.reset_peak_memory_stats()
        with tempfile.TemporaryDirectory() as folder:
            self.make_trainer(folder, steps, Watch()).train()
        probed += [probe() for _ in range(6)]
        record = {**case, "seconds": (ends[-1] - ends[9]) / (steps - 10), "probe_s": statistics.median(probed)}
        if self.bench.is_gpu:
            record["peak_memory_bytes"] = torch.cuda.max_memory_allocated()
        return record

    def make_trainer(self, folder: str, steps: int, watch: Any) -> Any:
        """HF's Trainer, for so many steps over the step's own samples."""
        from transformers import Trainer, TrainingArguments

        asked, batch = self.step.get("asked", {}), len(next(iter(self.sample.values())))
        samples = [{name: each[at] for name, each in self.sample.items()} for at in range(batch)]
        micro = asked.get("grad_accum", 1)
        given = TrainingArguments(
            folder, per_device_train_batch_size=batch, max_steps=steps, bf16=asked.get("autocast", False),
            gradient_checkpointing=asked.get("recompute") == "full", optim="adamw_torch_fused", save_strategy="no",
            gradient_accumulation_steps=micro, report_to=[], logging_steps=500, disable_tqdm=True,
            use_cpu=not self.bench.is_gpu,
        )  # fmt: skip
        return Trainer(model=self.model, args=given, train_dataset=samples * steps * micro, callbacks=[watch])


def make_pass(
    model: Any, called: Any, example: Any, inputs: Json, has_decoder: bool, trains: bool,
    scale: Callable[[Any], Any], is_prompt: bool = False,
) -> Callable[[], Any]:  # fmt: skip
    """Forward and backward on the model's own loss, or on the sum of what it returns; or forward alone."""
    import torch

    from flopcalc.measure.hf.examples import takes
    from flopcalc.measure.hf.verify import pick

    extra = dict(example.call) | ({"use_cache": False} if takes(model, "use_cache") else {})
    if not trains:
        extra |= {"use_cache": True, "logits_to_keep": 1} if is_prompt else {}

        def forward() -> None:
            with torch.no_grad():
                called(**inputs, **extra)

        return forward
    if example.loss == "labels":
        labels = inputs["decoder_input_ids" if has_decoder else "input_ids"].clone()
        return lambda: scale(called(**inputs, labels=labels, **extra).loss).backward()

    def train() -> None:
        out = called(**inputs, **extra)
        scale(sum(pick(out, name).float().sum() for name in example.loss.split())).backward()

    return train


def measure(
    number: int, out: Path, names: list[str], device: str, budget_s: float, *, is_profiled: bool = False
) -> None:
    """Time the steps; keep what is there after each."""
    from flopcalc.measure.calibrate.provenance import describe_machine

    begun = time.monotonic()
    kept: Json = {"provenance": {**describe_machine(device), "command": f"python -m lab.blind.kinds --round {number}"},
                  "cases": [], "failures": []}  # fmt: skip
    for name, step in load_steps(number).items():
        if (names and name not in names) or time.monotonic() - begun > budget_s:
            continue
        start, runner = time.monotonic(), KindsRunner(device, step)
        case = {"model": name, "phase": step["work"].get("phase", "train")}
        try:
            kept["cases"].append(runner.measure(case, profiled=is_profiled))
            said = kept["cases"][-1]["seconds"]
        except Exception as error:
            said = f"{type(error).__name__}: {error}"[:300]
            kept["failures"].append({"case": name, "reason": said})
        runner.drop()
        print(f"{time.monotonic() - start:6.1f} s  {name}  {said}", flush=True)
        out.write_text(json.dumps(kept, indent=1) + "\n")


def read_compiled() -> Iterator[ModelledCase]:
    """The compiled steps of all rounds, and the work that the predictor sees in them."""
    for number in list_measured():
        steps = load_steps(number)
        for case in json.loads(_name_result(number, "steps").read_text())["cases"]:
            step = steps[case["model"]]
            if step.get("asked", {}).get("execution") == "compiled":
                work = step["work"]
                full = {**make_case(case["model"], "train", work["batch"], work["seq"], compiled=True), **case}
                estimator, load = bind_case(full, step["config"], "h200-sxm"), make_load(work)
                yield ModelledCase(full, estimator, load, make_work(estimator, load, transformers=VERSION))


# --- report -----------------------------------------------------------------------------------------------------------
def compare(predicted: Json, runs: list[Json], probe_s: float) -> Json:
    """One step: the middle of its runs beside what was said for this host's pace."""
    seconds = statistics.median(run["seconds"] for run in runs)
    pace = statistics.median(run["probe_s"] for run in runs) / probe_s
    low, mid, high = read_between(predicted["seconds"], pace**FOLLOWS)
    peak = runs[0].get("peak_memory_bytes")
    return {
        "kind": predicted["kind"], "bound": predicted["bound"], "is_recorded": predicted["is_recorded"],
        "seconds": seconds, "predicted_s": mid, "error": mid / seconds - 1, "is_inside": low <= seconds <= high,
        "memory_error": predicted["memory_bytes"] / peak - 1 if peak and predicted["memory_bytes"] else None,
    }  # fmt: skip


def compare_all(number: int, predicted: Json | None = None) -> dict[str, Json]:
    """Every step that was measured, beside what was said before, or beside other predictions."""
    from flopcalc.prediction.kernels.constants import load_predictor

    constants = load_predictor("h200-sxm")
    assert constants is not None
    if predicted is None:
        predicted = json.loads(_name_result(number, "predictions").read_text())
    measured = json.loads(_name_result(number, "steps").read_text())
    runs: dict[str, list[Json]] = defaultdict(list)
    for case in measured["cases"]:
        runs[case["model"]].append(case)
    return {
        name: compare(
            predicted[name], each, constants["probe_s"]["train" if each[0]["phase"] == "train" else "forward"]
        )
        for name, each in runs.items()
        if "refused" not in predicted[name]
    }


def report(number: int, *, is_today: bool = False) -> str:
    """A line per step, then one per kind: as predicted before it was measured, or as this code predicts it."""
    from flopcalc.base.text_table import format_grid

    rows = compare_all(number, make_predictions(number) if is_today else None)
    lines = [
        [name, row["kind"], row["bound"], f"{1e3 * row['seconds']:.1f}", f"{1e3 * row['predicted_s']:.1f}",
         f"{100 * row['error']:+.1f} %", "yes" if row["is_inside"] else "no",
         f"{100 * row['memory_error']:+.1f} %" if row["memory_error"] is not None else ""]
        for name, row in rows.items()
    ]  # fmt: skip
    heads = ["step", "kind", "bound", "measured ms", "predicted ms", "error", "inside", "memory"]
    kinds: dict[str, list[Json]] = defaultdict(list)
    for row in rows.values():
        kinds[row["kind"]].append(row)
    summary = []
    for kind, each in kinds.items():
        errors = sorted(abs(row["error"]) for row in each)
        inside = sum(row["is_inside"] for row in each)
        summary.append([kind, f"{100 * statistics.median(errors):.1f} %", f"{100 * errors[-1]:.1f} %",
                        f"{inside} of {len(each)}"])  # fmt: skip
    first = format_grid(heads, lines, "github")
    return f"{first}\n\n{format_grid(['kind', 'median error', 'worst', 'inside'], summary, 'github')}"


def list_evidence() -> Iterator[tuple[str, list[Json], list[Json]]]:
    """A class of evidence, its steps as predicted before they were measured, and as this code predicts them."""
    from lab.blind import rounds, steps

    for kind in ("dense", "experts", "lora", "vision"):
        rows: list[Json] = []
        for number in rounds.NUMBERS:
            steps.choose_round(number)
            if steps.ROUND.models:
                names = (steps.RESULTS / steps.ROUND.name_result(what) for what in ("steps", "predictions"))
                rows += [row for row in steps.list_rows(*names) if row["kind"] == kind]
        yield f"measured models: {kind}", rows, []
    found: dict[str, tuple[list[Json], list[Json]]] = defaultdict(lambda: ([], []))
    for number in list_measured():
        predicted = compare_all(number)
        for place, compared in enumerate((predicted, compare_all(number, make_predictions(number)))):
            for name, row in compared.items():
                title = "recorded types" if predicted[name]["is_recorded"] else "borrowed operators"
                title = "weights of few bits: data sheet" if row["kind"] == "quantized" else title
                found[title][place].append(row)
    for title, (before, today) in found.items():
        yield title, before, today


def report_coverage() -> str:
    """A line per class of evidence: how many of its steps lie inside their intervals."""
    from flopcalc.base.text_table import format_grid
    from lab.blind.steps import summarize

    lines = [
        [title, len(before), summarize(before), summarize(today) if today else ""]
        for title, before, today in list_evidence()
    ]
    return format_grid(["evidence", "steps", "before: median / worst / inside", "this code"], lines, "github")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("what", choices=("predict", "measure", "report", "coverage"))
    parser.add_argument("--round", type=int, choices=NUMBERS, default=1)
    parser.add_argument("--out", type=Path, help="measure: the file to write")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--budget-s", type=float, default=540.0)
    parser.add_argument("--only", action="append", default=[], help="measure this step only; repeatable")
    parser.add_argument("--profiled", action="store_true", help="measure: with the device's time by operator")
    parser.add_argument(
        "--today", action="store_true", help="report: what this code predicts, not what was said before"
    )
    parser.add_argument("--page", type=Path, help="report, coverage: write the tables between their marks in this page")
    given = parser.parse_args()
    if given.what == "predict":
        text = json.dumps(make_predictions(given.round), indent=1)
        _name_result(given.round, "predictions").write_text(f"{text}\n")
    elif given.what in ("report", "coverage"):
        is_report = given.what == "report"
        shown = report(given.round, is_today=given.today) if is_report else report_coverage()
        print(shown)
        if given.page is not None:
            name = f"round {given.round} of kinds" if is_report else "the coverage"
            put_between(given.page, f"<!-- tables of {name} -->", f"<!-- end of the tables of {name} -->", shown)
    elif given.out is None:
        parser.error("measure: --out FILE says where the times go")
    else:
        names = [name.replace("@", " ") for name in given.only]  # a shell's list of words
        measure(given.round, given.out, names, given.device, given.budget_s, is_profiled=given.profiled)


if __name__ == "__main__":
    main()
