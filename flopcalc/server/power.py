"""The mean step of a server in; how busy one of its GPUs is, and the watts of all of them, out."""

from __future__ import annotations

from typing import NamedTuple

from flopcalc.hardware.devices import Device
from flopcalc.prediction.watts import Range, Shares, find_power_model, load_watts
from flopcalc.server.served import ServedModel
from flopcalc.server.step import Deployment, cut_cache, find_peak


class MeanStep(NamedTuple):
    """What one attention rank does in a step, on average: sequences that decode, their length, tokens of prompts."""

    seconds: float
    decodes: float
    length: float
    prompt: float = 0.0
    media: float = 0.0  # FLOPs of towers for each token of a prompt


def count_shares(model: ServedModel, layout: Deployment, device: Device, step: MeanStep) -> Shares:
    """FLOPs over the peak, each at its own format's, and bytes over the bandwidth of one GPU; kernels always run."""
    busy_s = moved = 0.0
    batch, tokens = step.decodes * layout.dp, (step.decodes + step.prompt) * layout.dp
    for weight in [*model.weights, *([model.head] if model.head is not None else [])]:
        size = weight.layers * weight.n * weight.k
        rows = batch if weight is model.head else tokens
        peak = find_peak(device.id, weight.compute)
        busy_s += 2 * size * weight.active * rows / layout.gpus / peak
        reached = weight.experts * (1 - (1 - weight.active / weight.experts) ** rows)
        moved += size * weight.bytes * reached / (layout.gpus if weight.experts > 1 else layout.tp * layout.pp)
    peak = find_peak(device.id)
    busy_s += step.media * step.prompt / layout.tp / layout.pp / peak
    for layers in model.cached:
        if layers.kind == "state":
            moved += 2 * step.decodes * layers.layers * layers.state_bytes / layout.tp / layout.pp
            continue
        length = min(step.length, layers.window) if layers.kind == "window" else step.length
        keys = step.decodes * length * layers.layers / layout.pp
        moved += keys * cut_cache(layers, layout.tp) * model.cache_bytes
        busy_s += 2 * keys * layers.heads / layout.tp * (layers.qk + layers.v) / peak
    bandwidth = (device.bandwidth_gb_per_s or float("inf")) * 1e9
    return Shares(busy_s / step.seconds, moved / step.seconds / bandwidth)


def find_server_watts(model: ServedModel, layout: Deployment, device: Device, step: MeanStep) -> Range | None:
    """Watts of all GPUs; None where their power limit is not known.

    Steps of HF models on a measured GPU tell less about an engine's: the interval is that of published serving runs.
    """
    power = find_power_model(device)
    if power is None:
        return None
    if power.evidence == "measured":
        low, high = load_watts()["intervals"]["published"]
        power = power._replace(factors=(low, high))
    return power.find(count_shares(model, layout, device, step)).watts.scale(layout.gpus)
