"""The public functions that join the rooms: a model and its work in; an estimator or an estimate out."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from flopcalc.core.estimate.binding import bind_config
from flopcalc.core.estimate.estimate import Estimate
from flopcalc.core.estimate.estimator import Estimator, Picture, check_no_sizes
from flopcalc.core.model.config import Source
from flopcalc.core.recipe.numbers import FormatOptions
from flopcalc.core.recipe.recipe import Lora, Recipe, join_recipe
from flopcalc.core.workload.workload import Workload, check_workload_alone
from flopcalc.data import apply_launch, describe_install
from flopcalc.errors import ConfigError, FlopcalcError, WorkloadError
from flopcalc.units import check_items, check_size
from flopcalc.words import PHASES, check_keywords, check_word

if TYPE_CHECKING:
    from flopcalc.core.estimate.traced import TracedEstimator
    from flopcalc.core.estimate.translation import Translation


def bind(
    model: Any,
    example_batch: Mapping[str, Any] | None = None,
    *,
    recipe: Recipe | Mapping[str, Any] | None = None,
    lora: Lora | Mapping[str, Any] | str | None = None,
    recompute: str | None = None,
    convention: str | None = None,
    attention_kernel: str = "auto",
    device: str | None = None,
    dtype: str | None = None,
    compute: str | None = None,
    weights: str | None = None,
    kv_cache: str | None = None,
    autocast: bool | str | None = None,
    spec: str | os.PathLike[str] | None = None,
    download: bool = False,
    phases: Iterable[str] = ("train", "forward"),
    dims: Mapping[str, Any] | None = None,
    clipping: str | None = None,
    model_type: str | None = None,
    head: str | None = None,
    mtp: int | bool | None = None,
    max_length: int | None = None,
) -> Estimator:
    """Bind a model once, for a loop: the result is a callable with the workload arguments of estimate_flops.

    With `example_batch` (keyword arguments of its forward) any torch.nn.Module is traced instead of read from a spec:
    for `phases`, under convention full. If it is not clear which axes are batch and length, `dims` names them ('b',
    'n'). If another axis (a second length, height, width) changes, the module is traced again. Lengths beyond
    `max_length` are neither traced nor counted.

    The default convention is model. `device` decides which kernel "auto" is (without a device: SDPA's flash kernel) and
    which measured constants convention hardware uses. They were measured in bf16, so they are not used for another
    `compute`. `lora`, `recompute` and `clipping` are short forms of the recipe. A live model cannot say how samples are
    clipped, so give `clipping` for it too.

    `compute` is the number format of products, `weights` that of linear layers' weights, `kv_cache` that of cached keys
    and values. `autocast` is torch's, in bf16 unless you say fp16. `dtype` is a short name of `compute`. Without them
    the config decides: its quantization_config, then its dtype (docs/formats.md).

    `model_type` reads the config as this family, instead of its own. `head` is lm, none, sequence, token or value.
    sequence:3 has three labels; without a number the config decides. Without `head` the model's class decides, or the
    class in the config's architectures. `mtp` counts layers of multi-token prediction, which are left out by default:
    True for as many as the config has, or a number.
    """
    recipe = join_recipe(recipe, lora, recompute)
    asked = tuple(check_word(phase, PHASES, "phase", WorkloadError) for phase in check_items(phases, "phases"))
    formats = FormatOptions(dtype if compute is None else compute, weights, kv_cache, autocast)
    if example_batch is None:
        if dims is not None:
            raise WorkloadError("dims says which axes of an example_batch are batch and length: give that too")
        if max_length is not None:
            raise WorkloadError("max_length bounds what is traced of an example_batch: give that too")
        return bind_config(
            model, recipe=recipe, convention="model" if convention is None else convention,
            attention_kernel=attention_kernel, device=device, formats=formats, spec=spec, download=download,
            clipping=clipping, model_type=model_type, head=head, mtp=mtp,
        )  # fmt: skip
    if model_type is not None:
        raise FlopcalcError("model_type says which family a config is: a module that is traced needs none")
    if recipe is not None or spec is not None or convention not in (None, "full") or clipping is not None:
        raise FlopcalcError(
            "a module that is traced says itself what trains, under convention full: give neither recipe, spec, "
            "clipping nor another convention with example_batch"
        )
    if head is not None or mtp is not None:
        raise FlopcalcError("a traced module keeps its own head: leave head and mtp out")
    if formats != FormatOptions(formats.compute):
        raise FlopcalcError("a module that is traced has one number format: give compute or dtype alone")
    from flopcalc.measure.trace.polynomials import trace_module  # torch: only where a module is traced

    return trace_module(model, example_batch, phases=asked, dims=dims, compute=formats.compute, max_length=max_length)


def find_traced(
    source: Source, recipe: Recipe, phase: str, has_images: bool, compute: str | None = None
) -> TracedEstimator:
    """The estimator of a config that is counted from HF's own code: kept from before, else traced now."""
    from flopcalc.core.estimate.traced import TracedEstimator, check_layers, load_trace, make_trace_key

    check_layers(source)
    key = make_trace_key(source, recipe, phase, has_images)
    traced = load_trace(key)
    if traced is None:
        try:
            from flopcalc.measure.trace.polynomials import trace_config  # torch: only where nothing is kept
        except ImportError as error:
            raise FlopcalcError(f"--trace needs {error.name}: {describe_install('measure')}") from None
        traced = trace_config(source, recipe, phase, has_images, key)
    return TracedEstimator(traced, source, recipe, FormatOptions(compute))


def estimate_flops(
    model: Any = None,
    workload: Workload | None = None,
    *,
    batch_size: int = 1,
    seq_len: int | None = None,
    images: Iterable[Picture] | None = None,
    image_grid_thw: Any = None,
    video_grid_thw: Any = None,
    lengths: Iterable[int] | None = None,
    batch: Mapping[str, Any] | None = None,
    phase: str = "train",
    context: int | None = None,
    logits: int | str | None = None,
    decoder_seq_len: int | None = None,
    clips: Iterable[int] | None = None,
    audio: Iterable[float] | None = None,
    videos: Iterable[Any] | None = None,
    text: int | None = None,
    sampling_steps: int | None = None,
    guidance: bool | str | None = None,
    parts: Iterable[str] | str | None = None,
    grad_accum: int = 1,
    recipe: Recipe | Mapping[str, Any] | None = None,
    lora: Lora | Mapping[str, Any] | str | None = None,
    recompute: str | None = None,
    convention: str = "model",
    attention_kernel: str = "auto",
    device: str | None = None,
    dtype: str | None = None,
    compute: str | None = None,
    weights: str | None = None,
    kv_cache: str | None = None,
    autocast: bool | str | None = None,
    spec: str | os.PathLike[str] | None = None,
    clipping: str | None = None,
    model_type: str | None = None,
    launch: Any = None,
    head: str | None = None,
    mtp: int | bool | None = None,
) -> Estimate:
    """Exact FLOPs of one step. `model` is a preset's name, a path, a mapping, an HF config or an HF model.

    `workload` is one micro-batch, as a Workload. The keywords up to `audio` are its short form. `images` are those of
    the whole batch, each a file or (width, height) in pixels. A step has `grad_accum` micro-batches. `dtype`,
    `compute`, `weights`, `kv_cache` and `autocast` are number formats, `head` and `mtp` are parts of the model: see
    `bind`. `launch` is a launch file of a training framework, or a list of them. Your own arguments win over it.

    For a diffusion model, `images` is one (width, height), `videos` one (width, height, frames), and `text` the length
    of its text. `sampling_steps` counts sampling instead of a training step. `guidance` ("on", "off") says whether each
    step runs twice. `parts` names what is counted: the denoiser, the text encoders, the VAE.
    """
    if launch is not None:
        arguments = {**locals(), "launch": None}  # every one is handed on
        said = {
            "model": model, "seq": seq_len, "lengths": lengths, "text": workload if workload is not None else batch,
            "batch": None if batch_size == 1 else batch_size, "grad_accum": None if grad_accum == 1 else grad_accum,
            "lora": lora, "recompute": recompute, "compute": compute, "dtype": dtype, "autocast": autocast,
            "weights": weights, "freeze": recipe, "train_only": recipe,
        }  # fmt: skip
        given = {name for name, value in said.items() if value is not None}
        if recipe is not None:
            given |= {"lora", "recompute"}
        if workload is not None or batch is not None:
            given |= {"batch"}
        applied = apply_launch(launch, "estimate", given, model)
        options = applied.options
        renamed = {"batch": "batch_size", "seq": "seq_len"}
        for name in ("model", "batch", "seq", "grad_accum", "lora", "recompute", "compute", "weights"):
            if name in options:
                arguments[renamed.get(name, name)] = options[name]
        if "freeze" in options:
            arguments["recipe"] = {"freeze": options["freeze"]}
        found = estimate_flops(**arguments)
        return found.add_notes(applied.notes)
    if model is None:
        raise ConfigError("which model? Give its name, path or config first, or launch=")
    if workload is not None:
        beside = {
            "batch_size": batch_size if batch_size != 1 else None, "seq_len": seq_len, "images": images,
            "image_grid_thw": image_grid_thw, "video_grid_thw": video_grid_thw, "lengths": lengths, "batch": batch,
            "phase": phase if phase != "train" else None, "context": context, "logits": logits,
            "decoder_seq_len": decoder_seq_len, "clips": clips, "audio": audio, "videos": videos, "text": text,
            "sampling_steps": sampling_steps, "guidance": guidance, "parts": parts,
        }  # fmt: skip
        phase = check_workload_alone(workload, beside).phase
    estimator = bind(
        model, recipe=recipe, lora=lora, recompute=recompute, convention=convention, attention_kernel=attention_kernel,
        device=device, dtype=dtype, compute=compute, weights=weights, kv_cache=kv_cache, autocast=autocast, spec=spec,
        clipping=clipping, model_type=model_type, head=head, mtp=mtp,
    )  # fmt: skip
    if check_size(grad_accum, "grad_accum") > 1 and (phase != "train" or sampling_steps is not None):
        phase = phase if sampling_steps is None else "sample"
        raise WorkloadError(f"grad_accum belongs to phase train, not {phase}")
    if workload is not None:
        return grad_accum * estimator.estimate(workload)
    if batch is not None:
        check_no_sizes(
            batch_size, seq_len, lengths, images, image_grid_thw, video_grid_thw, context, decoder_seq_len, clips,
            audio, videos, text, sampling_steps, guidance, parts,
        )  # fmt: skip
        return estimator.estimate_batch(batch, phase=phase, logits=logits) * grad_accum
    return grad_accum * estimator(
        batch_size, seq_len, images=images, image_grid_thw=image_grid_thw, video_grid_thw=video_grid_thw,
        lengths=lengths, phase=phase, context=context, logits=logits, decoder_seq_len=decoder_seq_len, clips=clips,
        audio=audio, videos=videos, text=text, sampling_steps=sampling_steps, guidance=guidance, parts=parts,
    )  # fmt: skip


def translate(
    model: Any,
    *,
    from_: str | None = None,
    mfu: float | str | None = None,
    tflops: float | None = None,
    tokens_per_second: float | None = None,
    gpus: int = 1,
    device: str | None = None,
    dtype: Any = "bf16",
    peak: float | Mapping[str, float] | None = None,
    mtp: int | None = None,
    **workload: Any,
) -> Translation:
    """Convert a quoted performance into every convention. `model` is an Estimate, or what makes one.

    Give an MFU or TFLOP/s per GPU with `from_`, the convention they were quoted in. Or give tokens per second of all
    GPUs. With both and without `from_`, the rows are ordered by how well each convention fits. `workload` is as in
    estimate_flops.
    """
    from flopcalc.core.estimate.translation import translate_estimate  # few ask for it, and start-up is counted

    if isinstance(model, Estimate):
        if workload:
            raise WorkloadError(f"an Estimate already says the work: give no {', '.join(workload)} with it")
        estimate = model
    else:
        check_keywords(workload, estimate_flops, "translate", WorkloadError)
        estimate = estimate_flops(model, **workload)
    return translate_estimate(
        estimate, from_=from_, mfu=mfu, tflops=tflops, tokens_per_second=tokens_per_second, gpus=gpus, device=device,
        dtype=dtype, peak=peak, mtp=mtp,
    )  # fmt: skip
