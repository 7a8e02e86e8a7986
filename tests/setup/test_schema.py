"""`flopcalc schema`: a valid schema that knows every field, and takes what the doors take."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from flopcalc.base.spelling import KEYWORDS
from flopcalc.cli import main
from flopcalc.cli.schema import make_schema
from flopcalc.setup.fields import FIELDS, GROUPS, SetupKeywords
from flopcalc.web.setups import list_page_fields

TYPES = {"string", "integer", "number", "boolean", "array", "object"}
PROPERTIES = make_schema()["properties"]


def test_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["schema"])
    assert ended.value.code == 0
    assert json.loads(capsys.readouterr().out) == make_schema()


def test_meta_schema() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft202012Validator.check_schema(make_schema())


def test_every_field() -> None:
    assert list(PROPERTIES) == ["model", *FIELDS]
    assert {each.get("x-python", name) for name, each in PROPERTIES.items()} == {
        "model",
        *SetupKeywords.__annotations__,
    }
    assert {name for name, each in PROPERTIES.items() if "x-python-only" not in each} >= {
        name for name in list_page_fields() if name != "plan_recompute"
    }


@pytest.mark.parametrize("name", FIELDS)
def test_property(name: str) -> None:
    found, field = PROPERTIES[name], FIELDS[name]
    kinds = found.get("type", [])
    assert {kinds} <= TYPES if isinstance(kinds, str) else set(kinds) <= TYPES
    assert ("type" in found) == (field.kind != "value")
    assert found["description"] == field.help
    assert found["x-group"] in GROUPS
    assert tuple(found["x-commands"]) == field.commands
    assert found.get("x-python") == KEYWORDS.get(name)
    assert str(found.get("default", "")) == field.default
    assert set(field.words) <= set(found.get("enum", ()))


SETUPS: list[tuple[dict[str, Any], str]] = [
    # a setup, and the field that is wrong in it
    ({"model": "llama-3.1-8b", "seq": "4k", "batch": 4, "gpus": "1k"}, ""),
    ({"model": "qwen2-vl", "text": 512, "image": ["640x480", [640, 480]], "freeze": "vision"}, ""),
    ({"model": "gpt2", "lengths": [512, 1024], "mtp": True, "guidance": "off", "autocast": "bf16"}, ""),
    ({"model": "gpt2", "global_batch": "16M tokens", "tp": [1, 2], "zero": "1,3", "price": "2.50$"}, ""),
    ({"model": {"model_type": "llama"}, "launch": ["a.yaml", "b.yaml"], "lora": {"r": 8}, "audio": ["30s", 2.5]}, ""),
    ({"sequ": 5}, "sequ"),
    ({"batch": 0}, "batch"),
    ({"batch": 1.5}, "batch"),
    ({"phase": "backward"}, "phase"),
    ({"spec": ["a.toml"]}, "spec"),
    ({"download": "yes"}, "download"),
    ({"price": 0}, "price"),
    ({"image": "640x480"}, "image"),
]


@pytest.mark.parametrize(("setup", "wrong"), SETUPS, ids=[str(setup)[:60] for setup, _ in SETUPS])
def test_setups(setup: dict[str, Any], wrong: str) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    found = list(jsonschema.Draft202012Validator(make_schema()).iter_errors(setup))
    assert len(found) == bool(wrong)
    assert not wrong or wrong in (*found[0].path, *found[0].message.split("'"))


def test_starts_without_torch() -> None:
    code = (
        "import sys; from flopcalc.cli import main\n"
        "try: main(['schema'])\n"
        "finally: assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
