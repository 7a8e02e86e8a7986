"""A model that is watched: how its batches are counted, in every state that it runs in."""

from __future__ import annotations

import inspect
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from typing import Any

from flopcalc.base.errors import ConfigError, FlopcalcError, WorkloadError
from flopcalc.base.vocabulary import Phase
from flopcalc.core.estimate.counted import CountedEstimator
from flopcalc.core.estimate.former import tie_live
from flopcalc.core.model.live import iterate_parameters, strip, unwrap
from flopcalc.core.model.ops import Stage, list_parameters
from flopcalc.core.recipe.live import plain_name
from flopcalc.core.workload.workload import Workload
from flopcalc.monitor.batch import BatchWork, Fetcher, Intake, Snapshot, TensorShape, bind_live
from flopcalc.monitor.instruments import Copy, ExecutedFlops, NotMeasured, sign
from flopcalc.monitor.messages import Say
from flopcalc.monitor.meter import Meter, Peaks
from flopcalc.monitor.modes import FactorSource, make_source
from flopcalc.monitor.place import Seen, find_known_device, find_layout, find_peak, guess_format, look_inside
from flopcalc.monitor.settings import Settings

_MOST_SIZES = 64  # that are counted one by one


class MeasuredModule:
    """Counts the calls of a live module on the training thread, with their own arguments; nothing of it runs."""

    def __init__(self, live: Any, name_format: Callable[[], str], say: Say) -> None:
        self.live = live
        self._name_format = name_format
        self._say = say
        self._copy = Copy(live)
        self._flops: dict[Hashable, ExecutedFlops | None] = {}  # phase and sizes of a call -> FLOPs; None: not known
        self._intake: Intake | None = None  # from a trace that holds
        self._is_tried = False

    def take(self, batch: Mapping[str, Any], fetcher: Fetcher | None, holder: Any) -> Snapshot:
        """A snapshot; a new size is counted now."""
        import torch

        phase = "train" if torch.is_grad_enabled() and self.live.training else "forward"
        key = (phase, sign(batch))
        if self._intake is not None and phase == "train":
            return self._intake.take(batch, fetcher, holder)
        if key not in self._flops:
            # In a thread of its own: a counter or a mode that the loop has on sees nothing of it.
            apart = threading.Thread(target=self._measure, args=(key, phase, batch), name="flopcalc-count")
            apart.start()
            apart.join()
        return Snapshot((("call", key),), {})

    def count_known(self) -> int:
        """How many sizes were counted."""
        return len(self._flops)

    def _measure(self, key: Hashable, phase: Phase, batch: Mapping[str, object]) -> None:
        self._flops[key] = None
        name = type(strip(self.live)).__name__
        if len(self._flops) > _MOST_SIZES:
            self._say(f"{name}: more than {_MOST_SIZES} sizes of batches: others are not counted", f"sizes of {name}")
            return
        try:
            counted = self._flops[key] = self._copy.split([batch], phase)
        except NotMeasured as error:
            self._say(f"{name} cannot be counted: {error}", f"copy of {name}")
            return
        known = [each for each in self._flops if isinstance(each, tuple) and each[0] == "train"]
        is_plain = not counted.recomputed  # a trace does not show what is recomputed
        if phase == "train" and is_plain and len(known) > 1 and not self._is_tried:
            self._is_tried = True
            self._try_trace(batch, key)

    def _try_trace(self, batch: Mapping[str, object], key: Hashable) -> None:
        """A trace that gives what was counted at this size takes over."""
        import torch

        from flopcalc.measure.trace.copies import copy_to_meta
        from flopcalc.measure.trace.polynomials import trace_module

        random = torch.random.get_rng_state()  # the live step's numbers go on as if nothing had been
        try:
            twin = copy_to_meta(strip(self.live))
            intake = Intake(trace_module(twin, batch, phases=("train",), compute=self._name_format()))
            found = self._flops[key]
            if found is not None and intake.count(intake.take(batch, None, None)).model_flops == found.needed:
                self._intake = intake
        except Exception:  # whatever the module does: then its sizes are counted one by one
            pass
        finally:
            torch.random.set_rng_state(random)


class MeasuredIntake(Intake):
    """Reads what a MeasuredModule took."""

    def __init__(self, module: MeasuredModule) -> None:
        self.module = module
        self.estimator = None  # type: ignore[assignment]

    def take(self, batch: Mapping[str, object], fetcher: Fetcher | None, holder: object) -> Snapshot:
        return self.module.take(batch, fetcher, holder)

    def classify(self, batch: Mapping[str, object]) -> Hashable:  # noqa: ARG002
        return ()

    def is_told_by(self, sizes: Hashable) -> bool:  # noqa: ARG002
        return False

    def count(self, snapshot: Snapshot, phase: Phase = "train") -> BatchWork:
        module = self.module
        name, key = snapshot.key[0]
        if name != "call":
            if module._intake is None:
                raise WorkloadError("its trace is gone")
            work = module._intake.count(snapshot, phase)
            return work._replace(hardware=work.model)
        flops = module._flops.get(key)
        if flops is None:
            raise WorkloadError(f"{type(strip(module.live)).__name__} could not be counted at this size")
        name = module._name_format()
        rows, seq = _find_sizes(key)
        needed, executed = {name: flops.needed}, {name: flops.total}
        return BatchWork(Workload(rows, seq, phase=phase), needed, executed, rows * seq, rows * seq, rows, 0)

    def count_eager(self, work: BatchWork, head: object = None) -> int:  # noqa: ARG002
        return int(work.hardware_flops or 0)

    def count_lengths(self, prompts: object, completions: object, generates: bool) -> Any:  # noqa: ARG002
        raise FlopcalcError("a module without a spec is not counted by lengths")

    def count_generated(self, prompt: BatchWork, new: int, lengths: object) -> BatchWork:  # noqa: ARG002
        raise FlopcalcError("what a module without a spec generates is not counted")


def _find_sizes(key: object) -> tuple[int, int]:
    """Batch and length of the first tensor of a call."""
    for part in key[1] if isinstance(key, tuple) else ():
        shape = part[1] if isinstance(part, tuple) and len(part) == 2 else None
        if isinstance(shape, tuple) and shape and all(isinstance(size, int) for size in shape):
            return max(1, shape[0]), max(1, shape[1]) if len(shape) > 1 else 1
        if isinstance(shape, tuple):
            found = _find_sizes((None, shape))
            if found != (1, 1):
                return found
    return 1, 1


def cut_to_stage(whole: CountedEstimator, module: Any) -> tuple[CountedEstimator, bool] | None:
    """The same recipe on what the module holds, and whether that is given text; None if it has no name of the model."""
    start = _find_start(module, whole.stages)
    if start is None:
        return None
    is_first = any(name.startswith(f"{start}{whole.stages[0].path}.") for name, _ in _list_names(module))
    layers = {  # by their names here and in the model
        f"{stage.path}.{key}.": f"{stage.path}.{number}."
        for stage in whole.stages if stage.repeated
        for key, number in _number_layers(module, start, stage, is_first).items()
    }  # fmt: skip
    first: dict[object, str] = {}
    names: dict[str, str] = {}  # of every parameter -> the first one of its tensor
    for here, tensor in _list_names(module):
        own = here.removeprefix(start)
        own = next((name + own.removeprefix(at) for at, name in layers.items() if own.startswith(at)), own)
        names[own] = first.setdefault(tensor, own)
    stages: list[Stage] = []
    for stage in whole.stages:
        if stage.reads is not None or stage.adds is not None:
            raise ConfigError(f"{whole.source.name} hands on outputs between layers: its stages are not told apart")
        if not stage.repeated:
            stages += [stage] * (list_parameters([stage], has_tied=True).keys() <= names.keys())
            continue
        for i, chain in enumerate(stage.layers):
            number = stage.first + i
            if f"{stage.path}.{number}." in layers.values():
                stages.append(stage.replace(layers=(chain,), dead=stage.dead[i : i + 1], first=number))
    stages = list(tie_live(tuple(stages), names))
    if differing := sorted(list_parameters(stages).keys() ^ set(names.values())):
        raise ConfigError(f"a stage of {whole.source.name} is not made of its whole layers ({differing[0]})")
    if not is_first:  # a gradient goes back to the stage before, whatever trains
        stages[0] = stages[0].replace(input_gradient=True)
    part = CountedEstimator(
        whole.model.replace(stages=tuple(stages)), whole.recipe, whole.convention, whole.asked_kernel, whole.device,
        formats=whole.formats, routing=whole.asked_routing,
    )  # fmt: skip
    return part, is_first


def _list_names(module: Any) -> list[tuple[str, object]]:
    """Its parameters' plain names, without adapters, and what is one object for all names of a tensor."""
    return [(plain_name(name), own) for name, _, own in iterate_parameters(module) if ".lora_" not in name]


def _find_start(module: Any, stages: tuple[Stage, ...]) -> str | None:
    """What the model's names have before them here."""
    names = [f".{name}" for name, _ in _list_names(module)]
    starts = Counter(
        name[1 : name.find(f".{stage.path}.") + 1] for stage in stages for name in names if f".{stage.path}." in name
    )
    return starts.most_common(1)[0][0] if starts else None


def _number_layers(module: Any, start: str, stage: Stage, is_first: bool) -> dict[str, int]:
    """The key of each layer that is here -> its number in the model, which HF's layers know.

    Deleting layers from a list numbers the rest anew; others keep their numbers as keys.
    """
    found: dict[str, int] = {}
    known: set[str] = set()
    path = f"{start}{stage.path}."
    for name, each in module.named_modules():
        plain = plain_name(f"{name}.")
        key = plain.removeprefix(path).partition(".")[0]
        if not plain.startswith(path) or not key.isdigit():
            continue
        number = getattr(each, "layer_idx", None)
        if isinstance(number, int):
            found[key] = number
            known.add(key)
        found.setdefault(key, int(key))
    if len(stage.kinds) > 1 and "0" in found.keys() - known and not is_first:
        raise ConfigError(
            f"{stage.path} has layers of several kinds, and a stage does not say which: keep their numbers"
        )
    return found


class WatchedModel:
    """Filled in at the first step; each part may fail by itself. The first one that is watched is what trains."""

    def __init__(self, settings: Settings, meter: Meter, say: Say, is_first: bool = True) -> None:
        self.live: Any = None  # the module whose forward passes are seen
        self.given: Any = None  # what is counted, where that is not the live module
        self.intake: Intake | None = None
        self.source: FactorSource | None = None
        self.shared = 1  # ranks that work on one batch together
        self.take: Callable[[Mapping[str, Any], Fetcher | None, Any], Snapshot | None] = _take_sizes
        self.classify: Callable[[Mapping[str, Any]], Hashable] = lambda _: ()
        self.seen: Seen | None = None  # what its products are computed in; None: not known yet
        self.open_calls = 0  # of the wrapper around it
        self.is_frozen = False  # nothing of it trains
        self.is_scorer = False  # it gives rewards, not words
        self.ends: frozenset[int] = frozenset()  # tokens that end a generation
        self.is_bound = False
        self.has_formula = False
        self.clock: Callable[[], int] = time.perf_counter_ns
        # Weak: hooks on the live module hold this model, and would keep its monitor alive.
        self.lose: Callable[[], Callable[[str, int], None] | None] = lambda: None
        self._names: tuple[str, ...] = ()  # of the model's positional arguments
        self._adapted: Any = None  # a module that has adapters
        self._base: Hashable = None  # which adapters are on where it trains
        self._states: dict[Hashable, Intake | None] = {}  # which adapters are on -> how passes are counted
        self._is_part = False  # a pipeline's stage that is counted by itself
        self._is_first = is_first
        self._settings = settings
        self._meter = meter
        self._say = say
        self._absolute: dict[Hashable, int] = {}  # sizes of a step -> FLOPs, where there is no formula
        if settings.dtype is not None:
            self.seen = Seen(None)

    def look_at(self, live: Any) -> None:
        """What a live module is, before its first pass."""
        self.live = live
        self._names = _name_arguments(live)
        inner = unwrap(live)
        config = getattr(inner, "config", None)
        weights = [each.requires_grad for each in live.parameters()]
        self.is_frozen = not self._is_first and bool(weights) and not any(weights)
        self.is_scorer = "Classification" in type(inner).__name__ or "Reward" in type(inner).__name__
        ends = getattr(getattr(inner, "generation_config", None), "eos_token_id", None)
        if ends is None:
            ends = getattr(config, "eos_token_id", None)
        self.ends = frozenset(ends if isinstance(ends, (list, tuple)) else () if ends is None else (ends,))
        # PEFT's layers say it by a flag; HF's models have a method of that name.
        layers = (each for each in live.modules() if isinstance(getattr(each, "disable_adapters", None), bool))
        self._adapted = next(layers, None)

    def is_told_by(self, sizes: Hashable) -> bool:
        """Whether these sizes of a batch alone determine its workload class."""
        return self.intake is not None and self.intake.is_told_by(sizes)

    def name_inputs(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> dict[str, Any]:
        """The arguments of a call, by name."""
        return {**dict(zip(self._names, args, strict=False)), **kwargs}

    def bind(self) -> None:
        """The analytic count of the model as it stands; once more when it is seen what its products run in."""
        if self._is_first:
            self._find_peaks()
        model = self.given if self.given is not None else self.live
        if model is None:
            self._explain("no model was given: TrainingMonitor(…, model=model), or monitor.attach(model)")
            return
        state = self.find_state()
        if _is_off(state):  # its adapters are off: it does not train now
            return
        self.is_bound = True
        try:
            tensor, context, stages = find_layout(self._settings, self.live, self._say)
        except FlopcalcError as error:
            self._explain(str(error))
            return
        self.shared = tensor * context
        try:
            self._meter.has_stages = stages > 1
            self.intake = self._make_intake(model, context)
            if stages > 1 and isinstance(self.intake.estimator, CountedEstimator) and self.live is not None:
                self._cut(self.intake.estimator, context)
            self.has_formula = True
        except FlopcalcError as error:
            if self.given is not None or not hasattr(self.live, "named_parameters"):
                self._explain(str(error))
                return
            self._count_calls(str(error))
        assert self.intake is not None
        self._base = state
        self._states = {key: intake for key, intake in self._states.items() if not _is_off(key)}
        self._states[state] = self.intake
        self.classify = self.intake.classify
        self.take = self.intake.take if stages == 1 else self._take_stage
        if not self.has_formula:
            self.take = self._take_measured
        if self._is_first:
            self._meter.convention = self.intake.estimator.convention if self.has_formula else "full"

    def _cut(self, whole: CountedEstimator, context: int) -> None:
        """Each stage of a pipeline counts its own layers, and the first one the tokens."""
        part = cut_to_stage(whole, self.live)
        self._is_part = part is not None
        if part is not None:
            self._meter.has_stages = False
            self.intake = self._make_intake(part[0], context)
            self.intake.counts_tokens = part[1]

    def _count_calls(self, reason: str) -> None:
        """No spec describes it: its calls are counted on a copy, from the first one on."""
        if not isinstance(self.intake, MeasuredIntake):
            name = self._settings.dtype or self._name_plain()
            self.intake = MeasuredIntake(
                MeasuredModule(self.live, lambda: self._settings.dtype or self._name_plain(), self._say)
            )
            self._say(
                f"{type(unwrap(self.live)).__name__} is counted by tracing its calls, under convention full, in "
                f"{name}: {reason}",
                f"traced {type(unwrap(self.live)).__name__}",
            )

    def _take_measured(self, batch: Mapping[str, object], fetcher: Fetcher | None, holder: object) -> Snapshot:
        """A new size is counted now, and that time is no step's."""
        assert isinstance(self.intake, MeasuredIntake)
        before = self.clock()
        many = self.intake.module.count_known()
        found = self.intake.take(batch, fetcher, holder)
        if self.intake.module.count_known() != many:
            lose = self.lose()
            if lose is not None:
                lose("measure", before)
        return found

    def _find_peaks(self) -> None:
        """What MFU is a share of: one peak for each format, found when FLOPs of it come."""
        settings, say = self._settings, self._say
        if self.seen is not None or self.live is None:
            self._meter.peaks = Peaks(lambda name: find_peak(settings, name, say))
            if settings.dtype is not None or self.live is not None:
                self._meter.peak = self._meter.peaks.find(settings.dtype or self._name_plain())

    def _name_plain(self) -> str:
        """What products that nothing else is known of are computed in."""
        return guess_format(self.live, self.seen)

    def _make_intake(self, model: object, context: int, is_plain: bool = False) -> Intake:
        cast = self.seen.autocast if self.seen is not None else None
        device = find_known_device(self._settings) if self.seen is not None else None
        routing = self._settings.routing if self._is_first else None
        estimator = bind_live(model, device, self._settings.dtype, cast, is_plain, routing)
        fp32 = "tf32" if self.seen is not None and self.seen.has_tf32 else "fp32"
        return Intake(estimator, context, fp32)

    def find_state(self) -> Hashable:
        """Which of its adapters are on: asked before every pass that does not train."""
        adapted = self._adapted
        return None if adapted is None else (bool(adapted.disable_adapters), tuple(adapted.active_adapters))

    def name_pass(self, is_training: bool, state: Hashable) -> str:
        """What a pass without gradients is for."""
        if self.is_frozen or not (self._is_first or is_training):
            return "score" if self.is_scorer else "reference"
        if _is_off(state) or (self.is_bound and state != self._base):
            return "reference"
        return "score" if is_training else "eval"

    def find_intake(self, state: Hashable) -> Intake | None:
        """How a pass in a state is counted; bound when it is first met, because only then the live model shows it."""
        if state not in self._states:
            try:
                self._states[state] = self._make_intake(self.live, 1, is_plain=_is_off(state))
            except FlopcalcError as error:
                self._states[state] = None
                self._explain_pass(str(error))
        return self._states[state]

    def _explain_pass(self, reason: str) -> None:
        name = type(unwrap(self.live)).__name__
        self._say(f"passes of {name} cannot be counted: {reason}", f"no count of {name}")

    def _explain(self, reason: str) -> None:
        if not self._is_first:
            self._explain_pass(reason)
        elif self._settings.mode == "estimate" or self.live is None:
            self._say(f"FLOPs cannot be counted, so MFU is not known: {reason}", "no count")
        else:
            self._say(f"MFU is known only of steps as large as one that was measured: {reason}", "no count")

    def open_source(self, rank: int) -> None:
        """One rank measures; the sums of all are scaled by its factor."""
        settings = self._settings if rank == 0 else replace(self._settings, mode="estimate")
        if self.source is None:
            self.source = make_source(settings, self.live, self._say)

    def see_inside(self, module: object) -> None:
        """Asked in a training pass of a layer of the model."""
        if self.seen is None:
            self.seen = look_inside(module)
            self.bind()

    def settle_peak(self) -> None:
        """The first step is over: if nothing was seen inside the model by now, only its weights are used."""
        if self.live is None:
            own = self.intake.estimator.formats.attention if self.intake is not None and self.has_formula else "bf16"
            self._meter.peak = self._meter.peaks.find(self._settings.dtype or own)
        elif self.seen is None:
            has_hidden = any(str(each.dtype) == "torch.float32" for each in self.live.parameters())
            if has_hidden and self._settings.peak_flops_per_s is None:
                self._say(
                    "MFU is not known: what products are computed in cannot be seen from outside (a compiled model, or "
                    "one without linear layers); name it by monitoring.dtype",
                    "dtype",
                )
                return
            self.seen = Seen(None)
            self._find_peaks()

    def _take_stage(self, batch: Mapping[str, object], fetcher: Fetcher | None, holder: object) -> Snapshot | None:
        """Later stages of a pipeline are given activations; where a stage's part is not known, the first counts all."""
        if self.intake is None:
            return None
        if len(getattr(batch.get("input_ids"), "shape", ())) != 2:
            sizes = {name: getattr(each, "shape", ()) for name, each in batch.items()}
            shapes = {name: size for name, size in sizes.items() if len(size) == 3}
            if not (self._is_part and shapes):
                return None
            name = next(iter(shapes))
            batch = {**batch, name: None, "inputs_embeds": TensorShape(shapes[name])}
        return self.intake.take(batch, fetcher, holder)

    def keep_absolute(self, sizes: Hashable) -> None:
        """Without a formula, what was measured holds for steps of the same sizes, and for no others."""
        found = self.source.absolute(()) if self.source is not None and not self.has_formula else None
        # A measurement that failed leaves the one before.
        if found is not None and sizes and (not self._absolute or found != next(reversed(self._absolute.values()))):
            self._absolute[sizes] = found

    def find_absolute(self, sizes: Hashable) -> Mapping[str, float] | None:
        found = self._absolute.get(sizes)
        return None if found is None else {self._settings.dtype or self._name_plain(): found}

    def close(self) -> None:
        if self.source is not None:
            self.source.close()


def _is_off(state: Hashable) -> bool:
    return isinstance(state, tuple) and bool(state[0])


def _take_sizes(batch: Mapping[str, object], _fetcher: Fetcher | None, _holder: object) -> Snapshot:
    """Of a model without a formula."""
    return Snapshot(tuple((name, each.shape) for name, each in batch.items() if hasattr(each, "shape")), {})


def _name_arguments(model: object) -> tuple[str, ...]:
    """The names of the positional arguments of a model's forward."""
    try:
        found = inspect.signature(strip(model).forward).parameters.values()
    except (TypeError, ValueError):
        return ("input_ids",)
    return tuple(each.name for each in found if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD))
