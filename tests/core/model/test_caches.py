"""What attention leaves in a cache, held against the cache that HF's model of every type fills."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from flopcalc.base.data import list_data_files
from flopcalc.core.model.ops import Attend, Chain, Op

pytestmark = pytest.mark.heavy

OUTPUTS = ("past_key_values", "past_buckets_states", "mems")  # what HF's outputs call a cache
# Tensors of a cache that do not grow with the sequence, or that hold no keys and values.
STATES = ("conv", "recurrent", "buffer", "overlap", "position")
# Why HF's model fills no cache that can be compared.
SKIPPED = {
    "blip": "generate hands over to the text decoder; forward keeps no cache",
    "blip-2": "generate hands over to the language model; forward keeps no cache",
    "instructblip": "generate hands over to the language model; forward keeps no cache",
    "instructblipvideo": "generate hands over to the language model; forward keeps no cache",
    "granite4_vision": "forward returns no cache",
    "shieldgemma2-classifier": "a classifier keeps no cache",
    "nvembed": "an embedding model keeps no cache",
    "qwen3_tts": "described as it is trained: forward keeps no cache",
    "flaubert": "HF returns no cache",
    "xlm": "HF returns no cache",
    "blt": "HF cannot make the cache from its config",
    "molmoe": "HF cannot make the cache from its published config, whose keys have other names",
}


def list_ops(chain: Chain) -> Iterator[Op]:
    for item in chain:
        if isinstance(item, Op):
            yield item
        else:
            for branch in item:
                yield from list_ops(branch)


def count_elements(value: Any, seen: set[int]) -> int:
    """Elements of the tensors in one layer of a cache; one that is there twice counts once."""
    import torch

    if isinstance(value, torch.Tensor):
        if value.numel() < 2 or value.data_ptr() in seen:
            return 0
        seen.add(value.data_ptr())
        return value.numel()
    if isinstance(value, dict):
        return sum(count_elements(part, seen) for key, part in value.items() if not any(s in str(key) for s in STATES))
    if isinstance(value, (list, tuple)):
        return sum(count_elements(part, seen) for part in value)
    return 0


def list_layers(cache: Any) -> list[int]:
    if hasattr(cache, "self_attention_cache"):
        return list_layers(cache.self_attention_cache) + list_layers(cache.cross_attention_cache)
    if hasattr(cache, "states_cache"):  # Reformer keeps the layers' inputs
        return list_layers(cache.states_cache)
    layers = [vars(layer) for layer in cache.layers] if hasattr(cache, "layers") else list(cache)
    return [count for layer in layers if (count := count_elements(layer, set()))]


def find_length(ops: list[Op], make: Callable[[int], dict[str, Any]]) -> int:
    """The longest prefill, of up to 11 tokens, in which no window is full: HF's sliding layers keep one key less."""
    from flopcalc.measure.hf.compare import make_load

    loads = [make_load(make(n)) for n in range(1, 13)]
    rows = {op.cache_rows: [op.cache_rows.count(load, "full") for load in loads] for op in ops}
    grown = [counts for counts in rows.values() if counts[-1] > counts[0]]  # the others are those of an encoder
    return min((next((n for n in range(1, 12) if counts[n] == counts[n - 1]), 12) for counts in grown), default=12) - 1


def make_call(example: Any, has_decoder: bool, length: int) -> dict[str, Any]:
    """A prefill of `length` tokens on the side that decodes, with the images and audio that HF cannot do without."""
    load: dict[str, Any] = {"batch": 2, "phase": "prefill", "seq": length}
    if has_decoder:
        load |= {"decoder_seq": length, "seq": example.lengths[0]}
    if example.clips:
        load["clips"] = example.clips
        load["seq"] = None if has_decoder else length
    if "text" in example.skip and example.images:
        load["images"] = example.images[0]["images"]
        load["seq"] = example.images[0].get("seq") if has_decoder else example.images[0]["seq"] + length
    return {key: value for key, value in load.items() if value is not None}


@pytest.mark.parametrize("name", list_data_files("examples"))
def test_caches_hold_what_the_spec_says(name: str) -> None:
    import torch
    from transformers import DynamicCache

    from flopcalc import bind
    from flopcalc.measure.hf.compare import make_load
    from flopcalc.measure.hf.examples import find_example, make_inputs, takes
    from flopcalc.measure.hf.kernels import install
    from flopcalc.measure.hf.models import build_model

    if name in SKIPPED:
        pytest.skip(SKIPPED[name])
    example = find_example(name)
    if example.needs:
        pytest.importorskip(example.needs)
    install(example.kernels)
    for config in example.configs:
        named = {**({"architectures": [example.architecture]} if example.architecture else {}), **config}
        estimator = bind(named)
        every = (op for stage in estimator.stages for chain in stage.layers for op in list_ops(chain))
        ops = [op for op in every if isinstance(op, Attend) and op.cache]
        if not ops:
            continue
        make = partial(make_call, example, estimator.has_decoder)
        load = make(find_length(ops, make))
        architecture = example.choose_class(estimator.spec.architecture)
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            model = build_model(config, example.attention, architecture=architecture).eval()
            inputs = make_inputs(example, model.config, load, estimator)
            extra = {**example.call, **({"use_cache": True} if takes(model, "use_cache") else {})}
            out = model(**inputs, **extra)
            caches = [out[key] for key in (*OUTPUTS, "encoder_past_key_values") if out.get(key) is not None]
            if not caches:  # it returns none, but fills the one it is given
                caches = [DynamicCache(config=model.config)]
                model(**inputs, **extra, past_key_values=caches[0])
        found = sorted(count for cache in caches for count in list_layers(cache))
        counts = [op.cache * op.cache_rows.count(make_load(load), "full") for op in ops]
        assert found == sorted(count for count in counts if count), config
