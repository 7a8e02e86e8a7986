"""Asked the same question about one GPU, predict and plan give the same seconds and the same bytes."""

from __future__ import annotations

from typing import Any

import pytest
from tiers import thin

from flopcalc import plan, predict
from flopcalc.base.vocabulary import EXECUTIONS, Execution
from flopcalc.core.workload.workload import make_workload
from flopcalc.planning.results import PlannedLayout
from flopcalc.prediction.step import predict_estimate

TINY = {"num_hidden_layers": 2, "vocab_size": 512, "hidden_size": 256, "num_attention_heads": 8}
MODELS: dict[str, Any] = {
    "dense": {**TINY, "model_type": "llama", "intermediate_size": 512},
    "grouped": {**TINY, "model_type": "qwen2", "intermediate_size": 512, "num_key_value_heads": 2},
    "experts": {
        **TINY, "model_type": "mixtral", "intermediate_size": 256, "num_key_value_heads": 2, "num_local_experts": 4,
        "num_experts_per_tok": 2, "sliding_window": None,
    },
    "tied": "gpt2",
    "window": {**TINY, "model_type": "mistral", "intermediate_size": 512, "sliding_window": 64},
    "seeing": "qwen2-vl-2b",
    "without SDPA": "gemma-2-2b",
    "without a recording": {**TINY, "model_type": "phimoe", "intermediate_size": 256, "num_local_experts": 4},
}  # fmt: skip


def plan_one(model: Any, seq: int, micro_batch: int, batches: int, recompute: str, **options: Any) -> PlannedLayout:
    """The only layout of one GPU."""
    found = plan(
        model, tokens=1, device="h200", gpus=1, seq_len=seq, global_batch=micro_batch * batches,
        micro_batch=micro_batch, recompute=recompute, **options,
    )  # fmt: skip
    assert found.layouts == 1
    return found.best[0]


def check(model: Any, *, seq: int = 256, batches: int = 1, recompute: str = "none", **options: Any) -> None:
    options = {"execution": "eager", "optimizer": "adamw", **options}
    recipe = options.pop("recipe", {})
    one = predict(
        model, device="h200", batch_size=2, seq_len=seq, grad_accum=batches, advise=False,
        recipe={**recipe, "recompute": recompute}, transformers="5.17", **options,
    )  # fmt: skip
    other = plan_one(model, seq, 2, batches, recompute, recipe=recipe, **options)
    assert one.memory is not None
    assert other.memory.peak == one.memory.peak
    assert other.memory.at_peak == one.memory.at_peak
    assert (other.step.low, other.step.seconds, other.step.high) == pytest.approx(tuple(one.step_time_s), rel=1e-12)
    assert other.mfu == pytest.approx(one.mfu, rel=1e-12)
    assert other.tokens_per_s == pytest.approx(one.tokens_per_s, rel=1e-12)


@pytest.mark.parametrize("execution", thin(EXECUTIONS, 2))
@pytest.mark.parametrize("name", MODELS)
def test_the_same_question_has_one_answer(name: str, execution: Execution) -> None:
    check(MODELS[name], execution=execution)


@pytest.mark.parametrize("execution", thin(EXECUTIONS, 3))
@pytest.mark.parametrize(
    "options",
    [
        {"recompute": "full"},
        {"recompute": "full-reentrant"},
        {"batches": 5},
        {"optimizer": "adamw-master"},
        {"optimizer": "adamw-foreach", "batches": 2},
        {"optimizer": "none"},
        {"attention_kernel": "eager"},
        {"attention_kernel": "flash", "recompute": "full"},
        {"dtype": "fp16"},
        {"recipe": {"lora": {"r": 8, "targets": ["q_proj", "v_proj"]}}},
        {"recipe": {"train_only": ["lm_head"]}},
        {"seq": 4096},
    ],
)
def test_whatever_the_recipe(options: dict[str, Any], execution: Execution) -> None:
    check(MODELS["grouped"], execution=execution, **options)


LORA = {"lora": {"r": 16, "targets": ["q_proj", "k_proj", "v_proj", "o_proj"]}}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("dense", {"recipe": {"freeze": ["model.embed_tokens"]}, "seq": 1000}),
        ("dense", {"recipe": {"lora": {"r": 4, "targets": "all-linear"}}, "recompute": "full", "seq": 8192}),
        ("dense", {"recipe": LORA, "weights": "nf4"}),
        ("experts", {"recompute": "full"}),
        ("experts", {"recipe": LORA, "batches": 3}),
        ("experts", {"recipe": {"train_only": ["*.gate"]}, "recompute": "full-reentrant", "seq": 2048}),
        ("window", {"recipe": LORA, "seq": 2048}),
        ("seeing", {"recipe": {"freeze": ["model.visual"]}, "recompute": "full"}),
        ("seeing", {"recipe": LORA, "seq": 3000}),
        ("without a recording", {"recipe": LORA, "recompute": "full"}),
    ],
)
def test_models_under_recipes(name: str, options: dict[str, Any]) -> None:
    check(MODELS[name], execution="fused", **options)


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_images_are_part_of_the_question(execution: Execution) -> None:
    from flopcalc import bind

    estimator = bind("qwen2-vl-2b", convention="hardware", device="h200")
    grid = [[1, 16, 16]]
    one = predict_estimate(estimator(2, 256, image_grid_thw=grid * 2), device="h200", execution=execution, advise=False)
    found = plan(
        estimator, tokens=1, device="h200", gpus=1, global_batch=2, micro_batch=2, recompute="none",
        execution=execution, optimizer="adamw", workload=make_workload(1, 256, image_grid_thw=grid),
    ).best[0]  # fmt: skip
    assert found.step.seconds == pytest.approx(one.step_time_s.mid, rel=1e-12)
    assert one.memory is not None
    assert found.memory.peak == one.memory.peak


@pytest.mark.parametrize("device", ["h100-sxm", "a100-sxm-80gb", "b200-sxm"])
def test_on_devices_that_were_not_measured(device: str) -> None:
    model = MODELS["dense"]
    one = predict(model, device=device, batch_size=2, seq_len=256, execution="fused", advise=False)
    other = plan(
        model, tokens=1, device=device, gpus=1, seq_len=256, global_batch=2, micro_batch=2, optimizer="adamw",
        recompute="none", execution="fused",
    ).best[0]  # fmt: skip
    assert other.step.seconds == pytest.approx(one.step_time_s.mid, rel=1e-12)
    assert one.memory is not None
    assert other.memory.peak == one.memory.peak


JOBS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"lora": {"r": 8, "targets": "all-linear"}},
    "qlora": {"lora": {"r": 8, "targets": "all-linear"}, "weights": "nf4-double", "autocast": True},
    "fp16": {"dtype": "fp16"},
}


@pytest.mark.parametrize("name", JOBS)
def test_predict_and_plan_say_the_same_of_a_job(name: str) -> None:
    given = {"device": "h200", "seq_len": 512, **JOBS[name]}
    best = plan("gpt2", tokens="1M", gpus=1, global_batch=4, **given).best[0]
    step = predict("gpt2", batch_size=4, advise=False, **given)
    assert (best.layout.micro_batch, best.layout.recompute) == (4, "none")
    assert step.memory is not None
    assert (best.step.seconds, best.memory.peak) == (pytest.approx(step.step_time_s.mid, rel=1e-9), step.memory.peak)
    assert best.tokens_per_s == pytest.approx(step.tokens_per_s, rel=1e-9)
    assert best.memory.per_parameter == step.memory.per_parameter
