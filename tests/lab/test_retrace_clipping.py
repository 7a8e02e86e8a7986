"""The recorded Opacus steps still hold, counted anew; what the core refuses does go wrong in Opacus."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from flopcalc import bind
from flopcalc.base.errors import RecipeError
from lab import truth_clipping

pytestmark = pytest.mark.filterwarnings("ignore")  # opacus and torch advise on training, which this is not
LLAMA = truth_clipping.DEEP["llama"][0][0]
FULL_REENTRANT = {"recompute": "full-reentrant"}


def test_a_part_still_holds() -> None:
    again = truth_clipping.record("gpt2", 1)
    assert len(again["configs"][0]["cases"]) == 3
    assert truth_clipping.find_differences(truth_clipping.load("gpt2"), again, is_part=True) == []


@pytest.mark.heavy
@pytest.mark.parametrize("name", truth_clipping.list_types())
def test_counts_still_hold(name: str) -> None:
    different = truth_clipping.find_differences(truth_clipping.load(name), truth_clipping.record(name))
    assert not different, "\n".join([f"{len(different)} differ", *different])


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("llama", {"lora": {"r": 2, "targets": ["q_proj"], "save": ["norm"]}}),  # PEFT: whatever ends in it
        ("gpt2", {"lora": {"r": 2, "targets": ["all-linear"], "save": ["c_attn"]}}),  # and adapts nothing that it saves
        ("persimmon", {"train_only": ["*.q_layernorm"]}),
    ],
)
def test_recipes_that_random_ones_found_wrong(name: str, recipe: dict[str, Any]) -> None:
    config = truth_clipping.list_configs(name)[0][0]
    for mode in ("none", "fast"):
        counted = sum(truth_clipping.count_step(config, {"batch": 2, "seq": 5}, recipe, mode).values())
        settings: dict[str, Any] = {"convention": "hardware", "attention_kernel": "eager", "clipping": mode}
        assert bind(config, recipe=recipe, **settings)(2, 5).total == counted


def test_a_changed_number_is_found() -> None:
    truth = truth_clipping.load("llama")
    changed = json.loads(json.dumps(truth))
    changed["configs"][0]["cases"][0]["total"] += 1
    del changed["configs"][0]["cases"][1]
    assert len(truth_clipping.find_differences(truth, changed)) == 2
    assert len(truth_clipping.find_differences(truth, changed, is_part=True)) == 1


@pytest.mark.parametrize(
    ("config", "recipe", "clipping", "words"),
    [
        ({**LLAMA, "tie_word_embeddings": True}, {}, "ghost", "Parameter tying is not supported with Ghost Clipping"),
        (LLAMA, {"recompute": "full"}, "ghost", "Parameter tying is not supported with Ghost Clipping"),
        (LLAMA, {"recompute": "full"}, "fast", "_norm_sample"),
        (LLAMA, {"recompute": "full"}, "hooks", "grad_sample of None"),
    ],
)
def test_what_is_refused_goes_wrong(config: Any, recipe: dict[str, Any], clipping: str, words: str) -> None:
    with pytest.raises(RecipeError):
        bind(config, recipe={**recipe, "clipping": clipping})
    with pytest.raises((NotImplementedError, RuntimeError, AttributeError), match=words):
        truth_clipping.count_step(config, {"batch": 2, "seq": 5}, recipe, clipping)


def test_live_models() -> None:
    """A live model says what trains and is recomputed, `clipping` the rest; Opacus' hooks on it change nothing."""
    from flopcalc.measure.hf.models import apply_recipe, build_model

    def check(recipe: dict[str, Any], change: Callable[[Any], Any] = lambda model: model) -> None:
        model = change(apply_recipe(build_model(LLAMA), recipe))
        settings: dict[str, Any] = {"convention": "hardware", "attention_kernel": "eager", "clipping": "hooks"}
        told = bind(LLAMA, recipe=recipe, **settings)(3, 7).by_module(per_layer=True)
        assert bind(model, **settings)(3, 7).by_module(per_layer=True) == told
        del settings["clipping"]
        assert bind(model, recipe={"clipping": "hooks"}, **settings)(3, 7).by_module(per_layer=True) == told

    check({})
    check({"lora": {"r": 2, "targets": ["q_proj", "down_proj"]}})
    check({"freeze": ["model.layers.0"], **FULL_REENTRANT})
    from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping

    for wrapper in (GradSampleModule, GradSampleModuleFastGradientClipping):
        check({}, partial(wrapper, strict=False))
        check({"lora": {"r": 2, "targets": ["q_proj"], "save": ["norm"]}}, partial(wrapper, strict=False))
    with pytest.raises(RecipeError, match="take recompute full-reentrant"):
        bind(apply_recipe(build_model(LLAMA), {"recompute": "full"}), clipping="hooks")
