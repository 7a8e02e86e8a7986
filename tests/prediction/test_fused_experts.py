"""Experts whose products, activation function and casts are one kernel, and what the others wait for."""

from __future__ import annotations

from statistics import median

import pytest
from made_products import make_product

from flopcalc import bind
from flopcalc.core.workload.workload import Workload
from flopcalc.prediction.build_work import make_work
from flopcalc.prediction.clock import Clock
from flopcalc.prediction.fused_kernels import FusedExperts, find_fused_experts
from flopcalc.prediction.kernels.defaults import load_defaults
from flopcalc.prediction.kernels.machine import Machine
from flopcalc.prediction.work import MemoryCall, Work

UP, DOWN = "model.layers.*.mlp.experts.gate_up_proj", "model.layers.*.mlp.experts.down_proj"
ROWS, HIDDEN, INNER = 8192, 2048, 768

FITTED = load_defaults().device


def make_step(has_scans: bool = False) -> Work:
    """Both products of eight experts in all directions, and their activation function."""
    products = tuple(
        make_product(direction, ROWS, n, k, module=module, copies=8, side="expert")
        for module, n, k in ((UP, 2 * INNER, HIDDEN), (DOWN, HIDDEN, INNER))
        for direction in ("forward", "dgrad", "wgrad")
    )
    activation = MemoryCall(DOWN, "language", "forward", "pointwise", 1e8, 5e7, is_cheap=True)
    permuted = MemoryCall(DOWN, "language", "forward", "pointwise", 2e8, 2e8)
    return Work(products, (), (activation, permuted), (), (), (), True, "qwen3_moe", "fused", has_scans)


@pytest.mark.parametrize(
    ("device", "dtype", "has_scans", "host_s", "is_joined"),
    [
        ("gb300", "mxfp8", False, 0.0, True),
        ("gb200", "mxfp8", True, FITTED.expert_host_s, True),
        ("gb200", "bf16", False, FITTED.expert_host_s, False),
        ("gb200", "bf16", True, FITTED.expert_host_s, False),
        ("gb300", "nvfp4", False, FITTED.expert_host_s, False),
        ("b200-sxm", "mxfp8", False, FITTED.expert_host_s, False),
        ("b300-sxm", "mxfp8", True, FITTED.expert_host_s, False),
        ("h100-sxm", "fp8", False, FITTED.expert_host_s, False),
    ],
)
def test_what_is_one_kernel(device: str, dtype: str, has_scans: bool, host_s: float, is_joined: bool) -> None:
    found = find_fused_experts(make_step(has_scans), Machine(device, dtype))
    assert found.host_s == host_s
    assert found.modules == (frozenset((UP, DOWN)) if is_joined else frozenset())


@pytest.mark.parametrize(
    ("host_s", "device_s", "wait_s"),
    [(1.5e-3, 0.0, 1.5e-3), (1.5e-3, 1e-3, 9.05475e-04), (1.5e-3, 5e-3, 3.70332e-04), (0.0, 1e-3, 0.0)],
)
def test_the_more_the_device_computes_the_less_it_waits(host_s: float, device_s: float, wait_s: float) -> None:
    assert FusedExperts(host_s, 1.7).find_wait(device_s) == pytest.approx(wait_s, rel=1e-5, abs=1e-12)


def test_products_of_experts_wait_and_nothing_else_does() -> None:
    load = Workload(rows=1, seq=1024, phase="train")
    replayed, waiting = (Clock(Machine("gb300", "mxfp8"), "fused") for _ in range(2))
    replayed.add(make_step(), 2, load)
    waiting.add(make_step(has_scans=True), 2, load)
    without = sum(piece.seconds for piece in replayed.pieces)
    calls = 2 * 6
    wait_s = FusedExperts(FITTED.expert_host_s, FITTED.host_overlap).find_wait(without / calls)
    assert sum(piece.seconds for piece in waiting.pieces) == pytest.approx(without + calls * wait_s)
    for before, after in zip(replayed.pieces, waiting.pieces, strict=True):
        assert after.seconds - before.seconds == pytest.approx(2 * wait_s if before.kind == "products" else 0.0)


# Share of a B200's 2,250 TFLOP/s that Transformer Engine's GroupedLinear reaches in bf16, with gradients in float32
# (MooreThreads/SimuMax, configs/system/b200_bf16_ceperm.json): experts, rows of each, n, k, direction.
GROUPED = [
    (256, 128, 4096, 7168, "forward", 0.2081),
    (256, 128, 4096, 7168, "dgrad", 0.2264),
    (256, 128, 4096, 7168, "wgrad", 0.0775),
    (160, 154, 5120, 1536, "forward", 0.1158),
    (64, 512, 4096, 7168, "forward", 0.3670),
    (64, 512, 4096, 7168, "wgrad", 0.2192),
    (32, 1024, 7168, 2048, "forward", 0.3842),
    (32, 1024, 7168, 2048, "dgrad", 0.4301),
    (32, 1024, 7168, 2048, "wgrad", 0.2744),
    (20, 1232, 5120, 1536, "forward", 0.3974),
    (40, 2460, 3072, 5120, "wgrad", 0.4166),
    (40, 9832, 3072, 5120, "forward", 0.4746),
    (40, 9832, 5120, 1536, "dgrad", 0.4634),
    (40, 9832, 5120, 1536, "wgrad", 0.4134),
]


def test_experts_take_what_was_published() -> None:
    machine, errors = Machine("b200-sxm"), []
    for copies, rows, n, k, direction, share in GROUPED:
        product = make_product(direction, copies * rows, n, k, module=UP, copies=copies, side="expert")
        published = product.flops / (share * 2250e12)
        errors.append(machine.time_experts(product, machine.sustained).seconds / published - 1)
    assert median(map(abs, errors)) < 0.08
    assert max(map(abs, errors)) < 0.25


@pytest.mark.parametrize(
    ("device", "dtype", "copies", "rows", "seconds"),
    [
        ("b200-sxm", "bf16", 64, 1, 64 * 9e-6),  # calls: no expert's is shorter
        ("b200-sxm", "bf16", 8, 65536, None),
        ("h100-sxm", "bf16", 8, 65536, None),
        ("h100-sxm", "fp8", 8, 65536, None),
    ],
)
def test_experts_with_many_rows_are_plain_products(
    device: str, dtype: str, copies: int, rows: int, seconds: float | None
) -> None:
    machine, width = Machine(device, dtype), 256 if seconds else 8192
    product = make_product("forward", copies * rows, width, width, module=UP, copies=copies, side="expert")
    found = machine.time_experts(product, machine.sustained).seconds
    plain = (
        machine.time_product(make_product("forward", rows, width, width, module=UP)).seconds
        * copies
        / machine.sustained
    )
    assert found == pytest.approx(seconds or plain, rel=0.05)


def test_one_kernel_makes_what_lies_between_the_products() -> None:
    """No cast of the second product's input and the first one's gradient, no activation function."""
    load = Workload(rows=1, seq=1024, phase="train")
    for dtype, casts, moved in (("mxfp8", {UP: 1, DOWN: 1}, 1), ("nvfp4", {UP: 2, DOWN: 2}, 2)):
        clock = Clock(Machine("gb300", dtype), "fused")
        clock.add(make_step(), 1, load)
        memory = [piece for piece in clock.pieces if piece.kind == "memory"]
        streamed = {name: sum(piece.module == name and piece.seconds > 0 for piece in memory) for name in casts}
        assert streamed == {UP: casts[UP], DOWN: casts[DOWN] + moved}, dtype


def test_rows_of_latent_experts_are_moved() -> None:
    """Nemotron 3 Super's experts take rows narrower than the residual stream; 22 of them take each token."""
    estimator = bind("nemotron-3-super-120b-a12b")
    load = estimator(1, 1024).terms[0][1]
    work = make_work(estimator, load, execution="fused")
    # Frameworks multiply a router's numbers as they are; HF's code brings them to float32.
    assert {each.format for each in work.products if each.part == "router"} == {""}
    eager = make_work(estimator, load, execution="eager")
    assert {each.format for each in eager.products if each.part == "router"} == {"fp32"}
    experts = [each for each in work.products if each.is_expert and each.direction == "forward"]
    last = experts[-1]
    moved = [each for each in work.moved if each.module == last.module and each.direction == "forward"]
    rows = last.size.m
    assert last.size[1:4] == (22 * 1024, 1024, 2688)
    assert [(each.reads, each.writes, each.is_cheap) for each in moved] == [
        (2.0 * rows * 2688, 2.0 * rows * 2688, True),  # the activation function
        (4.0 * rows * 1024, 4.0 * rows * 1024, False),  # into the experts' order and back
    ]


@pytest.mark.parametrize(("dtype", "is_joined"), [("mxfp8", True), ("bf16", False)])
def test_biases_of_experts_are_weighted_in_float32(dtype: str, is_joined: bool) -> None:
    """gpt-oss: its second bias goes through eight tensors ahead; the activation function clamps apart."""
    estimator = bind("gpt-oss-20b")
    load = estimator(1, 1024).terms[0][1]
    work = make_work(estimator, load, execution="fused")
    first, second = [each for each in work.products if each.is_expert and each.direction == "forward"][:2]
    biases = [each for each in work.moved if each.is_bias][:3]  # of the first kind of layers
    assert [(each.direction, (each.reads + each.writes) / second.size.m) for each in biases] == [
        ("backward", 2.0 * first.size.n),  # the first one's gradient is a sum
        ("forward", 28.0 * second.size.n),
        ("backward", 38.0 * second.size.n),
    ]
    clock = Clock(Machine("gb300", dtype), "fused")
    clock.add(work, 1, load)
    without = Clock(Machine("gb300", dtype), "fused")
    without.add(work._replace(moved=tuple(each for each in work.moved if not each.is_bias)), 1, load)
    memory = [sum(piece.seconds for piece in each.pieces if piece.kind == "memory") for each in (clock, without)]
    assert (memory[0] == memory[1]) == is_joined  # a kernel that does experts as a whole adds them itself


@pytest.mark.parametrize(
    ("device", "slower"),
    [("h200-sxm", 1.0), ("h100-sxm", (3.35 / 4.8) ** -0.5), ("gb200", (8 / 4.8 * 148 / 132) ** -0.5)],
)
def test_scans_follow_memory_and_processors_alike(device: str, slower: float) -> None:
    """A Mamba-2 of 1.4 B parameters trains 1.5 times as fast on GB200 as on H200 (state-spaces/mamba issue 904)."""
    scan = MemoryCall("model.layers.*.mixer", "language", "forward", "scan", 1e11, 1e11)
    found, base = (Machine(name).time_moved(scan).seconds for name in (device, "h200-sxm"))
    assert found / base == pytest.approx(slower, rel=0.01)


@pytest.mark.parametrize(
    ("model", "heads", "published_s"),
    [("nemotron-3-nano-30b-a3b", 64, 0.367e-3), ("nemotron-3-super-120b-a12b", 128, 0.721e-3)],
)
def test_a_scan_ahead_takes_what_was_published(model: str, heads: int, published_s: float) -> None:
    """Mamba-2's kernels on a B200, 8,192 tokens (ai-dynamo/aiconfigurator, trtllm 1.3.0rc15)."""
    estimator, machine = bind(model), Machine("b200-sxm")
    assert estimator.source.config["mamba_num_heads"] == heads
    work = make_work(estimator, estimator(2, 4096).terms[0][1], execution="fused")
    scans = [each for each in work.moved if each.kind == "scan"]
    ahead, behind = (
        sum(machine.time_moved(each).seconds for each in scans if each.direction == direction)
        for direction in ("forward", "backward")
    )
    assert ahead == pytest.approx(published_s, rel=0.1)
    assert 5 < behind / ahead < 6
    assert not any(each.is_again for each in scans)
    again = estimator.change(recompute="full")
    work = make_work(again, again(2, 4096).terms[0][1], execution="fused")
    repeated = [machine.time_moved(each).seconds for each in work.moved if each.kind == "scan" and each.is_again]
    assert sum(repeated) == pytest.approx(ahead)


@pytest.mark.parametrize(
    ("model", "has_scans", "is_recorded"),
    [("nemotron-3-nano-30b-a3b", True, False), ("deepseek-v4-flash", False, False), ("qwen3-30b-a3b", False, True)],
)
def test_selecting_keys_is_no_scan(model: str, has_scans: bool, is_recorded: bool) -> None:
    estimator = bind(model)
    work = make_work(estimator, estimator(1, 1024).terms[0][1], execution="fused")
    assert (work.has_scans, work.is_recorded) == (has_scans, is_recorded)
