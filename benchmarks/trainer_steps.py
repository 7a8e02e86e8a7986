"""What HF's Trainer adds to a training step: the same steps in a plain loop and in the Trainer, and its own parts.

    python benchmarks/trainer_steps.py measure [--out FILE] [--device cuda]   about two minutes on a GPU

Narrow models show the host's time, each step beside the probe; wide ones show what the device waits for. The Trainer
reads its loss from the device after every backward pass, so the host cannot run ahead of it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flopcalc.measure.calibrate.tables import round_digits, summarize
from lab.blind.kinds import KindsRunner, load_steps

Json = dict[str, Any]
RESULT = Path(__file__).parent / "results" / "trainer_steps.json"
TYPES = ("llama", "qwen3", "bert", "gpt2", "t5", "distilbert")
DEPTHS = (4, 12)
_CAST = {"weights": "fp32", "autocast": True, "hf_trainer": True}
_LORA = {"r": 16, "targets": ["q_proj", "k_proj", "v_proj", "o_proj"]}
WIDE = ("Trainer bert-base 32x320", "Trainer qwen3-0.6b 4x1536", "Trainer qwen2-1.5b-14 2x2048 recompute")  # round 6
PARTS = (
    "training_step",
    "get_batch_samples",
    "floating_point_ops",
    "_clip_grad_norm",
    "_prepare_inputs",
    "compute_loss",
)
_STEPS = 16


class TrainerRunner(KindsRunner):
    """A runner that also times the parts of HF's Trainer, on the host."""

    def make_trainer(self, folder: str, steps: int, watch: Any) -> Any:
        trainer = super().make_trainer(folder, steps, watch)
        self.parts: dict[str, list[float]] = {}
        for name in PARTS:
            if hasattr(trainer, name):
                setattr(trainer, name, self._wrap(name, getattr(trainer, name)))
        for name in ("zero_grad", "train"):
            setattr(trainer.model, name, self._wrap(name, getattr(trainer.model, name)))
        return trainer

    def _wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        taken = self.parts.setdefault(name, [])

        def timed(*args: Any, **given: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args, **given)
            finally:
                taken.append(time.perf_counter() - start)

        return timed

    def measure_host(self, case: Json, steps: int = _STEPS) -> Json:
        """Steps of a narrow model, each between runs of the probe."""
        if not self.step.get("trainer"):
            return super().measure_host(case, steps)
        from transformers import TrainerCallback

        self.make_step(case)
        probe, taken, probed, begun = self._get_probe(case), list[float](), list[float](), [0.0]

        class Watch(TrainerCallback):
            def on_step_end(self, *_: Any, **__: Any) -> None:
                taken.append(time.perf_counter() - begun[0])
                probed.append(probe())
                begun[0] = time.perf_counter()

        with tempfile.TemporaryDirectory() as folder:
            self.make_trainer(folder, steps + 4, Watch()).train()
        pairs = list(zip(taken[1:], probed[:-1], probed[1:], strict=True))[3:]
        ratio, spread = summarize([each / ((before + after) / 2) for each, before, after in pairs])
        parts = {name: round_digits(summarize(each[3:])[0]) for name, each in self.parts.items() if len(each) > 3}
        return {
            **case, "seconds": round_digits(summarize([each for each, _, _ in pairs])[0]),
            "probe_s": round_digits(summarize(probed)[0]), "ratio": round_digits(ratio),
            "spread": round_digits(spread, 3), "steps": len(pairs), "parts": parts,
        }  # fmt: skip


def count_parts(model: Any) -> Json:
    """What the Trainer's own loops go over."""
    return {"modules": sum(1 for _ in model.modules()), "tensors": sum(1 for _ in model.parameters()),
            "trained": sum(each.requires_grad for each in model.parameters())}  # fmt: skip


def list_steps() -> dict[str, tuple[Json, bool]]:
    """Name -> the step, and whether it is narrow."""
    import host_types

    found: dict[str, tuple[Json, bool]] = {}
    for layers in DEPTHS:
        for kind in TYPES:
            config, work = host_types.get_config(f"{kind}-narrow-{layers}"), host_types.KINDS[kind]["work"]
            found[f"{kind}-{layers}"] = ({"config": config, "work": {"batch": 1, **work}, "asked": _CAST}, True)
    llama = {"config": host_types.get_config("llama-narrow-12"), "work": {"batch": 1, "seq": 64}}
    found["llama-12 32 samples"] = ({**llama, "work": {"batch": 32, "seq": 64}, "asked": _CAST}, True)
    found["llama-12 x4"] = ({**llama, "asked": {**_CAST, "grad_accum": 4}}, True)
    found["llama-12 lora"] = ({**llama, "asked": {"lora": _LORA, "hf_trainer": True}}, True)
    found["llama-12 bf16"] = ({**llama, "asked": {"hf_trainer": True}}, True)
    steps = load_steps(6)
    return found | {name: (steps[name], False) for name in WIDE}


def measure(out: Path, device: str) -> None:
    """Time the steps in both loops; keep what is there after each."""
    from flopcalc.measure.calibrate.provenance import describe_machine

    date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    about = {**describe_machine(device), "command": "python benchmarks/trainer_steps.py measure", "date": date}
    kept: Json = {"provenance": about, "cases": [], "failures": []}
    probes: dict[bool, Callable[[], float]] = {}
    for name, (step, is_narrow) in list_steps().items():
        for loop in ("plain", "trainer"):
            start = time.monotonic()
            try:
                runner = TrainerRunner(device, {**step, "trainer": loop == "trainer"})
                runner.probes = probes
                case: Json = {"model": name, "phase": "train", "loop": loop}
                found = runner.measure_host(case) if is_narrow else runner.measure(case)
                kept["cases"].append({**found, **count_parts(runner.model)})
                said = f"{1e3 * found['seconds']:.2f} ms {found.get('parts', '')}"
                runner.drop()
            except Exception as error:
                said = f"{type(error).__name__}: {error}"[:300]
                kept["failures"].append({"case": f"{name} {loop}", "reason": said})
            print(f"{time.monotonic() - start:6.1f} s  {name} {loop}  {said}", flush=True)
            out.write_text(json.dumps(kept, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("what", choices=("measure",))
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    measure(given.out, given.device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
