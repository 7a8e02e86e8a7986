"""A stage of a pipeline is counted by itself: as torch's counter sees it, and all of them together as the model."""

from __future__ import annotations

from typing import Any

import pytest

import flopcalc
from flopcalc.base.errors import ConfigError
from flopcalc.core.estimate.counted import CountedEstimator
from flopcalc.monitor.model import cut_to_stage

CONFIG: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "attn_implementation": "eager",
}  # fmt: skip
KINDS = {  # with layers that are all alike, and with some that look at a window alone
    "llama": {},
    "gemma3_text": {"sliding_window": 4, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
}
ROWS, LENGTH, SPLIT = 2, 12, 3  # layers of the first stage


def build(model_type: str, **changed: Any) -> tuple[Any, CountedEstimator]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **CONFIG, **KINDS[model_type], **changed)
    whole = flopcalc.bind(config, convention="full", attention_kernel="eager")
    assert isinstance(whole, CountedEstimator)
    return AutoModelForCausalLM.from_config(config), whole


def cut(model: Any, is_first: bool) -> Any:
    """As people cut HF's models: layers are deleted from the list, and what the stage lacks does nothing."""
    import torch

    inner = model.model
    inner.layers = inner.layers[:SPLIT] if is_first else inner.layers[SPLIT:]
    for holder, name in ((inner, "norm"), (model, "lm_head")) if is_first else ((inner, "embed_tokens"),):
        setattr(holder, name, torch.nn.Identity())
    return model


def count(stage: Any, is_first: bool) -> tuple[int, int]:
    """FLOPs of forward and backward that torch's own counter sees."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    given = torch.ones(ROWS, LENGTH, dtype=torch.long) if is_first else torch.ones(ROWS, LENGTH, 32, requires_grad=True)
    with FlopCounterMode(display=False) as forward:
        out = stage(**{"input_ids" if is_first else "inputs_embeds": given}, use_cache=False).logits
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize("model_type", KINDS)
def test_stages_are_what_they_execute_and_add_up(model_type: str) -> None:
    found = []
    for is_first in (True, False):
        model, whole = build(model_type)
        stage = cut(model, is_first)
        part = cut_to_stage(whole, stage)
        assert part is not None
        assert part[1] is is_first
        flops = part[0](ROWS, LENGTH)
        assert (flops.forward, flops.backward) == count(stage, is_first)
        model_flops = part[0].change(convention="model")(ROWS, LENGTH)
        found.append((model_flops.forward, model_flops.backward))
    told = whole.change(convention="model")(ROWS, LENGTH)
    assert tuple(map(sum, zip(*found, strict=True))) == (told.forward, told.backward)


def test_keys_number_layers_that_do_not_know_their_number() -> None:
    import torch

    model, whole = build("gemma3_text")
    stage = cut(model, is_first=False)
    for each in stage.modules():
        if hasattr(each, "layer_idx"):
            del each.layer_idx
    with pytest.raises(ConfigError, match=r"model\.layers has layers of several kinds"):
        cut_to_stage(whole, stage)
    (layer,) = stage.model.layers
    stage.model.layers = torch.nn.ModuleDict({"3": layer})
    part = cut_to_stage(whole, torch.nn.Sequential(stage))  # under whatever name
    assert part is not None
    assert {each.first for each in part[0].stages if each.repeated} == {3}


def test_a_tied_head_has_a_weight_of_its_own_in_the_last_stage() -> None:
    model, whole = build("llama", tie_word_embeddings=True)
    part = cut_to_stage(whole, cut(model, is_first=False))
    assert part is not None
    assert part[0](ROWS, LENGTH).forward == count(model, is_first=False)[0]


def test_other_modules_are_told_apart() -> None:
    import torch

    model, whole = build("llama")
    assert cut_to_stage(whole, torch.nn.Linear(2, 2)) is None
    del model.model.layers[0].mlp.up_proj
    with pytest.raises(ConfigError, match=r"not made of its whole layers \(model\.layers\.0\.mlp\.up_proj\.weight\)"):
        cut_to_stage(whole, model)
