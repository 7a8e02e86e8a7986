"""Quoted conventions are their sources' formulas: published figures come out, exactly where the source is exact."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from tiers import mark_heavy

from flopcalc import Estimate, FlopcalcError, estimate_flops
from flopcalc.core.estimate.published_conventions import QuotedScope, count_quoted, find_quoted, load_quoted
from flopcalc.core.spec.expressions import parse

NAMES = [
    "model", "full", "hardware", "6nd", "6nd-no-embedding", "palm", "megatron", "megatron-full", "torchtitan",
    "maxtext", "verl", "hf",
]  # fmt: skip
FIGURES = tomllib.loads((Path(__file__).parents[2] / "truth" / "quoted.toml").read_text(encoding="utf-8"))["figure"]
TINY: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 8, "intermediate_size": 20, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 50,
}  # fmt: skip
# Of one layer: q, o (8 x 8), k, v (8 x 4), gate, up, down (8 x 20); norms 2 x 8.
LINEAR = 3 * (2 * 64 + 2 * 32 + 3 * 160)
NORMS = 3 * 16 + 8
TABLE = 50 * 8


def test_names_and_sources() -> None:
    known = load_quoted().conventions
    assert list(known) == NAMES
    for quoted in known.values():
        assert quoted.counts
        assert quoted.leaves_out
        assert quoted.source
        assert len(quoted.date) == 10
        for text in (*quoted.terms.values(), quoted.mtp):
            parse(text)


def test_the_page_shows_what_each_counts() -> None:
    page = (Path(__file__).parents[3] / "docs" / "conventions.md").read_text(encoding="utf-8")
    for quoted in load_quoted().conventions.values():
        assert f"| {quoted.counts} | {quoted.leaves_out} |" in page, quoted.name


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure["id"])
def test_published_figures(figure: dict[str, Any]) -> None:
    estimate = estimate_flops(figure["model"], seq_len=figure["seq"])
    found = estimate.under(figure["convention"]) / figure["seq"] * figure.get("tokens", 1) / figure.get("unit", 1)
    assert found == pytest.approx(figure["value"], abs=figure["within"])


@pytest.mark.parametrize(
    ("name", "tied", "per_token"),
    [
        ("6nd", False, 6 * (LINEAR + NORMS + 2 * TABLE)),
        ("6nd", True, 6 * (LINEAR + NORMS + TABLE)),
        ("6nd-no-embedding", False, 6 * (LINEAR + NORMS + TABLE)),
        ("6nd-no-embedding", True, 6 * (LINEAR + NORMS)),
        ("hf", False, 6 * (LINEAR + NORMS + TABLE)),
        ("hf", True, 6 * (LINEAR + NORMS)),
        # 12 L H Q T
        ("palm", False, 6 * (LINEAR + NORMS + 2 * TABLE) + 12 * 3 * 4 * 2 * 7),
        ("torchtitan", False, 6 * (LINEAR + NORMS + TABLE) + 12 * 3 * 4 * 2 * 7),
        ("torchtitan", True, 6 * (LINEAR + NORMS + TABLE) + 12 * 3 * 4 * 2 * 7),
        ("megatron", False, 6 * (LINEAR + TABLE) + 6 * 3 * 4 * 2 * 7),
        ("megatron-full", False, 6 * (LINEAR + TABLE) + 12 * 3 * 4 * 2 * 7),
        ("maxtext", True, 6 * (LINEAR + TABLE) + 6 * 3 * 4 * 2 * 7),
        ("verl", False, 6 * (LINEAR + 2 * TABLE) + 6 * 3 * 4 * 2 * 7),
        ("model", False, 6 * (LINEAR + TABLE) + 6 * 3 * 4 * 2 * 8),  # S + 1: the diagonal is whole
        ("full", False, 6 * (LINEAR + TABLE) + 12 * 3 * 4 * 2 * 7),
    ],
)
def test_formulas_by_hand(name: str, tied: bool, per_token: int) -> None:
    estimate = estimate_flops(TINY | {"tie_word_embeddings": tied}, batch_size=2, seq_len=7)
    assert estimate.under(name) == per_token * 14
    assert estimate_flops(TINY | {"tie_word_embeddings": tied}, batch_size=1, seq_len=7, grad_accum=2).under(name) == (
        per_token * 14
    )


@pytest.mark.parametrize("name", NAMES[3:])
def test_without_a_backward_pass_a_third_is_left(name: str) -> None:
    trained, run = (estimate_flops(TINY, seq_len=7, phase=phase).under(name) for phase in ("train", "forward"))
    assert trained == 3 * run


def test_documents_and_padding() -> None:
    packed = estimate_flops(TINY, lengths=[3, 4])
    pairs = {"megatron": 9 + 16, "verl": 9 + 16, "maxtext": 49, "torchtitan": 2 * 49}  # by document, or by row
    for name, value in pairs.items():
        assert packed.terms_under(name)["attention"] == 6 * 3 * 4 * 2 * value, name
    mask = [[1, 1, 1, 0], [1, 1, 1, 1]]
    padded = estimate_flops(TINY, batch={"input_ids": [[1] * 4] * 2, "attention_mask": mask})
    assert padded.under("hf") == 8 * padded.under("6nd-no-embedding") // 7  # HF multiplies padding too


def test_windows() -> None:
    config = TINY | {"model_type": "mistral", "sliding_window": 3}
    terms = {
        name: estimate_flops(config, seq_len=7).terms_under(name)["attention"] // (12 * 3 * 4 * 2)
        for name in NAMES[5:11]
    }
    # Pairs: 1 + 2 + 3 · 5 under the mask; 7 · 3 - 9 / 2 as an area; 7 · 3 as a span; half of 49 without a window.
    assert terms == {"palm": 49, "megatron": 18, "megatron-full": 49, "torchtitan": 21, "maxtext": 16, "verl": 24}


def test_an_encoder_of_audio_has_no_pairs_of_windows() -> None:
    """torchtitan's formula: its windows are the decoder's, and the encoder has no length in tokens."""
    decoded = estimate_flops("whisper-large-v3", decoder_seq_len=8, audio=[2])
    assert decoded.under("torchtitan") == 43544494080


def test_experts() -> None:
    moe = estimate_flops("qwen3-30b-a3b", seq_len=128)
    parameters = moe.parameters
    assert moe.under("6nd") == 6 * parameters["active"] * 128
    assert moe.under("hf") == 6 * (parameters["total"] - 151936 * 2048) * 128
    router = 6 * 48 * 2048 * 128 * 128
    assert moe.under("maxtext") - moe.under("megatron") == router
    assert moe.under("model") - moe.under("maxtext") == 6 * 48 * 32 * 128 * 128  # the diagonal


def test_deepseek_v4_in_torchtitan_term_by_term() -> None:
    """pytorch/torchtitan's test of deepseek_v4_flash with one layer of multi-token prediction, at 4,096."""
    estimate = estimate_flops("deepseek-v4-flash", seq_len=4096)
    terms = {term: flops // 4096 for term, flops in estimate.terms_under("torchtitan").items()}
    assert terms == {"parameters": 79_620_548_106, "attention": 7_700_742_144, "scans": 0, "mtp": 5_441_062_626}
    assert sum(terms.values()) == 92_762_352_876
    # Ours needs fewer pairs, mixes streams, and trains no indexer; it has no multi-token prediction.
    parts = {name: sum(flops) // 4096 for name, flops in estimate.by_component().items() if sum(flops)}
    assert parts == {
        "attention_projections": 29_606_019_072,
        "attention_scores": 5_598_603_264,
        "mlp": 45_449_478_144,
        "router": 270_532_608,
        "lm_head": 3_177_185_280,
        "other": 237_109_248,
    }
    without = estimate.terms_under("torchtitan", mtp=0)
    assert without["mtp"] == 0
    assert estimate.under("torchtitan", mtp=2) - sum(without.values()) == 2 * terms["mtp"] * 4096


def test_multi_token_prediction_is_counted_as_the_source_trains_it() -> None:
    estimate = estimate_flops("deepseek-v3", seq_len=4096)
    assert estimate.under("megatron", mtp=0) < estimate.under("megatron") == estimate.under("megatron", mtp=1)
    assert estimate.under("torchtitan") == estimate.under("torchtitan", mtp=0)
    assert estimate.under("maxtext") == estimate.under("maxtext", mtp=0) < estimate.under("maxtext", mtp=1)
    assert estimate.under("palm", mtp=1) == estimate.under("palm")


@pytest.mark.parametrize(
    "model", mark_heavy(["llama-3.1-8b", "qwen3-8b", "gemma-2b", "qwen3-30b-a3b", "deepseek-v3"], ["llama-3.1-8b"])
)
def test_full_is_torchtitans_and_model_is_maxtexts(model: str) -> None:
    estimate = estimate_flops(model, seq_len=4096)
    assert estimate.under("torchtitan") == pytest.approx(estimate.under("full"), rel=5e-4)
    assert estimate.under("maxtext") == pytest.approx(estimate.under("model"), rel=5e-4)
    if estimate.parameters["active"] == estimate.parameters["total"]:
        assert estimate.under("megatron") == estimate.under("maxtext")


def test_own_conventions_are_the_estimates_own() -> None:
    estimate = estimate_flops("llama-3.2-1b", seq_len=100, recompute="full")
    for name in ("model", "full", "hardware"):
        assert estimate.under(name) == estimate.total_under(name)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("plam", "Did you mean palm"),
        ("hfu", "no convention 'hfu'. The convention of an HFU is hardware"),
        ("", "no convention ''"),
        (None, "no convention None"),
        (6, "no convention 6"),
    ],
)
def test_unknown_names(name: Any, words: str) -> None:
    with pytest.raises(FlopcalcError, match=words):
        estimate_flops(TINY, seq_len=7).under(name)


def test_wrong_depth_of_prediction() -> None:
    with pytest.raises(FlopcalcError, match="mtp must be at least 0"):
        estimate_flops(TINY, seq_len=7).under("megatron", mtp=-1)


def test_a_formula_says_what_it_lacks() -> None:
    estimator, load, _ = estimate_flops(TINY, seq_len=7).terms[0]
    with pytest.raises(FlopcalcError, match="has no one experts"):
        QuotedScope(estimator, load).evaluate_whole("2 * experts", "a formula")
    with pytest.raises(FlopcalcError, match="not a whole number"):
        QuotedScope(estimator, load).evaluate_whole("tokens / 2", "a formula")
    assert count_quoted(estimator, load, "6ND") == count_quoted(estimator, load, "6nd")
    assert find_quoted("PaLM").name == "palm"


def test_a_trace_has_only_full() -> None:
    class Traced:
        origin = "trace"

        def count(self, load: Any, convention: str) -> Any:  # noqa: ARG002
            return type("Flops", (), {"total": 5})

    traced: Any = Traced()
    assert count_quoted(traced, traced, "full") == {"total": 5}
    with pytest.raises(FlopcalcError, match="only full is known"):
        count_quoted(traced, traced, "palm")
    assert isinstance(estimate_flops(TINY, seq_len=7), Estimate)
