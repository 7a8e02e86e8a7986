"""The trace of dispatched operators: a module by hand, and recorded types against sizes they were not made from."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "truth"))

import record_operators

from flopcalc.measure.dispatch import trace_operators
from flopcalc.measure.examples import find_example


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
        ("train", "sdpa", {"batch": 3, "seq": 37}),
        ("train", "eager", {"batch": 3, "seq": 37}),
        ("forward", "sdpa", {"batch": 2, "seq": 5}),
        ("prefill", "sdpa", {"batch": 2, "seq": 9}),
        ("decode", "sdpa", {"batch": 2, "seq": 1, "context": 21}),
    ],
)
def test_llama_of_other_sizes(phase: str, attention: str, workload: dict[str, int]) -> None:
    assert record_operators.compare(find_example("llama"), LLAMA, phase, attention, workload) == {}


@pytest.mark.filterwarnings("ignore")
def test_experts_of_other_sizes() -> None:
    example = find_example("mixtral")
    config = record_operators.resize(example.configs[0], 3, 3, 5, 4)
    config = record_operators.set_window(config, 4096)
    assert record_operators.compare(example, config, "train", "sdpa", {"batch": 2, "seq": 11}) == {}


@pytest.mark.filterwarnings("ignore")
def test_images_of_other_sizes() -> None:
    """Integers that say where an image's patches lie are recorded roughly; all else is exact."""
    example = find_example("qwen2_vl")
    config = record_operators.resize(record_operators.deepen(example.configs[1]), 3, 3, 5, 4)
    workload = {"batch": 3, "seq": 25, "images": [[1, 4, 8]]}
    found = record_operators.compare(example, config, "train", "sdpa", workload)
    for traced, read in found.values():
        assert sum(read[:2]) == pytest.approx(sum(traced[:2]), rel=0.02, abs=10_000)
        assert read[2] == pytest.approx(traced[2], rel=0.05, abs=20)


def test_how_far_a_file_lies_from_a_trace() -> None:
    traced = {("forward", "copy"): [60, 40, 4], ("forward", "view"): [0, 0, 4]}
    read = {("forward", "copy"): [60, 45, 6]}
    assert record_operators.find_gaps(traced, read) == pytest.approx((0.05, -0.25))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("limit", "model_type", "code", "shown"),
    [
        (0.15, "gpt_neox", 0, "train    sdpa          bytes +0.0%, calls -0.1%"),
        (0.0, "gpt_neox", 1, "TOO FAR"),
        (0.15, "gpt_nix", 1, "nothing was compared: is there model_specs/examples/gpt_nix.toml?"),
    ],
)
def test_check_tells_how_far(
    limit: float, model_type: str, code: int, shown: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(record_operators, "LIMIT", limit)
    monkeypatch.setattr(sys, "argv", ["record_operators.py", "--check", model_type])
    with pytest.raises(SystemExit) as left:
        record_operators.main()
    assert left.value.code == code
    assert shown in capsys.readouterr().out
