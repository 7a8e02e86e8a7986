"""A fixed piece of host work, the probe, whose seconds show how fast the host is at the moment.

It runs a few small layers that dispatch what HF's layers do (norms in float32, rotary embeddings, attention, a gated
MLP), so that a host that is busy elsewhere slows both alike. It never waits for the device, and no step for its
kernels, which run on a stream of their own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from flopcalc.measure.calibrate.tables import Bench

_WIDTH, _HEADS, _ROWS = 64, 2, 8
_LAYERS = {True: 2, False: 6}  # with a backward pass and without: a few milliseconds each


def make_probe(bench: Bench, is_train: bool) -> Callable[[], float]:
    """A function that runs the probe once and returns its seconds.

    Training steps get a probe with a backward pass: autograd's thread runs on another core, whose speed changes
    independently.
    """
    torch = bench.torch
    torch.manual_seed(0)
    layers = torch.nn.ModuleList(_make_layer(torch) for _ in range(_LAYERS[is_train]))
    layers = layers.to(bench.device, torch.bfloat16)
    given = torch.randn(1, _ROWS, _WIDTH, device=bench.device, dtype=torch.bfloat16)
    angles = torch.randn(1, 1, _ROWS, _WIDTH // _HEADS, device=bench.device)
    cos, sin = angles.cos().to(torch.bfloat16), angles.sin().to(torch.bfloat16)

    stream = torch.cuda.Stream() if bench.is_gpu else None

    def probe() -> float:
        with torch.cuda.stream(stream):
            return run()

    def run() -> float:
        start = time.perf_counter()
        with torch.set_grad_enabled(is_train):
            x = given
            for layer in layers:
                x = layer(x, cos, sin)
        if is_train:
            x.sum().backward()
            for parameter in layers.parameters():
                parameter.grad = None
        return time.perf_counter() - start

    return probe


def _make_layer(torch: Any) -> Any:
    nn = torch.nn

    class ProbeNorm(nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(_WIDTH))

        def forward(self, x: Any) -> Any:
            dtype = x.dtype
            x = x.to(torch.float32)
            x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
            return self.weight * x.to(dtype)

    class ProbeLayer(nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = ProbeNorm(), ProbeNorm()
            self.query, self.key, self.value, self.out = (nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(4))
            self.gate, self.up = (nn.Linear(_WIDTH, 2 * _WIDTH, bias=False) for _ in range(2))
            self.down = nn.Linear(2 * _WIDTH, _WIDTH, bias=False)
            self.activation = nn.SiLU()

        def forward(self, x: Any, cos: object, sin: object) -> Any:
            normed = self.first(x)
            shape = (*normed.shape[:-1], _HEADS, -1)
            query, key, value = (
                layer(normed).view(shape).transpose(1, 2) for layer in (self.query, self.key, self.value)
            )
            query, key = (each * cos + _turn(torch, each) * sin for each in (query, key))
            seen = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            x = x + self.out(seen.transpose(1, 2).reshape(x.shape).contiguous())
            normed = self.second(x)
            return x + self.down(self.activation(self.gate(normed)) * self.up(normed))

    return ProbeLayer()


def _turn(torch: Any, x: Any) -> Any:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)
