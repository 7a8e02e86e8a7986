"""What the monitor costs in a GRPO step: trainings with and without it take turns; their losses are equal, bit by bit.

    python benchmarks/grpo_overhead.py --device cuda --out benchmarks/results/grpo_overhead.json

The goal is 1 % of a step. Steps of a generation differ by more than that from run to run (`none2` is `none` once more),
so the time inside every call of the monitor on the training thread is summed too: that is the figure that is judged.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from trl_steps import make_rows, make_tokenizer, reward

ARMS = ("none", "estimate", "smart", "none2")
WARM = 3  # steps of each training that are in no figure
SIZES = {  # hidden, intermediate, layers, heads, key heads, words of a completion
    "0.5b": (896, 4864, 24, 14, 2, 64),
    "tiny": (32, 48, 2, 4, 2, 6),
}


def make_model(size: str, folder: Path) -> Any:
    import transformers

    hidden, intermediate, layers, heads, key_heads, _ = SIZES[size]
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        vocab_size=101,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder)  # the trainer loads it again as its reference
    return transformers.Qwen2ForCausalLM.from_pretrained(folder)


class Inside:
    """Sums the time inside calls."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def time(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            begun = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - begun

        return timed

    def time_hooks(self, model: Any) -> None:
        """The monitor's hooks of a model, that are not timed yet."""
        for module in model.modules():
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                for key, hook in hooks.items():
                    if type(hook).__module__.startswith("flopcalc."):
                        hooks[key] = self.time(hook)


class Run(NamedTuple):
    """One training."""

    seconds: list[float]  # of each step, without the first ones
    inside: list[float]  # of them inside the monitor
    losses: list[str]  # as their bits


def run(arm: str, size: str, steps: int, device: str, folder: Path) -> Run:
    """A training of a few steps."""
    import trl

    from flopcalc.monitor import FlopcalcCallback

    found, inside = Run([], [], []), Inside()

    class Timed(trl.GRPOTrainer):  # type: ignore[misc]
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            inside.time_hooks(self.model)
            if self.ref_model is not None:
                inside.time_hooks(self.ref_model)
            begun = time.perf_counter()
            loss = super().training_step(*args, **kwargs)
            if device == "cuda":
                torch.cuda.synchronize()
            found.seconds.append(time.perf_counter() - begun)
            found.inside.append(inside.seconds)
            found.losses.append(float(loss).hex())
            inside.seconds = 0.0
            return loss

    tokens = SIZES[size][-1]
    args = trl.GRPOConfig(
        output_dir=str(folder), per_device_train_batch_size=8, num_generations=4, max_completion_length=tokens,
        beta=0.1, max_steps=steps, logging_steps=1, report_to=[], save_strategy="no", use_cpu=device == "cpu",
        disable_tqdm=True, bf16=False, seed=0,
    )  # fmt: skip
    monitoring = {"mfu_calculation_mode": arm, "peak_flops_per_s": 1e15, "dtype": "fp32"}
    callbacks = [] if arm.startswith("none") else [FlopcalcCallback({"monitoring": monitoring})]
    trainer = Timed(
        model=make_model(size, folder / "model"),
        args=args,
        train_dataset=make_rows("prompt"),
        processing_class=make_tokenizer(),
        reward_funcs=reward,
        callbacks=callbacks,
    )
    for callback in callbacks:
        for name in [each for each in dir(callback) if each.startswith("on_")]:
            setattr(callback, name, inside.time(getattr(callback, name)))
    trainer.train()
    return Run(found.seconds[WARM:], found.inside[WARM:], found.losses)


def main() -> int:
    from flopcalc.measure.calibrate.provenance import describe_machine

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--size", default="0.5b", choices=tuple(SIZES))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    runs: dict[str, list[Run]] = {arm: [] for arm in ARMS}
    for at in range(options.rounds):
        for arm in ARMS if at % 2 == 0 else reversed(ARMS):
            with TemporaryDirectory() as folder:
                runs[arm].append(run(arm, options.size, options.steps, options.device, Path(folder)))
    first = runs["none"][0].losses
    is_same = {arm: all(one.losses == first for one in found) for arm, found in runs.items()}
    middle = {arm: statistics.median(each for one in found for each in one.seconds) for arm, found in runs.items()}
    inside = {arm: statistics.fmean(each for one in found for each in one.inside) for arm, found in runs.items()}
    share = {arm: inside[arm] / middle["none"] for arm in ARMS}
    about = {
        **describe_machine(options.device),
        "command": "python benchmarks/grpo_overhead.py",
        "size": options.size,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    seconds = {arm: [one.seconds for one in found] for arm, found in runs.items()}
    kept = {"provenance": about, "step_s": seconds, "middle_step_s": middle, "mean_inside_s": inside,
            "inside_share": share, "has_same_losses": is_same}  # fmt: skip
    options.out.write_text(json.dumps(kept, indent=1) + "\n")
    for arm in ARMS:
        print(f"{arm:<9} {middle[arm]:8.4f} s  inside the monitor {share[arm]:.3%}  same losses: {is_same[arm]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
