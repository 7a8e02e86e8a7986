"""Cases of whole steps: a runner on the CPU, and a calibration that ends in a predictor's file."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from places import ROOT
from tiers import mark_heavy, thin

from flopcalc.api import predict
from flopcalc.base.errors import CalibrationError, DeviceError
from flopcalc.cli import main
from flopcalc.hardware.devices import load_devices
from flopcalc.measure.hf.examples import find_example
from flopcalc.measure.jobs.runner import Outcome, Result
from flopcalc.measure.predictor import run as predictor
from flopcalc.measure.predictor import runs
from flopcalc.measure.predictor.fit.predictor import take_over
from flopcalc.measure.predictor.narrow import is_narrow
from flopcalc.measure.predictor.single_calls import list_rows
from flopcalc.prediction.kernels.constants import SCHEMA, Constants, load_predictor, load_shipped

RESULTS = ROOT / "benchmarks" / "results"
POWER = [
    "power/rest", "power/product/128x128x128", "power/product/8x128x128", "power/product/1x256x128",
    "power/copy/33554432", "power/copy/1048576", "power/attention/1x1x2x1x64x64", "power/attention/1x1x2x1x1x64",
    "power/llama/decode/1x2/@16", "power/llama/train/1x16/lora",
]  # fmt: skip


@pytest.mark.heavy
def test_cases_run_and_are_profiled() -> None:
    jobs = runs.plan("test")
    assert {job.id: list(job.rows) for job in jobs} == {
        "runs": ["llama/train/2x48", "llama/decode/1x2/@16",
                 "calls/attention/16", "calls/attention/24-16", "calls/experts", "calls/across", "calls/memory",
                 "calls/adapters", "calls/products", *POWER],
        "hosts": ["host/llama/train/1x16", "host/llama/prefill/1x16", "host/units"],
    }  # fmt: skip
    found = []
    for job in jobs:
        measure = runs.start(job.args)
        found.append([measure(row) for row in job.rows.values()])
    runs_found, (*small, units) = found
    (*steps, heads, others, experts, across, memory, adapters, layers), drawn = runs_found[:-10], runs_found[-10:]
    assert [record["power_w"] for record in drawn] == [None] * 10  # a CPU has no counter
    assert [record["flops"] for record in drawn[:-2]] == [0, 2**22, 2**18, 2**16, 0, 0, 2**15, 2**9]
    assert all(record["repeats"] >= 4 and record["seconds"] > 0 for record in drawn)
    assert [record["is_host"] for record in (*steps, *small)] == [False, False, True, True]
    for record in (*steps, *small):
        assert record["seconds"] > 0
        assert record["probe_s"] > 0
    for record in steps:
        assert {row[0] for row in record["operators"]} >= {"aten::mm", "aten::mul"}
        assert record["kernels"] == 0  # none without a GPU
    for record in small:
        assert record["ratio"] > 0
        assert "operators" not in record
    alone = (heads, others, experts, across, memory, adapters, layers)
    assert [set(record) for record in alone] == [{"calls", "left_out"}] * 7
    assert [len(record["calls"]) for record in alone] == [9, 0, 6, 6, 21, 12, 12]  # a CPU has no kernel for 24-16
    assert set(units) == {"units"}
    assert set(units["units"]) >= {"pointwise", "view", "product", "attention", "attention_masked"}


def test_a_small_step_is_told_by_the_probe_around_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the host's pace, the middle ratio of a step to the two probes beside it."""
    now = [0.0]
    pace = iter([1.0] * 6 + [1.0, 2.0, 2.0, 9.0, 1.0, 1.0, 1.0])  # three to warm up, then probe and step in turns

    def spend(seconds: float) -> float:
        taken = seconds * next(pace)
        now[0] += taken
        return taken

    runner = runs.Runner("cpu", str)
    monkeypatch.setattr(runs.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(runner, "make_step", lambda _: lambda: spend(3.0))
    runner.probes = {True: lambda: spend(0.5), False: lambda: pytest.fail("a probe without a backward pass")}
    record = runner.measure_host(runs.make_case("llama", "train", 1, 16), 3)
    # Probes 0.5, 1.0, 0.5, 0.5 around steps of 6, 27 and 3 seconds: ratios 8, 36 and 6.
    assert (record["seconds"], record["probe_s"], record["ratio"]) == (6.0, 0.5, 8.0)
    assert record["steps"] == 3


TEXT = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64,
}  # fmt: skip
SLIDING = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}


@pytest.mark.parametrize("context", mark_heavy([4, 6, 7, 8, 20], [7]))
@pytest.mark.parametrize(
    "config",
    thin(
        [
            {"model_type": "llama", **TEXT},
            {"model_type": "qwen2", **TEXT},
            {"model_type": "gemma3_text", **TEXT, **SLIDING},
            {"model_type": "mistral", **TEXT, "sliding_window": 8},
        ],
        2,
    ),
    ids=lambda config: config["model_type"],
)
def test_every_decoding_step_starts_behind_the_same_context(config: dict[str, Any], context: int) -> None:
    runner = runs.Runner("cpu", lambda _: config)
    case = runs.make_case("tiny", "decode", 2, 3, context=context)
    step = runner.make_step(case)
    seen: list[tuple[int, torch.Tensor]] = []

    def watch(_: Any, __: Any, given: dict[str, Any], out: Any) -> None:
        seen.append((given["past_key_values"].get_seq_length(), out.logits[:, -1]))

    hook = runner.model.register_forward_hook(watch, with_kwargs=True)
    for _ in range(3):
        step()
    hook.remove()
    # A full window is cut back after each token.
    after = [context] * 3 if config.get("sliding_window", 99) <= context + 3 else [context, context + 1, context + 2]
    assert [length for length, _ in seen] == 3 * [length + 1 for length in after]
    for i, (_, logits) in enumerate(seen[3:]):
        assert torch.equal(logits, seen[i % 3][1])
    # The same tokens in one pass without a cache.
    ids = torch.cat([runner._make_inputs(case)["input_ids"], torch.full((2, 3), 3)], dim=1)
    with torch.no_grad():
        whole = runner.model(input_ids=ids, use_cache=False).logits
    for i, length in enumerate(after):
        torch.testing.assert_close(seen[i][1].float(), whole[:, length].float(), rtol=0.05, atol=0.05)


@pytest.mark.heavy
def test_a_step_forgets_where_images_were() -> None:
    """HF's qwen2_vl keeps what images shift positions by; a text behind them would decode elsewhere."""
    config = find_example("qwen2_vl").configs[0]
    runner = runs.Runner("cpu", lambda _: config)
    case = runs.make_case("tiny", "prefill", 1, 6)
    runner.make_step(case)()
    runner.model.model.rope_deltas = torch.full((1, 1), -3)
    runner.make_step(case)
    assert runner.model.model.rope_deltas is None
    assert [name for name, module in runner.model.named_modules() if hasattr(module, "rope_deltas")] == ["model"]


@pytest.mark.heavy
def test_a_model_that_cannot_be_built_leaves_none_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is too large fails its own cases; those before and after it are measured."""
    built = []

    def build(_bench: Any, config: Any) -> torch.nn.Linear:
        if config == "large":
            raise RuntimeError("out of memory")
        built.append(config)
        return torch.nn.Linear(2, 2)

    monkeypatch.setattr(runs.counts, "build", build)
    runner = runs.Runner("cpu", str)
    runner._take("small")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of memory"):
            runner._take("large")
    runner._take("small")
    assert runner.model is not None
    assert built == ["small", "small"]
    runner._take("small")
    assert built == ["small", "small"]


def test_a_case_that_fails_drops_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs.Runner, "measure", lambda *_, **__: 1 / 0)
    dropped = []
    monkeypatch.setattr(runs.Runner, "drop", lambda *_: dropped.append(1))
    job, _ = runs.plan("test")
    with pytest.raises(ZeroDivisionError):
        runs.start(job.args)(job.rows["llama/train/2x48"])
    assert dropped == [1]


@pytest.mark.parametrize("name", ["calls/experts", "host/units"])
def test_rows_without_a_model_have_the_device_to_themselves(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model before them is dropped first."""
    done: list[str] = []
    monkeypatch.setattr(runs.Runner, "drop", lambda *_: done.append("drop"))
    monkeypatch.setattr(runs, "measure_calls", lambda _, row: done.append("calls") or {"calls": [row]})
    monkeypatch.setattr(runs, "measure_units", lambda _: done.append("units") or {"view": 0.4})
    job = next(job for job in runs.plan("test") if name in job.rows)
    row = job.rows[name]
    is_call = name == "calls/experts"
    assert runs.start(job.args)(row) == ({"calls": [row]} if is_call else {"units": {"view": 0.4}})
    assert done == ["drop", "calls" if is_call else "units"]


def test_a_name_tells_its_config() -> None:
    """A model that is cut, or one that is narrow, of a preset whose name has dashes of its own."""
    from flopcalc.core.model.config import load_config
    from flopcalc.measure.predictor.narrow import narrow

    assert runs.get_config("llama-3.2-1b-short") == runs.cut_config("llama-3.2-1b", 6)
    assert runs.get_config("qwen1.5-moe-a2.7b-narrow-12") == narrow(dict(load_config("qwen1.5-moe-a2.7b").config), 12)


@pytest.mark.parametrize(
    ("preset", "layers", "vision"), [("llama-3.1-8b", 3, 0), ("qwen2-vl-2b", 2, 4), ("gpt2-medium", 5, 0)]
)
def test_configs_are_cut_in_depth_alone(preset: str, layers: int, vision: int) -> None:
    from flopcalc.api import bind

    stages = [stage for stage in bind(runs.cut_config(preset, layers, vision)).stages if stage.repeated]
    assert [len(stage.layers) for stage in stages] == ([vision, layers] if vision else [layers])


@pytest.mark.parametrize("suite", ["quick", "full"])
def test_every_case_has_its_own_name(suite: str) -> None:
    job, hosts = runs.plan(suite)
    models = {row["model"]: None for row in hosts.rows.values() if "model" in row and not is_narrow(row["model"])}
    small = [case for model in models for case in runs.list_host_cases(suite, model)]
    small += runs.list_narrow_cases() if suite == "full" else []
    cases, others = ({json.dumps(case) for case in found} for found in (runs.list_cases(suite), small))
    calls = [name for name, row in job.rows.items() if row.get("is_call")]
    assert calls == list(list_rows(suite))
    drawn = [name for name, row in job.rows.items() if "power" in row]
    assert len(drawn) == 16
    assert len(job.rows) == len(cases) + len(calls) + len(drawn)
    again = [name for name in hosts.rows if name.endswith("/again")]
    units = [name for name in hosts.rows if name == "host/units"]
    assert len(hosts.rows) == len(others) + len(again) + len(units)
    assert not set(job.rows) & set(hosts.rows)
    for name, row in {**job.rows, **hosts.rows}.items():
        assert name.removeprefix("host/").removeprefix("power/").startswith(row.get("model", ""))
    if suite == "full":
        assert units
        assert again == [
            f"host/{runs.name_case(case)}/again" for case in runs.list_narrow_cases((12,)) if case["phase"] == "train"
        ]


def test_quick_measures_a_part_of_full() -> None:
    """What one host and the shipped predictor's narrow models tell alike is left out."""
    quick, full = runs.plan("quick"), runs.plan("full")
    for few, many in zip(quick, full, strict=True):
        assert few.rows.items() <= many.rows.items()
    assert [len(job.rows) for job in quick] == [102, 38]
    assert not any(is_narrow(row.get("model", "")) for row in quick[1].rows.values())
    assert sum(job.expected_s for job in quick) < 540 < sum(job.expected_s for job in full)


def test_profiles_and_the_hosts_own_time_are_jobs_apart() -> None:
    """Nothing of the profiler is left where the host is timed; compiled models first, narrow ones again last."""
    job, hosts = runs.plan("full")
    assert (job.id, hosts.id) == ("runs", "hosts")
    assert not any(row.get("is_host") for row in job.rows.values())
    assert all(row["is_host"] and name.startswith("host/") for name, row in hosts.rows.items())
    narrow = [f"{preset}-narrow-{layers}" for layers in (4, 12, 12) for preset in runs.NARROW]
    alone = [model for model in runs.MODELS if list(runs.list_host_cases("full", model))]
    compiled = [case["model"] for case in runs.list_cases("full") if case["compiled"]]
    others = [model for model in runs.MODELS if model not in compiled]
    metered = ["llama-3.2-1b", "qwen2.5-0.5b", "mistral-7b"]  # decoding, and LoRA
    for each, models in ((job, [*compiled, *others, *metered]), (hosts, [*alone, *narrow])):
        built = [row["model"] for row in each.rows.values() if "model" in row]
        assert [model for i, model in enumerate(built) if not i or built[i - 1] != model] == models


def _fake(
    monkeypatch: pytest.MonkeyPatch, results: list[Any], stopped: bool = False, device_id: str = "h200-sxm"
) -> None:
    provenance = {"device": "NVIDIA H200", "device_id": device_id, "torch": "2.11.0"}
    monkeypatch.setattr(predictor, "probe_machine", lambda *_: provenance)
    monkeypatch.setattr(predictor, "has_gpu", lambda: True)
    outcome = Outcome(tuple(results), stopped, len(results), frozenset({"runs"}))
    monkeypatch.setattr(predictor, "run_jobs", lambda *_, **__: outcome)


def _read_measured() -> list[Any]:
    """Cases of one family, its host cases and the host's units, as a GPU gave them."""
    cases = json.loads(gzip.decompress((RESULTS / "predict_profiles.json.gz").read_bytes()))["cases"]
    return [case for case in cases if case.get("model", "llama").startswith("llama")]


def _list_results(records: list[Any]) -> list[Result]:
    return [Result("runs", str(i), "", "ok", None, None, record, 0.0) for i, record in enumerate(records)]


@pytest.mark.heavy
def test_a_quick_calibration_takes_what_it_did_not_measure_from_the_shipped_predictor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host's constants at the pace of its own small steps; kernels of adapters as they are."""
    records = [case for case in _read_measured() if "units" not in case and not is_narrow(case.get("model", ""))]
    _fake(monkeypatch, _list_results(records))
    path = predictor.calibrate_predictor(str(tmp_path))
    assert path is not None
    found, known = json.loads(Path(path).read_text()), load_shipped("h200-sxm")
    assert known is not None
    assert found["products"]["adapters"] == known["products"]["adapters"]
    assert found["linear"]["dequantize"] == known["linear"]["dequantize"]
    host, shipped = found["host"], known["host"]
    assert host["units"] == shipped["units"]
    assert set(host["types"]) == set(shipped["types"])
    for phase in ("train", "forward", "decode"):
        pace = host[phase][1] / shipped[phase][1]
        assert pace == pytest.approx(1.0, rel=0.15)  # the machine that the shipped one was measured on
        assert host[phase][0] / shipped[phase][0] == pytest.approx(pace, rel=1e-3)
        for kind, table in shipped["types"].items():
            if phase in table:
                call_s, factor = host["types"][kind][phase]
                assert (call_s, factor) == (pytest.approx(table[phase][0] * pace, rel=1e-3), table[phase][1])


def test_kernels_that_were_not_measured_follow_the_bandwidth() -> None:
    known = load_shipped("h200-sxm")
    assert known is not None
    about = {**known["provenance"], "device_id": "h100-sxm"}
    linear = {kind: line for kind, line in known["linear"].items() if kind != "dequantize"}
    own = cast(Constants, {**known, "provenance": about, "linear": linear})
    found = take_over(own, known)
    slower = 4800 / 3350
    before = known["linear"]["dequantize"]
    assert found["linear"]["dequantize"] == [before[0], pytest.approx(before[1] * slower)]
    assert {kind: found["linear"][kind] for kind in linear} == linear


@pytest.mark.heavy
def test_a_calibration_ends_in_a_predictor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fake(monkeypatch, _list_results(_read_measured()))
    path = predictor.calibrate_predictor(str(tmp_path))
    assert path == str(tmp_path / "h200-sxm.json")
    found = json.loads(Path(path).read_text())
    assert found["provenance"]["command"] == "flopcalc calibrate --predictor"
    assert found["schema"] == SCHEMA
    assert found["products"]["shape"][0] == pytest.approx(850e12, rel=0.1)
    assert set(found["gaps"]) == set(found["probe_s"]) == {"train", "forward"}
    measured = next(case["units"] for case in _read_measured() if "units" in case)
    told = found["host"]["units"]
    assert {kind: told[kind] for kind in measured if kind != "module"} == {
        kind: unit for kind, unit in measured.items() if kind != "module"
    }
    types = found["host"]["types"]
    assert list(types) == ["llama"]
    assert set(types["llama"]) == {"train", "forward", "decode"}
    for call_s, factor in types["llama"].values():
        assert call_s >= 0
        assert factor == pytest.approx(1.0, rel=0.2)  # the host's own constants are of the same steps
    assert all(len(line) == 2 for line in found["linear"].values())
    # What it wrote is what predict reads, as this machine's own.
    (tmp_path / "predictors").mkdir()
    Path(path).rename(tmp_path / "predictors" / "h200-sxm.json")
    monkeypatch.setenv("FLOPCALC_DATA", str(tmp_path))
    load_predictor.cache_clear()
    try:
        told = predict("llama-3.2-3b", device="h200", batch_size=4, seq_len=2048)
    finally:
        load_predictor.cache_clear()
    assert told.evidence["is_own_machine"]
    assert told.step_time_s.mid == pytest.approx(0.4, rel=0.5)


def test_what_cannot_be_calibrated_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DeviceError, match="found none"):
        predictor.calibrate_predictor(str(tmp_path))
    _fake(monkeypatch, [], stopped=True)
    assert predictor.calibrate_predictor(str(tmp_path)) is None
    _fake(monkeypatch, [])
    with pytest.raises(CalibrationError, match="too little was measured"):
        predictor.calibrate_predictor(str(tmp_path))
    assert not list(tmp_path.glob("*.json"))


@pytest.mark.heavy
def test_what_cannot_be_calibrated_with_half_of_the_steps_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fake(monkeypatch, _list_results([case for case in _read_measured() if not case.get("is_host")]))
    with pytest.raises(CalibrationError, match="too little was measured"):  # no small steps at all
        predictor.calibrate_predictor(str(tmp_path))
    _fake(monkeypatch, _list_results([case for case in _read_measured() if case.get("phase") != "decode"]))
    with pytest.raises(CalibrationError, match="no small steps of phase decode; retry_failed measures"):
        predictor.calibrate_predictor(str(tmp_path))
    assert not list(tmp_path.glob("*.json"))


@pytest.mark.parametrize(
    ("device_id", "message"),
    [
        ("nvidia-fjord", "no entry in the device table, .* add it to .*devices.toml"),
        ("v100-sxm2-32gb", "no bf16 peak"),
        ("fjord-1", "no memory bandwidth"),
    ],
)
def test_a_device_without_figures_is_refused_before_it_is_measured(
    device_id: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "devices.toml").write_text(
        '[[device]]\nid = "fjord-1"\nname = "Fjord 1"\nsource = "a sheet"\ndate = "2026-01-31"\n'
        "peak_tflops = { bf16 = 100 }\n"
    )
    monkeypatch.setenv("FLOPCALC_DATA", str(tmp_path))
    _fake(monkeypatch, [], device_id=device_id)
    monkeypatch.setattr(predictor, "run_jobs", lambda *_, **__: pytest.fail("measured"))
    load_devices.cache_clear()
    try:
        with pytest.raises(DeviceError, match=message):
            predictor.calibrate_predictor()
    finally:
        load_devices.cache_clear()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--tables", "gemm"], "--predictor measures whole steps: it takes neither --tables nor --check"),
        (["--check"], "--predictor measures whole steps: it takes neither --tables nor --check"),
        (["--suite", "x"], "suite 'x' unknown; known: quick, full"),
    ],
)
def test_options_that_a_predictor_does_not_take(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["calibrate", "--predictor", *options])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err
