"""What tests of the predictor's fit share: the shipped constants, cases with their work, and the time they take."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from flopcalc.core.estimate.estimate import Estimator
from flopcalc.measure.predictor.fit.cases import ModelledCase, bind_case, make_machine, model_case, run_clock
from flopcalc.measure.predictor.runs import make_case
from flopcalc.prediction.clock import Clock
from flopcalc.prediction.kernels.constants import load_predictor

DEVICE = "h200-sxm"
SHIPPED: dict[str, Any] = load_predictor(DEVICE) or {}
BF16 = "c10::BFloat16,c10::BFloat16"
LLAMA = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
}  # fmt: skip
MIXTRAL = {
    "model_type": "mixtral", "num_hidden_layers": 2, "hidden_size": 512, "intermediate_size": 1024,
    "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 1000, "num_local_experts": 8,
    "num_experts_per_tok": 2,
}  # fmt: skip


@cache
def _bind(written: str, recompute: str, attention: str) -> Estimator:
    return bind_case({"recompute": recompute, "attention": attention}, json.loads(written), DEVICE)


def model(case: dict[str, Any], config: dict[str, Any]) -> ModelledCase:
    return model_case(case, _bind(json.dumps(config), case["recompute"], case["attention"]))


def profile(rows: list[Any], config: dict[str, Any] = LLAMA) -> ModelledCase:
    """A training step whose profile has these rows."""
    return model({**make_case("llama", "train", 2, 32), "operators": rows}, config)


def run(each: ModelledCase, constants: dict[str, Any], *, compiled: bool = False) -> Clock:
    return run_clock(each, make_machine(constants), compiled=compiled)
