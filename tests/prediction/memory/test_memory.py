"""Memory of a step: exact sums of small models, real steps on an H200, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flopcalc.api import bind
from flopcalc.base.data import find_data_dir
from flopcalc.base.errors import DeviceError, WorkloadError
from flopcalc.core.workload.workload import make_workload
from flopcalc.hardware.devices import Device
from flopcalc.prediction.memory import peak as module
from flopcalc.prediction.memory.peak import (
    Memory,
    Shards,
    can_resize,
    find_capacity,
    largest_batch,
    predict_memory,
    resize_batch,
)
from flopcalc.prediction.operators import Operator, Operators, SavedTensor
from flopcalc.report.prediction import format_memory

CUBLAS = 32 << 20
TINY = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000, "tie_word_embeddings": False,
}  # fmt: skip
# q 64·64, k and v 64·32, o 64·64, three of 64·128, two norms of 64.
LAYER = 4096 + 2 * 2048 + 4096 + 3 * 8192 + 128
TOTAL = 64_000 + 2 * LAYER + 64 + 64_000
TOKENS = 2 * 32
LOGITS = TOKENS * 1000


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """1,000 bytes saved in each of two layers, 600 more in the head, and log_softmax's result."""

    def list_operators(estimator: Any, load: Any, *_: Any) -> Operators:
        is_again = estimator.recipe.recompute != "none"
        rows = [SavedTensor("model.layers.*.mlp.act_fn", "language", 1000, 2, is_again)]
        if is_again:
            rows.append(SavedTensor("model.layers.*", "language", 100, 2))
        rows += [
            SavedTensor("lm_head", "language", 600, 1),
            SavedTensor("", "language", load.rows * load.seq * 4000, 1),
        ]
        return Operators((), tuple(rows), ("a note",), True)

    monkeypatch.setattr(module, "list_operators", list_operators)


def predict(batch: int = 2, seq: int = 32, recipe: dict[str, Any] | None = None, **settings: Any) -> Memory:
    return predict_memory(bind(TINY, recipe=recipe), make_workload(batch, seq), **settings)


# --- training ---------------------------------------------------------------------------------------------------------
@pytest.mark.usefixtures("saved")
def test_loss_moment() -> None:
    found = predict()
    assert found.weights == 2 * TOTAL
    assert found.gradients == 2 * TOTAL
    assert found.optimizer == 4 * TOTAL
    assert found.activations == 2 * 1000 + 600
    assert found.logits == 12 * LOGITS  # kept, the loss's gradient and its own, each in float32
    assert found.inputs == TOKENS * 16
    assert found.workspace == 2 * CUBLAS
    assert found.moment == "loss"
    assert found.peak == 6 * TOTAL + 2600 + 12 * LOGITS + TOKENS * 16 + 2 * CUBLAS
    assert sum(found.at_peak.values()) == found.peak
    assert found.at_peak["gradients"] == 0
    assert "a note" in found.notes


@pytest.mark.usefixtures("saved")
def test_last_gradient_moment() -> None:
    # Few tokens: the peak is where all gradients are there, and the embedding's reads one of 2 x 64 numbers.
    found = predict(1, 2)
    assert found.moment == "backward"
    assert found.peak == 8 * TOTAL + 2 * 64 * 2 + 2 * 16 + 2 * CUBLAS


@pytest.mark.usefixtures("saved")
def test_tied_embedding_has_three_gradients_at_once() -> None:
    found = predict_memory(bind({**TINY, "tie_word_embeddings": True}), make_workload(1, 2))
    total = TOTAL - 64_000
    assert found.peak == 8 * total + 2 * 2 * 64_000 + 2 * 16 + 2 * CUBLAS


@pytest.mark.usefixtures("saved")
def test_recompute_keeps_inputs_alone() -> None:
    assert predict(recipe={"recompute": "full"}).activations == 2 * 100 + 600


@pytest.mark.parametrize(
    ("attention", "extra"),
    [("sdpa", 0), ("eager", 6 * 4 * 2 * 32 * 32)],  # probabilities in float32 and bf16 of every pair and head
)
def test_model_that_was_not_recorded(monkeypatch: pytest.MonkeyPatch, attention: str, extra: int) -> None:
    monkeypatch.setattr(module, "list_operators", lambda *_: Operators((), (), (), False))
    layer = (
        2 * 6 * 64  # norms: input in float32, result before the weight
        + 2 * 64  # what q, k and v read
        + 2 * (64 + 2 * 32 + 64)
        + 4 * 4  # queries, keys, values, output, a sum per head
        + 2 * 64  # what gate and up read
        + 2 * (3 * 128)  # gate, its activation, up
        + 2 * 128  # what down reads
    )
    found = predict(attention=attention)
    assert found.activations == TOKENS * (2 * layer + 6 * 64 + 2 * 64) + 2 * extra
    assert any("we assume code like that of most models" in note for note in found.notes)
    again = predict(attention=attention, recipe={"recompute": "full"})
    assert again.activations == TOKENS * (2 * 2 * 64 + 6 * 64 + 2 * 64)


@pytest.mark.parametrize(
    ("settings", "gradients", "states"),
    [
        ({}, 2 * TOTAL, 4 * TOTAL),
        ({"optimizer": "sgd"}, 2 * TOTAL, 0),
        ({"optimizer": "sgd-momentum"}, 2 * TOTAL, 2 * TOTAL),
        ({"optimizer": "lion"}, 2 * TOTAL, 2 * TOTAL),
        ({"optimizer": "none"}, 2 * TOTAL, 0),
        ({"optimizer": "adamw-32bit"}, 2 * TOTAL, 8 * TOTAL),
        ({"optimizer": "adamw-32bit", "dtype": "fp32"}, 4 * TOTAL, 8 * TOTAL),
        ({"optimizer": "adamw-8bit"}, 2 * TOTAL, 2 * TOTAL + 2 * 4 * -(-TOTAL // 256)),  # a scale per 256 numbers
        ({"optimizer": "adamw-fp8"}, 2 * TOTAL, 2 * TOTAL + 2 * 4 * -(-TOTAL // 256)),
        ({"optimizer": "adamw-offload"}, 2 * TOTAL, 0),
        ({"dtype": "fp32"}, 4 * TOTAL, 8 * TOTAL),
        ({"optimizer": "adamw-master"}, 4 * TOTAL, 12 * TOTAL),  # fp32 gradients, master weights, two states
        ({"optimizer": "adamw-master", "dtype": "fp32"}, 4 * TOTAL, 8 * TOTAL),  # no second copy of fp32 weights
        ({"shards": Shards(1, 8, 8)}, 2 * TOTAL, TOTAL // 2),
        ({"shards": Shards(2, 8, 8)}, TOTAL // 4, TOTAL // 2),
        ({"shards": Shards(1, 3, 3)}, 2 * TOTAL, -(-4 * TOTAL // 3)),
        ({"recipe": {"freeze": ["model.embed_tokens", "lm_head"]}}, 2 * (2 * LAYER + 64), 4 * (2 * LAYER + 64)),
        # r (in + out) of q and v in two layers, in float32
        ({"recipe": {"lora": "r=4,targets=q_proj+v_proj"}}, 4 * 2 * 4 * (128 + 96), 8 * 2 * 4 * (128 + 96)),
    ],
)
@pytest.mark.usefixtures("saved")
def test_gradients_and_states(settings: dict[str, Any], gradients: int, states: int) -> None:
    found = predict(**settings)
    assert (found.gradients, found.optimizer) == (gradients, states)


@pytest.mark.usefixtures("saved")
def test_foreach_step_holds_a_copy() -> None:
    found = predict(1, 2, optimizer="adamw-foreach")
    assert found.moment == "optimizer"
    assert found.peak == (8 + 2) * TOTAL + 2 * 16 + 2 * CUBLAS


@pytest.mark.usefixtures("saved")
def test_sharded_weights_are_gathered() -> None:
    found = predict(shards=Shards(3, 8, 8))
    assert found.weights == TOTAL // 4
    # The widest unit is the embedding: its weights and the next ones whole, and its gradient.
    assert found.workspace == 2 * CUBLAS + 2 * 2 * 64_000 + 2 * 64_000


@pytest.mark.usefixtures("saved")
def test_window_keeps_masks() -> None:
    model = bind({**TINY, "model_type": "mistral", "sliding_window": 16})
    plain = predict_memory(model, make_workload(2, 15)).activations
    assert plain == 2600
    assert predict_memory(model, make_workload(2, 32)).activations == 2600 + 2 * (2 * 32 * 32 * 2)
    assert predict_memory(model, make_workload(2, 32), attention="eager").activations == 2600


def test_tower_without_images_gets_no_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "list_operators", lambda *_: Operators((), (), (), True))
    vision = {
        "model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "image_size": 8, "patch_size": 4, "projection_dim": 32,
    }  # fmt: skip
    text = {**TINY, "tie_word_embeddings": False}
    model = bind({"model_type": "llava", "text_config": text, "vision_config": vision, "image_token_index": 999})
    found = predict_memory(model, make_workload(1, 8))
    assert found.weights == 2 * model.parameters()["total"]
    assert (found.gradients, found.optimizer) == (2 * TOTAL, 4 * TOTAL)
    seen = predict_memory(model, make_workload(1, 8, image_grid_thw=[[1, 2, 2]]))
    # All but the last layer, of which nothing is read.
    last = 4 * (32 * 32 + 32) + 2 * 32 * 48 + 48 + 32 + 4 * 32
    assert model.parameters()["total"] - seen.gradients // 2 == last


def test_dropout_keeps_a_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = (SavedTensor("transformer.h.*.mlp.dropout", "language", 2 * 64 * 64, 2),)
    monkeypatch.setattr(module, "list_operators", lambda *_: Operators((), rows, (), True))
    config = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 1000, "n_positions": 64}
    load = make_workload(2, 32)
    assert predict_memory(bind({**config, "resid_pdrop": 0.1}), load).activations == 2 * 64 * 64
    assert predict_memory(bind({**config, "resid_pdrop": 0.0}), load).activations == 0


@pytest.mark.parametrize(
    ("attention", "kind", "copies"), [("sdpa", "glm", 1), ("sdpa", "llama", 0), ("flash", "glm", 0)]
)
def test_outputs_of_partly_rotated_heads_are_copied(
    monkeypatch: pytest.MonkeyPatch, attention: str, kind: str, copies: int
) -> None:
    monkeypatch.setattr(module, "list_operators", lambda *_: Operators((), (), (), True))
    found = predict_memory(
        bind({**TINY, "model_type": kind, "head_dim": 16}), make_workload(2, 32), attention=attention
    )
    assert found.activations == 2 * copies * 2 * TOKENS * 64


# --- without training -------------------------------------------------------------------------------------------------
@pytest.mark.usefixtures("saved")
def test_forward() -> None:
    found = predict_memory(bind(TINY), make_workload(2, 32, phase="forward"))
    assert (found.gradients, found.optimizer, found.kv_cache) == (0, 0, 0)
    assert found.logits == 2 * LOGITS
    # The logits beside the stream that the head reads.
    assert found.peak == 2 * TOTAL + CUBLAS + TOKENS * 8 + 2 * LOGITS + 2 * 64 * TOKENS


@pytest.mark.usefixtures("saved")
def test_prefill_holds_three_streams_and_the_gated_widths() -> None:
    found = predict_memory(bind(TINY), make_workload(2, 32, phase="prefill"))
    assert found.kv_cache == 2 * 2 * 2 * 16 * TOKENS * 2  # bytes, k and v, layers, width of two heads
    assert found.activations == 2 * TOKENS * (4 * 64 + 3 * 128)
    assert found.peak == 2 * TOTAL + CUBLAS + TOKENS * 8 + found.kv_cache + found.activations


@pytest.mark.parametrize(
    ("change", "width", "tokens"),
    [
        ({}, 2 * 2 * 16, 101),
        ({"model_type": "mistral", "sliding_window": 40}, 2 * 2 * 16, 40),
        ({"model_type": "phi3", "pad_token_id": 0}, 2 * 2 * 16, 101),  # one product makes queries, keys and values
    ],
)
@pytest.mark.usefixtures("saved")
def test_cache_in_decoding(change: dict[str, Any], width: int, tokens: int) -> None:
    found = predict_memory(bind({**TINY, **change}), make_workload(3, 1, phase="decode", context=100))
    assert found.kv_cache == 2 * 2 * width * tokens * 3
    assert found.logits == 3 * 1000 * 2


@pytest.mark.usefixtures("saved")
def test_latent_attention_caches_latents() -> None:
    config = {
        **TINY, "model_type": "deepseek_v3", "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16,
        "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "first_k_dense_replace": 2,
        "moe_intermediate_size": 32, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
        "n_group": 1, "topk_group": 1,
    }  # fmt: skip
    found = predict_memory(bind(config), make_workload(1, 10, phase="prefill"))
    assert found.kv_cache == 2 * 2 * 10 * (16 + 8)  # the latent and one rotated key, for all heads


EXPERTS = {**TINY, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 4, "sliding_window": None}


@pytest.mark.parametrize(
    ("width", "weighed", "held"),
    [
        (128, 2, 64 + 4 * 128),  # beside the gathered rows, gate and values, the gate's function, their product
        (16, 2, 64 + 3 * 64),  # and at the end the last product, weighed, put in order
        (16, 4, 64 + 64 + 2 * 2 * 64),  # weighed in float32
    ],
)
def test_experts_hold_their_rows(monkeypatch: pytest.MonkeyPatch, width: int, weighed: int, held: int) -> None:
    rows = 4 * TOKENS
    gather = Operator("model.layers.*.mlp.experts", "language", "forward", "gather", 0, weighed * rows * 64, 2)
    monkeypatch.setattr(module, "list_operators", lambda *_: Operators((gather,), (), (), True))
    found = predict_memory(bind({**EXPERTS, "intermediate_size": width}), make_workload(2, 32, phase="prefill"))
    assert found.activations == 2 * TOKENS * 4 * 64 + 2 * rows * held


@pytest.mark.usefixtures("saved")
def test_window_makes_masks_without_training_too() -> None:
    model = bind({**TINY, "model_type": "mistral", "sliding_window": 512, "intermediate_size": 16})
    plain, masked = (predict_memory(model, make_workload(2, seq, phase="prefill")) for seq in (511, 512))
    # Of one row as booleans, and while SDPA runs of all rows in bf16.
    assert masked.activations - plain.activations * 512 // 511 == 512 * 512 + 2 * 512 * 512 * 2


def test_tower_runs_before_there_is_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "list_operators", lambda *_: Operators((), (), (), True))
    vision = {
        "model_type": "clip_vision_model", "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 2,
        "num_attention_heads": 4, "image_size": 64, "patch_size": 4, "projection_dim": 32,
    }  # fmt: skip
    model = bind({"model_type": "llava", "text_config": TINY, "vision_config": vision, "image_token_index": 999})
    found = predict_memory(model, make_workload(1, 300, phase="prefill", image_grid_thw=[[1, 16, 16]]))
    assert found.kv_cache > 0
    assert found.at_peak["kv_cache"] == 0
    assert found.at_peak["activations"] == found.activations


@pytest.mark.usefixtures("saved")
def test_nothing_trains() -> None:
    found = predict(recipe={"freeze": ["*"]})
    assert (found.gradients, found.optimizer, found.moment) == (0, 0, "forward")


# --- devices ----------------------------------------------------------------------------------------------------------
def make_device(memory_gb: float | None) -> Device:
    return Device("box", "Box", (), {"bf16": 1.0}, memory_gb, None, None, None, "", "")


@pytest.mark.usefixtures("saved")
def test_largest_batch() -> None:
    device = make_device(1)
    model = bind(TINY)
    batch, found = largest_batch(model, lambda size: make_workload(size, 32), device)
    assert found.fits(device)
    assert found == predict_memory(model, make_workload(batch, 32))
    assert not predict_memory(model, make_workload(batch + 1, 32)).fits(device)


@pytest.mark.usefixtures("saved")
def test_one_sample_too_many() -> None:
    device = make_device(0.6)
    model = bind(TINY)
    missing = predict_memory(model, make_workload(1, 4096)).peak - find_capacity(device)
    with pytest.raises(WorkloadError, match=f"even a batch of 1 needs .* {missing / 2**20:.2f} MiB more than"):
        largest_batch(model, lambda size: make_workload(size, 4096), device)


@pytest.mark.usefixtures("saved")
def test_added_gradients_stay() -> None:
    model, load = bind(TINY), make_workload(8, 512)
    once, added = predict_memory(model, load), predict_memory(model, load, is_adding=True)
    assert once.moment == added.moment == "loss"
    assert added.peak == once.peak + once.gradients
    assert any("freed" in note for note in once.notes)
    assert not any("freed" in note for note in added.notes)


def test_rows_come_and_go_with_what_belongs_to_them() -> None:
    load = make_workload(2, 512, image_grid_thw=[[1, 4, 4]] * 2, clips=[30, 30], decoder_seq_len=9)
    assert can_resize(load)
    more = resize_batch(load, 3)
    assert (more.rows, len(more.grids), more.clips) == (3, 3, (30, 30, 30))
    assert more.decoder is not None
    assert (more.decoder.rows, more.decoder.seq) == (3, 9)
    assert not can_resize(make_workload(2, 512, image_grid_thw=[[1, 4, 4]] * 3))
    assert not can_resize(make_workload(lengths=[3, 4]))


def test_a_device_without_known_memory_is_shown_as_such() -> None:
    assert format_memory(predict(), make_device(None)).endswith("its memory is not known, so nor is whether this fits")


def test_capacity() -> None:
    assert 0.94 * 150_109_880_320 < find_capacity("h200") < 150_109_880_320  # what the driver says an H200 has
    with pytest.raises(DeviceError, match="Box has no known memory"):
        find_capacity(make_device(None))


@pytest.mark.usefixtures("saved")
def test_shown() -> None:
    found = predict()
    shown = format_memory(found, "h200")
    assert [line.split()[0] for line in shown.splitlines()[1:]] == [
        "weights",
        "gradients",
        "optimizer",
        "activations",
        "logits",
        "workspace",
        "inputs",
        "peak",
        "NVIDIA",
    ]
    assert "fits" in shown
    assert "too much by" in format_memory(found, make_device(0.51))
    assert json.loads(json.dumps(found.to_dict()))["peak"] == found.peak


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"dtype": "fp8"}, DeviceError, "not for weights in fp8"),
        ({"dtype": "bf61"}, DeviceError, "unknown. Did you mean bf16"),
    ],
)
@pytest.mark.usefixtures("saved")
def test_refused(settings: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        predict(**settings)


# --- against real steps -----------------------------------------------------------------------------------------------
def test_measured_on_h200() -> None:
    """Every step of the committed table within 2 % (the goal is 5 %)."""
    from flopcalc.measure.calibrate.tables.steps import MODELS

    path = Path(find_data_dir(), "calibration", "h200-sxm", "steps.json")
    table = json.loads(path.read_text(encoding="utf-8"))
    wrong = {}
    for values in table["rows"]:
        row = dict(zip(table["columns"], values, strict=True))
        grids = [[int(size) for size in grid.split("x")] for grid in row["images"].split("+") if grid] * row["batch"]
        model = bind(MODELS[row["model"]], recipe={"recompute": row["recompute"]})
        load = make_workload(row["batch"], row["seq"], image_grid_thw=grids or None)
        found = predict_memory(model, load, attention=row["attention"])
        if abs(found.peak / row["peak_memory_bytes"] - 1) > 0.02:
            wrong[tuple(values[:6])] = found.peak / row["peak_memory_bytes"] - 1
    assert table["rows"]
    assert not wrong
