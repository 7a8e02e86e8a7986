"""The timeline of a step: where modules stand, in which order they run, and who waits for whom, by hand."""

from __future__ import annotations

import pytest

from flopcalc.api import bind
from flopcalc.core.workload.workload import make_workload
from flopcalc.prediction.build_work import make_work
from flopcalc.prediction.timeline import Place, Segment, Stack, find_place, order, run

LAYER = ("input_layernorm", "self_attn.q_proj", "self_attn", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")
TEXT = (
    Stack("model.embed_tokens", 0, ("",)),
    Stack("model.layers", 2, LAYER),
    Stack("model.norm", 0, ("",)),
    Stack("lm_head", 0, ("",)),
)
SEEING = (
    Stack("model.visual.patch_embed", 0, ("proj",)),
    Stack("model.visual.blocks", 3, ("norm1", "attn.qkv", "attn")),
    Stack("model.visual.merger", 0, ("mlp.0", "mlp.2")),
    Stack("model.language_model.embed_tokens", 0, ("",)),
    Stack("model.language_model.layers", 2, LAYER),
    Stack("model.language_model.norm", 0, ("",)),
    Stack("lm_head", 0, ("",)),
)


@pytest.mark.parametrize(
    ("module", "place"),
    [
        ("model.layers.*.input_layernorm", (1, 0)),
        ("model.layers.*.self_attn.q_proj", (1, 1)),
        ("model.layers.*.self_attn", (1, 2)),  # attention itself, between its products
        ("model.layers.*.self_attn.o_proj", (1, 3)),
        ("model.layers.*.mlp", (1, 4)),  # around others: with the first of them
        ("model.layers.*.mlp.act_fn", (1, 6)),  # beside the op list: at the layer's end
        ("model.layers.*.mlp.down_proj.lora_A", (1, 5)),
        ("model.layers.*", (1, 6)),  # the layer itself: its last addition
        ("model.layers", (1, 6)),
        ("model.embed_tokens", (0, 1)),
        ("model.norm", (2, 1)),
        ("lm_head", (3, 1)),
        ("", (4, 0)),  # the loss
        ("model", (0.5, 0)),  # masks, before the layers
        ("model.rotary_emb", (0.5, 0)),
        ("model.layers_of_another", (0.5, 0)),  # a name that only begins alike
        ("adapter.inner", (-0.5, 0)),  # beside everything
    ],
)
def test_places_of_a_text_model(module: str, place: tuple[float, float]) -> None:
    assert find_place(module, "language", TEXT) == place


@pytest.mark.parametrize(
    ("module", "group", "place"),
    [
        ("model", "vision", (0.5, 0)),
        ("model", "language", (3.5, 0)),  # around both: before the language
        ("model.visual", "vision", (0.5, 0)),
        ("model.visual.rotary_pos_emb", "vision", (0.5, 0)),
        ("model.visual.patch_embed", "vision", (0, 1)),
        ("model.visual.patch_embed.proj", "vision", (0, 0)),
        ("model.visual.blocks.*.attn", "vision", (1, 2)),
        ("model.visual.merger.mlp.2", "projector", (2, 1)),
        ("model.visual.merger.mlp", "projector", (2, 0)),
        ("model.language_model", "language", (3.5, 0)),
        ("model.language_model.rotary_emb", "language", (3.5, 0)),
        ("model.language_model.layers.*.mlp.gate_proj", "language", (4, 4)),
        ("model.language_model.norm", "language", (5, 1)),
        ("lm_head", "language", (6, 1)),
        ("", "language", (7, 0)),
    ],
)
def test_places_where_there_are_images(module: str, group: str, place: tuple[float, float]) -> None:
    assert find_place(module, group, SEEING) == place


def test_the_innermost_stack_is_the_modules_own() -> None:
    nested = (Stack("model", 0, ("wte",)), Stack("model.h", 2, ("attn",)), Stack("model.h.*.experts", 0, ("up",)))
    assert find_place("model.h.*.attn", "language", nested) == (1, 0)
    assert find_place("model.h.*.experts.up", "language", nested) == (2, 0)
    assert find_place("model.wte", "language", nested) == (0, 0)


def test_a_real_model_is_in_order() -> None:
    work = make_work(bind("qwen2-vl-2b"), make_workload(1, 512, image_grid_thw=[[1, 16, 16]]))
    names = (
        "model.visual", "model.visual.patch_embed.proj", "model.visual.blocks.*.norm1", "model.visual.blocks.*.mlp.fc1",
        "model.visual.merger.mlp.0", "model.language_model.embed_tokens", "model.language_model",
        "model.language_model.layers.*.self_attn.q_proj", "model.language_model.layers.*.mlp.down_proj",
        "model.language_model.norm", "lm_head", "",
    )  # fmt: skip
    dispatched = {each.module for each in work.hosted}
    assert set(names) <= dispatched
    groups = {each.module: each.group for each in work.hosted}
    # What makes the tower's positions is before its layers, after the patches that it does not need.
    places = [find_place(name, groups[name], work.stacks) for name in names]
    assert sorted(places[1:]) == places[1:]
    assert places[1] < places[0] < places[2]


A, B, C = Segment(2.0, 4.0, 6.0), Segment(8.0, 10.0, 12.0), Segment(1.0, 3.0, 5.0, 2.0)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ({}, []),
        ({Place(0, 2.0): B, Place(0, 0.0): A}, [A, B]),  # by their stage, whole
        ({Place(0, 0.5): C, Place(0, 4.0): A, Place(0, -0.5): B}, [B, C, A]),  # before stages, and the loss
        # Layers one after the other, modules in their order inside each.
        (
            {Place(0, 1.0, 4.0): B, Place(0, 1.0, 0.0): A},
            [Segment(1.0, 2.0, 3.0), Segment(4.0, 5.0, 6.0)] * 2,
        ),
        # The backward pass goes through stages and modules the other way, the optimizer comes last.
        (
            {Place(2): C, Place(1, -1.0, -0.0): A, Place(1, -1.0, -4.0): B, Place(1, -2.0): C, Place(0, 2.0): B},
            [B, C, Segment(4.0, 5.0, 6.0), Segment(1.0, 2.0, 3.0), Segment(4.0, 5.0, 6.0), Segment(1.0, 2.0, 3.0), C],
        ),
        # One of two layers reads: its kernels are sent, then it waits, then comes the rest of its host's work.
        (
            {Place(0, 1.0): A._replace(waits=1.0)},
            [Segment(0.5, 2.0, 3.0), Segment(0.5, waits=1.0), Segment(1.0, 2.0, 3.0)],
        ),
        # Both, twice each: a layer waits once, for what is queued by then.
        (
            {Place(0, 1.0): A._replace(waits=4.0)},
            [Segment(0.5, 2.0, 3.0), Segment(0.5, waits=1.0)] * 2,
        ),
    ],
)
def test_order(found: dict[Place, Segment], expected: list[Segment]) -> None:
    assert [segment for _, _, segment in order(found, TEXT)] == expected


def test_order_keeps_the_sums() -> None:
    found = {Place(0, 0.5): C, Place(0, 1.0): A._replace(waits=1.0), Place(1, -1.0): B, Place(1, -0.0): C}
    for i in range(3):
        assert sum(each[i] for _, _, each in order(found, TEXT)) == sum(each[i] for each in found.values())


@pytest.mark.parametrize(
    ("segments", "pause_s", "wake_s", "seconds"),
    [
        ([], 0.0, 0.0, 0.0),
        ([], 5.0, 1.0, 0.0),
        ([Segment(2.0)], 0.0, 0.0, 2.0),  # no kernel
        ([Segment(2.0, 1.0, 1), Segment(3.0, 1.0, 1)], 0.0, 0.0, 5.0),  # the host bounds: its sum
        ([Segment(1.0, 2.0, 1), Segment(1.0, 3.0, 1)], 0.0, 0.0, 5.0),  # the device bounds: its sum
        # Small kernels, then large ones. Who waits before the small ones has both after each other.
        ([Segment(4.0, 1.0, 1), Segment(1.0, 4.0, 1)], 0.0, 0.0, 5.0),
        ([Segment(4.0, 1.0, 1, 1), Segment(1.0, 4.0, 1)], 0.0, 0.0, 8.0),
        # An optimizer that waits at its start: the host, then the device, nothing beside each other.
        ([Segment(2.0, 0.0, 0, 1), Segment(0.0, 3.0, 1)], 0.0, 0.0, 5.0),
        ([Segment(2.0, 0.0, 0), Segment(0.0, 3.0, 1)], 0.0, 0.0, 3.0),  # without the wait the two overlap
        ([Segment(2.0, 3.0, 1, 1)], 0.0, 0.0, 3.0),  # the first kernel starts while the host goes on
        # A device that the host waited for takes a while to be busy; one that it did not, none.
        ([Segment(2.0, 3.0, 1, 1)], 0.0, 0.5, 3.5),
        ([Segment(2.0, 3.0, 1)], 0.0, 0.5, 3.0),
        ([Segment(1.0, 1.0, 1, 1), Segment(1.0, 5.0, 1, 1)], 0.0, 0.5, 7.0),
        # A pause is no part of the step, which ends when the host is through; the device goes on meanwhile.
        ([Segment(1.0, 3.0, 1)], 10.0, 0.0, 1.0),
        ([Segment(1.0, 3.0, 1, 1)], 10.0, 0.0, 1.0),  # it has caught up before the next step waits
        ([Segment(1.0, 3.0, 1, 1)], 1.0, 0.0, 2.0),  # it has not: one second is left
        ([Segment(1.0, 3.0, 1), Segment(1.0, waits=1)], 10.0, 0.0, 4.0),  # a wait inside is part of it
    ],
)
def test_run(segments: list[Segment], pause_s: float, wake_s: float, seconds: float) -> None:
    assert run(segments, pause_s, wake_s) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("launches", "seconds"),
    [
        (256, 0.0),  # 1,024 in all: the host is through at once
        (512, 1.0),  # before the fourth, 1,536 would wait: the first is done after a second
        (600, 2.0),
        (1025, 3.0),  # one at a time
    ],
)
def test_the_host_is_no_more_than_a_queue_ahead(launches: float, seconds: float) -> None:
    assert run([Segment(0.0, 1.0, launches)] * 4, pause_s=100.0) == pytest.approx(seconds)


def test_a_full_queue_does_not_slow_the_device() -> None:
    assert run([Segment(0.25, 1.0, 2000)] * 8) == pytest.approx(8.0)
