"""`flopcalc schema`: the JSON schema of a setup, made from the table of fields."""

from __future__ import annotations

from typing import Any

import click

from flopcalc.base.spelling import KEYWORDS
from flopcalc.cli.command import Command
from flopcalc.cli.streams import show_json
from flopcalc.setup.fields import FIELDS, Field, Kind

_SIZE = {"type": ["integer", "string"], "minimum": 1}
_COUNT = {**_SIZE, "minimum": 0}
_NUMBER = {"type": ["number", "string"], "exclusiveMinimum": 0}
_TEXTS = {"type": ["string", "array"], "items": {"type": "string"}}
_TYPES: dict[Kind, dict[str, Any]] = {
    "text": {"type": "string"}, "path": {"type": "string"}, "word": {"type": "string"}, "flag": {"type": "boolean"},
    "size": _SIZE, "count": _COUNT,
    "sizes": {"type": ["array", "string"], "items": {"type": "integer", "minimum": 1}},
    "number": _NUMBER, "share": _NUMBER, "tokens": _NUMBER, "peak": {**_NUMBER, "type": ["number", "string", "object"]},
    "grids": {"type": "array", "items": {"type": ["string", "array"], "items": _SIZE}},
    "images": {"type": "array", "items": {"type": ["string", "array"], "items": _SIZE}},
    "videos": {"type": "array", "items": {"type": ["string", "array"], "items": _SIZE}},
    "seconds": {**_NUMBER, "type": ["number", "string", "array"], "items": _NUMBER}, "patterns": _TEXTS,
    "lora": {"type": ["string", "object"]}, "objective": {"type": ["string", "object"]},
    "mtp": {"type": ["integer", "boolean", "string"], "minimum": 0},
    "logits": _SIZE, "parts": _TEXTS, "guidance": {"type": ["boolean", "string"]}, "global_batch": _SIZE,
    "degrees": {"type": ["integer", "string", "array"], "minimum": 0, "items": {"type": "integer", "minimum": 0}},
    "recomputes": _TEXTS, "value": {},
    "routing": {"type": ["string", "array"], "items": {"type": ["integer", "array"], "minimum": 0, "items": _COUNT}},
}  # fmt: skip


def describe_field(name: str, field: Field) -> dict[str, Any]:
    """One field as a property; keys that begin with x- are ours."""
    found = {"description": field.help, **(_TEXTS if name == "launch" else _TYPES[field.kind])}
    if name == "autocast":  # a number format is taken too
        found["type"] = ["boolean", "string"]
    if field.words:
        found["enum"] = [*field.words, *([True, False] if field.kind == "guidance" else [])]
    if field.default:
        found["default"] = int(field.default) if field.default.isdigit() else field.default
    found |= {"x-group": field.group, "x-commands": list(field.commands)}
    found |= {"x-python": KEYWORDS[name]} if name in KEYWORDS else {}
    return found | ({} if field.in_doors else {"x-python-only": True})


def make_schema() -> dict[str, Any]:
    model = {
        "description": "A preset, a config.json, its folder, or a hub id; in Python also a mapping, an HF config "
        "or an HF model.",
        "type": ["string", "object"],
        "x-group": "model",
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A setup of flopcalc",
        "type": "object",
        "properties": {"model": model, **{name: describe_field(name, field) for name, field in FIELDS.items()}},
        "additionalProperties": False,
    }


@click.command(cls=Command)
def schema() -> None:
    """The JSON schema of a setup: every field, its type, its default and the commands that take it."""
    show_json(make_schema())
