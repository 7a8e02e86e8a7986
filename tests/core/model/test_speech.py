"""Qwen3-TTS by hand: what a frame of speech costs, how a batch says its frames, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from flopcalc import bind, estimate_flops
from flopcalc.base.data import find_data_file, load_toml
from flopcalc.base.errors import ConfigError, SpecError, WorkloadError
from flopcalc.core.spec.spec import read_spec

Json = dict[str, Any]
# Layers of the code predictor in the first example: d 20, ff 33, 6 heads of 8, 3 key heads; the talker's d is 24.
LINEAR = 20 * (6 + 3 + 3) * 8 + 6 * 8 * 20 + 3 * 20 * 33


def make_config(**talker: Any) -> Json:
    path = find_data_file("examples", "qwen3_tts")
    assert path is not None
    config = load_toml(path)["configs"][0]
    return {**config, "model_type": "qwen3_tts", "talker_config": {**config["talker_config"], **talker}}


@pytest.mark.parametrize("frames", [1, 5])
@pytest.mark.parametrize(("convention", "pairs"), [("model", 16 * 17 // 2), ("full", 16 * 16)])
def test_a_frame_of_speech(frames: int, convention: str, pairs: int) -> None:
    config = make_config()
    silent, spoken = (
        estimate_flops(config, batch_size=2, seq_len=20, phase="forward", convention=convention, clips=clips)
        for clips in (None, [frames] * 2)
    )
    per_frame = 16 * (24 * 20 + 2 * LINEAR) + 2 * 2 * pairs * 6 * 8 + 15 * 20 * 53
    assert spoken.forward - silent.forward == 2 * 2 * frames * per_frame


def test_seconds_and_text() -> None:
    """12.5 frames per second; the text's length adds them."""
    bound = bind(make_config())
    assert bound.count_frames([0.4, 2]) == [5, 25]
    assert bound.audio is not None
    assert bound.audio.count_tokens(25) == 25


def test_a_batch_says_its_frames() -> None:
    bound = bind(make_config())
    mask = [[0, 0, 1, 1, 1, 0], [0, 1, 1, 1, 1, 0]]
    batch = {"input_ids": [[1] * 6] * 2, "codec_mask": mask}
    expected = estimate_flops(make_config(), batch_size=2, seq_len=6, clips=[3, 4])
    assert bound.estimate_batch(batch).total == expected.total
    assert bound.estimate_batch({**batch, "codec_mask": [[0] * 6] * 2}).total < expected.total
    with pytest.raises(WorkloadError, match=r"codec_mask must be \(batch, length\)"):
        bound.estimate_batch({**batch, "codec_mask": [1, 1]})


def test_the_voice_has_parameters_alone() -> None:
    base = bind(make_config()).parameters()
    other = bind({**make_config(), "tts_model_type": "voice_design"}).parameters()
    assert base["trainable"] == other["trainable"] == other["total"] < base["total"]
    assert any("speaker encoder" in note for note in estimate_flops(make_config(), seq_len=9).notes)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_generation_is_refused(phase: str) -> None:
    with pytest.raises(WorkloadError, match=f"phase {phase} is not described: use phase train or forward"):
        estimate_flops(make_config(), seq_len=5, phase=phase)


@pytest.mark.parametrize(
    ("talker", "words"),
    [
        ({"num_code_groups": 32}, "num_code_groups must be 16"),
        ({"rope_scaling": {"mrope_section": [3, 1, 1]}}, "mrope_section .* and interleaved"),
        ({"rope_scaling": {"mrope_section": [3, 1, 2], "interleaved": False}}, "twice the sum"),
        ({"hidden_size": 26}, "enc_dim must be"),
    ],
)
def test_refused(talker: Json, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        bind(make_config(**talker))


def test_unknown_phases(tmp_path: Any) -> None:
    path = tmp_path / "odd.toml"
    path.write_text('extends = "llama"\narchitecture = "A"\nsource = "b"\nphases = ["sleep"]\n')
    with pytest.raises(SpecError, match="phases must be a list of"):
        read_spec(str(path))
