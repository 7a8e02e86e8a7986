"""Tables counts and padding: analytic FLOPs of whole steps against what a real step executed, and each product alone.

`counts` runs a few layers of each family at real widths. `padding` takes the op list of the same steps and measures
every distinct product and attention call by itself, so that the sum of its rows says where a step's excess comes from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from flopcalc.base.vocabulary import CallKernel, Phase, ProductDirection, Recompute
from flopcalc.core.count.products import Product
from flopcalc.core.model.ops import Attend, Linear
from flopcalc.core.workload.sums import Frames, Images, Pairs, Windows
from flopcalc.measure.calibrate.tables import Bench, Json, get_device, round_digits
from flopcalc.measure.calibrate.tables.attention import choose_kernel, make_call
from flopcalc.measure.calibrate.tables.attention import count_needed as count_attention
from flopcalc.measure.jobs.runner import Job, RowError

_QWEN_TOKENS = {
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
}
_MROPE = {"type": "mrope", "mrope_section": [16, 24, 24]}


def _text(layers: int, hidden: int, inner: int, heads: int, kv: int, vocab: int, **rest: object) -> Json:
    return {
        "num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": heads,
        "num_key_value_heads": kv, "vocab_size": vocab, "max_position_embeddings": 32768, **rest,
    }  # fmt: skip


def _clip(layers: int, hidden: int, inner: int, heads: int, image: int, patch: int) -> Json:
    return {
        "model_type": "clip_vision_model", "num_hidden_layers": layers, "hidden_size": hidden,
        "intermediate_size": inner, "num_attention_heads": heads, "image_size": image, "patch_size": patch,
        "projection_dim": hidden,
    }  # fmt: skip


# Few layers at published widths: 0.4 to 1.2 B parameters, and every dim a multiple of 128 where the family allows it.
CONFIGS: dict[str, Json] = {
    "llama": {"model_type": "llama", **_text(4, 2048, 8192, 16, 8, 128256, head_dim=128)},
    "mixtral": {
        "model_type": "mixtral",
        **_text(2, 2048, 4096, 16, 8, 32000, num_local_experts=8, num_experts_per_tok=2, sliding_window=None),
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        **_text(3, 2048, 6144, 16, 16, 129280),
        "moe_intermediate_size": 1024, "n_routed_experts": 16, "n_shared_experts": 1, "num_experts_per_tok": 4,
        "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "q_lora_rank": 1536, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    },
    "qwen2_vl": {
        "model_type": "qwen2_vl",
        "text_config": {"model_type": "qwen2_vl_text", **_text(4, 1536, 8960, 12, 2, 151936, rope_scaling=_MROPE)},
        "vision_config": {"depth": 4, "embed_dim": 1280, "hidden_size": 1536, "mlp_ratio": 4, "num_heads": 16},
        **_QWEN_TOKENS,
    },
    "qwen2_5_vl": {
        "model_type": "qwen2_5_vl",
        "text_config": {"model_type": "qwen2_5_vl_text", **_text(4, 2048, 11008, 16, 2, 151936, rope_scaling=_MROPE)},
        "vision_config": {
            "depth": 4, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "window_size": 112,
            "fullatt_block_indexes": [1, 3], "out_hidden_size": 2048,
        },
        **_QWEN_TOKENS,
    },
    "llava": {
        "model_type": "llava",
        "text_config": {"model_type": "llama", **_text(4, 2048, 8192, 16, 8, 32064, head_dim=128)},
        "vision_config": _clip(4, 1024, 4096, 16, 336, 14),
        "image_token_index": 32000,
        "vision_feature_layer": -2,
    },
}  # fmt: skip
_GRIDS = {"qwen2_vl": [[1, 36, 52]], "qwen2_5_vl": [[1, 36, 52]], "llava": [[1, 24, 24]]}
_TINY: dict[str, Json] = {
    "llama": {"model_type": "llama", **_text(2, 32, 64, 4, 2, 64, head_dim=8)},
    "mixtral": {
        "model_type": "mixtral",
        **_text(2, 32, 32, 4, 2, 64, num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    },
    "qwen2_5_vl": {
        "model_type": "qwen2_5_vl",
        "text_config": {
            "model_type": "qwen2_5_vl_text",
            **_text(2, 24, 42, 3, 1, 101, rope_scaling={"type": "mrope", "mrope_section": [1, 1, 2]}),
        },
        "vision_config": {
            "depth": 2, "hidden_size": 32, "intermediate_size": 50, "num_heads": 4, "patch_size": 4, "window_size": 16,
            "fullatt_block_indexes": [1], "out_hidden_size": 24,
        },
        "image_token_id": 97, "video_token_id": 98, "vision_start_token_id": 95, "vision_end_token_id": 96,
    },
    "llava": {
        "model_type": "llava",
        "text_config": {"model_type": "llama", **_text(2, 24, 42, 4, 2, 101)},
        "vision_config": _clip(2, 32, 50, 4, 12, 4),
        "image_token_index": 97,
        "vision_feature_layer": -2,
    },
}  # fmt: skip
_TINY_GRIDS = {"qwen2_5_vl": [[1, 6, 10]], "llava": [[1, 3, 3]]}


def get_config(family: str, suite: str) -> Json:
    return (_TINY if suite == "test" else CONFIGS)[family]


def get_grids(family: str, suite: str) -> list[list[int]]:
    """Images of each sample, in patches."""
    return (_TINY_GRIDS if suite == "test" else _GRIDS).get(family, [])


def format_images(grids: list[list[int]]) -> str:
    """[[1, 36, 52]] -> '1x36x52': a table's cell."""
    return "+".join("x".join(map(str, grid)) for grid in grids)


def _list_workloads(suite: str) -> Iterator[Json]:
    """Phase, length, batch, kernel, recomputation of the rows of one family."""
    if suite == "test":
        for kernel in ("flash", "eager"):
            yield {"phase": "train", "seq": 48, "batch": 2, "kernel": kernel, "recompute": "none"}
        yield {"phase": "forward", "seq": 48, "batch": 1, "kernel": "flash", "recompute": "none"}
        yield {"phase": "train", "seq": 48, "batch": 1, "kernel": "eager", "recompute": "full"}
        return
    for kernel in ("cudnn", "flash", "efficient"):
        yield {"phase": "train", "seq": 2048, "batch": 2, "kernel": kernel, "recompute": "none"}
    for kernel in ("cudnn", "flash"):
        yield {"phase": "train", "seq": 1024, "batch": 4, "kernel": kernel, "recompute": "none"}
        yield {"phase": "forward", "seq": 2048, "batch": 2, "kernel": kernel, "recompute": "none"}
        yield {"phase": "train", "seq": 2048, "batch": 2, "kernel": kernel, "recompute": "full"}
    yield {"phase": "forward", "seq": 1024, "batch": 4, "kernel": "cudnn", "recompute": "none"}
    if suite == "full":
        for seq, batch in ((4096, 1), (8192, 1), (1500, 2)):
            for kernel in ("cudnn", "flash"):
                yield {"phase": "train", "seq": seq, "batch": batch, "kernel": kernel, "recompute": "none"}
    # Eager rows last: torch's profiler runs in them, and shares libcupti with the hardware counter.
    for phase, recompute in (("train", "none"), ("forward", "none"), ("train", "full")):
        yield {"phase": phase, "seq": 2048, "batch": 2, "kernel": "eager", "recompute": recompute}


# --- counts -----------------------------------------------------------------------------------------------------------
def plan(suite: str) -> list[Job]:
    """One job per family: its model is built once."""
    jobs = []
    for family in _TINY if suite == "test" else CONFIGS:
        rows = {
            f"{family}/{w['phase']}/{w['seq']}x{w['batch']}/{w['kernel']}/{w['recompute']}": w
            for w in _list_workloads(suite)
        }
        args = {"device": get_device(suite), "suite": suite, "family": family}
        jobs.append(
            Job(f"counts-{family}", f"{__name__}:start", args, rows, timeout_s=120, expected_s=12 + 0.6 * len(rows))
        )
    return jobs


def start(args: Json) -> Callable[[Json], Json]:
    bench = Bench(args["device"])
    family, suite = args["family"], args["suite"]
    config, grids = get_config(family, suite), get_grids(family, suite)
    model = build(bench, config)
    return lambda row: measure(bench, model, family, config, grids, row)


def build(bench: Bench, config: Json) -> Any:
    """The family's model with random weights in bf16, made on the device itself."""
    from flopcalc.measure.hf.models import build_model

    torch = bench.torch
    with torch.device(bench.device):
        model = build_model(config, "sdpa", None, bench.device, torch.bfloat16)
    return model.to(bench.device)


def prepare(model: Any, kernel: CallKernel, recompute: Recompute, phase: Phase) -> None:
    """Set attention and recomputation of a built model."""
    model.train(phase == "train")
    model.set_attn_implementation("eager" if kernel == "eager" else "sdpa")
    if recompute == "none":
        model.gradient_checkpointing_disable()
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def make_inputs(bench: Bench, model: Any, grids: list[list[int]], row: Json) -> Json:
    """The batch of a row, on the device, pixels in bf16."""
    from flopcalc.measure.hf.models import make_batch

    batch = make_batch(model.config, {"batch": row["batch"], "seq": row["seq"], "images": grids})
    dtype = bench.torch.bfloat16
    return {
        key: value.to(bench.device, dtype) if value.is_floating_point() else value.to(bench.device)
        for key, value in batch.items()
    }


def make_step(bench: Bench, model: Any, batch: Json, row: Json) -> Callable[[], Any]:
    """One forward pass, or forward and backward, with the row's kernel."""
    torch = bench.torch
    labels = batch["input_ids"].clone()

    def train() -> None:
        model.zero_grad(set_to_none=True)
        with choose_kernel(bench, row["kernel"]):
            model(**batch, labels=labels, use_cache=False).loss.backward()

    def forward() -> None:
        with torch.no_grad(), choose_kernel(bench, row["kernel"]):
            model(**batch, use_cache=False)

    return train if row["phase"] == "train" else forward


def measure(bench: Bench, model: Any, family: str, config: Json, grids: list[list[int]], row: Json) -> Json:
    """One real step against the analytic count under every convention."""
    bench.free()
    analytic = count_analytic(config, grids, row)
    prepare(model, row["kernel"], row["recompute"], row["phase"])
    batch = make_inputs(bench, model, grids, row)
    step = make_step(bench, model, batch, row)
    try:
        step()  # warm-up: kernels are chosen and built now
    except RuntimeError as error:
        if "No available kernel" in str(error):
            raise RowError(f"kernel {row['kernel']} does not take this model's attention: {error}") from None
        raise
    bench.synchronize()
    executed = bench.count_executed(step)
    hardware = analytic["hardware"]
    record = {
        "family": family,
        **row,
        "images": format_images(grids),
        "analytic_model": analytic["model"],
        "analytic_full": analytic["full"],
        "analytic_hardware": hardware,
        "executed": executed,
        "ratio": round_digits(executed / hardware, 7) if executed is not None else None,
        "parameters": analytic["parameters"],
        **_count_in_software(model, step, batch, row),
    }
    model.zero_grad(set_to_none=True)
    return record


def count_analytic(config: Json, grids: list[list[int]], row: Json) -> Json:
    """FLOPs of the same step under each convention, from the config alone; and the model's parameters."""
    from flopcalc.core.estimate.binding import bind_config as bind

    estimator = bind(
        config, recipe={"recompute": row["recompute"]}, convention="hardware", attention_kernel=row["kernel"]
    )
    images = [grid for _ in range(row["batch"]) for grid in grids] or None
    estimate = estimator(row["batch"], row["seq"], image_grid_thw=images, phase=row["phase"])
    totals = {convention: estimate.total_under(convention) for convention in ("model", "full", "hardware")}
    return {**totals, "parameters": estimator.parameters()["total"]}


def _count_in_software(model: Any, step: Callable[[], Any], batch: Json, row: Json) -> Json:
    """What the software witnesses say; null where one cannot count this step. Never the row's end."""
    from flopcalc.measure.counters.flop_counter import count_flops

    found: Json = {"flop_counter": None, "profiler": None, "profiler_corrected": None, "fvcore": None}
    try:
        if row["kernel"] in ("cudnn", "eager"):  # fused kernels are all one to it, and it takes seconds
            found["flop_counter"] = count_flops(model, step).total
    except Exception as error:
        print(f"flop counter: {row}: {type(error).__name__}: {error}", flush=True)
    try:
        if row["kernel"] == "eager":  # it is slow, and gives nothing for fused attention
            from flopcalc.measure.counters import torch_profiler

            seen = torch_profiler.count(model, batch, row["phase"])
            found |= {"profiler": seen.total, "profiler_corrected": seen.corrected}
    except Exception as error:
        print(f"profiler: {row}: {type(error).__name__}: {error}", flush=True)
    try:
        if row["kernel"] == "eager" and row["phase"] == "forward":  # it traces a forward pass, and no fused attention
            from flopcalc.measure.counters import fvcore_counter

            found["fvcore"] = fvcore_counter.count(model, batch, row["phase"]).total
    except Exception as error:  # it may not be installed here
        print(f"fvcore: {row}: {type(error).__name__}: {error}", flush=True)
    return found


# --- padding ----------------------------------------------------------------------------------------------------------
def plan_padding(suite: str) -> list[Job]:
    """One job: every distinct product and attention call of each family's training step."""
    rows: dict[str, Json] = {}
    kernels: tuple[str, ...] = ("cudnn", "flash", "eager")
    if suite != "quick":
        kernels = ("flash", "eager") if suite == "test" else (*kernels, "efficient")
    for family in _TINY if suite == "test" else CONFIGS:
        sizes = [(48, 2)] if suite == "test" else [(2048, 2)] if suite == "quick" else [(2048, 2), (1024, 4)]
        for seq, batch in sizes:
            for call in list_calls(get_config(family, suite), get_grids(family, suite), seq, batch, kernels):
                about = {
                    "family": family,
                    "seq": seq,
                    "batch": batch,
                    "images": format_images(get_grids(family, suite)),
                }
                key = f"{family}/{seq}x{batch}/{call['kernel'] or call['kind']}/{call['shape']}/{call['direction']}"
                module, calls, again = call.pop("module"), call.pop("calls"), call.pop("calls_recompute")
                modules = rows.setdefault(key, {**about, **call, "modules": {}})["modules"]
                # Layers of one stack may be in several blocks (windowed and full ones): one row, calls added.
                before = modules.get(module, [0, 0])
                modules[module] = [before[0] + calls, before[1] + again]
    args = {"device": get_device(suite), "suite": suite}
    return [Job("padding", f"{__name__}:start_padding", args, rows, timeout_s=60, expected_s=8 + 0.22 * len(rows))]


def list_calls(config: Json, grids: list[list[int]], seq: int, batch: int, kernels: tuple[str, ...]) -> Iterator[Json]:
    """Products and attention calls of one training step with everything trained, and how often each is called."""
    from flopcalc.core.estimate.binding import bind_config as bind
    from flopcalc.core.workload.workload import make_workload

    estimator = bind(config, recipe={"recompute": "full"}, convention="hardware", attention_kernel="flash")
    images = [grid for _ in range(batch) for grid in grids] or None
    load = make_workload(batch, seq, image_grid_thw=images)
    for block, row, values in estimator.rows(load, "hardware"):
        op = row.op
        if not row.products or not isinstance(op, (Attend, Linear)):
            continue
        product = row.products[0]
        module = f"{block.path}.*.{op.name}" if block.layers is not None else f"{block.path}.{op.name}".rstrip(".")
        if block.layers is not None and not op.name:
            module = f"{block.path}.*"
        copies = block.copies
        again = copies if product.passes.recompute else 0
        common = {"module": module, "calls": copies, "calls_recompute": copies + again}
        if isinstance(op, Attend):
            for many, rows, length, mask in _list_attention(op, load, grids, batch):
                for kernel in kernels:
                    sizes = [rows, op.heads, length, op.qk, op.v]
                    shape = f"{mask} b{rows} h{op.heads} s{length} d{op.qk}/{op.v}"
                    about = {**common, "kind": "attend", "kernel": kernel, "sizes": sizes, "shape": shape, "mask": mask}
                    ahead = {"calls": copies * many, "calls_recompute": (copies + again) * many}
                    yield {**about, **ahead, "direction": "forward"}
                    if row.find("fused_backward") is not None:
                        yield {
                            **about,
                            "calls": copies * many,
                            "calls_recompute": copies * many,
                            "direction": "backward",
                        }
            continue
        m, n, k = values[0] * op.times, op.n_out, op.n_in
        shape = f"{m}x{n}x{k}"
        about = {**common, "kind": op.kind, "kernel": "", "sizes": [m, n, k], "shape": shape, "mask": ""}
        if op.copies == 1:
            yield from _list_directions(about, product)
            continue
        for layer in block.layers or ():  # every layer's router splits the rows in its own way
            one = {
                "module": f"{block.path}.{layer}.{op.name}",
                "kind": "experts",
                "calls": 1,
                "calls_recompute": 1 + bool(product.passes.recompute),
                "shape": f"{shape} over {op.copies} experts, layer {layer}",
            }
            yield from _list_directions({**about, **one, "layer": layer}, product)


def _list_directions(about: Json, product: Product) -> Iterator[Json]:
    """Forward; backward is once that for the weight, and once more for the input where a gradient is owed to it."""
    yield {**about, "direction": "forward"}
    back = {**about, "calls_recompute": about["calls"]}
    if product.passes.weight_gradient:
        yield {**back, "direction": "wgrad"}
    if product.passes.input_gradient:
        yield {**back, "direction": "dgrad"}


def _list_attention(op: Attend, load: Any, grids: list[list[int]], batch: int) -> Iterator[tuple[int, int, int, str]]:
    """(calls, batch, length, mask) of one layer's attention, as HF's sdpa path splits it."""
    from math import isqrt

    pairs = op.rows
    if isinstance(pairs, Pairs):
        yield 1, load.rows, load.seq, pairs.mask
    elif isinstance(pairs, Images):  # a tower of fixed size: all images in one call, times = length²
        yield 1, batch * len(grids), isqrt(op.times), "full"
    elif isinstance(pairs, Frames):
        for t, h, w in grids:
            yield t * batch, 1, h * w, "full"
    elif isinstance(pairs, Windows):
        side = pairs.side
        lengths: dict[int, int] = {}
        for t, h, w in grids:
            for top in range(0, h, side):
                for left in range(0, w, side):
                    length = min(side, h - top) * min(side, w - left)
                    lengths[length] = lengths.get(length, 0) + t * batch
        for length, many in lengths.items():
            yield many, 1, length, "full"


def start_padding(args: Json) -> Callable[[Json], list[Json]]:
    bench = Bench(args["device"])
    routes: dict[tuple[str, int, int], dict[int, list[int]]] = {}

    def measure_row(row: Json) -> list[Json]:
        rows_per_expert = []
        if row["kind"] == "experts":
            key = (row["family"], row["seq"], row["batch"])
            if key not in routes:
                routes[key] = find_routes(bench, args["suite"], *key)
            rows_per_expert = routes[key][row["layer"]]
        return measure_alone(bench, row, rows_per_expert)

    return measure_row


def find_routes(bench: Bench, suite: str, family: str, seq: int, batch: int) -> dict[int, list[int]]:
    """Layer -> rows that each expert gets in the step that `counts` runs: same weights, same tokens."""
    torch = bench.torch
    model = build(bench, get_config(family, suite))
    found: dict[int, list[int]] = {}
    for path, module in model.named_modules():
        if path.endswith(".mlp.experts"):
            layer, copies = int(path.split(".")[-3]), int(module.num_experts)

            def note(_module: object, args: Any, layer: int = layer, copies: int = copies) -> None:
                found[layer] = torch.bincount(args[1].flatten(), minlength=copies).tolist()

            module.register_forward_pre_hook(note)
    inputs = make_inputs(bench, model, get_grids(family, suite), {"batch": batch, "seq": seq})
    with torch.no_grad():
        model(**inputs, use_cache=False)
    return found


def measure_alone(bench: Bench, row: Json, rows_per_expert: list[int]) -> list[Json]:
    """What one call executes by itself, once for every module that makes it."""
    bench.free()
    if row["kind"] == "attend":
        batch, heads, length, qk, v = row["sizes"]
        is_causal = row["mask"] == "causal"
        call = make_call(bench, row["kernel"], row["direction"], batch, heads, length, qk, v, is_causal)
        needed = count_attention(
            {"length": length, "mask": row["mask"], "qk_dim": qk, "v_dim": v, "direction": row["direction"],
             "kernel": row["kernel"], "batch": batch, "heads": heads}
        )  # fmt: skip
    else:
        m, n, k = row["sizes"]
        needed = 2 * m * n * k
        if row["kind"] == "experts":
            call = _make_experts(bench, row["direction"], n, k, rows_per_expert)
        elif row["kind"] == "conv":
            call = _make_patches(bench, row["direction"], m, n, k, row["images"])
        else:
            call = _make_linear(bench, row["direction"], m, n, k)
    call()
    bench.synchronize()
    executed = bench.count_executed(call)
    about = {key: row[key] for key in ("family", "seq", "batch", "images", "kernel", "direction", "shape")}
    return [
        {**about, "module": module, "calls": calls, "calls_recompute": again, "needed_flops": needed,
         "executed_flops": executed}
        for module, (calls, again) in row["modules"].items()
    ]  # fmt: skip


def _make_linear(bench: Bench, direction: ProductDirection, m: int, n: int, k: int) -> Callable[[], Any]:
    """Through autograd, so that layouts are those of a real linear layer."""
    torch = bench.torch
    x, weight = bench.random(m, k, needs_grad=True), bench.random(n, k, needs_grad=True)
    return bench.make_call(
        lambda: torch.nn.functional.linear(x, weight), direction, x if direction == "dgrad" else weight
    )


def _make_patches(bench: Bench, direction: ProductDirection, m: int, n: int, k: int, images: str) -> Callable[[], Any]:
    """A patch embedding, a convolution whose stride is its kernel: over frame pairs (Qwen) or whole images (CLIP)."""
    from math import isqrt

    torch = bench.torch
    area = k // 3
    side = isqrt(area)
    if side * side == area:
        height, width = (int(size) for size in images.split("+")[0].split("x")[1:])
        x = bench.random(m // (height * width), 3, height * side, width * side, needs_grad=True)
        weight = bench.random(n, 3, side, side, needs_grad=True)
        return bench.make_call(
            lambda: torch.nn.functional.conv2d(x, weight, stride=side), direction, x if direction == "dgrad" else weight
        )
    side = isqrt(area // 2)
    x, weight = (bench.random(count, 3, 2, side, side, needs_grad=True) for count in (m, n))
    wanted = x if direction == "dgrad" else weight
    return bench.make_call(lambda: torch.nn.functional.conv3d(x, weight, stride=(2, side, side)), direction, wanted)


def _make_experts(bench: Bench, direction: ProductDirection, n: int, k: int, rows: list[int]) -> Callable[[], Any]:
    """HF's grouped product over rows sorted by expert."""
    torch = bench.torch
    ends = torch.tensor(rows).cumsum(0).to(torch.int32).to(bench.device)
    x, weight = bench.random(sum(rows), k, needs_grad=True), bench.random(len(rows), n, k, needs_grad=True)
    product = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
    return bench.make_call(
        lambda: product(x, weight.transpose(-2, -1), offs=ends), direction, x if direction == "dgrad" else weight
    )
