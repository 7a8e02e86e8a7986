"""What a reader of an estimate should know, in sentences: what was left out, assumed, or taken from a table."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from flopcalc.base.errors import find_nearest, format_value
from flopcalc.base.spelling import spell
from flopcalc.base.units import format_flops
from flopcalc.base.vocabulary import Mask
from flopcalc.core.count.products import CountedRow
from flopcalc.core.estimate.estimate import Estimator
from flopcalc.core.model.bound import BoundModel, find_architecture
from flopcalc.core.model.heads import find_ending, has_unknown_head, is_same_class
from flopcalc.core.model.ops import Attend, Linear, Op, iterate, join
from flopcalc.core.spec.aliases import MARK
from flopcalc.core.workload.workload import Workload

if TYPE_CHECKING:
    from flopcalc.hardware.kernels import KernelTable, TileTable

_NAMED = 4  # ops that a note names


def describe_work(estimator: Estimator, model: BoundModel, load: Workload) -> list[str]:
    """Notes on the model, its inputs and its recipe."""
    spec, recipe = model.spec, estimator.recipe
    notes = [note for note in (model.source.note, spec.note) if note]
    notes += _list_unread(model)
    named = "" if model.source.module is not None else find_architecture(model.source)
    if named and model.head.kind == "lm" and not is_same_class(named, spec.architecture):
        notes.append(f"the config names {format_value(named)[1:-1]}; counted as {spec.architecture}")
    is_unknown = bool(named) and model.head.table == "none" and has_unknown_head(named)
    if is_unknown:
        notes.append(f"the config names {format_value(named)[1:-1]}, whose head is not known: counted without one")
    elif model.head.kind != "lm" and not model.head.note and (not named or find_ending(named) != model.head.table):
        notes.append(f"counted with head {model.head} in place of the one of {spec.architecture}")
    elif model.head.kind != "lm" and _is_foreign(named, model):
        named = format_value(named)[1:-1]
        notes.append(f"the config names {named}; its body is counted as that of {spec.architecture}")
    if recipe.lora is not None and model.head.kind in ("sequence", "token"):
        notes.append("LoRA: the head trains too, as PEFT has it for task types SEQ_CLS, TOKEN_CLS and QUESTION_ANS")
    if model.vision is not None and not load.all_grids and not model.is_part and load.phase != "decode":
        example = spell("image", "1024x768") if model.vision.kind == "grid" else spell("image", "336x336")
        notes.append(f"no image given, so the vision tower is not counted; add one with {example}")
    if model.vision is not None and model.has_text and not load.seq and load.decoder is None:
        notes.append(f"no text given, so the text tower is not counted; add some with {spell('seq', 'N')}")
    if model.audio is not None and not load.clips and load.phase != "decode":
        notes.append(f"no audio given, so the audio tower is not counted; add some with {spell('audio', 'SECONDS')}")
    longest = max(side.longest for side in (load, load.decoder) if side is not None)
    if model.position_limit and model.position_kind == "rotary" and longest > model.position_limit:
        notes.append(
            f"length {longest} is beyond max_position_embeddings = {model.position_limit}"
            + ", its type's default" * (str(model.position_limit) not in str(model.source.config))
        )
    if load.phase == "train" and not estimator.trains(load):
        notes.append("nothing trains under this recipe, so there is no backward pass")
    side = load.decoder or load
    if load.phase == "decode" and side.seq > 1 and not side.context:
        length = spell("seq" if load.decoder is None else "decoder_seq", 1)
        notes.append(
            f"this decodes {side.seq:,} new tokens after an empty cache; for one token after {side.seq:,} cached ones "
            f"give {length} and {spell('context', side.seq)}"
        )
    if isinstance(side.logits, int) and side.logits > side.seq:
        notes.append(f"logits asked for {side.logits} positions, a sequence has {side.seq}: all of them counted")
    if spec.reentrant and recipe.recompute == "full-reentrant" and load.phase == "train":
        notes.append(spec.reentrant)
    if side.phase == "decode":
        notes += _describe_absorbed(estimator, load)
    if load.documents is not None and len(load.documents) > 1 and estimator.attention_kernel != "flash":
        notes.append(
            f"packed documents: SDPA masks them, so {estimator.attention_kernel} attention computes every pair of the "
            f"row (see hardware), which MFU does not count; {spell('attention_kernel', 'flash')}, HF's "
            "flash_attention_2, computes each document alone"
        )
    if recipe.recompute != "none" and load.phase != "train":
        notes.append(f"phase {load.phase} has no backward pass, so nothing is recomputed")
    return [*notes, model.head.note] if model.head.note else notes


# Names that other code gives to sizes of a config.
_OTHER_NAMES = {
    "num_hidden_layers": ("n_layers", "n_layer", "num_layers"),
    "num_attention_heads": ("n_heads", "n_head", "num_heads"),
    "num_key_value_heads": ("n_kv_heads", "n_kv_head", "num_kv_heads", "num_kv_head", "n_head_kv", "kv_heads"),
    "hidden_size": ("d_model", "n_embd", "dim"),
    "intermediate_size": ("d_ff", "ffn_dim", "n_inner", "ffn_hidden_size"),
    "num_experts_per_tok": ("top_k", "moe_top_k", "num_experts_per_token"),
}


def _list_unread(model: BoundModel) -> list[str]:
    """Keys that a config written by hand has under a name that its type does not read, and that say something else."""
    config, spec = model.source.config, model.spec
    read = {
        *spec.required,
        *spec.defaults,
        *spec.renamed,
        *(name for names in spec.renamed.values() for name in names),
        *re.findall(r"\w+", str(spec.dims)),
    }
    typed = {
        key: near[0]
        for key, value in config.items()
        if isinstance(value, int) and key not in read and not key.endswith("_token_id")
        and (near := find_nearest(key, read - config.keys(), 1, 0.9))
    }  # fmt: skip
    return (
        [f"{spec.name} does not read {key} = {config[key]}: did you mean {near}?" for key, near in typed.items()]
        + [
            f"{spec.name} does not read {other} = {config[other]}: "
            + (f"{name} = {config[name]} is counted" if name in config else f"did you mean {name}?")
            for name, others in _OTHER_NAMES.items()
            for other in others
            if isinstance(config.get(other), int)
            and other not in typed
            and config.get(name) != config[other]
            and name in read
            and other not in read
        ]
        + [
            f"{spec.name} does not read {key} = {config[key]}: it is counted without"
            for key in ("n_experts", "num_experts", "num_local_experts", "n_routed_experts", "sliding_window")
            if isinstance(config.get(key), int)
            and config[key] > 1
            and key not in {*read, *typed}
            and (key != "sliding_window" or config.get("use_sliding_window", True))
        ]
    )


def _describe_absorbed(estimator: Estimator, load: Workload) -> list[str]:
    """What serving engines execute of latent attention in decode, which no convention counts: docs/formulas.md."""
    config = estimator.source.config
    inner = config.get("text_config")
    rope = {**config, **(inner if isinstance(inner, dict) else {})}.get("qk_rope_head_dim")
    if estimator.origin != "spec" or not isinstance(rope, int):
        return []
    more = 0
    for counted in estimator.rows(load, "model"):
        op = counted.row.op
        if isinstance(op, Attend) and op.latent:  # a pair costs latent + (latent - rope) in place of qk + v
            own = counted.flops.forward * counted.block.copies
            more += own * (2 * op.latent - rope - op.qk - op.v) // (op.qk + op.v)
    if not more:
        return []
    model, full = (sum(estimator.count(load, convention)) for convention in ("model", "full"))
    return [
        f"latent attention (MLA) in decode: serving engines absorb its up-projections and execute "
        f"{format_flops(model + more)} ({model + more:,}); model counts {format_flops(model)}, and full "
        f"{format_flops(full)}, because HF's code expands every cached latent at each new token: so an HFU is many "
        "times the MFU"
    ]


def _is_foreign(named: str, model: BoundModel) -> bool:
    """Whether a config names a class of another family than its spec's; an alias has said so already."""
    from flopcalc.core.model.classes import cut_ending  # imported lazily: few models need it

    if MARK in model.source.config:
        return False
    given, own = (cut_ending(name).replace("_", "").lower() for name in (named, model.spec.architecture))
    return cut_ending(named) != named and not (given.startswith(own) or own.startswith(given))


def describe_formats(estimator: Estimator, load: Workload) -> list[str]:
    """What a quantization_config leaves out or takes by default, and weights that do not train as they are stored."""
    formats, recipe = estimator.formats, estimator.recipe
    quantization = formats.quantization
    notes: list[str] = []
    stored = estimator.source.stored
    if stored not in ("", formats.model) and quantization is None and formats.weights is None:
        notes.append(
            f"published weights are in {stored}, counted as {formats.model}: {spell('weights', stored)} counts them"
        )
    if quantization is not None:
        has_experts = any(row.op.kind == "linear" and row.op.copies > 1 for _, row, _ in estimator.rows(load, "full"))
        notes += [note for note in quantization.notes if has_experts or "experts" not in note]
    if load.phase == "train" and (quantization is not None or formats.weights is not None):
        found = {
            row.numbers.weight.name
            for _, row, _ in estimator.rows(load, "full")
            if row.trains_weight and row.numbers.weight.is_quantized and row.numbers.weight.bits != 8
        }
        if found:
            notes.append(
                f"weights in {', '.join(sorted(found))} do not train themselves: {spell('lora')} trains "
                "adapters on top of "
                f"them, {spell('weights', 'bf16')} counts plain training"
            )
    kept: dict[str, int] = {}
    if formats.kept and not formats.autocast:
        kept = {
            row.op.name.rpartition(".")[2]: 0
            for _, row, _ in estimator.rows(load, "full")
            if isinstance(row.op, Linear) and not row.numbers.weight.is_quantized and row.numbers.weight.name == "fp32"
        }
        if kept:
            keeper = "GGUF" if quantization is not None and quantization.method == "gguf" else "transformers"
            notes.append(
                f"{keeper} keeps {', '.join(kept)} in float32 and computes {'it' if len(kept) == 1 else 'them'} in "
                f"float32: {spell('compute', formats.model)} counts all in {formats.model}"
            )
    if formats.casts:
        rows = [(block, row) for block, row, values in estimator.rows(load, "full") if row.op.float32 and any(values)]
        rows = [(block, row) for block, row in rows if row.numbers.compute == "fp32"]
        cast = {join(block.path, row.op.name).rpartition(".")[2]: 0 for block, row in rows}
        cast = {name: 0 for name in cast if name not in kept}
        if cast:
            notes.append(
                f"transformers' code computes {', '.join(cast)} in float32: {spell('compute', formats.model)} "
                "counts all in "
                f"{formats.model}"
            )
    is_float = formats.adapter == "fp32" != formats.model and not (formats.autocast or formats.compute)
    if recipe.lora is not None and is_float and load.phase == "train":
        notes.append(
            f"LoRA's adapters are float32, as PEFT keeps them, and compute in float32: {spell('autocast', True)} runs "
            "them in bf16"
        )
    return notes


def describe_kernels(
    estimator: Estimator,
    load: Workload,
    kernels: KernelTable | None,
    tiles: TileTable | None,
    padding: list[CountedRow],
) -> list[str]:
    """What the hardware count takes from tables, and where a query is outside them."""
    notes = []
    if load.phase != "decode" and kernels is None:
        backward = "; backward forms the scores again" if load.phase == "train" else ""
        rule = f"causal attention counted in blocks of 128, no measured table{backward}"
        notes.append(f"kernel {estimator.attention_kernel}: {rule}")
    elif load.phase != "decode" and kernels is not None:
        asked: dict[tuple[int, int], set[tuple[Mask, int]]] = {}
        for _, row, values in estimator.rows(load, "hardware"):
            if isinstance(row.op, Attend) and row.find("padding") is None and any(values):
                calls = row.op.rows.attention_calls(load, row.op.times)
                asked.setdefault((row.op.qk, row.op.v), set()).update(calls)
        alike = "; measured in bf16, taken for fp16 too" if estimator.formats.attention == "fp16" else ""
        notes.append(f"kernel {estimator.attention_kernel}: {kernels.describe(asked)}{alike}")
    ops = [row.op for _, row, _ in padding if isinstance(row.op, Linear)]
    if ops and tiles is not None:
        known = [
            op for op in ops if op.copies == 1 and tiles.find(op.rows.count(load, "full") * op.times, op.n_out, op.n_in)
        ]
        for found, source in (
            (len(known), f"as measured on {tiles.device} (tables gemm and padding)"),
            (len(ops) - len(known), "by a model of the kernels' tiles"),
        ):
            if found:
                notes.append(f"tile padding of {found} product{'s' if found > 1 else ''} {source}")
    return notes


def describe_inferred(estimator: Estimator) -> list[str]:
    """Keys that a user's spec leaves out, and what was taken in their place."""
    spec, notes = estimator.spec, []
    found: dict[str, dict[str, Op]] = {}  # key -> name of an op -> the op
    for chain in (chain for stage in estimator.stages for chain in stage.kinds):
        for op in iterate(chain):
            for key in op.inferred if op.name in spec.own_ops else ():
                found.setdefault(key, {}).setdefault(op.name or op.kind, op)
    for name, op in found.pop("kv_heads", {}).items():
        assert isinstance(op, Attend)
        notes.append(
            f"{spec.file} says no kv_heads for {name}: {op.kv_heads} were inferred from the widths of its "
            "projections; add kv_heads to the spec"
        )
    if found:
        said = "; ".join(f"no {key} for {_list_names(list(names))}" for key, names in found.items())
        notes.append(
            f"{spec.file} says {said}: taken from the order of its ops; add what is wrong (docs/specs.md, Roles)"
        )
    stage = next((stage for stage in estimator.stages if stage.is_width_inferred), None)
    if stage is not None:
        notes.append(
            f"{spec.file} says no width for {stage.path}, and has no dim d: {stage.width} was inferred from its first "
            "op; add width to the stack"
        )
    return notes


def _list_names(names: list[str]) -> str:
    left = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + left
