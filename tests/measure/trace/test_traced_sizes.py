"""Traced modules at sizes that the example did not have: counted exactly, or refused, never scaled."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from flopcalc import bind
from flopcalc.base.errors import FlopcalcError, WorkloadError
from flopcalc.measure.counters.flop_counter import count_flops


class UNet(nn.Module):
    """Convolutions, a stride, and attention over what is left: height and width count in three powers."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.mix = nn.MultiheadAttention(8, 2, batch_first=True)
        self.up = nn.ConvTranspose2d(8, 3, 4, stride=2, padding=1)

    def forward(self, sample: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        x = self.down(sample) + steps[:, None, None, None]
        flat = x.flatten(2).transpose(1, 2)
        flat = self.mix(flat, flat, flat, need_weights=True)[0]
        return self.up(flat.transpose(1, 2).reshape(x.shape))


class TwoLengths(nn.Module):
    """A text and what it attends to."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(8, 8), nn.Linear(6, 8)

    def forward(self, hidden: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        keys = self.key(context)
        return (self.query(hidden) @ keys.transpose(1, 2)).softmax(-1) @ keys


class Classifier(nn.Module):
    """A batch and no length."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 4, stride=4), nn.Flatten(), nn.Linear(4 * 4, 5))

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return self.body(pixel_values)


class NanoGpt(nn.Module):
    """As nanoGPT does: views of targets, and an assertion on the length."""

    def __init__(self, block_size: int = 128) -> None:
        super().__init__()
        self.block_size = block_size
        self.table, self.head = nn.Embedding(50, 8), nn.Linear(8, 50)

    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> Any:
        assert idx.shape[1] <= self.block_size
        x = self.table(idx)
        x = (x @ x.transpose(1, 2)).softmax(-1) @ x
        logits = self.head(x)
        return {"loss": nn.functional.cross_entropy(logits.view(-1, 50), targets.view(-1))}


def count(module: nn.Module, batch: dict[str, torch.Tensor]) -> int:
    """The same step under the operator counter, for real."""

    def step() -> None:
        out = module(**batch)
        (out["loss"] if isinstance(out, dict) else out.sum()).backward()

    return count_flops(module.train(), step).total


def make_unet(b: int, h: int, w: int) -> dict[str, torch.Tensor]:
    return {"sample": torch.randn(b, 3, h, w), "steps": torch.randn(b)}


def make_two(b: int, n: int, m: int) -> dict[str, torch.Tensor]:
    return {"hidden": torch.randn(b, n, 8), "context": torch.randn(b, m, 6)}


def make_images(b: int, _n: int, _m: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(b, 3, 8, 8)}


def make_text(b: int, n: int, _m: int) -> dict[str, torch.Tensor]:
    return {"idx": torch.randint(0, 50, (b, n)), "targets": torch.randint(0, 50, (b, n))}


UNET_DIMS = {"sample": ("b", None, "h", "w"), "steps": ("b",)}
TWO_DIMS = {"hidden": ("b", "n", None), "context": ("b", "m", None)}
CASES: dict[str, tuple[Callable[[], nn.Module], Any, tuple[int, int, int], Any]] = {
    "unet": (UNet, make_unet, (2, 8, 12), UNET_DIMS),
    "two lengths": (TwoLengths, make_two, (2, 5, 7), TWO_DIMS),
    "batch only": (Classifier, make_images, (2, 8, 8), None),
    "nanoGPT": (NanoGpt, make_text, (2, 9, 0), None),
}


@pytest.mark.parametrize("name", CASES)
def test_another_size_is_counted_exactly(name: str) -> None:
    make_module, make_batch, sizes, dims = CASES[name]
    module = make_module()
    estimator = bind(module, make_batch(*sizes), dims=dims)
    for other in (sizes, (3, 2 * sizes[1], sizes[2]), (1, sizes[1], sizes[2] + 4)):
        batch = make_batch(*other)
        assert estimator.estimate_batch(batch).total == count(module, batch), other
    assert all(not tensor.is_meta for tensor in module.parameters())


@pytest.mark.heavy
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", CASES)
def test_random_sizes_are_counted_exactly_or_refused(name: str, seed: int) -> None:
    chance = random.Random(f"{name} {seed}")
    make_module, make_batch, sizes, dims = CASES[name]
    module = make_module()
    estimator = bind(module, make_batch(*sizes), dims=dims)
    for _ in range(4):
        batch = make_batch(chance.randint(1, 6), 4 * chance.randint(1, 40), 4 * chance.randint(1, 9))
        try:
            found = estimator.estimate_batch(batch).total
        except FlopcalcError:
            continue
        assert found == count(module, batch)


def test_a_fixed_axis_without_the_module_is_refused() -> None:
    estimator: Any = bind(UNet(), make_unet(2, 8, 12), dims=UNET_DIMS)
    estimator._retrace = None
    with pytest.raises(WorkloadError, match="sample: axis 2 is 16, and was traced at 8: bind the module again"):
        estimator.estimate_batch(make_unet(2, 16, 12))
    with pytest.raises(WorkloadError, match="sample has 3 axes, and was traced with 4"):
        estimator.estimate_batch({"sample": torch.randn(2, 3, 8), "steps": torch.randn(2)})


def test_a_module_without_a_length_is_called_by_its_batch() -> None:
    module = Classifier()
    estimator = bind(module, make_images(2, 0, 0))
    assert estimator(5, 1).total == count(module, make_images(5, 0, 0))
    with pytest.raises(WorkloadError, match="has a batch and no length"):
        estimator(5, 7)


def test_lengths_beyond_the_longest_are_refused() -> None:
    found = bind(NanoGpt(128), make_text(2, 9, 0))
    assert found(1, 128).total > 0
    with pytest.raises(WorkloadError, match=r"length 129 is beyond .* 128"):
        found(1, 129)
    short = bind(NanoGpt(512), make_text(2, 9, 0), max_length=20)
    with pytest.raises(WorkloadError, match=r"length 21 is beyond .* 20"):
        short(1, 21)
    with pytest.raises(WorkloadError, match="max_length bounds what is traced"):
        bind("llama-3.1-8b", max_length=20)


def test_a_vit_is_traced_by_its_images() -> None:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=24,
        image_size=16,
        patch_size=4,
        attn_implementation="eager",
    )
    module = ViTForImageClassification(config)
    estimator = bind(module, {"pixel_values": torch.randn(2, 3, 16, 16)})
    batch = {"pixel_values": torch.randn(3, 3, 16, 16)}

    def step() -> None:
        module(**batch).logits.sum().backward()

    assert estimator.estimate_batch(batch).total == count_flops(module.train(), step).total
    with pytest.raises(FlopcalcError):
        estimator.estimate_batch({"pixel_values": torch.randn(3, 3, 20, 20)})
