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
        "--dtype", default="bf16", show_default=True, metavar=metavar, help="Same as --compute; else the config's."
    )


trace_option = click.option(
    "--trace", is_flag=True, help="Count HF's own code instead of a spec, and keep the result (needs torch once)."
)
source_options = (
    click.option(
        "--model-type",
        "--as",
        "model_type",
        metavar="TYPE",
        help="Which family the config is, whatever it says itself.",
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
    help="Count layers of multi-token prediction too: the config's, or N.",
)
input_options = (
    click.option("--decoder-seq", metavar="N", help="Encoder-decoders: length of the decoder; --seq is the encoder's."),
    click.option("--text", metavar="N", help="Text tokens per sample; visual and audio tokens are added."),
    click.option(
        "--image", multiple=True, metavar="WxH|FILE",
        help="An image per sample, in pixels or as a file whose size is read; repeatable.",
    ),
    click.option("--image-grid", multiple=True, metavar="T,H,W", help="An image per sample, in patches."),
    click.option(
        "--video", multiple=True, metavar="[WxH:]30s@2fps|WxHxFRAMES",
        help="A video per sample: seconds and frames per second, or a number of frames; repeatable.",
    ),
    click.option("--video-grid", multiple=True, metavar="T,H,W", help="A video per sample, in patches."),
    click.option("--audio", multiple=True, metavar="SECONDS", help="A clip of audio per sample; repeatable."),
    click.option("--max-pixels", metavar="N", help="The processor's max_pixels, instead of its config's."),
)  # fmt: skip
trained_options = (
    click.option(
        "--freeze", multiple=True, metavar="PATTERN", help="Glob of module paths, or vision|audio|projector|language."
    ),
    click.option("--train-only", multiple=True, metavar="PATTERN", help="Only what matches trains."),
    click.option(
        "--lora",
        metavar="r=16,targets=q_proj+v_proj",
        help="LoRA as PEFT applies it; save=… also trains these modules, dtype=bf16 keeps adapters in bf16.",
    ),
)
# What numbers are: the config says it without these.
number_options = (
    click.option("--compute", metavar="FORMAT", help="What products are computed in: bf16, fp16, tf32, fp32, fp8, …"),
    click.option("--weights", metavar="FORMAT", help="How weights are stored: bf16, fp8, int4-g128, nf4-double, …"),
    click.option("--kv-cache", metavar="FORMAT", help="How cached keys and values are stored: bf16, fp8, …"),
    click.option("--autocast", is_flag=True, help="Products run under torch.autocast, in bf16."),
)
checkpointing_option = click.option("--gradient-checkpointing", is_flag=True, help="Same as --recompute full.")
_SIZES = (
    click.option("--batch", metavar="N", help="Samples per micro-batch (default 1)."),
    click.option("--seq", metavar="N", help="Length per sample, visual tokens included; 4k is 4,096."),
    click.option("--lengths", metavar="N,N,…", help="One packed row of documents; without --seq and --batch."),
    click.option("--grad-accum", metavar="N", help="Micro-batches per step (default 1)."),
)
# Of diffusion models alone.
sampling_options = (
    click.option(
        "--sampling-steps", metavar="N", help="Diffusion: denoising steps of one sampling; means --phase sample."
    ),
    click.option(
        "--guidance", type=click.Choice(("on", "off")),
        help="Diffusion: whether each step runs twice. Default: what the pipeline does.",
    ),
    click.option(
        "--parts", metavar="A,B,…", help="Diffusion: what is counted of denoiser, text and vae; default all of them."
    ),
)  # fmt: skip
_PHASE = (
    click.option("--phase", type=click.Choice(PIPELINE_PHASES), default="train", show_default=True),
    *sampling_options,
    click.option("--context", metavar="C", help="decode: keys already cached (default 0)."),
    click.option("--logits", metavar="all|last|N", help="Positions that get logits (default: all; prefill: last)."),
)
_RECIPE = (
    *trained_options,
    click.option("--recompute", type=click.Choice(RECOMPUTE), default="none", show_default=True),
    checkpointing_option,
    click.option(
        "--clipping", type=click.Choice(CLIPPING), default="none", show_default=True,
        help="DP-SGD as Opacus runs it; counted under convention hardware.",
    ),
)  # fmt: skip
_COUNTING = (
    click.option("--convention", type=click.Choice(CONVENTIONS), default="model", show_default=True),
    click.option(
        "--attention-kernel", type=click.Choice(KERNELS), default="auto", show_default=True,
        help="auto: the kernel that PyTorch's SDPA picks on --device; flash if no device is given.",
    ),
    click.option(
        "--device", shell_complete=complete_device, metavar="NAME",
        help="Device for peaks and kernels; auto = this machine's.",
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
