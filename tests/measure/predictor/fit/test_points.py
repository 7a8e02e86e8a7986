"""Profiles and tables of single calls are read as points."""

from __future__ import annotations

from typing import Any

import pytest
from fitted import BF16, LLAMA, profile

from flopcalc.measure.predictor.fit.points import (
    AttentionPoint,
    GroupedPoint,
    MovedPoint,
    ProductPoint,
    join_points,
    read_gemm_table,
    read_points,
    read_single_calls,
)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (["aten::mm", False, "[[64,64],[64,128]]", BF16, 2, 2, 8.0, "nvjet"],
         ProductPoint("forward", 64, 128, 64, 4e-6, 2)),
        (["aten::addmm", False, "[[128],[64,64],[64,128],[],[]]", f"c10::BFloat16,{BF16},Scalar,Scalar", 2, 2, 8.0,
          "nvjet"],
         ProductPoint("forward", 64, 128, 64, 4e-6, 2)),
        (["aten::mm", True, "[[128,64],[64,64]]", BF16, 1, 1, 3.0, "nvjet"],
         ProductPoint("wgrad", 64, 128, 64, 3e-6, 1)),
        (["aten::mm", True, "[[64,128],[128,64]]", BF16, 1, 1, 3.0, "nvjet"],
         ProductPoint("dgrad", 64, 128, 64, 3e-6, 1)),
        (["aten::_grouped_mm", True, "[[96,64],[8,64,32],[8],[],[]]", BF16, 2, 4, 6.0, "cutlass"],
         GroupedPoint("dgrad", 8, 96, 64, 32, 3e-6)),
        (["aten::_cudnn_attention_forward", False, "[[2,4,32,16],[2,2,32,16],[2,2,32,16]]",
          f"{BF16},c10::BFloat16", 2, 4, 6.0, "cudnn"],
         AttentionPoint("cudnn", "forward", "causal", 2, 4, 2, 16, 32, 32, 3e-6, 2)),
        (["aten::mul", False, "[[2,32,64],[2,32,64]]", "float,float", 1, 1, 2.0, "void vectorized_elementwise_kernel"],
         MovedPoint("pointwise", 3 * 4096 * 4, 2e-6, 1)),
        (["aten::mul_", False, "[[2,32,64],[2,32,64]]", "float,float", 1, 1, 2.0, "void vectorized_elementwise_kernel"],
         MovedPoint("pointwise", 3 * 4096 * 4, 2e-6, 1)),
        (["aten::mul", False, "[[2,32,64],[64]]", BF16, 1, 1, 2.0, "void elementwise_kernel"],
         MovedPoint("pointwise_strided", 2 * 4096 * 2 + 128, 2e-6, 1)),
        # Two floating dtypes: a cast per element, and a result of the wider one.
        (["aten::mul", False, "[[2,32,64],[2,32,64]]", "c10::BFloat16,float", 1, 1, 2.0, "void unrolled_elementwise"],
         MovedPoint("pointwise_mixed", 4096 * (2 + 4 + 4), 2e-6, 1)),
        (["aten::mul", False, "[[2,32,64],[64]]", "c10::BFloat16,float", 1, 1, 2.0, "void elementwise_kernel"],
         MovedPoint("pointwise_strided_mixed", 4096 * (2 + 4) + 64 * 4, 2e-6, 1)),
        (["aten::mul", False, "[[2,32,64],[]]", "c10::BFloat16,float", 1, 1, 2.0, "void vectorized_elementwise"],
         MovedPoint("pointwise", 2 * 4096 * 2, 2e-6, 1)),  # one number is no tensor
        (["aten::copy_", False, "[[2,32,64],[2,32,64],[]]", "float,c10::BFloat16,Scalar", 1, 1, 2.0, "void unrolled"],
         MovedPoint("cast_up", 4096 * 6, 2e-6, 1)),
        (["aten::copy_", False, "[[2,32,64],[2,32,64],[]]", "float,float,Scalar", 1, 1, 2.0, "void elementwise"],
         MovedPoint("copy_strided_wide", 4096 * 8, 2e-6, 1)),
        (["aten::fill_", False, "[[2,32,64],[]]", "float,Scalar", 1, 1, 2.0, "void vectorized"],
         MovedPoint("fill", 4096 * 4, 2e-6, 1)),
        (["aten::sum", True, "[[2,32,64],[],[],[]]", "c10::BFloat16,ScalarList,Scalar,", 1, 1, 2.0, "void reduce"],
         MovedPoint("reduce_backward", 4096 * 2, 2e-6, 1)),
    ],
)  # fmt: skip
def test_profiles_are_read(row: list[Any], expected: object) -> None:
    layer = ["aten::mm", False, "[[64,64],[64,128]]", BF16, 1, 1, 0.0, ""]
    points = read_points([profile([layer, row])])
    assert [point for kind in points for point in kind] == [expected]


@pytest.mark.parametrize(
    "row",
    [
        ["aten::mm", False, "[[64,64],[64,128]]", "float,float", 1, 1, 3.0, "gemm"],  # not in bf16
        ["aten::mm", True, "[[9,64],[64,128]]", BF16, 1, 1, 3.0, "nvjet"],  # no layer of the forward pass
        ["aten::bmm", False, "[[2,8,8],[2,8,8]]", BF16, 1, 1, 3.0, "nvjet"],
        ["aten::_grouped_mm", False, "[[63,32],[8,32,64],[8]]", BF16, 1, 1, 3.0, "cutlass"],  # few rows an expert
        ["aten::_cudnn_attention_forward", False, "[[9,4,32,16],[9,2,32,16]]", BF16, 1, 1, 3.0, "cudnn"],  # not the op
        ["aten::mul", False, "[[],[]]", "Scalar,Scalar", 1, 1, 3.0, "void vectorized"],  # no tensor
        ["aten::mul", False, "[[64]]", "float", 1, 0, 3.0, ""],  # no kernel
        ["", False, "", "", 0, 3, 5.0, "void stray"],
    ],
)
def test_rows_that_say_nothing_are_left_out(row: list[Any]) -> None:
    layer = ["aten::mm", False, "[[64,64],[64,128]]", BF16, 1, 1, 0.0, ""]
    assert not any(read_points([profile([layer, row])]))


@pytest.mark.parametrize("changed", [{"compiled": True}, {"recompute": "full"}])
def test_only_plain_steps_are_read(changed: dict[str, Any]) -> None:
    each = profile([["aten::mm", False, "[[64,64],[64,128]]", BF16, 2, 2, 8.0, "nvjet"]])
    assert read_points([each]).products
    assert not any(read_points([each._replace(case={**each.case, **changed})]))


def test_calls_that_drop_weights_have_a_mask_of_their_own() -> None:
    row = [
        "aten::_cudnn_attention_forward",
        False,
        "[[2,4,32,16],[2,2,32,16],[2,2,32,16]]",
        f"{BF16},c10::BFloat16",
        2,
        6,
        6.0,
        "philox",
    ]
    found = read_points([profile([row], {**LLAMA, "attention_dropout": 0.1})]).attention
    assert [point.mask for point in found] == ["dropout"]


def test_single_calls_are_read() -> None:
    attention = {"kernel": "cudnn", "direction": "forward", "mask": "causal", "batch": 2, "heads": 4, "qk_dim": 64,
                 "v_dim": 64, "length": 128, "seconds": 1e-5}  # fmt: skip
    timed = {**attention, "qk": 16, "v": 16, "kv_heads": 2, "keys": 256}
    product = {"direction": "dgrad", "m": 64, "n": 128, "k": 32, "seconds": 2e-6}
    found = read_single_calls([
        attention, {**attention, "kernel": "eager"}, {**attention, "v_dim": 32}, timed, product,
        {**product, "copies": 8}, {"kind": "copy_strided_across", "bytes": 512, "seconds": 3e-6},
    ])  # fmt: skip
    assert found.attention == [
        AttentionPoint("cudnn", "forward", "causal", 2, 4, kv_heads, dim, 128, keys, 1e-5, 1)
        for dim, kv_heads, keys in ((64, 4, 128), (48, 4, 128), (16, 2, 256))
    ]
    assert found.products == [ProductPoint("dgrad", 64, 128, 32, 2e-6, 4)]  # as four calls of a step
    assert found.grouped == [GroupedPoint("dgrad", 8, 64, 128, 32, 2e-6)]
    assert found.moved == [MovedPoint("copy_strided_across", 512, 3e-6, 1)]
    assert [len(kind) for kind in join_points(found, found)] == [2, 2, 6, 2]


def test_the_table_gemm_is_read() -> None:
    gemm = {"direction": "dgrad", "m": 64, "n": 128, "k": 32, "seconds": 2e-6, "dtype": "bf16", "mode": "burst"}
    rows = [gemm, {**gemm, "mode": "sustained"}, {**gemm, "dtype": "fp32"}]
    assert read_gemm_table(rows) == [ProductPoint("dgrad", 64, 128, 32, 2e-6, 1)]
