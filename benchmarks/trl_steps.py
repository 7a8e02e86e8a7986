"""TRL's trainers, a few steps each: what the monitor counted beside a counter that sees every product of a step.

    python benchmarks/trl_steps.py --device cuda --out benchmarks/results/trl_steps.json

Models are tiny, with eager attention, so that the counter sees all products.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
MODES = ("estimate", "smart", "profiler", "hybrid")
STEPS = 4
# Every step in the log, with every detail; the peak is a number to divide by.
SETTINGS = {"detail_every": 1, "skip_first": 0, "peak_flops_per_s": 1e18, "dtype": "fp32"}


def make_tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, **{f"w{at}": at + 4 for at in range(90)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    fast.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    return fast


def make_model(folder: Path, kind: str = "LlamaForCausalLM", **more: Any) -> Any:
    """A tiny model with eager attention, that a trainer can load again as its own reference."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=101, pad_token_id=0, bos_token_id=1, eos_token_id=2, **more,
    )  # fmt: skip
    getattr(transformers, kind)(config).save_pretrained(folder)
    return getattr(transformers, kind).from_pretrained(folder, attn_implementation="eager")


def say(count: int, start: int) -> str:
    return " ".join(f"w{(7 * start + at) % 90}" for at in range(count))


def make_rows(kind: str) -> Any:
    from datasets import Dataset

    rows = []
    for at in range(12):
        prompt, answer, other = say(4 + at % 3, at), say(5 + 2 * (at % 4), at + 3), say(4 + at % 3, at + 5)
        rows.append(
            {
                "text": {"text": say(5 + 3 * (at % 4), at)},
                "prompt-completion": {"prompt": prompt, "completion": f" {answer}"},
                "preference": {"prompt": prompt, "chosen": answer, "rejected": other},
                "label": {"prompt": prompt, "completion": answer, "label": bool(at % 2)},
                "prompt": {"prompt": prompt},
                "messages": {
                    "messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
                },
            }[kind]
        )
    return Dataset.from_list(rows)


def make_lora() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "up_proj"], task_type="CAUSAL_LM")


EAGER = {"model_init_kwargs": {"attn_implementation": "eager"}}
GROUPS = {"num_generations": 2, "max_completion_length": 6, **EAGER}


def reward(completions: list[str], **_: Any) -> list[float]:
    return [float(len(each)) for each in completions]


# Name -> trainer, rows, arguments of the config, arguments of the trainer, passes beside training.
Case = tuple[str, str, dict[str, Any], dict[str, Any], set[str]]
CASES: dict[str, Case] = {
    "sft": ("SFT", "text", {}, {}, set()),
    "sft packed": ("SFT", "text", {"packing": True, "max_length": 16, "packing_strategy": "wrapped"}, {}, set()),
    "sft padding-free": ("SFT", "text", {"padding_free": True, "max_length": None}, {}, set()),
    "sft completion only": ("SFT", "prompt-completion", {}, {}, set()),
    "sft checkpointed": ("SFT", "text", {"gradient_checkpointing": True}, {}, set()),
    "sft lora": ("SFT", "text", {}, {"peft_config": make_lora}, set()),
    "dpo": ("DPO", "preference", EAGER, {}, {"reference"}),
    "dpo lora": ("DPO", "preference", EAGER, {"peft_config": make_lora}, {"reference"}),
    "dpo precomputed": ("DPO", "preference", {"precompute_ref_log_probs": True, **EAGER}, {}, set()),
    "kto": ("KTO", "label", EAGER, {}, {"reference", "score"}),
    "grpo": ("GRPO", "prompt", GROUPS, {"reward_funcs": reward}, {"rollout"}),
    "grpo beta": ("GRPO", "prompt", {"beta": 0.1, **GROUPS}, {"reward_funcs": reward}, {"rollout", "reference"}),
    "grpo iterations": (
        "GRPO", "prompt", {"num_iterations": 2, **GROUPS}, {"reward_funcs": reward}, {"rollout", "score"},
    ),
    "grpo lora": (
        "GRPO", "prompt", {"beta": 0.1, **GROUPS}, {"reward_funcs": reward, "peft_config": make_lora},
        {"rollout", "reference"},
    ),
    "gkd": ("GKD", "messages", {"lmbda": 0.5, "max_new_tokens": 5, "max_length": 32}, {}, {"rollout", "reference"}),
    "reward": ("Reward", "preference", {}, {}, set()),
    "orpo": ("ORPO", "preference", {"max_length": 32}, {}, set()),
    "cpo": ("CPO", "preference", {"max_length": 32}, {}, set()),
}  # fmt: skip
EXPERIMENTAL = {"GKD": "gkd", "ORPO": "orpo", "CPO": "cpo"}


def find_classes(name: str) -> tuple[Any, Any]:
    import importlib

    home = importlib.import_module(f"trl.experimental.{EXPERIMENTAL[name]}" if name in EXPERIMENTAL else "trl")
    return getattr(home, f"{name}Trainer"), getattr(home, f"{name}Config")


def count_steps(trainer_class: Any, totals: list[int]) -> Any:
    """The trainer, with every product of its training steps counted; rotary embeddings are no model FLOPs."""
    from torch.utils.flop_counter import FlopCounterMode

    def multiply(_own: Any, a: Any, b: Any, **_: Any) -> int:
        return int(2 * a[0] * a[1] * b[1])

    formulas: dict[Any, Callable[..., int]] = {torch.ops.aten.addmm_: multiply}

    class Counting(trainer_class):  # type: ignore[misc]
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            with FlopCounterMode(display=False, custom_mapping=formulas) as counter:
                found = super().training_step(*args, **kwargs)
            rotary = [each for name, each in counter.get_flop_counts().items() if name.endswith("rotary_emb")]
            totals.append(counter.get_total_flops() - sum(sum(each.values()) for each in rotary))
            return found

    return Counting


class SeenStep(NamedTuple):
    """A step of a trainer: FLOPs that were executed, and what its record in the log says."""

    executed: int
    split: dict[str, int]  # FLOPs on the hardware, by pass
    record: dict[str, Any]

    @property
    def counted(self) -> int:
        return sum(self.split.values()) if self.split else self.record["perf/hardware_flops"]


def run_case(name: str, mode: str, device: str, folder: Path) -> list[SeenStep]:
    """The steps of one trainer."""
    from flopcalc.monitor import FlopcalcCallback

    kind, rows, options, arguments, _ = CASES[name]
    trainer_class, config_class = find_classes(kind)
    plain = {
        "output_dir": str(folder / "out"), "per_device_train_batch_size": 2, "max_steps": STEPS, "logging_steps": 1,
        "report_to": [], "use_cpu": device == "cpu", "save_strategy": "no", "gradient_checkpointing": False,
        "bf16": False, "disable_tqdm": True,
    }  # fmt: skip
    given = {key: value() if value is make_lora else value for key, value in arguments.items()}
    if kind == "GKD":
        given["teacher_model"] = make_model(folder / "teacher")
    head = {"kind": "LlamaForSequenceClassification", "num_labels": 1} if kind == "Reward" else {}
    callback = FlopcalcCallback({"monitoring": {**SETTINGS, "mfu_calculation_mode": mode}})
    totals: list[int] = []
    trainer = count_steps(trainer_class, totals)(
        model=make_model(folder / "model", **head),
        args=config_class(**{**plain, **options}),
        train_dataset=make_rows(rows),
        processing_class=make_tokenizer(),
        callbacks=[callback],
        **given,
    )
    trainer.train()
    lines = [json.loads(line) for line in (folder / "out" / "flopcalc.jsonl").read_text().splitlines()]
    records = [line for line in lines if line["type"] == "step"]
    return [SeenStep(total, _split(record), record) for total, record in zip(totals, records, strict=True)]


def _split(record: dict[str, Any]) -> dict[str, int]:
    passes = [key.split("/") for key in record if key.startswith("perf/passes/")]
    return {name: record[f"perf/passes/{name}/{last}"] for _, _, name, last in passes if last == "hardware_flops"}


def main() -> int:
    from flopcalc.measure.calibrate.provenance import describe_machine

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--modes", nargs="+", default=MODES, choices=MODES)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    import trl

    about = {
        **describe_machine(options.device),
        "trl": trl.__version__,
        "command": "python benchmarks/trl_steps.py",
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    found: list[dict[str, Any]] = []
    for mode in options.modes:
        for name in options.cases:
            with TemporaryDirectory() as folder:
                steps = run_case(name, mode, options.device, Path(folder))
            rows = [{"executed": each.executed, "counted": each.counted, "passes": each.split} for each in steps]
            found.append({"case": name, "mode": mode, "source": steps[-1].record["perf/source"], "steps": rows})
            worst = max(abs(each.counted / each.executed - 1) for each in steps)
            print(f"{mode:<9} {name:<20} worst step {worst:.1e}", flush=True)
    options.out.write_text(json.dumps({"provenance": about, "cases": found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
