"""Time to first token and per output token of transformers' continuous batching, in a closed loop.

    python benchmarks/serving_transformers.py --output benchmarks/results/serving_transformers.json
    python benchmarks/serving_transformers.py --device cpu --tiny --output /tmp/tiny.json
    python benchmarks/serving_transformers.py --predict --output benchmarks/results/serving_transformers_blind.json
    python benchmarks/serving_transformers.py --compare --output benchmarks/results/serving_transformers.json

Fixed before anything was measured: presets with random weights in bf16, random prompts of one length, greedy decoding
without an end token, the library's own defaults for the cache and the scheduler. So many requests are in flight, and a
new one comes as soon as one ends. The first of each slot is not counted, nor are those that come after the last that is
counted. Times are those that the library writes down with each token (`record_timestamps`). Each case is written as
soon as it is measured; a case that fails says why, and the next one starts. A second call goes on where the first one
stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

Json = dict[str, Any]
MODELS = ("llama-3.2-1b", "granite-3.1-1b-a400m", "qwen3-1.7b", "qwen3-8b")
LOADS = (1, 16, 64, 4)
INPUT, OUTPUT = 1024, 128
OTHERS = (("llama-3.2-1b", 4096, 128, 4), ("llama-3.2-1b", 256, 512, 16))  # lengths that differ, after all others
_SILENCE_S = 60.0  # without any answer: the case has failed
_LIMITS = ("max_batch_tokens", "num_blocks", "page_size", "max_requests_per_batch", "max_blocks_per_request",
           "use_cuda_graph", "use_async_batching", "max_memory_percent")  # fmt: skip


class Case(NamedTuple):
    model: str
    input_len: int
    output_len: int
    concurrency: int


def list_cases(is_tiny: bool) -> list[Case]:
    if is_tiny:
        return [Case("llama-3.2-1b", 16, 8, load) for load in (1, 3)]
    return [
        *(Case(model, INPUT, OUTPUT, load) for model in MODELS for load in LOADS),
        *(Case(*each) for each in OTHERS),
    ]


def build(torch: Any, name: str, device: str, attention: str, is_tiny: bool) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    import flopcalc

    config = dict(flopcalc.bind(name).source.config)
    if is_tiny:
        config |= {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
                   "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512}  # fmt: skip
    config.pop("quantization_config", None)
    made = AutoConfig.for_model(config.pop("model_type"), **config)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16, attn_implementation=attention).eval()
    finally:
        torch.set_default_dtype(torch.float32)


def start(model: Any, attention: str, is_tiny: bool) -> Any:
    """A running manager with the library's defaults; without a GPU its sizes are small."""
    from transformers import GenerationConfig
    from transformers.generation import configuration_utils

    settings: Json = {"auto_switch_to_flash": attention != "sdpa"}
    if is_tiny:
        settings |= {"num_blocks": 64, "max_batch_tokens": 64, "page_size": 16, "block_size": 16}
    known = {field.name for field in fields(configuration_utils.ContinuousBatchingConfig)}
    if "page_size" in known:
        settings.pop("block_size", None)
    batching = configuration_utils.ContinuousBatchingConfig(
        **{name: value for name, value in settings.items() if name in known}
    )
    generation = GenerationConfig(do_sample=False, max_new_tokens=OUTPUT, eos_token_id=-1, pad_token_id=0)
    try:
        manager = model.init_continuous_batching(generation_config=generation, continuous_batching_config=batching)
    except TypeError:  # releases that take it with the generation config
        generation.continuous_batching_config = batching
        manager = model.init_continuous_batching(generation_config=generation)
    if hasattr(manager, "warmup"):
        manager.warmup()
    manager.start()
    return manager


def measure(manager: Any, vocabulary: int, case: Case, deadline: float) -> Json:
    """One closed loop: means over the requests that are counted."""
    source = random.Random(case.concurrency)
    slots = case.concurrency
    asked: dict[str, tuple[int, float]] = {}
    counted: dict[int, tuple[float, float, float]] = {}
    last = slots * (2 if slots > 1 else 3)  # requests of a slot: the first is not counted

    def send() -> None:
        number = len(asked)
        prompt = [source.randrange(10, vocabulary - 10) for _ in range(case.input_len)]
        name = f"{case.model}-{slots}-{case.input_len}-{case.output_len}-{number}"
        asked[name] = number, time.perf_counter()
        given = manager.add_request(prompt, request_id=name, max_new_tokens=case.output_len, record_timestamps=True)
        if given is None:
            raise RuntimeError("the manager takes no request: its thread has ended")

    def take() -> bool:
        """Whether a request of this case has ended."""
        result = manager.get_result(timeout=_SILENCE_S)
        if result is None:
            raise RuntimeError(f"no answer in {_SILENCE_S:g} s")
        if result.request_id not in asked or not result.is_finished():
            return False
        if result.error:
            raise RuntimeError(result.error)
        number, sent = asked[result.request_id]
        if len(result.timestamps) != case.output_len:
            raise RuntimeError(f"{len(result.timestamps)} tokens came, not {case.output_len}")
        counted[number] = sent, result.timestamps[0], result.timestamps[-1]
        return True

    for _ in range(slots):
        send()
    while not all(number in counted for number in range(slots, last)):
        if take():
            late = time.perf_counter() - deadline
            if late > 0:  # half a wave must do
                last = min(last, max(slots + (slots + 1) // 2, len(counted)))
            if late > _SILENCE_S:
                raise RuntimeError("the time is over")
            send()
    left = [name for name, (number, _) in asked.items() if number not in counted]
    for name in left:  # the next case starts with an idle server
        manager.cancel_request(name)
    for _ in range(200):
        if not manager.batch_processor.has_pending_requests():
            break
        time.sleep(0.05)
    own = [times for number, times in sorted(counted.items()) if slots <= number < last]
    ttft = [first - sent for sent, first, _ in own]
    tpot = [(end - first) / (case.output_len - 1) for _, first, end in own]
    return {
        "ttft_s": statistics.fmean(ttft), "tpot_s": statistics.fmean(tpot),
        "e2e_s": statistics.fmean(end - sent for sent, _, end in own), "requests": len(own),
        "ttft_p50_s": statistics.median(ttft), "ttft_max_s": max(ttft), "tpot_p50_s": statistics.median(tpot),
        "first_wave_ttft_s": statistics.fmean(counted[n][1] - counted[n][0] for n in range(slots)),
    }  # fmt: skip


def find_attention(asked: str) -> str:
    if asked != "auto":
        return asked
    try:
        import flash_attn  # noqa: F401
    except ImportError:
        return "sdpa"
    return "flash_attention_2"


def read_limits(manager: Any) -> Json:
    config = manager.continuous_batching_config
    found = {name: getattr(config, name, None) for name in _LIMITS}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}


def run(given: argparse.Namespace) -> None:
    import torch
    import transformers

    attention = find_attention(given.attention)
    stored: Json = json.loads(given.output.read_text()) if given.output.exists() else {"rows": []}
    name = torch.cuda.get_device_name() if given.device != "cpu" else "cpu"
    stored["provenance"] = {
        "made_by": "python benchmarks/serving_transformers.py", "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "device": name, "torch": torch.__version__, "transformers": transformers.__version__,
        "attention": attention, "dtype": "bfloat16", "protocol": __doc__,
    }  # fmt: skip
    rows: list[Json] = stored["rows"]

    def write() -> None:
        given.output.parent.mkdir(parents=True, exist_ok=True)
        given.output.write_text(json.dumps(stored, indent=1) + "\n")

    known = {tuple(row[key] for key in Case._fields) for row in rows if "error" not in row}
    begin, model, manager, held = time.perf_counter(), None, None, ""
    write()
    for case in list_cases(given.tiny):
        left = given.budget_s - (time.perf_counter() - begin)
        if tuple(case) in known or left < 5:
            continue
        row: Json = {**case._asdict(), "weights": "bf16", "device": name}
        try:
            if held != case.model or manager is None or not manager.is_running():
                stop(manager)
                manager, model, held = None, None, ""
                if given.device != "cpu":
                    torch.cuda.empty_cache()
                model = build(torch, case.model, given.device, attention, given.tiny)
                manager, held = start(model, attention, given.tiny), case.model
                first = case._replace(output_len=min(8, case.output_len), concurrency=2)
                measure(manager, model.config.vocab_size, first, time.perf_counter() + 60)
            end = time.perf_counter() + min(given.case_s, max(5.0, left))
            row |= measure(manager, model.config.vocab_size, case, end)
            row["attention"], row["limits"] = model.config._attn_implementation, read_limits(manager)
        except Exception as error:  # a case that fails must not end the others
            row["error"] = f"{type(error).__name__}: {error}"[:500]
            stop(manager)
            manager = None
        rows[:] = [other for other in rows if tuple(other[key] for key in Case._fields) != tuple(case)] + [row]
        write()
        print(json.dumps({key: row.get(key) for key in (*Case._fields, "ttft_s", "tpot_s", "error")}), flush=True)
    stop(manager)


def stop(manager: Any) -> None:
    if manager is None:
        return
    try:
        try:
            manager.stop(block=True, timeout=10, hard_stop=True)
        except TypeError:  # releases that have no hard stop
            manager.stop(block=True, timeout=10)
    except Exception as error:
        print(f"the manager does not stop: {error}", file=sys.stderr)


# --- what is expected, written down before anything was measured ------------------------------------------------------
# Seconds of one unit of each class of work, beside those that are fitted for all engines (model_specs/serving.json).
EXPECTED = {
    # The host's time of a decode step of HF's models for each kernel that an engine would launch: flopcalc predict
    # --phase decode says 151 to 171 us for the three dense models on an H200.
    "eager": 1.6e-4,
    "step": 2e-3, "sequences": 3e-5, "prompts": 0.0, "arrivals": 1e-3,  # the loop in Python; no server around it
}  # fmt: skip


def predict(given: argparse.Namespace) -> None:
    from flopcalc.hardware.devices import find_device
    from flopcalc.server import schedule
    from flopcalc.server.fitted import find_weights
    from flopcalc.server.served import read_model
    from flopcalc.server.step import CLASSES, Deployment, Rates, StepCosts, StepModel
    from flopcalc.server.traffic import Lengths, Traffic, make_requests
    from flopcalc.setup.counting import bind_setup
    from flopcalc.setup.setup import make_setup

    schedule.READ = 1 << 14  # all that wait in the queue are taken at once
    layout, device = Deployment(), find_device("h200")
    fitted = dict(zip(CLASSES, find_weights("", "transformers", "", device.id).values, strict=True))
    values = [{**fitted, **EXPECTED}[name] for name in CLASSES]

    class MaskedCosts(StepCosts):
        """Without flash attention: calls from the host, one masked attention over all sequences, copies of the keys."""

        def run(self, prompt: Any, decodes: int, keys: float) -> Any:
            tokens, before = sum(size for size, _ in prompt), sum(done for _, done in prompt)
            own = sum(self.pair * (size * (done + size / 2)) for size, done in prompt)
            queries = tokens + decodes
            return super().run(prompt, decodes, keys) - own + self.pair * (queries * (queries + before + keys))

        def decode(self, decodes: int, keys: float, steps: int) -> Any:
            middle = keys + decodes * (steps - 1) / 2
            return super().decode(decodes, keys, steps) + (self.eager + self.pair * (decodes * middle)) * steps

    rows: list[Json] = []
    for attention in ("sdpa", "flash_attention_2"):
        for case in list_cases(False):
            model = read_model(bind_setup(make_setup("serving", case.model, {"weights": "bf16"}), "model"))
            step = StepModel(model, layout, Rates(device, 1))
            is_masked = attention == "sdpa"
            costs = (MaskedCosts if is_masked else StepCosts)(
                step, lambda amounts: sum(map(float.__mul__, values, map(float, amounts))), 8192 + 2048
            )
            if is_masked:  # gathered, repeated for each query head, read: one read becomes so many reads and writes
                repeats = max(each.heads for each in model.cached) / max(each.kv_heads for each in model.cached)
                costs.key *= 3 + 2 * repeats
            lengths = Lengths(case.input_len, case.input_len), Lengths(case.output_len, case.output_len)
            requests, slots, shares = make_requests(Traffic(*lengths, case.concurrency, None, (), None), layout)
            policy = schedule.Policy(8192, 1024, 1e9)
            served = schedule.simulate(costs, policy, requests, slots).requests
            total = sum(shares)
            ttft = sum(each.ttft * share for each, share in zip(served, shares, strict=True)) / total
            e2e = sum(each.e2e * share for each, share in zip(served, shares, strict=True)) / total
            rows.append({**case._asdict(), "attention": attention, "ttft_s": ttft, "e2e_s": e2e,
                         "tpot_s": (e2e - ttft) / (case.output_len - 1)})  # fmt: skip
    about = {"made_by": "python benchmarks/serving_transformers.py --predict",
             "date": time.strftime("%Y-%m-%d", time.gmtime()), "device": "h200-sxm", "expected": EXPECTED}  # fmt: skip
    given.output.write_text(json.dumps({"provenance": about, "rows": rows}, indent=1) + "\n")
    for row in rows:
        print(*row.values())


def compare(given: argparse.Namespace) -> None:
    """Print measured times beside those that were expected, and beside a step of `flopcalc predict`."""
    import flopcalc

    expected = json.loads(given.output.with_name("serving_transformers_blind.json").read_text())["rows"]
    blind = {tuple(row[key] for key in Case._fields): row for row in expected if row["attention"] == "sdpa"}
    print("| model | requests in flight | TTFT | expected | TPOT | expected | step, new lengths |")
    print("|---|---|---|---|---|---|---|")
    off: dict[str, list[float]] = {"ttft_s": [], "tpot_s": [], "step": []}
    for row in sorted(json.loads(given.output.read_text())["rows"], key=lambda row: (row["model"], row["concurrency"])):
        if "error" in row:
            continue
        length = row["input_len"] + row["output_len"] // 2
        found = flopcalc.predict(row["model"], device="h200", phase="decode", batch_size=1, seq_len=length).to_dict()
        step = found["step_time_s"]["mid"] / length
        # From 16 requests on, prompts are spread over steps: nearly every step has a total length of its own.
        step += found["generate"]["new_length_s"] * (row["concurrency"] >= 16)
        said = {**blind[tuple(row[key] for key in Case._fields)], "step": step}
        for name, values in off.items():
            values.append(abs(said[name] / row["tpot_s" if name == "step" else name] - 1))
        cells = [row["ttft_s"], said["ttft_s"], row["tpot_s"], said["tpot_s"], step]
        shown = " | ".join(f"{1e3 * value:.0f} ms" for value in cells)
        print(f"| {row['model']} | {row['concurrency']} | {shown} |")
    shown = [f"{100 * statistics.median(values):.0f} %" for values in off.values()]
    print(f"| **median error** | {len(off['step'])} rows | | {shown[0]} | | {shown[1]} | {shown[2]} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--attention", default="auto", help="flash_attention_2 where it is installed, else sdpa")
    parser.add_argument("--budget-s", type=float, default=255.0, help="no case starts after so many seconds")
    parser.add_argument("--case-s", type=float, default=25.0, help="seconds after which a case counts fewer requests")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the script without a GPU")
    parser.add_argument("--predict", action="store_true", help="write what is expected instead of measuring")
    parser.add_argument("--compare", action="store_true", help="print what was measured beside what was expected")
    given = parser.parse_args()
    (predict if given.predict else compare if given.compare else run)(given)
    sys.stdout.flush()
    os._exit(0)  # a thread of a manager that hangs must not keep the process


if __name__ == "__main__":
    main()
