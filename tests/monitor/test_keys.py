"""Metric names: the tuples do not overlap, styles rename what they know and nothing else."""

from __future__ import annotations

import pytest

from flopcalc.base.errors import ConfigError
from flopcalc.monitor.keys import CONTEXT, CORE, DETAIL, RANK, STYLES, rename


def test_the_names_asked_for_are_core() -> None:
    assert CORE == (
        "global_step", "perf/mfu", "perf/mfu_percent", "perf/step_time", "perf/steps_per_second",
        "perf/tokens_per_second", "perf/samples_per_second", "training/loss", "training/lr", "training/grad_norm",
        "training/epoch",
    )  # fmt: skip


def test_no_name_stands_twice() -> None:
    every = (*CORE, *CONTEXT, *RANK, *DETAIL)
    assert len(set(every)) == len(every)


@pytest.mark.parametrize("style", STYLES)
def test_a_style_renames_known_names_to_names_of_their_own(style: str) -> None:
    every = (*CORE, *CONTEXT, *RANK, *DETAIL)
    assert set(STYLES[style]) <= set(every)
    renamed = rename(dict.fromkeys(every, 1), style)
    assert len(renamed) == len(every)  # no two became one
    assert list(renamed) == [STYLES[style].get(key, key) for key in every]


@pytest.mark.parametrize(
    ("style", "expected"),
    [
        ("flopcalc", {"global_step": 3, "perf/mfu": 0.5, "perf/mfu_percent": 50.0, "perf/tokens_per_second": 9.0}),
        (
            "composer",
            {
                "global_step": 3,
                "throughput/device/mfu": 0.5,
                "perf/mfu_percent": 50.0,
                "throughput/tokens_per_sec": 9.0,
            },
        ),
        (
            "lightning",
            {"global_step": 3, "train/device/mfu": 0.5, "perf/mfu_percent": 50.0, "train/items_per_sec": 9.0},
        ),
        ("torchtitan", {"global_step": 3, "perf/mfu": 0.5, "mfu(%)": 50.0, "perf/tokens_per_second": 9.0}),
        (
            "hf",
            {"train/global_step": 3, "perf/mfu": 0.5, "perf/mfu_percent": 50.0, "train_tokens_per_second": 9.0},
        ),
    ],
)
def test_styles(style: str, expected: dict[str, float]) -> None:
    record = {"global_step": 3, "perf/mfu": 0.5, "perf/mfu_percent": 50.0, "perf/tokens_per_second": 9.0}
    assert rename(record, style) == expected
    assert "perf/mfu" in record  # the record itself is left alone


def test_an_unknown_style_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^no key style 'compser'\. Did you mean composer\? Known: flopcalc, "):
        rename({}, "compser")


def test_lightning_logs_the_names_of_its_style() -> None:
    throughput = pytest.importorskip("lightning.fabric.utilities.throughput")
    meter = throughput.Throughput(available_flops=100.0, world_size=2, window_size=2)
    for second in (1, 2, 3):
        meter.update(time=float(second), batches=second, samples=second, lengths=second, flops=10)
    logged = {f"train/{key}" for key in meter.compute()}
    assert set(STYLES["lightning"].values()) - {"epoch"} <= logged
