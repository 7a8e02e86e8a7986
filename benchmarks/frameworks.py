"""Other frameworks' FLOP counters, unpacked from PyPI and called as they are: theirs ÷ ours, and ours in microseconds.

python benchmarks/frameworks.py                  prints the tables
python benchmarks/frameworks.py --write          writes them into docs/integrations.md
python benchmarks/frameworks.py --only verl      prints one framework's rows as JSON
python benchmarks/frameworks.py --speed          prints what one call of each adapter takes; exit code 1 above 100 µs

Packages are unpacked into a temporary folder and never installed. A module that a package imports and that is missing
here (triton, say) is replaced by an empty stand-in; counters need none of them.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import subprocess
import sys
import tarfile
import tempfile
import timeit
import types
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import MagicMock

import flopcalc

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "integrations.md"
BEGIN, END = "<!-- ratios: python benchmarks/frameworks.py --write -->", "<!-- end of ratios -->"
# What is unpacked for each framework; only the first is the framework itself.
PACKAGES = {
    "verl": ("verl==0.9.1",),
    "veomni": ("veomni==0.1.12",),
    "torchtitan": ("torchtitan==0.3.0", "spmd_types", "tyro", "docstring_parser", "typeguard"),
    "nemo_automodel": ("nemo-automodel==0.7.0",),
    "megatron_bridge": ("megatron-bridge==0.3.1",),
    "composer": ("mosaicml==0.32.1",),
    "llamafactory": ("llamafactory==0.9.5",),  # as sources: the script is in no wheel
    "ms_swift": ("ms-swift==4.6.0",),
}
BATCH, SEQ = 4, 4096
LIMIT_US = 100.0
PRESETS = ("llama-3.1-8b", "qwen3-8b", "mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3", "qwen2-vl-7b", "gpt-oss-20b")


class Row(NamedTuple):
    """One model: their count and ours under `model`; None where theirs knows none."""

    model: str
    theirs: float | None
    ours: float
    full: int  # ours under `full`

    @property
    def ratio(self) -> float | None:
        return None if self.theirs is None else self.theirs / self.ours


# --- their packages ---------------------------------------------------------------------------------------------------
def unpack(framework: str, folder: Path) -> Path:
    """Download a framework's packages, without what they depend on, and unpack them."""
    target = folder / framework
    target.mkdir(parents=True, exist_ok=True)
    kind = ["--no-build-isolation", "--no-binary"] if framework == "llamafactory" else ["--only-binary"]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *kind, ":all:", "-d", str(target)]
    done = subprocess.run([*command, *PACKAGES[framework]], capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["pip says nothing"])[-1]
        raise SystemExit(f"{framework}: cannot be downloaded: {reason}")
    for path in list(target.iterdir()):
        if path.suffix == ".whl":
            zipfile.ZipFile(path).extractall(target)
        elif path.name.endswith(".tar.gz"):
            with tarfile.open(path) as archive:
                archive.extractall(target, filter="data")
    return target


def load(module: str, root: Path, *, light: tuple[str, ...] = (), absent: tuple[str, ...] = ()) -> Any:
    """Import a module of an unpacked package.

    `light` packages are imported without their __init__, `absent` modules and those that are missing are stand-ins.
    """
    import torch._dynamo  # noqa: F401  # both look for optional packages: before there are stand-ins
    import transformers  # noqa: F401

    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    for name in light:
        package = sys.modules[name] = types.ModuleType(name)
        package.__path__ = [str(root / name.replace(".", "/"))]
    for name in absent:
        sys.modules[name] = MagicMock(name=name)
    for _ in range(20):
        try:
            return importlib.import_module(module)
        except ModuleNotFoundError as error:
            missing = str(error.name)
            sys.modules[missing] = MagicMock(name=missing)
            for name in [name for name in sys.modules if name.split(".")[0] == module.split(".")[0]]:
                if name not in (*light, *absent):
                    del sys.modules[name]
    raise SystemExit(f"{module}: too many modules are missing")


# --- their counts -----------------------------------------------------------------------------------------------------
def make_hf_config(preset: str) -> Any:
    from transformers import AutoConfig

    config = dict(flopcalc.bind(preset).source.config)
    return AutoConfig.for_model(config.pop("model_type"), **config)


def list_rows(count: Callable[[Any], float | None]) -> Iterator[Row]:
    """A row for each preset; `count` gives their FLOPs of BATCH sequences of SEQ tokens."""
    for preset in PRESETS:
        step = flopcalc.estimate_flops(preset, batch_size=BATCH, seq_len=SEQ)
        try:
            theirs = count(make_hf_config(preset)) or None
        except Exception as error:
            print(f"{preset}: {type(error).__name__}: {error}", file=sys.stderr)
            theirs = None
        yield Row(preset, theirs, step.total, step.total_under("full"))


def run_verl(root: Path) -> Iterator[Row]:
    theirs = load("verl.utils.flops_counter", root, light=("verl", "verl.utils"))
    theirs.get_device_flops = lambda: 1.0
    return list_rows(lambda config: 1e12 * theirs.FlopsCounter(config).estimate_flops([SEQ] * BATCH, 1.0)[0])


def run_veomni(root: Path) -> Iterator[Row]:
    theirs = load("veomni.utils.count_flops", root)
    theirs.get_device_flops = lambda: 1.0
    return list_rows(lambda config: 1e12 * theirs.VeomniFlopsCounter(config).estimate_flops([SEQ] * BATCH, 1.0)[0])


def run_nemo_automodel(root: Path) -> Iterator[Row]:
    theirs = load("nemo_automodel.components.utils.flops_utils", root)

    def count(config: Any) -> float | None:
        formula = theirs.get_flops_formula_for_hf_config(config)
        return None if formula is None else formula(config, gbs=BATCH, seq_len=SEQ)

    return list_rows(count)


def run_llamafactory(root: Path) -> Iterator[Row]:
    (folder,) = root.glob("llamafactory-*/scripts/stat_utils")
    theirs = load("cal_mfu", folder, absent=("fire", "llamafactory", "llamafactory.train", "llamafactory.train.tuner"))

    def count(config: Any) -> float:
        theirs.AutoConfig = types.SimpleNamespace(from_pretrained=lambda _: config)
        return theirs.compute_model_flops("model", BATCH, SEQ)

    return list_rows(count)


def run_ms_swift(root: Path) -> Iterator[Row]:
    """HF's total_flos, which ms-swift's callback turns into MFU; its package is unpacked to see that it still does."""
    assert "total_flos" in (root / "swift/callbacks/perf_log.py").read_text(encoding="utf-8")
    import torch
    from transformers import Trainer

    def count(config: Any) -> float:
        text = config.get_text_config()
        parameters = flopcalc.bind(config).parameters()["total"] - text.vocab_size * text.hidden_size
        model = types.SimpleNamespace(num_parameters=lambda **_: parameters)  # the model's own answer
        trainer = types.SimpleNamespace(model=model)
        return Trainer.floating_point_ops(trainer, {"input_ids": torch.empty(BATCH, SEQ, device="meta")})

    return list_rows(count)


def run_composer(root: Path) -> Iterator[Row]:
    """Composer has no formula of its own: a model without flops_per_batch gets no MFU."""
    assert "flops_per_batch" in (root / "composer/callbacks/speed_monitor.py").read_text(encoding="utf-8")
    return list_rows(lambda _: None)


def run_torchtitan(root: Path) -> Iterator[Row]:
    """Of their own flavours, per token; the model is built without memory, as their count needs its parameters."""
    import torch

    from flopcalc.integrations.torchtitan import get_nparams_and_flops, map_config

    flavours = (
        ("llama3", "llama3_configs", "debugmodel", ("flex",)),
        ("llama3", "llama3_configs", "8B", ("flex",)),
        ("qwen3", "qwen3_configs", "8B", ("flex",)),
        ("qwen3", "qwen3_configs", "30B-A3B", ("flex",)),
        ("deepseek_v3", "deepseekv3_configs", "671B", ("flex", "standard")),
        ("gpt_oss", "gptoss_configs", "20b", ("standard",)),
    )
    for family, table, flavour, arguments in flavours:
        module = load(f"torchtitan.models.{family}", root)
        config = getattr(module, table)[flavour](*arguments)
        with torch.device("meta"):
            model = config.build()
        parameters, theirs = config.get_nparams_and_flops(model, SEQ)
        counted, ours = get_nparams_and_flops(config, model, SEQ)
        bound = flopcalc.bind(map_config(config))
        assert counted == parameters, (family, flavour)
        full = bound(1, SEQ).total_under("full")
        yield Row(f"{family} {flavour}", theirs * SEQ, ours * SEQ, full)


def run_megatron_bridge(root: Path) -> Iterator[Row]:
    """Of providers in Megatron's words, with the fields of megatron-core's TransformerConfig."""
    import torch

    from flopcalc.integrations.megatron_bridge import map_config, num_floating_point_operations

    inner = ("training", "training.utils", "utils", "data", "data.datasets", "peft")
    packages = ("megatron", "megatron.bridge", *(f"megatron.bridge.{name}" for name in inner))
    theirs = load(
        "megatron.bridge.training.utils.flop_utils",
        root,
        light=packages,
        absent=(
            "megatron.bridge.data.datasets.packing_utils",
            "megatron.bridge.training.config",
            "megatron.bridge.utils.common_utils",
            "megatron.bridge.peft.lora",
        ),
    )
    theirs.LoRA = type("LoRA", (), {})
    for name, provider in make_providers(torch.nn.functional.silu).items():
        cfg = types.SimpleNamespace(model=provider)
        step = flopcalc.estimate_flops(map_config(provider), batch_size=BATCH, seq_len=SEQ)
        ours = num_floating_point_operations(cfg, BATCH)
        yield Row(name, theirs.num_floating_point_operations(cfg, BATCH), ours, step.total_under("full"))


def make_providers(silu: Any) -> dict[str, Any]:
    """Model providers with the fields that Megatron's formula and ours read."""
    shared = {
        "seq_length": SEQ, "gated_linear_unit": True, "activation_func": silu, "multi_latent_attention": False,
        "num_moe_experts": None, "moe_ffn_hidden_size": None, "moe_shared_expert_intermediate_size": None,
        "mtp_num_layers": None, "make_vocab_size_divisible_by": 128, "tensor_model_parallel_size": 1,
    }  # fmt: skip
    models = {
        "llama-3.1-8b": {"num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_query_groups": 8,
                         "kv_channels": 128, "ffn_hidden_size": 14336, "vocab_size": 128256},
        "qwen3-30b-a3b": {"num_layers": 48, "hidden_size": 2048, "num_attention_heads": 32, "num_query_groups": 4,
                          "kv_channels": 128, "ffn_hidden_size": 6144, "vocab_size": 151936, "num_moe_experts": 128,
                          "moe_router_topk": 8, "moe_ffn_hidden_size": 768},
        "deepseek-v3": {"num_layers": 61, "hidden_size": 7168, "num_attention_heads": 128, "num_query_groups": 128,
                        "kv_channels": 128, "ffn_hidden_size": 18432, "vocab_size": 129280, "num_moe_experts": 256,
                        "moe_router_topk": 8, "moe_ffn_hidden_size": 2048, "moe_layer_freq": [0] * 3 + [1] * 58,
                        "moe_shared_expert_intermediate_size": 2048, "multi_latent_attention": True,
                        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64,
                        "v_head_dim": 128},
    }  # fmt: skip
    return {name: types.SimpleNamespace(**{**shared, **fields}) for name, fields in models.items()}


RUNNERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    "verl": run_verl, "veomni": run_veomni, "nemo_automodel": run_nemo_automodel,
    "megatron_bridge": run_megatron_bridge, "torchtitan": run_torchtitan,
    "llamafactory": run_llamafactory, "ms_swift": run_ms_swift, "composer": run_composer,
}  # fmt: skip


# --- the page ---------------------------------------------------------------------------------------------------------
def measure(framework: str, folder: Path) -> list[Row]:
    """A framework's rows, in a process of its own: stand-ins stay there."""
    command = [sys.executable, __file__, "--only", framework, "--folder", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{framework}: {done.stderr.strip()[-500:]}")
    return [Row(*row) for row in json.loads(done.stdout.splitlines()[-1])]


def format_tables(found: dict[str, list[Row]]) -> str:
    """HF configs as one table, frameworks with configs of their own as another."""
    own = ("torchtitan", "megatron_bridge")
    shared = [name for name in found if name not in own]
    lines = [f"| model | {' | '.join(shared)} |", "|---" * (len(shared) + 1) + "|"]
    for index, preset in enumerate(PRESETS):
        cells = [_format(found[name][index].ratio) for name in shared]
        lines.append(f"| {preset} | {' | '.join(cells)} |")
    lines += ["", "| framework's own config | theirs ÷ `model` | theirs ÷ `full` |", "|---|---|---|"]
    for name in own:
        for row in found.get(name, []):
            lines.append(f"| {name}: {row.model} | {_format(row.ratio)} | {row.theirs / row.full:.4f} |")
    return "\n".join(lines)


def _format(ratio: float | None) -> str:
    return "none" if ratio is None else f"{ratio:.3f}"


def write_page(tables: str) -> None:
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n\n{tables}\n\n{END}{after}", encoding="utf-8")


# --- speed ------------------------------------------------------------------------------------------------------------
def measure_speed() -> dict[str, float]:
    """Microseconds of one call of every adapter, the best of many, on a usual batch."""
    from flopcalc.integrations import composer, llamafactory, megatron_bridge, ms_swift, nemo_automodel, veomni, verl

    draw = random.Random(0)
    lengths = [draw.randint(200, 8000) for _ in range(64)]
    pictures = [draw.choice((1024, 1536, 2304)) for _ in range(16)]
    device = types.ModuleType("device")
    device.get_device_flops = lambda: 1.0  # type: ignore[attr-defined]
    sys.modules |= {"verl.utils.flops_counter": device, "veomni.utils.count_flops": device}
    sys.modules |= {name: types.ModuleType(name) for name in ("verl", "verl.utils", "veomni", "veomni.utils")}
    text, vision = ({**flopcalc.bind(name).source.config} for name in ("llama-3.1-8b", "qwen2-vl-7b"))
    batch = {"input_ids": _Ids((8, 4096))}
    provider = types.SimpleNamespace(model=make_providers(None)["deepseek-v3"])
    formula = nemo_automodel.get_flops_formula_for_hf_config(text)
    trainer = types.SimpleNamespace(model=None)
    per_batch = composer.make_flops_per_batch(None, model=text)
    bridge = megatron_bridge._Bound({}).count
    ours, tower = verl.FlopsCounter(text), veomni.VeomniFlopsCounter(vision)
    assert formula is not None
    calls: dict[str, Callable[[], object]] = {
        "verl, 64 documents": lambda: ours.estimate_flops(lengths, 1.0),
        "veomni, 64 documents and 16 images": lambda: tower.estimate_flops(lengths, 1.0, images_seqlens=pictures),
        "nemo_automodel": lambda: formula(text, 8, 4096),
        "megatron_bridge": lambda: bridge(provider, 64),
        "composer": lambda: per_batch(batch),
        "ms_swift, HF Trainer": lambda: ms_swift.floating_point_ops(trainer, batch, model=text),
        "llamafactory": lambda: llamafactory.compute_model_flops("llama-3.1-8b", 8, 4096),
    }
    return {name: 1e6 * min(timeit.repeat(call, number=20, repeat=25)) / 20 for name, call in calls.items()}


class _Ids:
    """A batch's input_ids, as far as a counter asks."""

    def __init__(self, shape: tuple[int, int]) -> None:
        self.shape = shape
        self.device = "cpu"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--only", choices=PACKAGES)
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    if arguments.speed:
        speeds = measure_speed()
        for name, value in speeds.items():
            print(f"{value:8.1f} µs  goal {LIMIT_US:.0f}  {'ok' if value <= LIMIT_US else 'MISSED'}  {name}")
        sys.exit(any(value > LIMIT_US for value in speeds.values()))
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        if arguments.only:
            print(json.dumps(list(RUNNERS[arguments.only](unpack(arguments.only, folder)))))
            return
        tables = format_tables({name: measure(name, folder) for name in RUNNERS})
    if arguments.write:
        write_page(tables)
    else:
        print(tables)


if __name__ == "__main__":
    main()
