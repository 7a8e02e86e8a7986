"""Whether live models, tracing and the monitor are exact with the torch and transformers that are installed here.

    python benchmarks/versions.py run FILE [NAME ...]     counts, and writes what was equal into FILE (JSON); with names
                                                          these checks alone, and FILE keeps what it has of others
    python benchmarks/versions.py page PAGE FILE ...      writes the table of several such files into a page
    python benchmarks/versions.py bare                    lets the installed torch run without CUDA's libraries

`scripts/matrix` makes fresh environments and runs both. Truth is the operator counter of flopcalc.measure on a step
that HF's model really runs. A type that the release lacks, or cannot run, is skipped and counted as skipped.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

START, END = "<!-- releases: scripts/matrix -->", "<!-- end of releases -->"
# Experts as modules and fused, renamed towers, tied heads, encoders, and plain models.
TYPES = (
    "llama", "gpt2", "gpt_neox", "bert", "t5", "whisper", "gemma3", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe",
    "deepseek_v2", "deepseek_v3", "granitemoe", "dbrx", "jetmoe", "phimoe", "qwen2_vl", "qwen2_5_vl", "llava",
    "llava_next", "internvl", "paligemma", "idefics3", "mllama", "dinov2", "vit", "clip",
)  # fmt: skip
CUDA_PACKAGE = r"Requires-Dist: (nvidia|triton|cuda)-?"
TINY: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": False,
}  # fmt: skip
MODES = ("estimate", "smart", "profiler")
STEPS, ROWS, LENGTH = 4, 2, 16


def check_type(name: str) -> str:
    """'equal', 'skipped: …', or what differs, of one step of training."""
    import transformers

    from flopcalc import bind
    from flopcalc.measure.counters.flop_counter import count_flops
    from flopcalc.measure.hf.compare import make_load
    from flopcalc.measure.hf.examples import find_example, list_cases
    from flopcalc.measure.hf.models import build_model
    from flopcalc.measure.hf.verify import make_step

    example = find_example(name)
    plain = example.configs[0]
    config = {**({"architectures": [example.architecture]} if example.architecture else {}), **plain}
    architecture = example.choose_class(bind(config).spec.architecture)
    if not hasattr(transformers, architecture):
        return f"skipped: no {architecture}"
    workload = next(load for load, _ in list_cases(example, plain) if load.get("phase") == "train")
    given = plain
    parts = getattr(transformers.CONFIG_MAPPING[plain["model_type"]], "sub_configs", None)
    if parts and "text_config" in plain and "text_config" not in parts:  # this release has its keys beside the others
        given = {**plain["text_config"], **plain}
        del given["text_config"]
    try:
        model = build_model(given, example.attention, architecture=architecture)
        counted = count_flops(model, make_step(model, example, workload, plain))
    except Exception as error:  # the release does not take this config, or its code fails
        return f"skipped: {type(error).__name__}: {error}"[:200]
    ours = bind(model, convention="full", attention_kernel="eager").estimate(make_load(workload))
    if (ours.forward, ours.backward) == (counted.forward, counted.backward) and not counted.not_counted:
        return "equal"
    return f"{ours.forward + ours.backward} for {counted.forward + counted.backward}, {counted.not_counted}"


def make_model() -> tuple[Any, dict[str, Any], int]:
    """A tiny Llama, a batch of it, and the FLOPs of a step."""
    import torch

    from flopcalc import estimate_flops
    from flopcalc.measure.hf.models import build_model

    ids = torch.ones(ROWS, LENGTH, dtype=torch.long)
    return (
        build_model(TINY),
        {"input_ids": ids, "labels": ids},
        estimate_flops(TINY, batch_size=ROWS, seq_len=LENGTH).total,
    )


def check_trace() -> str:
    """A traced module has its spec's FLOPs at another size."""
    from flopcalc import bind

    model, batch, _ = make_model()
    traced = bind(model, {"input_ids": batch["input_ids"]}, convention="full")(3, 40).total
    told = bind(TINY, convention="full")(3, 40).total
    return "equal" if traced == told else f"{traced} for {told}"


def check_loop(mode: str) -> str:
    """A plain loop under a mode: FLOPs are the estimate's, losses are bit for bit those without a monitor."""
    import torch

    from flopcalc import TrainingMonitor

    losses: list[list[str]] = []
    found: dict[str, Any] = {}
    for is_monitored in (False, True):
        model, batch, told = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        config = {"monitoring": {"mfu_calculation_mode": mode, "detail_every": 1, "peak_flops_per_s": 1e12}}
        with tempfile.TemporaryDirectory() as folder:
            monitor = TrainingMonitor(folder, config, model=model) if is_monitored else None
            losses.append([])
            for number in range(STEPS):
                loss = model(**batch).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses[-1].append(float(loss).hex())
                if monitor is not None:
                    monitor.log_step(number + 1, 0, float(loss), None, 0.1)
            if monitor is not None:
                monitor.close()
                found = monitor.metrics()
    if losses[0] != losses[1]:
        return "other losses"
    measured = "" if mode == "estimate" or mode in str(found.get("perf/source")) else str(found.get("perf/source"))
    return "equal" if found["perf/model_flops"] == told and not measured else f"{found['perf/model_flops']} {measured}"


def check_trainer() -> str:
    """HF's Trainer with the callback."""
    from transformers import Trainer, TrainingArguments

    from flopcalc.monitor import FlopcalcCallback

    model, batch, told = make_model()
    rows = [{name: value[0] for name, value in batch.items()}] * (ROWS * STEPS)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=ROWS, max_steps=STEPS, logging_steps=1, report_to=[], use_cpu=True
        )
        callback = FlopcalcCallback({"monitoring": {"mfu_calculation_mode": "estimate", "peak_flops_per_s": 1e12}})
        Trainer(model, arguments, train_dataset=rows, callbacks=[callback]).train()
        found = callback.monitor.metrics()["perf/model_flops"]
    return "equal" if found == told else f"{found} for {told}"


def run(file: str, names: list[str]) -> int:
    import torch
    import transformers

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    checks: dict[str, Callable[[], str]] = {name: lambda name=name: check_type(name) for name in TYPES}
    checks |= {"trace": check_trace, "trainer": check_trainer}
    checks |= {f"mode {mode}": lambda mode=mode: check_loop(mode) for mode in MODES}
    checks = {name: checks.get(name, lambda name=name: check_type(name)) for name in names or checks}
    versions = {"python": platform.python_version(), "torch": torch.__version__.split("+")[0]}
    versions["transformers"] = transformers.__version__
    results: dict[str, str] = {}
    before = json.loads(Path(file).read_text()) if names and Path(file).exists() else {}
    if versions.items() <= before.items():  # the others of this pair are kept
        results = before["results"]
    for name, check in checks.items():
        try:
            results[name] = check()
        except Exception as error:
            results[name] = f"{type(error).__name__}: {error}"[:300]
        print(f"{name}: {results[name]}", flush=True)
    Path(file).write_text(json.dumps({**versions, "results": results}, indent=1) + "\n")
    return int(any(not each.startswith(("equal", "skipped")) for each in results.values()))


def write_page(page: str, files: list[str]) -> None:
    rows = [
        "| Python | torch | transformers | equal | skipped | not equal | not run |",
        "|---|---|---|---|---|---|---|",
    ]
    names = (*TYPES, "trace", "trainer", *(f"mode {mode}" for mode in MODES))
    for file in files:
        found = json.loads(Path(file).read_text())
        results = found["results"].items()
        equal = [name for name, each in results if each == "equal"]
        skipped = [name for name, each in results if each.startswith("skipped")]
        wrong = [f"{name}: {each}" for name, each in results if each != "equal" and name not in skipped]
        named = f"{len(skipped)} ({', '.join(skipped)})" if skipped else "0"
        left = ", ".join(name for name in names if name not in found["results"])
        versions = " | ".join(found[each] for each in ("python", "torch", "transformers"))
        rows.append(f"| {versions} | {len(equal)} | {named} | {'; '.join(wrong) or '0'} | {left or '0'} |")
    text = Path(page).read_text()
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    Path(page).write_text("\n".join([before + START, "", *rows, "", END + after]))


def write_stand_in(name: str) -> str:
    """A function that says: no device (cudaErrorNoDevice)."""
    if name.endswith("String"):
        return f'const char *{name}(void) {{ return "no device"; }}\n'
    return f"int {name}(void) {{ return 100; }}\n"


def leave_out_cuda() -> None:
    """Takes CUDA's packages from what torch requires; libraries with its functions' names alone are in their place."""
    found = importlib.metadata.distribution("torch")
    folder = Path(str(found.locate_file("torch"))) / "lib"
    metadata = Path(str(found.locate_file(f"torch-{found.version}.dist-info"))) / "METADATA"
    kept = [line for line in metadata.read_text().splitlines(True) if not re.match(CUDA_PACKAGE, line)]
    metadata.write_text("".join(kept))
    missing: set[str] = set()
    versions: dict[str, set[str]] = {}  # library -> the version names that torch requires of it
    asked: set[str] = set()  # names, with @ and their version if they have one
    defined: set[str] = set()
    for file in folder.glob("*.so*"):
        missing |= set(re.findall(r"(\S+) => not found", tell("ldd", str(file))))
        for library, block in re.findall(r"required from (\S+):\n((?:    .*\n)*)", tell("objdump", "-p", str(file))):
            versions.setdefault(library, set()).update(line.split()[-1] for line in block.splitlines())
        symbols = tell("nm", "-D", str(file))
        asked |= set(re.findall(r"^ +U (\S+)$", symbols, re.MULTILINE))
        defined |= set(re.findall(r"^\w+ \w ([^@\s]+)", symbols, re.MULTILINE))
    plain = {name for name in asked if "@" not in name and not name.startswith(("Py", "_Py"))} - defined
    for i, library in enumerate(sorted(missing)):
        path = folder / library
        parts = {
            version: sorted({name.partition("@")[0] for name in asked if name.partition("@")[2] == version})
            for version in sorted(versions.get(library, ()))
        }
        names = {name for own in parts.values() for name in own} | (set() if i else plain)
        path.with_suffix(".c").write_text("".join(map(write_stand_in, sorted(names))))
        script = "".join(
            f"{version} {{ global: {' '.join(f'{name};' for name in own)} }};\n" for version, own in parts.items()
        )
        path.with_suffix(".map").write_text(script)
        versioned = [f"-Wl,--version-script={path.with_suffix('.map')}"] if script else []
        options = [f"-Wl,-soname,{library}", *versioned]
        tell("gcc", "-w", "-fno-builtin", "-shared", "-fPIC", str(path.with_suffix(".c")), *options, "-o", str(path))


def tell(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    if sys.argv[1] == "bare":
        leave_out_cuda()
    elif sys.argv[1] == "page":
        write_page(sys.argv[2], sys.argv[3:])
    else:
        sys.exit(run(sys.argv[2], sys.argv[3:]))
