"""Seconds of one decoded token on a GPU: HF's generate with and without a mask, and a static cache in a CUDA graph.

Fixed before anything was measured: a model with random weights, one sequence behind a prompt of 512 tokens.

- `generate-plain`, `generate-mask`: model.generate without and with attention_mask: (seconds of 33 new tokens - seconds
  of 1) / 32. `…-again` repeats it at the same lengths.
- `forward`: model(...) with a growing cache, token by token, as `flopcalc predict --phase decode` times it.
- `graph`: the same forward pass over a static cache of 640 positions, captured in a CUDA graph and replayed.
- `graph-compiled`: the same with torch.compile before capture, in its default mode.

The ways run in the order forward, generate with a mask, generate without, static, graph: forward meets the lengths
first, so the plans that cuDNN builds for each new length are in its time.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Json = dict[str, Any]
RESULTS = Path(__file__).parent / "results"
PROMPT, NEW, ROOM = 512, 33, 640
_REPEATS = 30


def time_generate(torch: Any, model: Any, ids: Any, **given: Any) -> float:
    """Seconds of one token more."""

    def run(new: int) -> float:
        _wait(torch)
        start = time.perf_counter()
        with torch.no_grad():
            model.generate(ids, max_new_tokens=new, min_new_tokens=new, do_sample=False, **given)
        _wait(torch)
        return time.perf_counter() - start

    run(1)
    return (run(NEW) - run(1)) / (NEW - 1)


def time_forward(torch: Any, model: Any, ids: Any) -> float:
    """Seconds of a token behind a growing cache."""
    with torch.no_grad():
        cache = model(input_ids=ids, use_cache=True, logits_to_keep=1).past_key_values
        token = ids[:, :1]
        for _ in range(3):
            model(input_ids=token, past_key_values=cache, use_cache=True)
        _wait(torch)
        start = time.perf_counter()
        for _ in range(_REPEATS):
            model(input_ids=token, past_key_values=cache, use_cache=True)
        _wait(torch)
    return (time.perf_counter() - start) / _REPEATS


def make_static(torch: Any, model: Any, ids: Any) -> Callable[[], Any]:
    """One token's forward pass over a static cache."""
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=ROOM)
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    token = ids[:, :1].clone()
    places = torch.tensor([[ids.shape[1]]], device=ids.device)
    seen = (torch.arange(ROOM, device=ids.device) <= ids.shape[1]).view(1, 1, 1, ROOM)

    def step() -> Any:
        with torch.no_grad():
            return model(
                input_ids=token, past_key_values=cache, use_cache=True, position_ids=places, attention_mask=seen
            ).logits

    return step


def time_graph(torch: Any, model: Any, ids: Any, is_compiled: bool) -> float:
    """Seconds of one replay of a captured step."""
    step = make_static(torch, torch.compile(model) if is_compiled else model, ids)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(3):
        graph.replay()
    _wait(torch)
    start = time.perf_counter()
    for _ in range(_REPEATS):
        graph.replay()
    _wait(torch)
    return (time.perf_counter() - start) / _REPEATS


def _wait(torch: Any) -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure(out: Path, models: list[str], device: str, config: Json | None = None) -> None:
    """All ways of one model after another; a way that fails says why."""
    import torch

    from flopcalc.measure.calibrate.provenance import describe_machine
    from flopcalc.measure.calibrate.tables import Bench, counts
    from flopcalc.measure.predictor.runs import cut_config

    kept: Json = {
        "provenance": {**describe_machine(device), "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())},
        "cases": [],
        "failures": [],
    }
    bench = Bench(device)
    for name in models:
        preset, _, layers = name.partition(":")
        own = config or cut_config(preset, int(layers))
        model = counts.build(bench, own)
        model.eval()
        ids = torch.randint(3, own["vocab_size"], (1, PROMPT), device=bench.device)
        for way, call in list_ways(torch, model, ids).items():
            begun = time.monotonic()
            try:
                seconds = call()
                kept["cases"].append({"model": preset, "layers": int(layers), "way": way, "token_s": seconds})
                print(f"{time.monotonic() - begun:6.1f} s  {name}  {way}  {1e3 * seconds:.3f} ms", flush=True)
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"[:300]
                kept["failures"].append({"case": f"{name} {way}", "reason": reason})
                print(f"{time.monotonic() - begun:6.1f} s  {name}  {way}  failed: {reason}", flush=True)
            out.write_text(json.dumps(kept, indent=1) + "\n")


def list_ways(torch: Any, model: Any, ids: Any) -> dict[str, Callable[[], float]]:
    """Name -> what times one token that way."""
    ones = torch.ones_like(ids)
    return {
        "forward": lambda: time_forward(torch, model, ids),
        "generate-mask": lambda: time_generate(torch, model, ids, attention_mask=ones),
        "generate-mask-again": lambda: time_generate(torch, model, ids, attention_mask=ones),
        "generate-plain": lambda: time_generate(torch, model, ids),
        "generate-plain-again": lambda: time_generate(torch, model, ids),
        "static": lambda: time_static(torch, model, ids),
        "graph": lambda: time_graph(torch, model, ids, False),
        "graph-compiled": lambda: time_graph(torch, model, ids, True),
    }


def time_static(torch: Any, model: Any, ids: Any) -> float:
    """Seconds of a token over a static cache, without a graph."""
    step = make_static(torch, model, ids)
    for _ in range(3):
        step()
    _wait(torch)
    start = time.perf_counter()
    for _ in range(_REPEATS):
        step()
    _wait(torch)
    return (time.perf_counter() - start) / _REPEATS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("models", nargs="*", help="preset:layers")
    given = parser.parse_args()
    measure(given.out, given.models or ["llama-3.2-1b:16", "llama-3.1-8b:6"], given.device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
