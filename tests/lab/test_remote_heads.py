"""Classes of published code with another head than their spec's own equal a tiny module, row by row."""

from __future__ import annotations

from typing import Any

import pytest

from flopcalc.measure.hf.examples import find_example


@pytest.mark.heavy
@pytest.mark.parametrize("recipe", [{}, {"lora": {"r": 3, "targets": "all-linear"}}, {"recompute": "full"}])
def test_reranker_of_images(recipe: dict[str, Any]) -> None:
    from flopcalc.measure.hf.verify import verify

    named = "LlamaNemotronVLForSequenceClassification"
    example = find_example("llama_nemotron_vl")._replace(
        architecture=named, witness=f"lab.witnesses.tiles:{named}", loss="logits"
    )
    for config in example.configs:
        workload = {"batch": 2, "seq": 29, "images": [[2, 1, 1]]}
        verdict = verify({"model_type": "llama_nemotron_vl", **config}, workload, recipe, example=example)
        assert verdict.is_equal, (verdict.different, verdict.parameters, verdict.not_counted)
