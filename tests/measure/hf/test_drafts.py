"""DFlash's draft against its tiny module, beyond a plain training step: phases, frozen parts, LoRA, checkpointing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from drafts import DFlash
from torch.utils.checkpoint import checkpoint

from flopcalc import estimate_flops, plan, predict
from flopcalc.base.data import list_data_files, load_toml
from flopcalc.base.errors import WorkloadError
from flopcalc.core.model.bound import bind_model
from flopcalc.core.model.config import load_config
from flopcalc.measure.counters.flop_counter import count_flops
from flopcalc.measure.hf.compare import compare_bound, make_executed
from flopcalc.measure.hf.models import count_parameters

Json = dict[str, Any]
CONFIGS: list[Json] = [
    {"model_type": "dflash", **config} for config in load_toml(list_data_files("aliases")["dflash"])["configs"]
]
IDS = torch.zeros(2, 24, dtype=torch.long)
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "fc"]


def make_draft(config: Json, recipe: Json) -> DFlash:
    draft = DFlash(load_config(config).config)
    frozen = [f"{path}." for path in recipe.get("freeze", ())]
    for name, parameter in draft.named_parameters():
        parameter.requires_grad = not name.startswith(tuple(frozen))
    if "lora" in recipe:
        peft = pytest.importorskip("peft")
        draft.requires_grad_(False)
        draft = peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=ALL), draft)
    for layer in draft.layers if "recompute" in recipe else ():
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=recipe["recompute"] == "full-reentrant")
    return draft


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(
    ("workload", "recipe"),
    [
        ({"batch": 2, "seq": 24, "phase": "forward"}, {}),
        ({"batch": 2, "seq": 3, "phase": "decode", "context": 24}, {}),
        ({"mask": [20, 24], "seq": 24}, {}),
        ({"batch": 2, "seq": 24}, {"freeze": ["fc", "hidden_norm"]}),
        ({"batch": 2, "seq": 24}, {"freeze": ["layers.0"]}),
        ({"batch": 2, "seq": 24}, {"freeze": ["layers"]}),
        ({"batch": 2, "seq": 24}, {"lora": {"r": 2, "targets": "all-linear"}}),
        ({"batch": 2, "seq": 24}, {"recompute": "full"}),
        ({"batch": 2, "seq": 24}, {"recompute": "full-reentrant"}),
    ],
)
def test_a_draft_equals_the_published_code(config: Json, workload: Json, recipe: Json) -> None:
    draft = make_draft(config, recipe)
    phase = workload.get("phase", "train")
    caches: list[list[torch.Tensor]] = [[] for _ in draft.layers]
    if phase == "decode":
        with torch.no_grad():
            draft(IDS, caches)

    def step() -> None:
        if phase == "train":
            draft(IDS).sum().backward()
            return
        with torch.no_grad():  # a call for each token that the target accepted
            for ids in IDS[:, :3].split(1, dim=1) if phase == "decode" else (IDS,):
                draft(ids, caches)

    counted = count_flops(draft, step)
    total, trainable = count_parameters(draft)
    traced = {"rows": counted.rows, "total": total, "trainable": trainable, "not_counted": counted.not_counted}
    verdict = compare_bound(make_executed(bind_model(load_config(config)), recipe), workload, traced)
    assert verdict.is_equal, (verdict.different, verdict.parameters, verdict.not_counted)


@pytest.mark.parametrize("convention", ["model", "full", "hardware"])
def test_every_text_has_a_block(convention: str) -> None:
    """Texts of several lengths cost what they cost by themselves."""
    count = partial(estimate_flops, CONFIGS[0], convention=convention)
    assert count(lengths=[10, 14]).total == count(seq_len=10).total + count(seq_len=14).total


def test_a_call_by_hand() -> None:
    """Qwen3-8B's draft behind 2048 tokens: 16 queries, 2064 keys, 15 tokens with logits."""
    d, ff, keys, block, seq = 4096, 12288, 1024, 16, 2048
    config = {
        "model_type": "qwen3", "architectures": ["DFlashDraftModel"], "hidden_size": d, "intermediate_size": ff,
        "num_hidden_layers": 5, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 151936, "block_size": block, "dflash_config": {"target_layer_ids": [1, 9, 17, 25, 33]},
    }  # fmt: skip
    layer = block * (2 * d * d + 3 * d * ff) + (seq + block) * 2 * d * keys + 2 * block * (seq + block) * d
    wanted = 2 * (seq * 5 * d * d + 5 * layer + (block - 1) * d * 151936)
    estimate = estimate_flops(config, seq_len=seq, phase="forward")
    assert estimate.total == wanted
    assert estimate.parameters["total"] == 5 * d * d + 5 * (2 * d * d + 2 * d * keys + 3 * d * ff + 2 * d + 256) + 2 * d


@pytest.mark.parametrize(
    "ask",
    [
        lambda: predict(CONFIGS[0], device="h200", seq_len=64),
        lambda: plan(CONFIGS[0], device="h200", gpus=8, tokens="1B", seq_len=64),
    ],
)
def test_its_time_is_not_predicted(ask: Callable[[], object]) -> None:
    with pytest.raises(WorkloadError, match="its time is not predicted, because its attention over blocks"):
        ask()
