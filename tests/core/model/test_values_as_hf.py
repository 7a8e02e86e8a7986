"""Every number of a config, spoiled: what HF's code cannot run is refused, and what both run is counted the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

import pytest
from tiers import mark_heavy

from flopcalc.errors import FlopcalcError

Json = dict[str, Any]
# Images, clips and both with text: one of each kind of tower.
TYPES = (
    "beit", "bit", "clip", "clip_vision_model", "convnext", "cvt", "deit", "dinat", "dinov2", "efficientnet",
    "focalnet", "hgnet_v2", "hiera", "levit", "mobilenet_v2", "mobilevit", "poolformer", "pvt", "pvt_v2", "regnet",
    "resnet", "siglip", "vit",
)  # fmt: skip
# The inputs depend on these: another one is another workload.
OF_INPUTS = ("image_size", "patch_size", "patch_sizes", "patch_stride", "window_size", "num_patches", "num_mel_bins")
NO_NUMBERS = ("token", "text_config", "dropout", "drop_", "eps", "init", "vocab", "position")


def list_numbers(config: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every whole number of a config, and every list of them."""
    for key, value in config.items():
        if any(word in key for word in NO_NUMBERS) or key in OF_INPUTS:
            continue
        if isinstance(value, dict):
            yield from list_numbers(value, (*path, key))
        elif type(value) is int or (isinstance(value, list) and value and all(type(entry) is int for entry in value)):
            yield (*path, key), value


def spoil(value: Any) -> list[Any]:
    if isinstance(value, list):
        last = (
            [*value[:-1], 0],
            [*value[:-1], -1],
            [*value[:-1], value[-1] + 1],
            [*value[:-1], "x"],
            [*value[:-1], None],
        )
        return [None, "x", [], value[:-1], [*value, value[-1]], *last]
    return [value + 1, 2 * value, 0, -1, value + 0.5, None, "x", []]


def put(config: Json, path: tuple[str, ...], value: Any) -> Json:
    changed = inner = deepcopy(config)
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return changed


@pytest.mark.parametrize("model_type", mark_heavy(TYPES, ("clip_vision_model",)))
def test_numbers(model_type: str) -> None:
    """What we refuse and HF runs is no fault here: sizes of 0, stages that a spec does not describe."""
    torch = pytest.importorskip("torch")
    from flopcalc.measure.counters.flop_counter import count_flops
    from flopcalc.measure.hf.compare import compare
    from flopcalc.measure.hf.examples import find_example, list_cases, make_estimator, make_inputs, takes
    from flopcalc.measure.hf.kernels import install
    from flopcalc.measure.hf.models import build_model, count_parameters
    from flopcalc.measure.hf.verify import prepare

    prepare()
    example = find_example(model_type)
    config = example.configs[-1]
    named = {"architectures": [example.architecture]} if example.architecture else {}
    architecture = example.architecture or make_estimator(example, config).spec.architecture
    loads = [load for load, recipe in list_cases(example, config) if not recipe and load.get("phase") == "train"]
    load = {**next((load for load in loads if load.get("images")), loads[0]), "phase": "forward"}

    def trace(changed: Json, estimator: Any) -> Json:
        install(example.kernels)
        model = build_model(changed, example.attention, architecture=architecture).eval()
        extra = {**example.call, **({"use_cache": False} if takes(model, "use_cache") else {})}
        inputs = make_inputs(example, model.config, load, estimator)
        total, trainable = count_parameters(model)
        with torch.no_grad():
            counted = count_flops(model, lambda: model(**inputs, **extra))
        return {"rows": counted.rows, "total": total, "trainable": trainable, "not_counted": counted.not_counted}

    wrong, taken = [], 0
    for path, value in list_numbers(config):
        for spoiled in spoil(value):
            changed = put(config, path, spoiled)
            said = f"{'.'.join(path)} {value} -> {spoiled}"
            try:
                estimator = make_estimator(example, changed)
            except FlopcalcError:
                continue
            try:
                traced = trace(changed, estimator)
            except Exception as error:  # whatever HF's code raises
                wrong.append(f"{said}: counted, but HF says {type(error).__name__}: {str(error)[:100]}")
                continue
            taken += 1
            if not compare({**named, **changed}, load, {}, traced).is_equal:
                wrong.append(f"{said}: counted otherwise")
    assert not wrong, "\n".join(wrong)
    assert taken > 0
