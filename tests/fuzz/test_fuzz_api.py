"""Every argument of the public functions under every hostile value: an answer or a FlopcalcError, nothing else."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hostile import VALUES, LikeArray, Odd, try_call

import flopcalc
from flopcalc import FlopcalcError, RecipeError, WorkloadError, bind, estimate_flops, make_recipe, make_workload
from flopcalc.core.estimate.run import count_run

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 100,
}
ESTIMATE = estimate_flops(CONFIG, seq_len=8)
ESTIMATOR = bind(CONFIG)
LOAD = make_workload(1, 8)
SHARES = {"estimate": ESTIMATE, "step_time_s": 1.0, "device": "h200"}
PLANNED = {
    "model": CONFIG, "tokens": 1e9, "device": "h200", "gpus": 2, "seq_len": 64, "global_batch": 2, "tp": 1, "pp": 1,
    "cp": 1, "zero": 1, "micro_batch": 1, "recompute": "none",
}  # fmt: skip
Case = tuple[Callable[..., Any], dict[str, Any], str]


def batch_of(model: Any) -> Callable[..., Any]:
    return lambda **batch: estimate_flops(model, batch=batch)


# Function -> itself, arguments that work, and the names of others.
CASES: dict[str, Case] = {
    "estimate_flops": (
        estimate_flops, {"model": CONFIG, "batch_size": 1, "seq_len": 8},
        "images image_grid_thw video_grid_thw lengths batch phase context logits decoder_seq_len clips audio "
        "grad_accum recipe lora recompute convention attention_kernel device spec clipping dtype compute weights "
        "kv_cache autocast model_type launch head mtp text videos sampling_steps guidance parts",
    ),
    "local_flops": (flopcalc.local_flops, {"estimate": ESTIMATE}, "tp cp pp dp stage"),
    "translate": (
        flopcalc.translate, {"model": ESTIMATE, "mfu": 0.4, "from_": "6nd", "device": "h200"},
        "tflops tokens_per_second gpus dtype peak mtp seq_len",
    ),
    "images": (
        estimate_flops, {"model": "qwen2-vl-2b", "batch_size": 1, "seq_len": 2000},
        "images image_grid_thw video_grid_thw lengths batch phase logits clips audio",
    ),
    "lists": (
        batch_of(CONFIG), {"input_ids": [[1, 2, 3]], "attention_mask": [[1, 1, 0]]},
        "position_ids labels cu_seqlens image_grid_thw pixel_values logits_to_keep inputs_embeds token_type_ids",
    ),
    "arrays": (
        batch_of(CONFIG), {"input_ids": np.zeros((1, 3), int)},
        "attention_mask position_ids labels cu_seqlens image_grid_thw pixel_values logits_to_keep inputs_embeds",
    ),
    "grids": (
        batch_of("qwen2-vl-2b"), {"input_ids": np.zeros((1, 300), int), "image_grid_thw": [[1, 4, 4]]},
        "attention_mask pixel_values video_grid_thw pixel_values_videos",
    ),
    "bind": (
        bind, {"model": CONFIG},
        "recipe lora recompute convention attention_kernel device dtype spec download phases dims clipping",
    ),
    "make_workload": (
        make_workload, {"batch_size": 1, "seq_len": 8},
        "lengths image_grid_thw video_grid_thw phase context logits decoder_seq_len clips",
    ),
    "decoder": (
        make_workload, {"batch_size": 1, "seq_len": 8, "decoder_seq_len": 4},
        "lengths image_grid_thw phase context logits clips",
    ),
    "make_recipe": (make_recipe, {}, "freeze train_only lora recompute clipping"),
    "lora": (lambda **lora: make_recipe(lora=lora), {"r": 4, "targets": ["q_proj"]}, "save x"),
    "mfu": (flopcalc.mfu, SHARES, "tokens_per_second dtype peak num_devices gpus"),
    "hfu": (flopcalc.hfu, SHARES, "tokens_per_second dtype peak num_devices gpus"),
    "peak_flops_per_s": (flopcalc.peak_flops_per_s, {"device": "h200", "dtype": "bf16"}, ""),
    "calculate_mfu": (flopcalc.calculate_mfu, {"flops": 1e12, "step_time_s": 1.0, "peak_flops": 1e15}, ""),
    "get_gpu_peak_flops": (flopcalc.get_gpu_peak_flops, {"device": "h200", "dtype": "bf16"}, ""),
    "profile_model_flops": (flopcalc.profile_model_flops, {"model": CONFIG, "batch": {"input_ids": [[1, 2]]}}, ""),
    "predict": (
        flopcalc.predict, {"model": CONFIG, "device": "h200", "seq_len": 8},
        "dtype optimizer execution compiled attention_kernel recipe lora recompute spec grad_accum host_factor pause_s "
        "memory advise compute weights kv_cache autocast model_type launch head mtp timeline transformers "
        "batch_size images lengths batch phase context logits clips audio",
    ),
    "plan": (
        flopcalc.plan, PLANNED,
        "recipe lora dp virtual ep interconnect price dtype execution optimizer attention_kernel top images workload "
        "compute weights autocast model_type head mtp launch expert_imbalance overlap foo",
    ),
    "total_under": (ESTIMATE.total_under, {"convention": "model"}, ""),
    "breakdown": (ESTIMATE.breakdown, {"by": "module"}, "depth"),
    "table": (ESTIMATE.table, {"by": "module"}, "depth"),
    "by_module": (ESTIMATE.by_module, {}, "depth per_layer"),
    "to_dict": (ESTIMATE.to_dict, {}, "depth"),
    "estimator": (
        ESTIMATOR.__call__, {"batch_size": 1, "seq_len": 8},
        "images image_grid_thw lengths batch phase context logits clips audio",
    ),
    "by_dtype": (ESTIMATE.by_dtype, {"convention": "model"}, ""),
    "under": (ESTIMATE.under, {"name": "palm"}, "mtp"),
    "find": (flopcalc.translate(ESTIMATE, mfu=0.4, from_="6nd", device="h200").find, {"name": "6nd"}, ""),
    "fitted": (
        flopcalc.translate, {"model": ESTIMATE, "tflops": 400, "tokens_per_second": 9e3, "device": "h200"},
        "mtp gpus dtype peak",
    ),
    "notes": (ESTIMATOR.notes, {"load": LOAD}, ""),
    "count_formats": (ESTIMATOR.count_formats, {"load": LOAD, "convention": "model"}, ""),
    "Lora": (flopcalc.Lora, {"r": 4, "targets": ("q_proj",)}, "save dtype"),
    "estimate": (ESTIMATOR.estimate, {"load": LOAD}, ""),
    "change": (ESTIMATOR.change, {}, "recompute convention attention_kernel"),
    "count": (ESTIMATOR.count, {"load": LOAD, "convention": "model"}, ""),
    "rows": (ESTIMATOR.rows, {"load": LOAD, "convention": "model"}, ""),
    "count_run": (
        count_run, {"estimate": ESTIMATE, "tokens": 1e9}, "mfu step_time_s tokens_per_second device dtype peak",
    ),
}  # fmt: skip
SLOW = ("predict", "plan")


def list_trials(names: Any) -> list[tuple[str, str, int]]:
    return [
        (name, argument, place)
        for name in names
        for argument in dict.fromkeys([*CASES[name][1], *CASES[name][2].split()])
        for place in range(len(VALUES))
    ]


def run_trials(trials: Any) -> None:
    wrong = []
    for name, argument, place in trials:
        call, arguments, _ = CASES[name]
        if problem := try_call(call, **{**arguments, argument: VALUES[place]}):
            wrong.append(f"{name}({argument}=VALUES[{place}]): {problem}")
    assert not wrong, "\n".join(wrong[:20])


@pytest.mark.parametrize("name", CASES)
def test_the_case_works(name: str) -> None:
    call, arguments, _ = CASES[name]
    call(**arguments)


@pytest.mark.filterwarnings("ignore:this estimate is of 1 GPU:FutureWarning")
def test_some_values() -> None:
    rng = random.Random("api")
    run_trials(rng.sample(list_trials(name for name in CASES if name not in SLOW), 500))
    run_trials(rng.sample(list_trials(SLOW), 60))


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore:this estimate is of 1 GPU:FutureWarning")
@pytest.mark.parametrize("name", CASES)
def test_every_value(name: str) -> None:
    run_trials(list_trials([name]))


# --- finds ------------------------------------------------------------------------------------------------------------
# Arguments with a closed vocabulary: every other value is refused, and nothing is counted.
WORDS = [
    ("total_under", "convention"), ("count_formats", "convention"), ("breakdown", "by"), ("table", "by"),
    ("count", "convention"), ("rows", "convention"), ("bind", "dtype"), ("bind", "attention_kernel"),
    ("estimate_flops", "phase"),
    ("estimate_flops", "attention_kernel"), ("make_recipe", "recompute"), ("make_recipe", "clipping"),
    ("mfu", "dtype"), ("count_run", "dtype"), ("predict", "dtype"), ("predict", "optimizer"),
    ("predict", "attention_kernel"), ("plan", "dtype"), ("plan", "execution"), ("plan", "optimizer"),
]  # fmt: skip
NO_WORDS = (None, "", 5, "Model", np.array(["model"]), np.array("model"), Odd(), LikeArray(), ["train"])


@pytest.mark.parametrize(("name", "argument"), WORDS)
def test_no_word(name: str, argument: str) -> None:
    call, arguments, _ = CASES[name]
    is_optional = argument == "dtype" or name in ("bind", "estimate_flops", "predict", "plan")  # None: not given
    for value in NO_WORDS[1:] if is_optional else NO_WORDS:
        with pytest.raises(FlopcalcError, match=r"unknown[;.]"):
            call(**{**arguments, argument: value})


@pytest.mark.parametrize("argument", ["recompute", "convention", "attention_kernel"])
def test_change_leaves_what_is_not_given(argument: str) -> None:
    assert ESTIMATOR.change(**{argument: None}).identity == ESTIMATOR.identity
    for value in NO_WORDS[1:]:
        with pytest.raises(FlopcalcError, match="unknown; known: "):
            ESTIMATOR.change(**{argument: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("lengths", "words"),
    [
        (b"4", "must be a list[a-z ]*, not b'4'"),
        ("4;4", "must be a list|is not a whole number"),
        ({4: 1}, "must be a list[a-z ]*, not {4: 1}"),
        (4, "must be a list[a-z ]*, not 4"),
    ],
)
def test_no_lengths(lengths: Any, words: str) -> None:
    with pytest.raises(WorkloadError, match=words):
        make_workload(lengths=lengths)
    with pytest.raises(WorkloadError, match=words):
        make_workload(1, 8, clips=lengths)


@pytest.mark.parametrize("odd", [-1, 0.5, float("nan"), float("inf")])
def test_no_mask(odd: float) -> None:
    words = r"attention_mask holds values such as -1, 0.5 or NaN"
    batch = {"input_ids": np.zeros((2, 3), int), "attention_mask": np.array([[1, 1, 0], [1, odd, 1]])}
    with pytest.raises(WorkloadError, match=words):
        estimate_flops(CONFIG, batch=batch)
    rows = {"input_ids": [[1, 2, 3]], "attention_mask": [[1, odd, 1]]}
    with pytest.raises(WorkloadError, match=r"attention_mask(: .* is not a row of 3 whole numbers| holds -1)"):
        estimate_flops(CONFIG, batch=rows)


@pytest.mark.parametrize("mask", [[[1, 1, 0]], [[True, True, False]], [[1.0, 1.0, 0.0]], [[2, 7, 0]]])
def test_masks(mask: Any) -> None:
    """Documents may be numbered, and a collator may write floats."""
    batch = {"input_ids": np.zeros((1, 3), int), "attention_mask": np.array(mask)}
    assert estimate_flops(CONFIG, batch=batch).tokens == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"workload": 7}, "workload must be a Workload, not 7"),
        ({}, "a plan needs tokens: the tokens of the whole run, such as 2T"),
        ({"tokens": 1e9}, "a plan needs device: the GPU to plan for; `flopcalc devices` lists them"),
        (
            {"tokens": 1e9, "gpus": 8, "device": "h200", "progress": 5},
            "progress must be a function of two numbers",
        ),
        ({"tokens": 1e9, "gpus": 8, "foo": 1}, "foo is no keyword of plan. Known: model_type, spec"),
        ({"tokens": 1e9, "gpus": 8, "devise": "h200"}, "devise is no keyword of plan. Did you mean device"),
    ],
)
def test_keywords_of_a_plan(options: dict[str, Any], words: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        flopcalc.plan(CONFIG, **options)
    assert words in str(caught.value)


def test_a_convention_of_no_word() -> None:
    assert ESTIMATE.by_dtype(None) == ESTIMATE.by_dtype("model")
    for value in NO_WORDS[1:]:
        with pytest.raises(FlopcalcError, match="unknown; known: "):
            ESTIMATE.by_dtype(value)  # type: ignore[arg-type]


def test_a_translation_without_rows() -> None:
    with pytest.raises(WorkloadError, match="mtp: 'x' is not a whole number"):
        flopcalc.translate(ESTIMATE, tflops=400, tokens_per_second=9e3, device="h200", mtp="x")  # type: ignore[arg-type]
    found = flopcalc.translate(ESTIMATE, mfu=0.4, from_="6nd", device="h200")
    with pytest.raises(FlopcalcError, match="convention palm has no row for this model"):
        found._replace(rows=()).find("palm")


def test_keywords_of_a_translation() -> None:
    with pytest.raises(WorkloadError, match=r"sequence_len is no keyword of translate. Did you mean seq_len"):
        flopcalc.translate(CONFIG, mfu=0.4, from_="6nd", sequence_len=8)


def test_dims_and_phases() -> None:
    with pytest.raises(WorkloadError, match="dims says which axes of an example_batch"):
        bind(CONFIG, dims={"input_ids": ("b", "n")})
    with pytest.raises(WorkloadError, match="phase 5 unknown"):
        bind(CONFIG, phases=(5,))  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match="lora together with a Recipe"):
        bind(CONFIG, recipe=5, lora="r=4,targets=q_proj")  # type: ignore[arg-type]
