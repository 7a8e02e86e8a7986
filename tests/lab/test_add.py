"""`flopcalc add`: the steps of shipping a spec, and what is left of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from flopcalc.cli.add import add

pytest.importorskip("torch")


def test_a_type_without_a_spec() -> None:
    found = CliRunner().invoke(add, ["nosuch", "--json"])
    steps = json.loads(found.output)
    assert steps["left"] == ["nosuch spec"]
    assert "write model_specs/specs/nosuch.toml" in steps["types"]["nosuch"][0]["text"]
    assert found.exit_code == 1


def test_a_part_of_other_models_ends_at_its_spec() -> None:
    found = CliRunner().invoke(add, ["pixtral"])
    assert (found.exit_code, "is a part of other models" in found.output) == (0, True)


def test_an_alias_is_done_with_its_witness() -> None:
    found = CliRunner().invoke(add, ["llada", "--json"])
    [step] = json.loads(found.output)["types"]["llada"]
    assert (found.exit_code, step["name"], step["state"]) == (0, "alias", "done")
    assert step["text"].startswith("a key map onto llama, proved by module: pytest --all")


HERRING = """
extends      = "llama"
architecture = "HerringForCausalLM"
source       = "herring 1.0: modeling_herring.py"
"""
TINY = """
[[configs]]
hidden_size = 24
intermediate_size = 40
num_hidden_layers = 2
num_attention_heads = 6
num_key_value_heads = 3
vocab_size = 101
tie_word_embeddings = false
"""


@pytest.mark.parametrize(("example", "step"), [(None, "example"), (TINY, "class")])
def test_a_type_that_transformers_lacks_is_told_of_a_witness(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, example: str | None, step: str
) -> None:
    monkeypatch.setenv("FLOPCALC_DATA", str(tmp_path))
    for folder, text in (("specs", HERRING), ("examples", example)):
        (tmp_path / folder).mkdir()
        if text is not None:
            (tmp_path / folder / "herring.toml").write_text(text)
    found = CliRunner().invoke(add, ["herring", "--check", "--json"])
    steps = json.loads(found.output)
    assert (found.exit_code, steps["left"]) == (1, [f"herring {step}"])
    assert 'witness = "module:HerringForCausalLM"' in steps["types"]["herring"][-1]["text"]


def test_a_wheel_has_no_lab(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lab.add", None)
    found = CliRunner().invoke(add, ["vit"])
    assert str(found.exception) == "add needs a checkout of flopcalc: an installed package has no lab/"


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore")  # torch and HF advise on their own code
def test_a_shipped_type_is_done() -> None:
    found = CliRunner().invoke(add, ["siglip2_vision_model", "--check", "--json"])
    steps = {step["name"]: step["state"] for step in json.loads(found.output)["types"]["siglip2_vision_model"]}
    assert [name for name, state in steps.items() if state == "failed"] == []
    assert (steps["rows"], steps["flags"], steps["traces"], steps["page"]) == ("done",) * 4
