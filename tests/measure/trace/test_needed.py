"""Convention model: the pairs that HF's own masks let through, read from the masks of a run, equal the spec's.

HF hands every attention call to a registered function. Ours counts the mask's open places before it goes on as eager
code does: it knows nothing of specs, windows or chunks. Modules that compute attention by themselves are not seen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tiers import LIGHT_TYPES, mark_heavy

from flopcalc import bind
from flopcalc.base.data import list_data_files
from flopcalc.core.model.ops import join
from flopcalc.measure.hf.compare import make_load
from flopcalc.measure.hf.examples import Example, find_example
from flopcalc.measure.hf.models import build_model
from flopcalc.measure.hf.verify import make_step

NAME = "count_open_pairs"
# Modules whose mask leaves open what the model does not need.
PADDED_OR_PHRASES = "windows at an image's edge see what pads them; which tokens see each other depends on the text"
LEFT_OPEN = {
    "aimv2": ("text_model", "the causal text tower makes its mask only where it is given an attention_mask"),
    "grounding-dino": ("backbone", PADDED_OR_PHRASES),
    "grounding-dino-body": ("backbone", PADDED_OR_PHRASES),
    "mm-grounding-dino": ("backbone", PADDED_OR_PHRASES),
    "mm-grounding-dino-body": ("backbone", PADDED_OR_PHRASES),
    "mllama": ("vision_model", "the mask closes padding to padding alone: real patches see it, and it sees them"),
    "sam2": ("backbone.blocks", "windows at an image's edge see what pads them"),
    "sam2_vision_model": ("backbone.blocks", "windows at an image's edge see what pads them"),
    "swin": ("swin.encoder", "windows at an image's edge see what pads them"),
    "upernet": ("backbone.swin.encoder", "windows at an image's edge see what pads them"),
    "videoprism": ("text_model", "the causal text tower makes its mask only where it is given an attention_mask"),
    "mask2former": ("encoder.swin.encoder", "windows at an image's edge see what pads them"),
    "mask2former-body": ("encoder.swin.encoder", "windows at an image's edge see what pads them"),
}
SEEN: list[tuple[Any, int, int]] = []  # module, FLOPs of its open pairs, and of all pairs


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *_: Any,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention on (b, h, s, d); the FLOPs of the pairs that the mask leaves open are noted."""
    heads = query.shape[1]
    key, value = (tensor.repeat_interleave(heads // tensor.shape[1], 1) for tensor in (key, value))
    scores = query @ key.transpose(-1, -2)
    is_open = torch.ones_like(scores, dtype=torch.bool)
    if attention_mask is not None:
        mask = attention_mask[..., : key.shape[-2]]
        is_open = (mask if mask.dtype == torch.bool else mask > -90).expand_as(scores)  # Swin closes with -100
    if is_open.shape[-1] == is_open.shape[-2]:
        # One row for all queries: what it closes is padding, which needs no queries either.
        is_alike = (is_open == is_open[..., :1, :]).all(-1).all(-1)[..., None]
        is_open = is_open & (is_open.any(-2) | ~is_alike)[..., None]
    is_open = is_open & find_picked(module, is_open, others)
    width = 2 * (query.shape[-1] + value.shape[-1])
    SEEN.append((module, int(is_open.sum()) * width, is_open.numel() * width))
    weights = scores.masked_fill(~is_open, -1e9).softmax(-1)
    return (weights @ value).transpose(1, 2).contiguous(), None


def find_picked(module: Any, like: torch.Tensor, others: dict[str, Any]) -> torch.Tensor:
    """The places that an indexer picked: HF makes a mask of them for eager code alone, and hands them on to others."""
    indices, blocks = others.get("indices"), others.get("block_indices")
    if indices is not None:  # keys, one choice for all heads
        return torch.zeros_like(like[:, :1]).scatter(-1, indices.long()[:, None], True)
    if blocks is not None:  # blocks of keys, one choice per group of heads; -1: none
        size = module.indexer.block_size
        count = -(-like.shape[-1] // size)
        chosen = torch.zeros((*blocks.shape[:3], count + 1), dtype=torch.bool)
        chosen = chosen.scatter(-1, blocks.masked_fill(blocks < 0, count), True)[..., :count]
        chosen = chosen.repeat_interleave(size, -1)[..., : like.shape[-1]]
        return chosen.repeat_interleave(like.shape[1] // chosen.shape[1], 1)
    return torch.ones_like(like)


@pytest.fixture(scope="module", autouse=True)
def _count_open_pairs() -> Iterator[None]:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, eager_mask)
    yield
    del AttentionInterface._global_mapping[NAME], AttentionMaskInterface._global_mapping[NAME]


def list_workloads(example: Example, has_decoder: bool, needs_text: bool) -> list[dict[str, Any]]:
    base: dict[str, Any] = {"phase": "forward"}
    base |= {"decoder_seq": example.decoder_seq} if example.decoder_seq and has_decoder else {}
    base |= {"clips": example.clips} if example.clips else {}
    images = [{**workload, "phase": "forward"} for workload in example.images[:1]]
    # An encoder of audio has no tokens, and so no length of its own.
    first, second = ({} if example.decoder_seq and example.clips else {"seq": seq} for seq in example.lengths[:2])
    has_text = needs_text and "text" not in example.skip
    texts = [] if not has_text else [{"batch": 2, **first, **base}, {"batch": 1, **second, **base}]
    return [*texts, *({**base, **image} for image in images)]


@pytest.mark.filterwarnings("ignore")  # what HF advises is not about masks
@pytest.mark.parametrize("name", mark_heavy(list_data_files("examples"), LIGHT_TYPES))
def test_open_pairs(name: str) -> None:
    example = find_example(name)
    for config in example.configs:
        named = {**({"architectures": [example.architecture]} if example.architecture else {}), **config}
        estimator = bind(named)
        try:
            model = build_model(config, NAME, architecture=example.choose_class(estimator.spec.architecture))
        except (ValueError, ImportError, KeyError):
            pytest.skip("its attention takes no registered function")
        paths = {module: path for path, module in model.named_modules()}
        for workload in list_workloads(example, estimator.has_decoder, estimator.needs_text):
            SEEN.clear()
            make_step(model, example, workload, config)()
            if not SEEN:
                pytest.skip("its attention calls no registered function")
            opened: Counter[str] = Counter()
            executed: Counter[str] = Counter()
            for module, needed, done in SEEN:
                opened[paths[module]] += needed
                executed[paths[module]] += done
            load = make_load(workload)
            for counting, found in (("full", executed), ("model", opened)):
                ours = sum_attends(estimator, load, counting)
                spared = LEFT_OPEN.get(name, ("",))[0] if counting == "model" else ""
                different = {
                    path: (ours.get(path), value)
                    for path, value in found.items()
                    if ours.get(path) != value and not (spared and spared in path)
                }
                assert not different, f"{workload} {counting}: path: (ours, the mask's) = {different}"


def sum_attends(estimator: Any, load: Any, convention: str) -> Counter[str]:
    sums: Counter[str] = Counter()
    for counted in estimator.rows(load, convention):
        block, row, _ = counted
        if row.op.kind == "attend" and row.op.v:  # without values: a second score term, which HF adds as a mask
            for layer in block.layers if block.layers is not None else (None,):
                path = block.path if layer is None else f"{block.path}.{layer}"
                sums[join(path, row.op.name)] += counted.flops.forward
    return sums
