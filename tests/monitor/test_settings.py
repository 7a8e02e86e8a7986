"""Settings: every key of a file, defaults, precedence of frequencies, and errors that name the key."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from flopcalc.base.errors import ConfigError
from flopcalc.hardware.routing import parse_routing
from flopcalc.monitor.settings import DEFAULT_FREQ, Settings, load_settings

# Every key there is, each with a value that is not its default.
FULL = """
monitoring:
  flops_profile_freq: 100
  mfu_calculation_mode: hybrid
  detail_every: 5
  save_every: 20
  dataset_metrics_every: 1
  phase_frequencies: {warmup: 11, main: 12, finetune: 13}
  sinks: [jsonl, tensorboard]
  key_style: composer
  device: h200
  dtype: bfloat16
  routing: spread:0.4
  peak_flops_per_s: 989e12
  skip_first: 0
  stall_factor: 2
  straggler_factor: 1.5
performance_monitoring:
  measure_flops_frequency: 100
smart_mode:
  initial_profiling: false
  calibration_enabled: false
  recalibration_frequency: 50
hybrid_mode:
  hardware_counters_enabled: false
  fallback_to_profiler: false
monitor:
  freq:
    flops_profile_freq: 100
wandb:
  log_dataset_metrics: false
  reduced_logging: true
  project: p
  entity: e
  name: n
  mode: offline
tensorboard:
  log_dir: tb
mlflow:
  tracking_uri: file:./mlruns
  experiment: x
distributed:
  enabled: false
  tensor_parallel: 2
  context_parallel: 3
  pipeline_parallel: 4
  timeout_s: 1.5
"""
FULL_SETTINGS = Settings(
    mode="hybrid", flops_profile_freq=100, phase_frequencies={"warmup": 11, "main": 12, "finetune": 13},
    initial_profiling=False, calibration_enabled=False, recalibration_frequency=50, hardware_counters_enabled=False,
    fallback_to_profiler=False, detail_every=5, save_every=20, dataset_metrics_every=1, sinks=("jsonl", "tensorboard"),
    key_style="composer", device="h200", dtype="bf16", peak_flops_per_s=989e12, skip_first=0, stall_factor=2.0,
    straggler_factor=1.5, wandb_log_dataset_metrics=False, wandb_reduced_logging=True, wandb_project="p",
    wandb_entity="e", wandb_name="n", wandb_mode="offline", tensorboard_dir="tb", mlflow_tracking_uri="file:./mlruns",
    mlflow_experiment="x", distributed_enabled=False, tensor_parallel=2, context_parallel=3, pipeline_parallel=4,
    side_timeout_s=1.5, routing=parse_routing("spread:0.4"),
)  # fmt: skip


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_every_field_can_be_set_from_a_file(tmp_path: Path) -> None:
    settings, warnings = load_settings(write(tmp_path, "monitor.yaml", FULL))
    assert (settings, warnings) == (FULL_SETTINGS, [])
    for entry in dataclasses.fields(Settings):
        assert getattr(settings, entry.name) != getattr(Settings(), entry.name), entry.name


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yaml", ""),
        ("a.yml", "# nothing yet\n"),
        ("a.yaml", "smart_mode:\nmonitor:\n  freq:\n"),  # sections whose keys are all commented out
        ("a.json", "{}"),
        ("a.json", ""),
        ("a.toml", ""),
        ("A.YAML", "\ufeffwandb: {}\n"),
    ],
)
def test_an_empty_file_is_the_defaults(tmp_path: Path, name: str, text: str) -> None:
    assert load_settings(str(write(tmp_path, name, text))) == (Settings(), [])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yaml", "monitoring:\n  detail_every: 7\n  sinks: [wandb]\n"),
        ("a.yml", "monitoring: {detail_every: 7, sinks: [wandb]}\n"),
        ("a.json", '{"monitoring": {"detail_every": 7, "sinks": ["wandb"]}}'),
        ("a.toml", '[monitoring]\ndetail_every = 7\nsinks = ["wandb"]\n'),
    ],
)
def test_formats(tmp_path: Path, name: str, text: str) -> None:
    assert load_settings(write(tmp_path, name, text))[0] == Settings(detail_every=7, sinks=("wandb",))


def test_defaults() -> None:
    settings, warnings = load_settings()
    assert warnings == []
    assert (settings.mode, settings.flops_profile_freq, settings.detail_every) == ("smart", 500, 50)
    assert (settings.save_every, settings.dataset_metrics_every, settings.sinks) == (200, 10, None)
    assert load_settings({}) == (settings, [])
    assert load_settings(settings) == (settings, [])
    assert json.dumps(dataclasses.asdict(settings)["flops_profile_freq"]) == "500"


A, B, C = (
    {"monitoring": {"flops_profile_freq": 100}},
    {"performance_monitoring": {"measure_flops_frequency": 200}},
    {"monitor": {"freq": {"flops_profile_freq": 300}}},
)


@pytest.mark.parametrize(
    ("config", "argument", "frequency", "disagreement"),
    [
        ({}, DEFAULT_FREQ, 500, None),
        ({}, 7, 7, None),
        (A, DEFAULT_FREQ, 100, None),
        (B, DEFAULT_FREQ, 200, None),
        (C, DEFAULT_FREQ, 300, None),
        (A, 100, 100, None),
        (A, 500, 500, "the constructor's flops_profile_freq = 500, monitoring.flops_profile_freq = 100"),
        (
            C | B | A,
            DEFAULT_FREQ,
            100,
            "monitoring.flops_profile_freq = 100, performance_monitoring.measure_flops_frequency = 200, "
            "monitor.freq.flops_profile_freq = 300",
        ),
        (
            C | B,
            DEFAULT_FREQ,
            200,
            "performance_monitoring.measure_flops_frequency = 200, monitor.freq.flops_profile_freq = 300",
        ),
        (
            C | A,
            100,
            100,
            "the constructor's flops_profile_freq = 100, monitoring.flops_profile_freq = 100, "
            "monitor.freq.flops_profile_freq = 300",
        ),
        (Settings(flops_profile_freq=9), DEFAULT_FREQ, 9, None),
        (Settings(), 8, 8, None),
        (
            Settings(flops_profile_freq=9),
            8,
            8,
            "the constructor's flops_profile_freq = 8, the settings' flops_profile_freq = 9",
        ),
    ],
)
def test_which_frequency_wins(config: Any, argument: int, frequency: int, disagreement: str | None) -> None:
    settings, warnings = load_settings(config, argument)
    assert settings.flops_profile_freq == frequency
    if disagreement is None:
        assert warnings == []
    else:
        winner = disagreement.split(", ")[0]
        assert warnings == [f"frequencies disagree: {disagreement}; taking {winner}"]


@pytest.mark.parametrize(
    ("given", "frequency", "expected"),
    [
        (None, DEFAULT_FREQ, {None: 500, "warmup": 1000, "main": 500, "finetune": 200}),
        (None, 30, {None: 30, "warmup": 1000, "main": 30, "finetune": 200}),
        ({"warmup": 5}, 30, {None: 30, "warmup": 5, "main": 30, "finetune": 200}),
        ({"main": 6, "finetune": 7}, 30, {None: 30, "warmup": 1000, "main": 6, "finetune": 7}),
    ],
)
def test_frequency_of_a_phase(given: dict[str, int] | None, frequency: int, expected: dict[str | None, int]) -> None:
    config = {"monitoring": {"phase_frequencies": given}}
    settings, _ = load_settings(config, frequency)
    assert {phase: settings.frequency(phase) for phase in expected} == expected
    with pytest.raises(ConfigError, match=r"no phase 'cooldown'. Known: warmup, main, finetune"):
        settings.frequency("cooldown")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"monitoring": {"flops_profil_freq": 1}},
            "unknown key 'monitoring.flops_profil_freq'. Did you mean monitoring.flops_profile_freq, ",
        ),
        (
            {"monitoring": {"mode": "smart"}},
            "unknown key 'monitoring.mode'. Did you mean monitoring.mfu_calculation_mode, wandb.mode?",
        ),
        (
            {"monitoring": {"initial_profiling": True}},
            "unknown key 'monitoring.initial_profiling'. Did you mean smart_mode.initial_profiling?",
        ),
        (
            {"monitoring": {"phase_frequencies": {"warm": 1}}},
            "unknown key 'monitoring.phase_frequencies.warm'. Did you mean monitoring.phase_frequencies.warmup",
        ),
        ({"monitoring": {"peak": 1}}, "Did you mean monitoring.peak_flops_per_s"),
        ({"monitor": {"frequ": {}}}, "unknown key 'monitor.frequ'. Did you mean monitor.freq"),
        ({"smartmode": {}}, "unknown key 'smartmode'. Did you mean smart_mode"),
        ({"zzz": 1}, "unknown key 'zzz'. Known sections: distributed, hybrid_mode, mlflow, monitor, "),
        ({True: 1}, "unknown key 'True'"),
        ({"monitoring.detail_every": 1}, "key 'monitoring.detail_every': write sections as nested mappings"),
        ({"monitoring": 3}, "monitoring is a section of keys, not 3"),
        ({"monitor": {"freq": 100}}, "monitor.freq is a section of keys, not 100"),
        (
            {"monitoring": {"flops_profile_freq": 0}},
            "monitoring.flops_profile_freq: must be a whole number of at least 1; read 0",
        ),
        ({"monitoring": {"flops_profile_freq": True}}, "must be a whole number of at least 1; read True"),
        ({"monitoring": {"flops_profile_freq": 10.0}}, "must be a whole number of at least 1; read 10.0"),
        ({"monitoring": {"flops_profile_freq": "10"}}, "must be a whole number of at least 1; read '10'"),
        ({"monitoring": {"flops_profile_freq": None}}, "monitoring.flops_profile_freq is empty: give a value"),
        ({"monitoring": {"phase_frequencies": {"main": -1}}}, "monitoring.phase_frequencies.main: must be a whole"),
        (
            {"monitoring": {"mfu_calculation_mode": "fast"}},
            "monitoring.mfu_calculation_mode: must be one of smart, profiler, estimate, hybrid; read 'fast'",
        ),
        ({"monitoring": {"mfu_calculation_mode": ["smart"]}}, "must be one of smart, profiler, estimate, hybrid"),
        ({"monitoring": {"sinks": "jsonl"}}, "monitoring.sinks: must be a list of jsonl, wandb, tensorboard, mlflow"),
        ({"monitoring": {"sinks": ["csv"]}}, "must be one of jsonl, wandb, tensorboard, mlflow; read ['csv']"),
        ({"monitoring": {"sinks": ["jsonl", "jsonl"]}}, "each once; read ['jsonl', 'jsonl']"),
        ({"monitoring": {"key_style": "x"}}, "must be one of flopcalc, composer, lightning, torchtitan, hf"),
        ({"monitoring": {"dtype": "bf17"}}, "monitoring.dtype: dtype 'bf17' unknown. Did you mean bf16"),
        ({"monitoring": {"device": ""}}, "monitoring.device: must be a text; read ''"),
        ({"monitoring": {"device": 200}}, "monitoring.device: must be a text; read 200"),
        ({"monitoring": {"peak_flops_per_s": 0}}, "monitoring.peak_flops_per_s: must be a number above 0; read 0"),
        ({"monitoring": {"peak_flops_per_s": float("inf")}}, "must be a number above 0; read inf"),
        ({"monitoring": {"peak_flops_per_s": float("nan")}}, "must be a number above 0; read nan"),
        ({"monitoring": {"peak_flops_per_s": "much"}}, "must be a number above 0; read 'much'"),
        ({"monitoring": {"peak_flops_per_s": True}}, "must be a number above 0; read True"),
        ({"monitoring": {"peak_flops_per_s": {}}}, "must be a number, or one for each number format"),
        ({"monitoring": {"peak_flops_per_s": {"bf16": 0}}}, "must be a number above 0; read"),
        ({"monitoring": {"peak_flops_per_s": {"bf17": 1e12}}}, "dtype 'bf17' unknown"),
        ({"monitoring": {"peak_flops_per_s": {"bf16": 1e12, "bfloat16": 2e12}}}, "has a number format twice"),
        ({"monitoring": {"peak_flops_per_s": 10**400}}, "must be a number above 0; read "),
        ({"monitoring": {"skip_first": -1}}, "must be a whole number of at least 0; read -1"),
        ({"monitoring": {"stall_factor": 1.0}}, "monitoring.stall_factor: must be a number above 1; read 1.0"),
        ({"monitoring": {"straggler_factor": 0.9}}, "must be a number above 1; read 0.9"),
        ({"wandb": {"reduced_logging": 1}}, "wandb.reduced_logging: must be true or false; read 1"),
        ({"wandb": {"log_dataset_metrics": "yes"}}, "must be true or false; read 'yes'"),
        ({"wandb": {"mode": "of"}}, "wandb.mode: must be one of online, offline, disabled, shared; read 'of'"),
        ({"distributed": {"timeout_s": 0}}, "distributed.timeout_s: must be a number above 0; read 0"),
        ({"distributed": {"tensor_parallel": 0}}, "distributed.tensor_parallel: must be a whole number"),
    ],
)
def test_a_wrong_config_is_named(config: dict[Any, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=r"^config: ") as caught:
        load_settings(config)
    assert message in str(caught.value)


def test_null_where_none_is_the_default() -> None:
    config = {"monitoring": {"device": None, "sinks": None}, "smart_mode": {"recalibration_frequency": None}}
    assert load_settings(config) == (Settings(), [])


@pytest.mark.parametrize("argument", [0, -5, True, 2.5, "500", None])
def test_a_wrong_argument_is_named(argument: Any) -> None:
    with pytest.raises(ConfigError, match=r"^flops_profile_freq"):
        load_settings(None, argument)


def test_settings_built_by_hand_are_checked_too() -> None:
    with pytest.raises(ConfigError, match=r"^mode: must be one of smart, profiler, estimate, hybrid; read 'x'$"):
        Settings(mode="x")
    with pytest.raises(ConfigError, match=r"^phase_frequencies: must be a mapping of warmup, main, finetune"):
        Settings(phase_frequencies={"x": 1})
    assert Settings(dtype="bfloat16", sinks=["jsonl"]).sinks == ("jsonl",)  # type: ignore[arg-type]


def make_bomb() -> str:
    """A YAML file whose list holds a word 2 ** 40 times."""
    lists = "[jsonl]"
    for depth in range(40):
        lists = f"[&a{depth} {lists}, *a{depth}]"
    return f"monitoring: {{sinks: {lists}}}\n"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "monitoring: {a: [}\n", "not valid YAML: expected the node content, but found '}' in line 1"),
        (
            "a.yaml",
            "monitoring:\n  detail_every: 1\n  save_every: 2\n  detail_every: 3\n",
            "line 4: key 'detail_every' stands twice",
        ),
        ("a.yaml", "wandb: {}\nwandb: {}\n", "line 2: key 'wandb' stands twice"),
        ("a.yaml", "- monitoring\n", "holds ['monitoring'], not a mapping of settings"),
        ("a.yaml", "a: 1\n---\nb: 2\n", "not valid YAML: but found another document in line 2"),
        ("a.yaml", "monitoring: !!python/object:os.system x\n", "not valid YAML: could not determine a constructor"),
        ("a.yaml", "? [a]\n: 1\n", "not valid YAML: found unhashable key in line 1"),
        ("a.yaml", "wandb: {name: !!timestamp 2020-13-45}\n", "not valid YAML: could not determine a constructor"),
        ("a.yaml", "monitoring: {flops_profile_frq: 3}\n", "unknown key 'monitoring.flops_profile_frq'"),
        ("a.json", '{"wandb": {}, "wandb": {}}', "key 'wandb' stands twice"),
        ("a.json", "{", "not valid JSON: Expecting property name"),
        ("a.json", "3", "holds 3, not a mapping of settings"),
        ("a.toml", "[wandb]\n[wandb]\n", "not valid TOML: Cannot declare ('wandb',) twice"),
        ("a.toml", "a" + ".a" * 20_000 + " = 1\n", "a key of more than 200 parts"),
        ("a.yaml", f"monitoring: {{device: {'x' * 500_000}}}\n", "larger than 500000 bytes"),
        ("a.yaml", make_bomb(), "more than 10,000 entries, the most that is read"),
        ("a.txt", "", "a monitor's config is a .yaml, .yml, .json, .toml file"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = write(tmp_path, name, text)
    with pytest.raises(ConfigError, match=r"^" + re.escape(f"{path}: {message}")) as caught:
        load_settings(path)
    assert "\n" not in str(caught.value)


def test_yaml_merge_keys_are_no_duplicates(tmp_path: Path) -> None:
    text = "monitor: {freq: {<<: {flops_profile_freq: 3}, flops_profile_freq: 4}}\n"
    assert load_settings(write(tmp_path, "a.yaml", text))[0] == Settings(flops_profile_freq=4)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no.yaml: cannot be read: No such file or directory$"):
        load_settings(tmp_path / "no.yaml")
    (tmp_path / "folder.yaml").mkdir()
    with pytest.raises(ConfigError, match=r"folder.yaml: cannot be read: Is a directory$"):
        load_settings(tmp_path / "folder.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"wandb: {name: \xe9}\n")
    with pytest.raises(ConfigError, match=r"latin.yaml: not UTF-8 text: invalid continuation byte at byte 14"):
        load_settings(tmp_path / "latin.yaml")
    with pytest.raises(ConfigError, match=r"^config must be a mapping or the path of a"):
        load_settings(3)  # type: ignore[arg-type]


def test_without_pyyaml_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ConfigError, match=re.escape("a.yaml: PyYAML is missing: pip install 'flopcalc[monitor]', or")):
        load_settings(write(tmp_path, "a.yaml", FULL))
    assert load_settings(write(tmp_path, "a.json", "{}")) == (Settings(), [])
