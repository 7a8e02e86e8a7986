"""Work and tensors cut by a layout: every product once, keys by their heads, states by ZeRO, layers by a pipeline."""

from __future__ import annotations

from typing import Any

import pytest
from round_machine import GPT

from flopcalc import bind
from flopcalc.base.vocabulary import Execution
from flopcalc.core.model.config import load_config
from flopcalc.planning.cut import (
    Section,
    cut_product,
    cut_work,
    list_sections,
    locate,
    make_outline,
    make_shards,
    repeat_work,
    take_section,
)
from flopcalc.planning.layout import Layout
from flopcalc.prediction.build_work import make_work
from flopcalc.prediction.memory.peak import Memory, Tensors, count_memory, list_tensors
from flopcalc.prediction.work import Work

SEQ = 2048


def make(model: Any = GPT, execution: Execution = "fused", **options: Any) -> Work:
    estimator = bind(model, recipe=options.pop("recipe", None))
    return make_work(estimator, estimator(1, SEQ).terms[0][1], execution=execution, **options)


def hold(layout: Layout, model: Any = GPT, batch: int = 64, recompute: str = "none", **options: Any) -> Memory:
    """Memory of the fullest device."""
    estimator = bind(model, recipe={"recompute": recompute})
    sample = estimator(1, SEQ).terms[0][1]
    tensors = list_tensors(estimator, sample, optimizer="adamw-master", execution="fused", **options)
    outline, batches = make_outline(estimator, sample), batch // (layout.dp * layout.micro_batch)
    sections = list_sections(outline, layout.pp, layout.virtual)
    found = [count_memory(tensors, make_shards(layout, each, outline, batches), is_adding=True) for each in sections]
    return max(found, key=lambda memory: memory.peak)


# --- what a layout asks of a model ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("model", "exits", "heads", "key_heads", "experts", "active"),
    [
        ("llama-3.1-8b", 2.0, 32, 8, 1, 1),
        ("pythia-6.9b", 1.0, 32, 32, 1, 1),
        ("qwen3-235b-a22b", 1.0, 64, 4, 128, 8),
        ("command-r-35b", 1.0, 64, 64, 1, 1),
        ("phi-4", 2.0, 40, 10, 1, 1),
        ("falcon-7b", 1.0, 71, 1, 1, 1),
    ],
)
def test_outline(model: str, exits: float, heads: int, key_heads: int, experts: int, active: int) -> None:
    """Two sums a layer; one where attention and MLP stand side by side or the MLP is experts."""
    estimator = bind(model)
    found = make_outline(estimator, estimator(1, 512).terms[0][1])
    assert (found.exits, found.heads, found.key_heads) == (exits, heads, key_heads)
    assert (found.experts, found.active, found.tokens) == (experts, active, 512)


# --- work -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "model", ["llama-3.1-8b", "qwen3-235b-a22b", "deepseek-v3", "gpt2", "pythia-6.9b", "gemma-2-9b", "mixtral-8x7b"]
)
@pytest.mark.parametrize("execution", ["eager", "fused"])
def test_work_has_every_product_once(model: str, execution: Execution) -> None:
    estimator = bind(model)
    load = estimator(1, 1024).terms[0][1]
    work = make_work(estimator, load, execution=execution)
    counted = sum(
        each.flops.total * each.block.copies for each in estimator.rows(load, "model") if each.row.op.kind == "linear"
    )
    assert sum(product.flops for product in work.products) == pytest.approx(counted, rel=1e-12)


def test_fused_siblings_are_one_product() -> None:
    names = {
        product.module: (product.size.n, product.split.kv, product.split.kv_heads)
        for product in make("llama-3.1-8b").products
    }
    assert names == {
        "model.layers.*.self_attn.q_proj+k_proj+v_proj": (6144, 2048, 8),
        "model.layers.*.self_attn.o_proj": (4096, 0, 0),
        "model.layers.*.mlp.gate_proj+up_proj": (2 * 14336, 0, 0),
        "model.layers.*.mlp.down_proj": (4096, 0, 0),
        "lm_head": (128256, 0, 0),
    }


def test_adapters_run_beside_joined_products() -> None:
    recipe = {"lora": {"r": 8, "targets": ["q_proj", "v_proj"]}}
    found = [each for each in make("llama-3.1-8b", recipe=recipe).products if each.direction == "forward"]
    shapes = {
        (each.module.rpartition(".")[2], each.size.n, each.size.k) for each in found if "self_attn" in each.module
    }
    assert shapes == {
        ("q_proj+k_proj+v_proj", 6144, 4096),
        ("q_proj", 8, 4096),
        ("q_proj", 4096, 8),
        ("v_proj", 8, 4096),
        ("v_proj", 1024, 8),
        ("o_proj", 4096, 4096),
    }


@pytest.mark.parametrize(
    ("model", "module"),
    [
        ("llama-3.1-8b", "model.layers.*.self_attn.q_proj+k_proj+v_proj"),
        ("phi-4", "model.layers.*.self_attn.qkv_proj"),  # one product of queries, keys and values
    ],
)
def test_keys_are_cut_no_finer_than_their_heads(model: str, module: str) -> None:
    product = next(each for each in make(model).products if each.module == module)
    heads, wide = product.split.kv_heads, product.size.n - product.split.kv
    for tp in (1, 2, heads, 2 * heads):
        assert cut_product(product, Layout(tp=tp)).size.n == -(-wide // tp) + product.split.kv // min(tp, heads)


@pytest.mark.parametrize(
    ("layout", "sizes"),
    [
        (Layout(tp=4), {"c_attn": (2048, 768, 1024), "c_proj": (2048, 1024, 256), "c_fc": (2048, 1024, 1024)}),
        (Layout(cp=2), {"c_attn": (1024, 3072, 1024), "c_proj": (1024, 1024, 1024), "c_fc": (1024, 4096, 1024)}),
    ],
)
def test_products_are_cut_by_their_side(layout: Layout, sizes: dict[str, tuple[int, int, int]]) -> None:
    found = {each.module.rpartition(".")[2]: each for each in cut_work(make(), layout).products}
    attention = next(each for each in cut_work(make(), layout).products if each.module.endswith("attn.c_proj"))
    found["c_proj"] = attention
    assert {name: found[name].size[1:4] for name in sizes} == sizes


@pytest.mark.parametrize(("is_spread", "wide"), [(True, 4), (False, 1)])
def test_sequence_parallelism_cuts_what_has_the_residuals_width(is_spread: bool, wide: int) -> None:
    work = make()
    cut = cut_work(work, Layout(tp=4, is_sequence_parallel=is_spread))
    shares = {
        (one.width, one.reads / other.reads)
        for one, other in zip(work.moved, cut.moved, strict=True)
        if one.direction != "optimizer"
    }
    assert shares == {("wide", wide), ("narrow", 4)}


def test_a_ring_is_cut_into_calls() -> None:
    """Half of each device's keys: as many pairs as under the mask of a causal call. What comes of them is added up."""
    call = next(each for each in make().attention if each.direction == "forward")
    cut = cut_work(make(), Layout(tp=2, cp=4))
    found = [each for each in cut.attention if each.direction == "forward"]
    assert [(each.mask, each.length, each.keys, each.calls) for each in found] == [("causal", 512, 512, 4 * call.calls)]
    added = [each for each in cut.moved if each.calls == 3 * call.calls and each.module == call.module]
    queries, keys = (512 * heads // 2 * call.qk for heads in (call.heads, call.kv_heads))
    assert [(each.direction, each.kind, each.reads, each.writes) for each in added] == [
        ("forward", "pointwise", 6 * queries, 4 * queries),
        ("backward", "pointwise", 4 * (queries + 2 * keys), 2 * (queries + 2 * keys)),
    ]


def test_experts_are_cut_by_copies() -> None:
    work = make("mixtral-8x7b")
    whole = next(each for each in work.products if each.is_expert)
    part = cut_product(whole, Layout(tp=2, ep=4))
    assert part.size == whole.size._replace(copies=whole.size.copies // 4, m=whole.size.m // 2)


@pytest.mark.parametrize("execution", ["eager", "fused"])
def test_sections_of_a_pipeline_are_the_whole_work(execution: Execution) -> None:
    work = make("llama-3.2-1b", execution, optimizer="none")
    sections = [Section(3, has_last=False), Section(8, False, False), Section(5, has_first=False)]
    parts = [take_section(work, section, 16, 0.0) for section in sections]
    for name in ("products", "attention", "moved"):
        for i, whole in enumerate(getattr(work, name)):
            assert sum(getattr(part, name)[i].calls for part in parts) == pytest.approx(whole.calls)
    for i, sent in enumerate(work.hosted):
        assert sum(part.hosted[i].many for part in parts) == pytest.approx(sent.many)


@pytest.mark.parametrize(
    ("module", "place"),
    [
        ("model.embed_tokens", "first"),
        ("model", "first"),
        ("model.layers.*.mlp", "layers"),
        ("model.norm", "last"),
        ("lm_head", "last"),
        ("", "last"),
    ],
)
def test_places(module: str, place: str) -> None:
    assert locate(module, "language", make("llama-3.2-1b").stacks) == place


def test_a_tower_is_before_the_layers() -> None:
    estimator = bind("qwen2-vl-2b")
    load = estimator(1, 1024, image_grid_thw=[(1, 36, 52)]).terms[0][1]
    stacks = make_work(estimator, load).stacks
    assert locate("model.visual.blocks.*.attn", "vision", stacks) == "first"
    assert locate("model.visual.merger.mlp.0", "projector", stacks) == "first"
    assert locate("model.language_model", "language", stacks) == "first"


@pytest.mark.parametrize("execution", ["eager", "fused"])
def test_recomputation_repeats_forward_work(execution: Execution) -> None:
    none = make(execution=execution)
    full = make(execution=execution, recipe={"recompute": "full-reentrant"})

    def count(work: Work) -> float:
        return sum(each.flops for each in (*work.products, *work.attention) if each.is_again)

    ahead = [each for each in (*none.products, *none.attention) if each.direction == "forward" and ".h." in each.module]
    assert count(none) == 0
    assert count(full) == pytest.approx(sum(each.flops for each in ahead))
    assert count(repeat_work(full, "half")) == pytest.approx(count(full) / 2)
    cores = sum(each.flops for each in none.attention if each.direction == "forward")
    assert count(repeat_work(none, "selective")) == pytest.approx(cores)


@pytest.mark.parametrize(("freeze", "flows"), [(["vision"], False), ([], True)])
def test_what_is_frozen_has_no_way_back(freeze: list[str], flows: bool) -> None:
    """A frozen tower before the language model: no gradients, and nothing is kept."""
    estimator = bind("qwen2-vl-2b", recipe={"freeze": freeze})
    load = estimator(1, 1024, image_grid_thw=[(1, 36, 52)]).terms[0][1]
    work = make_work(estimator, load, execution="fused")
    seen = [each for each in (*work.products, *work.attention, *work.moved) if "visual.blocks" in each.module]
    assert any(each.direction in ("wgrad", "dgrad", "backward") for each in seen) is flows
    parts = list_tensors(estimator, load, execution="fused").parts
    assert any(part.kept.total for part in parts[:3] if part.layers > 1) is flows


# --- memory -----------------------------------------------------------------------------------------------------------
LAYER = 12 * 1024**2 + 13 * 1024  # of a GPT: weights, biases and norms
TRAINED = 16 * LAYER + (32000 + 4096) * 1024 + 2 * 1024


@pytest.mark.parametrize(
    ("zero", "weights", "gradients", "optimizer"), [(0, 1, 1, 1), (1, 1, 1, 8), (2, 1, 8, 8), (3, 8, 8, 8)]
)
def test_states_are_spread_by_zero(zero: int, weights: int, gradients: int, optimizer: int) -> None:
    found = hold(Layout(dp=8, zero=zero))
    assert found.weights == -(-2 * TRAINED // weights)
    assert found.gradients == -(-4 * TRAINED // gradients)
    assert found.optimizer == -(-12 * TRAINED // optimizer)
    # Of the largest unit, the table, two whole ones and a gradient.
    gathered = {2: 2, 3: 6}.get(zero, 0) * 32000 * 1024
    # One unused gradient for each shape of a layer's products: queries, keys and values; output; the two of the MLP.
    dummies = 2 * (3 + 1 + 4 + 4) * 1024**2
    assert found.workspace == 2 * (32 << 20) + gathered + dummies


def list_gpt(recompute: str = "none", **options: Any) -> Tensors:
    estimator = bind(GPT, recipe={"recompute": recompute})
    return list_tensors(estimator, estimator(1, SEQ).terms[0][1], execution="fused", **options)


def test_activations_are_those_of_korthikanti() -> None:
    """34 s·b·h bytes a layer less two dropout masks, and 5 a·s²·b of scores where attention is not fused."""
    layers = next(part for part in list_gpt().parts if part.is_language)
    assert layers.kept.total == 16 * 32 * SEQ * 1024
    assert layers.kept.dense == 16 * 8 * SEQ * 1024  # of the residual's width
    scores = next(part for part in list_gpt(attention="eager").parts if part.is_language)
    assert scores.kept.total - layers.kept.total == 16 * 5 * 16 * SEQ**2
    again = next(part for part in list_gpt("full-reentrant").parts if part.is_language)
    assert again.kept.total == 16 * 2 * SEQ * 1024  # inputs of layers


def test_fp8_keeps_inputs_of_products_in_half_the_bytes() -> None:
    plain, small = (sum(part.kept.total for part in list_gpt(dtype=dtype).parts) for dtype in ("bf16", "fp8"))
    # A layer's products read 2 · h, h (attention) and 4 · h elements a token; the head h.
    assert plain - small == SEQ * 1024 * (16 * 7 + 1)


def test_a_pipelines_last_stage_has_its_own_copy_of_a_tied_head() -> None:
    estimator = bind(GPT)
    sample = estimator(1, SEQ).terms[0][1]
    tensors = list_tensors(estimator, sample, optimizer="adamw-master", execution="fused")
    outline, layout = make_outline(estimator, sample), Layout(pp=16)
    first, middle, last = (
        count_memory(tensors, make_shards(layout, section, outline, 1)) for section in list_sections(outline, 16)
    )
    table = 32000 * 1024
    assert middle.weights == 2 * LAYER
    assert first.weights == 2 * (LAYER + table + 4096 * 1024)
    assert last.weights == 2 * (LAYER + table + 2 * 1024)
    assert (last.gradients, last.optimizer) == (2 * last.weights, 6 * last.weights)
    whole = count_memory(tensors, make_shards(Layout(), Section(16), outline, 1))
    assert whole.weights == 2 * TRAINED


def test_a_pipeline_keeps_micro_batches_in_flight() -> None:
    alone = hold(Layout(tp=8)).activations
    plain = hold(Layout(tp=8, pp=4)).activations
    chunked = hold(Layout(tp=8, pp=4, virtual=2)).activations
    # A quarter of the layers, four micro-batches; with chunks 1 + (p-1)/(p·v) as many.
    assert plain == pytest.approx(alone, rel=0.02)
    assert chunked == pytest.approx(plain * 1.375, rel=0.02)


def test_tensors_are_cut() -> None:
    whole, cut = hold(Layout()), hold(Layout(tp=4, cp=2))
    layer = 32 * SEQ * 1024
    output = 2 * SEQ * 1024  # of attention, of which context parallelism keeps a copy
    assert whole.activations - cut.activations >= 16 * (layer * 7 - output) / 8
    # Logits by both, the head's unused gradient by tp; whole rows of what it reads, and their gradient, by cp.
    logits, head, rows = 2 * SEQ * 32000, 2 * 1024 * 32000, 2 * SEQ * 1024
    assert whole.logits == logits + head + rows
    assert cut.logits == logits // 8 + head // 4 + 2 * rows // 2
    plain = hold(Layout(tp=4, is_sequence_parallel=False))
    assert plain.activations - hold(Layout(tp=4)).activations >= 16 * (8 * SEQ * 1024) * 3 / 4


@pytest.mark.parametrize(
    ("config", "groups"),
    [
        ({}, (8, 4)),
        ({"n_group": 1, "topk_group": 1}, (1, 1)),
        ({"n_group": None}, (1, 1)),
        ({"n_group": 2, "topk_group": 4}, (1, 1)),
    ],
)
def test_tokens_reach_some_groups_of_experts(config: dict[str, Any], groups: tuple[int, int]) -> None:
    found = bind({**load_config("deepseek-v3").config, **config})
    assert make_outline(found, found(1, 512).terms[0][1]).groups == groups
