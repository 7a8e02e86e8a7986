"""What one configuration's process does: a whole row of every trainer, FLOPs exact; what may fail without it."""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flopcalc.api import bind
from flopcalc.base.errors import DeviceError, RecipeError
from flopcalc.hardware.devices import peak_flops_per_s
from flopcalc.measure.counters import cupti
from flopcalc.measure.sweep import child
from flopcalc.measure.sweep.matrix import TRAINERS, make_matrix
from flopcalc.measure.sweep.trainers import TrainerError

Json = dict[str, Any]
CONFIG: Json = {
    "model_type": "llama", "vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
PARAMETERS = 61 * 16 * 2 + 2 * (4 * 16 * 16 + 3 * 16 * 24 + 2 * 16) + 16
KEYS = [
    "trainer", "batch_size", "seq_len", "model", "parameters", "dtype", "device", "attention", "steps", "warmup",
    "step_time_s", "tokens_per_s", "peak_memory_bytes", "memory_kind", "reserved_memory_bytes", "flops",
    "counted_flops", "counter", "expected_counted_flops", "counted_over_analytic", "measured_flops", "measured_by",
    "measured_over_analytic", "measured_note", "mfu", "hfu", "peak_flops_per_s", "peak_note", "loss", "environment",
    "notes",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_args(folder: Path, run_dir: Path | None = None, **changes: Any) -> Json:
    """The arguments as the matrix writes them, through JSON as the runner sends them."""
    path = folder / "config.json"
    path.write_text(json.dumps(CONFIG))
    given: Json = {"trainer": "StandardTrainer", "batch_size": 2, "seq_len": 12, "model": str(path), "device": "cpu"}
    given = {"steps": 3, "warmup": 1, **given, **changes}
    lists = {
        "trainers": [given.pop("trainer")],
        "batch_sizes": [given.pop("batch_size")],
        "seq_lens": [given.pop("seq_len")],
        "models": [given.pop("model")],
    }
    (configuration,) = make_matrix(**lists, **given)
    args = configuration.to_args() | configuration.find_places()
    args["run_dir"] = None if run_dir is None else str(run_dir)
    read: Json = json.loads(json.dumps(args))
    return read


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("trainer", TRAINERS)
def test_row(trainer: str, attention: str, tmp_path: Path) -> None:
    args = make_args(tmp_path, trainer=trainer, attention=attention)
    row = json.loads(json.dumps(child.start(args)({})))
    assert list(row) == KEYS
    same = ("trainer", "batch_size", "seq_len", "model", "attention", "steps", "warmup")
    assert {key: row[key] for key in same} == {key: args[key] for key in same}
    assert (row["parameters"], row["dtype"], row["device"]) == (PARAMETERS, "fp32", "cpu")
    # FLOPs: with the kernel that runs, and operator by operator; the second to the FLOP.
    clipping = TRAINERS[trainer]
    kernel = "eager" if attention == "eager" else "auto"
    core = bind(CONFIG, convention="hardware", attention_kernel=kernel, clipping=clipping)(2, 12)
    assert row["flops"] == {
        "convention": "hardware",
        "forward": core.forward,
        "backward": core.backward,
        "clipping": core.clipping,
        "total": core.total,
        "model_total": bind(CONFIG)(2, 12).total,
    }
    assert (core.clipping > 0) == (clipping != "none")
    eager = bind(CONFIG, convention="hardware", attention_kernel="eager", clipping=clipping)(2, 12).total
    scores = 2 * 2 * 12 * 12 * 16 * 2  # samples, 2 FLOPs, pairs, width, layers: formed again by each backward pass
    passes = {"none": 1, "hooks": 1, "ghost": 2, "fast": 2}[clipping]
    assert row["counted_flops"] == row["expected_counted_flops"] == eager + (attention == "sdpa") * passes * scores
    assert (row["counter"], row["counted_over_analytic"]) == ("operators", 1.0)
    # Time, memory, loss.
    times = row["step_time_s"]
    assert 0 < times["min"] <= times["p10"] <= times["median"] <= times["p90"] <= times["max"]
    assert row["tokens_per_s"] == 24 / times["median"]
    assert row["peak_memory_bytes"] > 50e6
    assert (row["memory_kind"], row["reserved_memory_bytes"]) == ("host", None)
    assert row["loss"]["first"] == pytest.approx(4.11, abs=0.2)  # ln 61: random weights know nothing
    assert row["loss"]["last"] != row["loss"]["first"]
    # What a CPU cannot tell is null, with the reason.
    unknown = ("measured_flops", "measured_by", "measured_over_analytic", "mfu", "hfu", "peak_flops_per_s")
    assert [row[key] for key in unknown] == [None] * len(unknown)
    assert (row["measured_note"], row["peak_note"]) == ("no CUDA device", "no peak is known for a CPU")
    assert row["environment"]["opacus"]
    assert row["environment"]["threads"] == 1
    assert all(note.startswith("analytic: ") for note in row["notes"])


@pytest.mark.parametrize("trainer", TRAINERS)
def test_dropout_is_off_and_said(trainer: str, tmp_path: Path) -> None:
    """With it SDPA leaves its fused kernel on a CPU, and the step is another than the one counted."""
    config = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 50, "n_positions": 64}
    path = tmp_path / "gpt2.json"
    path.write_text(json.dumps({**config, "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 0}))
    row = child.start(make_args(tmp_path, trainer=trainer, model=str(path), steps=1))({})
    assert row["counted_over_analytic"] == 1.0
    assert row["notes"][0] == (
        "dropout is off: attn_pdrop, embd_pdrop, resid_pdrop, summary_first_dropout of the config set to 0"
    )


def test_a_model_without_sdpa_is_told_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "bloom.json"
    path.write_text(json.dumps({"model_type": "bloom", "vocab_size": 50, "hidden_size": 16, "n_layer": 1, "n_head": 2}))
    with pytest.raises(TrainerError, match="has no sdpa attention in HF's code: take attention eager"):
        child.start(make_args(tmp_path, model=str(path)))


@pytest.mark.heavy
def test_the_same_configuration_trains_the_same(tmp_path: Path) -> None:
    def run(**changes: Any) -> Json:
        loss: Json = child.start(make_args(tmp_path, trainer="DPSGDTrainer", steps=2, **changes))({})["loss"]
        return loss

    loss, noisy = run(), run(noise_multiplier=5.0)
    assert loss == run()
    assert loss["first"] != run(seed=1)["first"]  # other weights
    assert (loss["first"] == noisy["first"], loss["last"] == noisy["last"]) == (True, False)


def test_dtype_and_presets(tmp_path: Path) -> None:
    args = make_args(tmp_path, model="tiny", dtype="bf16", trainer="DPGhostClippingTrainer", steps=1, warmup=0)
    row = child.start(args)({})
    assert (row["model"], row["dtype"]) == ("tiny", "bf16")
    assert row["parameters"] == bind("sweep-tiny").parameters()["total"]
    assert row["counted_over_analytic"] == 1.0
    assert row["loss"]["first"] == row["loss"]["last"]  # one step in all


def test_a_run_of_scalars_is_written_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = tmp_path / "runs" / "a [1]"  # a glob's signs in a folder's name
    for _ in range(2):  # the second is a retry: it replaces the first
        row = child.start(make_args(tmp_path, folder))({})
    assert len(list(folder.iterdir())) == 1
    found = EventAccumulator(str(folder)).Reload()
    losses = found.Scalars("training/loss")
    assert [each.step for each in losses] == [1, 2, 3]  # step 0 was the warm-up
    assert losses[-1].value == pytest.approx(row["loss"]["last"])
    assert sorted(found.Tags()["scalars"]) == [
        "perf/peak_memory_bytes",
        "perf/samples_per_second",
        "perf/step_time",
        "perf/steps_per_second",
        "perf/tokens_per_second",
        "training/loss",
    ]
    assert row["notes"] == [note for note in row["notes"] if note.startswith("analytic")]


def test_no_tensorboard_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard", None)
    row = child.start(make_args(tmp_path, tmp_path / "run", steps=1))({})
    assert row["notes"][-1] == "no TensorBoard run written: pip install tensorboard"


def test_a_run_that_cannot_be_written_is_a_note(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    (tmp_path / "file").write_text("")
    row = child.start(make_args(tmp_path, tmp_path / "file" / "run", steps=1))({})
    assert row["notes"][-1].startswith("no TensorBoard run written: ")
    assert row["counted_over_analytic"] == 1.0


@pytest.mark.parametrize("trainer", TRAINERS)
def test_models_that_need_more_than_text_are_refused(trainer: str, tmp_path: Path) -> None:
    with pytest.raises(TrainerError, match="qwen2-vl-2b takes images; a sweep trains causal language models on text"):
        child.start(make_args(tmp_path, trainer=trainer, model="qwen2-vl-2b"))


def test_what_the_core_refuses_is_not_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "_build_model", None)
    with pytest.raises(RecipeError, match=r"lm_head is tied to model\.embed_tokens\.weight"):
        child.start(make_args(tmp_path, trainer="DPGhostClippingTrainer", model="llama-3.2-1b"))


def test_a_loss_that_ran_away_is_null(tmp_path: Path) -> None:
    row = child.start(make_args(tmp_path) | {"learning_rate": 1e30})({})
    assert row["loss"]["first"] is not None
    assert row["loss"]["last"] is None
    json.dumps(row, allow_nan=False)


def test_a_missing_device_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="no CUDA device here: take device cpu"):
        child.start(make_args(tmp_path, device="cuda"))


# --- What may fail without the row ------------------------------------------------------------------------------------


def test_a_counter_that_fails_leaves_the_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no   such operator")

    monkeypatch.setattr(child, "count_flops", fail)
    row = child.start(make_args(tmp_path, steps=1))({})
    assert (row["counted_flops"], row["counted_over_analytic"]) == (None, None)
    assert row["notes"][-1] == "operators not counted: RuntimeError: no such operator"
    assert row["step_time_s"]["median"] > 0


def test_unknown_operators_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "count_flops", lambda *_: SimpleNamespace(total=7, not_counted={"aten.odd.default": 2}))
    row = child.start(make_args(tmp_path, steps=1))({})
    assert row["counted_flops"] == 7
    assert row["notes"][-1] == "operators that the counter does not know: aten.odd.default"


class FakeCounter:
    """The GPU's counters, or the reason why there are none."""

    fails = ""

    def __init__(self, counters: list[str]) -> None:
        self.counters = counters
        if self.fails:
            raise cupti.CountersUnavailable(self.fails)

    def __enter__(self) -> FakeCounter:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    @contextmanager
    def measure(self) -> Iterator[Any]:
        sample = cupti.Sample()
        yield sample
        sample.values[self.counters[0]] = 4096.0


@pytest.mark.parametrize(
    ("dtype", "fails", "flops", "words"),
    [
        ("bf16", "", 4096, "bf16 tensor cores alone"),
        ("bf16", "counters need root", None, "CountersUnavailable: counters need root"),
        ("fp32", "", None, "fp32 without TF32 runs on no tensor core"),
    ],
)
def test_counters_of_the_gpu(
    dtype: str, fails: str, flops: int | None, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cupti, "HardwareCounter", FakeCounter)
    monkeypatch.setattr(FakeCounter, "fails", fails)
    run = child._prepare(make_args(tmp_path))._replace(device="cuda", dtype=dtype)
    found, note = child._measure_flops(run)
    assert found == flops
    assert note is not None
    assert note.startswith(words)


def test_peak_of_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = make_args(tmp_path)
    run = child._prepare(args)._replace(device="cuda", dtype="bf16")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    assert child._find_peak(run) == (peak_flops_per_s("h200-sxm"), None)
    assert child._find_known("cuda") == "h200-sxm"
    # Its own kernel and what was measured of it, as `bind(device=…)` takes them.
    core = bind(CONFIG, convention="hardware", device="h200-sxm")(2, 12)
    assert child._count_analytic(run.source, args, "cuda", "bf16")[0].total == core.total
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Fjord Accelerator 1")
    peak, note = child._find_peak(run)
    assert peak is None
    assert note is not None
    assert "'Fjord Accelerator 1' unknown" in note
    assert child._find_known("cuda") is None


def test_spread() -> None:
    assert child._summarize([5.0, 1.0, 2.0, 4.0, 3.0, 6.0, 7.0, 8.0, 9.0, 10.0, 30.0]) == {
        "median": 6.0,
        "min": 1.0,
        "max": 30.0,
        "p10": 2.0,
        "p90": 10.0,
    }
    assert set(child._summarize([2.5]).values()) == {2.5}


def hold_memory(size: int) -> None:
    """Take pages from the kernel and give them back at once: an allocator may keep what is freed."""
    with mmap.mmap(-1, size) as pages:
        pages[:: mmap.PAGESIZE] = b"x" * (size // mmap.PAGESIZE)


def test_the_peak_is_that_of_the_steps() -> None:
    """What was freed before the steps is not in it, what they held for a moment is."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError as error:
        pytest.skip(f"this system does not forget a peak of memory: {error}")
    size = 256 << 20
    hold_memory(size)
    before, _ = child._read_peak("cpu")
    child._forget_peak("cpu")
    after, _ = child._read_peak("cpu")
    assert after < before - size // 2
    hold_memory(size)
    assert child._read_peak("cpu")[0] > after + size // 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("trainer", TRAINERS)
def test_row_on_a_gpu(trainer: str, attention: str, tmp_path: Path) -> None:
    args = make_args(tmp_path, model="small", trainer=trainer, attention=attention, device="cuda", seq_len=128)
    row = child.start(args)({})
    assert (row["dtype"], row["device"], row["memory_kind"]) == ("bf16", "cuda", "device")
    assert row["counted_over_analytic"] == 1.0, row["notes"]
    assert 0 < row["peak_memory_bytes"] <= row["reserved_memory_bytes"]
    assert row["measured_flops"] is None or row["measured_flops"] > row["flops"]["model_total"] / 2
