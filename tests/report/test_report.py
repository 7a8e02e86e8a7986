"""Reports: the numbers in every format are the estimate's own, and the table fits 80 columns."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from flopcalc import Utilization, bind, estimate_flops
from flopcalc.base.text_table import format_grid
from flopcalc.core.estimate.estimate import Estimate
from flopcalc.report.estimate import NOT_COUNTED, format_csv, format_estimate

TEXT = "llama-3.1-8b"
DECODE = {"phase": "decode", "seq_len": 1}


def make(model: str = TEXT, seq: int = 2048, **settings: Any) -> Estimate:
    call = {key: settings.pop(key) for key in ("batch_size", "image_grid_thw", "phase", "lengths") if key in settings}
    return bind(model, **settings)(seq_len=None if "lengths" in call else seq, **call)


@pytest.mark.parametrize("by", ["component", "module", "kind"])
def test_csv_holds_exact_rows(by: str) -> None:
    estimate = make(recipe={"recompute": "full"}, convention="hardware")
    rows = list(csv.DictReader(io.StringIO(format_csv(estimate, by, None))))
    assert sum(int(row["forward"]) for row in rows) == estimate.forward
    assert sum(int(row["backward"]) for row in rows) == estimate.backward
    assert sum(int(row["recompute"]) for row in rows) == estimate.recompute > 0
    if by == "module":
        assert sum(int(row["parameters"]) for row in rows) == estimate.parameters["total"]


def test_breakdown_by_module_is_cut_to_depth() -> None:
    headers, rows = make().breakdown("module", 2)
    assert headers == ["path", "kind", "count", "forward", "backward", "recompute", "clipping", "parameters"]
    assert [row[0] for row in rows] == ["model.embed_tokens", "model.layers", "model.norm", "lm_head"]


CASES: list[tuple[str, int, dict[str, Any], str]] = [
    (TEXT, 2048, {}, "component"),
    (TEXT, 2048, {}, "module"),
    (TEXT, 2048, {}, "kind"),
    ("deepseek-v3", 4096, {"recipe": {"recompute": "full"}, "convention": "hardware"}, "module"),
    ("qwen2-vl", 4096, {"image_grid_thw": [[1, 54, 74]], "batch_size": 1}, "module"),
    ("qwen3-vl-8b", 4096, {"recipe": {"lora": "r=16,targets=q_proj+v_proj", "recompute": "full"}}, "component"),
    ("qwen3-vl-8b", 4096, {"recipe": {"freeze": ["vision", "model.language_model.layers.1*"]}}, "component"),
    ("gpt2", 1024, {"phase": "prefill"}, "component"),
    (TEXT, 4096, {"clipping": "ghost", "convention": "hardware", "batch_size": 4}, "module"),
    (TEXT, 4096, {"recipe": {"clipping": "hooks", "recompute": "full-reentrant"}, "convention": "hardware"}, "module"),
    ("mixtral-8x7b", 8192, {"lengths": [512] * 16}, "module"),
]


@pytest.mark.parametrize(("model", "seq", "settings", "by"), CASES)
def test_table_fits_80_columns(model: str, seq: int, settings: dict[str, Any], by: str) -> None:
    estimate = make(model, seq, **settings)
    shares = [
        ("MFU", Utilization(0.4321, 989.4e12, "NVIDIA H200", "bf16")),
        ("HFU", Utilization(0.5, 1e12, None, "bf16")),
    ]
    text = format_estimate(estimate, by=by, shares=shares, notes=["a note of many words " * 8])
    assert max(len(line) for line in text.splitlines()) <= 80
    assert f"{estimate.total:,} FLOPs" in text
    assert "43.21 % of 989.4 TFLOP/s bf16" in " ".join(text.split())


def test_table_says_convention_others_totals_and_what_was_not_counted() -> None:
    estimate = make("qwen2-vl", 64)
    text = " ".join(format_estimate(estimate, notes=["mind this"]).split())
    assert NOT_COUNTED in text
    assert "convention model" in text
    assert "under full" in text
    assert "under hardware" in text
    assert "under model" not in text
    assert "no image given" in text
    assert "mind this" in text
    tail = text[text.index("not counted") :]
    assert "model: what the model needs" in tail


def test_table_rows_and_total() -> None:
    lines = format_estimate(make()).splitlines()
    total = next(line.split() for line in lines if line.startswith("total"))
    assert total == ["total", "31.84", "T", "63.68", "T", "100.0", "%"]
    mlp = next(line.split() for line in lines if line.startswith("mlp"))
    assert mlp[:3] == ["mlp", "23.09", "T"]


def test_recompute_gets_its_column_only_where_there_is_some() -> None:
    plain = format_estimate(make())
    again = format_estimate(make(recipe={"recompute": "full"}, convention="hardware"))
    assert "recompute" not in plain
    assert "recompute" in again.split("total")[0]


def test_markdown() -> None:
    text = format_estimate(make("qwen2-vl", 2048, image_grid_thw=[[1, 4, 4]]), style="github", notes=["mind this"])
    lines = text.splitlines()
    assert lines[0].startswith("## qwen2-vl-7b")
    assert any(set(line) <= set("|-: ") and line.startswith("|") for line in lines)
    assert "- note: mind this" in lines
    assert any(line.startswith("- visual tokens: 4 from 1 image") for line in lines)


def test_html_escapes(tmp_path: Path) -> None:
    folder = tmp_path / "a<b>"
    folder.mkdir()
    config = {
        "model_type": "llama",
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 9,
    }
    (folder / "config.json").write_text(json.dumps(config))
    html = bind(folder)(1, 8)._repr_html_()
    assert "a&lt;b&gt;" in html
    assert "<b>" not in html
    assert html.count("<tr>") == 6
    assert '<th scope="col" style="text-align:right">forward</th>' in html


def test_words_of_the_work() -> None:
    assert "3 documents packed into 1 × 12 tokens" in format_estimate(make("sweep-tiny", lengths=[3, 4, 5]))
    assert "2 micro-batches" in format_estimate(make("sweep-tiny", 8) * 2)
    assert "and 1 more" in format_estimate(make("sweep-tiny", 8) + make("sweep-tiny", 9))
    decode = bind("sweep-tiny")(1, 2, phase="decode", context=7)
    assert "1 × 2 new tokens after 7 cached" in format_estimate(decode)
    padded = bind("sweep-tiny")(batch={"input_ids": [[0, 0]], "attention_mask": [[1, 0]]})
    assert "1 × 2 tokens (padded)" in format_estimate(padded)


def test_grid_of_nothing() -> None:
    assert "a" in format_grid(["a", "b"], [])


@pytest.mark.parametrize(
    ("name", "sizes", "shown"),
    [
        ("llama-3.3-70b", {**DECODE, "context": 24575, "batch_size": 12, "kv_cache": "fp8"}, "45.00 GiB in fp8"),
        ("llama-3.3-70b", {"phase": "prefill", "seq_len": 24576}, "7.50 GiB in bf16"),
        ("deepseek-v3", {**DECODE, "context": 4090, "seq_len": 6}, "274.50 MiB in bf16"),  # latents
        ("gemma-3-12b", {**DECODE, "context": 32767}, "2.31 GiB in bf16"),  # windows of 1,024
        ("mamba-130m", {**DECODE, "context": 100}, ""),
    ],
)  # fmt: skip
def test_the_cache_of_keys_and_values_is_shown(name: str, sizes: dict[str, Any], shown: str) -> None:
    lines = [
        line for line in format_estimate(estimate_flops(name, **sizes)).splitlines() if line.startswith("KV cache")
    ]
    assert [line.split()[2:6] for line in lines] == ([shown.split()] if shown else [])
