"""What Opacus' real steps execute: recorded in a folder of truth, and made again to compare.

    python -m lab.truth_clipping [TYPE …] [--check] [--truth DIR]

All of model_specs/clipping.toml without names; files are DIR/clipping/TYPE.json. A step is Opacus' own: forward,
backward (two of them for ghost and fast), clip, noise, SGD. What clipping adds is the step's count less that of the
same step without Opacus.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from flopcalc.base.data import find_data_dir, load_toml
from flopcalc.base.errors import FlopcalcError
from lab.truth import find_folder, find_versions, make_recorder_parser, report, write

__all__ = ["count_step", "find_differences", "list_configs", "list_types", "load", "record"]

FOLDER = "clipping"
SCHEMA = 1
MODES = ("hooks", "ghost", "fast")
MADE_WITH = ("torch", "transformers", "peft", "opacus")
Json = dict[str, Any]

# --- Cases --------------------------------------------------------------------------------------------------
_TEXT = {"vocab_size": 97, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 3}
_LLAMA = {"model_type": "llama", **_TEXT, "num_key_value_heads": 1, "tie_word_embeddings": False}
# Configs that are taken through every recipe, and what their recipes call the modules.
DEEP: dict[str, tuple[list[Json], Json]] = {
    "llama": (
        [_LLAMA, {**_LLAMA, "tie_word_embeddings": True}],
        {"first": "model.layers.0", "embed": "model.embed_tokens", "targets": ["q_proj", "v_proj"], "norms": "*norm*"},
    ),
    "qwen2": (
        [{**_LLAMA, "model_type": "qwen2"}],
        {
            "first": "model.layers.0", "embed": "model.embed_tokens", "bias": "*bias", "norms": "*norm*",
            "targets": ["k_proj", "down_proj"],
        },
    ),
    "gpt_neox": (
        [{"model_type": "gpt_neox", **_TEXT, "tie_word_embeddings": False}],
        {
            "first": "gpt_neox.layers.0", "embed": "gpt_neox.embed_in", "bias": "*bias", "norms": "*norm*",
            "targets": ["query_key_value", "dense_4h_to_h"],
        },
    ),
    "gpt2": (
        [
            {"model_type": "gpt2", "vocab_size": 97, "n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 32,
             "tie_word_embeddings": False, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
        ],
        {
            "first": "transformer.h.0", "embed": "transformer.wte", "bias": "*bias", "norms": "*ln_*",
            "targets": ["c_attn", "c_fc"],
        },
    ),
}  # fmt: skip
_BATCH = {"batch": 3, "seq": 7}
_LAST = {"batch": 2, "seq": 7, "logits": 3}


def list_cases(name: str, is_deep: bool) -> Iterator[tuple[Json, Json]]:
    """(workload, recipe without clipping) pairs; those of every type, then what the few deep ones add."""
    yield _BATCH, {}
    yield {"batch": 1, "seq": 12}, {}
    yield _BATCH, {"lora": {"r": 2, "targets": ["all-linear"]}}
    yield _BATCH, {"recompute": "full-reentrant"}
    if not is_deep:
        return
    words = DEEP[name][1]
    for workload in ({"batch": 1, "seq": 1}, {"batch": 2, "seq": 1}, {"batch": 2, "seq": 30}, {"batch": 5, "seq": 3}):
        yield workload, {}
    yield {"seq": 9, "mask": [4, 9, 2]}, {}
    yield {"lengths": [3, 1, 8]}, {}
    yield _LAST, {}
    yield {**_LAST, "logits": 1}, {}
    yield {**_BATCH, "grad_accum": 2}, {}
    yield _BATCH, {"freeze": [words["embed"]]}
    yield _BATCH, {"freeze": [words["embed"], words["first"]]}
    yield _BATCH, {"train_only": ["lm_head"]}
    yield _BATCH, {"train_only": [words["first"]]}
    yield _BATCH, {"train_only": [words["norms"]]}
    if "bias" in words:
        yield _BATCH, {"train_only": [words["bias"]]}
    lora = {"r": 4, "targets": words["targets"]}
    yield _BATCH, {"lora": lora}
    yield {"batch": 1, "seq": 12}, {"lora": lora}
    yield _BATCH, {"lora": {**lora, "r": 1}}
    yield _BATCH, {"lora": {**lora, "save": ["lm_head"]}}
    yield _BATCH, {"lora": lora, "freeze": ["*lora_A*"]}
    yield _BATCH, {"lora": lora, "freeze": [words["first"]]}
    yield _BATCH, {"lora": lora, "recompute": "full-reentrant"}


def list_configs(name: str) -> list[tuple[Json, bool]]:
    """Tiny configs of a type, with whether they are taken through every recipe; all of them with an untied head too."""
    if name in DEEP:
        return [(config, number == 0) for number, config in enumerate(DEEP[name][0])]
    from flopcalc.measure.hf.examples import find_example

    configs = find_example(name).configs
    untied = [{**config, "tie_word_embeddings": False} for config in configs]
    return [(config, False) for config in [*configs, *(config for config in untied if config not in configs)]]


def load_types() -> Json:
    return load_toml(os.path.join(find_data_dir(), "clipping.toml"))


def list_types() -> list[str]:
    return sorted([*load_types()["linear"], *load_types()["functorch"]])


def load(name: str, folder: Path | None = None) -> Json:
    """What is recorded of a model type."""
    path = (folder or find_folder()) / FOLDER / f"{name}.json"
    truth: Json = json.loads(path.read_text(encoding="utf-8"))
    return truth


# --- Steps --------------------------------------------------------------------------------------------------


def make_step(model: Any, batch: Json, clipping: str, micro_batches: int = 1) -> Callable[[], Any]:
    """One whole optimizer step, with Opacus' hooks on the model, or plain ('none')."""
    import torch
    from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping

    model.train()
    rows = len(batch["input_ids"])
    sgd = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=1e-3)

    def count_losses(module: Any) -> Any:
        return module(**batch).logits.float().flatten(1).mean(1)  # one per sample

    if clipping == "none":

        def step_plainly() -> None:
            sgd.zero_grad()
            for _ in range(micro_batches):
                count_losses(model).mean().backward()
            sgd.step()

        return step_plainly
    noise: Json = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "expected_batch_size": rows}
    if clipping == "hooks":
        wrapped: Any = GradSampleModule(model, strict=False)
        optimizer: Any = DPOptimizer(sgd, **noise)
    else:
        wrapped = GradSampleModuleFastGradientClipping(model, strict=False, use_ghost_clipping=clipping == "ghost")
        optimizer = DPOptimizerFastGradientClipping(sgd, **noise)

    def step() -> None:
        for number in range(micro_batches):
            optimizer.signal_skip_step(do_skip=number < micro_batches - 1)  # as BatchMemoryManager does
            optimizer.zero_grad()
            losses = count_losses(wrapped)
            if clipping == "hooks":
                losses.mean().backward()
            else:
                DPTensorFastGradientClipping(wrapped, optimizer, losses).backward()
            check_samples(model, rows, clipping)
            optimizer.step()

    return step


def check_samples(model: Any, rows: int, clipping: str) -> None:
    """A wrong step is no truth: every parameter that trains has a gradient, or a norm, of every sample."""
    what = "grad_sample" if clipping == "hooks" else "_norm_sample"
    for name, parameter in model.named_parameters():
        found = getattr(parameter, what, None)
        if parameter.requires_grad and (found is None or len(found) != rows):
            raise RuntimeError(f"{name}: {what} of {None if found is None else tuple(found.shape)} for {rows} samples")


def count_step(config: Json, workload: Json, recipe: Json, clipping: str, model: Any = None) -> dict[str, int]:
    """FLOPs of one step by module path; what the optimizer multiplies stands under ''. `model` is changed."""
    import torch

    from flopcalc.core.estimate.binding import bind_config
    from flopcalc.measure.counters.flop_counter import count_flops
    from flopcalc.measure.hf.examples import find_example, make_inputs, takes
    from flopcalc.measure.hf.models import apply_recipe
    from flopcalc.measure.hf.verify import build

    example = find_example(config["model_type"])
    estimator = bind_config(config)
    if model is None:
        model = build(config, example)
    sizes = {key: value for key, value in workload.items() if key not in ("logits", "grad_accum")}
    batch = {**make_inputs(example, model.config, sizes, estimator), **example.call}
    rows, seq = batch["input_ids"].shape
    if takes(model, "position_ids") and "position_ids" not in batch:
        batch["position_ids"] = torch.arange(seq).repeat(rows, 1)  # else a learned table sees one sample alone
    if takes(model, "use_cache"):
        batch["use_cache"] = False
    if "logits" in workload:
        batch["logits_to_keep"] = workload["logits"]
    model = apply_recipe(model, recipe)
    step = make_step(model, batch, clipping, workload.get("grad_accum", 1))
    counted = count_flops(model, step)
    if counted.not_counted:
        raise RuntimeError(f"operators met and not counted: {counted.not_counted}")
    return {path: sum(row) for path, row in counted.rows.items() if any(row)}


# --- Records ------------------------------------------------------------------------------------------------


def record_case(config: Json, model: object, workload: Json, recipe: Json) -> Iterator[Json]:
    """One case per mode: the plain step, the step with Opacus, and what each module does more in it.

    Work inside functorch, and of hooks where little trains, has no autograd node of its module's: no rows there.
    """
    from copy import deepcopy

    from flopcalc.base.errors import RecipeError
    from flopcalc.core.estimate.binding import bind_config

    plain: dict[str, int] | None = None
    for clipping in MODES:
        try:
            bind_config(config, recipe={**recipe, "clipping": clipping})
        except RecipeError:
            continue  # what is refused has tests of its own
        where = f"{config['model_type']} {json.dumps(workload)} {json.dumps(recipe)} {clipping}"
        try:
            plain = plain or count_step(config, workload, recipe, "none", deepcopy(model))
            found = count_step(config, workload, recipe, clipping, deepcopy(model))
        except Exception as error:
            raise RuntimeError(f"{where}: {type(error).__name__}: {error}") from error
        case = {
            "workload": workload,
            "recipe": {**recipe, "clipping": clipping},
            "plain": sum(plain.values()),
            "total": sum(found.values()),
        }
        if not recipe and config["model_type"] in load_types()["linear"]:
            more = {path: flops - plain.get(path, 0) for path, flops in found.items()}
            case["rows"] = {path: flops for path, flops in more.items() if flops}
        yield case


def record(name: str, only: int | None = None) -> Json:
    """Every case of every tiny config of a type; `only`: so many of the first config's pairs, evenly chosen."""
    from flopcalc.measure.hf.examples import find_example
    from flopcalc.measure.hf.verify import build

    configs = []
    for config, is_deep in list_configs(name)[: None if only is None else 1]:
        model = build(config, find_example(name))
        pairs = list(list_cases(name, is_deep))
        step = 1 if only is None else max(1, len(pairs) // only)
        cases = [case for pair in pairs[::step] for case in record_case(config, model, *pair)]
        if cases:
            configs.append({"config": config, "cases": cases})
    return {"schema": SCHEMA, "made_with": find_versions(MADE_WITH), "configs": configs}


def dump(truth: Json) -> str:
    """JSON with one case a line."""
    configs = []
    for entry in truth["configs"]:
        body = ",\n".join(f"    {json.dumps(case, separators=(',', ':'))}" for case in entry["cases"])
        configs.append(f'  {{\n   "config": {json.dumps(entry["config"])},\n   "cases": [\n{body}\n   ]\n  }}')
    head = f' "schema": {truth["schema"]},\n "made_with": {json.dumps(truth["made_with"])}'
    return f'{{\n{head},\n "configs": [\n' + ",\n".join(configs) + "\n ]\n}\n"


def find_differences(old: Json, new: Json, is_part: bool = False) -> list[str]:
    """What two records tell differently; of a part, only the cases it has."""

    def flat(truth: Json) -> dict[str, Any]:
        return {
            f"{json.dumps(entry['config'])} {json.dumps(case['workload'])} {json.dumps(case['recipe'])}": case
            for entry in truth["configs"]
            for case in entry["cases"]
        }

    a, b = flat(old), flat(new)
    keys = b.keys() if is_part else a.keys() | b.keys()
    return [f"{key}: recorded {a.get(key)}, now {b.get(key)}" for key in sorted(keys) if a.get(key) != b.get(key)]


def main() -> int:
    options = make_recorder_parser("truth_clipping", __doc__).parse_args()
    folder = find_folder(options.truth)
    unknown = set(options.types) - set(list_types())
    if unknown:
        raise FlopcalcError(f"not in model_specs/clipping.toml: {', '.join(sorted(unknown))}")
    from flopcalc.measure.hf.verify import prepare

    prepare()
    (folder / FOLDER).mkdir(parents=True, exist_ok=True)
    failed = False
    for name in options.types or list_types():
        start, path = time.perf_counter(), folder / FOLDER / f"{name}.json"
        if options.check and not path.exists():
            failed = True
            print(f"{name}: was never recorded", flush=True)
            continue
        truth = record(name)
        if options.check:
            differing = find_differences(load(name, folder), truth)
            failed |= bool(differing)
            print(*(f"{name}: {line}" for line in differing), sep="\n", end="\n" if differing else "")
        else:
            write(path, dump(truth))
        cases = sum(len(entry["cases"]) for entry in truth["configs"])
        print(f"{name}: {cases} cases, {time.perf_counter() - start:.1f} s", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(report(main))
