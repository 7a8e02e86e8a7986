"""The sweep's matrix: configurations, their ids and jobs, files of it, and errors in words."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flopcalc import bind
from flopcalc.base.errors import FlopcalcError
from flopcalc.measure.sweep.matrix import MODEL_SIZES, TRAINERS, SweepError, find_model, load_matrix, make_matrix

SMALL: dict[str, Any] = {"batch_sizes": [4], "seq_lens": [512], "models": ["tiny"]}
LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 1000, "tie_word_embeddings": False,
}  # fmt: skip


def test_a_matrix_of_too_many() -> None:
    sizes = range(2, 30_002)
    with pytest.raises(SweepError, match="a matrix of 900,000,000 configurations; 100,000 is the most"):
        make_matrix(trainers=["StandardTrainer"], batch_sizes=sizes, seq_lens=sizes, models=["tiny"])


def test_every_trainer_at_every_size() -> None:
    found = make_matrix(batch_sizes=[4, 8], seq_lens=[512, 1024], models=["1b"])
    assert len(found) == 16
    assert [configuration.id for configuration in found[:5]] == [
        "StandardTrainer_bs4_seq512",
        "DPSGDTrainer_bs4_seq512",
        "DPGhostClippingTrainer_bs4_seq512",
        "DPFastGradientClippingTrainer_bs4_seq512",
        "StandardTrainer_bs8_seq512",
    ]
    assert len({configuration.id for configuration in found}) == 16


def test_several_models_are_in_the_id(tmp_path: Path) -> None:
    for name in ("my llama", "b", "größe", "модель"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "c.json").write_text(json.dumps(LLAMA))
    paths = ["my llama/config.json", "b", "c.json", "größe", "модель"]
    models = ["tiny", "gpt2", *(str(tmp_path / path) for path in paths)]
    found = make_matrix(**{**SMALL, "models": models}, trainers=["DPSGDTrainer"])
    assert [configuration.id.removeprefix("DPSGDTrainer_bs4_seq512") for configuration in found] == [
        "_tiny",
        "_gpt2",
        "_my-llama",
        "_b",
        "_c",
        "_größe",
        "_модель",
    ]


def test_a_model_type_reads_a_config_as_a_family(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**LLAMA, "model_type": "mine"}))
    plain, foreign = ({**SMALL, "models": [model], "trainers": ["DPSGDTrainer"]} for model in ("tiny", str(path)))
    [mine] = make_matrix(**foreign, model_type="llama")
    assert mine.to_row()["model_type"] == mine.to_job().args["model_type"] == "llama"
    assert "model_type" not in make_matrix(**plain)[0].to_row()  # older journals stay valid
    with pytest.raises(SweepError, match="model_type 'lama': no spec or alias of that name"):
        make_matrix(**foreign, model_type="lama")
    with pytest.raises(SweepError, match="model_type must be the name of a family, not 5"):
        make_matrix(**foreign, model_type=5)


def test_two_models_of_one_name(tmp_path: Path) -> None:
    for name in ("x/a", "y/a"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text(json.dumps(LLAMA))
    with pytest.raises(SweepError, match="would both be called a: rename"):
        make_matrix(**{**SMALL, "models": [str(tmp_path / "x/a"), str(tmp_path / "y/a")]})


def test_the_job(tmp_path: Path) -> None:
    (configuration,) = make_matrix(**SMALL, trainers=["DPSGDTrainer"], steps=5, timeout_s=7, dtype="bfloat16")
    job = configuration.to_job(str(tmp_path / "runs"))
    assert job.id == "DPSGDTrainer_bs4_seq512"
    assert job.call == "flopcalc.measure.sweep.child:start"
    assert (job.timeout_s, job.start_timeout_s, list(job.rows)) == (7.0, 7.0, ["run"])
    assert job.args == {
        "trainer": "DPSGDTrainer", "batch_size": 4, "seq_len": 512, "model": "tiny", "dtype": "bf16", "device": "auto",
        "attention": "sdpa", "steps": 5, "warmup": 3, "learning_rate": 1e-3, "max_grad_norm": 1.0,
        "noise_multiplier": 1.0, "seed": 0,
    }  # fmt: skip
    assert job.where == {"model": "tiny", "run_dir": str(tmp_path / "runs" / "DPSGDTrainer_bs4_seq512")}
    assert configuration.find_places()["run_dir"] is None


def test_an_edited_config_is_another_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path("config.json")
    path.write_text(json.dumps(LLAMA))
    (configuration,) = make_matrix(**{**SMALL, "models": ["config.json"]}, trainers=["StandardTrainer"])
    job = configuration.to_job("runs")
    assert job.where == {"model": str(tmp_path / "config.json"), "run_dir": str(tmp_path / "runs" / configuration.id)}
    assert configuration.to_job("elsewhere").key("run") == job.key("run")
    assert configuration._replace(timeout_s=1.0).to_job("runs").key("run") == job.key("run")
    assert configuration._replace(steps=99).to_job("runs").key("run") != job.key("run")
    path.write_text(json.dumps({**LLAMA, "num_hidden_layers": 3}))
    assert configuration.to_job("runs").key("run") != job.key("run")


@pytest.mark.parametrize("kind", ["json", "toml"])
def test_files(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"matrix.{kind}"
    if kind == "json":
        path.write_text(json.dumps({**SMALL, "trainers": ["StandardTrainer"], "steps": 4}))
    else:
        path.write_text(
            'batch_sizes = [4]\nseq_lens = [512]\nmodels = ["tiny"]\ntrainers = ["StandardTrainer"]\nsteps = 4\n'
        )
    assert load_matrix(path) == make_matrix(**SMALL, trainers=["StandardTrainer"], steps=4)
    assert load_matrix(str(path), steps=6, seq_lens=[7]) == make_matrix(
        **{**SMALL, "seq_lens": [7]}, trainers=["StandardTrainer"], steps=6
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_sizes": []}, "batch_sizes is empty: give batch_sizes, or batch_sizes in the matrix file"),
        ({"models": ()}, "models is empty: give model_size or model, or models"),
        ({"seq_lens": "512"}, "seq_lens must be a list, not '512'"),
        ({"seq_lens": 512}, "seq_lens must be a list, not 512"),
        ({"seq_lens": [1]}, "seq_lens must be at least 2, not 1"),
        ({"batch_sizes": [0]}, "batch_sizes must be at least 1, not 0"),
        ({"seq_lens": [1.5]}, "seq_lens must be a whole number, not 1.5"),
        ({"batch_sizes": [4, 8, 4]}, "batch_sizes holds 4 twice"),
        ({"trainers": ["DPSGDtrainer"]}, "no trainer 'DPSGDtrainer'. Did you mean DPSGDTrainer"),
        ({"trainers": [3]}, "no trainer 3. Known: StandardTrainer, "),
        ({"trainers": [["DPSGDTrainer"]]}, "no trainer ['DPSGDTrainer']. Did you mean DPSGDTrainer"),
        ({"models": ["2b"]}, "no preset, file or folder '2b'"),
        ({"models": ["gtp2"]}, "Did you mean gpt2"),
        ({"models": [""]}, "a model is a size, a preset or a path, not ''"),
        ({"dtype": "fp8"}, "dtype 'fp8' unknown. Did you mean"),
        ({"dtype": "x"}, "dtype 'x' unknown. Known: auto, bf16, fp32, fp64"),
        ({"device": "gpu"}, "device 'gpu' unknown. Did you mean cpu? Known: auto, cpu, cuda"),
        ({"attention": "flash"}, "attention 'flash' unknown. Known: sdpa, eager"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"warmup": -1}, "warmup must be at least 0"),
        ({"learning_rate": 0}, "learning_rate must be a number above 0, not 0"),
        ({"noise_multiplier": -1}, "noise_multiplier must be a number of at least 0, not -1"),
        ({"timeout_s": float("nan")}, "timeout_s must be a number above 0, not nan"),
        ({"timeout_s": 1e300}, "timeout_s must be a number of at most 1000000000000, not 1e+300"),
        ({"learning_rate": 10**400}, "learning_rate must be a number of at most 1000000000000, not 1000"),
        ({"max_grad_norm": True}, "max_grad_norm must be a number above 0, not True"),
        ({"step": 3}, "no setting 'step'. Did you mean steps"),
    ],
)
def test_errors_say_what_was_read_and_what_to_do(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(FlopcalcError) as error:
        load_matrix({**SMALL, **changes})
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.txt", "", "a.txt: a matrix is a .yaml, .yml, .json, .toml file"),
        ("no.json", None, "no.json: cannot be read: No such file"),
        ("no.toml", None, "no.toml: cannot be read: No such file"),
        ("a.json", "{", "a.json: not valid JSON"),
        ("a.json", "[]", "a.json: holds [], not a mapping of settings"),
        ("a.toml", "[", "a.toml: not valid TOML"),
        ("a.json", '{"seq_lens": [0]}', "a.json: "),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, name: str, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(FlopcalcError) as error:
        load_matrix(tmp_path / name)
    assert message in str(error.value)


# The dims that the requirement names: vocabulary, hidden size, layers, heads; and the true count.
DIMS = {
    "tiny": ((1000, 64, 2, 4), 234_816),
    "small": ((8000, 256, 4, 8), 7_309_568),
    "medium": ((16000, 512, 8, 8), 42_082_816),
    "1b": ((32000, 2048, 24, 32), 1_345_423_360),
}


@pytest.mark.parametrize("size", MODEL_SIZES)
def test_sizes(size: str) -> None:
    estimator = bind(find_model(size))
    config = estimator.source.config
    keys = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    assert (tuple(config[key] for key in keys), estimator.parameters()["total"]) == DIMS[size]
    assert config["num_key_value_heads"] == config["num_attention_heads"]
    assert config["tie_word_embeddings"] is False
    assert config["intermediate_size"] == -(-8 * config["hidden_size"] // 3 // 64) * 64


def test_trainers_clip_in_words_of_the_core() -> None:
    from flopcalc.base.vocabulary import CLIPPING

    assert set(TRAINERS.values()) == set(CLIPPING)


def test_the_parent_of_a_sweep_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from flopcalc.measure.jobs import launchers, runner\n"
        "from flopcalc.measure.sweep import matrix, run, summary\n"
        "matrix.make_matrix(batch_sizes=[1], seq_lens=[2], models=['tiny'])[0].to_job()\n"
        "print(sorted({'torch', 'transformers', 'numpy', 'opacus', 'ray', 'submitit'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    assert done.stdout == "[]\n"
