"""DP-SGD: every recorded Opacus step equals the analytic count to the FLOP; what cannot be counted is refused."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiers import thin

from flopcalc import bind, estimate_flops
from flopcalc.base.data import find_data_dir, load_toml
from flopcalc.base.errors import FlopcalcError, RecipeError
from flopcalc.base.vocabulary import CLIPPING
from flopcalc.cli import main
from flopcalc.core.estimate.counted import CountedEstimator
from flopcalc.core.estimate.estimate import Estimate
from flopcalc.core.model.bound import bind_model
from flopcalc.core.model.config import load_config
from flopcalc.core.model.ops import join
from flopcalc.core.recipe.recipe import check_clipping, make_recipe
from flopcalc.core.workload.sums import Logits, PerSample, Samples, Sum, Tokens
from flopcalc.core.workload.workload import Workload
from flopcalc.measure.hf.compare import make_load
from flopcalc.report.estimate import format_csv, format_estimate
from lab.truth import find_folder
from lab.truth_clipping import load as load_truth

TABLES = load_toml(str(Path(find_data_dir()) / "clipping.toml"))
MODES = CLIPPING[1:]
LLAMA = {
    "model_type": "llama", "vocab_size": 50, "hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 3,
    "num_attention_heads": 3, "num_key_value_heads": 1, "tie_word_embeddings": False,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "vocab_size": 50, "n_embd": 12, "n_layer": 2, "n_head": 3}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
QWEN_VL = "qwen2-vl"


def count(model: Any, clipping: str, *sizes: int, **settings: Any) -> Estimate:
    settings = {"convention": "hardware", "attention_kernel": "eager", **settings}
    return bind(model, clipping=clipping, **settings)(*sizes)


# --- what Opacus executes ---------------------------------------------------------------------------------------------
def test_every_proven_type_is_recorded() -> None:
    recorded = {path.stem for path in (find_folder() / "clipping").glob("*.json")}
    assert recorded == {*TABLES["linear"], *TABLES["functorch"]}
    assert not set(TABLES["linear"]) & set(TABLES["functorch"])


@pytest.mark.parametrize("name", thin(sorted([*TABLES["linear"], *TABLES["functorch"]]), 4))
def test_equals_opacus(name: str) -> None:
    seen: set[tuple[str, ...]] = set()
    wrong: list[str] = []
    for entry in load_truth(name)["configs"]:
        model = bind_model(load_config(entry["config"]))
        bound: dict[str, CountedEstimator] = {}
        for case in entry["cases"]:
            seen.add((case["recipe"]["clipping"], *sorted(case["recipe"])[1:]))
            recipe = json.dumps(case["recipe"])
            if recipe not in bound:
                bound[recipe] = CountedEstimator(model, make_recipe(**case["recipe"]), "hardware", "eager")
            wrong += [f"{case['workload']} {recipe}: {line}" for line in check_case(bound[recipe], case)]
    assert not wrong, "\n".join([f"{len(wrong)} differ", *wrong])
    assert {(mode, *rest) for mode in MODES for rest in ((), ("lora",))} | {("hooks", "recompute")} <= seen


def check_case(estimator: CountedEstimator, case: dict[str, Any]) -> Iterator[str]:
    workload = dict(case["workload"])
    times = workload.pop("grad_accum", 1)
    load = make_load(workload)
    estimate = estimator.estimate(load) * times
    ours, counted = (estimate.total - estimate.clipping, estimate.total), (case["plain"], case["total"])
    if ours != counted:
        yield f"plain and whole: ours {ours}, counted {counted}"
    rows = sum_rows(estimator, load, times) if "rows" in case else {}
    for path in dict.fromkeys((*rows, *case.get("rows", ()))):
        if rows.get(path) != case["rows"].get(path):
            yield f"{path}: ours {rows.get(path)}, counted {case['rows'].get(path)}"


def sum_rows(estimator: CountedEstimator, load: Workload, times: int) -> dict[str, int]:
    """What clipping adds by module path; factors by per-sample gradients are the optimizer's, under ''."""
    sums: Counter[str] = Counter()
    for block, row, values in estimator.rows(load, "hardware"):
        for layer in (None,) if block.layers is None else block.layers:
            path = join(block.path if layer is None else f"{block.path}.{layer}", row.op.name)
            for product, value in zip(row.products, values, strict=True):
                sums["" if product.rows == Samples() else path] += product.per_unit.clipping * value * times
    return {path: flops for path, flops in sums.items() if flops}


# --- by hand ----------------------------------------------------------------------------------------------------------
LINEARS = [(12, 12), (12, 4), (12, 4), (12, 12), (12, 20), (12, 20), (20, 12)] * 3 + [(12, 50)]
WEIGHTS = sum(n_in * n_out for n_in, n_out in LINEARS)
PARAMETERS = WEIGHTS + 50 * 12 + 7 * 12


def test_closed_forms() -> None:
    batch, length = 2, 9
    linear = 2 * batch * length * WEIGHTS
    attention = 3 * 4 * 12 * batch * length**2
    squares = sum(2 * batch * length**2 * (n_in + n_out + 1) for n_in, n_out in LINEARS)
    plain = count(LLAMA, "none", batch, length)
    assert (plain.total, plain.clipping) == (3 * (linear + attention), 0)
    assert count(LLAMA, "hooks", batch, length).clipping == linear + 2 * batch * PARAMETERS
    assert count(LLAMA, "ghost", batch, length).clipping == 2 * (linear + attention) + squares
    assert count(LLAMA, "fast", batch, length).clipping == 2 * (linear + attention) + linear


def test_sums_over_one_entry_are_no_products() -> None:
    """torch.einsum multiplies elements there: one sample, one position, a LoRA of rank 1."""
    linear = 2 * 9 * WEIGHTS
    assert count(LLAMA, "hooks", 1, 9).clipping == linear
    assert count(LLAMA, "hooks", 4, 1).clipping == 2 * 4 * PARAMETERS
    assert count(LLAMA, "hooks", 1, 1).clipping == 0
    again = count(LLAMA, "none", 4, 1).backward
    assert count(LLAMA, "fast", 4, 1).clipping == again
    assert count(LLAMA, "ghost", 4, 1).clipping == again + sum(2 * 4 * (n_in + n_out) for n_in, n_out in LINEARS)
    lora = {"lora": "r=1,targets=o_proj"}
    found = {mode: count(LLAMA, mode, 2, 9, recipe=lora) for mode in ("none", *MODES)}
    pairs = 3 * 2 * 9**2 * ((2 * 12 + 2) + (2 * 12 + 2))
    assert found["ghost"].clipping == found["none"].backward + pairs
    assert found["hooks"].clipping == 3 * (2 * 2 * 24 + 2 * 18 * 24)


def test_what_is_frozen_costs_nothing_per_sample() -> None:
    head = {"train_only": "lm_head"}
    assert count(LLAMA, "hooks", 2, 9, recipe=head).clipping == 2 * 18 * 600 + 2 * 2 * 600
    assert count(LLAMA, "fast", 2, 9, recipe=head).clipping == 2 * 18 * 600 + 2 * 18 * 600
    assert count(LLAMA, "ghost", 2, 9, recipe=head).clipping == 2 * 18 * 600 + 2 * 2 * 81 * (12 + 50 + 1)


def test_functorch_runs_other_linear_classes_once_more() -> None:
    rows = {row.path: row for row in count(GPT2, "hooks", 1, 9).by_module()}
    attention, head = rows["transformer.h.*.attn.c_attn"], rows["lm_head"]
    assert attention.clipping == 2 * attention.forward
    assert head.clipping == head.forward


@pytest.mark.parametrize("clipping", ["ghost", "fast"])
def test_the_second_backward_is_the_kernels(clipping: str) -> None:
    fused, eager = (count(LLAMA, clipping, 2, 256, attention_kernel=kernel) for kernel in ("flash", "eager"))
    assert fused.clipping - fused.backward == eager.clipping - eager.backward
    assert fused.backward != eager.backward


@pytest.mark.parametrize("clipping", MODES)
def test_measured_padding_is_padded_again(clipping: str) -> None:
    estimate = bind("llama-3.1-8b", convention="hardware", device="h200", clipping=clipping)(3, 1000)
    plain = bind("llama-3.1-8b", convention="hardware", device="h200")(3, 1000)
    assert (estimate.forward, estimate.backward) == (plain.forward, plain.backward)
    assert sum(row.clipping for row in estimate.by_module()) == estimate.clipping
    assert (estimate.clipping >= plain.backward) == (clipping != "hooks")


def test_reentrant_checkpointing_keeps_what_hooks_add() -> None:
    recipe = {"recompute": "full-reentrant"}
    assert count(LLAMA, "hooks", 2, 9, recipe=recipe).clipping == count(LLAMA, "hooks", 2, 9).clipping
    assert count(LLAMA, "hooks", 2, 9, recipe=recipe).recompute > 0


@pytest.mark.parametrize(
    ("each", "rows", "seq", "value"),
    [
        (Samples(), 3, 5, 3),
        (Samples(), 1, 5, 0),
        (PerSample("rows", Tokens()), 3, 5, 15),
        (PerSample("rows", Tokens()), 3, 1, 0),
        (PerSample("squares", Tokens()), 3, 5, 75),
        (PerSample("squares", Tokens()), 3, 1, 3),
        (PerSample("products", Tokens()), 3, 5, 75),
        (PerSample("products", Tokens()), 3, 1, 0),
        (PerSample("squares", Logits()), 3, 5, 12),
    ],
)
def test_sums_of_samples(each: Sum, rows: int, seq: int, value: int) -> None:
    load = Workload(rows, seq, logits=2 if each == PerSample("squares", Logits()) else None)
    assert each.count(load, "full") == value


# --- conventions and formats ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("clipping", MODES)
@pytest.mark.parametrize("convention", ["model", "full"])
def test_what_the_model_needs_stays(clipping: str, convention: str) -> None:
    plain = estimate_flops(LLAMA, batch_size=2, seq_len=9, convention=convention)
    clipped = estimate_flops(LLAMA, batch_size=2, seq_len=9, convention=convention, clipping=clipping)
    assert (clipped.forward, clipped.backward, clipped.clipping) == (plain.forward, plain.backward, 0)
    totals, extra = clipped.totals, bind(LLAMA, convention="hardware", clipping=clipping)(2, 9).clipping
    hardware = plain.totals["hardware"]
    assert hardware is not None
    assert totals == {**plain.totals, "hardware": hardware + extra}
    assert f"({extra:,}) under convention hardware" in " ".join(clipped.notes)


def test_sums_products_and_json() -> None:
    one = count(LLAMA, "ghost", 2, 9)
    three = one + one * 2
    assert (three.clipping, three.total) == (3 * one.clipping, 3 * one.total)
    assert tuple(map(sum, zip(*three.by_component().values(), strict=True))) == (
        three.forward,
        three.backward,
        0,
        three.clipping,
    )
    shown = one.to_dict()
    assert shown["recipe"]["clipping"] == "ghost"
    assert shown["flops"]["clipping"] == one.clipping
    assert sum(part["forward"] + part["backward"] for part in shown["components"]) == one.total
    assert sum(row["forward"] + row["backward"] for row in shown["modules"]) == one.total
    assert "the backward of components and modules includes what clipping adds" in shown["notes"]


def test_reports_show_it_where_there_is_some() -> None:
    clipped, plain = count(LLAMA, "hooks", 2, 9), count(LLAMA, "none", 2, 9)
    assert "clipping hooks" in format_estimate(clipped)
    assert "  clipping  " in format_estimate(clipped, by="kind")
    assert "clipping" not in format_estimate(plain)
    header, *rows = (line.split(",") for line in format_csv(clipped, "module", None).splitlines())
    assert sum(int(row[header.index("clipping")]) for row in rows) == clipped.clipping


def test_cli(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", "sweep-tiny", "--batch", "2", "--seq", "8", "--convention", "hardware"]
    for command in (["estimate", "--json"], ["explain", "--op", "*q_proj", "--json"]):
        with pytest.raises(SystemExit):
            main([*command, *arguments, "--clipping", "ghost"])
        shown = json.loads(capsys.readouterr().out)
        if "flops" in shown:
            assert (
                shown["flops"]["clipping"] == bind("sweep-tiny", convention="hardware", clipping="ghost")(2, 8).clipping
            )
        else:
            # Both passes back, then 2 · (64 + 64) and 2 per pair of the 8 positions of 2 samples, in each of 2 layers.
            assert sum(row["clipping"] for row in shown["operations"]) == 2 * (2 * 2 * 16 * 64 * 64 + 2 * 64 * 2 * 129)
    with pytest.raises(SystemExit):
        main(["explain", "--op", "*q_proj", *arguments, "--clipping", "hooks"])
    text = capsys.readouterr().out
    assert "samples: 2" in text
    assert "clipping = layers × 2 × weights that train (per-sample gradients) × tokens" in text
    with pytest.raises(SystemExit):
        main(["explain", "--op", "*c_attn", *arguments[2:], "--clipping", "fast", "--model", "gpt2"])
    assert "clipping = layers × 2 × 2 × in × out (run once more" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["compare", "sweep-tiny@clipping=hooks", "sweep-tiny", *arguments[2:]])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["clipping", "6.39", "MFLOPs", "-"] in rows
    assert "recompute" not in [row[0] for row in rows if row]


# --- refusals ---------------------------------------------------------------------------------------------------------
REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (LLAMA, {"clipping": "gosht"}, "clipping 'gosht' unknown; known: none, hooks, ghost, fast"),
    (LLAMA, {"clipping": 5}, "clipping 5 unknown"),
    (LLAMA, {"clipping": "ghost", "recompute": "full"}, "goes back through the graph twice"),
    (LLAMA, {"clipping": "fast", "recompute": "full-reentrant"}, "take clipping hooks with full-reentrant"),
    (LLAMA, {"clipping": "hooks", "recompute": "full"}, "take recompute full-reentrant"),
    ({**LLAMA, "tie_word_embeddings": True}, {"clipping": "ghost"}, "lm_head is tied to model.embed_tokens.weight"),
    (LLAMA, {"clipping": "hooks", "freeze": "*"}, "nothing trains under this recipe"),
    (LLAMA, {"clipping": "hooks", "lora": "r=2,targets=embed_tokens"}, "LoRA's matrices as bare parameters"),
    (MIXTRAL, {"clipping": "fast", "train_only": "*experts*"}, "is a stack of experts, whose rows are not samples"),
    (MIXTRAL, {"clipping": "fast", "lora": "r=2,targets=q_proj"}, "no count of an Opacus step has proven it"),
    ("deepseek-v3", {"clipping": "hooks"}, "not proven by a count"),
    (
        {**LLAMA, "model_type": "stablelm", "qk_layernorm": True, "partial_rotary_factor": 0.5},
        {"clipping": "hooks"},
        "stack of modules: not proven",
    ),
    ("gemma-2-2b", {"clipping": "hooks"}, "no count of an Opacus step has proven it for model_type 'gemma2'"),
    (QWEN_VL, {"clipping": "hooks"}, "has a tower, whose rows are not samples"),
    (
        {"model_type": "t5", "vocab_size": 50, "d_model": 12, "d_kv": 4, "d_ff": 20, "num_layers": 1, "num_heads": 3},
        {"clipping": "hooks"},
        "has an encoder and a decoder",
    ),
]


@pytest.mark.parametrize(("model", "recipe", "words"), REFUSED)
def test_refused(model: Any, recipe: dict[str, Any], words: str) -> None:
    for convention in ("model", "hardware"):
        with pytest.raises(RecipeError) as caught:
            bind(model, recipe=recipe, convention=convention)
        assert words in str(caught.value)
        assert len(str(caught.value)) < 300


def test_ghost_takes_what_is_tied_but_frozen() -> None:
    tied = {**LLAMA, "tie_word_embeddings": True}
    for recipe in ({"freeze": "lm_head"}, {"lora": "r=2,targets=q_proj"}, {"lora": "r=2,targets=q_proj,save=lm_head"}):
        assert count(tied, "ghost", 2, 9, recipe=recipe).clipping > 0


@pytest.mark.parametrize("phase", ["forward", "prefill", "decode"])
def test_other_phases_clip_nothing(phase: str) -> None:
    with pytest.raises(RecipeError, match=f"clipping hooks belongs to phase train, not {phase}"):
        bind(LLAMA, clipping="hooks")(1, 8, phase=phase)


def test_two_ways_to_say_it_must_agree() -> None:
    recipe = make_recipe(clipping="hooks")
    assert bind(LLAMA, recipe=recipe, clipping="hooks").recipe == bind(LLAMA, clipping="hooks").recipe == recipe
    with pytest.raises(RecipeError, match="clipping 'fast' contradicts the recipe's, hooks"):
        bind(LLAMA, recipe=recipe, clipping="fast")
    with pytest.raises(RecipeError, match="unknown"):
        bind(LLAMA, clipping="sure")
    with pytest.raises(FlopcalcError, match="leave clipping out with example_batch"):
        bind(LLAMA, {"input_ids": None}, clipping="hooks")
    check_clipping("none", "full")


def test_a_trace_takes_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["estimate", "--model", "sweep-tiny", "--seq", "8", "--trace", "--clipping", "hooks"])
    assert end.value.code == 2
    assert "it takes no --clipping" in capsys.readouterr().err
