"""Which head a model has, by its class or as asked for, and what that counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flopcalc import bind, estimate_flops
from flopcalc.base.errors import ConfigError, FlopcalcError, SpecError, WorkloadError
from flopcalc.core.model.config import Source
from flopcalc.core.model.heads import check_head, find_ending

D, FF, VOCAB, LAYERS = 24, 40, 101, 2
LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": D, "intermediate_size": FF, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCAB,
}  # fmt: skip
BERT = {**LLAMA, "model_type": "bert", "max_position_embeddings": 64}
BART = {
    "model_type": "bart", "d_model": D, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": FF, "decoder_ffn_dim": FF, "vocab_size": VOCAB,
    "max_position_embeddings": 64,
}  # fmt: skip
BODY = LAYERS * (2 * D * D + 2 * D * D // 2 + 3 * D * FF + 2 * D) + D + VOCAB * D


@pytest.mark.parametrize(
    ("named", "head", "parameters"),
    [
        ("LlamaForCausalLM", "lm", BODY + VOCAB * D),
        ("LlamaForSequenceClassification", "sequence:3", BODY + 3 * D),
        ("LlamaForTokenClassification", "token:3", BODY + 3 * D + 3),
        ("LlamaForQuestionAnswering", "token:2", BODY + 2 * D + 2),
        ("LlamaModel", "none", BODY),
        ("LlamaBidirectionalModel", "none", BODY),
        ("LlamaForRewardModel", "sequence:1", BODY + D * D + D + D + 1),
        (
            "LlamaForRewardModelWithGating",
            "sequence:19",
            BODY + 19 * D + 19**2 + D * 1024 + 2 * 1024**2 + 3 * 1024 + 1024 * 19 + 19 + 1,
        ),
        ("EurusRewardModel", "sequence:1", BODY + D),
        ("GPTRewardModel", "sequence:1", BODY + D),
        ("LlamaForScore", "sequence:1", BODY + D),
        ("LlamaForRewardModelWithGating31", "none", BODY),
        ("LlamaForProcessRewardModel", "token:2", BODY + D * D + D + 2 * D + 2),
        ("LlamaBidirectionalForSequenceClassification", "sequence:3", BODY + 3 * D),
        ("VoyageLlamaBidirectionalEmbedModel", "token:3", BODY + 3 * D),
        ("JinaVLForRanking", "sequence:1", BODY + D * D + D + D + 1),
        ("HF_ColBERT", "token:128", BODY + 128 * D),
        ("ColBERTModernBertModel", "token:128", BODY + 128 * D),
        ("ColBERTJinaRobertaModel", "token:128", BODY + 128 * D),
        ("ColBERTLfm2Model", "token:128", BODY + 128 * D),
        ("ChatGLMModel", "lm", BODY + VOCAB * D),
    ],
)
def test_the_class_says_the_head(named: str, head: str, parameters: int) -> None:
    estimate = estimate_flops({**LLAMA, "architectures": [named], "num_labels": 3}, seq_len=5)
    assert estimate.to_dict()["model"]["head"] == head
    assert estimate.parameters["total"] == parameters


@pytest.mark.parametrize(
    ("asked", "head"),
    [
        ("lm", "lm"),
        ("none", "none"),
        ("sequence", "sequence:4"),
        ("sequence:7", "sequence:7"),
        ("token", "token:4"),
        ("token:1", "token:1"),
        ("value", "value"),
    ],
)
def test_a_head_that_is_asked_for(asked: str, head: str) -> None:
    config = {**LLAMA, "architectures": ["LlamaForCausalLM"], "id2label": dict(enumerate("abcd"))}
    estimate = estimate_flops(config, seq_len=5, head=asked)
    assert estimate.terms[0].estimator.head == head
    assert any(f"head {head}" in note for note in estimate.notes) == (head != "lm")


def test_a_body_s_name_with_a_head_in_it_is_said() -> None:
    estimate = estimate_flops({**LLAMA, "architectures": ["LlamaForPrmModel"]}, seq_len=5)
    assert estimate.parameters["total"] == BODY
    assert "the config names LlamaForPrmModel, whose head is not known: counted without one" in estimate.notes


@pytest.mark.parametrize(
    ("named", "note"),
    [
        ("LlamaForRewardModelWithGating31", ", whose head is not known: counted without one"),
        ("OtherModel", "; its body is counted as that of LlamaForCausalLM"),
        ("LlamaEncoderModel", None),
    ],
)
def test_a_class_of_another_name_is_said(named: str, note: str | None) -> None:
    notes = estimate_flops({**LLAMA, "architectures": [named]}, seq_len=5).notes
    assert notes == ([] if note is None else [f"the config names {named}{note}"])


@pytest.mark.parametrize(
    ("name", "named", "asked", "head", "is_said"),
    [
        ("Qwen/Qwen3-Embedding-8B", "LlamaForCausalLM", "", "none", True),
        ("Qwen/Qwen3-Embedding-8B", "LlamaForCausalLM", "lm", "lm", False),
        ("my-embedder", "LlamaForSequenceClassification", "", "sequence:2", False),
        ("my-embedder", "LlamaModel", "", "none", False),
        ("llama", "LlamaForCausalLM", "", "lm", False),
    ],
)
def test_a_model_of_embeddings_needs_no_logits(name: str, named: str, asked: str, head: str, is_said: bool) -> None:
    estimate = estimate_flops(Source(name, {**LLAMA, "architectures": [named]}, name, head=asked), seq_len=5)
    assert estimate.terms[0].estimator.head == head
    said = 'embeddings need no logits, so LlamaForCausalLM is counted without its head; head="lm" counts it'
    assert (said in estimate.notes) == is_said


def test_tied_weights_leave_with_the_head() -> None:
    config = {**LLAMA, "tie_word_embeddings": True}
    assert estimate_flops(config, seq_len=5, head="lm").parameters["total"] == BODY
    assert estimate_flops(config, seq_len=5, head="none").parameters["total"] == BODY


def test_a_classifier_needs_one_position_and_scores_all() -> None:
    config = {**LLAMA, "architectures": ["LlamaForSequenceClassification"], "num_labels": 3}
    for convention, rows in (("model", 2), ("full", 2 * 7)):
        estimate = bind(config, convention=convention)(2, 7)
        assert estimate.by_component()["head"].forward == 2 * D * 3 * rows
        assert estimate.by_component()["head"].backward == 2 * 2 * D * 3 * rows
    packed = bind(config)(lengths=[3, 4, 5])
    assert packed.by_component()["head"].forward == 2 * D * 3 * 3


GEMMA3 = {
    **LLAMA,
    "model_type": "gemma3_text",
    "head_dim": 6,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
}


@pytest.mark.parametrize(
    ("config", "pairs"),
    [
        ({**LLAMA, "architectures": ["LlamaModel"]}, LAYERS * 16 * 17 // 2),
        ({**LLAMA, "architectures": ["LlamaModel"], "is_causal": False}, LAYERS * 16 * 16),
        ({**LLAMA, "architectures": ["LlamaForCausalLM"], "is_causal": False}, LAYERS * 16 * 16),
        ({**LLAMA, "architectures": ["LlamaBidirectionalModel"]}, LAYERS * 16 * 16),
        ({**LLAMA, "architectures": ["LlamaBidirectionalForSequenceClassification"]}, LAYERS * 16 * 16),
        ({**LLAMA, "model_type": "llama_bidirec", "architectures": ["LlamaBidirectionalModel"]}, LAYERS * 16 * 16),
        ({**LLAMA, "model_type": "mistral", "is_causal": False, "sliding_window": 3}, LAYERS * (16 * 7 - 3 * 4)),
        # EmbeddingGemma: its config class halves the window, so that a query sees as many positions each way
        ({**GEMMA3, "use_bidirectional_attention": True}, 16 * 9 - 4 * 5 + 16 * 16),
        ({**GEMMA3, "use_bidirectional_attention": False}, 16 * 8 - 8 * 7 // 2 + 16 * 17 // 2),
        ({**GEMMA3, "is_causal": False}, 16 * 17 - 8 * 9 + 16 * 16),
    ],
)
def test_texts_that_are_read_both_ways(config: dict[str, Any], pairs: int) -> None:
    """transformers 5.22: masking_utils.py, create_causal_mask; models/gemma3: configuration_gemma3.py."""
    estimate = bind(config)(2, 16)
    assert estimate.by_component()["attention_scores"].forward == 2 * 2 * 2 * D * pairs
    full = bind(config, convention="full")(2, 16)
    assert full.by_component()["attention_scores"].forward == 2 * 2 * 2 * D * LAYERS * 16 * 16
    packed = bind(config)(lengths=[16, 16])
    assert packed.by_component()["attention_scores"] == estimate.by_component()["attention_scores"]


def test_a_pooler_runs_on_one_position_and_nothing_reads_a_body_s() -> None:
    pooler = 2 * D * D * 2
    body = bind({**BERT, "architectures": ["BertModel"]})(2, 7)
    assert body.by_component()["head"] == (pooler, 0, 0, 0)
    whole = bind({**BERT, "architectures": ["BertForSequenceClassification"], "num_labels": 3}, convention="full")(2, 7)
    assert whole.by_component()["head"].forward == pooler + 2 * 2 * D * 3


def test_a_classifier_hands_its_decoder_the_encoder_s_tokens() -> None:
    config = {**BART, "architectures": ["BartForSequenceClassification"], "num_labels": 3}
    estimate = estimate_flops(config, batch_size=2, seq_len=7)
    load = estimate.terms[0].load
    assert load.decoder is not None
    assert (load.seq, load.decoder.seq) == (7, 7)
    batch = {"input_ids": [[3] * 7] * 2, "labels": [0, 1]}
    assert estimate_flops(config, batch=batch).total == estimate.total
    with pytest.raises(WorkloadError, match="its decoder reads the same 7 tokens, not 5"):
        estimate_flops(config, seq_len=7, decoder_seq_len=5)


def test_lora_trains_the_classifier_too() -> None:
    config = {**LLAMA, "architectures": ["LlamaForSequenceClassification"], "num_labels": 3}
    estimate = estimate_flops(config, seq_len=5, lora="r=2,targets=q_proj")
    assert estimate.parameters["trainable"] == LAYERS * 2 * (D + D) + 3 * D
    assert estimate.to_dict()["recipe"]["lora"]["save"] == ["score"]
    assert any("SEQ_CLS" in note for note in estimate.notes)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lms", "head 'lms' unknown: it is lm, none, sequence[:N], token[:N] or value"),
        ("none:3", "has no number"),
        ("sequence:x", "must be a whole number, as in sequence:2"),
        ("token:0", "labels"),
        (3, "head must be lm, none"),
    ],
)
def test_heads_that_are_none(text: Any, words: str) -> None:
    with pytest.raises(FlopcalcError) as caught:
        check_head(text)
    assert words in str(caught.value)


def test_what_a_head_cannot_do() -> None:
    with pytest.raises(WorkloadError, match="makes no logits over a vocabulary"):
        estimate_flops(LLAMA, seq_len=5, head="none", logits="last")
    with pytest.raises(ConfigError, match="'blip' with head none is not described"):
        bind({"model_type": "blip", "text_config": {"vocab_size": 9}, "vision_config": {}}, head="none")


@pytest.mark.parametrize(
    ("head", "parameters"),
    [(None, 86_567_656), ("sequence", 86_567_656), ("sequence:10", 85_806_346), ("none", 86_389_248)],
)
def test_heads_of_image_classifiers(head: str | None, parameters: int) -> None:
    """ViT-base with 1,000 labels, with 10, and ViTModel with its pooler."""
    assert bind("vit-base", head=head).parameters()["total"] == parameters
    with pytest.raises(ConfigError, match=r"'vit' classifies images: its head is none or sequence\[:N\]"):
        bind("vit-base", head="token:3")


def test_a_reranker_of_images_scores_one_vector() -> None:
    text = {"hidden_size": 24, "intermediate_size": 42, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = {
        "model_type": "llama_nemotron_vl",
        "llm_config": {**text, "vocab_size": 96, "num_labels": 3},
        "vision_config": {**text, "image_size": 24, "patch_size": 4},
    }
    totals = [
        bind({**config, "architectures": [name]}).parameters()["total"]
        for name in ("LlamaNemotronVLModel", "LlamaNemotronVLForSequenceClassification")
    ]
    assert totals[1] - totals[0] == 3 * 24


def test_names_of_classes() -> None:
    assert find_ending("LlamaForCausalLM") == ""
    assert find_ending("InternVLChatModel") == "lm"
    assert find_ending("NanoChatModel") == "none"
    assert find_ending("AutoModelForCausalLMWithValueHead") == "value"


# --- multi-token prediction -------------------------------------------------------------------------------------------
def test_multi_token_prediction() -> None:
    config = {**LLAMA, "architectures": ["LlamaForCausalLM"], "num_nextn_predict_layers": 2}
    plain, whole, one = (estimate_flops(config, batch_size=2, seq_len=7, mtp=mtp) for mtp in (None, True, 1))
    layer = plain.by_module(per_layer=True)
    body = sum(row.forward for row in layer if row.path.startswith("model.layers.0."))
    each = body + 2 * 14 * (2 * D * D + D * VOCAB)
    assert one.forward - plain.forward == each
    assert whole.forward - plain.forward == 2 * each
    assert whole.backward == 2 * whole.forward
    own = sum(row.parameters for row in layer if row.path.startswith("model.layers.0."))
    assert whole.parameters["total"] - plain.parameters["total"] == 2 * (own + 2 * D * D + 3 * D)
    assert [note for note in plain.notes if "mtp" in note and f"({whole.total:,})" in note]
    assert not [note for note in whole.notes if "mtp" in note]
    assert whole.to_dict()["model"]["mtp"] == 2


def test_multi_token_prediction_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="no layers of multi-token prediction"):
        estimate_flops(LLAMA, seq_len=5, mtp=True)
    with pytest.raises(ConfigError, match="needs the language model's head"):
        estimate_flops(LLAMA, seq_len=5, mtp=1, head="none")
    whole, plain = (bind("deepseek-v3", mtp=mtp).parameters()["total"] for mtp in (True, None))
    assert whole - plain == 11_610_067_968  # 11.5B of its own, says DeepSeek-V3/README_WEIGHTS.md


@pytest.mark.parametrize("word", ["use", "like"])
def test_a_spec_names_the_shape_of_a_head(tmp_path: Path, word: str) -> None:
    """`like` is the earlier name of `use`, in files that users wrote."""
    text = 'extends = "llama"\nsource = "x"\narchitecture = "MineForCausalLM"\n[heads]\ntoken = { %s = "%s" }\n'
    config = {**LLAMA, "model_type": "mine"}
    (tmp_path / "mine.toml").write_text(text % (word, "score"), encoding="utf-8")
    mine = estimate_flops(config, seq_len=5, head="token:3", spec=str(tmp_path / "mine.toml"))
    assert mine.parameters["total"] == BODY + 3 * D  # without the bias that llama's own has
    (tmp_path / "mine.toml").write_text(text % (word, "scor"), encoding="utf-8")
    with pytest.raises(SpecError, match=r"mine\.toml: \[heads\] token: no head 'scor'\. Did you mean score"):
        estimate_flops(config, seq_len=5, head="token:3", spec=str(tmp_path / "mine.toml"))
