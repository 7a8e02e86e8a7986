"""Modules that no spec describes are counted from their first batch; smart's copy takes what a live call was given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiers import mark_heavy
from tiny import CONFIG, make_llama, read_log
from torch.utils.flop_counter import FlopCounterMode

from flopcalc.monitor import TrainingMonitor

pytestmark = pytest.mark.filterwarnings("ignore")  # of PEFT and transformers, about their own arguments
SIZES = ((2, 12), (2, 12), (3, 17), (1, 9))


def adapt(name: str, **options: Any) -> Any:
    peft = pytest.importorskip("peft", reason="needs peft")
    model = make_llama()
    model.set_attn_implementation("eager")
    return peft.get_peft_model(model, getattr(peft, name)(task_type="CAUSAL_LM", **options))


class Own(torch.nn.Module):
    """A module of one's own, whose loss is its output."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(64, 16)
        self.layer = torch.nn.TransformerEncoderLayer(16, 2, 24, batch_first=True)
        self.head = torch.nn.Linear(16, 64)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        logits = self.head(self.layer(self.embed(input_ids)))
        return {"loss": torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


MODULES: dict[str, Any] = {
    "DoRA": lambda: adapt("LoraConfig", r=4, use_dora=True, target_modules=["q_proj", "down_proj"]),
    "a bias": lambda: adapt("LoraConfig", r=4, lora_bias=True, target_modules=["q_proj"]),
    "IA³": lambda: adapt("IA3Config", target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "prompt tuning": lambda: adapt("PromptTuningConfig", num_virtual_tokens=5),
    "prefix tuning": lambda: adapt("PrefixTuningConfig", num_virtual_tokens=5),
    "LoHa": lambda: adapt("LoHaConfig", r=4, target_modules=["q_proj"]),
    "AdaLoRA": lambda: adapt("AdaLoraConfig", init_r=4, target_r=2, total_step=100, target_modules=["q_proj"]),
    "OFT": lambda: adapt("OFTConfig", r=4, oft_block_size=0, target_modules=["q_proj"]),
    "own": Own,
}


def multiply(_own: Any, a: Any, b: Any, **_: Any) -> int:
    return int(2 * a[0] * a[1] * b[1])


def run_counted(model: Any, batch: dict[str, Any]) -> int:
    """Every product of a step; rotary embeddings are no model FLOPs."""
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: multiply}) as counter:
        model(**batch)["loss"].backward()
    rotary = [each for name, each in counter.get_flop_counts().items() if name.endswith("rotary_emb")]
    return int(counter.get_total_flops()) - sum(sum(each.values()) for each in rotary)


@pytest.mark.parametrize("name", mark_heavy(MODULES, ["DoRA"]))
def test_each_size_is_counted_as_it_runs(name: str, tmp_path: Path) -> None:
    model = MODULES[name]().train()
    totals = []
    with TrainingMonitor(tmp_path, CONFIG, model=model) as monitor:
        for rows, length in SIZES:
            ids = torch.arange(rows * length).reshape(rows, length) % 50 + 3
            with monitor.step():
                totals.append(run_counted(model, {"input_ids": ids, "labels": ids}))
    records = read_log(tmp_path / "flopcalc.jsonl")
    assert [record["perf/hardware_flops"] for record in records] == totals
    assert [record["perf/model_flops"] for record in records] == totals


@pytest.mark.heavy
def test_recomputed_products_are_in_no_mfu(tmp_path: Path) -> None:
    model = MODULES["DoRA"]().train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    ids = torch.arange(24).reshape(2, 12) + 3
    with TrainingMonitor(tmp_path, CONFIG, model=model) as monitor, monitor.step():
        total = run_counted(model, {"input_ids": ids, "labels": ids})
    (record,) = read_log(tmp_path / "flopcalc.jsonl")
    assert record["perf/hardware_flops"] == total
    assert 0 < record["perf/model_flops"] < total


SMART = {**CONFIG, "monitoring": {**CONFIG["monitoring"], "mfu_calculation_mode": "smart"}}


def make_llava() -> tuple[Any, dict[str, Any]]:
    import transformers

    text = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**text, image_size=28, patch_size=14),
        text_config=transformers.LlamaConfig(**text, vocab_size=101),
        image_token_id=99,
        image_token_index=99,
        vision_feature_layer=-1,
    )
    ids = torch.arange(20).reshape(2, 10) + 3
    ids[:, 1:5] = 99
    batch = {"input_ids": ids, "labels": ids, "pixel_values": torch.zeros(2, 3, 28, 28)}
    return transformers.LlavaForConditionalGeneration(config), batch


def make_classifier() -> tuple[Any, dict[str, Any]]:
    import transformers

    config = transformers.BertConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=101
    )
    batch = {"input_ids": torch.arange(20).reshape(2, 10) + 3, "labels": torch.tensor([1, 0])}
    return transformers.BertForSequenceClassification(config), batch


@pytest.mark.parametrize(
    "make", [pytest.param(make_llava, id="LLaVA"), pytest.param(make_classifier, id="BERT", marks=pytest.mark.heavy)]
)
def test_smart_measures_under_autocast(make: Any, tmp_path: Path) -> None:
    model, batch = make()
    with (
        TrainingMonitor(tmp_path, SMART, model=model.train()) as monitor,
        monitor.step(),
        torch.autocast("cpu", torch.bfloat16),
    ):
        model(**batch).loss.backward()
    (record,) = read_log(tmp_path / "flopcalc.jsonl")
    assert (record["perf/source"], record["perf/factor"]) == ("smart: operator counter at step 1", 1.0)
