"""The training loops of monitor_overhead.py, and a monitor that can be taken off one of them."""

from __future__ import annotations

import inspect
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from monitor_overhead_tables import FREQUENCY

SEED = 5


class Scale(NamedTuple):
    """A model, its batch, and how many steps each part takes."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    rows: int
    length: int
    block: int  # steps
    host_steps: int  # with the monitor, and as many without
    measured: int  # steps under the counters
    profiled: int
    agreement_steps: int


SCALES = {
    "1b": Scale(2048, 16, 32, 8, 8192, 32000, 4, 2048, 20, 40, 6, 3, 46),
    "0.5b": Scale(896, 24, 14, 2, 4864, 32000, 1, 1024, 20, 80, 10, 3, 106),
}
TINY = Scale(32, 2, 4, 2, 48, 101, 2, 16, 1, 2, 1, 1, 8)


# --- The loop ---------------------------------------------------------------------------------------------------------


class Place:
    """Where it runs, and that place's clock: CUDA events, or the host's clock where there is no GPU."""

    def __init__(self, is_gpu: bool) -> None:
        import torch

        self.is_gpu = is_gpu
        self.device = "cuda" if is_gpu else "cpu"
        self._torch = torch

    def synchronize(self) -> None:
        if self.is_gpu:
            self._torch.cuda.synchronize()

    def mark(self) -> Any:
        if not self.is_gpu:
            return time.perf_counter()
        event = self._torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def elapsed_s(self, start: Any, end: Any) -> float:
        """Between two marks that the device has passed."""
        return float(start.elapsed_time(end) / 1e3) if self.is_gpu else end - start


class Deadline:
    def __init__(self, budget_s: float) -> None:
        self._end = time.monotonic() + budget_s

    def left_s(self) -> float:
        return self._end - time.monotonic()


class Loop:
    """A model with random weights, a few random batches, and an optimizer."""

    is_fresh = True  # batches are new tensors in every step, as a loader gives them

    def __init__(self, scale: Scale, place: Place, folder: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM, LlamaConfig

        torch.manual_seed(SEED)
        self.scale = scale
        self.place = place
        self.folder = folder
        config = LlamaConfig(
            hidden_size=scale.hidden,
            intermediate_size=scale.intermediate,
            num_hidden_layers=scale.layers,
            num_attention_heads=scale.heads,
            num_key_value_heads=scale.kv_heads,
            vocab_size=scale.vocabulary,
            max_position_embeddings=4096,
            use_cache=False,
            tie_word_embeddings=False,
        )
        with torch.device(place.device):
            self.model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16)
            shape = (scale.rows, scale.length)
            ids = [torch.randint(3, scale.vocabulary, shape) for _ in range(4)]
            # Ragged rows, padded at their ends.
            lengths = torch.linspace(scale.length // 2, scale.length, scale.rows).long()
            mask = (torch.arange(scale.length)[None, :] < lengths[:, None]).long()
        self.model.train()
        self.plain = [{"input_ids": each, "labels": each} for each in ids]
        self.ragged = [{**each, "attention_mask": mask} for each in self.plain]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=place.is_gpu or None)
        self.parameters = sum(each.numel() for each in self.model.parameters())
        self._turn = 0

    def train_step(self, batches: Sequence[Mapping[str, Any]] | None = None) -> Any:
        """One optimizer step; the loss stays on the device."""
        given = batches if batches is not None else self.ragged
        self._turn += 1
        batch = given[self._turn % len(given)]
        if self.is_fresh:
            batch = {name: value.clone() for name, value in batch.items()}
        loss = self.model(**batch).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def time_steps(self, steps: int, run_one: Callable[[], Any]) -> float:
        """Seconds that so many steps take, waited for at both edges only."""
        self.place.synchronize()
        start = self.place.mark()
        for _ in range(steps):
            run_one()
        end = self.place.mark()
        self.place.synchronize()
        return self.place.elapsed_s(start, end)

    def time_plain_step(self) -> float:
        return self.time_steps(self.scale.block, self.train_step) / self.scale.block


class Watching:
    """A real monitor; its hooks are on the model only while its own steps run."""

    def __init__(self, loop: Loop, mode: str, frequency: int = FREQUENCY, **monitoring: Any) -> None:
        from flopcalc.monitor import TrainingMonitor

        self._loop = loop
        self._threads_before = set(threading.enumerate())
        self._threads: tuple[list[threading.Thread], list[threading.Thread]] | None = None
        folder = tempfile.mkdtemp(prefix=mode, dir=loop.folder)
        # The default is not given, so that what is measured is what a user gets without a word.
        given: dict[str, Any] = {} if frequency == FREQUENCY else {"flops_profile_freq": frequency}
        config = make_config(loop, mode, **monitoring)
        self.monitor = TrainingMonitor(folder, config, model=loop.model, **given)
        self.number = 0
        self._hidden_ns = 0

    def log(self, loss: Any) -> None:
        self.number += 1
        self.monitor.log_step(self.number, 0.0, loss, None, 1e-5)

    def run_step(self) -> None:
        self.log(self._loop.train_step())

    def hide(self) -> None:
        self.monitor._drop_hooks()
        self._hidden_ns = time.perf_counter_ns()

    def put_back(self) -> None:
        """Steps without the monitor do not bring its next mark on the device closer."""
        from flopcalc.monitor.hooks import register_hooks

        self.monitor._marked_ns += time.perf_counter_ns() - self._hidden_ns
        self.monitor._hooks += register_hooks(self.monitor, self.monitor._trained, looks_inside=False)

    def show(self) -> None:
        """It is back, and the time in between is no step's."""
        self.put_back()
        self.monitor.mark_lost("eval")

    def list_threads(self) -> tuple[list[threading.Thread], list[threading.Thread]]:
        """Its worker, and the threads of its sinks; first asked after its first step, before the next monitor's."""
        if self._threads is None:
            new = [each for each in threading.enumerate() if each not in self._threads_before]
            worker = self.monitor._worker
            sinks = [each for each in new if each is not worker and each.name.startswith("flopcalc")]
            self._threads = ([worker] if worker is not None else []), sinks
        return self._threads

    def settle(self) -> tuple[float, float]:
        """Do now what its threads would do later: seconds of digesting, and CPU seconds of the sinks."""
        _, sinks = self.list_threads()
        before = time.perf_counter()
        self.monitor.metrics()
        digesting = time.perf_counter() - before
        cpu = read_cpu_s(sinks)
        outbox = self.monitor._digester.outbox
        if outbox is not None:
            outbox.flush(5.0)
        return digesting, read_cpu_s(sinks) - cpu

    def close(self) -> None:
        self.monitor.close()


def make_config(loop: Loop, mode: str, **monitoring: Any) -> dict[str, Any]:
    if not loop.place.is_gpu:
        monitoring.setdefault("peak_flops_per_s", 1e12)
    return {"monitoring": {"mfu_calculation_mode": mode, "sinks": ["jsonl"], **monitoring}}


def list_failures(monitor: Any) -> list[str]:
    return sorted(key for key in monitor._messages.said if key.startswith(("fail", "no ", "value", "batch")))


@contextmanager
def watch(loop: Loop, mode: str, frequency: int = FREQUENCY, **monitoring: Any) -> Any:
    watching = Watching(loop, mode, frequency, **monitoring)
    try:
        yield watching
    finally:
        watching.close()


def read_cpu_s(threads: Iterable[threading.Thread]) -> float:
    """CPU time that threads have used so far."""
    return sum(
        time.clock_gettime(time.pthread_getcpuclockid(each.ident))
        for each in threads
        if each.ident is not None and each.is_alive()
    )


class PictureLoop(Loop):
    """A tiny vision-language model whose image_grid_thw is on the device already."""

    def __init__(self, place: Place, folder: str) -> None:
        import torch
        from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

        torch.manual_seed(SEED)
        self.scale, self.place, self.folder, self._turn = TINY, place, folder, 0
        config = Qwen2VLConfig(
            text_config={
                "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2,
                "num_key_value_heads": 1, "vocab_size": 101, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
                "rope_scaling": {"type": "mrope", "mrope_section": [2, 2, 4]},
            },
            vision_config={
                "depth": 2, "embed_dim": 32, "hidden_size": 32, "mlp_ratio": 3, "num_heads": 2, "patch_size": 4,
            },
            image_token_id=97, video_token_id=98, vision_start_token_id=95, vision_end_token_id=96,
        )  # fmt: skip
        self.model = Qwen2VLForConditionalGeneration(config).to(place.device, torch.bfloat16).train()
        grid = torch.tensor([[1, 4, 6]])
        ids = torch.tensor([[5, 95, *[97] * 6, 96, 7, 8, 9]])
        batch = {
            "input_ids": ids,
            "labels": ids,
            "attention_mask": torch.ones_like(ids),
            "pixel_values": torch.randn(24, 3 * 2 * 4 * 4).bfloat16(),
            "image_grid_thw": grid,
        }
        if "mm_token_type_ids" in inspect.signature(self.model.forward).parameters:
            batch["mm_token_type_ids"] = (ids == 97).long()
        self.ragged = [{name: value.to(place.device) for name, value in batch.items()}]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)
