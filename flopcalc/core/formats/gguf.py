"""GGUF's weights: every tensor has a block format of its own, as a file lists them or one of llama.cpp's mixes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flopcalc.base.errors import RecipeError, format_nearest
from flopcalc.base.number_formats import name_format
from flopcalc.core.formats.quantization import Kind, Pattern, Quantization, QuantizationRule
from flopcalc.core.formats.stored import load_stored, make_plain
from flopcalc.core.model.gguf import TensorTypes, load_tables
from flopcalc.core.model.ops import Attend, Linear, Stage, iterate

_KINDS: dict[str, tuple[Kind, ...]] = {"token_embd": ("embed",), "output": ("head",)}


def read_types(value: object, model_type: str, stages: Sequence[Stage]) -> Quantization | None:
    """The rules of a file's list of tensors, or of a mix by its name; None for any other format."""
    tables = load_tables()
    types = value if isinstance(value, TensorTypes) else None
    if types is None:
        name = name_format(value)
        if name not in tables["mixes"]["rows"]:
            return None
        types = _choose_types(name, tables["mixes"], model_type, stages)
    # A gate of one output is a vector to GGUF: it stays as it is.
    rules = [QuantizationRule(None, ("linear",), (Pattern("shared_expert_gate", "name"),))]
    for tensor, layers, stored in types.rows:
        patterns: tuple[Pattern, ...] = ()
        if tensor in tables["modules"]:
            numbers = "|".join(map(str, layers))  # \D*: the first number of a name is that of its layer
            patterns = (Pattern(rf"\D*\.(?:{numbers})\..*{tables['modules'][tensor]}$", "regex"),)
        found = load_stored().get(stored) or make_plain(stored)
        rules.append(QuantizationRule(found, _KINDS.get(tensor, ("linear", "expert")), patterns, is_language=True))
    return Quantization("gguf", tuple(rules))


def _choose_types(name: str, mixes: dict[str, Any], model_type: str, stages: Sequence[Stage]) -> TensorTypes:
    """What llama.cpp makes of a model's tensors."""
    if model_type not in mixes["types"] or not stages:
        raise RecipeError(
            f"weights {name}: which tensors of {model_type!r} llama.cpp stores how is not known here."
            f"{format_nearest(model_type, mixes['types'])} Known: {', '.join(mixes['types'])}; give the .gguf file in "
            f"place of the model, or one block format for all linear layers, such as {mixes['rows'][name][0]}"
        )
    ops = [op for stage in stages for chain in stage.kinds for op in iterate(chain)]
    count = sum(len(stage.layers) for stage in stages if stage.repeated and stage.group == "language")
    shares = any(op.heads != op.kv_heads for op in ops if isinstance(op, Attend))
    linears = [op for op in ops if isinstance(op, Linear)]
    holds = {
        "eight": max(op.copies for op in linears) == 8,
        "grouped": any(op.heads >= 4 * op.kv_heads for op in ops if isinstance(op, Attend)),
        "large": count == 80 and shares and model_type in mixes["large"],
    }
    most, *rows = mixes["rows"][name]
    head = most if most == "q8_0" else mixes["head"]
    table = head if any(op.tied for op in linears) else most
    chosen = [
        (tensor, _pick_layers(where, count), stored)
        for tensor, where, stored, *needed in rows
        if all(holds[word] for word in needed)
    ]
    return TensorTypes((("token_embd", (), table), ("output", (), head), *chosen, ("", (), most)))


def _pick_layers(where: str, count: int) -> tuple[int, ...]:
    """The layers that a word of a mix names."""
    if where == "some":
        eighth, last = count // 8, 7 * count // 8
        return tuple(layer for layer in range(count) if not eighth <= layer < last or (layer - eighth) % 3 == 2)
    many, _, by = where.partition("/")
    return tuple(range(count if where == "all" else count // int(by) if by else int(many)))
