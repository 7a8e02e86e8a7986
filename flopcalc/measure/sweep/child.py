"""One configuration of a sweep in (its arguments, JSON), its measured row out; runs in a process of its own.

Times, memory and losses are of steps that nothing watches. Two more steps follow: one under the operator counter, and
on a GPU one under the device's own counters.
"""

from __future__ import annotations

import glob
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from flopcalc.base.data import find_version
from flopcalc.base.errors import DeviceError
from flopcalc.core.estimate.binding import bind_config as bind
from flopcalc.core.estimate.estimate import Estimate
from flopcalc.core.model.config import Source
from flopcalc.core.workload.workload import make_workload
from flopcalc.hardware.devices import find_detected, peak_flops_per_s
from flopcalc.measure.calibrate.provenance import describe_machine
from flopcalc.measure.counters.flop_counter import count_flops
from flopcalc.measure.hf.models import make_batch
from flopcalc.measure.sweep.matrix import TRAINERS, load_model
from flopcalc.measure.sweep.trainers import Trainer, TrainerError, make_trainer

Json = dict[str, Any]
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
_PASSES = {"none": 1, "hooks": 1, "ghost": 2, "fast": 2}  # clipping -> backward passes
_REASON_CHARACTERS = 300


class _Run(NamedTuple):
    """A configuration that is ready to train."""

    args: Json
    source: Source
    device: str  # cpu, cuda
    dtype: str
    trainer: Trainer
    batch: dict[str, torch.Tensor]
    parameters: int
    hardware: Estimate  # the step with the kernel that runs
    expected: int  # what the operator counter must see of it
    notes: list[str]


def start(args: Json) -> Callable[[Any], Json]:
    """Job function of the runner: build model and trainer, give back what measures them."""
    run = _prepare(args)
    size = (
        f"{run.source.name}, {run.parameters:,} parameters, {run.dtype} on {run.device}, {args['attention']} attention"
    )
    print(f"{args['trainer']}: {size}; {args['batch_size']} × {args['seq_len']} tokens", flush=True)  # the job's log
    return lambda _row: _measure(run)


def _prepare(args: Json) -> _Run:
    device = _choose_device(args["device"])
    dtype = args["dtype"]
    if dtype == "auto":
        dtype = "bf16" if device == "cuda" else "fp32"
    source = load_model(args["model"], args.get("model_type", ""))
    _check_kind(source)
    hardware, expected = _count_analytic(source, args, device, dtype)  # what is refused is refused before it is built
    model, notes = _build_model(source, device, _DTYPES[dtype], args["attention"], args["seed"])
    trainer = make_trainer(
        args["trainer"],
        model,
        learning_rate=args["learning_rate"],
        max_grad_norm=args["max_grad_norm"],
        noise_multiplier=args["noise_multiplier"],
        seed=args["seed"],
    )
    batch = make_batch(model.config, {"batch": args["batch_size"], "seq": args["seq_len"]})
    moved = {key: value.to(device) for key, value in batch.items()}
    parameters = sum(each.numel() for each in model.parameters())
    return _Run(args, source, device, dtype, trainer, moved, parameters, hardware, expected, notes)


def _choose_device(device: str) -> str:
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise DeviceError("no CUDA device here: take device cpu")
    return device


def _check_kind(source: Source) -> None:
    """A sweep's batch is text: a model that needs more is refused before it is built."""
    estimator = bind(source)
    needs = [
        word
        for word, is_needed in (
            ("images", estimator.vision is not None),
            ("audio", estimator.audio is not None),
            ("an encoder's input", estimator.has_decoder),
        )
        if is_needed
    ]
    if needs:
        raise TrainerError(
            f"{source.name} takes {' and '.join(needs)}; a sweep trains causal language models on text, and DP-SGD "
            "knows samples by the rows of its batch: take its language model alone"
        )


def _build_model(source: Source, device: str, dtype: torch.dtype, attention: str, seed: int) -> tuple[Any, list[str]]:
    """HF's model of this config with random weights, made on the device itself: a copy on the host takes minutes.

    Dropout is off, and a note says so: with it SDPA may leave its fused kernel, which is the one that is counted.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    keys = dict(source.config)
    config = AutoConfig.for_model(keys.pop("model_type"), **keys)
    dropped = sorted(set(_switch_off_dropout(config)))
    torch.manual_seed(seed)
    try:
        with torch.device(device):
            model = auto.from_config(config, attn_implementation=attention, dtype=dtype)
    except ValueError as error:
        if "does not support an attention implementation" not in str(error):
            raise
        raise TrainerError(f"{source.name} has no {attention} attention in HF's code: take attention eager") from None
    return model.to(device), [f"dropout is off: {', '.join(dropped)} of the config set to 0"] if dropped else []


def _switch_off_dropout(config: object) -> Iterator[str]:
    """Set every rate of dropout in a HF config and in those inside it to 0; the names of those that were not."""
    for name, value in vars(config).items():
        if hasattr(value, "to_dict"):
            yield from _switch_off_dropout(value)
        elif "drop" in name and isinstance(value, float) and value:
            setattr(config, name, 0.0)
            yield name


# --- Measuring --------------------------------------------------------------------------------------------------------


def _measure(run: _Run) -> Json:
    args, trainer, hardware = run.args, run.trainer, run.hardware
    losses = [trainer.step(run.batch) for _ in range(args["warmup"])]
    _forget_peak(run.device)
    times_s = []
    for _ in range(args["steps"]):
        _synchronize(run.device)
        began_s = time.perf_counter()
        losses.append(trainer.step(run.batch))
        _synchronize(run.device)
        times_s.append(time.perf_counter() - began_s)
    peak_bytes, reserved_bytes = _read_peak(run.device)
    values = [float(loss) for loss in losses]
    for step, (taken_s, loss) in enumerate(zip(times_s, values[args["warmup"] :], strict=True), args["warmup"]):
        print(f"step {step}: {taken_s:.6f} s, loss {loss:.4f}", flush=True)
    median_s = statistics.median(times_s)
    tokens = args["batch_size"] * args["seq_len"]
    peak, peak_note = _find_peak(run)
    model_total = hardware.total_under("model")
    notes = [*run.notes, *(f"analytic: {note}" for note in hardware.notes)]
    counted = _count_operators(run, notes)
    measured, measured_note = _measure_flops(run)
    row: Json = {
        **{key: args[key] for key in ("trainer", "batch_size", "seq_len", "model")},
        "parameters": run.parameters,
        "dtype": run.dtype,
        "device": run.device,
        **{key: args[key] for key in ("attention", "steps", "warmup")},
        "step_time_s": _summarize(times_s),
        "tokens_per_s": tokens / median_s,
        "peak_memory_bytes": peak_bytes,
        "memory_kind": "device" if run.device == "cuda" else "host",
        "reserved_memory_bytes": reserved_bytes,
        "flops": {
            "convention": hardware.convention,
            "forward": hardware.forward,
            "backward": hardware.backward,
            "clipping": hardware.clipping,
            "total": hardware.total,
            "model_total": model_total,
        },
        "counted_flops": counted,
        "counter": "operators",
        "expected_counted_flops": run.expected,
        "counted_over_analytic": None if counted is None else counted / run.expected,
        "measured_flops": measured,
        "measured_by": None if measured is None else "cupti",
        "measured_over_analytic": None if measured is None else measured / hardware.total,
        "measured_note": measured_note,
        "mfu": None if peak is None else model_total / median_s / peak,
        "hfu": None if peak is None else hardware.total / median_s / peak,
        "peak_flops_per_s": peak,
        "peak_note": peak_note,
        "loss": {"first": _finite(values[0]), "last": _finite(values[-1])},
        "environment": {
            **describe_machine(run.device),
            "opacus": find_version("opacus"),
            "threads": torch.get_num_threads(),
        },
        "notes": notes,
    }
    if args["run_dir"]:
        notes += _write_run(args["run_dir"], row, times_s, values[args["warmup"] :])
    print(f"peak memory {peak_bytes:,} bytes; {hardware.total:,} FLOPs analytic, {counted} counted", *notes, sep="\n")
    return row


def _finite(value: float) -> float | None:
    """JSON knows no NaN: a loss that ran away is null."""
    return value if math.isfinite(value) else None


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _summarize(times_s: Sequence[float]) -> Json:
    ordered = sorted(times_s)
    last = len(ordered) - 1
    return {
        "median": statistics.median(ordered),
        "min": ordered[0],
        "max": ordered[-1],
        "p10": ordered[round(0.1 * last)],
        "p90": ordered[round(0.9 * last)],
    }


def _forget_peak(device: str) -> None:
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with suppress(OSError), open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")  # Linux: the peak of resident memory begins anew, at what is resident now


def _read_peak(device: str) -> tuple[int, int | None]:
    """Peak of the steps in bytes: of what torch held on the device, and reserved there; on the host, resident."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            line = next(line for line in file if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024, None
    except (OSError, StopIteration):
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, None


# --- FLOPs ------------------------------------------------------------------------------------------------------------


def _count_analytic(source: Source, args: Json, device: str, dtype: str) -> tuple[Estimate, int]:
    """The step under convention hardware with the kernel that runs; and what the operator counter must see of it.

    The counter knows operators, not blocks of a kernel: of a fused attention it counts every query-key pair, and that
    each backward pass forms the scores again. So what it must see is hardware with eager attention (every pair, forward
    and gradients), and with SDPA those scores once more for each backward pass.
    """
    clipping = TRAINERS[args["trainer"]]
    load = make_workload(args["batch_size"], args["seq_len"])
    eager = bind(source, convention="hardware", attention_kernel="eager", clipping=clipping)
    expected = eager.estimate(load)
    if args["attention"] == "eager":
        return expected, expected.total
    fused = bind(source, convention="hardware", device=_find_known(device), dtype=dtype, clipping=clipping)
    again = sum(
        product.flops * value * block.copies
        for block, row, values in eager.rows(load, "hardware")
        for product, value in zip(row.products, values, strict=True)
        if product.role == "scores" and product.passes.backward
    )
    return fused.estimate(load), expected.total + again * _PASSES[clipping]


def _find_known(device: str) -> str | None:
    """The device as devices.toml knows it: which kernel SDPA picks there, and what was measured of it."""
    found = find_detected(torch.cuda.get_device_name()) if device == "cuda" else None
    return None if found is None else found.id


def _count_operators(run: _Run, notes: list[str]) -> int | None:
    """FLOPs of one real step, operator by operator; None where that fails: the times are worth more than the count."""
    try:
        counted = count_flops(run.trainer.module, lambda: run.trainer.step(run.batch))
    except Exception as error:
        notes.append(f"operators not counted: {_describe(error)}")
        return None
    if counted.not_counted:
        notes.append(f"operators that the counter does not know: {', '.join(counted.not_counted)}")
    return counted.total


def _measure_flops(run: _Run) -> tuple[int | None, str | None]:
    """Tensor-core FLOPs of one step by the GPU's own counters, and what they leave out; None and why there are none."""
    if run.device != "cuda":
        return None, "no CUDA device"
    kind = {"fp32": "tf32"}.get(run.dtype, run.dtype)
    if kind == "tf32" and not torch.backends.cuda.matmul.allow_tf32:
        return None, "fp32 without TF32 runs on no tensor core: nothing to count"
    from flopcalc.measure.counters import cupti

    try:
        with cupti.HardwareCounter([cupti.TENSOR_COUNTERS[kind]]) as counter, counter.measure() as sample:
            run.trainer.step(run.batch)
    except Exception as error:  # no privilege, another profiler, no memory: a row without this figure is still one
        return None, _describe(error)
    note = (
        f"{kind} tensor cores alone: products that run on vector units, as weighted sums of samples may, are not in it"
    )
    return sample.total_flops, note


def _find_peak(run: _Run) -> tuple[float | None, str | None]:
    if run.device != "cuda":
        return None, "no peak is known for a CPU"
    name = torch.cuda.get_device_name()
    if find_detected(name) is None:
        return None, f"device {name!r} unknown: it has no peak in devices.toml"
    try:
        return peak_flops_per_s(name, run.dtype), None
    except DeviceError as error:
        return None, str(error)


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:_REASON_CHARACTERS]


# --- TensorBoard ------------------------------------------------------------------------------------------------------


def _write_run(folder: str, row: Mapping[str, Any], times_s: Sequence[float], losses: Sequence[float]) -> list[str]:
    """The timed steps as a TensorBoard run, in the monitor's words; a note where that cannot be done."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return ["no TensorBoard run written: pip install tensorboard"]
    tokens = row["batch_size"] * row["seq_len"]
    peak = row["peak_flops_per_s"]
    try:
        for path in glob.glob(os.path.join(glob.escape(folder), "events.out.tfevents.*")):
            os.remove(path)  # of an earlier try: TensorBoard would draw both as one line
        with SummaryWriter(folder) as writer:
            for step, (taken_s, loss) in enumerate(zip(times_s, losses, strict=True), row["warmup"]):
                values = {
                    "training/loss": loss,
                    "perf/step_time": taken_s,
                    "perf/steps_per_second": 1 / taken_s,
                    "perf/tokens_per_second": tokens / taken_s,
                    "perf/samples_per_second": row["batch_size"] / taken_s,
                }
                if peak is not None:
                    values["perf/mfu"] = row["flops"]["model_total"] / taken_s / peak
                for key, value in values.items():
                    writer.add_scalar(key, value, step)
            writer.add_scalar("perf/peak_memory_bytes", row["peak_memory_bytes"], row["warmup"])
    except OSError as error:
        return [f"no TensorBoard run written: {_describe(error)}"]
    return []
