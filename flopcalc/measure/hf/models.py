"""A plain config, workload and recipe go in; a HF model with random weights and its batch come out."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from fnmatch import fnmatchcase
from importlib import import_module
from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from flopcalc.base.errors import FlopcalcError
from flopcalc.core.recipe.recipe import PARAMETER

# --- Tracing without memory ---------------------------------------------------------------------------------


class FloatsAway(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Parameters and activations have no values, here on meta; integers, and what is computed from them, stay real.

    So masks, cu_seqlens and position ids keep their values, which HF reads, while no weight takes memory.
    """

    device = torch.device("meta")

    def is_away(self, tensor: torch.Tensor) -> bool:
        return tensor.is_meta

    def move(self, value: object) -> Any:
        """What is real on the CPU, beside the floats."""
        return _to_meta(value)

    def enter(self) -> AbstractContextManager[object]:
        """In which operators on floats run."""
        return nullcontext()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name, dtype = func._schema.name, kwargs.get("dtype")
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if name in MAKES_STORAGE and not tensors:
            is_float = (dtype or torch.get_default_dtype()).is_floating_point
            if name == "aten::full" and dtype is None:
                is_float = isinstance(args[1], float)
            is_float = is_float and not (name == "aten::rand" and prod(args[0]) == 1)  # a coin that is tossed
            kwargs["device"] = self.device if is_float else torch.device("cpu")
            with self.enter() if is_float else nullcontext():
                return func(*args, **kwargs)
        if dtype is not None and not dtype.is_floating_point and name in MAKES_LIKE:
            like = torch.empty(args[0].shape, dtype=dtype, device="cpu")
            kwargs["device"] = torch.device("cpu")
            return func(like, *args[1:], **kwargs)
        is_away = any(map(self.is_away, tensors))
        if kwargs.get("device") is not None:
            kwargs["device"] = self.device if is_away else torch.device("cpu")
        if not is_away:  # integers, and small floats made from them; they move when they meet a tensor without values
            return func(*args, **kwargs)
        if name in ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"):
            args = (args[0], make_positions(args[1]), *args[2:])
        with self.enter():
            out = func(*tree_map(self.move, args), **tree_map(self.move, kwargs))
        if name == "aten::topk":
            return out[0], make_balanced(out[1].shape, int(args[0].shape[args[2] if len(args) > 2 else -1]))
        return out


MAKES_STORAGE = {f"aten::{n}" for n in ("empty", "zeros", "ones", "full", "rand", "randn", "empty_strided")}
MAKES_LIKE = {f"aten::{n}_like" for n in ("empty", "zeros", "ones", "full")} | {
    f"aten::new_{n}" for n in ("empty", "zeros", "ones", "full")
}


def _to_meta(value: object) -> Any:
    return value.to("meta") if isinstance(value, torch.Tensor) and not value.is_meta else value


def make_positions(indices: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Boolean indices as positions: how many there are is known only where the mask has values."""
    out: list[torch.Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype == torch.bool:
            out.extend(index.nonzero(as_tuple=True))
        else:
            out.append(index)
    return out


def make_balanced(shape: Sequence[int], choices: int) -> torch.Tensor:
    """Real top-k indices, every choice equally often, none twice in a row (k <= choices)."""
    k = shape[-1]
    rows = torch.arange(int(torch.Size(shape[:-1]).numel()))
    return ((rows[:, None] * k + torch.arange(k)) % choices).reshape(*shape)


@contextmanager
def floats_on_meta() -> Iterator[None]:
    """Inside, models are built and run without memory for weights or activations."""
    autocast, is_enabled = torch.autocast, torch.is_autocast_enabled

    def is_enabled_unless_meta(*device_type: str) -> bool:
        return device_type != ("meta",) and is_enabled(*device_type)

    def autocast_unless_meta(device_type: str, *args: Any, **kwargs: Any) -> Any:
        # PEFT switches autocast off around a folded weight; torch knows no autocast for meta at all.
        return nullcontext() if device_type == "meta" else autocast(device_type, *args, **kwargs)

    torch.autocast = autocast_unless_meta  # type: ignore[misc, assignment]
    torch.is_autocast_enabled = is_enabled_unless_meta  # type: ignore[assignment]
    try:
        with FloatsAway():  # type: ignore[no-untyped-call]
            yield
    finally:
        torch.autocast = autocast  # type: ignore[misc]
        torch.is_autocast_enabled = is_enabled


# --- Model --------------------------------------------------------------------------------------------------


def build_model(
    config: Mapping[str, object],
    attention: str = "eager",
    experts: str | None = None,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    architecture: str | None = None,
) -> Any:
    """A HF model with random weights; nothing is downloaded, no remote code is run.

    `architecture`: a class of transformers, or a witness as `module:Class`; without one HF's auto classes choose.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    if attention == "eager":
        os.environ.setdefault("TIMM_FUSED_ATTN", "0")  # timm, where HF builds a tower with it, reads this when imported
    chosen = find_class(architecture) if architecture is not None else None
    hf_config = make_config(config, architecture)
    auto: Any = AutoModelForImageTextToText if "vision_config" in config else AutoModelForCausalLM
    build = auto.from_config
    if chosen is not None:
        if chosen.__module__.startswith("transformers.") and isinstance(
            text := find_text_config(hf_config), chosen.config_class
        ):
            hf_config = text  # the language model of a larger config, as AutoModelForCausalLM takes it
        build = chosen._from_config
    if experts is None and device == "meta":
        experts = "batched_mm"  # HF's own choice, grouped_mm, wants values and bf16 on meta
    torch.manual_seed(0)
    # Older transformers know one of these by another name, and the other not at all.
    options: dict[str, Any] = {"dtype" if hasattr(hf_config, "dtype") else "torch_dtype": dtype}
    if experts is not None and hasattr(hf_config, "_experts_implementation"):
        options["experts_implementation"] = experts
    with floats_on_meta() if device == "meta" else nullcontext():
        return build(hf_config, attn_implementation=attention, **options)


def make_config(config: Mapping[str, Any], architecture: str | None = None) -> Any:
    """The config object of a model; a witness makes its own, with `make_config` or its `config_class`."""
    keys = deepcopy(dict(config))  # HF writes into inner tables
    if architecture is not None and ":" in architecture:
        witness = find_class(architecture)
        if hasattr(witness, "make_config"):
            return witness.make_config(keys)
        base = witness.config_class  # maybe another type's
        return type(base.__name__, (base,), {"model_type": keys.pop("model_type", base.model_type)})(**keys)
    from transformers import CONFIG_MAPPING, AutoConfig

    model_type = keys.pop("model_type")
    if model_type not in CONFIG_MAPPING:
        raise FlopcalcError(f"transformers has no config of type {model_type!r}: {_WRITE.format(architecture)}")
    return AutoConfig.for_model(model_type, **keys)


_WRITE = (
    "write a tiny torch module after the published code, and name it in the type's file in model_specs/examples, "
    'witness = "module:{}"; CONTRIBUTING.md shows how'
)


def find_class(architecture: str) -> Any:
    """A class of transformers by its name, or a witness by `module:Class`; a module in the working folder is found."""
    module, _, name = architecture.rpartition(":")
    if module and not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())  # a command has its own folder there instead
    try:
        home = import_module(module or "transformers")
    except ModuleNotFoundError as error:
        if error.name in ("lab", "lab.witnesses"):
            raise FlopcalcError(f"{name} is not in transformers; its witness, {module}, needs a checkout") from None
        if f"{module}.".startswith(f"{error.name}."):
            raise FlopcalcError(f"witness {architecture}: no module {module} can be imported from here") from None
        raise
    if not hasattr(home, name):
        rest = "" if module else f": {_WRITE.format(name)}"
        raise FlopcalcError(f"{home.__name__} has no class {name}{rest}")
    return getattr(home, name)


def find_text_config(config: Any) -> Any:
    """The language model's part of a config; of a text encoder and a decoder, the encoder's."""
    try:
        return config.get_text_config()
    except ValueError:  # several
        return config.get_text_config(encoder=True)


def count_parameters(model: torch.nn.Module) -> tuple[int, int]:
    """Total and trainable; tied weights count once."""
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    return sum(n for n, _ in sizes), sum(n for n, trains in sizes if trains)


# --- Recipe -------------------------------------------------------------------------------------------------


def _matches(name: str, patterns: Sequence[str]) -> bool:
    parts = name.split(".")
    prefixes = [".".join(parts[: i + 1]) for i in range(len(parts))]
    return any(fnmatchcase(prefix, pattern) for pattern in patterns for prefix in prefixes)


def apply_recipe(model: Any, recipe: Mapping[str, Any]) -> Any:
    """What trains and what is recomputed. The model is changed in place; with LoRA the PEFT wrapper is returned."""
    unknown = set(recipe) - {"freeze", "train_only", "lora", "recompute"}
    if unknown:
        raise ValueError(f"unknown recipe keys: {sorted(unknown)}")
    # A tied weight has several names; it is frozen or trained under any of them.
    names: dict[Any, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    lora = recipe.get("lora")
    for key, value in (("train_only", True), ("freeze", False)):
        patterns = recipe.get(key)
        if not patterns or lora:
            continue
        for pattern in patterns:
            if not any(_matches(name, [pattern]) for all_names in names.values() for name in all_names):
                raise ValueError(f"{key} pattern {pattern!r} matches no parameter")
        for parameter, all_names in names.items():
            hit = any(_matches(name, patterns) for name in all_names)
            if hit or value:
                parameter.requires_grad_(hit if value else False)
    if lora:
        from peft import LoraConfig, get_peft_model

        if recipe.get("train_only"):
            raise ValueError("lora trains its adapters alone: train_only contradicts it")
        targets = lora["targets"]
        bare = [name.removeprefix(PARAMETER) for name in targets if name.startswith(PARAMETER)]
        named: dict[str, Any] = {"target_parameters": bare} if bare else {}  # older peft has none
        model = get_peft_model(
            model,
            LoraConfig(
                r=lora["r"],
                target_modules="all-linear"
                if "all-linear" in targets
                else [name for name in targets if not name.startswith(PARAMETER)],
                **named,
                exclude_modules=[name for name, _ in model.named_modules() if _matches(name, lora.get("exclude", ()))],
                modules_to_save=list(lora["save"]) if lora.get("save") else None,
                lora_dropout=0.0,
                task_type=_find_task(model),
            ),
        )
        for name, parameter in model.named_parameters():
            if _matches(name.removeprefix("base_model.model."), recipe.get("freeze", ())):
                parameter.requires_grad_(False)
    recompute = recipe.get("recompute", "none")
    if recompute not in ("none", "full", "full-reentrant"):
        raise ValueError(f"unknown recompute: {recompute!r}")
    if recompute != "none":
        model.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": recompute == "full-reentrant"}
        )
    return model


def _find_task(model: object) -> str | None:
    """PEFT's task type: it trains a classifier as well as the adapters, and adapts no head."""
    endings = {
        "ForSequenceClassification": "SEQ_CLS",
        "ForTokenClassification": "TOKEN_CLS",
        "ForQuestionAnswering": "QUESTION_ANS",
    }
    found = next((task for ending, task in endings.items() if type(model).__name__.endswith(ending)), None)
    # PEFT's wrapper for text wants a model that generates, and hands it input_ids and inputs_embeds.
    return found or ("CAUSAL_LM" if _is_text(model) else None)


def _is_text(model: Any) -> bool:
    takes = set(inspect.signature(model.forward).parameters)
    return {"input_ids", "inputs_embeds"} <= takes and hasattr(model, "prepare_inputs_for_generation")


# --- Batch --------------------------------------------------------------------------------------------------


def make_batch(config: Any, workload: Mapping[str, Any], device: str = "cpu") -> dict[str, torch.Tensor]:
    """The tensors a HF model of this config takes for this workload; visual tokens stand at the front."""
    text = config.get_text_config()
    special = {getattr(c, k, None) for c in (config, text) for k in vars(c) if k.endswith(("token_id", "token_index"))}
    words = torch.tensor([i for i in range(min(int(text.vocab_size), 4096)) if i not in special])
    generator = torch.Generator().manual_seed(1)
    lengths, mask = workload.get("lengths"), workload.get("mask")
    batch = len(mask) if mask else 1 if lengths else int(workload.get("batch", 1))
    seq = sum(lengths) if lengths else int(workload["seq"])
    ids = words[torch.randint(len(words), (batch, seq), generator=generator)]
    out: dict[str, torch.Tensor] = {"input_ids": ids}
    if mask:
        out["attention_mask"] = (torch.arange(seq) < torch.tensor(mask)[:, None]).long()
    if lengths:
        out["position_ids"] = torch.cat([torch.arange(n) for n in lengths])[None]
    images, videos = workload.get("images") or [], workload.get("videos") or []
    if images or videos:
        _place_vision(config, out, batch, images, videos, generator, device)
    return out


def _place_vision(
    config: Any,
    out: dict[str, torch.Tensor],
    batch: int,
    images: Sequence[Sequence[int]],
    videos: Sequence[Sequence[int]],
    generator: torch.Generator,
    device: str,
) -> None:
    ids, vision = out["input_ids"], config.vision_config
    if config.model_type == "llava":
        side = vision.image_size // vision.patch_size
        if videos or any(list(grid) != [1, side, side] for grid in images):
            raise ValueError(f"llava resizes every image to a grid of [1, {side}, {side}], not {images} {videos}")
        tokens = side * side + (config.vision_feature_select_strategy == "full")
        for i in range(len(images)):
            start = 1 + i * (tokens + 1)
            ids[:, start : start + tokens] = config.image_token_id
        shape = (batch * len(images), vision.num_channels, vision.image_size, vision.image_size)
        out["pixel_values"] = _pixels(shape, generator, device)
        return
    merge = vision.spatial_merge_size**2
    types = torch.zeros_like(ids)
    at = 1
    for kind, token_id, grids in ((1, config.image_token_id, images), (2, config.video_token_id, videos)):
        for t, h, w in grids:
            # Qwen3-VL writes a time stamp before every temporal patch: text between the frames.
            pieces = [h * w // merge] * t if kind == 2 and config.model_type == "qwen3_vl" else [t * h * w // merge]
            for tokens in pieces:
                if at + tokens > ids.shape[1]:
                    raise ValueError(f"seq {ids.shape[1]} is too short for the visual tokens of {images} {videos}")
                ids[:, at : at + tokens] = token_id
                types[:, at : at + tokens] = kind
                at += tokens + 1
        if grids:
            rows = batch * sum(t * h * w for t, h, w in grids)
            width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
            suffix = "" if kind == 1 else "_videos"
            out[f"pixel_values{suffix}"] = _pixels((rows, width), generator, device)
            out["image_grid_thw" if kind == 1 else "video_grid_thw"] = torch.tensor(list(grids) * batch)
    out["mm_token_type_ids"] = types


def _pixels(shape: tuple[int, ...], generator: torch.Generator, device: str) -> torch.Tensor:
    return torch.empty(shape, device="meta") if device == "meta" else torch.randn(shape, generator=generator)
