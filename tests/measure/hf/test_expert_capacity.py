"""Tokens beyond the experts' capacity are dropped, as HF's Switch Transformers drops them."""

from __future__ import annotations

import pytest

from flopcalc.measure.hf.examples import find_example


@pytest.mark.heavy
@pytest.mark.parametrize(("seq", "decoder_seq"), [(13, 9), (40, 30)])
def test_two_experts_of_one_token_take_two(seq: int, decoder_seq: int) -> None:
    from flopcalc.measure.hf.verify import verify

    for config in find_example("switch_transformers").configs:
        config = {**config, "model_type": "switch_transformers", "num_experts": 2, "expert_capacity": 1}
        verdict = verify(config, {"batch": 2, "seq": seq, "decoder_seq": decoder_seq}, {})
        assert verdict.is_equal, verdict.different
