"""Time whole steps of HF models as a user runs them, and every operator inside them, to fit a predictor on them."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from flopcalc.base.vocabulary import Optimizer, Phase, Recompute
from flopcalc.core.model.config import load_config
from flopcalc.measure.calibrate.tables import Bench, Json, counts, get_device, round_digits, summarize
from flopcalc.measure.jobs.runner import Job
from flopcalc.measure.predictor.host_calls import make_probe, measure_units
from flopcalc.measure.predictor.narrow import MARK, is_narrow, narrow
from flopcalc.measure.predictor.profiling import profile_step
from flopcalc.measure.predictor.single_calls import (
    SECONDS,
    list_power_rows,
    list_rows,
    measure_calls,
    measure_power,
    meter,
)

# Models that the predictor is fitted on: preset, and how many of its layers are kept (text, vision).
MODELS: dict[str, tuple[str, int, int]] = {
    "qwen2.5-0.5b": ("qwen2.5-0.5b", 24, 0),
    "llama-3.2-1b": ("llama-3.2-1b", 16, 0),
    "qwen3-1.7b": ("qwen3-1.7b", 14, 0),
    "mistral-7b": ("mistral-7b", 6, 0),
    "gemma-2b": ("gemma-2b", 9, 0),
    "phi-3-mini": ("phi-3-mini", 10, 0),
    "gpt2-medium": ("gpt2-medium", 24, 0),
    "gemma-3-1b": ("gemma-3-1b", 13, 0),
    "olmo-2-7b": ("olmo-2-7b", 6, 0),
    "mistral-large-123b": ("mistral-large-123b", 2, 0),
    "mixtral-8x7b": ("mixtral-8x7b", 2, 0),
    "qwen3-30b-a3b": ("qwen3-30b-a3b", 3, 0),
    "qwen2-vl-2b": ("qwen2-vl-2b", 28, 32),
    "qwen2.5-vl-3b": ("qwen2.5-vl-3b", 9, 16),
    "llava-1.5-7b": ("llava-1.5-7b", 6, 24),
    "llama-3.2-1b-short": ("llama-3.2-1b", 6, 0),
    "qwen2.5-0.5b-short": ("qwen2.5-0.5b", 6, 0),
}
_COMPILED = ("llama-3.2-1b-short", "qwen2.5-0.5b-short")
# Suite quick leaves out what changes the fit little: docs/calibration.md shows the errors of both.
_QUICK_RECOMPUTED = ("llama-3.2-1b", "mistral-7b", "gpt2-medium", "mixtral-8x7b", "qwen2-vl-2b")
_QUICK_SMALL = (
    "qwen2.5-0.5b",
    "qwen3-1.7b",
    "gemma-2b",
    "gpt2-medium",
    "olmo-2-7b",
    "mixtral-8x7b",
    "qwen2-vl-2b",
    "llava-1.5-7b",
)  # decoding, and the smallest training step
# Small steps of these show a host's speed: types with few and many operators, experts and towers among them.
_QUICK_HOSTS = (
    "qwen2.5-0.5b",
    "llama-3.2-1b",
    "qwen3-1.7b",
    "gemma-2b",
    "phi-3-mini",
    "gpt2-medium",
    "gemma-3-1b",
    "qwen3-30b-a3b",
    "qwen2-vl-2b",
    "llava-1.5-7b",
)
_WIDE = ("mistral-large-123b",)  # so wide that the host waits for the device in every training step
_UNALIGNED = ("gpt2-medium",)  # a vocabulary that is no multiple of 8 makes its head slower
_SETTLE_S = 1.5  # seconds of work after which a device at its power limit has settled on a clock
_TRAIN = ((1, 48), (1, 1024), (4, 2048), (1, 4096))
# Gradient checkpointing in small steps: layers with few operators (gpt2) and with many (gemma-3).
_CHECKPOINTED = ("llama-3.2-1b", "gemma-2b", "phi-3-mini", "gpt2-medium", "gemma-3-1b", "mixtral-8x7b", "qwen2-vl-2b")
FIT_GRIDS = {"qwen2-vl-2b": [[1, 36, 52]], "qwen2.5-vl-3b": [[1, 36, 48]], "llava-1.5-7b": [[1, 24, 24]]}

# Presets of recorded model types, one each, made narrow, to time their code on the host. benchmarks/host_types.py has
# the types that were recorded later.
# Sequence length and patches of the steps with images, for types with a tower.
NARROW: dict[str, tuple[int, list[list[int]]]] = {
    "llama-3.2-1b": (0, []), "qwen2.5-0.5b": (0, []), "qwen3-1.7b": (0, []), "mistral-7b": (0, []),
    "gemma-2b": (0, []), "gemma-3-1b": (0, []), "phi-2": (0, []), "phi-3-medium": (0, []), "gpt2": (0, []),
    "pythia-410m": (0, []), "opt-6.7b": (0, []), "olmo-2-7b": (0, []), "stablelm-2-1.6b": (0, []),
    "starcoder2-7b": (0, []), "aya-23-8b": (0, []), "smollm3-3b": (0, []), "mixtral-8x7b": (0, []),
    "qwen1.5-moe-a2.7b": (0, []), "qwen3-30b-a3b": (0, []), "deepseek-v3": (0, []),
    "deepseek-v2-lite": (0, []), "olmo-3-7b": (0, []), "granite-3.0-3b-a800m": (0, []),
    "qwen2-vl-2b": (640, [[1, 48, 48]]), "qwen2.5-vl-3b": (128, [[1, 16, 16]]), "qwen3-vl-2b": (640, [[1, 48, 48]]),
    "llava-1.5-7b": (640, [[1, 24, 24]]), "llava-v1.6-mistral-7b": (0, []),
    "paligemma-3b-448": (1088, [[1, 32, 32]]), "gemma-3-12b": (320, [[1, 64, 64]]),
}  # fmt: skip
# Two depths of narrow models separate what a call costs from what a layer costs. Training is measured once more at the
# end, because autograd has its own thread, on a core whose speed changes independently.
_DEPTHS = (4, 12)
# Steps whose watts are metered: tokens one by one in small and large batches, and LoRA.
_DECODED = ("llama-3.2-1b", (1, 4, 64, 256))
_ADAPTED = ("qwen2.5-0.5b", "mistral-7b")
_LORA: Json = {"r": 16, "targets": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]}
_NARROW_STEPS = 10


def list_cases(suite: str) -> Iterator[Json]:
    """Every large step."""
    if suite == "test":
        yield make_case("llama", "train", 2, 48)
        yield make_case("llama", "decode", 1, 2, context=16)
        return
    for model in _COMPILED:  # first: launches are timed before anything is profiled
        yield make_case(model, "train", 4, 2048, compiled=True)
    for model in MODELS:
        if model in _COMPILED:
            continue
        grids = FIT_GRIDS.get(model, [])
        is_full = suite == "full"
        has_small = is_full or model in _QUICK_SMALL
        for batch, seq in _TRAIN:
            if seq < 1024 and not has_small:
                continue
            if (batch, seq) == (1, 1024) and not (is_full or grids or model in _UNALIGNED):
                continue
            if model == "gpt2-medium" and seq > 1024:
                batch, seq = 8, 1024
            if grids and seq < 1024:
                yield make_case(model, "train", batch, seq)
            else:
                yield make_case(model, "train", batch, seq, grids)
        if model == "gemma-3-1b":  # a mask larger than the device's cache
            yield make_case(model, "train", 1, 8192)
        if is_full or model in _QUICK_RECOMPUTED:
            yield make_case(model, "train", 4, 1024, grids, recompute="full")
        yield make_case(model, "prefill", 4, 1024, grids)
        if has_small:
            yield make_case(model, "decode", 16, 2, context=1000)
        if model == "llama-3.2-1b":
            yield make_case(model, "train", 2, 1024, attention="eager")
            yield make_case(model, "train", 2, 1024, optimizer="adamw-foreach")


def make_case(
    model: str, phase: Phase, batch: int, seq: int, grids: list[list[int]] | None = None, *, context: int = 0,
    attention: str = "sdpa", recompute: Recompute = "none", optimizer: Optimizer = "adamw", compiled: bool = False,
) -> Json:  # fmt: skip
    return {
        "model": model, "phase": phase, "batch": batch, "seq": seq, "context": context, "grids": grids or [],
        "attention": attention, "recompute": recompute, "optimizer": optimizer, "compiled": compiled,
    }  # fmt: skip


def name_case(case: Json) -> str:
    """The case as one word, which is its row in the journal."""
    parts = [case["model"], case["phase"], f"{case['batch']}x{case['seq']}"]
    parts += [f"@{case['context']}"] if case["context"] else []
    parts += [counts.format_images(case["grids"])] if case["grids"] else []
    parts += [
        case[key]
        for key, usual in (("attention", "sdpa"), ("recompute", "none"), ("optimizer", "adamw"))
        if case[key] != usual
    ]
    return "/".join(parts + (["compiled"] if case["compiled"] else []))


def cut_config(preset: str, layers: int, vision_layers: int = 0) -> Json:
    """A preset's config with fewer layers; widths stay."""
    config = dict(load_config(preset).config)
    parts = [(config, layers)]
    if isinstance(config.get("text_config"), dict):
        config["text_config"] = dict(config["text_config"])
        parts = [(config["text_config"], layers)]
    if isinstance(config.get("vision_config"), dict):
        config["vision_config"] = dict(config["vision_config"])
        parts.append((config["vision_config"], vision_layers))
    for part, kept in parts:
        key = next((key for key in ("num_hidden_layers", "n_layer", "depth") if key in part), "num_hidden_layers")
        if kept:
            part[key] = kept
        if isinstance(part.get("layer_types"), list):
            part["layer_types"] = part["layer_types"][:kept]
    return config


class Runner:
    """Builds one model at a time and measures its cases."""

    def __init__(
        self, device: str, configs: Callable[[str], Json], *, work_s: float = 0.7, most_steps: int = 40
    ) -> None:
        self.bench = Bench(device)
        self.configs = configs
        self.work_s = work_s
        self.most_steps = most_steps
        self.name = ""
        self.lora: Json | None = None
        self.model: Any = None
        self.optimizer: Any = None
        self.optimizer_name = ""
        self.probes: dict[bool, Callable[[], float]] = {}

    def _take(self, name: str, lora: Json | None = None) -> None:
        if (name, lora) == (self.name, self.lora):
            return
        self.drop()
        self.config = self.configs(name)
        self.model = counts.build(self.bench, self.config)
        if lora is not None:
            from flopcalc.measure.hf.models import apply_recipe

            self.model = apply_recipe(self.model, {"lora": lora}).base_model.model
        self.name, self.lora = name, lora

    def drop(self) -> None:
        """Free the model and its optimizer, because the next model needs the memory; also after a failure."""
        self.model = self.optimizer = None
        self.name = self.optimizer_name = ""
        self.lora = None
        self._free()

    def _free(self) -> None:
        gc.collect()
        if self.bench.is_gpu:
            self.bench.torch._C._cuda_clearCublasWorkspaces()  # autograd's thread has some; steps without it do not
            self.bench.torch.cuda.empty_cache()

    def _set_optimizer(self, name: str) -> None:
        if name == self.optimizer_name:
            return
        self.optimizer = None
        self._free()
        is_fused = name == "adamw"
        self.optimizer = self.bench.torch.optim.AdamW(
            [each for each in self.model.parameters() if each.requires_grad],
            lr=1e-5,
            fused=is_fused,
            foreach=not is_fused,
        )
        self.optimizer_name = name

    def make_step(self, case: Json) -> Callable[[], Any]:
        """The step of a user's loop: clear gradients, forward, backward, optimizer."""
        torch = self.bench.torch
        self._take(case["model"], case.get("lora"))
        model = self.model
        for module in model.modules():
            if hasattr(module, "rope_deltas"):  # left over from a run with images
                module.rope_deltas = None
        counts.prepare(model, "eager" if case["attention"] == "eager" else "", case["recompute"], case["phase"])
        called = torch.compile(model) if case["compiled"] else model
        batch = self._make_inputs(case)
        if case["phase"] == "train":
            self._set_optimizer(case["optimizer"])
            optimizer = self.optimizer
            labels = batch["input_ids"].clone()

            def train() -> None:
                optimizer.zero_grad(set_to_none=True)
                called(**batch, labels=labels, use_cache=False).loss.backward()
                optimizer.step()

            return train
        self.optimizer, self.optimizer_name = None, ""
        model.zero_grad(set_to_none=True)
        self._free()
        if case["phase"] == "decode":
            return self._make_decode(case, batch)

        def prefill() -> None:
            with torch.no_grad():
                called(**batch, use_cache=True, logits_to_keep=1)

        return prefill

    def _make_decode(self, case: Json, batch: Json) -> Callable[[], Any]:
        """Decode `seq` tokens one by one after a cache of `context`; the cache is cropped after each step.

        If a window is full it is cropped after each token: transformers 5.17 cannot restore what several tokens pushed
        out of it.
        """
        torch, model = self.bench.torch, self.model
        with torch.no_grad():
            cache = model(**batch, use_cache=True, logits_to_keep=1).past_key_values
        length = case["context"] + case["seq"]
        is_full = any(layer.is_sliding and layer.sliding_window <= length for layer in cache.layers)
        if is_full:
            cache.activate_past_recording()
        token = torch.full((case["batch"], 1), 3, device=self.bench.device)

        def decode() -> None:
            with torch.no_grad():
                for _ in range(case["seq"]):
                    model(input_ids=token, past_key_values=cache, use_cache=True)
                    if is_full:
                        cache.crop(-1)
            if not is_full:
                cache.crop(-case["seq"])

        return decode

    def _make_inputs(self, case: Json) -> Json:
        from flopcalc.measure.hf.examples import find_example, make_estimator, make_inputs

        seq = case["context"] if case["phase"] == "decode" else case["seq"]
        example = find_example(self.config["model_type"])
        workload = {"batch": case["batch"], "seq": seq, "images": case["grids"]}
        made = make_inputs(example, self.model.config, workload, make_estimator(example, self.config))
        dtype = self.bench.torch.bfloat16
        return {
            key: value.to(self.bench.device, dtype) if value.is_floating_point() else value.to(self.bench.device)
            for key, value in made.items()
        }

    def measure(self, case: Json, *, profiled: bool = False) -> Json:
        """Wall time, memory, energy and clock of a step; with `profiled`, the device's time by operator too."""
        torch, bench = self.bench.torch, self.bench
        step = self.make_step(case)
        if bench.is_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        for _ in range(3):
            step()
        bench.synchronize()
        start = time.perf_counter()
        step()
        queued_s = time.perf_counter() - start
        bench.synchronize()
        once_s = time.perf_counter() - start
        steps = max(6, min(self.most_steps, round(self.work_s / max(once_s, 1e-4))))
        if bench.is_gpu and queued_s < 0.8 * once_s:  # the device bounds the step: let its clock settle
            for _ in range(round(_SETTLE_S / once_s)):
                step()
        record: Json = dict(case)
        probe = self._get_probe(case)
        probe()
        probed = [probe() for _ in range(5)]
        record |= self._time(step, steps)
        probed += [probe() for _ in range(6)]
        record["probe_s"] = round_digits(summarize(probed)[0])
        record["queued_s"] = round_digits(queued_s)
        record["once_s"] = round_digits(once_s)
        if bench.is_gpu:
            record["before_bytes"] = before
            record["peak_memory_bytes"] = torch.cuda.max_memory_allocated()
        if profiled:
            record |= profile_step(bench, step)
        return record

    def measure_host(self, case: Json, steps: int = 20) -> Json:
        """Seconds of host-bound steps, and of the probe before and after each.

        The speed of a shared host changes by half from one second to the next. Only the ratio of the two is repeatable.
        """
        step = self.make_step(case)
        probe = self._get_probe(case)
        for _ in range(3):
            step()
            probe()
        self.bench.synchronize()
        taken, probed = [], [probe()]
        for _ in range(steps):
            start = time.perf_counter()
            step()
            taken.append(time.perf_counter() - start)
            probed.append(probe())
        self.bench.synchronize()
        ratios = [
            each / ((before + after) / 2) for each, before, after in zip(taken, probed[:-1], probed[1:], strict=True)
        ]
        ratio, spread = summarize(ratios)
        return dict(case) | {
            "seconds": round_digits(summarize(taken)[0]),
            "probe_s": round_digits(summarize(probed)[0]),
            "ratio": round_digits(ratio),
            "spread": round_digits(spread, 3),
            "steps": steps,
        }

    def _get_probe(self, case: Json) -> Callable[[], float]:
        is_train = case["phase"] == "train"
        if is_train not in self.probes:
            self.probes[is_train] = make_probe(self.bench, is_train)
        return self.probes[is_train]

    def _time(self, step: Callable[[], object], steps: int) -> Json:
        """Seconds of steps without pause: each by CUDA events, all of them together by the host's clock."""
        bench, torch = self.bench, self.bench.torch
        if not bench.is_gpu:
            taken = []
            for _ in range(2):
                start = time.perf_counter()
                step()
                taken.append(time.perf_counter() - start)
            seconds, spread = summarize(taken)
            return {"seconds": round_digits(seconds), "spread": round_digits(spread, 3), "steps": 2}
        gauge = bench.gauge
        assert gauge is not None
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
        torch.cuda.synchronize()
        before_j = gauge.read_energy_j()
        start = time.perf_counter()
        marks[0].record()
        for mark in marks[1:]:
            step()
            mark.record()
        clock = gauge.read_clock_mhz()
        torch.cuda.synchronize()
        total = time.perf_counter() - start
        after_j = gauge.read_energy_j()
        taken = [marks[i].elapsed_time(marks[i + 1]) / 1000 for i in range(steps)]
        seconds, spread = summarize(taken)
        energy_j = (after_j - before_j) / steps if before_j is not None and after_j is not None else None
        return {
            "seconds": round_digits(seconds),
            "spread": round_digits(spread, 3),
            "steps": steps,
            "mean_s": round_digits(total / steps),
            "energy_j": round_digits(energy_j, 4),
            "sm_clock_mhz": clock,
        }


def get_config(name: str) -> Json:
    """The config of a case's model."""
    preset, mark, layers = name.rpartition(MARK)
    return narrow(dict(load_config(preset).config), int(layers)) if mark else cut_config(*MODELS[name])


def plan(suite: str) -> list[Job]:
    """Two jobs: profiled large steps and single calls, then small steps for the host.

    The second has its own process, in which nothing was profiled. Suite full also times narrow models of every type
    and the host's operators one by one; after quick, the shipped predictor's are taken at the pace of this host.
    """
    rows: dict[str, Json] = {name_case(case): {**case, "is_host": False} for case in list_cases(suite)}
    rows |= list_rows(suite)
    rows |= list_power_rows(suite == "test")
    rows |= list_metered_steps(suite)
    models = {"test": ("llama",), "quick": _QUICK_HOSTS, "full": tuple(MODELS)}[suite]
    small = [case for model in models for case in list_host_cases(suite, model)]
    small += list_narrow_cases() if suite == "full" else []
    hosts: dict[str, Json] = {f"host/{name_case(case)}": {**case, "is_host": True} for case in small}
    if suite == "full":
        again = [case for case in list_narrow_cases(_DEPTHS[1:]) if case["phase"] == "train"]
        hosts |= {f"host/{name_case(case)}/again": {**case, "is_host": True} for case in again}
    if suite != "quick":
        hosts["host/units"] = {"is_host": True}
    args = {"device": get_device(suite), "suite": suite}
    start = f"{__name__}:start"
    return [
        Job("runs", start, args, rows, timeout_s=180, expected_s=20 + 4.3 * len(rows)),
        Job("hosts", start, args, hosts, timeout_s=180, expected_s=10 + 1.1 * len(hosts)),
    ]


def list_metered_steps(suite: str) -> dict[str, Json]:
    """Row of the journal -> a step that is repeated like the calls of `list_power_rows`."""
    is_tiny = suite == "test"
    model, batches = ("llama", (1,)) if is_tiny else _DECODED
    cases = [make_case(model, "decode", batch, 2, context=16 if is_tiny else 1000) for batch in batches]
    for model in ("llama",) if is_tiny else _ADAPTED:
        case = make_case(model, "train", 1, 16) if is_tiny else make_case(model, "train", 4, 2048)
        cases.append({**case, "lora": _LORA})
    return {
        f"power/{name_case(case)}{'/lora' * ('lora' in case)}": {
            **case, "power": "step", "seconds": 0.01 if is_tiny else SECONDS
        }
        for case in cases
    }  # fmt: skip


def list_host_cases(suite: str, model: str) -> Iterator[Json]:
    """Small steps, which the device finishes before the host has queued the next one."""
    if suite == "test":
        yield make_case(model, "train", 1, 16)
        yield make_case(model, "prefill", 1, 16)
    elif model not in (*_COMPILED, *_WIDE):
        yield make_case(model, "train", 1, 64)
        if model in FIT_GRIDS:
            yield make_case(model, "train", 1, 1024, FIT_GRIDS[model])
        if model in _CHECKPOINTED:
            yield make_case(model, "train", 1, 64, recompute="full")
        yield make_case(model, "prefill", 1, 64)
        yield make_case(model, "decode", 1, 2, context=512)


def list_narrow_cases(depths: Sequence[int] = _DEPTHS) -> Iterator[Json]:
    """Small steps of every model type. Its depths run minutes apart, so that no slow phase of the host hits both."""
    for layers in depths:
        for preset, (seq, grids) in NARROW.items():
            model = f"{preset}{MARK}{layers}"
            yield make_case(model, "train", 1, 64)
            if grids:
                yield make_case(model, "train", 1, seq, grids)
            yield make_case(model, "prefill", 1, 64)
            if grids:
                yield make_case(model, "prefill", 1, seq, grids)
            yield make_case(model, "decode", 1, 2, context=128)


def start(args: Json) -> Callable[[Json], Json]:
    is_test = args["suite"] == "test"
    runner = Runner(args["device"], (lambda name: counts.get_config(name, "test")) if is_test else get_config)

    def measure(row: Json) -> Json:
        try:
            return measure_row(row)
        except Exception:  # for example out of memory: the next case starts without a model
            runner.drop()
            raise

    def measure_row(row: Json) -> Json:
        if row.get("power") == "step":
            return {**row, **meter(runner.bench, runner.make_step(row), row["seconds"])}
        if "model" not in row:
            runner.drop()
            if "power" in row:
                return measure_power(runner.bench, row)
            is_call = row.get("is_call")
            return measure_calls(runner.bench, row) if is_call else {"units": measure_units(runner.bench)}
        case = {key: value for key, value in row.items() if key != "is_host"}
        if not row["is_host"]:
            return {**runner.measure(case, profiled=True), "is_host": False}
        steps = 3 if is_test else _NARROW_STEPS if is_narrow(case["model"]) else 16
        return {**runner.measure_host(case, steps), "is_host": True}

    return measure
