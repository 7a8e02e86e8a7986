"""Tiles that cuBLAS takes for bf16 products, and what the GPU executes of some of them: data for hardware/tiles.py.

`measure` records, with sizes drawn from fixed seeds:

- `choices`: products as linear layers run them (forward, gradient of the input, gradient of the weight). The name of
  the kernel that ran holds its tile and its cluster of tiles.
- `rounded`: the same with rows that are a multiple of 32 and not of 128, for which cuBLAS takes other kernels.
- `usual`: the same with sizes as real steps have them: layers of a width between 1,024 and 8,192, towers, heads.
- `biased`, `conv1d` and `odd`: the same of layers with a bias, of GPT-2's layers, and of widths no multiple of 8.
- `products`, `experts` and `attention`: single calls, with what the GPU's own counter of bf16 tensor cores saw.

The committed file was made in four runs: `biased`, `conv1d`, `odd` and more `products` are of the second, under
`later`, `rounded` is of the third, and `usual` of the fourth. `later` shows that other kernels follow the same rule,
and `usual` how good guesses are for the sizes of real steps: nothing is fitted on them.

`fit` finds the constants of the model that guesses the tile of a size that nobody ran, on four fifths of the choices,
shows how far the guesses for the others are off, and with --out fits on all and writes the file that flopcalc ships.
cuBLAS takes other kernels where a batch has a multiple of 32, 64 or 128 rows, so forward and dgrad have a fit for each;
and where an output has few tiles it splits the depth into parts, which is a choice of its own.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from flopcalc.hardware.tiles import ROUND_ROWS, SPLIT_PARTS, find_round

Json = dict[str, Any]
PARTS = ("products", "experts", "attention", "choices", "biased", "conv1d", "odd", "rounded", "usual")
DIRECTIONS = ("forward", "dgrad", "wgrad")
FITS = (*DIRECTIONS, *(f"{direction}-{rows}" for direction in ("forward", "dgrad") for rows in ROUND_ROWS))
VOCABULARIES = (32000, 32064, 49152, 50257, 50304, 65536, 92544, 100278, 128256, 131072, 151936, 152064, 256000, 262144)
RESULTS = Path(__file__).parent / "results"
_KERNEL = re.compile(r"nvjet_sm90_tst_(\d+)x(\d+)_64x\d+_(\d+)x(\d+)_")
_UNITS = 132  # processors of an H200
_CHUNK = 250  # products in one profile


def draw_width(draw: random.Random) -> int:
    """The width of a layer: mostly a multiple of 256, sometimes of 128 or 64."""
    step = draw.choice((256, 256, 128, 64))
    return max(step, round(2 ** draw.uniform(8, 14.2) / step) * step)


def draw_rows(draw: random.Random) -> int:
    """Rows of a batch: most fill no tiles."""
    rows = round(2 ** draw.uniform(6.5, 13.5))
    return rows if draw.random() < 0.8 else max(128, round(rows / 128) * 128)


def draw_products(
    count: int, seed: int = 7, is_odd: bool = False, is_rounded: bool = False
) -> Iterator[tuple[int, int, int]]:
    """Rows, outputs and inputs; odd: a width is no multiple of 8; rounded: rows are a multiple of 32, not of 128."""
    draw = random.Random(seed)
    while count:
        m, n, k = draw_rows(draw), draw_width(draw), draw_width(draw)
        if is_rounded:
            step = draw.choice((32, 64))
            m = (2 * (m // (2 * step)) + 1) * step
        if is_odd:
            less = draw.choice((4, 4, 2, 1))
            n, k = (n - less, k) if draw.random() < 0.5 else (n, k - less)
        elif draw.random() < 0.06:
            n = draw.choice(VOCABULARIES)
        if 2 * m * n * k < 3e12:
            count -= 1
            yield m, n, k


def draw_usual(count: int, seed: int = 31) -> Iterator[tuple[int, int, int]]:
    """Rows, outputs and inputs of layers as models have them, in steps as people run them."""
    draw = random.Random(seed)
    while count:
        width = draw.choice((1024, 1152, 1280, 1408, *(256 * draw.randint(4, 32) for _ in range(12))))
        inner = round(width * draw.uniform(2.4, 4.2) / 256) * 256
        keys = 128 * draw.randint(1, max(1, width // 256))
        head = draw.choice((*VOCABULARIES, 64 * draw.randint(500, 2400)))
        layers = (width, width), (keys, width), (inner, width), (width, inner), (inner, width), (head, width)
        n, k = draw.choice(layers)
        m = draw.randint(1, 8) * 10 * draw.randint(50, 200)
        if 2 * m * n * k < 3e12 and m < 12000:
            count -= 1
            yield m, n, k


def run_layer(torch: Any, way: str, m: int, n: int, k: int, pool: Any) -> None:
    """Products of a layer, in the layouts that autograd gives them; `biased` and `conv1d` (GPT-2's) forward alone."""
    x, weight, gradient = (pool[: a * b].view(a, b) for a, b in ((m, k), (n, k), (m, n)))
    if way == "biased":
        torch.nn.functional.linear(x, weight, pool[:n])
    elif way == "conv1d":
        torch.addmm(pool[:n], x, pool[: n * k].view(k, n))
    else:
        torch.mm(x, weight.t())
        torch.mm(gradient, weight)
        torch.mm(gradient.t(), x)


def record_choices(way: str, asked: list[tuple[int, int, int]], seconds: float, is_tiny: bool) -> list[Any]:
    """[m, n, k, names of each product's kernels] for each layer."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    device = "cpu" if is_tiny else "cuda"
    activities = [ProfilerActivity.CPU] if is_tiny else [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    if is_tiny:
        asked = [(m // 64 + 1, 64, 64) for m, _, _ in asked[:4]]
    largest = max(max(m * k, n * k, m * n) for m, n, k in asked)
    pool = torch.randn(largest, device=device, dtype=torch.bfloat16)
    operator, each = ("aten::mm", 3) if way == "plain" else ("aten::addmm", 1)
    rows: list[Any] = []
    begun = time.monotonic()
    for start in range(0, len(asked), _CHUNK):
        if time.monotonic() - begun > seconds:
            break
        part = asked[start : start + _CHUNK]
        with profile(activities=activities) as seen:
            for m, n, k in part:
                run_layer(torch, way, m, n, k, pool)
            if not is_tiny:
                torch.cuda.synchronize()
        found = [event for event in seen.events() if event.name == operator]
        found.sort(key=lambda event: event.time_range.start)
        assert len(found) == each * len(part), (len(found), len(part))
        names = [[kernel.name[:80] for kernel in event.kernels] for event in found]
        rows += [[*size, names[each * i : each * (i + 1)]] for i, size in enumerate(part)]
    return rows


def count_calls(calls: Iterator[tuple[Any, Callable[[], Any]]], bench: Any, seconds: float) -> list[Any]:
    """[what, executed FLOPs] of single calls, until the time is over."""
    begun, rows = time.monotonic(), []
    for what, call in calls:
        if time.monotonic() - begun > seconds:
            break
        try:
            call()
            bench.synchronize()
            rows.append([what, bench.count_executed(call)])
        except Exception as error:
            rows.append([what, f"{type(error).__name__}: {error}"[:200]])
        bench.free()
    return rows


def list_products(bench: Any, is_tiny: bool) -> Iterator[tuple[Any, Callable[[], Any]]]:
    from flopcalc.measure.calibrate.tables.counts import _make_linear

    sizes = zip(draw_products(200), draw_products(200, 17), draw_products(200, 19, is_odd=True), strict=True)
    for i, (m, n, k) in enumerate(size for three in sizes for size in three):  # those whose kernels are named
        direction = DIRECTIONS[i // 3 % 3]
        if is_tiny:
            m, n, k = 16, 64, 64
        if i % 3 == 1:
            x, weight, bias = bench.random(m, k), bench.random(n, k), bench.random(n)
            yield [m, n, k, "biased"], lambda x=x, w=weight, b=bias: bench.torch.nn.functional.linear(x, w, b)
        else:
            yield [m, n, k, direction], _make_linear(bench, direction, m, n, k)


def list_experts(bench: Any, is_tiny: bool) -> Iterator[tuple[Any, Callable[[], Any]]]:
    from flopcalc.measure.calibrate.tables.counts import _make_experts

    draw = random.Random(11)
    for i in range(300):
        copies = draw.choice((8, 16, 32, 48, 64, 128))
        mean = 2 ** draw.uniform(3, 11)
        n, k = (max(256, round(2 ** draw.uniform(8.5, 13) / 128) * 128) for _ in range(2))
        rows = [max(0, round(draw.gauss(mean, 0.4 * mean))) for _ in range(copies)]
        if is_tiny:
            rows, n, k = [3, 5], 64, 64
        if sum(rows) * n * k < 1e12 and copies * n * k < 4e9:
            direction = DIRECTIONS[i % 3]
            yield [rows, n, k, direction], _make_experts(bench, direction, n, k, rows)


def list_attention(bench: Any, is_tiny: bool) -> Iterator[tuple[Any, Callable[[], Any]]]:
    from flopcalc.measure.calibrate.tables.attention import make_call

    draw = random.Random(13)
    for i in range(160):
        dim = draw.choice((64, 72, 80, 88, 96, 128, 128, 256))
        length = round(2 ** draw.uniform(4, 11.5))
        is_causal, direction = bool(i % 2), ("forward", "backward")[i // 2 % 2]
        kernel = "cudnn" if draw.random() < 0.7 else "flash"
        if is_tiny:
            length, kernel = 32, "eager"
        what = [kernel, direction, 2, 4, length, dim, is_causal]
        try:
            yield what, make_call(bench, kernel, direction, 2, 4, length, dim, dim, is_causal)
        except Exception as error:
            print(what, type(error).__name__, str(error)[:100], flush=True)


def measure(out: Path, parts: list[str], count: int, seconds: float, is_tiny: bool) -> None:
    """The parts; the counter comes before the profiler, which may take it away."""
    from flopcalc.measure.calibrate.provenance import describe_machine
    from flopcalc.measure.calibrate.tables import Bench

    device = "cpu" if is_tiny else "cuda"
    bench = Bench(device)
    date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    command = "python benchmarks/tile_choices.py measure"
    kept: Json = {"provenance": {**describe_machine(device), "command": command, "date": date}}
    counted = {"products": list_products, "experts": list_experts, "attention": list_attention}
    for part in [part for part in counted if part in parts]:
        list_calls = counted[part]
        kept[part] = count_calls(list_calls(bench, is_tiny), bench, seconds)
        print(part, len(kept[part]), flush=True)
    asked = {
        "choices": ("plain", list(draw_products(count))),
        "biased": ("biased", list(draw_products(count // 2, 17))),
        "conv1d": ("conv1d", list(draw_products(count // 4, 23))),
        "odd": ("plain", list(draw_products(count // 6, 19, is_odd=True))),
        "rounded": ("plain", list(draw_products(count // 2, 29, is_rounded=True))),
        "usual": ("plain", list(draw_usual(count // 2))),
    }
    for name, (way, sizes) in asked.items():
        if name not in parts:
            continue
        kept[name] = record_choices(way, sizes, 2 * seconds, is_tiny)
        print(name, len(kept[name]), flush=True)
    with gzip.open(out, "wt") as file:
        json.dump(kept, file)


# --- fit --------------------------------------------------------------------------------------------------------------
class Choice(NamedTuple):
    """A product as cuBLAS sees it (rows, columns, depth), and the tile and cluster that it took."""

    rows: int
    columns: int
    depth: int
    shape: tuple[int, int, int, int, int]  # rows and columns of a tile, tiles of a cluster along both, 1: depth split


def turn(direction: str, m: int, n: int, k: int) -> tuple[int, int, int]:
    """Rows, columns and depth of a layer's product: cuBLAS stores columns first."""
    return {"forward": (n, m, k), "dgrad": (k, m, n), "wgrad": (k, n, m)}[direction]


def read_choices(measured: Json, name: str) -> list[Choice]:
    """Products of one of FITS, large enough to matter, whose kernel is known."""
    found = []
    direction, _, step = name.partition("-")
    at = DIRECTIONS.index(direction)
    for m, n, k, names in [*measured["choices"], *measured["rounded"]["rounded"]]:
        if direction != "wgrad" and find_round(m) != int(step or 0):
            continue
        main = [kernel for kernel in names[at] if not kernel.startswith("Memset")]
        match = _KERNEL.match(main[0])
        if match and m >= 128 and m * n * k >= 1e9:
            a, b, along, across = map(int, match.groups())
            found.append(Choice(*turn(direction, m, n, k), (a, b, along, across, int("splitK" in main[0]))))
    often = Counter(choice.shape for choice in found)
    return [choice for choice in found if often[choice.shape] >= 3]


def fit(choices: list[Choice], held: int, steps: int) -> tuple[Json, dict[str, float]]:
    """Constants that make the tiles that were taken the cheapest, and errors on the choices from `held` on."""
    import torch

    torch.manual_seed(0)
    shapes = sorted({choice.shape for choice in choices}, key=lambda shape: (shape[4], shape))
    whole = sum(not shape[4] for shape in shapes)  # shapes behind these split the depth
    index = {shape: i for i, shape in enumerate(shapes)}
    a, b, along, across = (torch.tensor([float(shape[i]) for shape in shapes]) for i in range(4))
    rows, columns, depth = (torch.tensor([float(choice[i]) for choice in choices])[:, None] for i in range(3))
    depth = torch.ceil(depth / 64)
    padded_rows = torch.ceil(rows / (a * along)) * a * along
    padded_columns = torch.ceil(columns / (b * across)) * b * across
    clusters = padded_rows * padded_columns / (a * b * along * across) / torch.floor(_UNITS / (along * across))
    tiles = torch.ceil(rows / a) * torch.ceil(columns / b) / _UNITS
    taken = torch.tensor([index[choice.shape] for choice in choices])
    executed = padded_rows * padded_columns / (rows * columns)
    kinds = sorted({shape[2:4] for shape in shapes})
    kind = torch.tensor([kinds.index(shape[2:4]) for shape in shapes])
    own = [torch.zeros(len(shapes), requires_grad=True) for _ in range(3)]
    of_kind = torch.zeros(2, len(kinds), requires_grad=True)  # kinds of clusters
    common = torch.tensor([0.0, 0.0, 1.5, 1.5, -1.5, -3.5, 3.0, -2.0, 2.0, 0.0], requires_grad=True)
    optimizer = torch.optim.Adam([*own, of_kind, common], lr=0.04)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

    def make_constants() -> tuple[Any, ...]:
        area, shared = a * b / 16384, torch.sigmoid(common[0])
        loaded = (a / across**shared + b / along**shared) / 256 * torch.exp(common[1])
        pace = torch.logsumexp(torch.stack([area * 8, loaded * 8]), 0) / 8 * torch.exp(own[0])
        end = torch.exp(common[2] + own[1]) * area + torch.exp(common[3])
        smooth, loose = (torch.sigmoid(common[at] + each)[kind] for at, each in zip((4, 7), of_kind, strict=True))
        return pace, end, own[2] / 10, smooth, loose

    def spend_parts(part: Any, constants: tuple[Any, ...], which: slice, parts: int) -> Any:
        pace, end, slope, smooth, loose = (each[which] for each in constants)
        deep = torch.ceil(depth[part] / parts)
        turns = sum(
            share * (torch.ceil(waves) * (1 - smooth) + smooth * waves)
            for share, waves in ((1 - loose, clusters[part][:, which] * parts), (loose, tiles[part][:, which] * parts))
        )
        start = torch.exp(common[6]) + (torch.exp(common[8]) + parts * torch.exp(common[9]) if parts > 1 else 0)
        return torch.log(turns * (pace * deep + end) + start) + slope * torch.log(deep)

    def spend(part: Any) -> Any:
        constants = make_constants()
        once = spend_parts(part, constants, slice(0, whole), 1)
        if whole == len(shapes):
            return once
        split = [spend_parts(part, constants, slice(whole, None), parts) for parts in SPLIT_PARTS]
        return torch.cat([once, torch.stack(split).amin(0)], 1)

    for _ in range(steps):
        part = torch.randperm(held)[:800]
        chance = torch.log_softmax(-spend(part) / (0.3 * torch.exp(common[5]) + 0.002), 1)
        loss = -chance[range(len(part)), taken[part]].mean()
        kept_small = zip((1, 0.1, 0.1, 0.3), (*own, of_kind), strict=True)
        loss = loss + 3e-4 * sum(share * each.pow(2).sum() for share, each in kept_small)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        constants = make_constants()
        lines = [
            [*shape[:4], *(float(f"{float(each[i]):.4g}") for each in constants)] for i, shape in enumerate(shapes)
        ]
        start, more, for_part = (round(float(torch.exp(common[at])), 2) for at in (6, 8, 9))
        kept = {"start": start, "split": [more, for_part], "tiles": lines[:whole], "splits": lines[whole:]}
        part = torch.arange(held, len(choices)) if held < len(choices) else torch.arange(held)
        guessed = spend(part).argmin(1)
        errors = executed[part, guessed] / executed[part, taken[part]] - 1
        right = (guessed == taken[part]).float().mean()
    return kept, {"right": float(right), "mean": float(errors.mean()), "mean size": float(errors.abs().mean())}


def fit_all(measured: Json, steps: int, device: str) -> Json:
    """The shipped file; prints how good guesses are for choices that were held out."""
    import torch

    torch.set_num_threads(1)
    torch.set_default_device(device)
    kept: Json = {"provenance": measured["provenance"]}
    for name in FITS:
        choices = read_choices(measured, name)
        random.Random(0).shuffle(choices)
        _, errors = fit(choices, len(choices) * 4 // 5, steps)
        print(name, len(choices), {what: f"{100 * value:.2f} %" for what, value in errors.items()}, flush=True)
        kept[name], _ = fit(choices, len(choices), steps)
    return kept


def write(out: Path, kept: Json) -> None:
    """One line for each tile."""
    lines = [f' "provenance": {json.dumps(kept["provenance"])}']
    for name in FITS:
        part = kept[name]
        tiles, splits = (",\n".join(f"   {json.dumps(line)}" for line in part[list_]) for list_ in ("tiles", "splits"))
        lines.append(
            f' "{name}": {{\n  "start": {part["start"]},\n  "split": {json.dumps(part["split"])},\n'
            f'  "tiles": [\n{tiles}\n  ],\n  "splits": [\n{splits}\n  ]\n }}'
        )
    out.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("command", choices=("measure", "fit"))
    parser.add_argument("--out", type=Path, help="measure: a .json.gz file; fit: the constants")
    parser.add_argument(
        "--measured", type=Path, default=RESULTS / "tile_choices.json.gz", help="fit: what was measured"
    )
    parser.add_argument("--count", type=int, default=12000, help="measure: products whose kernels are named")
    parser.add_argument("--seconds", type=float, default=40, help="measure: for each part")
    parser.add_argument("--steps", type=int, default=1200, help="fit: of the optimizer")
    parser.add_argument("--device", default="cpu", help="fit: where; the constants of a GPU differ a little")
    parser.add_argument("--parts", default=",".join(PARTS), help="measure: which, with commas between")
    parser.add_argument("--tiny", action="store_true", help="measure: hardly any work on a CPU, to try the script")
    given = parser.parse_args()
    if given.command == "measure":
        if given.out is None:
            parser.error("measure needs --out FILE")
        measure(given.out, given.parts.split(","), given.count, given.seconds, given.tiny)
        return 0
    with gzip.open(given.measured, "rt") as file:
        kept = fit_all(json.load(file), given.steps, given.device)
    if given.out is not None:
        write(given.out, kept)
    return 0


if __name__ == "__main__":
    sys.exit(main())
