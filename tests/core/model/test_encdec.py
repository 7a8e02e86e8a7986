"""Encoder-decoders and audio: both sides' lengths, cached keys of the encoder, padded batches, and the errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flopcalc import bind, estimate_flops
from flopcalc.base.errors import WorkloadError
from flopcalc.cli import main
from flopcalc.core.workload.workload import make_workload

T5 = {
    "model_type": "t5", "d_model": 24, "d_kv": 10, "d_ff": 41, "num_layers": 2, "num_decoder_layers": 3,
    "num_heads": 4, "vocab_size": 101,
}  # fmt: skip
WHISPER = {
    "model_type": "whisper", "d_model": 24, "num_mel_bins": 7, "encoder_layers": 2, "encoder_ffn_dim": 41,
    "encoder_attention_heads": 4, "decoder_layers": 3, "decoder_ffn_dim": 53, "decoder_attention_heads": 6,
    "vocab_size": 101, "max_source_positions": 150, "max_target_positions": 40,
}  # fmt: skip
LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 43,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 101,
}
QWEN_AUDIO = {
    "model_type": "qwen2_audio", "audio_token_index": 7,
    "audio_config": {
        "d_model": 24, "num_mel_bins": 7, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 41,
        "max_source_positions": 150,
    },
    "text_config": {**LLAMA, "model_type": "qwen2"},
}  # fmt: skip


def forward(config: dict[str, Any], convention: str = "model", **workload: Any) -> dict[str, int]:
    rows = bind(config, convention=convention)(**{"phase": "forward", **workload}).by_module(per_layer=True)
    return {row.path: row.forward for row in rows}


def run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    out, err = capsys.readouterr()
    return int(end.value.code or 0), out, err


def write(config: dict[str, Any], folder: Path) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


# --- both sides -----------------------------------------------------------------------------------------------------
def test_each_side_counts_its_own_tokens() -> None:
    rows = forward(T5, batch_size=3, seq_len=13, decoder_seq_len=7)
    assert rows["encoder.block.0.layer.0.SelfAttention.q"] == 2 * 24 * 40 * 3 * 13
    assert rows["decoder.block.0.layer.0.SelfAttention.q"] == 2 * 24 * 40 * 3 * 7
    assert rows["lm_head"] == 2 * 24 * 101 * 3 * 7
    # The encoder sees both ways, the decoder backwards, and across it sees all of the encoder.
    assert rows["encoder.block.0.layer.0.SelfAttention"] == 4 * 40 * 3 * 13 * 13
    assert rows["decoder.block.0.layer.0.SelfAttention"] == 4 * 40 * 3 * (7 * 8 // 2)
    assert rows["decoder.block.0.layer.1.EncDecAttention"] == 4 * 40 * 3 * 7 * 13
    # Keys and values across are the encoder's positions.
    assert rows["decoder.block.0.layer.1.EncDecAttention.k"] == 2 * 24 * 40 * 3 * 13
    assert rows["decoder.block.0.layer.1.EncDecAttention.q"] == 2 * 24 * 40 * 3 * 7


def test_decode_reads_the_encoder_from_the_cache() -> None:
    rows = forward(T5, batch_size=2, seq_len=13, decoder_seq_len=3, context=5, phase="decode")
    assert not any(flops for path, flops in rows.items() if path.startswith("encoder."))
    assert rows["decoder.block.0.layer.1.EncDecAttention.k"] == 0
    assert rows["decoder.block.0.layer.1.EncDecAttention"] == 4 * 40 * 2 * 3 * 13
    assert rows["decoder.block.0.layer.0.SelfAttention"] == 4 * 40 * 2 * (6 + 7 + 8)
    assert rows["lm_head"] == 2 * 24 * 101 * 2 * 3


def test_prefill_makes_logits_for_the_last_position_of_the_decoder() -> None:
    rows = forward(T5, seq_len=13, decoder_seq_len=7, phase="prefill")
    assert rows["lm_head"] == 2 * 24 * 101


def test_tokens_are_those_of_both_sides() -> None:
    assert estimate_flops(T5, batch_size=2, seq_len=13, decoder_seq_len=7).tokens == 2 * (13 + 7)
    assert estimate_flops(T5, batch_size=2, seq_len=13, decoder_seq_len=7, phase="decode").tokens == 2 * 7
    assert estimate_flops(WHISPER, audio=[2.0], decoder_seq_len=7).tokens == 7


def test_freezing_one_name_of_a_shared_table_freezes_all() -> None:
    whole = estimate_flops(T5, seq_len=13, decoder_seq_len=7)
    for name in ("shared", "encoder.embed_tokens", "decoder.embed_tokens", "lm_head"):
        frozen = estimate_flops(T5, seq_len=13, decoder_seq_len=7, recipe={"freeze": [name]})
        assert frozen.parameters["trainable"] == whole.parameters["total"] - 24 * 101, name


def test_encoder_alone_trains_through_the_decoder() -> None:
    """Cross-attention hands the gradient back: only its keys and values reach a decoder below which nothing trains."""
    recipe = {"train_only": ["encoder.block.*"]}
    rows = {row.path: row for row in bind(T5, recipe=recipe)(1, 13, decoder_seq_len=7).by_module(per_layer=True)}
    assert rows["decoder.block.0.layer.0.SelfAttention.q"].backward == 0
    assert rows["decoder.block.0.layer.1.EncDecAttention.q"].backward == 0
    key = rows["decoder.block.0.layer.1.EncDecAttention.k"]
    assert key.backward == key.forward
    mlp = rows["decoder.block.0.layer.2.DenseReluDense.wi"]
    assert mlp.backward == mlp.forward
    above = rows["decoder.block.1.layer.1.EncDecAttention.q"]
    assert above.backward == above.forward


# --- batches --------------------------------------------------------------------------------------------------------
def test_batch_gives_both_lengths() -> None:
    batch = {"input_ids": [[5] * 13] * 2, "decoder_input_ids": [[5] * 7] * 2}
    expected = estimate_flops(T5, batch_size=2, seq_len=13, decoder_seq_len=7)
    assert estimate_flops(T5, batch=batch) == expected
    labels = {"input_ids": [[5] * 13] * 2, "labels": [[5] * 7] * 2}
    assert estimate_flops(T5, batch=labels) == expected


def test_padding_is_not_work_on_either_side() -> None:
    batch = {
        "input_ids": [[5] * 13] * 2,
        "attention_mask": [[1] * 13, [1] * 9 + [0] * 4],
        "labels": [[5] * 4 + [-100] * 3, [-100] * 2 + [5] * 5],
    }
    needed = sum(estimate_flops(T5, seq_len=seq, decoder_seq_len=length).total for seq, length in ((13, 4), (9, 7)))
    assert estimate_flops(T5, batch=batch).total == needed
    full = estimate_flops(T5, batch_size=2, seq_len=13, decoder_seq_len=7, convention="full")
    assert estimate_flops(T5, batch=batch, convention="full").total == full.total
    batch = {**batch, "decoder_attention_mask": [[1] * 4 + [0] * 3, [1] * 7]}
    assert estimate_flops(T5, batch=batch).total == needed


def test_batch_of_audio() -> None:
    batch = {"input_features": [[[0.0] * 300] * 7] * 2, "labels": [[5] * 7] * 2}
    assert (
        estimate_flops(WHISPER, batch=batch).total
        == estimate_flops(WHISPER, batch_size=2, clips=[300, 300], decoder_seq_len=7).total
    )


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"input_ids": [[5] * 13]}, "decoder_input_ids or labels"),
        ({"input_ids": [[5] * 13], "labels": [[5] * 7] * 2}, r"must be \(1, length\)"),
        ({"input_ids": [[5] * 13], "labels": [5] * 7}, r"must be \(1, length\)"),
        (
            {"input_ids": [[5] * 4] * 2, "attention_mask": [[1] * 4, [0] * 4], "labels": [[5]] * 2},
            "one sequence per row",
        ),
        ({"labels": [[5] * 7]}, "input_ids"),
    ],
)
def test_batch_errors(batch: dict[str, Any], message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        estimate_flops(T5, batch=batch)


# --- audio ----------------------------------------------------------------------------------------------------------
def test_whisper_pads_every_clip_to_its_window() -> None:
    rows = forward(WHISPER, audio=[2.0], decoder_seq_len=7)
    assert rows == forward(WHISPER, audio=[3.0], decoder_seq_len=7)
    assert rows["model.encoder.conv1"] == 2 * 3 * 7 * 24 * 300
    assert rows["model.encoder.layers.0.self_attn"] == 4 * 24 * 150 * 150
    assert rows["model.decoder.layers.0.encoder_attn"] == 4 * 24 * 7 * 150


def test_decode_reads_audio_from_the_cache() -> None:
    rows = forward(WHISPER, audio=[2.0], decoder_seq_len=1, context=5, phase="decode")
    assert not any(flops for path, flops in rows.items() if path.startswith("model.encoder."))
    assert rows["model.decoder.layers.0.encoder_attn.k_proj"] == 0
    assert rows["model.decoder.layers.0.encoder_attn"] == 4 * 24 * 150


def test_masked_padding_of_audio_is_not_needed() -> None:
    needed = forward(QWEN_AUDIO, seq_len=60, audio=[1.01])
    assert needed["model.audio_tower.conv1"] == 2 * 3 * 7 * 24 * 101
    assert needed["model.audio_tower.layers.0.fc1"] == 2 * 24 * 41 * 51
    assert needed["model.audio_tower.layers.0.self_attn"] == 4 * 24 * 51 * 51
    executed = forward(QWEN_AUDIO, convention="full", seq_len=60, audio=[1.01])
    assert executed["model.audio_tower.layers.0.fc1"] == 2 * 24 * 41 * 150


def test_audio_is_frozen_by_its_word() -> None:
    whole = estimate_flops(QWEN_AUDIO, seq_len=60, audio=[1.0])
    frozen = estimate_flops(QWEN_AUDIO, seq_len=60, audio=[1.0], recipe={"freeze": ["audio"]})
    assert frozen.by_component()["audio"][1] == 0
    assert whole.by_component()["audio"][1] > 0
    assert frozen.by_component()["mlp"] == whole.by_component()["mlp"]


def test_text_alone_notes_the_missing_audio() -> None:
    estimate = estimate_flops(QWEN_AUDIO, seq_len=60)
    assert estimate.by_component()["audio"] == (0, 0, 0, 0)
    assert any("audio=[" in note for note in estimate.notes)


# --- errors ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("config", "workload", "message"),
    [
        (T5, {"seq_len": 13}, "has a decoder: give its length too .decoder_seq_len=N"),
        (T5, {"decoder_seq_len": 7}, "give the encoder's length too .seq_len=N"),
        (T5, {"seq_len": 13, "decoder_seq_len": 0}, "decoder_seq|seq"),
        (T5, {"lengths": [3, 4], "decoder_seq_len": 7}, "no packed lengths"),
        (T5, {"seq_len": 13, "decoder_seq_len": 7, "audio": [1.0]}, "takes no audio"),
        (T5, {"seq_len": 13, "decoder_seq_len": 7, "context": 3}, "context belongs to phase decode"),
        (LLAMA, {"seq_len": 13, "decoder_seq_len": 7}, "is no encoder-decoder"),
        (LLAMA, {"seq_len": 13, "clips": [40]}, "takes no audio"),
        (WHISPER, {"decoder_seq_len": 7}, "one clip of audio per sample"),
        (WHISPER, {"decoder_seq_len": 7, "batch_size": 2, "audio": [1.0]}, "one clip of audio per sample"),
        (WHISPER, {"decoder_seq_len": 7, "audio": [3.5]}, r"at most 3 s \(300 frames\), not 3\.5 s \(350 frames\)"),
        (WHISPER, {"decoder_seq_len": 7, "seq_len": 9, "audio": [1.0]}, "no encoder of text"),
        (WHISPER, {"decoder_seq_len": 41, "audio": [1.0]}, "beyond the 40 positions"),
        (WHISPER, {"audio": [1.0], "seq_len": 7}, "has a decoder"),
        (WHISPER, {"decoder_seq_len": 7, "audio": [-1.0]}, "audio must be a positive number, not -1.0"),
        (QWEN_AUDIO, {"seq_len": 20, "audio": [1.0]}, "the audio takes 25 tokens, more than seq_len=20"),
        (QWEN_AUDIO, {"seq_len": 1, "context": 30, "phase": "decode", "audio": [1.0]}, "decode does no audio work"),
    ],
)
def test_workload_errors(config: dict[str, Any], workload: dict[str, Any], message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        estimate_flops(config, **workload)


def test_workload_says_both_sides() -> None:
    load = make_workload(2, 13, decoder_seq_len=7, phase="decode", context=5)
    assert load.decoder is not None
    assert (load.decoder.seq, load.decoder.context, load.seq) == (7, 5, 13)
    assert "decoder=" in repr(load)


# --- command line ---------------------------------------------------------------------------------------------------
def test_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write(T5, tmp_path)
    code, out, _ = run(["estimate", "--model", model, "--seq", "13", "--decoder-seq", "7", "--json"], capsys)
    shown = json.loads(out)
    assert code == 0
    assert shown["flops"]["total"] == estimate_flops(T5, seq_len=13, decoder_seq_len=7).total
    assert shown["workload"]["decoder_seq"] == 7
    code, out, _ = run(["estimate", "--model", model, "--seq", "13", "--decoder-seq", "7"], capsys)
    assert "1 × 13 tokens encoded, 1 × 7 tokens decoded" in out
    code, out, _ = run(
        ["estimate", "--model", model, "--seq", "13", "--phase", "decode", "--context", "5", "--json"], capsys
    )
    decoded = estimate_flops(T5, seq_len=13, decoder_seq_len=1, phase="decode", context=5)
    assert json.loads(out)["flops"]["total"] == decoded.total


def test_audio_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "whisper").mkdir()
    (tmp_path / "qwen").mkdir()
    whisper, qwen = write(WHISPER, tmp_path / "whisper"), write(QWEN_AUDIO, tmp_path / "qwen")
    code, out, _ = run(
        ["estimate", "--model", whisper, "--batch", "2", "--audio", "2.5", "--decoder-seq", "7", "--json"], capsys
    )
    shown = json.loads(out)
    assert code == 0
    assert shown["workload"]["clips"] == [250, 250]
    expected = estimate_flops(WHISPER, batch_size=2, audio=[2.5, 2.5], decoder_seq_len=7)
    assert shown["flops"]["total"] == expected.total
    code, out, _ = run(["estimate", "--model", qwen, "--text", "10", "--audio", "1", "--audio", "2", "--json"], capsys)
    assert json.loads(out)["workload"]["seq"] == 10 + 25 + 50
    code, out, _ = run(["compare", f"{whisper}@audio=2;decoder_seq=7", "--json"], capsys)
    assert json.loads(out)[0]["workload"]["clips"] == [200]


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (T5, ["--seq", "13"], "--decoder-seq"),
        (T5, ["--decoder-seq", "7"], "--seq"),
        (LLAMA, ["--seq", "13", "--decoder-seq", "7"], "no encoder-decoder"),
        (LLAMA, ["--seq", "13", "--audio", "2"], "takes no audio"),
        (WHISPER, ["--decoder-seq", "7"], "--audio"),
        (WHISPER, ["--audio", "soon", "--decoder-seq", "7"], "'soon' is not a number; write 0.5 or 500ms"),
        (QWEN_AUDIO, ["--seq", "10", "--audio", "2"], "50 tokens, more than --seq 10"),
        (QWEN_AUDIO, ["--phase", "decode", "--context", "60", "--audio", "2"], "decode does no audio work"),
    ],
)
def test_option_errors(
    config: dict[str, Any], options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(["estimate", "--model", write(config, tmp_path), *options], capsys)
    assert code == 2
    assert message in err


def test_more_logits_than_the_decoder_has_positions_are_noted() -> None:
    notes = estimate_flops(T5, seq_len=30, decoder_seq_len=7, logits=9).notes
    assert "logits asked for 9 positions, a sequence has 7: all of them counted" in notes
    assert not any("logits" in note for note in estimate_flops(T5, seq_len=5, decoder_seq_len=7, logits=7).notes)


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (WHISPER, [], "give --audio SECONDS for its encoder and --decoder-seq N"),
        (WHISPER, ["--audio", "3"], "give --audio SECONDS for its encoder and --decoder-seq N"),
        (WHISPER, ["--audio", "3", "--decoder-seq", "4", "--image", "10x10"], "takes no images"),
        (WHISPER, ["--audio", "3000", "--decoder-seq", "4"], "at most 3 s (300 frames), not 3000 s"),
        (QWEN_AUDIO, ["--seq", "20", "--audio", "1"], "the audio takes 25 tokens, more than --seq 20"),
        (QWEN_AUDIO, ["--seq", "20", "--image-grid", "1,2,2"], "takes no images"),
        (T5, [], "give --seq N for its encoder and --decoder-seq N for its decoder"),
        (T5, ["--lengths", "3,4"], "takes no packed --lengths; give --seq N"),
        (T5, ["--lengths", "3,4", "--decoder-seq", "5"], "takes no packed --lengths; give --seq N"),
    ],
)
def test_options_are_asked_for_by_name(
    config: dict[str, Any], options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, error = run(["estimate", "--model", write(config, tmp_path), *options], capsys)
    assert code == 2
    assert message in error
    assert "is a text model" not in error
