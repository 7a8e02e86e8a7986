"""A model, a batch and a phase go in; what each witness on this machine counted comes out, with the analytic count.

Every witness answers `count(model, batch, phase) -> WitnessCount` and never needs the command line's packages.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from math import prod
from typing import Any, NamedTuple

from flopcalc.base.data import describe_install
from flopcalc.base.errors import DeviceError, FlopcalcError, WorkloadError
from flopcalc.base.spelling import spell
from flopcalc.base.vocabulary import GROUPS, Phase, PickedKernel
from flopcalc.core.estimate.binding import bind_config as bind
from flopcalc.core.model.config import Source, load_config
from flopcalc.core.model.ops import Linear
from flopcalc.core.recipe.recipe import REGEX, Recipe, make_recipe
from flopcalc.core.workload.workload import Workload
from flopcalc.hardware.devices import Device, find_detected
from flopcalc.hardware.routing import RANDOM
from flopcalc.measure.counters.witnessed import PHASES, WitnessCount, ready_step, synchronize, unavailable

WITNESSES = ("flop_counter", "fvcore", "profiler", "cupti", "ncu", "gpm")
_GAUGE_S = 0.3  # GPM's window: the step is repeated until it is over
_EXTRA = {"torch", "transformers", "peft", "fvcore"}  # packages of the extra


# --- Witnesses that need no file of their own ---------------------------------------------------------


def count(model: Any, batch: Mapping[str, object], phase: Phase) -> WitnessCount:
    """The closed-hole operator counter: exact, per module."""
    from flopcalc.measure.counters.flop_counter import count_flops

    with ready_step(model, batch, phase) as step:
        counted = count_flops(model, step)
    rows = {path: sum(row) for path, row in counted.rows.items() if any(row)}
    fused = any("attention" in name for name in counted.not_counted)
    return WitnessCount(
        "flop_counter",
        counted.total,
        rows,
        counted.not_counted,
        counted.seconds,
        "a fused attention operator has no formula: it is among the operators not counted" if fused else None,
    )


def count_hardware(model: Any, batch: Mapping[str, object], phase: Phase) -> WitnessCount:
    """The GPU's own tensor counters around one step, in one pass; the step before it warms up."""
    import torch

    from flopcalc.measure.counters import cupti

    start = time.perf_counter()
    parameter = next(model.parameters(), None)
    if not torch.cuda.is_available():
        return unavailable("cupti", "no CUDA device here")
    if parameter is None or not parameter.is_cuda:
        return unavailable("cupti", "the model is not on the GPU")
    dtype = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}.get(parameter.dtype, "tf32")
    if dtype == "tf32" and not torch.backends.cuda.matmul.allow_tf32:
        return unavailable(
            "cupti", f"float32 without TF32 runs no tensor core: nothing to count; take {spell('dtype', 'bf16')}"
        )
    counters = [cupti.TENSOR_COUNTERS[dtype], cupti.DRAM_COUNTER, cupti.CYCLE_COUNTER]
    try:
        with (
            ready_step(model, batch, phase) as step,
            cupti.HardwareCounter(counters) as counter,
        ):
            step()
            synchronize(model)
            with counter.measure() as sample:
                step()
    except cupti.CountersUnavailable as error:
        return unavailable("cupti", str(error), time.perf_counter() - start)
    return WitnessCount(
        "cupti",
        sample.total_flops,
        sample.tensor_flops,
        {},
        time.perf_counter() - start,
        f"{' and '.join(sample.dtypes)} tensor cores only, chip {counter.chip}; "
        f"DRAM {sample.dram_bytes} bytes, {sample.cycles} cycles",
    )


def gauge(model: Any, batch: Mapping[str, object], phase: Phase) -> WitnessCount:
    """How busy the GPU says its tensor cores are while the step repeats: a note, never a count."""
    import torch

    from flopcalc.measure.counters import gpm

    start = time.perf_counter()
    parameter = next(model.parameters(), None)
    if not torch.cuda.is_available():
        return unavailable("gpm", "no CUDA device here")
    if parameter is None or not parameter.is_cuda:
        return unavailable("gpm", "the model is not on the GPU")
    # NVML numbers GPUs without regard to CUDA_VISIBLE_DEVICES; the uuid is the same on both sides.
    uuid = getattr(torch.cuda.get_device_properties(parameter.device), "uuid", None)
    name = None if uuid is None else f"GPU-{str(uuid).removeprefix('GPU-')}"
    steps = 0
    try:
        with ready_step(model, batch, phase) as step, gpm.Gauge(parameter.device.index or 0, name) as reader:
            step()
            synchronize(model)
            with reader.measure() as activity:
                began = time.perf_counter()
                while time.perf_counter() - began < _GAUGE_S:
                    step()
                    synchronize(model)
                    steps += 1
    except gpm.GaugeUnavailable as error:
        return unavailable("gpm", str(error), time.perf_counter() - start)
    seconds = time.perf_counter() - start
    if activity.tensor is None:
        return unavailable("gpm", activity.reason or "GPM gave no figure for tensor", seconds)
    others = [
        f"{what} {share:.1%}" for what, share in (("SMs", activity.sm), ("DRAM", activity.dram)) if share is not None
    ]
    text = ", ".join([f"tensor cores active {activity.tensor:.1%} of {activity.seconds:.2f} s", *others])
    return WitnessCount("gpm", None, {}, {}, seconds, f"{text}; {steps} steps, a gauge and no count")


# --- All of them ---------------------------------------------------------------------------------------------


def ask(witness: str, model: object, batch: Mapping[str, object], phase: Phase) -> WitnessCount:
    """One witness's answer; whatever goes wrong inside it becomes the reason of an unavailable row."""
    return _guard(witness, lambda: _find_counter(witness)(model, batch, phase))


def _find_counter(witness: str) -> Callable[[Any, Mapping[str, Any], Phase], WitnessCount]:
    """The function that counts; imported when asked, so that one missing package costs one row, not all."""
    if witness == "fvcore":
        from flopcalc.measure.counters.fvcore_counter import count as count_fvcore

        return count_fvcore
    if witness == "profiler":
        from flopcalc.measure.counters.torch_profiler import count as count_profiled

        return count_profiled
    if witness == "ncu":
        from flopcalc.measure.counters.ncu import count as count_kernels

        return count_kernels
    return {"flop_counter": count, "cupti": count_hardware, "gpm": gauge}[witness]


def _guard(witness: str, speak: Callable[[], WitnessCount]) -> WitnessCount:
    start = time.perf_counter()
    try:
        return speak()
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRA:
            return unavailable(witness, f"{type(error).__name__}: {error}", time.perf_counter() - start)
        return unavailable(witness, f"{package} is not installed: {describe_install('measure')}")
    except Exception as error:  # a witness that breaks is a row of the table, never the end of it
        text = str(error).strip().partition("\n")[0][:300]
        return unavailable(witness, f"{type(error).__name__}: {text}", time.perf_counter() - start)


class WitnessRow(NamedTuple):
    """One witness with the analytic count that it should equal."""

    counted: WitnessCount
    expected: int
    expected_as: str  # convention, kernel and phase of the expected count

    @property
    def ratio(self) -> float | None:
        best = self.counted.best
        return None if best is None or not self.expected else best / self.expected

    def to_dict(self) -> dict[str, Any]:
        return {
            **self.counted._asdict(),
            "expected": self.expected,
            "expected_as": self.expected_as,
            "ratio": self.ratio,
        }


class Crosscheck(NamedTuple):
    """All witnesses of one step."""

    device: str
    dtype: str
    attention: str
    kernel: PickedKernel  # what the analytic hardware count takes the attention kernel to be
    layers: dict[str, int]  # depths as run, by config key
    parameters: int
    rows: tuple[WitnessRow, ...]


def crosscheck(
    model: object,
    load: Workload,
    *,
    recipe: Recipe | None = None,
    layers: int | None = None,
    device: str = "auto",
    dtype: str | None = None,
    attention: str = "eager",
    witnesses: Sequence[str] = WITNESSES,
) -> Crosscheck:
    """Build the model with random weights, run one batch under every witness, and compare with the analytic count."""
    import torch

    from flopcalc.measure.hf.examples import find_example, make_inputs
    from flopcalc.measure.hf.models import apply_recipe, build_model, make_batch

    recipe = recipe or make_recipe()
    check_kind(load_config(model))
    if load.phase not in PHASES:
        raise WorkloadError(f"witnesses count phase {' or '.join(PHASES)}, not {load.phase!r}")
    if load.layout != "unpadded" or load.logits not in (None, "all"):
        raise WorkloadError("a cross-check runs a plain batch of full rows: no packing, no padding, all logits")
    source = cut_layers(load_config(model), layers)
    place = _choose_device(device)
    dtype = dtype or ("bf16" if place.startswith("cuda") else "fp32")
    torch_dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    known = _find_known(place)
    kernel: PickedKernel = "eager" if attention == "eager" else (known.sdpa if known else None) or "flash"
    expected = _ExpectedCounts(source, load, recipe, kernel, known.id if known else None)
    _check_memory(expected.parameters * torch_dtype.itemsize * (2 if load.phase == "train" else 1), place)
    example = find_example(expected.spec.name)
    with torch.device(place) if place != "cpu" else nullcontext():
        chosen = example.witness or expected.spec.architecture
        built = build_model(source.config, attention, dtype=torch_dtype, architecture=chosen)
    built = apply_recipe(built.to(place), _plain_recipe(recipe, expected, built))
    workload = _plain_workload(load)
    if load.grids and example.inputs:
        made = make_inputs(example, built.config, workload, bind(source))
    else:
        made = make_batch(built.config, workload)
    batch = {key: value.to(place, torch_dtype if value.is_floating_point() else None) for key, value in made.items()}
    rows = []
    for name in witnesses:
        product = _choose_product(expected, torch_dtype, place) if name == "ncu" else None
        if product is not None:
            (m, n, k), form = product
            answer = _guard("ncu", partial(_count_product, (m, n, k), form))
            rows.append(WitnessRow(answer, 2 * m * n * k, f"2·m·n·k of {m} × {n} × {k}"))
            continue
        answer = ask(name, built, batch, load.phase)
        if name == "flop_counter" and attention != "eager" and load.phase == "train" and answer.total is not None:
            special = "a fused attention's backward forms the scores again: 2.5 × its forward, where eager needs 2 ×"
            answer = answer._replace(reason=special)
        rows.append(WitnessRow(answer, *expected.of(name)))
    return Crosscheck(
        _describe_device(place), dtype, attention, kernel, _read_depths(source.config), expected.parameters, tuple(rows)
    )


def _choose_product(expected: _ExpectedCounts, dtype: Any, place: str) -> tuple[tuple[int, int, int], str] | None:
    """The product that ncu measures and its dtype; None without ncu, a GPU or a product on tensor cores."""
    import torch

    if not place.startswith("cuda") or expected.product is None:
        return None
    if dtype == torch.float32 and not torch.backends.cuda.matmul.allow_tf32:
        return None
    try:
        from flopcalc.measure.counters.ncu import find_ncu

        find_ncu()
    except Exception:  # its row says why
        return None
    return expected.product, {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype, "tf32")


def _count_product(shape: tuple[int, int, int], dtype: str) -> WitnessCount:
    from flopcalc.measure.counters.ncu import count_product

    return count_product(shape, dtype)


def check_kind(source: Source) -> None:
    """A cross-check runs text and images; other inputs are refused in words."""
    estimator = bind(source)
    if estimator.has_decoder or estimator.audio is not None:
        raise WorkloadError(
            "a cross-check runs text and images; this model is checked by "
            f"`flopcalc verify --model-type {estimator.spec.name}`"
        )


class _ExpectedCounts:
    """The analytic counts that witnesses should equal."""

    def __init__(
        self, source: Source, load: Workload, recipe: Recipe, kernel: PickedKernel, device: str | None
    ) -> None:
        # Hardware with the eager kernel is `full` plus what is recomputed: what an operator counter sees.
        eager = bind(source, recipe=recipe, convention="hardware", attention_kernel="eager")
        self.stages = eager.stages
        self.spec = eager.spec
        estimate = eager.estimate(load)
        self.parameters = estimate.parameters["total"]
        # The largest linear product as rows × out × in; experts share theirs out, so they have no one size.
        products = [
            (value * row.op.times, row.op.n_out, row.op.n_in)
            for _, row, values in eager.rows(load, "hardware")
            if isinstance(row.op, Linear) and row.op.kind == Linear.kind and row.op.copies == 1
            for value in values[:1]
            if value
        ]
        self.product = max(products, key=prod, default=None)
        name = "full" if not estimate.recompute else "full with recomputation"
        self._counters = (estimate.total, name)
        self._forward = (estimate.forward, "full, forward")
        if kernel != "eager":
            # Weights are random, so routers are uneven.
            routing = None if eager.routing is None else RANDOM
            fused = bind(
                source, recipe=recipe, convention="hardware", attention_kernel=kernel, device=device, routing=routing
            )
            estimate = fused.estimate(load)
            said = "" if routing is None else f", routing {routing}"
            self._hardware = (estimate.total, f"hardware, {kernel}{said}")
        else:
            self._hardware = (estimate.total, "hardware, eager")

    def of(self, witness: str) -> tuple[int, str]:
        if witness == "fvcore":
            return self._forward
        return self._hardware if witness in ("cupti", "ncu", "gpm") else self._counters


def _choose_device(device: str) -> str:
    import torch

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise DeviceError(f"no CUDA device here: leave {spell('device')} out, or say {spell('device', 'cpu')}")
    return device


def _describe_device(place: str) -> str:
    import torch

    return torch.cuda.get_device_name() if place.startswith("cuda") else place


def _find_known(place: str) -> Device | None:
    """The device as devices.toml knows it: which kernel SDPA picks there, and what was measured of it."""
    return find_detected(_describe_device(place)) if place.startswith("cuda") else None


def _check_memory(needed: int, place: str) -> None:
    """Refuse before the machine starts to swap, or the kernel kills us."""
    import torch

    if place.startswith("cuda"):
        free = torch.cuda.mem_get_info()[0]
    else:
        try:
            free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (ValueError, OSError, AttributeError):  # not every system reports it
            return
    if needed > free:
        raise FlopcalcError(
            f"weights and gradients alone take {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB "
            f"are free: cut the depth with {spell('layers', 'N')}"
        )


# --- Configs, workloads and recipes in the forms that the torch side takes ----------------------------------------

_DEPTH_KEYS = ("num_hidden_layers", "n_layer", "num_layers", "depth")
_INDEX_KEYS = ("fullatt_block_indexes", "deepstack_visual_indexes")  # lists of layer numbers


def cut_layers(source: Source, layers: int | None) -> Source:
    """The same model with at most `layers` layers in its language model and in its tower."""
    if layers is None:
        return source
    if layers < 1:
        raise WorkloadError(f"{spell('layers')} must be at least 1, not {layers}")
    return source.replace(config=_cut(source.config, layers), module=None)


def _cut(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    out = dict(config)
    for key in _DEPTH_KEYS:
        depth = config.get(key)
        if not isinstance(depth, int) or isinstance(depth, bool) or depth <= layers:
            continue
        out[key] = layers
        for name, value in config.items():  # one entry per layer: layer_types and its like
            if isinstance(value, list) and len(value) == depth and name not in _INDEX_KEYS:
                out[name] = value[:layers]
        for name in _INDEX_KEYS:
            if isinstance(config.get(name), list):
                out[name] = [index for index in config[name] if index < layers]
    for key, value in config.items():
        if key in ("text_config", "vision_config", "language_config") and isinstance(value, Mapping):
            out[key] = _cut(value, layers)
    return out


def _read_depths(config: Mapping[str, Any], prefix: str = "") -> dict[str, int]:
    found = {f"{prefix}{key}": config[key] for key in _DEPTH_KEYS if isinstance(config.get(key), int)}
    for key, value in config.items():
        if isinstance(value, Mapping):
            found |= _read_depths(value, f"{prefix}{key}.")
    return found


def _plain_workload(load: Workload) -> dict[str, Any]:
    """Grids per sample, as make_batch wants them; every sample of a cross-check has the same."""
    plain: dict[str, object] = {"batch": load.rows, "seq": load.seq, "phase": load.phase}
    for key, grids in (("images", load.grids), ("videos", load.videos)):
        each = len(grids) // load.rows
        if list(grids) != list(grids[:each]) * load.rows:
            raise WorkloadError("a cross-check gives every sample the same images")
        if grids:
            plain[key] = [list(grid) for grid in grids[:each]]
    return plain


def _plain_recipe(recipe: Recipe, expected: _ExpectedCounts, model: Any) -> dict[str, Any]:
    """The recipe with vision, projector and language written as the module paths they stand for."""
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]

    def spell_out(patterns: Sequence[str]) -> list[str]:
        found = []
        for pattern in patterns:
            if pattern not in GROUPS:
                found.append(pattern)
                continue
            paths = {stage.path for stage in expected.stages if stage.group == pattern}
            found += sorted(path for path in paths if any(name.startswith(f"{path}.") for name in names))
        return found

    plain: dict[str, object] = {"recompute": recipe.recompute}
    if recipe.freeze:
        plain["freeze"] = spell_out(recipe.freeze)
    if recipe.train_only:
        plain["train_only"] = spell_out(recipe.train_only)
    if recipe.lora is not None:
        targets = recipe.lora.targets
        is_text = len(targets) == 1 and (targets[0] == "all-linear" or targets[0].startswith(REGEX))
        plain["lora"] = {
            "r": recipe.lora.r,
            "targets": targets[0].removeprefix(REGEX) if is_text else list(targets),
            "save": list(recipe.lora.save),
            "exclude": spell_out(recipe.lora.exclude),
        }
    return plain
