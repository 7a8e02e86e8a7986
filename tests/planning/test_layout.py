"""Layouts: the rules that they keep, what is listed, and how layers are split over a pipeline."""

from __future__ import annotations

import pytest

from flopcalc.planning.layout import Layout, Outline, find_problem, list_layouts, split_layers

MODEL = Outline(16, 1024, 2048, 16, 1, 1, 2.0, 2048.0, 16)


@pytest.mark.parametrize(
    ("layout", "rule"),
    [
        (Layout(dp=4, tp=2), None),
        (Layout(dp=4), "devices"),
        (Layout(tp=3, dp=1), "devices"),
        (Layout(pp=8, virtual=3), "layers"),
        (Layout(dp=8, ep=2), "experts"),
        (Layout(dp=8, micro_batch=3), "batch"),
        (Layout(pp=8, virtual=2, micro_batch=16), "virtual"),
        (Layout(tp=8, zero=1), "zero"),
        (Layout(cp=8, zero=1), None),
    ],
)
def test_rules(layout: Layout, rule: str | None) -> None:
    found = find_problem(layout, MODEL, 8, 64)
    assert (found and found[0]) == rule


def test_the_search_lists_what_is_fixed() -> None:
    layouts = list(list_layouts(MODEL, 64, 64, 8, {"tp": (2, 4), "zero": (1,), "recompute": ("none",)}))
    assert {layout.tp for layout in layouts} == {2, 4}
    assert {layout.zero for layout in layouts} == {1}
    assert {layout.recompute for layout in layouts} == {"none"}
    assert all(layout.devices == 64 for layout in layouts)
    assert len(layouts) == len(set(layouts))


@pytest.mark.parametrize(
    ("layers", "pp", "virtual", "split"),
    [
        (16, 1, 1, [16]),
        (16, 4, 1, [4] * 4),
        (9, 7, 1, [1, 1, 2, 2, 1, 1, 1]),
        (10, 4, 2, [3, 2, 2, 3]),
        (126, 16, 1, [7, *[8] * 14, 7]),
        (61, 16, 1, [3, *[4] * 13, 3, 3]),
        (96, 8, 3, [12] * 8),
    ],
)
def test_uneven_layers_spare_the_ends(layers: int, pp: int, virtual: int, split: list[int]) -> None:
    found = split_layers((0,) * layers, pp, virtual)
    assert [sum(own) for own in found] == split
    assert sum(split) == layers


@pytest.mark.parametrize(
    ("pp", "virtual", "split"),
    [  # 61 layers and one of multi-token prediction, as Megatron-Bridge lays DeepSeek-V3 out
        (16, 1, [*[4] * 15, 2]),
        (8, 1, [*[8] * 7, 6]),
        (4, 4, [16, 16, 16, 14]),
        (2, 1, [31, 31]),
        (1, 1, [62]),
    ],
)
def test_a_second_head_takes_a_layers_place(pp: int, virtual: int, split: list[int]) -> None:
    assert [sum(own) for own in split_layers((0,) * 62, pp, virtual, losses=2)] == split


def test_layers_of_several_kinds_stay_in_order() -> None:
    kinds = (0, 1, 1, 1)  # a dense layer, then layers of experts
    assert split_layers(kinds, 2) == ((1, 1), (0, 2))
    assert split_layers(kinds, 2, 2) == ((1, 1), (0, 2))
    assert split_layers((0, 0, 1, 1), 2, 2) == ((1, 1), (1, 1))


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        (Layout(), "dp1 zero0 mb1"),
        (Layout(2, 4, 8, 3, 2, 4, 1, 2, "full"), "tp4 pp8 v3 cp2 ep4 dp2 zero1 mb2 recompute full"),
    ],
)
def test_layouts_in_words(layout: Layout, text: str) -> None:
    assert str(layout) == text
