"""Closed vocabularies, each spelled once, and the one check of a word."""

from __future__ import annotations

from typing import Literal, TypeVar, get_args

from flopcalc.base.errors import FlopcalcError, format_nearest, format_value

# What a FLOP is counted as: needed by the model, executed by HF's eager code, executed by the kernels.
Convention = Literal["model", "full", "hardware"]
CONVENTIONS: tuple[Convention, ...] = get_args(Convention)
Phase = Literal["train", "forward", "prefill", "decode"]
PHASES: tuple[Phase, ...] = get_args(Phase)
# What operators were recorded in; flow: a training step through frozen weights; empty: any phase.
RecordedPhase = Literal["", "train", "flow", "forward", "prefill", "decode"]
HostPhase = Literal["train", "forward", "decode"]  # in each of which a host has times of its own
HOST_PHASES: tuple[HostPhase, ...] = get_args(HostPhase)
GradientMode = Literal["train", "forward"]  # with gradients or without
# A diffusion pipeline samples: its denoiser runs at every step.
PipelinePhase = Literal["train", "forward", "prefill", "decode", "sample"]
PIPELINE_PHASES: tuple[PipelinePhase, ...] = get_args(PipelinePhase)
BASELINE = "StandardTrainer"  # a sweep compares times, memory and FLOPs with this trainer's
# How the rows of a batch hold their documents.
BatchLayout = Literal["unpadded", "padded", "packed"]
BATCH_LAYOUTS: tuple[BatchLayout, ...] = get_args(BatchLayout)
# Kernels of attention; auto: what PyTorch's SDPA picks on the device, flash without one.
Kernel = Literal["auto", "eager", "flash", "efficient", "cudnn"]
KERNELS: tuple[Kernel, ...] = get_args(Kernel)
# A kernel that was picked, and those among them that fuse an attention call.
PickedKernel = Literal["eager", "flash", "efficient", "cudnn"]
FusedKernel = Literal["flash", "efficient", "cudnn"]
FUSED_KERNELS: tuple[FusedKernel, ...] = get_args(FusedKernel)
# The same for an attention call that is timed; empty: SDPA picks.
CallKernel = Literal["", "eager", "math", "flash", "efficient", "cudnn"]
RecordedAttention = Literal["eager", "sdpa"]  # HF's attn_implementation, under which operators were recorded
# How the sums of a workload are counted: what the model needs, what eager code executes, or what a fused kernel does.
Counting = Literal["model", "full", "flash", "efficient", "cudnn"]
# Which keys a query sees; window: the causal mask cut to the nearest keys.
Mask = Literal["causal", "full", "window"]
# The same for an attention call that is timed. dropout: causal with dropout; apart: images of one sequence that do not
# see each other; decode: one query per sequence.
CallMask = Literal["causal", "dropout", "full", "dropped", "window", "apart", "decode"]
# dgrad: the gradient of a layer's input; wgrad: the gradient of its weight.
ProductDirection = Literal["forward", "dgrad", "wgrad"]
PassDirection = Literal["forward", "backward"]
Direction = Literal["forward", "backward", "dgrad", "wgrad", "optimizer"]
# Gradient checkpointing: HF's default, or with use_reentrant=True.
Recompute = Literal["none", "full", "full-reentrant"]
RECOMPUTE: tuple[Recompute, ...] = get_args(Recompute)
# What a plan's layout recomputes: the same, and what training frameworks add.
LayoutRecompute = Literal["none", "light", "selective", "offload", "half", "full", "full-reentrant"]
LAYOUT_RECOMPUTE: tuple[LayoutRecompute, ...] = get_args(LayoutRecompute)
# Optimizers whose memory and step are known; none: no optimizer runs.
Optimizer = Literal[
    "adamw", "adamw-foreach", "adamw-master", "adamw-32bit", "adamw-8bit", "adamw-fp8", "adamw-offload", "lion", "sgd",
    "sgd-momentum", "none",
]  # fmt: skip
OPTIMIZERS: tuple[Optimizer, ...] = get_args(Optimizer)
# DP-SGD as Opacus does it.
Clipping = Literal["none", "hooks", "ghost", "fast"]
CLIPPING: tuple[Clipping, ...] = get_args(Clipping)
# Parts of a model that --freeze and --train-only know by a word.
Group = Literal["vision", "audio", "projector", "language"]
GROUPS: tuple[Group, ...] = get_args(Group)
# Which part of a model an op belongs to: the rows of a breakdown by component.
Component = Literal[
    "vision", "audio", "projector", "attention_projections", "attention_scores", "mlp", "router", "ssm", "lm_head",
    "modulation", "convolution", "text_encoder", "vae", "head", "other",
]  # fmt: skip
COMPONENTS: tuple[Component, ...] = get_args(Component)
# How a step runs: eager as Hugging Face's code; compiled by torch.compile; graphs: the compiled kernels replayed as a
# CUDA graph; fused: kernels of a training framework, which does not wait for the host.
# Whether a plan keeps a limit: at the slow end of its interval, in the middle, at the fast end, or nowhere in it.
Verdict = Literal["yes", "likely", "unlikely", "no"]
Execution = Literal["eager", "compiled", "graphs", "fused"]
EXECUTIONS: tuple[Execution, ...] = get_args(Execution)
# What a step trains for, besides plain training.
ObjectiveName = Literal["dpo", "grpo", "reward", "distill"]
OBJECTIVES: tuple[ObjectiveName, ...] = get_args(ObjectiveName)
# Rows of a breakdown.
By = Literal["component", "module", "kind", "dtype", "pass"]
BY: tuple[By, ...] = get_args(By)

# Formats that a device can have a peak for; fp4 is the peak that nvfp4 and mxfp4 share.
# model_specs/formats.toml says the rest about each.
Dtype = Literal["bf16", "fp16", "tf32", "fp32", "fp64", "fp8", "mxfp8", "fp6", "fp4", "nvfp4", "mxfp4", "int8", "int4"]
DTYPES: tuple[Dtype, ...] = get_args(Dtype)
# Formats that training frameworks bring operands to just for a product, and bytes of a number with its scales; all
# else stays in bf16.
CAST_BYTES: dict[str, float] = {"fp8": 1.0, "mxfp8": 1 + 1 / 32, "nvfp4": 0.5 + 1 / 16, "mxfp4": 0.5 + 1 / 32}
CAST_FORMATS: tuple[Dtype, ...] = ("fp8", "mxfp8", "nvfp4", "mxfp4")

# What a reader calls parts of a step's time; JSON has the shorter names.
_TIME_PARTS = {
    "products": "matrix products", "memory": "memory-bound", "memory_bound": "memory-bound",
    "launches": "gaps and lower clock", "host": "waiting for the host",
}  # fmt: skip


def name_part(name: str) -> str:
    """The words for a part of a step's time."""
    return _TIME_PARTS.get(name, name.replace("_", " "))


_Word = TypeVar("_Word", bound=str)


def check_word(
    value: object,
    known: tuple[_Word, ...],
    what: str,
    error: type[FlopcalcError] = FlopcalcError,
    *,
    suggests: bool = False,
) -> _Word:
    """The word itself if it is a known one, else an error that lists them, the nearest first if it `suggests`."""
    # Only a string is compared: an array would answer with an array, and an odd object with anything.
    if isinstance(value, str) and value in known:
        return value
    if isinstance(value, tuple):
        raise error(f"{what} takes one of {', '.join(known)} here, not several")
    if suggests:
        near = format_nearest(value, known) if isinstance(value, str) else ""
        raise error(f"{what} {format_value(value)} unknown.{near} Known: {', '.join(known)}")
    raise error(f"{what} {format_value(value)} unknown; known: {', '.join(known)}")


def check_flag(value: object, what: str) -> bool:
    """True or False (or 1 or 0), else an error: a word such as "no" would count as true."""
    if isinstance(value, int) and value in (0, 1):
        return bool(value)
    raise FlopcalcError(f"{what} must be True or False, not {format_value(value)}")
