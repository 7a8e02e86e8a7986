"""A step is all its passes: training, reference, rollout, score and eval, each with its FLOPs and its time."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from loop import Clock
from tiny import CONFIG, make_llama, read_log

import flopcalc
from flopcalc.monitor import TrainingMonitor

IDS = torch.arange(3, 19).reshape(2, 8)
PEAK = CONFIG["monitoring"]["peak_flops_per_s"]


def make_eager(seed: int = 0) -> Any:
    model = make_llama(seed)
    model.set_attn_implementation("eager")
    return model.train()


def train(model: Any, ids: torch.Tensor = IDS) -> None:
    model(input_ids=ids, labels=ids).loss.backward()


def count(model: Any, phase: str = "train", convention: str = "model", rows: int = 2, **sizes: Any) -> int:
    estimator = flopcalc.bind(model, convention=convention, attention_kernel="eager")
    return estimator(rows, sizes.pop("seq", 8), phase=phase, **sizes).total


def test_a_plain_step_gives_one_mfu(tmp_path: Path, clock: Clock) -> None:
    model = make_eager()
    with TrainingMonitor(tmp_path, CONFIG, model=model) as monitor, monitor.step():
        train(model)
        clock.tick(2)
    (record,) = read_log(tmp_path / "flopcalc.jsonl")
    assert record["perf/mfu"] == record["perf/mfu_step"] == count(model) / (2 * PEAK)
    assert not [key for key in record if key.startswith("perf/passes/")]


@pytest.mark.parametrize("is_first", [True, False], ids=["before", "after"])
def test_a_reference_is_in_the_step_and_not_in_the_training(is_first: bool, tmp_path: Path, clock: Clock) -> None:
    model, reference = make_eager(), make_eager(1).eval()
    reference.register_forward_hook(lambda *_: clock.tick(3))

    def refer() -> None:
        with torch.no_grad():
            reference(input_ids=IDS)

    with TrainingMonitor(tmp_path, CONFIG, model=[model, reference]) as monitor, monitor.step():
        if is_first:
            refer()
        train(model)
        clock.tick(2)
        if not is_first:
            refer()
    (record,) = read_log(tmp_path / "flopcalc.jsonl")
    own, beside = count(model), count(model, "forward")
    assert record["perf/model_flops"] == record["perf/passes/train/flops"] == own
    assert record["perf/passes/reference/flops"] == beside
    assert record["perf/passes/reference/hardware_flops"] == count(model, "forward", "hardware")
    assert (record["perf/passes/train/seconds"], record["perf/passes/reference/seconds"]) == (2, 3)
    assert record["perf/step_time"] == 5
    assert record["perf/mfu"] == record["perf/passes/train/mfu"] == own / (2 * PEAK)
    assert record["perf/passes/reference/mfu"] == beside / (3 * PEAK)
    assert record["perf/mfu_step"] == (own + beside) / (5 * PEAK)


def test_a_generation_is_one_rollout(tmp_path: Path, clock: Clock) -> None:
    model = make_eager()
    model.generation_config.eos_token_id = None
    model.register_forward_hook(lambda module, *_: None if module.training else clock.tick(1))
    prompts = torch.tensor([[0, 0, 3, 4, 5], [6, 7, 8, 9, 10]])
    with TrainingMonitor(tmp_path, CONFIG, model=model) as monitor, monitor.step():
        model.eval()
        model.generate(
            input_ids=prompts, attention_mask=(prompts > 0).long(), max_new_tokens=4, min_new_tokens=4, do_sample=False
        )
        model.train()
        train(model)
        clock.tick(2)
    (record,) = read_log(tmp_path / "flopcalc.jsonl")
    estimator = flopcalc.bind(model, attention_kernel="eager")
    needed = sum(
        estimator(1, prompt, phase="prefill").total + estimator(1, 3, phase="decode", context=prompt).total
        for prompt in (3, 5)
    )
    full = flopcalc.bind(model, convention="full")
    executed = full(2, 5, phase="prefill").total + full(2, 3, phase="decode", context=5).total
    assert record["perf/passes/rollout/flops"] == needed
    assert record["perf/passes/rollout/hardware_flops"] == executed
    assert record["perf/passes/rollout/seconds"] == 4
    assert record["perf/mfu"] == count(model) / (2 * PEAK)
    assert record["goodput/lost_rollout_s"] == 4


def test_rows_that_ended_need_no_more_tokens(tmp_path: Path) -> None:
    model = make_eager().eval()
    from transformers import DynamicCache

    model.generation_config.eos_token_id = 2
    with TrainingMonitor(tmp_path, CONFIG, model=model) as monitor, monitor.step():
        with torch.no_grad():
            cache = DynamicCache()
            model(input_ids=IDS, attention_mask=torch.ones(2, 8), past_key_values=cache, use_cache=True)
            for at, tokens in enumerate(([3, 2], [4, 0], [5, 0]), 1):
                ids, mask = torch.tensor(tokens)[:, None], torch.ones(2, 8 + at)
                model(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True)
        train(model.train())
    (record,) = read_log(tmp_path / "flopcalc.jsonl")
    prompt = count(model, "forward")
    assert record["perf/passes/rollout/flops"] == prompt + count(model, "decode", rows=1, seq=3, context=8)


def test_passes_without_gradients_are_named_by_what_they_are_for(tmp_path: Path, clock: Clock) -> None:
    model = make_eager()
    with TrainingMonitor(tmp_path, CONFIG, model=model) as monitor:
        with monitor.step():
            with torch.no_grad():
                model(input_ids=IDS)  # log-probs of the policy
            model.eval()(input_ids=IDS)
            train(model.train())
            clock.tick(1)
        model.eval()(input_ids=IDS)
        clock.tick(8)
        monitor.mark_lost("eval")
        with monitor.step():
            train(model.train())
            clock.tick(1)
    first, second = read_log(tmp_path / "flopcalc.jsonl")
    once = count(model, "forward")
    assert first["perf/passes/score/flops"] == first["perf/passes/eval/flops"] == once
    assert first["perf/mfu_step"] == (count(model) + 2 * once) / PEAK
    # What was lost to eval is counted there, and in no step.
    assert second["perf/passes/eval/flops"] == once
    assert second["perf/mfu"] == second["perf/mfu_step"] == count(model) / PEAK


def test_a_rollout_that_ran_elsewhere_is_handed_in(tmp_path: Path, clock: Clock) -> None:
    model = make_eager()
    with TrainingMonitor(tmp_path, CONFIG, model=model) as monitor, monitor.step():
        monitor.add_pass("rollout", model=model.config, prompts=[5, 7], completions=[4, 1], seconds=3)
        train(model)
        clock.tick(5)
    (record,) = read_log(tmp_path / "flopcalc.jsonl")
    one = count(model, "prefill", rows=1, seq=5) + count(model, "decode", rows=1, seq=3, context=5)
    two = count(model, "prefill", rows=1, seq=7)
    assert record["perf/passes/rollout/flops"] == one + two
    assert record["perf/mfu"] == count(model) / (2 * PEAK)
    assert record["perf/mfu_step"] == (count(model) + one + two) / (5 * PEAK)
    assert record["goodput/lost_rollout_s"] == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "rollouts"}, "pass 'rollouts'"),
        ({"name": "train"}, "pass 'train'"),
        ({"name": "rollout", "prompts": b"4", "completions": [3]}, "prompts must be a list"),
        ({"name": "rollout", "prompts": [1, 2], "completions": [3]}, "2 prompts and 1 completions"),
        ({"name": "rollout", "prompts": [-1], "completions": [3]}, "prompts"),
        ({"name": "rollout", "prompts": [5], "completions": [3], "seconds": -1}, "seconds must be a positive number"),
        ({"name": "score", "model": "no such model", "prompts": [5], "seconds": 1}, "no such model"),
    ],
)
def test_a_pass_that_is_none_is_said_and_left_out(arguments: Any, message: str, tmp_path: Path) -> None:
    model = make_eager()
    with TrainingMonitor(tmp_path, CONFIG, model=model) as monitor, monitor.step():
        with pytest.warns(RuntimeWarning, match=message):
            monitor.add_pass(**arguments)
        train(model)
    assert read_log(tmp_path / "flopcalc.jsonl")[0]["perf/mfu"] > 0


def test_a_pass_that_nobody_gave_makes_the_step_unknown(tmp_path: Path, clock: Clock) -> None:
    model = make_eager()
    monitor = TrainingMonitor(tmp_path, CONFIG, model=model)
    monitor.expect_pass("rollout")
    with monitor.step():
        train(model)
        clock.tick(1)
    with pytest.warns(RuntimeWarning, match=r"a rollout runs outside of this process's models.*add_pass"):
        monitor.metrics()
    with monitor.step():
        monitor.add_pass("rollout", prompts=[5], completions=[4], seconds=0.5)
        train(model)
        clock.tick(1)
    monitor.close()
    first, second = read_log(tmp_path / "flopcalc.jsonl")
    assert first["perf/mfu_step"] is None
    assert first["perf/mfu"] == count(model) / PEAK
    assert second["perf/mfu_step"] > 0


def test_several_models_that_train(tmp_path: Path) -> None:
    models = [make_eager(), make_eager(1)]
    with TrainingMonitor(tmp_path, CONFIG, model=models) as monitor, monitor.step():
        for model in models:
            train(model)
    assert read_log(tmp_path / "flopcalc.jsonl")[0]["perf/model_flops"] == 2 * count(models[0])


def test_values_of_one_record_are_of_the_same_steps(tmp_path: Path, clock: Clock) -> None:
    model = make_eager()
    config = {"monitoring": {**CONFIG["monitoring"], "detail_every": 3}}
    with TrainingMonitor(tmp_path, config, model=model) as monitor:
        for number in range(1, 6):
            train(model)
            clock.tick(number)
            monitor.log_step(number, 0, 0.5, 1.0, 0.1)
            found = monitor.metrics()
            assert found["perf/hfu"] >= found["perf/mfu"]
            assert found["perf/padded_tokens_per_second"] == found["perf/tokens_per_second"] == 16 / number
    records = read_log(tmp_path / "flopcalc.jsonl")
    assert ["perf/hfu" in record for record in records] == [False, False, True, False, False]


# --- Modules that no spec describes -----------------------------------------------------------------------------------


class Own(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).relu()


def test_an_unknown_module_is_counted_from_its_first_batch(tmp_path: Path) -> None:
    module = Own().train()
    found = []
    monitor = TrainingMonitor(tmp_path, CONFIG, model=module)
    for number, (rows, length) in enumerate([(2, 7), (2, 7), (3, 9), (4, 11), (1, 30)], 1):
        if number == 1:
            with pytest.warns(RuntimeWarning, match="Own is counted by tracing its calls, under convention full"):
                module(torch.randn(rows, length, 6)).sum().backward()
        else:
            module(torch.randn(rows, length, 6)).sum().backward()
        monitor.log_step(number, 0, 0.5, 1.0, 0.1)
        found.append((monitor.metrics()["perf/model_flops"], 2 * 2 * rows * length * 6 * 5))
    monitor.close()
    assert [ours for ours, _ in found] == [true for _, true in found]
    assert read_log(tmp_path / "flopcalc.jsonl")[-1]["perf/convention"] == "full"


# --- Number formats ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("is_cast", "place"),
    [(False, {"device": "h200"}), (True, {"device": "h200"}), (False, {"peak": {"bf16": 2e13, "float32": 1e12}})],
    ids=["float32 adapters", "autocast", "own peaks"],
)
def test_mfu_is_ideal_time_over_time(is_cast: bool, place: dict[str, Any], tmp_path: Path, clock: Clock) -> None:
    from peft import LoraConfig, get_peft_model

    model = make_llama().to(torch.bfloat16)
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    for name, weight in model.named_parameters():
        if "lora" in name:
            weight.data = weight.data.float()
    where = {"peak_flops_per_s" if key == "peak" else key: value for key, value in place.items()}
    config = {"monitoring": {"mfu_calculation_mode": "estimate", "detail_every": 1, "skip_first": 0, **where}}
    with TrainingMonitor(tmp_path, config, model=model) as monitor, monitor.step():
        with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
            model.train()(input_ids=IDS, labels=IDS).loss.backward()
        clock.tick(1)
    (record,) = read_log(tmp_path / "flopcalc.jsonl")
    estimate = flopcalc.bind(model, device=place.get("device"), autocast=is_cast or None)(2, 8)
    expected = flopcalc.mfu(estimate, 1.0, **place)
    executed = flopcalc.hfu(estimate, 1.0, **place)
    assert math.isclose(record["perf/hfu"], float(executed), rel_tol=1e-12)
    assert math.isclose(record["perf/mfu"], float(expected), rel_tol=1e-12)
    assert math.isclose(record["perf/mfu_of_bf16_peak"], expected.of_bf16_peak or 0, rel_tol=1e-12)
    assert record["perf/dtype"] == ("bf16" if is_cast else "bf16+fp32")
    assert (record["perf/mfu"] > record["perf/mfu_of_bf16_peak"]) is (not is_cast)
