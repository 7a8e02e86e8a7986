"""Traced polynomials equal the specs' counts on dense, MoE, VLM and chunked models, hold for any module, or refuse."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiers import mark_heavy
from torch import nn

from flopcalc import bind, estimate_flops, make_workload
from flopcalc.base.errors import FlopcalcError, RecipeError, WorkloadError
from flopcalc.core.estimate.traced import find_cache_dir
from flopcalc.measure.hf.models import build_model, make_batch
from flopcalc.measure.trace.forms import Form, NoPolynomialError, _solve, fit
from flopcalc.measure.trace.polynomials import trace_config
from flopcalc.setup.counting import bind_setup
from flopcalc.setup.setup import from_keywords

TEXT = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 40, "vocab_size": 97}  # fmt: skip
DENSE = {"model_type": "llama", **TEXT}
WINDOW = {"model_type": "mistral", **TEXT, "sliding_window": 6}
MOE = {"model_type": "qwen3_moe", **TEXT, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2,
       "moe_intermediate_size": 8}  # fmt: skip
SSM = {"model_type": "mamba2", "num_hidden_layers": 2, "hidden_size": 32, "num_heads": 8, "head_dim": 8,
       "vocab_size": 97, "chunk_size": 8, "state_size": 16, "n_groups": 2, "expand": 2}  # fmt: skip
GRID = {
    "model_type": "qwen2_vl",
    "text_config": {
        "model_type": "qwen2_vl_text", **TEXT, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]},
        "bos_token_id": 1, "eos_token_id": 2,
    },
    "vision_config": {"depth": 2, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "patch_size": 4},
    "image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93,
}  # fmt: skip
FIXED = {
    "model_type": "llava",
    "text_config": {"model_type": "llama", **TEXT},
    "vision_config": {
        "model_type": "clip_vision_model", "num_hidden_layers": 3, "hidden_size": 16, "intermediate_size": 24,
        "num_attention_heads": 2, "image_size": 12, "patch_size": 4, "projection_dim": 16,
    },
    "image_token_id": 90,
}  # fmt: skip
WINDOWED_TOWER = {
    **GRID, "model_type": "qwen2_5_vl",
    "text_config": {**GRID["text_config"], "model_type": "qwen2_5_vl_text"},  # type: ignore[dict-item]
    "vision_config": {"depth": 2, "hidden_size": 16, "num_heads": 2, "intermediate_size": 24, "out_hidden_size": 32,
                      "patch_size": 4, "window_size": 16, "fullatt_block_indexes": [1]},
}  # fmt: skip


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _traced_once(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """A model is traced once for all tests of this file."""
    monkeypatch.setenv("FLOPCALC_CACHE", str(cache))


@pytest.fixture
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLOPCALC_CACHE", str(tmp_path / "cache"))


def find_traced(config: dict[str, Any], phase: str, *, has_images: bool = False, recipe: Any = None) -> Any:
    """The estimator that `trace` asks for; one image of any size says that there are some."""
    images = {"image_grid_thw": [(1, 4, 4)]} if has_images else {}
    given = {"trace": True, "phase": phase, "recipe": recipe, **images}
    return bind_setup(from_keywords("estimate", config, given), tracer=trace_config)


def compare(config: dict[str, Any], recipe: dict[str, Any] | None = None, **workload: Any) -> None:
    """The traced estimate of a workload equals the spec's, module by module."""
    load = make_workload(**workload)
    traced = find_traced(config, load.phase, has_images=bool(load.grids), recipe=recipe)
    ours = bind(config, recipe=recipe, convention="full").estimate(load)
    found = traced.estimate(load)
    assert (found.forward, found.backward, found.total) == (ours.forward, ours.backward, ours.total)
    rows = {row.path: (row.forward, row.backward) for row in ours.by_module(per_layer=True) if row.forward}
    assert {row.path: (row.forward, row.backward) for row in found.by_module(per_layer=True) if row.forward} == rows
    assert found.parameters["total"] == ours.parameters["total"]
    assert found.parameters["trainable"] == ours.parameters["trainable"]


@pytest.mark.parametrize(
    "config", mark_heavy([DENSE, WINDOW, MOE, SSM], [DENSE]), ids=lambda config: config["model_type"]
)
@pytest.mark.parametrize(("batch_size", "seq_len"), mark_heavy([(1, 1), (3, 117), (2, 2048)], [(3, 117)]))
def test_text(config: dict[str, Any], batch_size: int, seq_len: int) -> None:
    compare(config, batch_size=batch_size, seq_len=seq_len)


@pytest.mark.parametrize(
    "config", mark_heavy([DENSE, WINDOW, MOE, SSM], [DENSE]), ids=lambda config: config["model_type"]
)
@pytest.mark.parametrize("phase", ["forward", "prefill"])
def test_phases(config: dict[str, Any], phase: str) -> None:
    compare(config, batch_size=3, seq_len=43, phase=phase)


@pytest.mark.parametrize(
    "config", mark_heavy([DENSE, WINDOW, MOE, SSM], [WINDOW]), ids=lambda config: config["model_type"]
)
@pytest.mark.parametrize("context", [1, 4, 200])
def test_decode(config: dict[str, Any], context: int) -> None:
    compare(config, batch_size=2, seq_len=7, phase="decode", context=context)


@pytest.mark.heavy
def test_recipes() -> None:
    compare(DENSE, {"freeze": ["model.layers.0"]}, batch_size=2, seq_len=11)
    compare(DENSE, {"lora": {"r": 4, "targets": ["q_proj", "down_proj"]}}, batch_size=2, seq_len=11)
    compare(DENSE, {"recompute": "full"}, batch_size=2, seq_len=11)  # which convention full leaves out


SIZES = {**TEXT, "pad_token_id": 0}
ADAPTED = {"r": 8, "target_modules": ["q_proj"]}


@pytest.mark.parametrize(
    ("name", "changed", "adapted"),
    mark_heavy(
        [
            ("LlamaForCausalLM", "frozen", None),
            ("LlamaForCausalLM", "", ADAPTED),
            ("LlamaForCausalLM", "checkpointed", None),
            ("LlamaModel", "", None),
            ("LlamaForSequenceClassification", "frozen", None),
            ("BertModel", "", None),
            ("BertForSequenceClassification", "", {"r": 4, "target_modules": ["query"], "task_type": "SEQ_CLS"}),
        ],
        [("LlamaForSequenceClassification", "frozen", None)],
    ),
)
def test_a_live_model_is_traced_as_it_is(name: str, changed: str, adapted: dict[str, Any] | None) -> None:
    """Its class, what trains, its adapters: as the spec of the same live model, which reads all of these."""
    import transformers

    model = getattr(transformers, name)(getattr(transformers, name).config_class(**SIZES))
    if changed == "frozen":
        model.get_input_embeddings().requires_grad_(False)
        getattr(model, "model", model).layers[0].requires_grad_(False)
    if changed == "checkpointed":
        model.gradient_checkpointing_enable()
    if adapted is not None:
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(**adapted))
    for phase in ("train", "forward"):
        given: dict[str, Any] = {"batch_size": 2, "seq_len": 32, "phase": phase}
        found = estimate_flops(model, trace=True, **given)
        ours = estimate_flops(model, convention="full", **given)
        assert (found.forward, found.backward, found.total) == (ours.forward, ours.backward, ours.total)
    assert not next(model.parameters()).is_meta
    with pytest.raises(RecipeError, match="a live model itself says what trains"):
        estimate_flops(model, trace=True, batch_size=2, seq_len=32, freeze="model.embed_tokens")


@pytest.mark.heavy
def test_a_saved_classifier_is_traced() -> None:
    named = {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"], **SIZES}
    compare(named, batch_size=2, seq_len=33)
    model = build_model(named, architecture="LlamaForSequenceClassification")
    bound = bind(model, {"input_ids": torch.full((2, 9), 3)}, phases=("train",))
    assert bound(2, 33).total == bind(named, convention="full")(2, 33).total


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("config", "grids"),
    [(GRID, [(1, 4, 6)]), (GRID, [(1, 8, 10), (1, 6, 4), (1, 4, 4), (1, 4, 4)]), (FIXED, [(1, 3, 3)] * 2)],
    ids=["grid", "grids", "fixed"],
)
def test_images(config: dict[str, Any], grids: list[tuple[int, int, int]]) -> None:
    compare(config, batch_size=2, seq_len=60, image_grid_thw=grids)
    compare(config, batch_size=2, seq_len=60, image_grid_thw=grids, phase="forward")


@pytest.mark.heavy
def test_what_is_no_polynomial_is_refused() -> None:
    """Windows of a tower are ragged at the edges: the count follows each image's sides, not its size."""
    with pytest.raises(NoPolynomialError, match="no polynomial"):
        find_traced(WINDOWED_TOWER, "forward", has_images=True)


@pytest.mark.usefixtures("_own_cache")
def test_kept_on_disk_and_read_without_torch() -> None:
    first = find_traced(DENSE, "train")(2, 64).to_dict()
    script = (
        "import sys, json, flopcalc\n"
        f"config = json.loads({json.dumps(json.dumps(DENSE))})\n"
        "found = flopcalc.estimate_flops(config, batch_size=2, seq_len=64, trace=True)\n"
        "print(json.dumps(found.to_dict()))\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == json.loads(json.dumps(first))
    assert first["model"]["source"] == "trace"
    assert first["convention"] == "full"
    assert first["totals"]["model"] is None
    assert first["totals"]["hardware"] is None


@pytest.mark.heavy
@pytest.mark.usefixtures("_own_cache")
@pytest.mark.parametrize("text", mark_heavy(["", "{", '{"schema": 99}', '{"schema": 1, "polynomials": 3}'], ["{"]))
def test_a_broken_cache_is_traced_anew(text: str) -> None:
    before = find_traced(DENSE, "forward")(1, 8, phase="forward").total
    (file,) = (Path(find_cache_dir()) / "traces").iterdir()
    file.write_text(text)
    assert find_traced(DENSE, "forward")(1, 8, phase="forward").total == before


def test_a_cache_that_cannot_be_written_costs_nothing_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLOPCALC_CACHE", str(tmp_path / "file"))
    assert find_traced(DENSE, "forward")(1, 8, phase="forward").total > 0
    assert "could not be kept" in capsys.readouterr().err


# --- bind(module, example_batch) ----------------------------------------------------------------------------


class Plain(nn.Module):
    """No HF at all: a layer of attention by hand, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(12, 36)
        self.out = nn.Linear(12, 7, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out((q @ k.transpose(1, 2)).softmax(-1) @ v)


class Cubic(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = x @ x.transpose(1, 2)
        return self.out(scores @ scores @ x)


def test_any_module() -> None:
    module = Plain()
    weight = module.qkv.weight.detach().clone()
    estimator = bind(module, {"x": torch.randn(2, 5, 12)})
    b, n = 3, 41
    estimate = estimator(b, n)
    projections, pairs = 2 * b * n * 12 * (36 + 7), 2 * 2 * b * n * n * 12
    assert estimate.forward == projections + pairs
    assert estimate.backward == 2 * (projections + pairs) - 2 * b * n * 12 * 36  # x needs no gradient
    assert estimator(b, n, phase="forward").total == projections + pairs
    assert torch.equal(module.qkv.weight, weight)
    assert module.qkv.weight.grad is None
    assert not module.qkv.weight.is_meta
    with pytest.raises(WorkloadError, match="not for prefill"):
        estimator(b, n, phase="prefill")


def test_a_module_without_a_polynomial_is_refused() -> None:
    with pytest.raises(NoPolynomialError, match="Cubic"):
        bind(Cubic(), {"x": torch.randn(2, 5, 12)})


def test_which_axis_is_which() -> None:
    with pytest.raises(WorkloadError, match="both 5"):
        bind(Plain(), {"x": torch.randn(5, 5, 12)})
    told = bind(Plain(), {"x": torch.randn(5, 5, 12)}, dims={"x": ("b", "n", None)}, phases=("forward",))
    plain = bind(Plain(), {"x": torch.randn(2, 5, 12)}, phases=("forward",))
    assert told(2, 9, phase="forward").total == plain(2, 9, phase="forward").total


def test_a_module_without_a_length() -> None:
    """The last axis is neither batch nor length: said by dims, then the batch alone is a workload."""

    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(8, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.up(x)

    example = {"x": torch.randn(4, 8)}
    with pytest.raises(FlopcalcError, match=r"axes were taken as dims=\{'x': \('b', 'n'\)\}; bind\(module, example"):
        bind(Rows(), example, phases=("forward",))
    told = bind(Rows(), example, dims={"x": ("b", None)}, phases=("forward",))
    assert told(5, phase="forward").total == told(5, 1, phase="forward").total == 2 * 5 * 8 * 6
    for arguments, words in (((5, 32), "no length: leave seq_len out"), ((example,), "by name: batch=")):
        with pytest.raises(WorkloadError, match=words):
            told(*arguments, phase="forward")  # type: ignore[arg-type]


@pytest.mark.heavy
def test_a_live_vlm() -> None:
    model = build_model(GRID)
    batch = make_batch(model.config, {"batch": 1, "seq": 17, "images": [[1, 4, 6]]})
    estimator = bind(model, batch, phases=("forward",))
    spec = bind(GRID, convention="full")
    for grids in (None, [(1, 8, 4), (1, 4, 4)]):
        asked: dict[str, Any] = {"image_grid_thw": grids, "phase": "forward"}
        assert estimator(2, 40, **asked).total == spec(2, 40, **asked).total
    assert not next(model.parameters()).is_meta


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (({"x": 3},), "holds no tensor"),
        (([1, 2],), "mapping of the module's arguments"),
    ],
)
def test_bad_example_batches(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(FlopcalcError, match=message):
        bind(Plain(), *arguments)


def test_what_a_trace_does_not_take() -> None:
    with pytest.raises(FlopcalcError, match="under convention full, in one number format: leave convention out"):
        bind(Plain(), {"x": torch.randn(2, 5, 12)}, convention="hardware")
    with pytest.raises(WorkloadError, match=r"torch\.nn\.Module"):
        bind("llama-3.1-8b", {"x": torch.randn(2, 5, 12)})


class Repeats(nn.Module):
    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times
        self.up = nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            x = self.up(x)
        return x


class Pads(Repeats):
    """To whole blocks of 256, as some kernels want it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(nn.functional.pad(x, (0, 0, 0, -x.shape[1] % 256)))


class Cuts(Repeats):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x[:, :200])


class Keeps(nn.Module):
    """Assigns in forward, counts batches, and has a part in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.part = nn.Dropout(0.5).eval()
        self.up = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = self.up(self.part(self.norm(x.transpose(1, 2)).transpose(1, 2)))
        return self.last


def test_modules_of_one_class_are_told_apart() -> None:
    for times in (1, 5):
        estimator = bind(Repeats(times), {"x": torch.randn(2, 9, 8)}, phases=("forward",))
        assert estimator(1, 10, phase="forward").total == times * 2 * 10 * 8 * 8


@pytest.mark.parametrize("kind", [Pads, Cuts])
def test_what_holds_for_short_lengths_alone_is_refused(kind: type[Repeats]) -> None:
    with pytest.raises(NoPolynomialError):
        bind(kind(1), {"x": torch.randn(2, 9, 8)}, phases=("forward",))


def test_the_module_is_left_as_it_was() -> None:
    module = Keeps()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    bind(module, {"x": torch.randn(2, 9, 8)})
    assert [each.training for each in module.modules()] == [True, True, False, True]
    assert not hasattr(module, "last")
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert module(torch.randn(2, 9, 8)).device.type == "cpu"


def test_a_batch_of_its_own_names() -> None:
    estimator = bind(Repeats(1), {"x": torch.randn(2, 9, 8)}, phases=("forward",))
    assert estimator(batch={"x": torch.randn(3, 7, 8)}, phase="forward").total == 2 * 3 * 7 * 8 * 8
    with pytest.raises(WorkloadError, match="traced with: x"):
        estimator(batch={"y": torch.randn(3, 7, 8)}, phase="forward")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dims": {"nope": ("b", "n")}}, "no tensor of the example batch"),
        ({"dims": {"x": ("b", 5, None)}}, "'b', 'n', another name or None"),
        ({"dims": {"x": (None, "n", None)}}, "dims names no axis 'b'"),
        ({"phases": ("bogus",)}, "phase 'bogus' unknown; known: train, forward"),
        ({"convention": "model"}, "under convention full, in one number format: leave convention out"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(FlopcalcError, match=message):
        bind(Repeats(1), {"x": torch.randn(2, 9, 8)}, **options)


def test_a_second_length_is_asked_about() -> None:
    class Two(Repeats):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.up(x).sum() + self.up(y).sum()

    with pytest.raises(WorkloadError, match="which axis is the batch"):
        bind(Two(1), {"x": torch.randn(2, 9, 8), "y": torch.randn(2, 5, 8)})


@pytest.mark.parametrize("workload", [{"clips": [100]}, {"decoder_seq_len": 5}])
def test_a_trace_takes_no_second_input(workload: dict[str, Any]) -> None:
    estimator = find_traced(DENSE, "forward")
    with pytest.raises(WorkloadError, match="one length alone"):
        estimator(2, 20, phase="forward", **workload)


def test_values_that_decide_are_an_error_in_words() -> None:
    class Decides(Repeats):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.up(x) if x.sum() > 0 else x

    with pytest.raises(FlopcalcError, match=r"could not be traced at .* depends on values"):
        bind(Decides(1), {"x": torch.randn(2, 9, 8)}, phases=("forward",))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "t5"}, "two lengths cannot be traced"),
        ({"model_type": "qwen9"}, "knows no language model of type 'qwen9'"),
    ],
)
def test_configs_that_cannot_be_traced(config: dict[str, Any], message: str) -> None:
    with pytest.raises(FlopcalcError, match=message):
        find_traced(config, "forward")


@pytest.mark.heavy
def test_an_encoder_is_traced_as_its_own_class() -> None:
    config = {"model_type": "bert", "num_hidden_layers": 2, "hidden_size": 24, "intermediate_size": 41,
              "num_attention_heads": 4, "vocab_size": 101, "max_position_embeddings": 2048}  # fmt: skip
    compare(config, batch_size=2, seq_len=33)


@pytest.mark.heavy
def test_grids_are_checked() -> None:
    estimator = find_traced(GRID, "forward", has_images=True)
    for grid, seq, message in (
        ((1, 3, 3), 40, "multiples of 2"),
        ((2, 4, 4), 40, "1,H,W"),
        ((1, 4, 4), 2, "do not fit"),
    ):
        with pytest.raises(WorkloadError, match=message):
            estimator(1, seq, image_grid_thw=[grid], phase="forward")


@pytest.mark.heavy
def test_beyond_a_window_that_is_too_large_to_trace() -> None:
    estimator = find_traced({**WINDOW, "sliding_window": 9000}, "decode")
    assert estimator(1, 1, phase="decode", context=8000).total > 0
    with pytest.raises(WorkloadError, match="beyond a window or chunk of 9000"):
        estimator(1, 1, phase="decode", context=20000)


def test_lengths_that_were_not_reached_are_noted() -> None:
    estimator = find_traced(DENSE, "forward")
    assert not [note for note in estimator(1, 64, phase="forward").notes if "checked up to" in note]
    assert [note for note in estimator(1, 5000, phase="forward").notes if "checked up to length 1003" in note]


# --- the solver ---------------------------------------------------------------------------------------------


def test_solver() -> None:
    inverse = _solve([[1, 2], [3, 5]])  # type: ignore[list-item]
    assert inverse == [[-5, 2], [3, -1]]
    assert _solve([[1, 2], [2, 4]]) is None  # type: ignore[list-item]


def test_fit_finds_halves_and_refuses_the_rest() -> None:
    form = Form(("b * n", "b * n * n"), tuple({"b": b, "n": n} for n in (2, 3, 5, 9) for b in (1, 2)))
    rows = fit(form, lambda p: {"m": (p["b"] * p["n"] * (p["n"] + 1) // 2, 0, 0)})
    assert rows is not None
    assert [str(value) for value in rows["m"][0]] == ["1/2", "1/2"]
    assert fit(form, lambda p: {"m": (p["n"] ** 3, 0, 0)}) is None
