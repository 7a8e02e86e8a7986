"""Properties that hold for every tiny model and workload; and mutated input, from which only flopcalc's errors come."""

from __future__ import annotations

import copy
import itertools
import json
from functools import cache
from typing import Any

import pytest
from families import FAMILIES, load_tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from flopcalc import Estimate, Estimator, FlopcalcError, bind, estimate_flops
from flopcalc.base.vocabulary import CONVENTIONS
from flopcalc.cli import main

VISION_GRIDS = {"llava": (1, 3, 3)}  # a fixed square; the others take any multiple of 2
# PEFT folds LoRA into fused experts and routers once a call, which many tokens make cheaper than the products needed.
MOE = ("mixtral", "qwen3_moe", "deepseek_v3")
KERNELS = ("eager", "flash", "efficient", "cudnn")
PATTERNS = {
    "language": ["language", "*.weight", "*lm_head*", "*.0", "*.[12].*", "*mlp*", "*att*", "*.*"],
    "vision": ["vision", "projector", "language", "*norm*", "*.0", "*.[12].*", "*mlp*", "*.*"],
}
few = settings(max_examples=30, deadline=None)


@cache
def config_of(family: str) -> dict[str, Any]:
    """The first tiny config whose traces are recorded."""
    return load_tiny(family).config


def is_vision(family: str) -> bool:
    return "vision_config" in config_of(family)


@cache
def bound(family: str, convention: str = "model", recipe: str = "{}", kernel: str = "auto") -> Estimator:
    return bind(config_of(family), recipe=json.loads(recipe), convention=convention, attention_kernel=kernel)


families = st.sampled_from(FAMILIES)
lengths = st.lists(st.integers(1, 35), min_size=1, max_size=5)


@st.composite
def recipes(draw: st.DrawFn, family: str) -> dict[str, Any]:
    patterns = PATTERNS["vision" if is_vision(family) else "language"]
    kind = draw(st.sampled_from(["all", "freeze", "train_only", "lora"]))
    recipe: dict[str, Any] = {"recompute": draw(st.sampled_from(["none", "full", "full-reentrant"]))}
    if kind in ("freeze", "train_only"):
        recipe[kind] = draw(st.lists(st.sampled_from(patterns), min_size=1, max_size=3, unique=True))
    elif kind == "lora":
        recipe["lora"] = {"r": draw(st.integers(1, 9)), "targets": ["all-linear"]}
    return recipe


@st.composite
def workloads(draw: st.DrawFn, family: str) -> dict[str, Any]:
    phase = draw(st.sampled_from(["train", "train", "forward", "prefill", "decode"]))
    load: dict[str, Any] = {"phase": phase}
    if phase == "decode":
        return {
            **load,
            "batch_size": draw(st.integers(1, 5)),
            "seq_len": draw(st.integers(1, 9)),
            "context": draw(st.integers(0, 20)),
        }
    load["logits"] = draw(st.sampled_from([None, "all", "last", 3]))
    if draw(st.booleans()):
        load["lengths"] = draw(lengths)
        room = sum(load["lengths"])
    else:
        load["batch_size"], load["seq_len"] = draw(st.integers(1, 5)), draw(st.integers(1, 40))
        room = load["batch_size"] * load["seq_len"]
    if is_vision(family):
        grids = []
        for _ in range(draw(st.integers(0, 3))):
            t, h, w = VISION_GRIDS.get(family) or (
                draw(st.integers(1, 2)),
                2 * draw(st.integers(1, 4)),
                2 * draw(st.integers(1, 4)),
            )
            tokens = t * h * w if family == "llava" else t * h * w // 4
            if tokens <= room:
                room -= tokens
                grids.append([t, h, w])
        load["image_grid_thw"] = grids or None
    return load


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, Estimate, dict[str, Any]]:
    """A family, an Estimate of it, and the workload."""
    family = draw(families)
    load = draw(workloads(family))
    estimator = bound(
        family, draw(st.sampled_from(CONVENTIONS)), json.dumps(draw(recipes(family))), draw(st.sampled_from(KERNELS))
    )
    return family, estimator(**load), load


def sums(rows: Any) -> tuple[int, ...]:
    return tuple(sum(column) for column in zip(*rows, strict=True))


# --- sums -------------------------------------------------------------------------------------------------------------
@given(cases())
@settings(max_examples=60, deadline=None)
def test_every_breakdown_sums_to_the_total(case: tuple[str, Estimate, dict[str, Any]]) -> None:
    _, estimate, load = case
    whole = (estimate.forward, estimate.backward, estimate.recompute, estimate.clipping)
    assert sums(estimate.by_component().values()) == whole
    assert sums(estimate.by_kind().values()) == whole
    for depth, per_layer in itertools.product((None, 1, 2, 3, 4), (False, True)):
        rows = estimate.by_module(depth, per_layer=per_layer)
        assert sums((row.forward, row.backward, row.recompute, row.clipping) for row in rows) == whole
        assert sum(row.parameters for row in rows) == estimate.parameters["total"]
        assert len({row.path for row in rows}) == len(rows)
    numbers = [*whole, estimate.total, estimate.tokens, *estimate.parameters.values()]
    numbers += [value for row in estimate.by_module() for value in row if not isinstance(value, str)]
    numbers += [*estimate.totals.values(), *itertools.chain(*estimate.by_component().values())]
    assert all(type(number) is int and number >= 0 for number in numbers)
    assert estimate.total == sum(whole) == estimate.totals[estimate.convention]
    assert estimate.backward == 0 or load["phase"] == "train"
    assert estimate.recompute == 0 or estimate.convention == "hardware"
    parameters = estimate.parameters
    assert max(parameters["active"], parameters["trainable"]) <= parameters["total"]


@given(cases())
@few
def test_json_round_trips(case: tuple[str, Estimate, dict[str, Any]]) -> None:
    shown = case[1].to_dict()
    assert json.loads(json.dumps(shown)) == shown
    for rows in (shown["components"], shown["modules"]):
        assert sum(row["forward"] + row["backward"] for row in rows) == shown["flops"]["total"]


# --- linear and additive ----------------------------------------------------------------------------------------------
@given(st.data(), families, st.integers(1, 6), st.integers(1, 40))
@few
def test_model_is_linear_in_batch(data: st.DataObject, family: str, batch: int, seq: int) -> None:
    estimator = bound(family, "model", json.dumps({**data.draw(recipes(family)), "recompute": "none"}))
    grid = data.draw(workloads(family)).get("image_grid_thw") if is_vision(family) else None
    if grid:
        seq += 200
    phase = data.draw(st.sampled_from(["train", "forward", "prefill"]))
    one = estimator(1, seq, image_grid_thw=grid, phase=phase)
    many = estimator(batch, seq, image_grid_thw=grid * batch if grid else None, phase=phase)
    assert (many.forward, many.backward) == (one.forward * batch, one.backward * batch)
    assert many.by_component() == (one * batch).by_component()


@given(families, lengths)
@few
def test_model_is_additive_over_documents(family: str, documents: list[int]) -> None:
    estimator = bound(family)
    packed = estimator(lengths=documents)
    parts = [estimator(1, length) for length in documents]
    assert packed.forward == sum(part.forward for part in parts)
    assert packed.backward == sum(part.backward for part in parts)
    halves = estimator(lengths=documents[:1]) + estimator(lengths=documents[1:] or [1])
    assert halves.total == parts[0].total + sum(part.total for part in parts[1:] or [estimator(1, 1)])


@given(cases(), st.integers(1, 50))
@few
def test_sum_and_product_of_estimates(case: tuple[str, Estimate, dict[str, Any]], times: int) -> None:
    estimate = case[1]
    many = estimate * times
    assert many == times * estimate
    assert many.total == estimate.total * times
    assert many.totals == {name: value * times for name, value in estimate.totals.items()}
    assert many.by_component() == {
        name: tuple(value * times for value in row) for name, row in estimate.by_component().items()
    }
    double = estimate + estimate
    assert double.total == (estimate * 2).total
    assert [row[3:] for row in double.by_module(2)] == [row[3:] for row in (estimate * 2).by_module(2)]
    assert double.parameters == estimate.parameters


# --- conventions ------------------------------------------------------------------------------------------------------
@given(st.data(), families)
@few
def test_conventions_are_ordered(data: st.DataObject, family: str) -> None:
    recipe = {**data.draw(recipes(family)), "recompute": "none"}
    load = data.draw(workloads(family))
    totals = bound(family, "model", json.dumps(recipe), "eager")(**load).totals
    assert totals["full"] == totals["hardware"]
    if "lora" not in recipe or family not in MOE:
        assert totals["model"] <= totals["full"]
    again = bound(family, "model", json.dumps({**recipe, "recompute": "full-reentrant"}), "eager")(**load).totals
    assert (again["model"], again["full"]) == (totals["model"], totals["full"])


# --- freezing ---------------------------------------------------------------------------------------------------------
@given(st.data(), families, st.sampled_from(["model", "full"]))
@settings(max_examples=50, deadline=None)
def test_freezing_never_adds(data: st.DataObject, family: str, convention: str) -> None:
    patterns = PATTERNS["vision" if is_vision(family) else "language"]
    more = data.draw(st.lists(st.sampled_from(patterns), min_size=1, max_size=4, unique=True))
    fewer = more[: data.draw(st.integers(0, len(more) - 1))]
    load = data.draw(workloads(family))
    estimates = [bound(family, convention, json.dumps({"freeze": freeze}))(**load) for freeze in ([], fewer, more)]
    for looser, tighter in itertools.pairwise(estimates):
        assert tighter.forward == looser.forward
        assert tighter.backward <= looser.backward
        assert tighter.parameters["trainable"] <= looser.parameters["trainable"]
        assert tighter.parameters["total"] == looser.parameters["total"]
        loose = {row.path: row.backward for row in looser.by_module(per_layer=True)}
        tight = {row.path: row.backward for row in tighter.by_module(per_layer=True)}
        assert loose.keys() == tight.keys()
        assert all(tight[path] <= loose[path] for path in loose)
    nothing = bound(family, convention, json.dumps({"freeze": ["*"]}))(**load)
    assert (nothing.backward, nothing.parameters["trainable"]) == (0, 0)


# --- one workload, several ways to say it -----------------------------------------------------------------------------
class Tensor:
    """What flopcalc touches of a tensor on the host."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.rows), len(self.rows[0])) if isinstance(self.rows[0], list) else (len(self.rows),)

    def tolist(self) -> list[Any]:
        return self.rows

    def __ne__(self, other: object) -> Any:
        if isinstance(other, Tensor):
            return Tensor(
                [[x != y for x, y in zip(a, b, strict=True)] for a, b in zip(self.rows, other.rows, strict=True)]
            )
        return Tensor([[value != other for value in row] for row in self.rows])

    __hash__ = None  # type: ignore[assignment]

    def __getitem__(self, key: Any) -> Tensor:
        return Tensor([row[key[1]] for row in self.rows])

    def __add__(self, other: int) -> Tensor:
        return Tensor([[value + other for value in row] for row in self.rows])

    def sum(self, axis: int) -> Tensor:
        assert axis == -1
        return Tensor([sum(row) for row in self.rows])

    def any(self) -> bool:
        return any(any(row) for row in self.rows)


def tensors(batch: dict[str, Any]) -> dict[str, Any]:
    return {key: Tensor(value) for key, value in batch.items()}


def same(one: Estimate, other: Estimate) -> bool:
    return one.to_dict() == other.to_dict()


@given(families, st.integers(1, 4), st.integers(1, 30))
@few
def test_batch_and_arguments_agree(family: str, rows: int, seq: int) -> None:
    estimator = bound(family)
    expected = estimator(rows, seq)
    ids = [[0] * seq for _ in range(rows)]
    ones = [[1] * seq for _ in range(rows)]
    positions = [list(range(seq)) for _ in range(rows)]
    for batch in (
        {"input_ids": ids},
        {"input_ids": ids, "attention_mask": ones},
        {"input_ids": ids, "attention_mask": ones, "position_ids": positions},
    ):
        assert same(estimator(batch=batch), expected)
        assert same(estimator(batch=tensors(batch)), expected)
    assert same(estimate_flops(config_of(family), batch_size=rows, seq_len=seq), expected)
    assert same(estimate_flops(config_of(family), batch={"input_ids": ids}), expected)


@given(families, lengths, st.integers(0, 5))
@few
def test_packed_and_padded_batches_agree_with_lengths(family: str, documents: list[int], padding: int) -> None:
    estimator = bound(family)
    expected = estimator(lengths=documents)
    total = sum(documents)
    marks = [0, *itertools.accumulate(documents)]
    positions = [[position for length in documents for position in range(length)]]
    for extra in ({"cu_seqlens": marks}, {"position_ids": positions}):
        batch = {"input_ids": [[0] * total], **extra}
        for given_batch in (batch, tensors(batch)):
            found = estimator(batch=given_batch)
            assert (found.forward, found.backward, found.tokens) == (expected.forward, expected.backward, total)
    width = max(documents) + padding
    mask = [[1] * length + [0] * (width - length) for length in documents]
    padded = {"input_ids": [[0] * width for _ in documents], "attention_mask": mask}
    for given_batch in (padded, tensors(padded)):
        found = estimator(batch=given_batch)
        assert (found.forward, found.backward, found.tokens) == (expected.forward, expected.backward, total)


@given(st.data(), st.sampled_from([family for family in FAMILIES if is_vision(family) and family != "llava"]))
@few
def test_grids_in_a_batch_and_as_arguments_agree(data: st.DataObject, family: str) -> None:
    side = st.integers(1, 4).map(lambda value: 2 * value)
    images = data.draw(st.lists(st.tuples(st.integers(1, 2), side, side).map(list), min_size=1, max_size=3))
    videos = data.draw(st.lists(st.tuples(st.integers(1, 3), side, side).map(list), max_size=2))
    estimator = bound(family)
    expected = estimator(2, 200, image_grid_thw=images, video_grid_thw=videos or None)
    batch = {"input_ids": [[0] * 200] * 2, "image_grid_thw": images, **({"video_grid_thw": videos} if videos else {})}
    assert same(estimator(batch=batch), expected)
    assert same(estimator(batch=tensors(batch)), expected)
    # Order does not matter, nor which is called a video.
    assert estimator(2, 200, video_grid_thw=(images + videos)[::-1]).total == expected.total


@given(st.data(), families, st.sampled_from(CONVENTIONS))
@few
def test_bound_call_equals_estimate_flops(data: st.DataObject, family: str, convention: str) -> None:
    load, recipe = data.draw(workloads(family)), data.draw(recipes(family))
    estimator = bound(family, convention, json.dumps(recipe))
    fresh = estimate_flops(config_of(family), **load, recipe=recipe, convention=convention)
    assert same(estimator(**load), fresh)
    assert same(estimator(**load), fresh)  # and calling again changes nothing


@given(families, st.integers(1, 4), st.integers(1, 6), st.integers(0, 12))
@few
def test_decode_is_its_tokens_one_by_one(family: str, rows: int, new: int, context: int) -> None:
    estimator = bound(family)
    whole = estimator(rows, new, phase="decode", context=context)
    steps = [estimator(rows, 1, phase="decode", context=context + j) for j in range(new)]
    assert whole.total == sum(step.total for step in steps)


# --- mutated input ----------------------------------------------------------------------------------------------------
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 20),
    st.sampled_from([0, 1, 10**6, 10**15, -(10**30)]),
    st.just(10).map(lambda base: base**5000),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["sliding_attention", "full_attention", "llama", "default"]),
)
garbage = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


def find_slots(config: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of every value in a config."""
    items: Any = config.items() if isinstance(config, dict) else enumerate(config) if isinstance(config, list) else ()
    return [found for key, value in items for found in [(*path, key), *find_slots(value, (*path, key))]]


EXTRA_KEYS = [
    "head_dim", "num_key_value_heads", "layer_types", "sliding_window", "tie_word_embeddings", "attention_bias",
    "max_position_embeddings", "mlp_only_layers", "decoder_sparse_step", "use_sliding_window", "max_window_layers",
    "q_lora_rank", "vision_feature_layer", "vision_feature_select_strategy", "resid_pdrop", "n_inner", "mlp_ratio",
    "deepstack_visual_indexes", "fullatt_block_indexes", "window_size", "spatial_merge_size", "use_parallel_residual",
    "text_config", "vision_config", "sliding_window_pattern",
]  # fmt: skip


@st.composite
def broken_configs(draw: st.DrawFn) -> dict[str, Any]:
    config = copy.deepcopy(config_of(draw(families)))
    for _ in range(draw(st.integers(1, 3))):
        slots = find_slots(config)
        if not slots:
            break
        *parents, key = draw(st.sampled_from(slots))
        holder: Any = config
        for parent in parents:
            holder = holder[parent]
        action = draw(st.sampled_from(["drop", "replace", "replace", "nest", "add"]))
        if action == "drop":
            del holder[key]
        elif action == "replace":
            holder[key] = draw(garbage)
        elif action == "nest":
            holder[key] = {key: holder[key]} if draw(st.booleans()) else [holder[key]]
        elif isinstance(holder, dict):
            holder[draw(st.sampled_from(EXTRA_KEYS))] = draw(garbage)
    return config


def check_error(error: FlopcalcError) -> None:
    assert 0 < len(str(error)) < 2000


@pytest.mark.parametrize("count", [100, pytest.param(500, marks=pytest.mark.heavy)])
def test_broken_configs_give_our_errors_alone(count: int) -> None:
    @given(broken_configs())
    @settings(max_examples=count, deadline=None)
    def check(config: dict[str, Any]) -> None:
        try:
            estimate = bind(config)(2, 7)
            assert type(estimate.total) is int
            estimate.to_dict()
        except FlopcalcError as error:
            check_error(error)

    check()


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_broken_arguments_give_our_errors_alone(data: st.DataObject) -> None:
    family = data.draw(families)
    names = ["batch_size", "seq_len", "lengths", "image_grid_thw", "video_grid_thw", "phase", "context", "logits",
             "recipe", "convention", "attention_kernel", "device", "batch"]  # fmt: skip
    arguments: dict[str, Any] = {"seq_len": 7}
    for name in data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True)):
        arguments[name] = data.draw(garbage)
    if "recipe" in arguments and data.draw(st.booleans()):
        arguments["recipe"] = {
            data.draw(st.sampled_from(["freeze", "train_only", "lora", "recompute"])): data.draw(garbage)
        }
    if "batch" in arguments and data.draw(st.booleans()):
        keys = ["attention_mask", "position_ids", "cu_seqlens", "image_grid_thw", "pixel_values", "input_ids"]
        arguments = {"batch": {"input_ids": [[0] * 5], data.draw(st.sampled_from(keys)): data.draw(garbage)}}
    try:
        estimate = estimate_flops(config_of(family), **arguments)
        assert type(estimate.total) is int
        estimate.to_dict()
    except FlopcalcError as error:
        check_error(error)


FLAGS = [
    "--seq", "--text", "--lengths", "--batch", "--grad-accum", "--image", "--image-grid", "--video-grid", "--phase",
    "--context", "--logits", "--freeze", "--train-only", "--lora", "--recompute", "--convention", "--attention-kernel",
    "--device", "--dtype", "--peak", "--num-devices", "--step-time", "--depth", "--by", "--format", "--model",
]  # fmt: skip
WORDS = [
    "0", "-1", "5", "1,4,4", "64x64", "2,3", "decode", "last", "vision", "lm_head", "r=2,targets=q_proj", "full",
    "hardware", "eager", "h200", "fp8", "1e12", "0.5", "kind", "csv", "", "nan", "\0", "gpt2", "sweep-tiny", "…",
]  # fmt: skip


@given(st.lists(st.tuples(st.sampled_from(FLAGS), st.sampled_from(WORDS) | st.text(max_size=6)), max_size=5))
@settings(max_examples=75, deadline=None)
def test_command_line_ends_in_0_or_2(options: list[tuple[str, str]]) -> None:
    from contextlib import redirect_stderr, redirect_stdout
    from io import StringIO

    out, err = StringIO(), StringIO()
    arguments = [piece for option in options for piece in option]
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as end:
        main(["estimate", "--model", "sweep-tiny", "--seq", "9", *arguments])
    if end.value.code == 0:
        assert out.getvalue()
        assert err.getvalue() == ""
    else:
        assert end.value.code == 2
        assert out.getvalue() == ""
        assert err.getvalue().startswith("flopcalc: ")
        assert err.getvalue().count("\n") == 1
