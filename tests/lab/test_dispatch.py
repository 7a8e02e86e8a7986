"""The trace of dispatched operators: a module by hand, and recorded types against sizes they were not made from."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
import torch
from tiers import mark_heavy

from flopcalc.core.model.config import load_config
from flopcalc.measure.hf.examples import find_example, make_estimator
from lab.operators import __main__ as command
from lab.operators import comparing, configs
from lab.operators.autocast import Autocast, below, narrow
from lab.operators.comparing import compare
from lab.operators.dispatch import trace_operators


class Gate(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(4, 6, bias=False, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.up(x).float() * x.new_ones(6, dtype=torch.float32)).sum()


def test_a_module_by_hand() -> None:
    model = Gate()
    x = torch.zeros(3, 4, dtype=torch.bfloat16)
    found = trace_operators(model, lambda: model(x))
    assert [(e.module, e.direction, e.kind, e.reads, e.writes) for e in found.events if e.kind != "node"][:8] == [
        ("", "forward", "module", (), ()),
        ("up", "forward", "module", (), ()),
        ("up", "forward", "view", (), ()),
        ("up", "forward", "product", (), ()),
        ("", "forward", "cast", (("x", 18),), (("f", 18),)),
        ("", "forward", "fill", (), (("f", 6),)),
        ("", "forward", "pointwise_strided_wide", (("f", 18), ("f", 6)), (("f", 18),)),
        ("", "forward", "reduce", (("f", 18),), ()),
    ]
    back = [(e.module, e.name) for e in found.events if e.direction == "backward" and e.kind == "product"]
    assert back == [("up", "mm")]  # the input wants no gradient
    assert {(kept.letter, kept.elements, kept.savers) for kept in found.kept} == {
        ("x", 12, ("up",)),
        ("f", 6, ("",)),
    }


class Call(torch.nn.Module):
    """A module that calls a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.table = torch.nn.Embedding(5, 6)

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


X, F, ROW = torch.ones(2, 3, dtype=torch.bfloat16), torch.ones(2, 3), torch.ones(3)
EMPTY, PLACES = torch.ones(0, 3), torch.tensor([0, 1, 1])
HEADS, MASK = torch.ones(1, 2, 4, 8), torch.ones(4, 4, dtype=torch.bool)
ROWS, EXPERTS = torch.ones(16, 16, dtype=torch.bfloat16), torch.ones(2, 16, 16, dtype=torch.bfloat16)
ENDS = torch.tensor([8, 16], dtype=torch.int32)
SQUARE = torch.ones(3, 3)


def attend(given: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Looked up when it is called, as HF's code does: a trace stands in its place."""
    return torch.nn.functional.scaled_dot_product_attention(given, given, given, attn_mask=mask)


def normalize(given: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.layer_norm(given, given.shape[-1:])


@pytest.mark.parametrize(
    ("function", "kinds"),
    [
        # Elementwise: alike in memory or not, of one floating dtype or two.
        (lambda: X * X, ["pointwise"]),
        (lambda: X * X[0], ["view", "pointwise_strided"]),
        (lambda: F * ROW, ["pointwise_strided_wide"]),
        (lambda: X * F, ["pointwise_mixed"]),
        (lambda: X * ROW, ["pointwise_strided_mixed"]),
        (lambda: X * X[0, 0].float(), ["view", "view", "cast", "pointwise"]),  # one number is no tensor to read
        (lambda: F.masked_fill(F > 0, 1.0), ["pointwise", "pointwise"]),
        # Rows beside columns: neighbours in one are far apart in the other.
        (lambda: SQUARE + SQUARE.t(), ["view", "pointwise_strided_across"]),
        (lambda: SQUARE.t().contiguous(), ["view", "copy_strided_across"]),
        (lambda: SQUARE.t() * 2, ["view", "pointwise"]),
        (lambda: SQUARE + SQUARE[:, :1].expand(3, 3), ["view", "view", "pointwise_strided_wide"]),
        (lambda: attend(HEADS, None).transpose(1, 2).clone(), ["attention", "view", "copy"]),
        # Kernels that take rows in order: what lies otherwise is copied for them.
        (lambda: normalize(SQUARE), ["norm"]),
        (lambda: normalize(SQUARE.t()), ["view", "copy_strided_across", "norm"]),
        (lambda: normalize(F[:, :2]), ["view", "copy_strided", "norm"]),
        (lambda: SQUARE.t().softmax(-1), ["view", "copy_strided_across", "softmax"]),
        (lambda: torch.nn.functional.dropout(F, 0.5), ["random"]),
        (lambda: torch.nn.functional.dropout(F, 0.5, training=False), []),
        # Caches: the first keys come behind nothing.
        (lambda: torch.cat((EMPTY, F)), ["cat_one"]),
        (lambda: torch.cat((X, X)), ["cat"]),
        (lambda: torch.cat((X.t(), X.t())), ["view", "view", "cat_strided"]),
        (lambda: torch.cat((F.t(), F.t())), ["view", "view", "cat_strided_wide"]),
        (lambda: attend(HEADS, None), ["attention"]),
        (lambda: attend(HEADS, MASK), ["attention_masked"]),
        (lambda: torch.mm(ROWS, ROWS), ["product"]),
        (lambda: torch._grouped_mm(ROWS, EXPERTS, offs=ENDS), ["product_grouped"]),
        # Where the host waits for a value, or for a copy of its own.
        (lambda: ROW.tolist(), ["read"]),
        (lambda: PLACES.max().item(), ["reduce", "read"]),
        (lambda: torch.tensor(3.0), ["read"]),
        (lambda: torch.tensor([3, 4]), ["read"]),
        (lambda: torch.tensor([]), ["view"]),  # nothing to copy
        (lambda: torch.masked_select(ROW, PLACES > 0), ["pointwise", "gather", "read"]),
        (lambda: torch.unique_consecutive(PLACES), ["sort", "read"]),
        (lambda: ROW[PLACES > 0], ["pointwise", "gather", "read"]),
        (lambda: ROW[PLACES], ["gather"]),
        (lambda: ROW.index_put((PLACES > 0,), ROW[0]), ["pointwise", "view", "scatter"]),  # filled in
        (lambda: ROW.index_put((PLACES > 0,), torch.ones(2)), ["pointwise", "fill", "scatter", "read"]),
        (lambda: torch.repeat_interleave(ROW, 2), None),
    ],
)
def test_kinds_of_one_call(function: Callable[[], Any], kinds: list[str] | None) -> None:
    def forward() -> None:
        model()

    model = Call(function)
    found = [event.kind for event in trace_operators(model, forward).events]
    if kinds is None:
        assert "read" not in found  # the size is known
    else:
        assert found == ["module", *kinds]


@pytest.mark.parametrize(("mask", "kind"), [(None, "attention"), (MASK[:3, :3], "attention_masked")])
def test_a_call_of_attention_has_one_kind_of_gradient(mask: torch.Tensor | None, kind: str) -> None:
    model = Call(lambda: attend(model.table(PLACES).view(1, 1, 3, 6), mask).sum())
    found = trace_operators(model, model).events
    seen = [(event.direction, event.kind) for event in found if event.kind.startswith("attention")]
    assert seen == [("forward", kind), ("backward", "attention")]


def test_a_norm_copies_what_lies_across_on_the_way_back_too() -> None:
    model = Call(lambda: normalize(model.table(PLACES).t()).sum())
    found = [(event.direction, event.kind) for event in trace_operators(model, model).events]
    assert found.count(("forward", "copy_strided_across")) == 1
    back = [kind for direction, kind in found if direction == "backward"]
    assert back[back.index("norm_backward") - 1] == "copy_strided_across"


def test_dropout_keeps_a_mask_of_bytes() -> None:
    model = Call(lambda: torch.nn.functional.dropout(model.table(PLACES), 0.5).sum())
    found = trace_operators(model, model)
    assert [event.name for event in found.events if "dropout" in event.name] == [
        "native_dropout",
        "native_dropout_backward",
    ]
    assert ("o", 18) in {(kept.letter, kept.elements) for kept in found.kept}


def test_gradients_that_are_read_or_added_by_index() -> None:
    """Where images enter the text, the backward pass asks how many there are."""
    model = Call(lambda: torch.ones(3, 6).masked_scatter(MASK[:3, :1], model.table(PLACES)).sum())
    found = trace_operators(model, model).events
    back = [(event.name, event.kind) for event in found if event.direction == "backward"]
    scatter = [each for each in back if each[0] == "masked_scatter_backward"]
    assert scatter == [("masked_scatter_backward", "scatter"), ("masked_scatter_backward", "read")]
    assert ("embedding_dense_backward", "embedding_backward") in back
    assert not [event for event in found if event.direction == "forward" and event.kind == "read"]


def test_lists_are_only_watched_while_a_trace_runs() -> None:
    functional = torch.nn.functional
    before = torch.Tensor.tolist, functional.scaled_dot_product_attention, functional.dropout
    model = Call(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trace_operators(model, model)
    assert (torch.Tensor.tolist, functional.scaled_dot_product_attention, functional.dropout) == before


def test_no_loss_no_backward() -> None:
    model = torch.nn.Linear(4, 6)

    def forward() -> None:
        model(torch.zeros(2, 4))

    found = trace_operators(model, forward)
    assert found.kept == []
    assert {event.direction for event in found.events} == {"forward"}


LLAMA = {
    "model_type": "llama", "hidden_size": 96, "intermediate_size": 200, "num_attention_heads": 6,
    "num_key_value_heads": 2, "num_hidden_layers": 3, "vocab_size": 131,
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # transformers and torch advise on training, which this is not
@pytest.mark.parametrize(
    ("phase", "attention", "workload"),
    [
        ("train", "sdpa", {"batch": 3, "seq": 17}),
        ("train", "eager", {"batch": 3, "seq": 17}),
        ("forward", "sdpa", {"batch": 2, "seq": 5}),
        ("prefill", "sdpa", {"batch": 2, "seq": 9}),
        ("decode", "sdpa", {"batch": 2, "seq": 1, "context": 21}),
    ],
)
def test_llama_of_other_sizes(phase: str, attention: str, workload: dict[str, int]) -> None:
    assert compare(find_example("llama"), LLAMA, phase, attention, workload) == {}


FEWER_HEADS = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}  # its heads get five times longer


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("phase", "factors"), [("train", (3, 1, 2, 4)), ("prefill", (6, 2, 5, 4))])
@pytest.mark.parametrize(
    ("preset", "sizes"),
    [
        ("cerebras-gpt-590m", {}),
        ("gpt2", {}),
        ("starcoder2-3b", {}),
        ("starcoder2-7b", {}),
        ("japanese-gpt-neox-3.6b", {}),
        ("phi-1.5", {}),
        ("phi-2", FEWER_HEADS),
        ("llama-2-7b", {}),
    ],
)
def test_switches_of_published_models(preset: str, sizes: dict[str, int], phase: str, factors: tuple[int, ...]) -> None:
    """What is read is what HF dispatches with a published config's activation, dropouts, rotation and heads of keys."""
    config = load_config(preset).config
    example = find_example(str(config["model_type"]))
    asked = configs.describe(make_estimator(example, config))
    made = [
        configs.make_tiny(example, {**tiny, **sizes}, config)
        for tiny in [*example.configs, *configs.list_stand_ins(example, config)]
    ]
    (tiny, *_) = [each for each in made if configs.describe(make_estimator(example, each)) == asked]
    tiny = configs.set_window(configs.resize(tiny, *factors), 4096)
    assert compare(example, tiny, phase, "sdpa", {"batch": 3, "seq": 11}) == {}


@pytest.mark.filterwarnings("ignore")
def test_experts_of_other_sizes() -> None:
    example = find_example("mixtral")
    config = configs.resize(example.configs[0], 3, 3, 5, 4)
    config = configs.set_window(config, 4096)
    assert compare(example, config, "train", "sdpa", {"batch": 2, "seq": 11}) == {}


@pytest.mark.filterwarnings("ignore")
def test_images_of_other_sizes() -> None:
    """Integers that say where an image's patches lie are recorded roughly; all else is exact."""
    example = find_example("qwen2_vl")
    config = configs.resize(configs.deepen(example.configs[1]), 3, 3, 5, 4)
    workload = {"batch": 3, "seq": 25, "images": [[1, 4, 8]]}
    found = compare(example, config, "train", "sdpa", workload)
    for traced, read in found.values():
        assert sum(read[:2]) == pytest.approx(sum(traced[:2]), rel=0.02, abs=10_000)
        assert read[2] == pytest.approx(traced[2], rel=0.05, abs=20)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("model_type", "attention", "workload", "gap"),
    mark_heavy(
        [
            ("llama", "sdpa autocast", {"batch": 2, "seq": 11}, 0),
            ("bert", "sdpa", {"batch": 2, "seq": 11}, 0.003),
            ("t5", "sdpa", {"batch": 2, "seq": 11, "decoder_seq": 5}, 0),
            ("whisper", "sdpa", {"batch": 3, "clips": [22], "decoder_seq": 9}, 0.01),
            ("vit", "sdpa", {"batch": 3, "images": [[1, 3, 3]]}, 0),
        ],
        [("t5", "sdpa", {"batch": 2, "seq": 11, "decoder_seq": 5}, 0)],
    ),
)
def test_steps_of_other_kinds(model_type: str, attention: str, workload: dict[str, Any], gap: float) -> None:
    """Under autocast, of encoders, with a decoder, with sound, of images alone: at sizes that nothing was made from."""
    example = find_example(model_type)
    (config, *_), _ = next(configs.list_variants(example))
    other = configs.set_window(configs.resize(config, 6, 2, 5, 4), 4096)
    traced, read, notes = comparing.add_up_both(example, other, "train", attention, workload)
    assert max(map(abs, comparing.find_gaps(traced, read))) <= gap
    assert not notes


@pytest.mark.parametrize(
    ("run", "dtype"),
    [
        (lambda wide, _: torch.nn.functional.linear(wide, wide), torch.bfloat16),
        (lambda wide, _: wide @ wide, torch.bfloat16),
        (lambda wide, _: torch.rsqrt(wide), torch.float32),
        (lambda _, narrow: narrow.pow(2), torch.float32),
        (lambda _, narrow: narrow.softmax(-1), torch.float32),
        (lambda _, narrow: torch.nn.functional.layer_norm(narrow, (4,)), torch.float32),
        (lambda _, narrow: narrow.sum(), torch.float32),
        (lambda _, narrow: narrow * narrow, torch.bfloat16),
        (lambda wide, narrow: wide + narrow, torch.float32),
        (lambda wide, narrow: torch.cat([wide, narrow]), torch.float32),
    ],
)
def test_autocast_casts_what_it_does_on_a_gpu(run: Callable[..., torch.Tensor], dtype: torch.dtype) -> None:
    wide = torch.ones(4, 4)
    with Autocast():
        assert run(wide, wide.bfloat16()).dtype is dtype


def test_autocast_leaves_the_softmax_of_a_loss_in_the_format_of_its_scores() -> None:
    scores, targets = torch.randn(3, 7).bfloat16(), torch.tensor([0, 6, 2])
    with Autocast():
        loss = torch.nn.CrossEntropyLoss()(scores, targets)
    assert loss.dtype is torch.float32
    assert loss == torch.nn.functional.nll_loss(scores.log_softmax(1).float(), targets)


def test_autocast_sees_one_of_torchs_own_operators_as_a_whole() -> None:
    one = torch.ones(2, 2)
    with Autocast():
        with below():
            assert (one @ one).dtype == torch.float32
        assert (one @ one).dtype == torch.bfloat16


def test_autocast_casts_a_weight_once() -> None:
    weight = torch.ones(4, 4, requires_grad=True)
    with Autocast() as running:
        assert running.narrow(weight) is running.narrow(weight)
        assert narrow((weight,)) == [running.narrow(weight)]
    assert narrow((weight,)) == [weight]


def test_how_far_a_file_lies_from_a_trace() -> None:
    traced = {("forward", "copy"): [60, 40, 4], ("forward", "view"): [0, 0, 4]}
    read = {("forward", "copy"): [60, 45, 6]}
    assert comparing.find_gaps(traced, read) == pytest.approx((0.05, -0.25))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("limit", "model_type", "code", "shown"),
    [
        (0.15, "gpt_neox", 0, "train    sdpa                 bytes -0.0%, calls -0.1%"),
        (0.0, "gpt_neox", 1, "TOO FAR"),
        (0.15, "gpt_nix", 1, "nothing was compared: is there model_specs/examples/gpt_nix.toml?"),
    ],
)
def test_check_tells_how_far(
    limit: float,
    model_type: str,
    code: int,
    shown: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    variants = comparing.list_variants
    monkeypatch.setattr(comparing, "LIMIT", limit)
    monkeypatch.setattr(comparing, "list_variants", lambda example: islice(variants(example), 1))
    monkeypatch.setattr(comparing, "list_checks", lambda _: [("train", {"batch": 2, "seq": 7})])
    monkeypatch.setattr(sys, "argv", ["operators", "--check", model_type])
    assert command.main() == code
    assert shown in capsys.readouterr().out


def test_a_number_for_each_layer_becomes_one() -> None:
    """HunYuan's configs may list how many experts each layer takes; a longer model would need a longer list."""
    assert configs.deepen({"num_hidden_layers": 3, "moe_topk": [2, 3, 1]}) == {"num_hidden_layers": 4, "moe_topk": 2}
