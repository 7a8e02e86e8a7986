"""TrainingMonitor in real gloo processes: each rank counts its own batch, and rank 0 reports what all did."""

from __future__ import annotations

import json
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from places import ROOT
from ranks import DEADLINE_S, Rank, Talk, run_ranks

import flopcalc
from flopcalc.monitor.place import find_layout
from flopcalc.monitor.settings import Settings

PEAK = 1e18  # of one rank
ROWS = 4
STEPS = 6
DETAIL_EVERY = 2
CONFIG: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": False, "use_cache": False,
}  # fmt: skip
MOE = {
    **CONFIG, "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "output_router_logits": False,
}  # fmt: skip


def settings(**distributed: Any) -> dict[str, Any]:
    return {
        "monitoring": {
            "mfu_calculation_mode": "estimate",
            "detail_every": DETAIL_EVERY,
            "skip_first": 1,
            "peak_flops_per_s": PEAK,
        },
        "distributed": {"timeout_s": DEADLINE_S, **distributed},
    }


def build(config: Mapping[str, Any] = CONFIG) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))


def make_batch(length: int, seed: int) -> dict[str, Any]:
    import torch

    ids = torch.randint(0, 64, (ROWS, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def count(*lengths: int, config: Mapping[str, Any] = CONFIG) -> int:
    """FLOPs of one step of the whole machine: a batch of each length."""
    return sum(flopcalc.estimate_flops(config, batch_size=ROWS, seq_len=length).total for length in lengths)


class Outcome(NamedTuple):
    """What a rank saw."""

    plain: list[str]  # losses without a monitor
    losses: list[str]
    metrics: dict[str, Any]
    said: list[str]


@contextmanager
def monitored(folder: str, config: Mapping[str, Any], model: Any, said: list[str]) -> Iterator[Any]:
    from flopcalc.monitor import TrainingMonitor

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        monitor = TrainingMonitor(folder, config, model=model)
        yield monitor
        monitor.close()
    said += [str(each.message) for each in caught if "flopcalc" in str(each.message)]


def train_twice(
    folder: str,
    config: Mapping[str, Any],
    make: Callable[[], tuple[Any, Callable[[], Any]]],
    *,
    is_live: bool = False,
    given: Any = None,
) -> Outcome:
    """Without and with a monitor; `make` gives what is seen, and a step that returns its loss; `given` is counted."""
    import torch

    runs: list[list[str]] = []
    said: list[str] = []
    metrics: dict[str, Any] = {}
    for is_monitored in (False, True):
        model, forward_backward = make()
        parameters = [each for each in model.parameters() if each.requires_grad]
        optimizer = torch.optim.SGD(parameters, lr=0.1)

        def step() -> float:
            loss = forward_backward()  # noqa: B023
            optimizer.step()  # noqa: B023
            optimizer.zero_grad()  # noqa: B023
            return float(loss)

        if not is_monitored:
            runs.append([step().hex() for _ in range(STEPS)])
            continue
        with monitored(folder, config, given, said) as monitor:
            monitor.attach(model)
            losses = []
            for number in range(1, STEPS + 1):
                losses.append(step())
                monitor.log_step(number, 0, losses[-1], None, 0.1)
            runs.append([loss.hex() for loss in losses])
            while is_live and not agree("perf/stragglers" in monitor.metrics()):
                number += 1
                monitor.log_step(number, 0, step(), None, 0.1)
            for _ in range(DETAIL_EVERY if is_live else 0):  # one of these records has the details
                number += 1
                monitor.log_step(number, 0, step(), None, 0.1)
        metrics = monitor.metrics()
    return Outcome(*runs, metrics, said)


def agree(is_so: bool) -> bool:
    """What rank 0 says, so that all go on or none."""
    import torch
    import torch.distributed as dist

    flag = torch.tensor([is_so])
    dist.broadcast(flag, 0)
    return bool(flag.item())


def run_model(model: Any, batch: Mapping[str, Any]) -> Any:
    loss = model(**batch).loss
    loss.backward()
    return loss.detach()


def hear_all(ranks: list[Rank]) -> list[Outcome]:
    """All that the ranks returned; none has warned, and no loss is another one."""
    found: list[Outcome] = [rank.hear() for rank in ranks]
    assert [each.said for each in found] == [[]] * len(ranks)
    for each in found:
        assert each.losses == each.plain  # bit for bit
        assert len(set(each.losses)) > 1
    return found


def check_machine(metrics: Mapping[str, Any], flops: float, tokens: float, world: int) -> None:
    """FLOPs of all ranks over the slowest one's time and all peaks, whatever that time was."""
    assert metrics["perf/scope"] == f"all {world} ranks"
    machine = metrics["perf/step_time"] * PEAK * world
    assert metrics["perf/mfu"] * machine == pytest.approx(flops, rel=1e-9)
    assert metrics["perf/tokens_per_second"] * metrics["perf/step_time"] == pytest.approx(tokens, rel=1e-9)


def read_log(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "flopcalc.jsonl").read_text().splitlines()]


def find_own_record(folder: Path) -> dict[str, Any]:
    """A record of the rank that writes, over steps of its own."""
    return next(line for line in read_log(folder) if line.get("perf/rank_mfu") is not None)


# --- Ranks with batches of their own ----------------------------------------------------------------------------------


def train_ddp(talk: Talk, store: Any, folder: str) -> Outcome:  # noqa: ARG001
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    batch = make_batch(8 * (dist.get_rank() + 1), dist.get_rank())

    def make() -> tuple[Any, Callable[[], Any]]:
        model = DistributedDataParallel(build())
        return model, lambda: run_model(model, batch)

    return train_twice(folder, settings(), make, is_live=True)


def test_ddp(tmp_path: Path) -> None:
    with run_ranks(3, train_ddp, str(tmp_path)) as ranks:
        found = hear_all(ranks)
    check_machine(found[0].metrics, count(8, 16, 24), ROWS * (8 + 16 + 24), 3)
    log = read_log(tmp_path)
    assert (log[0]["type"], log[0]["world"], log[-1]["type"]) == ("start", 3, "end")
    steps = [line for line in log if line["type"] == "step"]
    own = find_own_record(tmp_path)
    assert own["perf/rank_mfu"] * own["perf/rank_step_time"] * PEAK == pytest.approx(count(8), rel=1e-9)
    assert (steps[0]["perf/scope"], steps[-1]["perf/scope"]) == ("rank 0 of 3", "all 3 ranks")
    detail = next(line for line in steps if "perf/stragglers" in line)
    check_machine(detail, count(8, 16, 24), ROWS * (8 + 16 + 24), 3)
    assert detail["perf/slowest_rank_step_time"] == detail["perf/step_time"]
    assert set(detail["perf/stragglers"]) <= {0, 1, 2}


def train_fsdp(talk: Talk, store: Any, folder: str, kind: str) -> Outcome:  # noqa: ARG001
    import functools

    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
    from torch.nn.parallel import DistributedDataParallel

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    if kind == "hsdp":
        mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    options = {"mesh": mesh}
    if kind == "mixed precision":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    batch = make_batch(8 * (dist.get_rank() + 1), dist.get_rank())

    def make() -> tuple[Any, Callable[[], Any]]:
        model = build({**CONFIG, "tie_word_embeddings": kind == "fsdp1 tied"})
        layers = model.model.layers
        if kind.startswith("lora"):
            model = add_lora(model)
        if kind.startswith("fsdp1"):
            policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={type(layers[0])})
            model = FullyShardedDataParallel(
                model,
                auto_wrap_policy=policy,
                device_mesh=mesh,
                use_orig_params=kind == "fsdp1 named",
                device_id=torch.device("cpu"),
            )
            return model, lambda: run_model(model, batch)
        if kind == "lora ddp":
            model = DistributedDataParallel(model)
            return model, lambda: run_model(model, batch)
        for i, layer in enumerate(layers):
            if kind == "wrapped":
                layers[i] = checkpoint_wrapper(layer)
            fully_shard(layers[i], **options)
        fully_shard(model, **options)
        return model, lambda: run_model(model, batch)

    return train_twice(folder, settings(), make)


def add_lora(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


LORA = {"lora": {"r": 4, "targets": ["q_proj", "v_proj"]}}


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("kind", "recipe"),
    [
        ("fsdp2", {}),
        ("mixed precision", {}),
        ("hsdp", {}),
        ("wrapped", {"recompute": "full"}),
        ("fsdp1", {}),
        ("fsdp1 named", {}),
        ("fsdp1 tied", {}),
        ("lora ddp", LORA),
        ("lora fsdp2", LORA),
    ],
)
def test_fsdp(tmp_path: Path, kind: str, recipe: dict[str, Any]) -> None:
    """FSDP2 in all its forms; FSDP1 with flat parameters, and with their own names; adapters in DDP and FSDP2."""
    lengths = (8, 16, 24, 32) if kind == "hsdp" else (8, 16)
    with run_ranks(len(lengths), train_fsdp, str(tmp_path), kind) as ranks:
        found = hear_all(ranks)
    estimator = flopcalc.bind(CONFIG, recipe=recipe)
    flops = sum(estimator(ROWS, length).total for length in lengths)
    check_machine(found[0].metrics, flops, ROWS * sum(lengths), len(lengths))
    machine = found[0].metrics["perf/step_time"] * PEAK * len(lengths)
    executed = flopcalc.bind(CONFIG, recipe=recipe, convention="hardware")
    flops = sum(executed(ROWS, length).total for length in lengths)
    assert found[0].metrics["perf/hfu"] * machine == pytest.approx(flops, rel=1e-9)


def train_deepspeed(talk: Talk, store: Any, folder: str, stage: int) -> Outcome:  # noqa: ARG001
    import torch.distributed as dist

    rank, world = dist.get_rank(), dist.get_world_size()
    os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": f"{rank}", "LOCAL_RANK": f"{rank}"}
    os.environ |= {"WORLD_SIZE": f"{world}", "LOCAL_SIZE": f"{world}"}
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": ROWS, "zero_allow_untested_optimizer": True, "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }  # fmt: skip
    batch = make_batch(8 * (rank + 1), rank)

    def make() -> tuple[Any, Callable[[], Any]]:
        engine, *_ = deepspeed.initialize(model=build(), config=config, dist_init_required=False)

        def run() -> Any:
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
            return loss.detach()

        return engine, run

    return train_twice(folder, settings(), make)


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore")  # fairscale's own
def test_fairscales_wrapper(tmp_path: Path) -> None:
    """fairscale's checkpoint_wrapper puts another `forward` on each layer."""
    pytest.importorskip("fairscale", reason="fairscale is not installed")
    from fairscale.nn import checkpoint_wrapper

    batch = make_batch(8, 0)

    def make() -> tuple[Any, Callable[[], Any]]:
        model = build()
        for layer in model.model.layers:
            checkpoint_wrapper(layer)
        return model, lambda: run_model(model, batch)

    found = train_twice(str(tmp_path), settings(), make)
    assert (found.losses, found.said) == (found.plain, [])
    executed = flopcalc.bind(CONFIG, recompute="full-reentrant", convention="hardware")(ROWS, 8).total
    metrics = found.metrics
    assert (metrics["perf/model_flops"], metrics["perf/hardware_flops"]) == (count(8), executed)


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore")  # DeepSpeed's own
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed(tmp_path: Path, stage: int) -> None:
    """ZeRO in its three stages, which shards optimizer states, gradients and parameters."""
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    with run_ranks(2, train_deepspeed, str(tmp_path), stage) as ranks:
        found = hear_all(ranks)
    check_machine(found[0].metrics, count(8, 16), ROWS * (8 + 16), 2)


def train_wrapped_later(talk: Talk, store: Any, folder: str, is_sharded: bool) -> Outcome:  # noqa: ARG001
    """The monitor is given the model before that is wrapped or sharded."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    batch = make_batch(8 * (dist.get_rank() + 1), dist.get_rank())

    def make() -> tuple[Any, Callable[[], Any]]:
        model = build()
        wrapped: list[Any] = []

        def run() -> Any:
            if not wrapped and is_sharded:
                wrapped.append(fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),))))
            elif not wrapped:
                wrapped.append(DistributedDataParallel(model))
            loss = run_model(wrapped[0], batch)
            with torch.no_grad():  # the optimizer holds what the parameters were before
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
            return loss

        return model, run

    return train_twice(folder, settings(), make)


@pytest.mark.heavy
@pytest.mark.parametrize("is_sharded", [False, True], ids=["ddp", "fsdp2"])
def test_a_model_that_is_wrapped_after_it_was_given(tmp_path: Path, is_sharded: bool) -> None:
    with run_ranks(2, train_wrapped_later, str(tmp_path), is_sharded) as ranks:
        found = hear_all(ranks)
    check_machine(found[0].metrics, count(8, 16), ROWS * (8 + 16), 2)


def train_hf(talk: Talk, store: Any, folder: str, sizes: dict[str, Any], lengths: tuple[int, ...]) -> Outcome:  # noqa: ARG001
    """The parallelism of transformers' own loader; a rank's length is its place in `lengths`."""
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    rank, world = dist.get_rank(), dist.get_world_size()
    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{world}"}
    batch = make_batch(lengths[rank], lengths[rank])

    def make() -> tuple[Any, Callable[[], Any]]:
        model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(**sizes)).train()
        return model, lambda: run_model(model, batch)

    return train_twice(folder, settings(), make)


HEAVY = pytest.mark.heavy


@pytest.mark.parametrize(
    ("config", "sizes", "lengths", "batches"),
    [
        pytest.param(CONFIG, {"tp_size": 2}, (16, 16), (16,), id="tensor", marks=HEAVY),
        pytest.param(CONFIG, {"fsdp_size": 2}, (8, 16), (8, 16), id="fsdp", marks=HEAVY),
        pytest.param(
            CONFIG, {"fsdp_size": 2, "tp_size": 2}, (8, 8, 16, 16), (8, 16), id="fsdp and tensor", marks=HEAVY
        ),
        pytest.param(
            MOE, {"fsdp_size": 2, "ep_size": 2}, (8, 16), (8, 16), id="expert, batches of their own", marks=HEAVY
        ),
        pytest.param(
            MOE, {"tp_size": 2, "ep_size": 2, "tp_plan": {}}, (16, 16), (16,), id="expert, one batch", marks=HEAVY
        ),
    ],
)
def test_transformers_own(
    tmp_path: Path, config: dict[str, Any], sizes: dict[str, int], lengths: tuple[int, ...], batches: tuple[int, ...]
) -> None:
    build(config).save_pretrained(tmp_path)
    with run_ranks(len(lengths), train_hf, str(tmp_path), sizes, lengths) as ranks:
        found = hear_all(ranks)
    check_machine(found[0].metrics, count(*batches, config=config), ROWS * sum(batches), len(lengths))


# --- Ranks that share a batch -----------------------------------------------------------------------------------------


def train_tp(talk: Talk, store: Any, folder: str, axes: tuple[str, ...] | None, sizes: tuple[int, ...]) -> Outcome:  # noqa: ARG001
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=axes)
    batch = make_batch(16, dist.get_rank() // sizes[-1])

    def make() -> tuple[Any, Callable[[], Any]]:
        model = build()
        for layer in model.model.layers:
            plan = {
                "mlp.gate_proj": ColwiseParallel(),
                "mlp.up_proj": ColwiseParallel(),
                "mlp.down_proj": RowwiseParallel(),
            }
            parallelize_module(layer, mesh if len(sizes) == 1 else mesh["model"], plan)
            if len(sizes) > 1:
                fully_shard(layer, mesh=mesh["outer"])
        return model, lambda: run_model(model, batch)

    return train_twice(folder, settings(), make)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("axes", "sizes"), [(("tp",), (2,)), (("model",), (2,)), (None, (2,)), (("outer", "model"), (2, 2))]
)
def test_tensor_parallel(tmp_path: Path, axes: tuple[str, ...] | None, sizes: tuple[int, ...]) -> None:
    """What is cut, and not by FSDP, is tensor parallel, whatever its axis is called."""
    world = sizes[0] * sizes[-1] if len(sizes) > 1 else sizes[0]
    with run_ranks(world, train_tp, str(tmp_path), axes, sizes) as ranks:
        found = hear_all(ranks)
    batches = world // sizes[-1]
    check_machine(found[0].metrics, batches * count(16), batches * ROWS * 16, world)


def attend_to_all(query: Any, key: Any, value: Any, **options: Any) -> Any:  # noqa: ARG001
    """Stands in for torch's ring attention, which has no kernel for the CPU: own queries, every rank's keys."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    def gather(part: Any) -> Any:
        return part.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])

    scores = query.to_local() @ gather(key).transpose(-1, -2)
    return DTensor.from_local(scores.softmax(-1) @ gather(value), query.device_mesh, query.placements)


def drop_mask(module: Any, given: Any, named: dict[str, Any]) -> Any:  # noqa: ARG001
    """As accelerate does: positions of a chunk are in torch's order, which HF takes for several texts."""
    return given, {**named, "attention_mask": None}


def train_context_parallel(talk: Talk, store: Any, folder: str) -> Outcome:  # noqa: ARG001
    """torch's own context parallelism cuts the batch and replaces the attention."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.parallel import DistributedDataParallel

    attend_to_all.__name__ = "scaled_dot_product_attention"
    torch.nn.functional.scaled_dot_product_attention = attend_to_all
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp_shard", "cp"))
    whole = make_batch(32, 0)["input_ids"]

    def make() -> tuple[Any, Callable[[], Any]]:
        model = build({**CONFIG, "num_key_value_heads": 4})
        for layer in model.model.layers:
            layer.self_attn.register_forward_pre_hook(drop_mask, with_kwargs=True)
        model = DistributedDataParallel(model)

        def run() -> Any:
            ids, labels, positions = whole.clone(), whole.clone(), torch.arange(32)[None]
            buffers = [ids, labels, positions]
            with context_parallel(mesh["cp"], buffers=buffers, buffer_seq_dims=[1, 1, 1]):
                assert tuple(ids.shape) == (ROWS, 16)
                return run_model(model, {"input_ids": ids, "labels": labels, "position_ids": positions})

        return model, run

    return train_twice(folder, settings(context_parallel=2), make)


@pytest.mark.heavy
def test_context_parallel(tmp_path: Path) -> None:
    with run_ranks(2, train_context_parallel, str(tmp_path)) as ranks:
        found = hear_all(ranks)
    check_machine(found[0].metrics, count(32, config={**CONFIG, "num_key_value_heads": 4}), ROWS * 32, 2)


def test_a_context_axis_inside_the_axis_of_fsdp() -> None:
    """torchtitan and accelerate flatten both into one, whose root still tells them apart."""
    root = SimpleNamespace(mesh_dim_names=("dp_shard", "cp"), shape=(3, 2))
    mesh = SimpleNamespace(mesh_dim_names=("dp_shard_cp",), shape=(6,), ndim=1, _get_root_mesh=lambda: root)
    cut = SimpleNamespace(is_replicate=lambda: False, is_partial=lambda: False)
    weight = SimpleNamespace(device_mesh=mesh, placements=(cut,), ndim=2)
    model = SimpleNamespace(modules=list, parameters=lambda: [weight])
    said: list[str] = []
    assert find_layout(Settings(), model, lambda message, _=None: said.append(message)) == (1, 2, 1)
    assert said == []


def train_pipeline(talk: Talk, store: Any, folder: str) -> Outcome:  # noqa: ARG001
    """Two stages of two layers, two micro-batches; the first stage alone sees the text."""
    import torch
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    rank = dist.get_rank()
    ids = make_batch(16, 0)["input_ids"]

    class Stage(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = build()
            inner = self.model.model
            inner.layers = inner.layers[:2] if rank == 0 else inner.layers[2:]
            if rank == 0:
                inner.norm = self.model.lm_head = torch.nn.Identity()
            else:
                inner.embed_tokens = torch.nn.Identity()

        def forward(self, input_ids: Any) -> Any:
            return self.model(**{"input_ids" if rank == 0 else "inputs_embeds": input_ids}).logits

    def find_loss(logits: Any, target: Any) -> Any:
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())

    def make() -> tuple[Any, Callable[[], Any]]:
        module = Stage()
        stage = PipelineStage(module, rank, 2, torch.device("cpu"))
        schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=find_loss)
        losses: list[Any] = []

        def run() -> Any:
            if rank == 0:
                schedule.step(ids)
                return module.model.model.embed_tokens.weight.detach().abs().sum()
            losses.clear()
            schedule.step(target=ids, losses=losses)
            return torch.stack(losses).mean().detach()

        return module, run

    return train_twice(folder, settings(pipeline_parallel=2), make, given=flopcalc.bind(CONFIG))


@pytest.mark.heavy
def test_pipeline_parallel(tmp_path: Path) -> None:
    with run_ranks(2, train_pipeline, str(tmp_path)) as ranks:
        found = hear_all(ranks)
    check_machine(found[0].metrics, count(16), ROWS * 16, 2)
    last = count(16, config={**CONFIG, "num_hidden_layers": 2})  # two layers and the head
    assert [each.metrics["perf/model_flops"] for each in found] == [count(16) - last, last]
    own = find_own_record(tmp_path)
    assert own["perf/rank_mfu"] * own["perf/rank_step_time"] * PEAK == pytest.approx(count(16) - last, rel=1e-9)


# --- What goes wrong --------------------------------------------------------------------------------------------------


def obey(talk: Talk, store: Any, folder: str, config: dict[str, Any], broken: Mapping[int, str]) -> None:  # noqa: ARG001
    """A rank that trains by itself, as the test says, beside a twin without a monitor."""
    import torch
    import torch.distributed as dist

    from flopcalc.monitor import TrainingMonitor, training

    rank = dist.get_rank()
    trouble = broken.get(rank)
    if trouble == "slow":  # all that it does takes a hundred times as long, by its own clock
        training._clock = lambda: 100 * time.perf_counter_ns()
    batch = make_batch(8 * (rank + 1), rank)
    models = [build(), build()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        monitor = TrainingMonitor(folder, config, model=None if trouble == "no model" else models[0])
        step = 0
        while True:
            order, *values = talk.hear()
            match order:
                case "train":
                    for _ in range(values[0]):
                        step += 1
                        if step == 7 and trouble == "short end":  # the last batch of a data set
                            batch = {name: rows[:1] for name, rows in batch.items()}
                        losses = []
                        for model, optimizer in zip(models, optimizers, strict=True):
                            loss = run_model(model, batch)
                            optimizer.step()
                            optimizer.zero_grad()
                            losses.append(loss.item().hex())
                            if model is models[0]:
                                monitor.log_step(step, 0, loss, None, 0.1)
                        assert losses[0] == losses[1]
                    talk.say(monitor.metrics())
                case "said":
                    talk.say([str(each.message).removeprefix("flopcalc: ") for each in caught])
                case "leave the group":
                    dist.destroy_process_group()
                    talk.say(None)
                case "close":
                    monitor.close()
                    talk.say(monitor.metrics())
                case "die":
                    os._exit(3)


class Crew:
    """Ranks that train in step, as far as they can."""

    def __init__(self, ranks: list[Rank]) -> None:
        self.ranks = ranks
        self.done = [0] * len(ranks)

    def train(self, members: set[int], until: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Interval after interval, until rank 0's metrics are so; who was away before catches up."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            goal = max(self.done) + 2
            for member in members:
                self.ranks[member].tell("train", goal - self.done[member])
                self.done[member] = goal
            found = {member: self.ranks[member].hear() for member in members}
            if until(found.get(0, {})):
                metrics: dict[str, Any] = found.get(0, {})
                return metrics
            assert time.monotonic() < deadline, found

    def say_all(self, *order: Any, members: set[int] | None = None) -> list[Any]:
        chosen = [self.ranks[member] for member in sorted(members or range(len(self.ranks)))]
        for rank in chosen:
            rank.tell(*order)
        return [rank.hear() for rank in chosen]


@contextmanager
def run_crew(
    world: int, folder: Path, *, broken: Mapping[int, str] | None = None, detail_every: int = 2, **distributed: Any
) -> Iterator[Crew]:
    config = settings(**distributed)
    config["monitoring"]["detail_every"] = detail_every
    with run_ranks(world, obey, str(folder), config, broken or {}) as ranks:
        yield Crew(ranks)


def is_scope(scope: str) -> Callable[[dict[str, Any]], bool]:
    return lambda metrics: bool(metrics["perf/scope"] == scope)


@pytest.mark.heavy
def test_a_rank_hangs_and_comes_back_another_dies(tmp_path: Path) -> None:
    with run_crew(3, tmp_path, timeout_s=2.0) as crew:
        found = crew.train({0, 1, 2}, is_scope("all 3 ranks"))
        check_machine(found, count(8, 16, 24), ROWS * (8 + 16 + 24), 3)

        crew.ranks[2].stop()
        found = crew.train({0, 1}, is_scope("2 of 3 ranks"))
        machine = found["perf/step_time"] * PEAK * 2
        assert found["perf/mfu"] * machine == pytest.approx(count(8, 16), rel=1e-9)
        crew.ranks[2].go_on()
        crew.train({0, 1, 2}, is_scope("all 3 ranks"))

        crew.ranks[1].tell("die")
        crew.ranks[1].process.join(DEADLINE_S)
        found = crew.train({0, 2}, is_scope("2 of 3 ranks"))
        machine = found["perf/step_time"] * PEAK * 2
        assert found["perf/mfu"] * machine == pytest.approx(count(8, 24), rel=1e-9)
        said = crew.ranks[0].ask("said")
        assert all(" of 3 sent no sums in time" in text for text in said), said
        named = " ".join(text.split(" of 3 ")[0] for text in said)
        assert "1" in named, said
        assert "2" in named, said
        crew.say_all("close", members={0, 2})


@pytest.mark.heavy
def test_rank_0_hangs(tmp_path: Path) -> None:
    with run_crew(3, tmp_path, timeout_s=0.5) as crew:
        crew.train({0, 1, 2}, is_scope("all 3 ranks"))
        crew.ranks[0].stop()
        crew.train({1, 2}, lambda _: all(crew.say_all("said", members={1, 2})))
        for said in crew.say_all("said", members={1, 2}):
            assert [text.split(" (")[0] for text in said] == [said[0].split(" (")[0]]
            assert "has not reached rank 0 for 0.5 s" in said[0]
        crew.ranks[0].go_on()
        crew.train({0, 1, 2}, is_scope("all 3 ranks"))
        crew.ranks[0].stop()
        crew.say_all("close", members={1, 2})


def test_the_group_is_left_before_the_end(tmp_path: Path) -> None:
    """Nothing travels before the end: the run is shorter than an interval."""
    with run_crew(2, tmp_path, detail_every=50) as crew:
        found = crew.train({0, 1}, is_scope("rank 0 of 2"))
        assert found["perf/tokens_per_second"] * found["perf/step_time"] == pytest.approx(ROWS * 8, rel=1e-9)
        crew.say_all("leave the group")
        check_machine(crew.say_all("close")[0], count(8, 16), ROWS * (8 + 16), 2)
        assert crew.say_all("said") == [[], []]


def test_a_rank_does_not_know_its_flops(tmp_path: Path) -> None:
    with run_crew(2, tmp_path, broken={1: "no model"}) as crew:
        found = crew.train({0, 1}, is_scope("all 2 ranks"))
        assert math.isnan(found["perf/mfu"])
        assert found["perf/step_time"] > 0
        said = crew.say_all("said")
        assert said[0] == ["MFU of all ranks is not known: model FLOPs of rank 1 not known"]
        assert len(said[1]) == 1
        assert said[1][0].startswith("FLOPs cannot be counted, so MFU is not known: no model was given")


def test_a_straggler_is_named_and_its_time_counts(tmp_path: Path) -> None:
    with run_crew(3, tmp_path, broken={1: "slow"}) as crew:
        found = crew.train({0, 1, 2}, lambda metrics: metrics.get("perf/stragglers") == [1])
        check_machine(found, count(8, 16, 24), ROWS * (8 + 16 + 24), 3)


def test_a_rank_with_fewer_steps(tmp_path: Path) -> None:
    """The last interval is of three steps of rank 0, and of one of rank 1: the mean step of each, and it says so."""
    with run_crew(2, tmp_path, detail_every=4) as crew:
        for rank, steps in zip(crew.ranks, (7, 5), strict=True):
            rank.ask("train", steps)
        found = [crew.ranks[rank].ask("close") for rank in (1, 0)][1]
        assert found["perf/scope"] == "all 2 ranks, the mean of 1 to 3 steps each"
        assert found["perf/steps"] == 3
        machine = found["perf/step_time"] * PEAK * 2
        assert found["perf/mfu"] * machine == pytest.approx(count(8, 16), rel=1e-9)
        assert crew.say_all("said") == [[], []]


def test_a_last_batch_of_fewer_rows_on_one_rank(tmp_path: Path) -> None:
    """The last interval is of three steps, and rank 1's last one has one row: each batch counts as it is."""
    with run_crew(2, tmp_path, broken={1: "short end"}, detail_every=4) as crew:
        crew.say_all("train", 7)
        found = [crew.ranks[rank].ask("close") for rank in (1, 0)][1]
        short = flopcalc.estimate_flops(CONFIG, batch_size=1, seq_len=16).total
        check_machine(found, count(8) + (2 * count(16) + short) / 3, ROWS * 8 + (2 * ROWS * 16 + 16) / 3, 2)
        assert crew.say_all("said") == [[], []]


def test_without_the_channel_each_rank_speaks_for_itself(tmp_path: Path) -> None:
    with run_crew(2, tmp_path, enabled=False) as crew:
        found = crew.train({0, 1}, lambda metrics: metrics["perf/mfu"] > 0)
        assert found["perf/scope"] == "rank 0 of 2"
        machine = found["perf/step_time"] * PEAK
        assert found["perf/mfu"] * machine == pytest.approx(count(8), rel=1e-9)
        crew.say_all("close")
        assert crew.say_all("said") == [[], []]


def train_on_rank_0_only(talk: Talk, store: Any, folder: str) -> Outcome:  # noqa: ARG001
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    batch = make_batch(8, dist.get_rank())

    def make() -> tuple[Any, Callable[[], Any]]:
        model = DistributedDataParallel(build())
        return model, lambda: run_model(model, batch)

    if dist.get_rank() == 0:
        return train_twice(folder, settings(timeout_s=0.1), make)
    losses: list[list[str]] = []
    for _ in range(2):
        model, step = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses.append([])
        for _ in range(STEPS):
            losses[-1].append(float(step()).hex())
            optimizer.step()
            optimizer.zero_grad()
    return Outcome(*losses, {}, [])


@pytest.mark.heavy
def test_a_monitor_on_rank_0_only(tmp_path: Path) -> None:
    with run_ranks(2, train_on_rank_0_only, str(tmp_path)) as ranks:
        first, other = [rank.hear() for rank in ranks]
    assert (first.losses, other.losses) == (first.plain, other.plain)
    assert first.metrics["perf/scope"] == "1 of 2 ranks"
    assert first.metrics["perf/mfu"] * first.metrics["perf/step_time"] * PEAK == pytest.approx(count(8), rel=1e-9)
    assert [text.split(" sent ")[0] for text in first.said] == ["flopcalc: rank 1 of 2"]


def test_the_docs_name_tests_that_exist() -> None:
    """Each row of the table of layouts ends with the test that runs it."""
    _, _, rest = (ROOT / "docs" / "monitor.md").read_text(encoding="utf-8").partition("| layout |")
    rows = rest.partition("\n\n")[0].splitlines()[2:]
    named = [row.rstrip(" |").rpartition("| ")[2].strip("`") for row in rows]
    assert len(named) == 16
    assert set(named) <= globals().keys()
