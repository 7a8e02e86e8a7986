"""How a step runs: number format, attention kernel, execution and optimizer, as asked for and as HF has them."""

from __future__ import annotations

from flopcalc.base.errors import DeviceError, FlopcalcError, RecipeError, WorkloadError, format_value
from flopcalc.base.spelling import spell
from flopcalc.base.vocabulary import (
    CAST_FORMATS,
    EXECUTIONS,
    KERNELS,
    OPTIMIZERS,
    Execution,
    Kernel,
    Optimizer,
    Phase,
    PickedKernel,
    Recompute,
    check_word,
)
from flopcalc.core.estimate.estimate import Estimate, Estimator
from flopcalc.core.formats.formats import Formats
from flopcalc.hardware.devices import Device, find_sdpa, parse_dtype
from flopcalc.prediction.build_work import UNTIMED, WHOLE

_DTYPES = ("bf16", "fp16", "tf32", "fp32")
_TIMED = ("adamw", "adamw-foreach", "adamw-master", "adamw-offload", "none")  # the last two take no time there


def check_timed(estimator: Estimator) -> None:
    """Refuse a model that is counted, but whose time cannot be known."""
    if estimator.spec.untimed:
        raise WorkloadError(
            f"{estimator.source.name}: its time is not predicted, because {estimator.spec.untimed}; "
            "`flopcalc estimate` counts its FLOPs"
        )


def match_dtype(estimate: Estimate, dtype: str) -> Estimate:
    """The same step with all products in a format that was asked for, where its own are others."""
    kind = parse_dtype(dtype)
    if all(each.formats.compute == kind or each.formats.is_only(kind) for each, _, _ in estimate.terms):
        return estimate
    changed = [(each.change(compute=kind), load, times) for each, load, times in estimate.terms]
    return sum(each.estimate(load) * times for each, load, times in changed) or estimate


def describe_formats(formats: Formats, optimizer: Optimizer) -> list[str]:
    """What a prediction does not know about number formats and optimizers."""
    notes = []
    if formats.weights is not None and formats.weights.name in WHOLE and formats.quantization is None:
        notes.append(
            "quantized weights: made whole before each product; measured with bitsandbytes' nf4 and torch's int8 alone"
        )
    elif formats.quantization is not None or formats.weights is not None:
        notes.append(
            "quantized weights: products read the bytes that the weights take, at the data sheet's bandwidth; no "
            "kernel for them was measured, and dequantizing is left out; torch's own int4 product took 5 to 14 times "
            "as long in prompts"
        )
    if formats.cache and formats.cache != formats.attention:
        notes.append(f"attention is timed with a cache in {formats.attention}, not in {formats.cache}")
    if optimizer not in _TIMED:
        notes.append(UNTIMED.format(optimizer))
    if optimizer == "adamw-offload":
        notes.append(
            "the optimizer's states and step are on the host: its time and that of the transfers is not checked, and "
            "not in the figure"
        )
    return notes


def find_kernel(device: Device, dtype: str | None, kernel: Kernel) -> PickedKernel:
    """The attention kernel that runs: the one asked for, or what SDPA picks; refused where there is none."""
    dtype = "bf16" if dtype is None else dtype
    if dtype not in _DTYPES:
        help_ = f"; `flopcalc plan --dtype {dtype} --gpus 1` times training in it" if dtype in CAST_FORMATS else ""
        raise DeviceError(f"steps are predicted in {', '.join(_DTYPES)}, not in {dtype}{help_}")
    if dtype not in device.peak_tflops:
        known = [name for name in _DTYPES if name in device.peak_tflops]
        raise DeviceError(
            f"{device.name} has no known {dtype} peak, so no step can be predicted; "
            + (f"it has {', '.join(known)}: give {spell('dtype')}" if known else "add one in your own devices.toml")
        )
    check_word(kernel, KERNELS, "attention kernel", RecipeError, suggests=True)
    if dtype in ("fp32", "tf32") and kernel in ("flash", "cudnn"):
        raise RecipeError(f"kernel {kernel} takes bf16 and fp16, not {dtype}; SDPA then picks efficient")
    if kernel != "auto":
        return kernel
    return find_sdpa(device, dtype)


USUAL = (
    "unless said, one GPU and LoRA run HF's eager code with adamw, full training on several GPUs a training "
    "framework's fused kernels with adamw-master"
)


def choose_usual(
    gpus: int, estimator: Estimator, phase: Phase, in_trainer: bool = False
) -> tuple[Execution, Optimizer]:
    """What runs unless it is said: HF's code on one GPU and with LoRA, a training framework on several.

    HF's Trainer runs HF's code on several GPUs too, but keeps float32 weights there. No code of HF trains in fp8.
    """
    if estimator.formats.compute in CAST_FORMATS:
        return "fused", "adamw-master"
    is_plain = gpus == 1 or estimator.recipe.lora is not None or estimator.is_diffusion or phase != "train"
    return "eager" if is_plain or in_trainer else "fused", "adamw" if is_plain else "adamw-master"


def choose_execution(execution: str | None, compiled: bool) -> Execution:
    """The execution asked for, eager without; `compiled` is the short way to say so."""
    if execution is None:
        return "compiled" if compiled else "eager"
    if compiled and check_execution(execution) != "compiled":
        raise RecipeError(
            f"{spell('compile', True)} means execution compiled, not {format_value(execution)}: give one of the two"
        )
    return check_execution(execution)


def check_execution(execution: str) -> Execution:
    """A known execution, or an error."""
    return check_word(execution, EXECUTIONS, "execution", RecipeError, suggests=True)


def check_optimizer(optimizer: str) -> Optimizer:
    """A known optimizer, or an error."""
    return check_word(optimizer, OPTIMIZERS, "optimizer", RecipeError, suggests=True)


def settle(
    estimator: Estimator, kernel: PickedKernel, execution: Execution, *, is_asked: bool
) -> tuple[Estimator, PickedKernel, list[str]]:
    """The estimator and the attention kernel of what really runs, and what is to be said.

    HF gives some types no SDPA. Training frameworks have kernels of their own, and recompute a layer as a whole.
    """
    if execution == "fused":
        is_partial = estimator.recipe.recompute == "full"
        return (change(estimator, recompute="full-reentrant") if is_partial else None) or estimator, kernel, []
    if kernel == "eager" or estimator.spec.has_sdpa:
        return estimator, kernel, []
    kind = str(estimator.source.config["model_type"])
    if is_asked:
        return (
            estimator,
            kernel,
            [f"HF has no SDPA for {kind}: kernel {kernel} is timed together with eager's operators"],
        )
    notes = [f"HF has no SDPA for {kind}: attention is eager, as plain products"]
    return change(estimator, kernel="eager") or estimator, "eager", notes


def settle_estimate(
    estimate: Estimate, kernel: PickedKernel, execution: Execution, *, is_asked: bool
) -> tuple[Estimate, PickedKernel, list[str]]:
    """The same of an estimate, whose micro-batches all take the kernel of one."""
    settled = [settle(estimator, kernel, execution, is_asked=is_asked) for estimator, _, _ in estimate.terms]
    notes = next((notes for _, _, notes in settled if notes), [])
    if all(own is term[0] for (own, _, _), term in zip(settled, estimate.terms, strict=True)):
        return estimate, kernel, notes
    kernel = next((own for _, own, _ in settled if own != kernel), kernel)
    pairs = zip(settled, estimate.terms, strict=True)
    changed = sum(own.estimate(load) * times for (own, _, _), (_, load, times) in pairs)
    return changed or estimate, kernel, notes


def change(
    estimator: Estimator, *, recompute: Recompute | None = None, kernel: Kernel | None = None
) -> Estimator | None:
    """The same model under another recomputation or kernel; None where it cannot be made again, as some live models."""
    try:
        return estimator.change(recompute=recompute, attention_kernel=kernel)
    except FlopcalcError:
        return None
