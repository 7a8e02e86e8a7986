"""Models without a recording borrow operators by role; the listing names their own modules."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from presets import MODELS as NAMED
from presets import make_sizes
from tiers import mark_heavy

from flopcalc import bind
from flopcalc.base.data import find_data_dir, load_toml
from flopcalc.core.estimate.estimate import Estimator
from flopcalc.core.model.ops import iterate, join
from flopcalc.core.workload.workload import Workload, make_workload
from flopcalc.measure.hf.compare import make_load
from flopcalc.prediction import operators
from flopcalc.prediction.operators import Operators, list_operators
from flopcalc.prediction.recordings import load_file
from flopcalc.prediction.step import predict_estimate
from lab.truth import list_types
from lab.truth import load as load_truth

MODELS = (
    "mamba-130m", "gemma-4-e2b", "jamba-1.5-mini", "llama-4-scout", "minicpm3-4b", "qwen3.5-9b", "glm-5", "kimi-k2.5",
    "nemotron-3-nano-30b-a3b", "qwen3-next-80b-a3b", "exaone-4.5-33b", "lfm2.5-vl-1.6b",
)  # fmt: skip
BORROWING = [name for name in list_types() if load_file(load_truth(name).entries[0].config["model_type"]) is None]
PRESETS = [
    name
    for name, path in NAMED.items()
    if "alias" not in (table := load_toml(path)) and load_file(table["config"]["model_type"]) is None
]


def list_modules(estimator: Estimator) -> set[str]:
    """Every module that a model's op list names, with those around them; layers folded."""
    found = {""}
    for stage in estimator.stages:
        path = f"{stage.path}.*" if stage.repeated else stage.path
        names = {join(path, op.name) for chain in dict.fromkeys(stage.layers) for op in iterate(chain)}
        for name in {path, *names}:
            parts = name.split(".")
            found |= {".".join(parts[:i]) for i in range(1, len(parts) + 1)}
    return found


def check_modules(estimator: Estimator, load: Workload) -> None:
    """Every module that is listed is the model's own, and has its own sizes."""
    found = list_operators(estimator, load)
    assert not found.is_recorded
    assert {row.module for row in found.rows} - list_modules(estimator) == set()
    assert not [note for note in found.notes if "count no bytes" in note]


@pytest.mark.parametrize("phase", ["train", "decode"])
@pytest.mark.parametrize("model", MODELS)
def test_every_listed_module_is_the_models_own(model: str, phase: str) -> None:
    check_modules(bind(model), make_workload(1, 64, phase=phase))


@pytest.mark.parametrize(
    "name", mark_heavy(BORROWING, ["mamba2", "qwen3_next", "megatron-bert", "longt5", "moonshine"])
)
def test_every_type_without_a_recording_lists_its_own_modules(name: str) -> None:
    """Tiny models of every type, under the workloads and recipes that were traced."""
    truth = load_truth(name)
    named = {"architectures": [truth.architecture]} if truth.architecture else {}
    for entry in truth.entries:
        for case in entry.all_cases:
            check_modules(bind({**entry.config, **named}, recipe=case.recipe), make_load(case.workload))


@pytest.mark.parametrize("name", mark_heavy(PRESETS))
def test_every_preset_without_a_recording_predicts_its_own_modules(name: str) -> None:
    estimator = bind(name)
    for phase in ("train", "forward"):
        estimate = estimator(1, phase=phase, **make_sizes(estimator, 64, 32))
        found = predict_estimate(estimate, device="h200", memory=False, advise=False)
        assert set(found.modules) - {"model", "optimizer"} <= list_modules(estimator)  # the whole model's own work


def test_parts_of_stand_ins_are_recorded_modules() -> None:
    stand_ins = load_toml(str(Path(find_data_dir()) / "stand_ins.toml"))
    assert list(stand_ins) == ["decoder", "encoder", "tower", "seeing"]
    for table in stand_ins.values():
        recorded = load_file(table["type"])
        assert recorded is not None
        names = {sign.partition("[")[0] for text in recorded["signatures"] for sign in text.split()}
        signs = {sign for text in recorded["signatures"] for sign in re.split(r"[ \[\]]", text)}
        names |= {sign.partition(":")[2].partition("+")[0] for sign in signs}
        for roles in table["layers"].values():
            assert any(roles["path"] in stages for stages in recorded["parts"].values())
            parts = [roles[name] for name in ("norm", "attend", "output", "function", "outer")]
            assert {*parts, *roles["projections"], *roles["inner"]} <= names
        for module in (module for modules in table["outside"].values() for module in modules):
            assert any(module == name or module.endswith(f".{name}") for name in names if name)


def hold_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a type had not been recorded."""
    monkeypatch.setattr(operators, "load_file", lambda asked: None if asked == name else load_file(asked))


@pytest.fixture
def borrowed_falcon(monkeypatch: pytest.MonkeyPatch) -> None:
    hold_out("falcon", monkeypatch)


TOKENS = 2 * 100
X, F = TOKENS * 4544 * 2, TOKENS * 4544 * 4  # bytes of a hidden state of falcon-7b in bf16 and in float32


def read(model: str = "falcon-7b", recipe: dict[str, Any] | None = None, **workload: Any) -> Operators:
    return list_operators(bind(model, recipe=recipe), make_workload(2, workload.pop("seq", 100), **workload))


def pick(found: Operators, module: str, direction: str = "forward") -> Counter[tuple[str, int, int]]:
    counts: Counter[tuple[str, int, int]] = Counter()
    for row in found.rows:
        if (row.module, row.direction, row.is_again) == (module, direction, False):
            counts[row.kind, row.reads, row.writes] += row.count
    return counts


@pytest.mark.usefixtures("borrowed_falcon")
def test_a_norm_gets_a_norms_operators_of_its_own_size() -> None:
    rows = pick(read(), "transformer.h.*.input_layernorm")
    assert rows["cast", X, F] == 32
    assert rows["module", 0, 0] == 32


@pytest.mark.usefixtures("borrowed_falcon")
def test_attention_gets_the_sizes_of_its_own_heads() -> None:
    """71 heads of 64 and one of keys: rotated queries and keys, halves put behind each other."""
    rows = pick(read(), "transformer.h.*.self_attention")
    queries, keys = TOKENS * 71 * 64 * 2, TOKENS * 64 * 2
    assert rows["cat_strided", queries, queries] == rows["cat_strided", keys, keys] == 32
    assert rows["attention", 0, 0] == 32


@pytest.mark.usefixtures("borrowed_falcon")
def test_decoding_joins_what_the_cache_holds() -> None:
    rows = pick(read(seq=1, phase="decode", context=50), "transformer.h.*.self_attention")
    cached = bind("falcon-7b").stages[1].layers[0]
    held = next(op.cache for op in iterate(cached) if op.kind == "attend")  # type: ignore[attr-defined]
    assert rows["cat", 2 * 51 * held // 2 * 2, 2 * 51 * held // 2 * 2] == 2 * 32


@pytest.mark.usefixtures("borrowed_falcon")
def test_a_joined_projection_is_one_product() -> None:
    rows = pick(read(), "transformer.h.*.self_attention.query_key_value")
    assert rows["product", 0, 0] == 32


@pytest.mark.usefixtures("borrowed_falcon")
def test_an_mlp_without_a_gate_has_no_product_with_it() -> None:
    found = read()
    wide = TOKENS * 4 * 4544 * 2
    assert pick(found, "transformer.h.*.mlp.act")["pointwise", wide, wide] == 32
    assert not any(kind == "pointwise" for kind, _, _ in pick(found, "transformer.h.*.mlp"))


@pytest.mark.usefixtures("borrowed_falcon")
def test_what_is_frozen_owes_no_gradient() -> None:
    """The model's own names tell what trains: weights of a frozen norm get no gradient's operators."""
    whole, frozen = (
        pick(read(recipe=recipe), "transformer.ln_f", "backward") for recipe in (None, {"freeze": ["transformer.ln_f"]})
    )
    assert sum(frozen.values()) < sum(whole.values())


def test_a_layer_without_attention_gets_none() -> None:
    for workload in ({}, {"seq": 1, "phase": "decode", "context": 500}):
        found = read("mamba-130m", **workload)
        assert not [row for row in found.rows if row.kind.startswith("attention")]
        inside = [row for row in found.rows if row.module.startswith("backbone.layers")]
        assert not [row for row in inside if row.kind.startswith("cat")]


def test_towers_and_text_borrow_from_their_like(monkeypatch: pytest.MonkeyPatch) -> None:
    hold_out("mllama", monkeypatch)
    found = list_operators(bind("llama-3.2-11b-vision"), make_workload(1, 64, image_grid_thw=[(1, 40, 40)]))
    groups = {row.group for row in found.rows if row.module.startswith("model.vision_model")}
    assert groups == {"vision"}
    assert any(row.module.startswith("model.vision_model.transformer.layers.*.") for row in found.rows)


@pytest.mark.parametrize("load", [{"seq_len": 128}, {"seq_len": 1, "phase": "decode", "context": 100}])
@pytest.mark.parametrize("model", ["mistral-7b", "qwen2-7b", "qwen3-8b"])
def test_a_recorded_type_borrows_nearly_what_was_recorded(
    model: str, load: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held out, types that differ from Llama in biases, norms of heads or tied heads get their own calls and bytes."""
    estimator = bind(model)
    own = list_operators(estimator, make_workload(2, **load))
    hold_out(estimator.source.config["model_type"], monkeypatch)
    borrowed = list_operators(estimator, make_workload(2, **load))
    assert (own.is_recorded, borrowed.is_recorded) == (True, False)
    calls, moved = (
        [
            sum(row.count * (row.reads + row.writes if is_bytes else 1) for row in found.rows)
            for found in (own, borrowed)
        ]
        for is_bytes in (False, True)
    )
    assert calls[1] == pytest.approx(calls[0], rel=0.05)
    assert moved[1] == pytest.approx(moved[0], rel=0.05)
