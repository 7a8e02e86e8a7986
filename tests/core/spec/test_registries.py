"""Snapshots of public registries: what is counted is found from the data as it is, and the rest has reasons."""

from __future__ import annotations

import json

import pytest

from flopcalc.cli import main
from flopcalc.core.spec.registries import Registry, load_registries

REGISTRIES = {registry.name: registry for registry in load_registries()}
# What was counted when this was written: less means that something was lost.
LEAST = {"ms-swift": 0.97, "vLLM": 0.85, "SGLang": 0.85}


@pytest.mark.parametrize("name", LEAST)
def test_shares(name: str) -> None:
    registry = REGISTRIES[name]
    assert registry.supported / registry.total >= LEAST[name]
    assert registry.total == sum(item.size for item in registry.items)


def test_sizes_of_the_snapshots() -> None:
    swift, vllm, sglang = (REGISTRIES[name] for name in LEAST)
    assert (swift.total, len(swift.untold)) == (1153, 9)
    assert (vllm.total, {key: len(names) for key, names in vllm.apart.items()}) == (316, {"drafts": 57, "generic": 10})
    assert (sglang.total, len(sglang.apart["drafts"])) == (205, 33)


def find(registry: Registry, name: str) -> str | None:
    return next(item.spec for item in registry.items if item.name == name)


@pytest.mark.parametrize(
    ("registry", "name", "counted"),
    [
        ("ms-swift", "internvl_chat", "internvl_chat"),
        ("ms-swift", "qwen", "qwen"),
        ("ms-swift", "qwen_vl", "qwen_vl"),
        ("ms-swift", "qwen_audio", None),  # the class of qwen, and keys that its alias refuses
        ("vLLM", "LlamaForCausalLM", "llama"),
        ("vLLM", "LLaMAForCausalLM", "llama"),
        ("vLLM", "PhiMoEForCausalLM", "phimoe"),
        ("vLLM", "Terratorch", None),
        ("SGLang", "InternLM2ForCausalLM", "internlm2"),
    ],
)
def test_what_counts_a_class(registry: str, name: str, counted: str | None) -> None:
    assert find(REGISTRIES[registry], name) == counted


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    def run(*arguments: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main(["models", "--coverage", *arguments])
        assert not ended.value.code
        return capsys.readouterr().out

    found = {each["registry"]: each for each in json.loads(run("internvl", "--json"))["registries"]}
    assert found["ms-swift"]["supported"] == found["ms-swift"]["total"] >= 108
    assert "no language model" in run("Terratorch")
