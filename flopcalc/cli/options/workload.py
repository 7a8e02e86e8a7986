"""The options that say what is counted: the workload, what trains, and the convention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from flopcalc.errors import WorkloadError
from flopcalc.hardware.devices import load_devices
from flopcalc.words import CLIPPING, CONVENTIONS, EXECUTIONS, KERNELS, PIPELINE_PHASES, RECOMPUTE

LISTED = ("device", "gpus", "batch", "seq")  # options that take lists; the last changes fastest
Function = TypeVar("Function", bound=Callable[..., Any])


def complete_device(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    return [device.id for device in load_devices()[0] if device.id.startswith(incomplete.lower())]


def execution_option(default: str) -> Callable[[Function], Function]:
    """--execution, with what a command takes without it."""
    return click.option(
        "--execution",
        type=click.Choice(EXECUTIONS),
        help="How the step runs: eager (HF's code), compiled (torch.compile), graphs (compiled, as CUDA graphs), fused "
        f"(kernels of a training framework). Default: {default}.",
    )


def dtype_option(metavar: str) -> Callable[[Function], Function]:
    """--dtype, the short name of --compute."""
    return click.option(
        "--dtype",
        default="bf16",
        show_default=True,
        metavar=metavar,
        help="Same as --compute; a dtype in the config wins over the default.",
    )


trace_option = click.option(
    "--trace", is_flag=True, help="Count HF's own code instead of a spec and cache the result (needs torch once)."
)
source_options = (
    click.option(
        "--model-type",
        "--as",
        "model_type",
        metavar="TYPE",
        help="Read the config as this model type, instead of its own.",
    ),
    click.option("--spec", metavar="FILE", help="Add your own spec (TOML) for its model_type."),
    click.option("--download", is_flag=True, help="Fetch a hub id's config.json if it is not in the cache."),
    click.option(
        "--head", metavar="lm|none|sequence:N|token:N",
        help="The model's head, instead of the one that its config names; N: labels (default: the config's).",
    ),
)  # fmt: skip
mtp_option = click.option(
    "--mtp",
    is_flag=False,
    flag_value="config",
    metavar="[N]",
    help="Also count layers of multi-token prediction: as many as the config says, or N.",
)
input_options = (
    click.option("--decoder-seq", metavar="N", help="Encoder-decoders: length of the decoder; --seq is the encoder's."),
    click.option("--text", metavar="N", help="Text tokens per sample; visual and audio tokens are added."),
    click.option(
        "--image", multiple=True, metavar="WxH|FILE",
        help="An image per sample: its size in pixels, or a file; repeatable.",
    ),
    click.option("--image-grid", multiple=True, metavar="T,H,W", help="An image per sample, in patches."),
    click.option(
        "--video", multiple=True, metavar="[WxH:]30s@2fps|WxHxFRAMES",
        help="A video per sample: seconds and frames per second, or a number of frames; repeatable.",
    ),
    click.option("--video-grid", multiple=True, metavar="T,H,W", help="A video per sample, in patches."),
    click.option("--audio", multiple=True, metavar="SECONDS", help="An audio clip per sample, in seconds; repeatable."),
    click.option("--max-pixels", metavar="N", help="max_pixels of the image processor (default: from its config)."),
)  # fmt: skip
trained_options = (
    click.option(
        "--freeze", multiple=True, metavar="PATTERN",
        help="Freeze what matches: a glob of module paths, or vision|audio|projector|language; repeatable.",
    ),
    click.option(
        "--train-only", multiple=True, metavar="PATTERN",
        help="Train only what matches: patterns as for --freeze; repeatable.",
    ),
    click.option(
        "--lora",
        metavar="r=16,targets=q_proj+v_proj",
        help="LoRA as PEFT applies it; save=… also trains these modules, dtype=bf16 keeps adapters in bf16.",
    ),
)  # fmt: skip
# What numbers are: the config says it without these.
number_options = (
    click.option(
        "--compute", metavar="FORMAT", help="Number format of matrix products: bf16, fp16, tf32, fp32, fp8, …"
    ),
    click.option(
        "--weights", metavar="FORMAT", help="Number format of stored weights: bf16, fp8, int4-g128, nf4-double, …"
    ),
    click.option("--kv-cache", metavar="FORMAT", help="Number format of cached keys and values: bf16, fp8, …"),
    click.option("--autocast", is_flag=True, help="Matrix products run under torch.autocast, in bf16."),
)
checkpointing_option = click.option("--gradient-checkpointing", is_flag=True, help="Same as --recompute full.")
_SIZES = (
    click.option("--batch", metavar="N", help="Samples per micro-batch (default 1)."),
    click.option("--seq", metavar="N", help="Length per sample, visual tokens included; 4k is 4,096."),
    click.option(
        "--lengths", metavar="N,N,…", help="Lengths of the documents in one packed row; replaces --seq and --batch."
    ),
    click.option("--grad-accum", metavar="N", help="Micro-batches per step (default 1)."),
)
# Of diffusion models alone.
sampling_options = (
    click.option(
        "--sampling-steps", metavar="N", help="Diffusion: number of denoising steps; implies --phase sample."
    ),
    click.option(
        "--guidance", type=click.Choice(("on", "off")),
        help="Diffusion: with guidance each step runs twice (default: as the pipeline does).",
    ),
    click.option(
        "--parts", metavar="A,B,…", help="Diffusion: count only these parts: denoiser, text, vae (default: all)."
    ),
)  # fmt: skip
_PHASE = (
    click.option(
        "--phase", type=click.Choice(PIPELINE_PHASES), default="train", show_default=True,
        help="A training step, a forward pass, a prompt (prefill), new tokens (decode), or diffusion sampling.",
    ),
    *sampling_options,
    click.option("--context", metavar="C", help="decode: number of cached keys (default 0)."),
    click.option("--logits", metavar="all|last|N", help="Positions with logits (default: all; prefill: last)."),
)  # fmt: skip
_RECIPE = (
    *trained_options,
    click.option(
        "--recompute", type=click.Choice(RECOMPUTE), default="none", show_default=True,
        help="Gradient checkpointing. full: HF's default; full-reentrant: use_reentrant=True.",
    ),
    checkpointing_option,
    click.option(
        "--clipping", type=click.Choice(CLIPPING), default="none", show_default=True,
        help="Per-sample clipping (DP-SGD) as in Opacus; counted under convention hardware.",
    ),
)  # fmt: skip
_COUNTING = (
    click.option(
        "--convention", type=click.Choice(CONVENTIONS), default="model", show_default=True,
        help="Count what the model needs (for MFU), what HF's eager code executes (full), or what the kernels execute "
        "(hardware, for HFU).",
    ),
    click.option(
        "--attention-kernel", type=click.Choice(KERNELS), default="auto", show_default=True,
        help="auto: the kernel that PyTorch's SDPA picks on --device; flash if no device is given.",
    ),
    click.option(
        "--device", shell_complete=complete_device, metavar="NAME",
        help="GPU whose peaks and kernels are used; auto: the one in this machine.",
    ),
)  # fmt: skip


def has_list(options: Mapping[str, Any], plot_file: str | None) -> bool:
    """Whether an option lists values; only a list can be drawn."""
    is_list = any("," in (options.get(name) or "") for name in LISTED)
    if plot_file is not None and not is_list:
        raise WorkloadError("--plot draws a curve over a list: give one, as in --seq 1k,2k,4k")
    return is_list


def add_options(*options: Callable[[Function], Function]) -> Callable[[Function], Function]:
    """Several options as one decorator, in the order that --help shows."""

    def decorate(function: Function) -> Function:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


_WORKLOAD = (*_SIZES, *input_options, *_PHASE, *_RECIPE, *number_options, *_COUNTING)
# --seq, --freeze, --convention and their like.
workload_options = add_options(*source_options, mtp_option, *_WORKLOAD)
# The same for a command whose --mtp is another.
quoted_workload_options = add_options(*source_options, *_WORKLOAD)
