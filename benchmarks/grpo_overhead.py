"""What the monitor costs in a GRPO step: trainings with and without it take turns; their losses are equal, bit by bit.

    python benchmarks/grpo_overhead.py --device cuda --out benchmarks/results/grpo_overhead.json

`none2` is `none` once more: its difference is the noise of the run. The goal is 1 % of a step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

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
        hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=key_heads, vocab_size=101, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder)  # the trainer loads it again as its reference
    return transformers.Qwen2ForCausalLM.from_pretrained(folder)


def run(arm: str, size: str, steps: int, device: str, folder: Path) -> tuple[list[float], list[str]]:
    """Seconds of each step, and each loss as its bits."""
    import trl

    from flopcalc.monitor import FlopcalcCallback

    seconds: list[float] = []
    losses: list[str] = []

    class Timed(trl.GRPOTrainer):  # type: ignore[misc]
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            begun = time.perf_counter()
            found = super().training_step(*args, **kwargs)
            if device == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begun)
            losses.append(float(found).hex())
            return found

    tokens = SIZES[size][-1]
    args = trl.GRPOConfig(
        output_dir=str(folder), per_device_train_batch_size=8, num_generations=4, max_completion_length=tokens,
        beta=0.1, max_steps=steps, logging_steps=1, report_to=[], save_strategy="no", use_cpu=device == "cpu",
        disable_tqdm=True, bf16=False, seed=0,
    )  # fmt: skip
    monitoring = {"mfu_calculation_mode": arm, "peak_flops_per_s": 1e15, "dtype": "fp32"}
    callbacks = [] if arm.startswith("none") else [FlopcalcCallback({"monitoring": monitoring})]
    trainer = Timed(
        model=make_model(size, folder / "model"), args=args, train_dataset=make_rows("prompt"),
        processing_class=make_tokenizer(), reward_funcs=reward, callbacks=callbacks,
    )  # fmt: skip
    trainer.train()
    return seconds[WARM:], losses


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
    times: dict[str, list[list[float]]] = {arm: [] for arm in ARMS}
    losses: dict[str, list[str]] = {}
    for at in range(options.rounds):
        for arm in ARMS if at % 2 == 0 else reversed(ARMS):
            with TemporaryDirectory() as folder:
                seconds, found = run(arm, options.size, options.steps, options.device, Path(folder))
            times[arm].append(seconds)
            if losses.setdefault(arm, found) != found:
                raise SystemExit(f"{arm}: two equal trainings gave other losses; they cannot be compared")
    middle = {arm: statistics.median(each for one in rounds for each in one) for arm, rounds in times.items()}
    kept = {
        "provenance": {
            **describe_machine(options.device), "command": "python benchmarks/grpo_overhead.py", "size": options.size,
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        },
        "step_s": times,
        "middle_s": middle,
        "over_none": {arm: middle[arm] / middle["none"] - 1 for arm in ARMS},
        "has_same_losses": {arm: losses[arm] == losses["none"] for arm in ARMS},
    }  # fmt: skip
    options.out.write_text(json.dumps(kept, indent=1) + "\n")
    for arm in ARMS:
        print(
            f"{arm:<9} {middle[arm]:8.4f} s  {kept['over_none'][arm]:+.2%}  same losses: {kept['has_same_losses'][arm]}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
