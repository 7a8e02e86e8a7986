"""Sources of the factor: the real profiler and real copies on tiny models; counters and gauges as fakes."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import load_tiny
from tiers import mark_heavy

from flopcalc import bind
from flopcalc.measure.counters import cupti, gpm, torch_profiler
from flopcalc.measure.hf.models import apply_recipe, build_model, make_batch
from flopcalc.measure.trace import copies as tracing
from flopcalc.measure.trace.fakes import FakeCopy
from flopcalc.monitor import instruments
from flopcalc.monitor import modes as sources
from flopcalc.monitor.instruments import Copy, NotMeasured, list_tensor_dtypes
from flopcalc.monitor.modes import Counts, Factor, make_source
from flopcalc.monitor.settings import Settings

CONFIGS = {name: load_tiny(name).config for name in ("llama", "mixtral", "qwen2_vl")}
LORA = {"lora": {"r": 4, "targets": ["q_proj", "v_proj"]}}
TEXT, IMAGES = ("text",), ("images",)


class Said(list[str]):
    """The monitor's say(): one message per `once`."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[str] = set()

    def __call__(self, message: str, once: str | None = None) -> None:
        if (once or message) not in self._seen:
            self._seen.add(once or message)
            self.append(message)


def build(family: str, recipe: Mapping[str, Any] | None = None, attention: str = "sdpa") -> Any:
    model = apply_recipe(build_model(CONFIGS[family], attention), recipe or {})
    return model.train()


def make(model: Any, batch: int = 2, seq: int = 30) -> dict[str, Any]:
    config = getattr(model, "get_base_model", lambda: model)().config
    load: dict[str, Any] = {"batch": batch, "seq": seq}
    if hasattr(config, "vision_config"):
        load["images"] = [[1, 4, 6]]
    made = make_batch(config, load)
    return {**made, "labels": made["input_ids"]}


def count(model: Any, batches: Sequence[Mapping[str, Any]]) -> Counts:
    """The analytic counts of a step."""
    eager = bind(model, convention="hardware", attention_kernel="eager")
    flash = bind(model, convention="hardware")
    return Counts(
        sum(bind(model).estimate_batch(batch).total for batch in batches),
        sum(eager.estimate_batch(batch).total for batch in batches),
        sum(flash.estimate_batch(batch).total for batch in batches),
    )


def run(model: Any, batches: Sequence[Mapping[str, Any]], optimizer: Any = None) -> list[float]:
    """One optimizer step."""
    losses = []
    for batch in batches:
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        losses.append(loss.item())
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()
    return losses


def measure(source: Any, step: int, kind: Any, model: Any, batches: Sequence[Mapping[str, Any]]) -> None:
    assert source.wants(step, kind, 500)
    source.start()
    run(model, batches)
    source.stop(step, kind, count(model, batches), batches)


def count_hooks(model: Any) -> int:
    return sum(len(each._forward_hooks) + len(each._forward_pre_hooks) for each in model.modules())


CASES = [
    ("llama", {}, "sdpa"),
    ("llama", {}, "eager"),
    ("llama", LORA, "eager"),
    ("llama", {"recompute": "full"}, "sdpa"),
    ("llama", {"recompute": "full"}, "eager"),
    ("llama", {"recompute": "full-reentrant"}, "eager"),
    ("llama", {**LORA, "recompute": "full"}, "eager"),
    ("llama", {"freeze": ["model.layers.0"]}, "sdpa"),
    ("mixtral", {}, "sdpa"),
    ("qwen2_vl", {}, "sdpa"),
    ("qwen2_vl", {**LORA, "recompute": "full"}, "eager"),
]


# --- Estimate ---------------------------------------------------------------------------------------------------------


def test_estimate_measures_nothing() -> None:
    source = make_source(Settings(mode="estimate"), None, Said())
    assert not any(source.wants(step, TEXT, 1) for step in range(5))
    source.start()
    source.stop(1, TEXT, Counts(1, 1, 1), [])
    source.cancel()
    assert source.factor(TEXT) == Factor(1.0, "estimate")
    assert (source.absolute(TEXT), source.gauge()) == (None, {})
    source.close()


# --- Profiler ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "recipe", "attention"), mark_heavy(CASES, CASES[:1] + CASES[-3:-2]))
def test_profiler_equals_the_analytic_count(family: str, recipe: dict[str, Any], attention: str) -> None:
    model = build(family, recipe, attention)
    said = Said()
    source = make_source(Settings(mode="profiler"), model, said)
    hooks = count_hooks(model)
    measure(source, 1, TEXT, model, [make(model), make(model, 1, 40)])
    assert source.factor(TEXT) == Factor(1.0, "profiler at step 1")
    assert said == []
    assert count_hooks(model) == hooks
    assert not torch.autograd._profiler_enabled()


def test_profiler_sees_the_gradient_that_fused_attention_forms_unasked() -> None:
    """The first layer's keys owe none under this LoRA: eager code leaves dK out, a fused backward cannot."""
    model = build("llama", LORA, "sdpa")
    source = make_source(Settings(mode="profiler"), model, Said())
    batches = [make(model)]
    measure(source, 1, TEXT, model, batches)
    config = CONFIGS["llama"]
    width = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    extra = 2 * 2 * config["num_attention_heads"] * 30 * 30 * width
    full = count(model, batches).full
    assert full is not None
    assert source.factor(TEXT).value == (full + extra) / full


def test_profiler_leaves_an_optimizer_s_products_out() -> None:
    model = build("llama")
    batches = [make(model)]
    counts = count(model, batches)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    source = make_source(Settings(mode="profiler"), model, Said())
    source.start()
    run(model, batches, torch.optim.Muon(matrices, lr=1e-3))
    source.stop(1, TEXT, counts, batches)
    assert source.factor(TEXT).value == 1.0


def test_profiler_schedule() -> None:
    model = torch.nn.Linear(2, 2)
    source = make_source(Settings(mode="profiler"), model, Said())
    measured = []
    for step in [*range(3, 1101), 1600, 1601]:
        if source.wants(step, TEXT, 500):
            source.start()
            source.stop(step, TEXT, None, [])
            measured.append(step)
    assert measured == [3, 500, 1000, 1600]


@pytest.mark.heavy
def test_a_measured_step_is_the_step_it_would_have_been() -> None:
    results = []
    for mode in ("estimate", "profiler", "smart"):
        torch.manual_seed(0)
        model = build("llama", {"recompute": "full"})
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.1
        torch.manual_seed(1)
        optimizer = torch.optim.AdamW(model.parameters())
        source = make_source(Settings(mode=mode), model, Said())
        batches = [make(model)]
        losses = []
        for step in range(3):
            source.start()
            losses += run(model, batches, optimizer)
            source.stop(step, TEXT, count(model, batches), batches)
        results.append((losses, [p.detach().clone() for p in model.parameters()]))
    for losses, parameters in results[1:]:
        assert losses == results[0][0]
        assert all(torch.equal(a, b) for a, b in zip(parameters, results[0][1], strict=True))


@pytest.mark.heavy
def test_a_step_that_raises_leaves_no_profiler() -> None:
    model = build("llama")
    source = make_source(Settings(mode="profiler"), model, Said())
    assert source.wants(1, TEXT, 500)
    source.start()
    assert torch.autograd._profiler_enabled()
    source.cancel()
    source.cancel()
    assert not torch.autograd._profiler_enabled()
    assert count_hooks(model) == 0
    assert source.factor(TEXT) == Factor(1.0, "profiler: estimate (not measured yet)")
    measure(source, 2, TEXT, model, [make(model)])  # and the next one is measured
    assert source.factor(TEXT) == Factor(1.0, "profiler at step 2")
    source.close()


def test_close_leaves_no_profiler() -> None:
    source = make_source(Settings(mode="profiler"), torch.nn.Linear(2, 2), Said())
    source.start()
    source.close()
    assert not torch.autograd._profiler_enabled()


@pytest.mark.parametrize("mode", ["profiler", "smart", "hybrid"])
def test_nothing_is_measured_under_another_profiler(mode: str) -> None:
    source = make_source(Settings(mode=mode), build("llama"), Said())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert not source.wants(1, TEXT, 500)
    assert source.wants(2, TEXT, 500)


def test_profiler_without_a_live_model_or_an_analytic_count() -> None:
    """What runs is counted all the same: the absolute figure stands in."""
    module = torch.nn.Linear(5, 7, bias=False)
    source = make_source(Settings(mode="profiler"), None, Said())
    source.start()
    module(torch.ones(3, 5, requires_grad=True)).sum().backward()
    source.stop(1, TEXT, None, [])
    assert source.absolute(TEXT) == 3 * (2 * 3 * 5 * 7)
    assert source.absolute(IMAGES) is None
    assert source.factor(TEXT) == Factor(1.0, "profiler: estimate (no analytic count to compare with)")


def test_profiler_that_cannot_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention whose sizes are not recorded: no figure is better than a wrong one."""
    monkeypatch.setattr(torch_profiler.LiveProfiler, "stop", lambda self: (self.cancel(), (5, ("flash_attn::fwd",)))[1])
    model = build("llama")
    said = Said()
    source = make_source(Settings(mode="profiler"), model, said)
    measure(source, 1, TEXT, model, [make(model)])
    assert len(said) == 1
    assert "flash_attn::fwd" in said[0]
    assert source.factor(TEXT).value == 1.0
    assert "flash_attn::fwd" in source.factor(TEXT).source
    assert not source.wants(500, TEXT, 500)


@pytest.mark.heavy
def test_profiler_that_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_self: Any) -> None:
        raise RuntimeError("kineto is broken")

    model = build("llama")
    said = Said()
    source = make_source(Settings(mode="profiler"), model, said)
    with monkeypatch.context() as patch:
        patch.setattr(torch_profiler.LiveProfiler, "start", fail)
        measure(source, 1, TEXT, model, [make(model)])
    with monkeypatch.context() as patch:
        patch.setattr(torch_profiler.LiveProfiler, "stop", fail)
        measure(source, 500, TEXT, model, [make(model)])
    assert said == ["profiler: RuntimeError: kineto is broken; the estimate stands"]
    assert not torch.autograd._profiler_enabled()
    measure(source, 1000, TEXT, model, [make(model)])
    assert source.factor(TEXT) == Factor(1.0, "profiler at step 1000")


def test_foreign_attention_is_unknown() -> None:
    """Another package's attention runs as one operator without sizes."""

    class FlashAttnFunc(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, x: Any) -> Any:
            return x * 2

        @staticmethod
        def backward(_ctx: Any, grad: Any) -> Any:
            return grad * 2

    live = torch_profiler.LiveProfiler(torch.nn.Module())
    live.start()
    FlashAttnFunc.apply(torch.ones(3, requires_grad=True)).sum().backward()
    assert "FlashAttnFunc" in live.stop()[1]
    with pytest.raises(RuntimeError, match="start"):
        live.stop()


# --- Smart, on a copy -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "recipe", "attention"), mark_heavy(CASES, CASES[:1] + CASES[-3:-2]))
def test_copy_equals_the_analytic_count(family: str, recipe: dict[str, Any], attention: str) -> None:
    model = build(family, recipe, attention)
    said = Said()
    source = make_source(Settings(), model, said)
    before = [(name, parameter, parameter._version) for name, parameter in model.named_parameters()]
    random = torch.get_rng_state()
    batches = [make(model), make(model, 1, 40), make(model)]
    assert source.wants(1, TEXT, 500)
    source.start()
    source.stop(1, TEXT, count(model, batches), batches)
    assert source.factor(TEXT) == Factor(1.0, "smart: operator counter at step 1")
    assert said == []
    assert torch.equal(torch.get_rng_state(), random)
    assert [(name, parameter, parameter._version) for name, parameter in model.named_parameters()] == before
    assert all(parameter.grad is None and not parameter.is_meta for parameter in model.parameters())
    live = getattr(model, "get_base_model", lambda: model)()
    assert live.config._attn_implementation == attention
    assert model.training


class Owner:
    """What must not be copied with a hook of its."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.calls = 0

    def see(self, _module: Any, _args: Any) -> None:
        self.calls += 1


WRAPPERS: list[Callable[[Any], Any]] = [
    lambda model: model,
    torch.nn.DataParallel,
    lambda model: torch.compile(model, backend="eager"),
    lambda model: torch.nn.DataParallel(torch.compile(model, backend="eager")),
]


@pytest.mark.heavy
@pytest.mark.parametrize("wrap", WRAPPERS)
def test_copy_of_a_wrapped_model_leaves_hooks_behind(wrap: Callable[[Any], Any]) -> None:
    model = build("llama")
    owner = Owner()
    model.register_forward_pre_hook(owner.see)
    model.model.layers[0].register_forward_pre_hook(owner.see)
    model.lm_head.compile(backend="eager")
    batch = make(model)
    assert Copy(wrap(model)).count([batch]) == count(model, [batch]).full
    assert owner.calls == 0
    assert count_hooks(model) == 2


def test_copy_keeps_hf_s_own_hook() -> None:
    """Inputs made to require gradients: only so LoRA trains under reentrant checkpointing, and all layers owe some."""
    model = build("llama", {**LORA, "recompute": "full-reentrant"}, "eager")
    batch = make(model)
    model.enable_input_require_grads()
    live = tracing.count_flops(model, lambda: run(model, [batch]))
    assert Copy(model).count([batch]) == live.total


def test_copy_runs_in_training_mode() -> None:
    model = build("llama").eval()
    model.model.layers[0].self_attn.attention_dropout = 0.1
    batch = make(model)
    assert Copy(model).count([batch]) == count(model, [batch]).full
    assert not model.training


def test_equal_shapes_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    seen: list[int] = []
    real = FakeCopy.count

    def counting(made: Any, batch: Mapping[str, Any], phase: str) -> Any:
        seen.append(batch["input_ids"].shape[1])
        return real(made, batch, phase)

    monkeypatch.setattr(FakeCopy, "count", counting)
    copy = Copy(model)
    short, long = make(model, 2, 30), make(model, 2, 40)
    total = copy.count([short, long, short])
    assert seen == [30, 40]
    assert total == count(model, [short, long, short]).full
    copy.count([long])
    assert seen == [30, 40]
    model.model.layers[0].requires_grad_(False)  # what trains has changed
    model.model.embed_tokens.requires_grad_(False)
    assert copy.count([long]) == count(model, [long]).full
    assert seen == [30, 40, 40]


@pytest.mark.heavy
def test_image_sizes_count_and_not_the_shape_alone() -> None:
    model = build("qwen2_vl")
    made = [
        make_batch(model.config, {"batch": 1, "seq": 30, "images": grids})
        for grids in ([[1, 4, 6], [1, 4, 6]], [[1, 8, 6]])
    ]
    copy = Copy(model)
    for batch in made:
        assert copy.count([batch]) == count(model, [batch]).full


def test_shapes_alone() -> None:
    model = build("llama")
    batch = make(model)
    mask = torch.ones(2, 30, dtype=torch.long)
    stand_in = {
        "input_ids": SimpleNamespace(shape=(2, 30)),
        "attention_mask": SimpleNamespace(shape=mask.shape),
        "use_cache": False,
    }
    assert Copy(model).count([stand_in]) == count(model, [batch]).full
    embedded = {"inputs_embeds": SimpleNamespace(shape=(2, 30, model.config.hidden_size))}
    assert Copy(model).count([embedded]) > 0
    vision = build("qwen2_vl")
    images = {**make(vision), "input_ids": SimpleNamespace(shape=(2, 30))}
    with pytest.raises(NotMeasured, match="where its images stand"):
        Copy(vision).count([images])


def test_a_collator_s_extra_entries() -> None:
    class Small(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(5, 7, bias=False)

        def forward(self, x: Any) -> Any:
            return self.linear(x)

    flops = Copy(Small()).count([{"x": torch.ones(3, 5), "name": "a", "index": torch.arange(3)}])
    assert flops == 2 * (2 * 3 * 5 * 7)


class Sharded(torch.nn.Parameter):
    pass


Sharded.__name__ = "DTensor"


def add_lock(model: Any) -> None:
    model.lock = threading.Lock()


def shard(model: Any) -> None:
    model.lm_head.weight = Sharded(torch.ones_like(model.lm_head.weight))


def read_values(model: Any) -> None:
    model.lm_head.forward = lambda x: x * x.sum().item()


@pytest.mark.parametrize(
    ("change", "words"), [(add_lock, "pickle"), (shard, "sharded"), (read_values, "cannot be copied and counted")]
)
def test_a_model_that_cannot_be_copied(change: Callable[[Any], None], words: str) -> None:
    model = build("llama")
    batches = [make(model)]
    counts = count(model, batches)
    change(model)
    said = Said()
    source = make_source(Settings(), model, said)
    assert source.wants(1, TEXT, 500)
    source.start()
    source.stop(1, TEXT, counts, batches)
    assert len(said) == 1
    assert said[0].startswith("smart: on the estimate from here on, which is exact for a model that a spec describes: ")
    assert words in said[0]
    assert source.factor(TEXT).value == 1.0
    assert source.factor(TEXT).source.startswith("smart: estimate (LlamaForCausalLM ")
    assert not source.wants(500, TEXT, 500)
    assert not source.wants(501, IMAGES, 500)


def test_a_copy_never_talks_to_other_ranks() -> None:
    """They do not run the copy's step: a collective in it would wait for ever."""

    class Reducing(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(5, 7)

        def forward(self, x: Any) -> Any:
            count = torch.tensor(x.shape[0])
            torch.distributed.all_reduce(count)
            return self.linear(x) / count

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(NotMeasured, match=r"talks to other ranks \(c10d\.allreduce_"):
            Copy(Reducing()).count([{"x": torch.ones(3, 5)}])
    finally:
        torch.distributed.destroy_process_group()


def test_one_odd_batch_does_not_end_it() -> None:
    model = build("llama")
    said = Said()
    source = make_source(Settings(), model, said)
    measure(source, 1, TEXT, model, [make(model)])
    source.stop(2, IMAGES, Counts(1, 1, 1), [{"input_ids": "a string"}])
    assert len(said) == 1
    assert source.factor(TEXT).source == "smart: operator counter at step 1"
    assert source.wants(500, TEXT, 500)


@pytest.mark.parametrize(
    ("batches", "model", "words"), [([], "llama", "batches are not known"), ([{}], None, "no live model")]
)
def test_nothing_to_count(batches: list[Any], model: str | None, words: str) -> None:
    said = Said()
    source = make_source(Settings(), build(model) if model else None, said)
    source.start()
    source.stop(1, TEXT, None, batches)
    assert len(said) == 1
    assert words in said[0]


def test_an_operator_without_a_formula() -> None:
    class Odd(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(4, 4))

        def forward(self, x: Any) -> Any:
            return torch.cdist(x, self.weight)

    with pytest.raises(NotMeasured, match="no formula for"):
        Copy(Odd()).count([{"x": torch.ones(3, 4)}])


def test_smart_schedule() -> None:
    """The first step, each new workload class, and each multiple of recalibration_frequency for each class."""
    model = torch.nn.Linear(2, 2)
    for settings, expected in [
        (Settings(), [(0, TEXT), (3, IMAGES), (500, TEXT), (501, IMAGES), (1000, TEXT), (1001, IMAGES)]),
        (Settings(recalibration_frequency=700), [(0, TEXT), (3, IMAGES), (700, TEXT), (701, IMAGES)]),
        (Settings(initial_profiling=False), [(3, IMAGES), (500, TEXT), (501, IMAGES), (1000, TEXT), (1001, IMAGES)]),
        (Settings(calibration_enabled=False), []),
    ]:
        source = make_source(settings, model, Said())
        measured = []
        for step in range(1002):
            kind = IMAGES if step % 2 and step > 2 else TEXT
            if source.wants(step, kind, 500):
                source.start()
                source.stop(step, kind, None, [{"input": torch.ones(1, 2)}])
                measured.append((step, kind))
        assert measured == expected
    assert source.factor(TEXT) == Factor(1.0, "smart: estimate (smart_mode.calibration_enabled is false)")


def test_too_many_workload_classes() -> None:
    model = torch.nn.Linear(2, 2)
    said = Said()
    source = make_source(Settings(), model, said)
    measured = []
    for step in range(1, 40):
        if source.wants(step, step, 500):
            source.start()
            source.stop(step, step, Counts(16, 16, None), [{"input": torch.ones(1, 2)}])
            measured.append(step)
    assert measured == list(range(1, 17))
    assert said == ["smart: more than 16 workload classes: the others are not measured, their factor is 1"]
    assert source.factor(16) == Factor(1.0, "smart: operator counter at step 16")
    assert source.factor(17).value == 1.0


def test_smart_without_an_analytic_count() -> None:
    model = torch.nn.Linear(5, 7, bias=False)
    source = make_source(Settings(), model, Said())
    source.start()
    source.stop(1, TEXT, None, [{"input": torch.ones(3, 5)}])
    assert source.absolute(TEXT) == 2 * (2 * 3 * 5 * 7)


@pytest.mark.parametrize(
    ("figures", "factor", "words"),
    [
        ((1000, 1019), 1.019, None),
        ((1000, 1021), 1.021, "moved from 1.0000 (smart: operator counter at step 1) to 1.0210"),
        ((1000, 979), 0.979, "moved from 1.0000"),
        ((1000, 0), 1.0, "counted nothing at step 500; the factor of before stands"),
        ((1000, 2501), 1.0, "2.501 times that: outside 0.5 to 2.5 it is not believed"),
        ((499, 1000), 1.0, "0.499 times that"),
        ((499, 498), 1.0, "it is not believed; the estimate stands"),
        ((1400, 1400), 1.4, None),
        ((2500, 500), 0.5, "moved"),
    ],
)
def test_what_is_believed(
    figures: tuple[int, int], factor: float, words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = Said()
    source = make_source(Settings(), torch.nn.Linear(1, 1), said)
    for step, figure in zip((1, 500), figures, strict=True):
        monkeypatch.setattr(Copy, "count", lambda _self, _batches, figure=figure: figure)
        assert source.wants(step, TEXT, 500)
        source.start()
        source.stop(step, TEXT, Counts(900, 1000, 1100), [{}])
    assert source.factor(TEXT).value == factor
    if words is None:
        assert said == []
    else:
        assert len(said) == 1
        assert words in said[0]


# --- Hardware counters ------------------------------------------------------------------------------------------------


class FakeCounter:
    """A HardwareCounter that answers from a list; an exception in the list is raised at the end of the range."""

    made: list[FakeCounter]
    answers: list[Any]
    refusal: Exception | None

    def __init__(self, counters: Sequence[str], *, stays_enabled: bool) -> None:
        assert stays_enabled
        if FakeCounter.refusal is not None:
            raise FakeCounter.refusal
        self.counters = list(counters)
        self.is_open = self.is_closed = False
        self.ended: list[str] = []
        FakeCounter.made.append(self)

    @contextmanager
    def measure(self) -> Iterator[Any]:
        sample = SimpleNamespace(total_flops=None)
        self.is_open = True
        try:
            yield sample
        except BaseException:
            self.ended.append("given up")
            raise
        finally:
            self.is_open = False
        self.ended.append("read")
        answer = FakeCounter.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        sample.total_flops = answer

    def close(self) -> None:
        self.is_closed = True


class OnGpu:
    """A model with parameters on a GPU, as far as anybody asks."""

    def __init__(self, dtype: Any = torch.bfloat16) -> None:
        self.dtype = dtype

    def parameters(self) -> Iterator[Any]:
        yield SimpleNamespace(
            device=SimpleNamespace(type="cuda", index=0),
            dtype=self.dtype,
            numel=lambda: 4,
            is_floating_point=lambda: True,
        )


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> type[FakeCounter]:
    FakeCounter.made, FakeCounter.answers, FakeCounter.refusal = [], [], None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", lambda _device: nullcontext())
    monkeypatch.setattr(cupti, "HardwareCounter", FakeCounter)
    monkeypatch.setattr(Copy, "count", lambda _self, _batches: 1000)
    return FakeCounter


COUNTS = Counts(900, 1000, 1100)


def sample(source: Any, step: int, kind: Any = TEXT, counts: Counts | None = COUNTS) -> bool:
    if not source.wants(step, kind, 500):
        return False
    source.start()
    source.stop(step, kind, counts, [{}])
    return True


@pytest.mark.parametrize("mode", ["smart", "hybrid"])
def test_counters(mode: str, gpu: type[FakeCounter]) -> None:
    gpu.answers = [1133, 1134]
    said = Said()
    source = make_source(Settings(mode=mode), OnGpu(), said)
    assert not sample(source, 0)  # warms up
    assert gpu.made == []
    assert sample(source, 1)
    assert source.factor(TEXT) == Factor(1133 / 1100, f"{mode}: cupti at step 1", False)
    assert [sample(source, step) for step in (2, 499, 500)] == [False, False, True]
    assert source.factor(TEXT) == Factor(1134 / 1100, f"{mode}: cupti at step 500", False)
    assert source.absolute(TEXT) == 1134
    (counter,) = gpu.made  # made once
    assert counter.counters == [cupti.TENSOR_COUNTERS["bf16"]]
    assert (counter.ended, counter.is_open, counter.is_closed) == (["read", "read"], False, False)
    source.close()
    assert counter.is_closed
    assert said == []


def test_smart_measures_each_class_with_the_counters(gpu: type[FakeCounter]) -> None:
    gpu.answers = [1133, 1200]
    source = make_source(Settings(), OnGpu(), Said())
    assert [sample(source, step, kind) for step, kind in enumerate([TEXT, TEXT, IMAGES, TEXT, IMAGES])] == [
        False,
        True,
        False,
        False,
        True,
    ]
    assert source.factor(TEXT) == Factor(1133 / 1100, "smart: cupti at step 1", False)
    assert source.factor(IMAGES) == Factor(1200 / 1100, "smart: cupti at step 4", False)
    assert source.factor("other") == Factor(1.0, "smart: estimate (not measured yet)")


def test_hybrid_gives_an_unmeasured_class_the_last_factor(gpu: type[FakeCounter]) -> None:
    gpu.answers = [1133]
    source = make_source(Settings(mode="hybrid"), OnGpu(), Said())
    sample(source, 0)
    sample(source, 1)
    assert source.factor(IMAGES) == Factor(1133 / 1100, "hybrid: cupti at step 1", False)


@pytest.mark.parametrize("mode", ["smart", "hybrid"])
def test_a_step_that_raises_leaves_no_counter_open(mode: str, gpu: type[FakeCounter]) -> None:
    gpu.answers = [1133]
    source = make_source(Settings(mode=mode), OnGpu(), Said())
    sample(source, 0)
    assert source.wants(1, TEXT, 500)
    source.start()
    assert gpu.made[0].is_open
    source.cancel()
    source.cancel()
    assert (gpu.made[0].ended, gpu.made[0].is_open) == (["given up"], False)
    assert sample(source, 2)
    assert source.factor(TEXT) == Factor(1133 / 1100, f"{mode}: cupti at step 2", False)


@pytest.mark.parametrize("mode", ["smart", "hybrid"])
def test_another_dtype_s_tensor_cores(mode: str, gpu: type[FakeCounter], monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind fp32 weights may be an autocast: bf16 is asked first, and TF32 where bf16 did (next to) nothing."""
    monkeypatch.setattr(instruments, "_allows_tf32", lambda: True)
    gpu.answers = [3, 1133]
    said = Said()
    source = make_source(Settings(mode=mode), OnGpu(torch.float32), said)
    assert [sample(source, step) for step in range(4)] == [False, True, True, False]
    assert [counter.counters for counter in gpu.made] == [
        [cupti.TENSOR_COUNTERS["bf16"]],
        [cupti.TENSOR_COUNTERS["tf32"]],
    ]
    assert gpu.made[0].is_closed
    assert source.factor(TEXT) == Factor(1133 / 1100, f"{mode}: cupti at step 2", False)
    assert said == []


def test_counters_that_see_nothing(gpu: type[FakeCounter]) -> None:
    gpu.answers = [0]
    said = Said()
    source = make_source(Settings(), OnGpu(), said)
    assert [sample(source, step) for step in range(3)] == [False, True, False]
    assert source.factor(TEXT) == Factor(1.0, "smart: operator counter at step 1")
    assert said == [
        "smart: no hardware counters (the tensor counters saw 0 FLOPs at step 1 where 1100 are expected): "
        "on the operator counter"
    ]


def test_a_proven_counter_that_sees_nothing_once(gpu: type[FakeCounter]) -> None:
    gpu.answers = [1133, 0, 1133]
    said = Said()
    source = make_source(Settings(), OnGpu(), said)
    assert [step for step in range(1001) if sample(source, step)] == [1, 500, 1000]
    assert source.factor(TEXT) == Factor(1133 / 1100, "smart: cupti at step 1000", False)
    assert said == ["smart: cupti counted nothing at step 500; the factor of before stands (smart: cupti at step 1)"]


@pytest.mark.parametrize("at_end", [False, True])
def test_smart_where_counters_are_refused(at_end: bool, gpu: type[FakeCounter]) -> None:
    error = cupti.CountersUnavailable("INSUFFICIENT_PRIVILEGES")
    if at_end:
        gpu.answers = [error]
    else:
        gpu.refusal = error
    said = Said()
    source = make_source(Settings(), OnGpu(), said)
    assert [sample(source, step) for step in range(3)] == [False, True, False]
    assert source.factor(TEXT) == Factor(1.0, "smart: operator counter at step 1")
    assert said == ["smart: no hardware counters (INSUFFICIENT_PRIVILEGES): on the operator counter"]
    assert sample(source, 500)
    assert len(said) == 1


@pytest.mark.parametrize("mode", ["smart", "hybrid"])
def test_counters_without_an_analytic_count(mode: str, gpu: type[FakeCounter]) -> None:
    gpu.answers = [1133]
    source = make_source(Settings(mode=mode), OnGpu(), Said())
    sample(source, 0)
    assert sample(source, 1, counts=None)
    assert source.absolute(TEXT) == 1133
    assert source.factor(TEXT) == Factor(1.0, f"{mode}: estimate (no analytic count to compare with)")


def test_a_traced_model_is_compared_by_its_operators(gpu: type[FakeCounter]) -> None:
    source = make_source(Settings(), OnGpu(), Said())
    sample(source, 0)
    assert sample(source, 1, counts=Counts(900, 1000, None))
    assert source.factor(TEXT) == Factor(1.0, "smart: operator counter at step 1")
    assert not gpu.made[0].is_open


# --- Hybrid -----------------------------------------------------------------------------------------------------------

NO_COUNTERS = "no hardware counters (refused)"
ON_ESTIMATE = "hybrid: on the estimate from here on, which is exact for a model that a spec describes: "


@pytest.mark.parametrize(
    ("settings", "has_counters", "has_profiler", "source_text", "said_text"),
    [
        ({}, True, True, "hybrid: cupti at step 1", []),
        ({}, False, True, "hybrid: profiler at step 1", [f"hybrid: {NO_COUNTERS}: on the profiler"]),
        (
            {},
            False,
            False,
            f"hybrid: estimate ({NO_COUNTERS}; no profiler (ImportError: no kineto))",
            [
                f"hybrid: {NO_COUNTERS}: on the profiler",
                f"{ON_ESTIMATE}{NO_COUNTERS}; no profiler (ImportError: no kineto)",
            ],
        ),
        (
            {"fallback_to_profiler": False},
            False,
            True,
            f"hybrid: estimate ({NO_COUNTERS}, and hybrid_mode.fallback_to_profiler is false)",
            [f"{ON_ESTIMATE}{NO_COUNTERS}, and hybrid_mode.fallback_to_profiler is false"],
        ),
        (
            {"hardware_counters_enabled": False},
            True,
            True,
            "hybrid: profiler at step 1",
            ["hybrid: no hardware counters (hybrid_mode.hardware_counters_enabled is false): on the profiler"],
        ),
    ],
)
def test_hybrid_says_what_it_is_on(
    settings: dict[str, Any],
    has_counters: bool,
    has_profiler: bool,
    source_text: str,
    said_text: list[str],
    gpu: type[FakeCounter],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_self: Any) -> None:
        raise ImportError("no kineto")

    gpu.refusal = None if has_counters else cupti.CountersUnavailable("refused")
    gpu.answers = [1100]
    monkeypatch.setattr(torch_profiler.LiveProfiler, "start", (lambda _self: None) if has_profiler else refuse)
    monkeypatch.setattr(torch_profiler.LiveProfiler, "stop", lambda _self: (1000, ()))
    said = Said()
    source = make_source(Settings(mode="hybrid", **settings), OnGpu(), said)
    for step in (0, 1):
        if source.wants(step, TEXT, 500):
            source.start()
            source.stop(1, TEXT, COUNTS, [{}])
    assert source.factor(TEXT) == Factor(1.0, source_text, "cupti" not in source_text)
    assert said == said_text
    assert source.wants(500, TEXT, 500) == ("estimate" not in source_text)


def test_hybrid_on_the_cpu_is_on_the_profiler() -> None:
    model = build("llama")
    said = Said()
    source = make_source(Settings(mode="hybrid"), model, said)
    measure(source, 1, TEXT, model, [make(model)])
    assert source.factor(TEXT) == Factor(1.0, "hybrid: profiler at step 1")
    assert said == ["hybrid: no hardware counters (the model is not on a CUDA device): on the profiler"]
    assert source.gauge() == {}
    source.start()
    source.close()
    assert not torch.autograd._profiler_enabled()


def test_hybrid_takes_the_profiler_when_a_range_ends_badly(gpu: type[FakeCounter], monkeypatch: Any) -> None:
    monkeypatch.setattr(torch_profiler.LiveProfiler, "start", lambda _self: None)
    monkeypatch.setattr(torch_profiler.LiveProfiler, "stop", lambda _self: (1000, ()))
    gpu.answers = [cupti.CountersUnavailable("did not fit")]
    said = Said()
    source = make_source(Settings(mode="hybrid"), OnGpu(), said)
    assert [sample(source, step) for step in range(4)] == [False, True, True, False]
    assert source.factor(TEXT) == Factor(1.0, "hybrid: profiler at step 2")
    assert said == ["hybrid: no hardware counters (did not fit): on the profiler"]


class FakeGauge:
    """A gauge that answers from a list."""

    def __init__(self, index: int, uuid: str | None) -> None:
        self.opened = (index, uuid)
        self.is_closed = False
        self.answers = [
            None,
            gpm.Activity(0.5, 0.9, 0.25, 1.0),
            gpm.Activity(reason="GPM sample failed"),
            gpm.Activity(0.5, 0.9),
        ]

    def read(self) -> gpm.Activity | None:
        return self.answers.pop(0)

    def close(self) -> None:
        self.is_closed = True


def test_gauge(gpu: type[FakeCounter], monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu.made == []
    made: list[FakeGauge] = []

    def open_gauge(index: int, uuid: str | None) -> FakeGauge:
        made.append(FakeGauge(index, uuid))
        return made[-1]

    monkeypatch.setattr(gpm, "Gauge", open_gauge)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _index: SimpleNamespace(uuid="abc"))
    said = Said()
    source = make_source(Settings(mode="hybrid"), OnGpu(), said)
    assert [source.gauge() for _ in range(4)] == [
        {},
        {"perf/tensor_active": 0.5, "perf/sm_active": 0.9, "perf/dram_active": 0.25},
        {},
        {"perf/tensor_active": 0.5, "perf/sm_active": 0.9},
    ]
    assert said == ["hybrid: no gauge of the device: GPM sample failed"]
    (gauge,) = made
    assert gauge.opened == (0, "GPU-abc")
    source.close()
    assert gauge.is_closed


def test_no_gauge(gpu: type[FakeCounter], monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu.made == []

    def refuse(*_: Any) -> None:
        raise gpm.GaugeUnavailable("this GPU has no GPM")

    monkeypatch.setattr(gpm, "Gauge", refuse)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _index: SimpleNamespace())
    said = Said()
    source = make_source(Settings(mode="hybrid"), OnGpu(), said)
    assert [source.gauge(), source.gauge()] == [{}, {}]
    assert said == ["hybrid: no gauge of the device: this GPU has no GPM"]


class NvmlError(Exception):
    pass


class FakeNvml:
    """NVML's GPM calls; samples are numbers, and `refused` names a call that fails."""

    NVMLError, NVML_SUCCESS, NVML_GPM_METRICS_GET_VERSION = NvmlError, 0, 1
    NVML_GPM_METRIC_SM_UTIL, NVML_GPM_METRIC_ANY_TENSOR_UTIL, NVML_GPM_METRIC_DRAM_BW_UTIL = 2, 5, 10

    def __init__(self) -> None:
        self.held: list[int] = []
        self.windows: list[tuple[int, int]] = []
        self.refused = ""
        self._next = 0

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvml"):
            raise AttributeError(name)
        return lambda *_: SimpleNamespace(isSupportedDevice=1)

    def nvmlGpmSampleAlloc(self) -> int:
        self._next += 1
        self.held.append(self._next)
        return self._next

    def nvmlGpmSampleGet(self, _device: Any, _sample: int) -> None:
        if self.refused == "sample":
            raise NvmlError("lost")

    def nvmlGpmSampleFree(self, sample: int) -> None:
        self.held.remove(sample)

    def nvmlGpmMetricsGet(self, request: Any) -> None:
        self.windows.append((request.sample1, request.sample2))
        for metric in request.metrics:
            metric.nvmlReturn, metric.value = 0, 10.0 * metric.metricId

    @staticmethod
    def c_nvmlGpmMetricsGet_t() -> Any:
        return SimpleNamespace(metrics=[SimpleNamespace(metricId=0) for _ in range(3)])


def test_a_gauge_that_is_read_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each window reaches from one reading to the next; one that is too short goes on."""
    nvml = FakeNvml()
    now_s = [0.0]
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(gpm.time, "perf_counter", lambda: now_s[0])
    gauge = gpm.Gauge()
    assert gauge.read() is None
    now_s[0] = 0.09
    assert gauge.read() is None
    now_s[0] = 0.2
    assert gauge.read() == gpm.Activity(0.5, 0.2, 1.0, 0.2)
    now_s[0] = 1.2
    assert gauge.read() == gpm.Activity(0.5, 0.2, 1.0, 1.0)
    assert nvml.windows == [(1, 2), (2, 3)]
    assert nvml.held == [3]
    nvml.refused, now_s[0] = "sample", 2.0
    assert gauge.read() == gpm.Activity(reason="GPM sample failed: lost")
    assert nvml.held == []
    nvml.refused, now_s[0] = "", 3.0
    assert gauge.read() is None  # a new window begins
    gauge.close()
    assert nvml.held == []


# --- Which tensor cores -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "wanted", "tf32", "expected"),
    [
        (torch.bfloat16, None, False, ["bf16"]),
        (torch.float16, None, True, ["fp16"]),
        (torch.float64, None, True, ["fp64"]),
        (torch.float32, None, True, ["bf16", "tf32", "fp16"]),
        (torch.float32, None, False, ["bf16", "fp16"]),
        (torch.float32, "bf16", False, ["bf16"]),
        (torch.bfloat16, "fp8", False, ["fp8"]),
        (torch.float32, "fp32", False, []),
        (torch.float32, "fp32", True, ["tf32"]),
    ],
)
def test_tensor_dtypes(
    dtype: Any, wanted: str | None, tf32: bool, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instruments, "_allows_tf32", lambda: tf32)
    assert list_tensor_dtypes(OnGpu(dtype), wanted) == expected


def test_tensor_dtypes_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda _kind: True)
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda _kind: torch.float16)
    assert list_tensor_dtypes(OnGpu(torch.float32)) == ["fp16"]
    assert list_tensor_dtypes(None) == ["fp16"]


def test_fp8_is_counted_with_bf16(gpu: type[FakeCounter]) -> None:
    gpu.answers = [1100]
    source = make_source(Settings(mode="hybrid", dtype="fp8"), OnGpu(), Said())
    assert [sample(source, step) for step in range(2)] == [False, True]
    assert gpu.made[0].counters == [cupti.TENSOR_COUNTERS["fp8"], cupti.TENSOR_COUNTERS["bf16"]]


def test_no_tensor_core(gpu: type[FakeCounter], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instruments, "_allows_tf32", lambda: False)
    said = Said()
    source = make_source(Settings(dtype="fp32"), OnGpu(torch.float32), said)
    assert [sample(source, step) for step in range(2)] == [False, True]
    assert source.factor(TEXT) == Factor(1.0, "smart: operator counter at step 1")
    assert "fp32 without TF32" in said[0]
    assert gpu.made == []


# --- Without torch, and with a GPU ------------------------------------------------------------------------------------


def test_torch_is_imported_when_something_is_measured() -> None:
    code = (
        "import sys\n"
        "from flopcalc.monitor.settings import Settings\n"
        "from flopcalc.monitor.modes import make_source\n"
        "for mode in ('estimate', 'profiler', 'smart', 'hybrid'):\n"
        "    source = make_source(Settings(mode=mode), None, print)\n"
        "    source.factor(()), source.wants(1, (), 500), source.gauge(), source.close()\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("mode", ["profiler", "smart", "hybrid"])
def test_on_a_gpu(mode: str) -> None:
    """Dims that fill whole tiles: what the counters see is the analytic hardware count within 2 %."""
    config = {
        "model_type": "llama", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 32000,
    }  # fmt: skip
    model = build_model(config, "sdpa", dtype=torch.bfloat16).cuda().train()
    batches = [{name: tensor.cuda() for name, tensor in make(model, 2, 2048).items()}]
    hardware = bind(model, convention="hardware", device=torch.cuda.get_device_name())
    counts = count(model, batches)._replace(hardware=hardware.estimate_batch(batches[0]).total)
    said = Said()
    source = make_source(Settings(mode=mode), model, said)
    losses = []
    for step in range(3):
        is_measured = source.wants(step, TEXT, 500)
        if is_measured:
            source.start()
        losses += run(model, batches)
        if is_measured:
            source.stop(step, TEXT, counts, batches)
    found = source.factor(TEXT)
    source.close()
    assert said == []
    if mode == "profiler":
        assert found == Factor(1.0, "profiler at step 0")
    else:
        assert found.source == f"{mode}: cupti at step 1"
        assert found.value == pytest.approx(1, abs=0.02)
    assert len(set(losses)) == 1
    assert sources.LOWEST < found.value < sources.HIGHEST
