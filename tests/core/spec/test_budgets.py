"""Bombs: specs, configs and traces that ask for endless work end at once, in an error that names the limit."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from flopcalc import bind, estimate_flops
from flopcalc.base.errors import FlopcalcError
from flopcalc.cli import main
from flopcalc.core.estimate.traced import Polynomials, TracedEstimator, TracedModel
from flopcalc.core.model.config import Source
from flopcalc.core.recipe.recipe import Recipe

HEAD = "family = 'x'\narchitecture = 'X'\nsource = 'x'\n"
STACK = "[[stack]]\npath = 'model'\n"
LINEAR = "{ op = 'linear', in = 'width', out = '3' }"
SECONDS = 5.0  # each takes far less; without a limit, hours


def double(form: str, first: str, count: int = 40) -> str:
    """'x0 = first', then each name stands for the one before it, twice."""
    lines = [f"x0 = {first}", *(f"x{i} = " + form.format(f"x{i - 1}") for i in range(1, count))]
    return "\n".join(lines) + "\n"


def nest(depth: int) -> dict[str, Any]:
    config: dict[str, Any] = {"model_type": "mine", "width": 5}
    return {**config, "inner": nest(depth - 1)} if depth else config


BOMBS: dict[str, tuple[str, dict[str, Any], str]] = {
    "blocks": (STACK + "ops = ['x39']\n[blocks]\n" + double("['{0}', '{0}']", f"[{LINEAR}]"), {}, "20,000 ops"),
    "blocks with keys": (
        STACK + "ops = ['x39']\n[blocks]\n" + double("[{{ block = '{0}' }}, {{ block = '{0}' }}]", f"[{LINEAR}]"),
        {},
        "20,000 ops",
    ),
    "branches": (STACK + "ops = ['x39']\n[blocks]\n" + double("[['{0}', '{0}']]", f"[{LINEAR}]"), {}, "20,000 ops"),
    "layers": (
        STACK + "repeat = '10000'\nops = [" + f"{LINEAR.replace('3', 'i + 1')}, " * 30 + "]\n",
        {},
        "20,000 ops",
    ),
    "use": (
        "".join(f"[[stack]]\nuse = 'mine'\nconfig = 'inner'\nwhen = 'has(inner)'\n# {i}\n" for i in range(10))
        + STACK
        + f"ops = [{LINEAR}]\n",
        nest(8),
        "1,000 stacks",
    ),
    "lists": (
        STACK
        + "ops = [{ op = 'linear', in = 'width', out = 'len(x39)' }]\n[dims]\n"
        + double("'[{0}, {0}]'", "'[1, 1]'"),
        {},
        "a list of more than 10,000 entries",
    ),
    "chunks": (
        STACK + "repeat = '10000'\nops = [{ op = 'linear', in = 'width', out = 'len(chunks(10 ** 5 + i, 1, 0, 0))' }]",
        {},
        "1,000,000 list entries",
    ),
    "sums": (
        STACK + f"ops = [{LINEAR[:-2]}, rows = 'sequence: x39' }}]\n[sums]\n" + double("'{0} + {0}'", "'n'"),
        {},
        "stands for more than 1000 others",
    ),
    "primes": (
        STACK + "ops = [{ op = 'embed', count = 'ngram_table_rows[0]', dim = 'width' }]\n",
        {"ngram_size": 11, "heads_per_ngram": 100, "ngram_vocab_size_base": 10**9, "ple_layer_ids": [1]},
        "with 1000 heads and 1 tables is no size",
    ),
    "dots": (STACK + f"ops = [{LINEAR}]\n[defaults]\n" + "a." * 20_000 + "a = 1\n", {}, "a key of more than 200 parts"),
    "nested lists": (STACK + f"ops = {'[' * 4000}{LINEAR}{']' * 4000}\n", {}, "nested too deeply|not valid TOML"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs(tmp_path: Path, name: str) -> None:
    text, config, words = BOMBS[name]
    path = tmp_path / "mine.toml"
    path.write_text(HEAD + text)
    start = time.process_time()
    with pytest.raises(FlopcalcError, match=words) as caught:
        bind({"model_type": "mine", "width": 5, **config}, spec=path)
    assert len(str(caught.value)) < 1000
    assert time.process_time() - start < SECONDS


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 1000},
        pytest.param({"num_hidden_layers": 10_000}, marks=pytest.mark.heavy),
        {"num_local_experts": 10**11, "num_experts_per_tok": 10**10},
    ],
)
def test_large_configs(changes: dict[str, Any]) -> None:
    """What a config may say is counted, or refused, in a moment; with LoRA too, which asks every module."""
    config = {
        "model_type": "mixtral", "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
        "num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 100, **changes,
    }  # fmt: skip
    start = time.process_time()
    for lora in (None, "r=4,targets=all-linear"):
        assert estimate_flops(config, seq_len=8, lora=lora).total > 0
    assert time.process_time() - start < SECONDS


def test_deep_json(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    config: dict[str, Any] = {"model_type": "llama"}
    for _ in range(400):
        config = {"model_type": "llava", "text_config": config}
    path.write_text(json.dumps(config))
    with pytest.raises(FlopcalcError):
        bind(path)


def test_decoding_a_trace() -> None:
    polynomials = Polynomials("decode", False, ("b * c",), {"layer": ((2,), (0,), (0,))})  # type: ignore[dict-item]
    traced = TracedModel("m", "m", {"total": 1, "trainable": 1}, {}, {}, (polynomials,), {})
    estimator = TracedEstimator(traced, Source("m", {"model_type": "m"}, "m"), Recipe())
    assert estimator(1, 3, phase="decode", context=4).total == 2 * (4 + 5 + 6)
    with pytest.raises(FlopcalcError, match="at most 100,000, not 100001"):
        estimator(1, 100_001, phase="decode")


def test_layers_of_a_trace(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "unknown", "text_config": {"num_hidden_layers": 100000}}')
    with pytest.raises(SystemExit) as caught:
        main(["estimate", str(path), "--seq", "5", "--trace"])
    assert caught.value.code == 2
    assert "num_hidden_layers is 100000: a trace runs every layer, at most 1,000 of them" in capsys.readouterr().err
