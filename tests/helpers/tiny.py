"""Tiny models and batches for the callbacks' tests, and a witness that keeps what a model was given."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flopcalc import estimate_flops

if TYPE_CHECKING:  # imported where they are used, so that collecting tests is cheap
    import torch
    from transformers import LlamaForCausalLM, Qwen2VLForConditionalGeneration

IMAGE = 97
GRIDS = ([[1, 4, 6]], [[1, 2, 4], [1, 4, 4]], [[1, 8, 2]])
PEAK = 1e18  # FLOP/s; so high that no step of a tiny model, however short, gives an MFU above 1
# Every step in the log, with every detail, and no step left out; the peak is a number to divide by.
CONFIG = {
    "monitoring": {
        "mfu_calculation_mode": "estimate",
        "detail_every": 1,
        "skip_first": 0,
        "peak_flops_per_s": PEAK,
        "dtype": "fp32",
    }
}


def make_llama(seed: int = 0) -> LlamaForCausalLM:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=101,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config)


def make_qwen2_vl() -> Qwen2VLForConditionalGeneration:
    import torch
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    torch.manual_seed(0)
    config = Qwen2VLConfig(
        text_config={
            "num_hidden_layers": 2, "hidden_size": 24, "intermediate_size": 42, "num_attention_heads": 3,
            "num_key_value_heads": 1, "vocab_size": 101, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]},
            "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        },
        vision_config={"depth": 2, "embed_dim": 32, "hidden_size": 24, "mlp_ratio": 3, "num_heads": 4, "patch_size": 4},
        image_token_id=IMAGE, video_token_id=98, vision_start_token_id=95, vision_end_token_id=96,
    )  # fmt: skip
    return Qwen2VLForConditionalGeneration(config)


def make_text(count: int) -> list[dict[str, Any]]:
    """Rows of 5 to 17 tokens."""
    lengths = [5 + 4 * (index % 4) for index in range(count)]
    return [{"input_ids": [3 + (7 * row + at) % 90 for at in range(length)]} for row, length in enumerate(lengths)]


def pad(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    import torch

    longest = max(len(row["input_ids"]) for row in rows)
    ids = torch.tensor([row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in rows])
    mask = torch.tensor([[1] * len(row["input_ids"]) + [0] * (longest - len(row["input_ids"])) for row in rows])
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def make_pictures(count: int) -> list[dict[str, Any]]:
    """Rows of text with one or two images of several sizes."""
    rows = []
    for index in range(count):
        grids = GRIDS[index % len(GRIDS)]
        images = [token for t, h, w in grids for token in (95, *[IMAGE] * (t * h * w // 4), 96)]
        rows.append({"input_ids": [5, *images, 7 + index % 5, 8], "grids": grids})
    return rows


def pad_pictures(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    import torch

    grids = [grid for row in rows for grid in row["grids"]]
    batch = pad(rows)
    patches = sum(t * h * w for t, h, w in grids)
    generator = torch.Generator().manual_seed(patches)
    batch["pixel_values"] = torch.randn(patches, 3 * 2 * 4 * 4, generator=generator)
    batch["image_grid_thw"] = torch.tensor(grids)
    batch["mm_token_type_ids"] = (batch["input_ids"] == IMAGE).long()
    return batch


def list_hooks(model: Any) -> list[Any]:
    """What hangs on a model itself."""
    return [*model._forward_pre_hooks.values(), *model._forward_hooks.values()]


class Witness:
    """Keeps what a model's training forward passes were given; `flops` counts them without the monitor."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.batches: list[Mapping[str, Any]] = []
        self._model = model
        model.register_forward_pre_hook(self._see, with_kwargs=True)

    def _see(self, module: torch.nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        import torch

        if module.training and torch.is_grad_enabled():
            self.batches.append(kwargs)

    def count_flops(self, per_step: list[int]) -> list[int]:
        """FLOPs of each optimizer step, given the number of its micro-batches."""
        assert sum(per_step) == len(self.batches)
        totals = [estimate_flops(self._model, batch=batch).total for batch in self.batches]
        return [sum(totals[sum(per_step[:at]) : sum(per_step[: at + 1])]) for at in range(len(per_step))]


def read_log(path: Path, kind: str = "step") -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in lines if line["type"] == kind]


class Recorder:
    """Stands for a monitor: writes down what it is called with, and gives NaN where nothing is known."""

    def __init__(self, settings: Any) -> None:
        self.settings = settings
        self.calls: list[Any] = []
        self.said: list[str] = []

    def attach(self, model: Any) -> None:
        self.calls.append("attach")
        self.model = model

    def begin_step(self, batch: Any = None) -> None:
        self.calls.append("begin" if batch is None else "begin with batch")

    def end_step(self, step: int) -> None:
        self.calls.append(("end", step))

    def report(self, step: int, **values: Any) -> None:
        self.calls.append(("report", step))
        self.values = values

    def mark_lost(self, cause: str) -> None:
        self.calls.append(("lost", cause))

    @contextmanager
    def pause(self, cause: str) -> Iterator[None]:
        self.calls.append(("pause", cause))
        yield
        self.calls.append(("go on", cause))

    def set_phase(self, name: str) -> None:
        self.calls.append(("phase", name))

    def metrics(self) -> dict[str, Any]:
        return {"global_step": 1, "perf/mfu": 0.25, "perf/step_time": float("nan"), "perf/source": "estimate"}

    def say(self, message: str, _once: str | None = None) -> None:
        self.said.append(message)

    def close(self) -> None:
        self.calls.append("close")
