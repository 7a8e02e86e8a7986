"""Configs with one value changed: what we refuse HF cannot run either, and what both take is counted the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

import pytest
from tiers import mark_heavy

from flopcalc.base.data import list_data_files
from flopcalc.base.errors import FlopcalcError
from flopcalc.core.model.bound import bind_model
from flopcalc.core.model.config import load_config

Json = dict[str, Any]
TYPES = tuple(sorted(list_data_files("examples")))
# The inputs depend on these: another one is another workload.
OF_INPUTS = (
    "image_size",
    "patch_size",
    "patch_sizes",
    "patch_stride",
    "window_size",
    "num_patches",
    "num_mel_bins",
    "max_source_positions",
    "num_frames",
)
NO_NUMBERS = ("token", "dropout", "drop_", "eps", "init", "_id", "vocabulary_map")
# The inputs of these examples do not reach the key, or do not fit another value of it.
NOT_REACHED = {
    "chameleon": ["vq_config.num_embeddings"],  # as many as vocabulary_map has names for
    "colqwen2": ["vlm_config.vision_config.hidden_size"],
    "encoder-decoder": ["decoder.vocab_size"],
    "emu3": ["vq_config.codebook_size"],
    "gemma4": ["audio_config.hidden_size", "audio_config.num_attention_heads"],
    "gemma4_assistant": ["text_config.num_key_value_heads", "text_config.head_dim", "text_config.global_head_dim"],
    "gemma4_unified_assistant": [
        "text_config.num_key_value_heads",
        "text_config.head_dim",
        "text_config.global_head_dim",
    ],
    "git": ["num_image_with_embedding"],
    "glmasr": ["audio_config.hidden_size", "audio_config.max_position_embeddings"],
    "molmo": ["vision_backbone.image_patch_size"],
    "molmoe": ["vision_backbone.image_patch_size"],
    "nemotron_h_omni": ["audio_config.hidden_size"],
    "qwen2_5_omni_thinker": ["audio_config.output_dim"],
    "qwen3_omni_moe_thinker": ["audio_config.output_dim"],
    "t5gemma": ["decoder.vocab_size"],
    "unlimited_ocr": ["text_config.num_attention_heads"],  # HF's eager attention repeats no keys, its others do
}
TIED = ("textnet-body",)  # every size of it must fit another
# Words of refusals that are no fault if HF runs, because a count would be wrong: a spec says what it leaves out, HF
# drops what one of two lists has more, a size would be 0 or a fraction, the workload's images are of another size,
# a second width or head that HF would build is not described.
LEFT_OUT = (
    "described", "must have 2 to 4 layers", "must have as many entries", "must have num_stages entries",
    "no whole number", "is not a size", "of one size", "must have one entry per stage", "must be multiples of",
    "must divide the patches", "must be the same in text_config", "must be encoder_hidden_dim",
    "must be different layers of the encoder", "token has the width of the last stage",
    "must be the last of hidden_sizes", " entries", "must hand on", "must be square",
)  # fmt: skip


def list_values(config: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every whole number of a config, every list of them, every flag."""
    for key, value in config.items():
        if any(word in key for word in NO_NUMBERS):
            continue
        if isinstance(value, dict):
            yield from list_values(value, (*path, key))
        elif type(value) in (int, bool) or (isinstance(value, list) and value and all(type(n) is int for n in value)):
            yield (*path, key), value


def spoil(value: Any) -> list[Any]:
    """Other values: another size, a list that is too short or too long, the other flag or null."""
    if isinstance(value, bool):
        return [not value, None]
    if isinstance(value, list):
        return [value[:-1], [*value, value[-1]], [value[0] + 1, *value[1:]]]
    return [value + 1, 2 * value]


def put(config: Json, path: tuple[str, ...], value: Any) -> Json:
    changed = inner = deepcopy(config)
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return changed


@pytest.mark.parametrize("model_type", mark_heavy(TYPES, ("clip_vision_model", "llama")))
def test_values(model_type: str) -> None:
    torch = pytest.importorskip("torch")
    from flopcalc.measure.counters.flop_counter import count_flops
    from flopcalc.measure.hf.compare import compare_bound, make_executed, make_load
    from flopcalc.measure.hf.examples import find_example, list_cases, make_estimator, make_inputs, takes
    from flopcalc.measure.hf.kernels import install
    from flopcalc.measure.hf.models import build_model, count_parameters
    from flopcalc.measure.hf.verify import prepare

    prepare()
    example = find_example(model_type)
    if example.needs:
        pytest.importorskip(example.needs)
    config = example.configs[-1]
    named = {"architectures": [example.architecture]} if example.architecture else {}
    unspoiled = make_estimator(example, config)
    architecture = example.choose_class(unspoiled.spec.architecture)
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
    for path, value in list_values(config):
        if ".".join(path) in NOT_REACHED.get(model_type, ()) or path[-1] in OF_INPUTS:
            continue
        for spoiled in spoil(value):
            changed = put(config, path, spoiled)
            said = f"{'.'.join(path)} {value} -> {spoiled}"
            estimator, refusal = unspoiled, ""
            try:
                estimator = make_estimator(example, changed)
                estimator.estimate(make_load(load))
            except FlopcalcError as error:
                refusal = str(error)
                if any(words in refusal for words in LEFT_OUT):
                    continue
            try:
                traced = trace(changed, estimator)
            except Exception:  # whatever HF's code raises: it cannot run, so nothing is counted wrong
                continue
            if refusal:
                wrong.append(f"{said}: HF runs it, but it is refused: {refusal}")
                continue
            taken += 1
            executed = make_executed(bind_model(load_config({**named, **changed})), {})
            if not compare_bound(executed, load, traced).is_equal:
                wrong.append(f"{said}: counted otherwise")
    assert not wrong, "\n".join(wrong)
    assert taken > 0 or model_type in TIED
