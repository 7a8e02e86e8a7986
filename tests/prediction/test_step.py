"""Seconds: the pieces by hand, the whole by its sums; wrong input is refused in words."""

from __future__ import annotations

import json
import math

import pytest

from flopcalc.errors import FlopcalcError
from flopcalc.prediction.machine import (
    Machine,
    ProductShape,
    attention_features,
    load_predictor,
    read_curve,
    time_matrix,
    time_shape,
)
from flopcalc.prediction.step import count_again, host_features, host_seconds, predict
from flopcalc.prediction.work import make_work
from flopcalc.workload import make_workload

# One processor that does 2 FLOP a second on full tiles, no costs beside.
PLAIN = ProductShape(2.0, 0.0, 0.0, 0.5, 0.25, 0.125, 1e9, 0.0, 1.0)


@pytest.mark.parametrize(
    ("m", "n", "k", "copies", "seconds"),
    [
        (128, 256, 10, 1, 128 * 256 * 10),  # one full tile
        (256, 256, 10, 1, 2 * 128 * 256 * 10),
        (128, 256, 10, 3, 3 * 128 * 256 * 10),
        (1, 1, 10, 1, 128 * 128 * 10 / 0.5),  # a corner of a tile takes the whole tile: the cheapest that there is
    ],
)
def test_tiles(m: int, n: int, k: int, copies: int, seconds: float) -> None:
    assert time_matrix(PLAIN, m, n, k, copies) == seconds


def test_directions_multiply_the_sizes_that_autograd_does() -> None:
    shape = PLAIN._replace(units=4.0)
    assert time_shape(shape, "forward", 512, 256, 64) == time_matrix(shape, 512, 256, 64, 1)
    assert time_shape(shape, "dgrad", 512, 256, 64) == time_matrix(shape, 512, 64, 256, 1)
    assert time_shape(shape, "wgrad", 512, 256, 64) == time_matrix(shape, 256, 64, 512, 1)


def test_bytes_bound_a_thin_product() -> None:
    shape = PLAIN._replace(rate=1e30, bandwidth=2.0)
    assert time_matrix(shape, 4, 8, 16, 1) == pytest.approx(4 * 16 + 16 * 8 + 4 * 8)


@pytest.mark.parametrize(
    ("mask", "length", "keys", "expected"),
    [
        ("causal", 128, 128, (1.0, 6 * 128.0, 6 * 128.0 * 128, 128.0)),
        ("causal", 200, 200, (1.0, 6 * 200.0, 6 * 3 * 128.0 * 128, 200.0)),  # blocks of 128
        ("full", 100, 100, (1.0, 600.0, 60000.0, 100.0)),
        ("decode", 1, 500, (1.0, 0.0, 1000.0, 500.0)),  # keys of two rows with one head each
    ],
)
def test_attention_features(mask: str, length: int, keys: int, expected: tuple[float, ...]) -> None:
    assert attention_features(mask, 2, 3, 1, length, keys) == expected


@pytest.mark.parametrize(
    ("size", "seconds"), [(1, 2.0), (10, 2.0), (1000, 20.0), (100, math.sqrt(40.0)), (5000, 100.0)]
)
def test_curve(size: float, seconds: float) -> None:
    assert read_curve([(10, 2.0), (1000, 20.0)], size) == pytest.approx(seconds)


def test_host_features() -> None:
    seen = {
        "forward module": 5, "forward view": 7, "forward pointwise": 11, "backward node": 13, "backward product": 17,
        "again pointwise": 2, "again view": 3, "optimizer adamw": 19,
    }  # fmt: skip
    units = 2 * 5 + 0.4 * 7 + 11 + 0.3 * 13 + 17 + 2 + 0.4 * 3 + 2 * 19
    assert host_features(seen, 3) == (3.0, pytest.approx(units))
    assert count_again(seen) == 2
    constants = {"train": [1.0, 10.0], "again": 100.0}
    assert host_seconds(constants, seen, "train", 3) == pytest.approx(3 + 10 * units + 200)


SMALL = {"batch_size": 1, "seq_len": 64}
LARGE = {"batch_size": 8, "seq_len": 2048}


def test_a_step_adds_up() -> None:
    found = predict("llama-3.2-1b", device="h200", **LARGE)
    assert found.bound == "device"
    assert found.step_time_s.low < found.step_time_s.mid < found.step_time_s.high
    assert sum(found.breakdown.values()) == pytest.approx(found.step_time_s.mid, rel=0.02)  # but for the clock
    parts = [found.breakdown[name] for name in ("products", "attention", "memory", "optimizer")]
    assert sum(found.modules.values()) == pytest.approx(sum(parts))
    assert found.tokens_per_s == pytest.approx(8 * 2048 / found.step_time_s.mid)
    assert 0 < found.mfu < found.hfu < 1
    assert found.memory is not None
    assert found.evidence["is_measured"]
    assert found.evidence["operators_recorded"]


def test_small_steps_wait_for_the_host() -> None:
    found = predict("llama-3.2-1b", device="h200", **SMALL)
    assert found.bound == "host"
    assert found.host_s > found.device_s
    assert found.breakdown["host"] > 0


@pytest.mark.parametrize(
    ("options", "slower"),
    [
        ({"recipe": {"recompute": "full"}}, True),
        ({"attention_kernel": "eager"}, True),
        ({"compiled": True}, False),
        ({"optimizer": "none"}, False),
        ({"phase": "prefill"}, False),
        ({"recipe": {"train_only": ["lm_head"]}}, False),
        ({"recipe": {"lora": {"r": 8, "targets": ["q_proj", "v_proj"]}}}, False),
    ],
)
def test_options_move_the_time(options: dict[str, object], slower: bool) -> None:
    plain = predict("llama-3.2-1b", device="h200", advise=False, **LARGE).device_s
    assert (predict("llama-3.2-1b", device="h200", advise=False, **LARGE, **options).device_s > plain) is slower


def test_accumulated_batches_share_one_optimizer_step() -> None:
    once = predict("llama-3.2-1b", device="h200", advise=False, **LARGE)
    twice = predict("llama-3.2-1b", device="h200", advise=False, grad_accum=2, **LARGE)
    assert twice.breakdown["optimizer"] == once.breakdown["optimizer"]
    assert twice.breakdown["products"] == pytest.approx(2 * once.breakdown["products"])


def test_another_device_is_marked_as_not_measured() -> None:
    found = predict("llama-3.2-1b", device="h100-sxm", **LARGE)
    assert not found.evidence["is_measured"]
    assert "not measured" in found.notes[0]
    width = (found.step_time_s.high - found.step_time_s.low) / found.step_time_s.mid
    assert width >= 0.6


def test_decode_and_images() -> None:
    decode = predict("qwen2-vl-2b", device="h200", batch_size=2, seq_len=4, phase="decode", context=300)
    assert decode.bound == "host"
    seen = predict("qwen2-vl-2b", device="h200", batch_size=1, seq_len=1024, image_grid_thw=[[1, 36, 52]])
    text = predict("qwen2-vl-2b", device="h200", batch_size=1, seq_len=1024)
    assert seen.device_s > text.device_s
    assert any(name.startswith("model.visual") for name in seen.modules)


def test_work_has_every_product_of_the_count() -> None:
    from flopcalc.estimate import bind

    estimator = bind("qwen3-1.7b", convention="full")
    load = make_workload(2, 512)
    work = make_work(estimator, load)
    products = sum(product.flops for product in work.products)
    attention = sum(row.forward * value * block.copies + row.backward * value * block.copies
                    for block, row, value in estimator.rows(load, "full") if row.op.kind == "attend")  # fmt: skip
    assert products + attention == sum(estimator.count(load, "full"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"device": "h900"}, "unknown"),
        ({"device": "h200", "optimizer": "adam"}, "optimizer 'adam' unknown"),
        ({"device": "h200", "recipe": {"clipping": "hooks"}}, "not predicted"),
        ({"device": "h200", "grad_accum": 0}, "at least 1"),
        ({"device": "h200", "dtype": "fp3"}, "unknown"),
    ],
)
def test_wrong_input(options: dict[str, object], words: str) -> None:
    with pytest.raises(FlopcalcError, match=words):
        predict("llama-3.2-1b", **LARGE, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(("text", "words"), [("{", "cannot be read"), ('{"schema": 99}', "schema 99")])
def test_a_broken_predictor_is_named(text: str, words: str, tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    folder = tmp_path / "predictors"
    folder.mkdir()
    (folder / "h200-sxm.json").write_text(text)
    monkeypatch.setenv("FLOPCALC_DATA", str(tmp_path))
    load_predictor.cache_clear()
    try:
        with pytest.raises(FlopcalcError, match=words):
            Machine("h200")
    finally:
        load_predictor.cache_clear()


def test_to_dict_is_json() -> None:
    shown = json.loads(json.dumps(predict("llama-3.2-1b", device="h200", **SMALL).to_dict()))
    assert {"step_time_s", "bound", "mfu", "hfu", "tokens_per_s", "breakdown", "memory_bytes", "evidence", "notes"} <= {
        *shown
    }
    assert set(shown["step_time_s"]) == {"low", "mid", "high"}
