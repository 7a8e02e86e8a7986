"""The counter against witnesses that use none of its formulas: explicit products, loops, fvcore."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tiers import thin
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from flopcalc.measure.counters.flop_counter import FORMULAS, OperatorCount, count_flops
from flopcalc.measure.operator_kinds import KINDS, classify

Tensor = Any
_EMPTY = nn.Module()


def ours(step: Callable[[], Any]) -> OperatorCount:
    counted = count_flops(_EMPTY, step)
    assert counted.not_counted == {}
    return counted


def stock(step: Callable[[], Any]) -> int:
    """torch's own counter; the witnesses below only run mm and bmm under it."""
    with FlopCounterMode(display=False) as mode:
        step()
    seen = set(mode.get_flop_counts()["Global"])
    assert seen <= {torch.ops.aten.mm, torch.ops.aten.bmm}, seen
    return int(mode.get_total_flops())


def operators(step: Callable[[], Any]) -> set[str]:
    seen: set[str] = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.add(func._schema.name)
            return func(*args, **(kwargs or {}))

    with Watch():
        step()
    return seen


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


# --- Each patched operator --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_cpu_flash_attention_is_its_explicit_products(kv_heads: int) -> None:
    b, h, s, t, d = 2, 4, 5, 7, 8
    q, k, v = leaf(b, h, s, d), leaf(b, kv_heads, t, d), leaf(b, kv_heads, t, d)

    def attend() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=kv_heads != h)

    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in operators(attend)
    assert "aten::_scaled_dot_product_flash_attention_for_cpu_backward" in operators(lambda: attend().sum().backward())

    with torch.no_grad():
        kk, vv = k.repeat_interleave(h // kv_heads, 1), v.repeat_interleave(h // kv_heads, 1)
        do, p = torch.ones(b, h, s, d), torch.ones(b, h, s, t)

        def forward_products() -> None:
            q @ kk.mT
            p @ vv

        def backward_products() -> None:  # the kernel keeps no scores: it makes them again
            q @ kk.mT
            do @ vv.mT
            p.mT @ do
            p @ kk
            p.mT @ q

        forward, backward = stock(forward_products), stock(backward_products)
    counted = ours(lambda: attend().sum().backward())
    assert (counted.forward, counted.backward) == (forward, backward)


def test_math_attention_counts_what_it_needs() -> None:
    q, k, v = leaf(1, 4, 5, 8), leaf(1, 2, 5, 8), leaf(1, 2, 5, 8)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        counted = ours(lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True).sum().backward())
    assert counted.forward == 2 * 2 * 4 * 5 * 5 * 8
    assert counted.backward == 2 * counted.forward


@pytest.mark.parametrize("rows", [12, 15])
def test_grouped_mm_is_a_loop_of_mm(rows: int) -> None:
    sizes = [3, 0, 7, 2]  # one group is empty; with 15 rows the last three have no group
    offs = torch.tensor(sizes).cumsum(0).to(torch.int32)
    x, w = leaf(rows, 8), leaf(4, 8, 12)

    def loop() -> None:
        parts = [x[end - n : end] @ w[g] for g, (n, end) in enumerate(zip(sizes, offs.tolist(), strict=True)) if n]
        torch.cat(parts).sum().backward()

    counted = ours(lambda: torch._grouped_mm(x, w, offs=offs).square().sum().backward())
    assert counted.total == stock(loop)
    assert counted.backward == 2 * counted.forward


def test_grouped_mm_of_three_dimensions() -> None:
    a, b = torch.randn(3, 4, 8), torch.randn(3, 8, 12)
    assert ours(lambda: torch._grouped_mm(a, b)).forward == stock(lambda: a @ b)
    offs = torch.tensor([4, 4, 12], dtype=torch.int32)
    wide = torch.randn(8, 12)
    loop = stock(lambda: [a[0] @ wide[:, :4], a[2] @ wide[:, 4:12]])
    assert ours(lambda: torch._grouped_mm(a, wide, offs=offs)).forward == loop


def test_transformers_fallback_for_grouped_mm() -> None:
    pytest.importorskip("transformers.integrations.moe")
    offs = torch.tensor([3, 3, 10])
    x, w = leaf(10, 5), leaf(3, 5, 7)

    def fall_back() -> None:
        torch.ops.transformers.grouped_mm_fallback(x, w, offs).sum().backward()

    counted = ours(fall_back)
    assert counted.total == stock(lambda: (torch.cat([x[:3] @ w[0], x[3:] @ w[2]])).sum().backward())
    assert stock(fall_back) == counted.backward  # torch's counter has no formula for the operator of its forward pass


@pytest.mark.parametrize("groups", [1, 2, 6])
def test_convolution_is_products_of_patches(groups: int) -> None:
    n, c, length, k, out = 3, 6, 11, 4, 12
    x, w = leaf(n, c, length), leaf(out, c // groups, k)

    def patches() -> None:  # one product per group, on the windows of its channels
        windows = x.unfold(2, k, 2).permute(0, 2, 1, 3)  # n, positions, c, k
        per = c // groups
        parts = [
            windows[:, :, g * per : (g + 1) * per].reshape(-1, per * k)
            @ w[g * out // groups : (g + 1) * out // groups].reshape(out // groups, -1).T
            for g in range(groups)
        ]
        torch.cat(parts).sum().backward()

    counted = ours(lambda: F.conv1d(x, w, stride=2, groups=groups).sum().backward())
    assert counted.total == stock(patches)
    assert counted.backward == 2 * counted.forward


@pytest.mark.parametrize("groups", [1, 3])
def test_transposed_convolution_spreads_each_input_position(groups: int) -> None:
    n, c, length, k, out = 2, 6, 5, 4, 9
    x, w = leaf(n, c, length), leaf(c, out // groups, k)

    def spread() -> None:
        per = c // groups
        parts = [
            x[:, g * per : (g + 1) * per].transpose(1, 2).reshape(-1, per) @ w[g * per : (g + 1) * per].reshape(per, -1)
            for g in range(groups)
        ]
        torch.cat(parts).sum().backward()

    assert ours(lambda: F.conv_transpose1d(x, w, stride=3, groups=groups).sum().backward()).total == stock(spread)


def test_convolution_without_input_gradient() -> None:
    x, w = torch.randn(2, 3, 4, 8, 8), leaf(16, 3, 2, 4, 4)
    counted = ours(lambda: F.conv3d(x, w, stride=(2, 4, 4)).sum().backward())
    assert counted.backward == counted.forward == 2 * 2 * (2 * 2 * 2) * 16 * 3 * 2 * 4 * 4


@pytest.mark.parametrize("left", [True, False])
def test_triangular_solve_is_substitution(left: bool) -> None:
    n, k = 7, 3
    a = torch.randn(2, n, n).tril() + 5 * torch.eye(n)
    b = torch.randn(2, n, k) if left else torch.randn(2, k, n)

    def substitute() -> None:
        for matrix, right in zip(a, b if left else b.mT, strict=True):
            solved: list[Tensor] = []
            for i in range(n):
                known = matrix[i : i + 1, :i] @ torch.stack(solved) if solved else 0.0
                solved.append(((right[i : i + 1] - known) / matrix[i, i])[0])

    solve = ours(lambda: torch.linalg.solve_triangular(a, b, upper=False, left=left))
    assert solve.forward == stock(substitute)


@pytest.mark.parametrize(
    ("step", "witness"),
    [
        (lambda: torch.ones(3, 5) @ torch.ones(5), lambda: torch.ones(3, 5) @ torch.ones(5, 1)),
        (
            lambda: torch.addmv(torch.ones(3), torch.ones(3, 5), torch.ones(5)),
            lambda: torch.ones(3, 5) @ torch.ones(5, 1),
        ),
        (lambda: torch.dot(torch.ones(5), torch.ones(5)), lambda: torch.ones(1, 5) @ torch.ones(5, 1)),
        (lambda: torch.vdot(torch.ones(5), torch.ones(5)), lambda: torch.ones(1, 5) @ torch.ones(5, 1)),
        (
            lambda: torch._int_mm(torch.ones(4, 8, dtype=torch.int8), torch.ones(8, 6, dtype=torch.int8)),
            lambda: torch.ones(4, 8) @ torch.ones(8, 6),
        ),
        (
            lambda: torch.baddbmm(torch.ones(2, 3, 4), torch.ones(2, 3, 5), torch.ones(2, 5, 4)),
            lambda: torch.ones(2, 3, 5) @ torch.ones(2, 5, 4),
        ),
    ],
)
def test_small_products(step: Callable[[], Any], witness: Callable[[], Any]) -> None:
    assert ours(step).forward == stock(witness) > 0


def test_every_patched_operator_exists() -> None:
    pytest.importorskip("transformers.integrations.moe")
    for name in FORMULAS:
        namespace, operator = name.split("::")
        assert hasattr(getattr(torch.ops, namespace), operator), name


def test_inference_mode_hands_over_whole_operators() -> None:
    model, x = nn.Linear(5, 7), torch.randn(3, 5)
    with torch.inference_mode():
        counted = count_flops(model, lambda: model(x) @ torch.ones(7, 2))
    assert counted.forward == 2 * 3 * 5 * 7 + 2 * 3 * 7 * 2
    assert counted.not_counted == {}


def test_fvcore_agrees_times_two() -> None:
    fvcore = pytest.importorskip("fvcore.nn")

    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 3, groups=1)
            self.depthwise = nn.Conv2d(8, 8, 3, groups=8)
            self.linear = nn.Linear(8 * 4 * 4, 10)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(self.depthwise(self.conv(x)).flatten(1))
            return y @ y.T

    model, x = Small(), torch.randn(2, 3, 8, 8)
    analysis = fvcore.FlopCountAnalysis(model, x).unsupported_ops_warnings(False).uncalled_modules_warnings(False)
    counted = count_flops(model, lambda: model(x))
    assert counted.forward == 2 * analysis.total()
    for name in ("conv", "depthwise", "linear"):
        assert counted.rows[name][0] == 2 * analysis.by_module()[name]


# --- The ledger -------------------------------------------------------------------------------------------------


def test_an_unknown_operator_is_reported() -> None:
    @torch.library.custom_op("flopcalc_test::secret_product", mutates_args=())
    def secret_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a @ b

    counted = count_flops(_EMPTY, lambda: secret_product(torch.ones(2, 3), torch.ones(3, 4)))
    assert counted.not_counted == {"flopcalc_test.secret_product.default": 1}
    assert counted.total == 0


def test_no_product_is_of_another_kind() -> None:
    registry = {packet._qualified_op_name for packet in flop_registry if hasattr(packet, "_qualified_op_name")}
    kinds = {name: classify(name) for name in registry | FORMULAS.keys()}
    assert {name: kind for name, kind in kinds.items() if kind not in ("product", "attention")} == {}


def test_kinds_name_real_operators() -> None:
    names = [name for kind, names in KINDS.items() if kind not in ("product", "attention") for name in names]
    assert [name for name in names if not hasattr(torch.ops.aten, name)] == []


# --- Attribution ------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Two products, then an addition: the second product's output is not saved for backward."""

    def __init__(self, d: int = 6) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Stack(nn.Module):
    def __init__(self, recompute: str = "none", layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(6, 11)
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.recompute == "none":
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.recompute == "reentrant")
        return self.head(x)


def run(model: nn.Module) -> OperatorCount:
    x = torch.randn(4, 6, requires_grad=True)
    counted = count_flops(model, lambda: model(x).square().sum().backward())
    assert counted.not_counted == {}
    assert counted.forward == sum(r[0] for r in counted.rows.values())
    return counted


_F = 2 * 4 * 6 * 12  # each product of a Block


def test_backward_rows_are_equal_per_layer() -> None:
    counted = run(Stack())
    for i in range(3):
        for name in ("up", "down"):
            assert counted.rows[f"layers.{i}.{name}"] == (_F, 2 * _F, 0)
    assert counted.rows["head"] == (2 * 4 * 6 * 11, 2 * 2 * 4 * 6 * 11, 0)
    assert counted.total == counted.forward * 3


def test_frozen_first_layer_owes_no_gradient() -> None:
    model = Stack()
    model.layers[0].requires_grad_(False)
    x = torch.randn(4, 6)
    counted = count_flops(model, lambda: model(x).sum().backward())
    assert counted.rows["layers.0.up"] == (_F, 0, 0)
    assert counted.rows["layers.1.up"] == (_F, _F, 0)  # nothing before it trains
    assert counted.rows["layers.1.down"] == (_F, 2 * _F, 0)


def test_non_reentrant_checkpoint_stops_early() -> None:
    counted = run(Stack("non-reentrant"))
    for i in range(3):
        assert counted.rows[f"layers.{i}.up"] == (_F, 2 * _F, _F)
        assert counted.rows[f"layers.{i}.down"] == (_F, 2 * _F, 0)


def test_reentrant_checkpoint_runs_the_block_again() -> None:
    counted = run(Stack("reentrant"))
    for i in range(3):
        for name in ("up", "down"):
            assert counted.rows[f"layers.{i}.{name}"] == (_F, 2 * _F, _F)


@pytest.mark.parametrize("recompute", ["none", "non-reentrant", "reentrant"])
def test_total_equals_torchs_own(recompute: str) -> None:
    model = Stack(recompute)
    x = torch.randn(4, 6, requires_grad=True)
    with FlopCounterMode(display=False) as mode:
        model(x).square().sum().backward()
    assert run(model).total == mode.get_total_flops()


def test_a_step_that_fails_leaves_no_hooks() -> None:
    model = Stack()
    with pytest.raises(RuntimeError):
        count_flops(model, lambda: model(torch.ones(4, 5)))
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


def test_rotary_products_are_excluded_by_name() -> None:
    class ToyRotaryEmbedding(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.ones(3, 1) @ torch.ones(1, 4) + x

    model = nn.Sequential(ToyRotaryEmbedding(), nn.Linear(4, 2))
    counted = count_flops(model, lambda: model(torch.ones(3, 4)))
    assert counted.excluded == {"ToyRotaryEmbedding": 2 * 3 * 4}
    assert counted.rows == {"1": (2 * 3 * 4 * 2, 0, 0)}


# --- Whole models -----------------------------------------------------------------------------------------------

_LLAMA = {
    "model_type": "llama", "num_hidden_layers": 3, "hidden_size": 24, "intermediate_size": 40,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 101,
}  # fmt: skip
_MIXTRAL = {**_LLAMA, "model_type": "mixtral", "num_local_experts": 5, "num_experts_per_tok": 2}
_QWEN_VL = {
    "model_type": "qwen2_vl",
    "text_config": {
        **_LLAMA, "model_type": "qwen2_vl_text", "num_attention_heads": 3, "num_key_value_heads": 1,
        "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]},
    },
    "vision_config": {"depth": 2, "embed_dim": 32, "hidden_size": 24, "num_heads": 4, "patch_size": 4},
    "image_token_id": 97, "video_token_id": 98, "vision_start_token_id": 95, "vision_end_token_id": 96,
}  # fmt: skip
_TRAIN = {"batch": 2, "seq": 7, "phase": "train"}
_RECIPES: list[dict[str, Any]] = [
    {},
    {"recompute": "full"},
    {"recompute": "full-reentrant"},
    {"lora": {"r": 4, "targets": ["q_proj", "v_proj"]}},
    {"lora": {"r": 4, "targets": ["q_proj", "v_proj"]}, "recompute": "full"},
]


def measure(
    config: dict[str, Any],
    workload: dict[str, Any],
    recipe: dict[str, Any] | None = None,
    *,
    attention: str = "eager",
    experts: str | None = None,
    device: str = "cpu",
) -> tuple[OperatorCount, int, int]:
    """One counted step of a HF model, its parameters, and those that train."""
    pytest.importorskip("transformers")
    from flopcalc.measure.hf.examples import find_example
    from flopcalc.measure.hf.models import apply_recipe, build_model, count_parameters, floats_on_meta
    from flopcalc.measure.hf.verify import make_step

    model = build_model(config, attention, experts, device)
    with floats_on_meta() if device == "meta" else nullcontext():
        model = apply_recipe(model, recipe or {})
        step = make_step(model, find_example(config["model_type"]), workload, config, device)
        return count_flops(model, step), *count_parameters(model)


@pytest.mark.parametrize("recipe", thin(_RECIPES, 3), ids=str)
@pytest.mark.parametrize("experts", ["eager", "grouped_mm"])
def test_experts_cost_the_same_however_they_run(experts: str, recipe: dict[str, Any]) -> None:
    a, *_ = measure(_MIXTRAL, _TRAIN, recipe, experts="batched_mm")
    b, *_ = measure(_MIXTRAL, _TRAIN, recipe, experts=experts)
    assert a.rows == b.rows


@pytest.mark.parametrize("recipe", thin(_RECIPES[:4], 3), ids=str)
@pytest.mark.parametrize(
    "config",
    [_LLAMA, _MIXTRAL, pytest.param(_QWEN_VL, marks=pytest.mark.heavy)],
    ids=lambda c: str(c["model_type"]),
)
def test_meta_counts_what_the_cpu_counts(config: dict[str, Any], recipe: dict[str, Any]) -> None:
    workload = {"batch": 2, "seq": 17, "images": [[1, 4, 6]]} if "vision_config" in config else _TRAIN
    real, *sizes = measure(config, workload, recipe)
    meta, *meta_sizes = measure(config, workload, recipe, device="meta")
    assert real.rows == meta.rows
    assert sizes == meta_sizes
    assert real.not_counted == meta.not_counted == {}


def test_llama_by_hand() -> None:
    counted, total, trainable = measure(_LLAMA, _TRAIN)
    tokens = 2 * 7
    layer = 2 * tokens * 24 * (24 + 12 + 12 + 24 + 3 * 40) + 2 * 2 * 2 * 4 * 7 * 7 * 6
    assert counted.forward == 3 * layer + 2 * tokens * 24 * 101
    assert counted.backward == 2 * counted.forward
    assert total == trainable == 3 * (24 * (24 + 12 + 12 + 24 + 3 * 40) + 48) + 24 + 2 * 24 * 101


def test_sdpa_and_eager_agree_on_forward() -> None:
    workload = {"batch": 2, "seq": 7, "phase": "forward"}
    eager, *_ = measure(_LLAMA, workload)
    sdpa, *_ = measure(_LLAMA, workload, attention="sdpa")
    assert eager.rows == sdpa.rows


def test_adapters_fold_into_the_module_they_adapt() -> None:
    pytest.importorskip("peft")

    recipe = {"lora": {"r": 4, "targets": ["q_proj"], "save": ["lm_head"]}}
    counted, total, trainable = measure(_LLAMA, _TRAIN, recipe)
    plain, plain_total, _ = measure(_LLAMA, _TRAIN)
    assert counted.rows.keys() == plain.rows.keys()
    adapter = 4 * (24 + 24)
    assert trainable == 3 * adapter + 24 * 101
    assert total == plain_total + trainable
    q = "model.layers.1.self_attn.q_proj"
    assert counted.rows[q][0] == plain.rows[q][0] + 2 * 14 * adapter
    # input gradients of the frozen product and of A and B, weight gradients of A and B
    assert counted.rows[q][1] == plain.rows[q][0] + 2 * 2 * 14 * adapter


@pytest.mark.parametrize(
    "kernel", ["flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu"]
)
@pytest.mark.parametrize(("heads", "kv_heads", "d", "e"), [(4, 4, 8, 8), (6, 2, 8, 8), (4, 1, 12, 5)])
def test_fused_attention_is_the_products_it_stands_for(kernel: str, heads: int, kv_heads: int, d: int, e: int) -> None:
    """Grouped-query and unequal widths: each product written out with repeated keys and counted as bmm."""
    b, s, t = 2, 7, 9
    query, key, value = (torch.randn(b, n, m, w) for n, m, w in ((heads, s, d), (kv_heads, t, d), (kv_heads, t, e)))
    keys, values = (x.repeat_interleave(heads // kv_heads, 1) for x in (key, value))

    def forward() -> torch.Tensor:
        return (query @ keys.transpose(-1, -2)).softmax(-1) @ values

    def backward() -> None:
        probabilities = (query @ keys.transpose(-1, -2)).softmax(-1)  # the scores once more
        gradient = torch.randn(b, heads, s, e)
        probabilities.transpose(-1, -2) @ gradient  # dV
        d_scores = gradient @ values.transpose(-1, -2)  # dP
        d_scores @ keys  # dQ
        d_scores.transpose(-1, -2) @ query  # dK

    written_out = [count_flops(torch.nn.Identity(), step).total for step in (forward, backward)]
    name = f"aten::_scaled_dot_product_{kernel}"
    assert FORMULAS[name]((query, key, value), {}, None) == written_out[0]
    assert FORMULAS[f"{name}_backward"]((query, query, key, value), {}, None) == written_out[1]
