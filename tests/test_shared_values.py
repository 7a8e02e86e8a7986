"""One Workload and one Recipe for estimate_flops, predict and plan; what no step can have is refused in words."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from flopcalc import (
    Lora,
    Recipe,
    RecipeError,
    Workload,
    WorkloadError,
    estimate_flops,
    hfu,
    make_recipe,
    make_workload,
    mfu,
    plan,
    predict,
)

MODEL = "llama-3.2-1b"
QUICK: dict[str, Any] = {"device": "h200", "advise": False}
FEW: dict[str, Any] = {"device": "h200", "gpus": 8, "tokens": "1B", "tp": 1, "pp": 1, "micro_batch": 1, "zero": 1}


def test_one_workload_and_one_recipe_serve_all_three() -> None:
    workload = Workload(8, 512)
    recipe = Recipe(freeze="model.embed_tokens", recompute="full")
    sizes: dict[str, Any] = {"batch_size": 8, "seq_len": 512}
    same = {"freeze": ["model.embed_tokens"], "recompute": "full"}
    flops = estimate_flops(MODEL, workload, recipe=recipe)
    assert flops.total == estimate_flops(MODEL, **sizes, recipe=same).total
    assert predict(MODEL, workload, recipe=recipe, **QUICK) == predict(MODEL, **sizes, recipe=same, **QUICK)
    planned = plan(MODEL, workload, recipe=recipe, **FEW)
    assert planned.best == plan(MODEL, seq_len=512, global_batch=8, recipe=same, **FEW).best


def test_one_mfu_under_mixed_formats() -> None:
    """predict and plan give the shares that mfu() and hfu() give for their step times."""
    workload, lora = Workload(8, 512), {"lora": "r=16,targets=all-linear", "recompute": "none"}
    estimate = estimate_flops(MODEL, workload, recipe=lora, weights="nf4")
    assert list(estimate.by_dtype()) == ["bf16", "fp32"]
    found = predict(MODEL, workload, recipe=lora, weights="nf4", **QUICK)
    share = hfu(estimate_flops(MODEL, workload, recipe=lora, weights="nf4", device="h200"), 1, device="h200")
    assert found.mfu == float(mfu(estimate, found.step_time_s.mid, device="h200"))
    assert math.isclose(found.hfu, float(share) / found.step_time_s.mid, rel_tol=1e-12)
    wide = estimate_flops(MODEL, workload, compute="fp8")
    assert list(wide.by_dtype()) == ["fp8", "bf16"]
    for options in ({"recipe": lora, "weights": "nf4"}, {"compute": "fp8"}):
        each = estimate_flops(MODEL, Workload(1, 512), gpus=8, **options)  # type: ignore[arg-type]
        best = plan(MODEL, workload, **options, **FEW, recompute="none").best[0]
        for value, share_of in ((best.mfu, mfu), (best.hfu, hfu)):
            assert math.isclose(value, float(share_of(each, best.step.seconds, device="h200")), rel_tol=1e-12)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_workload_of_another_phase(phase: str) -> None:
    workload = Workload(2, 16, phase=phase)
    sizes: dict[str, Any] = {"batch_size": 2, "seq_len": 16, "phase": phase}
    assert estimate_flops(MODEL, workload).total == estimate_flops(MODEL, **sizes).total
    assert predict(MODEL, workload, **QUICK) == predict(MODEL, **sizes, **QUICK)
    with pytest.raises(WorkloadError, match="grad_accum belongs to phase train"):
        estimate_flops(MODEL, workload, grad_accum=2)
    with pytest.raises(WorkloadError, match=f"a plan is of training: workload has phase {phase}"):
        plan(MODEL, workload, **FEW)


def test_micro_batches_of_one_workload_add_up() -> None:
    assert (
        estimate_flops(MODEL, Workload(2, 64), grad_accum=3).total == 3 * estimate_flops(MODEL, Workload(2, 64)).total
    )


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"workload": 8}, "workload must be a Workload, not 8: sizes have names, as batch_size=8, seq_len=2048"),
        ({"workload": {"rows": 8}}, "workload must be a Workload"),
        ({"seq_len": 64}, "workload already says sizes, phase and images: leave seq_len out"),
        ({"images": [(8, 8)]}, "leave images out"),
    ],
)
def test_what_contradicts_a_workload(given: dict[str, Any], words: str) -> None:
    given = {"workload": Workload(1, 64), **given}
    for ask, settings in ((estimate_flops, {}), (predict, QUICK), (plan, FEW)):
        with pytest.raises(WorkloadError) as caught:
            ask(MODEL, **given, **settings)
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"batch_size": 2}, "leave batch_size out"),
        ({"phase": "decode"}, "leave phase out"),
        ({"batch": {"input_ids": [[1]]}}, "leave batch out"),
    ],
)
def test_what_contradicts_a_workload_that_is_counted(given: dict[str, Any], words: str) -> None:
    for ask, settings in ((estimate_flops, {}), (predict, QUICK)):
        with pytest.raises(WorkloadError, match=words):
            ask(MODEL, Workload(1, 64), **given, **settings)


@pytest.mark.parametrize(
    ("workload", "settings", "words"),
    [
        (Workload(8, 64), {"global_batch": 8}, "workload has 8 rows, so it is the global batch itself"),
        (Workload(2, 64, (64, 32), "padded"), {}, "the rows of workload differ"),
        (Workload(2, 64, grids=((1, 2, 2), (1, 4, 4))), {}, "the rows of workload differ"),
    ],
)
def test_workloads_that_cannot_be_planned(workload: Workload, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        plan(MODEL, workload, **settings, **FEW)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"rows": 0}, "rows must be at least 1, not 0"),
        ({"rows": "8"}, "rows must be a whole number, not '8'"),
        ({"rows": True}, "rows must be a whole number, not True"),
        ({"seq": -1}, "seq must be at least 1, not -1"),
        ({"seq": 2.5}, "seq must be a whole number, not 2.5"),
        ({"seq": 0}, "seq must be at least 1, not 0"),
        ({"layout": "jagged"}, "layout 'jagged' unknown; known: unpadded, padded, packed"),
        ({"phase": "training"}, "phase 'training' unknown; known: train, forward, prefill, decode"),
        ({"context": 5}, "context belongs to phase decode, not train"),
        ({"context": -5, "phase": "decode"}, "context must be at least 0, not -5"),
        ({"logits": "first"}, "logits must be a whole number, not 'first'"),
        ({"logits": "last", "phase": "decode"}, "logits cannot be chosen there"),
        ({"grids": ((1, 2, 2),), "phase": "decode"}, "decode takes neither packed lengths nor images"),
        ({"clips": (9,), "phase": "decode"}, "decode takes no audio"),
        ({"grids": 5}, "grids must be rows of (t, h, w), not int"),
        ({"grids": ((1, 2),)}, "grids: (1, 2) is not (t, h, w)"),
        ({"videos": ((1, 2, -3),)}, "videos must be at least 0, not -3"),
        ({"clips": (0,)}, "clips must be at least 1, not 0"),
        ({"clips": 7}, "clips must be a list of lengths, not 7"),
        ({"documents": (1,)}, "layout unpadded takes no documents"),
        ({"layout": "packed"}, "layout packed takes documents, the real lengths"),
        ({"documents": (0,), "layout": "packed"}, "documents must be at least 1, not 0"),
        ({"documents": "ab", "layout": "packed"}, "documents must be a list of lengths, not 'ab'"),
        ({"documents": (1, 1), "layout": "padded"}, "padded documents must be at most 1, of at most 1 tokens"),
        ({"documents": (2,), "layout": "padded"}, "padded documents must be at most 1, of at most 1 tokens"),
        ({"documents": (1, 1), "layout": "packed"}, "documents of 2 tokens do not fit into 1 x 1"),
        ({"decoder": 3}, "decoder must be a Workload, not 3"),
        ({"decoder": Workload(phase="forward")}, "a decoder in phase forward cannot follow phase train"),
    ],
)
def test_workloads_that_no_step_has(given: dict[str, Any], words: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        Workload(**given)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"freeze": 5}, "freeze must be a pattern or several, not 5"),
        ({"train_only": [""]}, "train_only: '' is not a pattern"),
        ({"recompute": "ful"}, "recompute 'ful' unknown; known: none, full, full-reentrant"),
        ({"clipping": "ghosts"}, "clipping 'ghosts' unknown; known: none, hooks, ghost, fast"),
        ({"clipping": "ghost", "recompute": "full"}, "clipping ghost is not counted with recompute full"),
        ({"lora": "r=4"}, "lora needs targets"),
        ({"lora": 5}, "lora must be r=16,targets=q_proj+v_proj or a mapping, not 5"),
        ({"lora": "r=4,targets=q_proj", "train_only": "lm_head"}, "train_only contradicts lora"),
    ],
)
def test_recipes_that_no_training_has(given: dict[str, Any], words: str) -> None:
    for make in (Recipe, make_recipe):
        with pytest.raises(RecipeError) as caught:
            make(**given)
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"r": 4, "targets": ()}, "lora needs targets"),
        ({"r": 4, "targets": 5}, "lora targets must be a pattern or several, not 5"),
        ({"r": 0, "targets": "q_proj"}, "lora r must be at least 1, not 0"),
        ({"r": 4, "targets": "q_proj", "save": [3]}, "lora save: 3 is not a pattern"),
    ],
)
def test_adapters_that_cannot_be(given: dict[str, Any], words: str) -> None:
    with pytest.raises((RecipeError, WorkloadError)) as caught:
        Lora(**given)
    assert words in str(caught.value)


def test_values_are_equal_by_what_they_say_and_stay_so() -> None:
    assert Workload(2, 8) == make_workload(2, 8)
    assert Workload(1, 6, [2, 4], "packed") == make_workload(lengths=[2, 4])
    assert Recipe(freeze="a", lora="r=4,targets=q_proj") == Recipe(("a",), lora=Lora(4, ("q_proj",)))
    assert len({Workload(2, 8), Workload(2, 8), Workload(2, 9), Recipe(), make_recipe()}) == 3
    for value, name in ((Workload(), "rows"), (Recipe(), "recompute"), (Lora(1, ("a",)), "r")):
        with pytest.raises(FrozenInstanceError):
            setattr(value, name, 2)
