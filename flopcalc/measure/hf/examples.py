"""Examples: per model type the tiny configs and workloads that `flopcalc verify` and the recorded truth run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from flopcalc.base.data import find_data_file, load_toml
from flopcalc.base.errors import ConfigError, SpecError
from flopcalc.base.units import is_digits
from flopcalc.core.estimate.binding import bind_config
from flopcalc.core.estimate.estimate import Estimator
from flopcalc.core.spec.expressions import MissingNameError, evaluate
from flopcalc.core.spec.spec import find_key
from flopcalc.measure.hf.models import find_text_config

Json = dict[str, Any]
_KEYS = {
    "architecture", "attention", "configs", "workloads", "images", "inputs", "call", "loss", "skip", "image_token",
    "audio_token", "vocab", "decoder_seq", "clips", "video_token", "lengths", "needs",
    "kernels", "witness",
}  # fmt: skip


class Example(NamedTuple):
    """How one model type is built tiny, and what its forward takes besides input_ids."""

    model_type: str
    architecture: str | None = None  # HF class; the spec's own without
    witness: str = ""  # module:Class, built where transformers does not have the class
    attention: str = "eager"
    configs: Sequence[Json] = ()
    workloads: Sequence[Json] = ()  # besides the usual ones
    images: Sequence[Json] = ()  # workloads with images: batch, seq, images
    inputs: Mapping[str, Json] = {}  # tensors: shape, fill, dtype, when
    call: Mapping[str, Any] = {}  # constants handed to forward
    loss: str = "labels"  # or names in its output: where backward starts if the model takes no labels
    skip: Mapping[str, str] = {}  # case, or "text" for all without images -> why HF cannot run it
    image_token: str = "image_token_id"  # config key of the placeholder
    video_token: str = "video_token_id"
    audio_token: str = "audio_token_id"
    vocab: str = ""  # config key or expression: how many ids; the text config's vocab_size without
    decoder_seq: int = 0  # an encoder-decoder: length of its decoder in the usual workloads
    clips: Sequence[int] = ()  # audio per sample in the usual workloads
    kernels: Mapping[str, str] = {}  # HF's place of a GPU kernel -> its stand-in in kernels.py
    needs: str = ""  # a library besides transformers that HF builds the model with
    lengths: Sequence[int] = (13, 19, 8, 14)  # of the usual workloads; the last is padded

    def choose_class(self, usual: str) -> str:
        """The class to build: the witness, else the HF class that the example names, else the usual one."""
        return self.witness or self.architecture or usual


def find_example(model_type: str) -> Example:
    """The example of a model type; without a file, one that only says how a plain text model is called."""
    path = find_data_file("examples", model_type)
    if path is None:
        return Example(model_type)
    tables = load_toml(path)
    unknown = set(tables) - _KEYS
    if unknown:
        raise SpecError(f"{path}: unknown keys {', '.join(sorted(unknown))}; known: {', '.join(sorted(_KEYS))}")
    tables["configs"] = [read_config(model_type, config) for config in tables.get("configs", [])]
    return Example(model_type, **tables)


def read_config(model_type: str, config: Json) -> Json:
    """A tiny config as HF's would be: TOML has no null, so null_keys lists what is null."""
    given = {key: value for key, value in config.items() if key != "null_keys"}
    return {"model_type": model_type, **given, **dict.fromkeys(config.get("null_keys", []))}


# --- Cases --------------------------------------------------------------------------------------------------


def list_cases(example: Example, config: Json) -> Iterator[tuple[Json, Json]]:
    """(workload, recipe) pairs: two batches, two lengths, every phase, what trains, with and without images."""
    estimator = make_estimator(example, config)
    decoder = {"decoder_seq": example.decoder_seq} if example.decoder_seq and estimator.has_decoder else {}
    clips = {"clips": example.clips} if example.clips else {}
    base = {**decoder, **clips}
    # An encoder of audio has no tokens, and so no length of its own.
    lengths = [{} if decoder and clips else {"seq": seq} for seq in example.lengths[:3]]
    first = next((f"{stage.path}.0" for stage in estimator.stages if stage.repeated), None)
    decoded = lengths[0] if decoder else {"seq": 3}
    train = {"batch": 2, **lengths[0], **base, "phase": "train"}
    everywhere = {"lora": {"r": 3, "targets": "all-linear"}}
    for name, workload, recipe in (
        ("train", train, {}),
        ("train", {"batch": 1, **lengths[1], **base, "phase": "train"}, {}),
        ("forward", {"batch": 3, **lengths[2], **base, "phase": "forward"}, {}),
        ("logits", {"batch": 2, **lengths[0], **base, "phase": "forward", "logits": "last"}, {}),
        ("decode", {"batch": 2, **decoded, **base, "phase": "decode", "context": 11}, {}),
        ("padded", {"seq": example.lengths[3], "phase": "forward", "mask": [6, 11]}, {}),
        ("lora", train, everywhere),
        ("freeze", train, {"freeze": [first]} if first else {}),
        ("recompute", train, {"recompute": "full"}),
        ("reentrant", train, {"recompute": "full-reentrant"}),
        ("lora recompute", train, {**everywhere, "recompute": "full"}),
    ):
        is_skipped = {*name.split(), name.replace(" ", "-"), "text"} & set(example.skip)
        if estimator.needs_text and not is_skipped and not (name == "padded" and base):
            yield workload, recipe
    for workload in example.workloads:
        yield workload, {}
    for number, images in enumerate(example.images):
        workload = {**decoder, **images, "phase": "train"}
        yield workload, {}
        yield {**workload, "phase": "forward"}, {}
        if number:
            continue
        for name, recipe in (("lora", everywhere), ("recompute", {"recompute": "full"})):
            if name not in example.skip and f"images-{name}" not in example.skip:
                yield workload, recipe
        if "images-freeze" not in example.skip:
            tower = sorted({stage.path for stage in estimator.stages if stage.group == "vision"})
            is_whole = all(stage.group == "vision" for stage in estimator.stages)  # then nothing else trains
            yield workload, {"freeze": [first] if is_whole else tower}


def make_estimator(example: Example, config: Json, **options: Any) -> Estimator:
    architectures = {"architectures": [example.architecture]} if example.architecture else {}
    return bind_config({**architectures, **config}, **options)


# --- Inputs -------------------------------------------------------------------------------------------------


class _Scope:
    """Config keys, and the workload's own names before them."""

    def __init__(self, config: Json, names: Mapping[str, Any]) -> None:
        self.config = config
        self.names = names

    def lookup(self, name: str) -> Any:
        if name in self.names:
            return self.names[name]
        is_given, value = find_key(self.config, name)
        if not is_given or value is None:
            raise MissingNameError(name)
        return value


def make_inputs(
    example: Example, config: Any, workload: Mapping[str, Any], estimator: Estimator, device: str = "cpu"
) -> dict[str, Any]:
    """The tensors of one call: ids with placeholders where images and audio stand, and what [inputs] declares."""
    keys = config.to_dict()
    generator = torch.Generator().manual_seed(1)
    mask, lengths = workload.get("mask"), workload.get("lengths")
    batch = len(mask) if mask else 1 if lengths else int(workload.get("batch", 1))
    seq = sum(lengths) if lengths else int(workload.get("seq", 0))
    grids = [tuple(grid) for grid in workload.get("images") or []]
    videos = [tuple(grid) for grid in workload.get("videos") or []]
    clips = list(workload.get("clips") or [])
    names = {
        "batch": batch,
        "seq": seq,
        "decoder_seq": workload.get("decoder_seq", 0),
        "images": batch * len(grids),
        "images_per_sample": len(grids),
        "patches": batch * sum(t * h * w for t, h, w in grids),
        "tiles": batch * sum(t for t, _, _ in grids),
        "clips": batch * len(clips),
        "frames": max(clips, default=0),
        "own": clips * batch,
        "height": grids[0][1] if grids else 0,
        "width": grids[0][2] if grids else 0,
        "videos": batch * len(videos),
        "video_frames": videos[0][0] if videos else 0,
        "video_grids": videos * batch,
        "video_patches": batch * sum(t * h * w for t, h, w in videos),
        "most": max((t for t, _, _ in grids), default=0),
        "tallest": max((h for _, h, _ in grids), default=0),
        "widest": max((w for *_, w in grids), default=0),
    }
    scope = _Scope(keys, names)
    words = _list_words(example, config, scope) if seq or workload.get("decoder_seq") else torch.zeros(1)
    ids = words[torch.randint(len(words), (batch, seq), generator=generator)]
    out: dict[str, Any] = {"input_ids": ids} if seq else {}
    if mask:
        out["attention_mask"] = (torch.arange(seq) < torch.tensor(mask)[:, None]).long()
    if lengths:
        out["position_ids"] = torch.cat([torch.arange(n) for n in lengths])[None]
    if workload.get("decoder_seq"):
        shape = (batch, int(workload["decoder_seq"]))
        out["decoder_input_ids"] = words[torch.randint(len(words), shape, generator=generator)]
    at = 1
    for key, counts in (
        (example.image_token, [estimator.vision.count_tokens(g) for g in grids] if estimator.vision else []),
        (example.video_token, [estimator.vision.count_tokens(g, True) for g in videos] if estimator.vision else []),
        (example.audio_token, [estimator.audio.count_tokens(n) for n in clips] if estimator.audio else []),
    ):
        for tokens in [count for count in counts if count] if key else []:  # an encoder-decoder's audio has none
            token = scope.lookup(key)
            if at + tokens > seq:
                raise ValueError(f"seq {seq} is too short for the {tokens} tokens of an image or clip")
            ids[:, at : at + tokens] = token
            at += tokens + 1
    for name, entry in example.inputs.items():
        if "when" not in entry or evaluate(entry["when"], scope):
            tensor = _make_tensor(name, entry, scope, out, grids * batch, generator, device)
            *outer, last = [int(part) if is_digits(part) else part for part in name.split(".")]
            table: Any = out
            for part in outer:  # a dotted name is in an inner object
                table = table.setdefault(part, {})
            table[last] = tensor
    return out


def _list_words(example: Example, config: object, scope: _Scope) -> torch.Tensor:
    """Ids of a vocabulary that are plain words."""
    vocabulary = int(evaluate(example.vocab, scope)) if example.vocab else int(find_text_config(config).vocab_size)
    special = _find_special(config)
    return torch.tensor([i for i in range(3, min(vocabulary, 4096)) if i not in special])


def _find_special(config: object) -> set[int]:
    found: set[int] = set()
    for part in (config, getattr(config, "vlm_config", config), find_text_config(config)):
        for key, value in vars(part).items():
            if key.endswith(("token_id", "token_index", "patch_id")) and isinstance(value, int):
                found.add(value)
    return found


def _make_tensor(
    name: str, entry: Json, scope: _Scope, out: Json, grids: list[Any], generator: torch.Generator, device: str
) -> Any:
    fill = entry.get("fill", "normal")
    if fill == "grids":
        return torch.tensor(grids)
    if fill == "video_grids":
        return torch.tensor(scope.names["video_grids"])
    if fill == "sizes":  # height and width of each image; `scale`: pixels per patch
        scale = int(evaluate(str(entry.get("scale", 1)), scope))
        return torch.tensor([[h * scale, w * scale] for _, h, w in grids])
    if fill == "images":  # a row per image: expressions over its t, h, w; one alone: a plain list of numbers
        rows = [
            [
                int(evaluate(str(text), _Scope(scope.config, {**scope.names, "t": t, "h": h, "w": w})))
                for text in ([entry["row"]] if isinstance(entry["row"], str) else entry["row"])
            ]
            for t, h, w in grids
        ]
        if isinstance(entry["row"], str):
            return [number for row in rows for number in row]
        return torch.tensor(rows, dtype=_dtype(entry, torch.long))
    if fill == "coordinates":  # x and y of every patch, one row of them per frame; images of one size
        return torch.tensor([[[x, y] for y in range(h) for x in range(w)] for t, h, w in grids for _ in range(t)])
    if fill in ("areas", "tiles"):
        sizes = [int(evaluate(str(size), scope)) for size in entry["shape"]]
        return _make_mask(fill, sizes, grids, int(entry.get("scale", 1))).to(_dtype(entry, torch.long))
    if fill == "image_mask":  # 1 where a placeholder stands
        return (out["input_ids"] == evaluate(entry["token"], scope)).to(_dtype(entry, torch.long))
    if fill == "frame_mask":  # 1 where a clip has frames of its own
        own = torch.tensor(scope.names["own"])[:, None]
        return (torch.arange(scope.names["frames"]) < own).to(_dtype(entry, torch.long))
    if fill == "clips":  # a number per clip: an expression over its frames n
        names = [{**scope.names, "n": n} for n in scope.names["own"]]
        return torch.tensor([int(evaluate(str(entry["row"]), _Scope(scope.config, each))) for each in names])
    if fill == "clip_tokens":  # 1 where a clip has tokens of its own: `row`, an expression over its frames n
        counts = _make_tensor(name, {**entry, "fill": "clips"}, scope, out, grids, generator, device)
        return torch.arange(int(counts.max())) < counts[:, None]
    if fill == "canvas_mask":  # (image, tile, side, side): the whole, then tiles of a canvas, 1 on its h by w patches
        sizes = [int(evaluate(str(size), scope)) for size in entry["shape"]]
        canvas = torch.ones(sizes, dtype=torch.long)
        for image, (_, h, w) in zip(canvas, grids, strict=True):
            side, across = sizes[-1], -(-w // sizes[-1])
            for y in range(-(-h // side) * side):
                for x in range(across * side):
                    image[1 + y // side * across + x // side, y % side, x % side] = int(y < h and x < w)
        return canvas
    if fill == "patch_mask":  # 1 where an image has patches of its own, of `width` that it is padded to
        width = int(evaluate(str(entry["width"]), scope))
        return torch.tensor([[int(i < h * w) for i in range(width)] for _, h, w in grids])
    if fill == "flattened":  # patches after their row and column, from 1; then zeros up to `width` patches
        width, depth = (int(evaluate(str(entry[key]), scope)) for key in ("width", "size"))
        flat = torch.zeros(len(grids), width, 2 + depth)
        for image, (_, h, w) in zip(flat, grids, strict=True):
            places = torch.tensor([[y, x] for y in range(1, h + 1) for x in range(1, w + 1)])
            image[: h * w] = torch.cat([places, torch.randn(h * w, depth, generator=generator)], 1)
        return flat
    if fill == "pooled":  # per image: windows of `pool` patches a side over a square of `side`, then over its h and w
        side, pool = (int(evaluate(str(entry[key]), scope)) for key in ("side", "pool"))
        return torch.tensor(
            [
                [0 if y < high and x < wide else -1 for y in range(top, top + pool) for x in range(left, left + pool)]
                for _, h, w in grids
                for high, wide in ((side, side), (h, w))
                for top in range(0, high, pool)
                for left in range(0, wide, pool)
            ]
        )
    if fill == "until":  # 1 for the real positions, then 0
        sizes = [int(evaluate(str(size), scope)) for size in entry["shape"]]
        return (torch.arange(sizes[-1]) < int(evaluate(str(entry["until"]), scope))).expand(sizes).to(torch.long)
    if fill == "text_mask":  # 0 where a placeholder stands
        return (out["input_ids"] != scope.lookup(entry["token"])).to(_dtype(entry, torch.long))
    if fill == "value":
        return torch.tensor(entry["value"], dtype=_dtype(entry, None))
    if fill not in _FILLS:
        special = ["grids", "video_grids", "sizes", "images", "areas", "tiles", "coordinates"]
        special += ["image_mask", "text_mask", "frame_mask", "clips", "clip_tokens", "canvas_mask"]
        special += ["patch_mask", "flattened", "pooled", "until", "value"]
        known = ", ".join([*_FILLS, *special])
        raise SpecError(f"inputs.{name}: fill {fill!r} unknown; known: {known}")
    try:
        shape = [int(evaluate(str(size), scope)) for size in entry["shape"]]
    except MissingNameError as error:
        raise ConfigError(f"inputs.{name}: missing key {error.name!r}") from None
    if fill == "normal" and device == "meta":
        return torch.empty(shape, device="meta")
    return _FILLS[fill](shape, generator).to(_dtype(entry, torch.float32 if fill == "normal" else torch.long))


def _make_mask(fill: str, shape: list[int], grids: list[Any], scale: int) -> torch.Tensor:
    """areas: (… image, height, width), 1 inside an image; tiles: (…, image of a sample, tile), 1 for tiles it has."""
    mask = torch.zeros(shape)
    for i, (t, h, w) in enumerate(grids if fill == "areas" else grids[: shape[-2]]):
        if fill == "areas":
            mask.view(-1, *shape[-2:])[i, : h * scale, : w * scale] = 1
        else:
            mask[..., i, :t] = 1
    return mask


_FILLS: dict[str, Callable[[list[int], torch.Generator], torch.Tensor]] = {
    "normal": lambda shape, generator: torch.randn(shape, generator=generator),
    "zeros": lambda shape, _: torch.zeros(shape),
    "ones": lambda shape, _: torch.ones(shape),
    "arange": lambda shape, _: torch.arange(shape[-1]).expand(shape).clone(),
    "ids": lambda shape, generator: torch.randint(3, 20, shape, generator=generator),
}


def _dtype(entry: Json, default: torch.dtype | None) -> torch.dtype | None:
    return (
        {"float": torch.float32, "int": torch.long, "bool": torch.bool}[entry["dtype"]] if "dtype" in entry else default
    )


def takes(model: Any, name: str) -> bool:
    """Whether a model's forward has a parameter of this name."""
    inner = getattr(model, "get_base_model", lambda: model)()
    return name in inspect.signature(inner.forward).parameters
