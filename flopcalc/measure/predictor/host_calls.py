"""Time the host: one call of each kind of operator in units of an addition, and a fixed piece of work, the probe.

The probe's seconds show how fast the host is at the moment. It runs a few small layers that dispatch what HF's layers
do (norms in float32, rotary embeddings, attention, a gated MLP), so that a host that is busy elsewhere slows both
alike. It never waits for the device, and no step for its kernels, which run on a stream of their own.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from flopcalc.measure.calibrate.tables import Bench

_ROUNDS = 9
_CALLS = 25  # per reading of the clock
_TENSORS = (64, 576)  # of an optimizer


def make_calls(bench: Bench) -> dict[str, list[Callable[[], Any]]]:
    """Kind -> calls on tensors so small that the device waits for the host."""
    torch = bench.torch
    functional = torch.nn.functional

    def draw(*shape: int, dtype: object = torch.bfloat16) -> Any:
        return torch.randn(*shape, device=bench.device).to(dtype)

    x, y, matrix, row = draw(8, 64), draw(8, 64), draw(64, 64), draw(64)
    wide, heads, base = draw(8, 64, dtype=torch.float32), draw(1, 4, 64, 64), draw(16, 64)
    mask = torch.ones(1, 1, 64, 64, dtype=torch.bool, device=bench.device).tril()
    places = torch.randint(0, 4, (16,), device=bench.device)
    found: dict[str, list[Callable[[], object]]] = {
        "pointwise": [
            lambda: x + y,
            lambda: x * y,
            lambda: -x,
            lambda: functional.silu(x),
            lambda: wide.pow(2),
            lambda: torch.rsqrt(wide),
        ],
        "view": [lambda: x.view(8, 4, 16), lambda: x.transpose(0, 1), lambda: x[..., :32], lambda: x.unsqueeze(0)],
        "make": [lambda: torch.empty_like(x)],
        "fill": [lambda: torch.zeros_like(x), lambda: torch.arange(8, device=bench.device)],
        "cast": [lambda: x.to(torch.float32), lambda: wide.to(torch.bfloat16)],
        "copy": [lambda: x.clone(), lambda: matrix.t().contiguous()],
        "cat": [lambda: torch.cat((x, y), -1)],
        "reduce": [lambda: wide.mean(-1, keepdim=True), lambda: x.sum(0)],
        "norm": [lambda: functional.layer_norm(x, (64,), row, row)],
        "softmax": [lambda: functional.softmax(wide, -1)],
        "gather": [lambda: functional.embedding(places, base), lambda: base[places]],
        "scatter": [lambda: base.index_add(0, places, base)],
        "sort": [
            lambda: torch.topk(wide, 2, -1),
            lambda: torch.sort(places),
            lambda: torch.cumsum(places, 0),
            lambda: torch.histc(wide, bins=4, min=0, max=3),
        ],
        "product": [lambda: torch.mm(x, matrix), lambda: torch.addmm(row, x, matrix)],
        "attention": [lambda: functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)],
        "attention_masked": [lambda: functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask)],
    }
    if bench.is_gpu and hasattr(torch, "_grouped_mm"):
        experts, ends = draw(4, 64, 64), torch.tensor([4, 8, 12, 16], device=bench.device, dtype=torch.int32)
        found["product_grouped"] = [lambda: torch._grouped_mm(base, experts, offs=ends)]
    return found


def measure_units(bench: Bench) -> dict[str, float]:
    """Kind -> mean seconds of its calls, over those of an addition that is timed along with each."""
    with bench.torch.no_grad():
        calls = make_calls(bench)
        one = calls["pointwise"][0]
        units = {
            kind: round(statistics.fmean(_compare(bench, call, one) for call in found), 3)
            for kind, found in calls.items()
        }
    return {**units, **measure_tensors(bench)}


def measure_tensors(bench: Bench) -> dict[str, float]:
    """What a training loop's host takes for each tensor, in additions: to clear its gradient, and to step it.

    From fused AdamW over few and over many small tensors; all its other work takes the same time.
    """
    torch = bench.torch
    taken: dict[str, list[float]] = {"cleared": [], "tensor": []}
    made = [_make_optimizer(bench, count) for count in _TENSORS]
    one = make_calls(bench)["pointwise"][0]
    for i in range(_ROUNDS + 1):
        with torch.no_grad():
            unit_s = _time(bench, one) / _CALLS
        few, many = (_step_once(bench, *each) for each in made)
        if i:  # the first step makes the states
            for kind, less, more in zip(taken, few, many, strict=True):
                taken[kind].append((more - less) / (_TENSORS[1] - _TENSORS[0]) / unit_s)
    return {kind: round(statistics.median(values), 3) for kind, values in taken.items()}


def _make_optimizer(bench: Bench, count: int) -> tuple[Any, list[Any]]:
    torch = bench.torch
    tensors = [torch.nn.Parameter(torch.zeros(64, device=bench.device)) for _ in range(count)]
    return torch.optim.AdamW(tensors, lr=1e-5, fused=True), tensors


def _step_once(bench: Bench, optimizer: Any, tensors: list[Any]) -> tuple[float, float]:
    """Host seconds of clearing the gradients, and of a step."""
    for each in tensors:
        each.grad = bench.torch.zeros_like(each)
    bench.synchronize()
    start = time.perf_counter()
    optimizer.step()
    stepped = time.perf_counter()
    optimizer.zero_grad(set_to_none=True)
    return time.perf_counter() - stepped, stepped - start


def _compare(bench: Bench, call: Callable[[], object], one: Callable[[], object]) -> float:
    """The median ratio of the two, timed in turns, because the host's speed changes all the time."""
    ratios = []
    for _ in range(_ROUNDS):
        taken = [_time(bench, each) for each in (one, call, one)]
        ratios.append(2 * taken[1] / (taken[0] + taken[2]))
    return statistics.median(ratios)


def _time(bench: Bench, call: Callable[[], object]) -> float:
    call()
    bench.synchronize()
    start = time.perf_counter()
    for _ in range(_CALLS):
        call()
    return time.perf_counter() - start


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
