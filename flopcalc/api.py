"""The public functions that join the rooms: a model and its work in; an estimator, an estimate or a prediction out.

All of them take the same keywords, `SetupKeywords` in flopcalc/setup/fields.py; `flopcalc schema` prints them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from flopcalc.base.data import describe_install
from flopcalc.base.errors import FlopcalcError, WorkloadError
from flopcalc.base.spelling import KEYWORDS, spell
from flopcalc.base.units import check_items
from flopcalc.base.vocabulary import PHASES, Convention, check_word
from flopcalc.core.estimate.estimate import Estimate, Estimator
from flopcalc.core.workload.workload import Workload
from flopcalc.setup.counting import SetupEstimate, bind_setup, count_setup, find_shares, require_device
from flopcalc.setup.fields import GROUPS, Command, SetupKeywords, list_fields
from flopcalc.setup.setup import BESIDE, Setup, from_keywords

if TYPE_CHECKING:
    from typing import Unpack

    from flopcalc.core.estimate.translation import Translation
    from flopcalc.planning.plan import Plan
    from flopcalc.prediction.step import Prediction
    from flopcalc.server.serve import ServingAnswer


def list_keywords(function: Any) -> None:
    """Add a function's keywords, by group, to its docstring: the table of fields knows them."""
    command: Command = "estimate" if function is estimate_flops else function.__name__
    groups: dict[str, list[str]] = {}
    for name, field in list_fields(command).items():
        if name not in BESIDE or command != "estimate":
            keyword = KEYWORDS.get(name, name)
            groups.setdefault(GROUPS[field.group], []).append(f"`{keyword}`" if keyword.endswith("_") else keyword)
    listed = "\n".join(f"    - {group}: {', '.join(names)}" for group, names in groups.items())
    function.__doc__ = f"{function.__doc__}\n    Keywords (`flopcalc schema` describes each):\n\n{listed}\n    "


def bind(
    model: Any,
    example_batch: Mapping[str, Any] | None = None,
    *,
    phases: Iterable[str] = ("train", "forward"),
    dims: Mapping[str, Any] | None = None,
    max_length: int | None = None,
    **setup: Unpack[SetupKeywords],
) -> Estimator:
    """Bind a model once, for a loop: the result is a callable with the workload arguments of estimate_flops.

        estimator = bind("llama-3.1-8b", lora="r=16,targets=q_proj+v_proj")
        estimator(lengths=[512, 1024, 512]).total

    Keywords say how the config is read, what trains, number formats, the convention and the device. With
    `example_batch` (keyword arguments of its forward) any torch.nn.Module is traced instead of read from a spec: for
    `phases`, under convention full. If it is not clear which axes are batch and length, `dims` names them ('b', 'n').
    If another axis (a second length, height, width) changes, the module is traced again. Lengths beyond `max_length`
    are neither traced nor counted.
    """
    asked = tuple(check_word(phase, PHASES, "phase", WorkloadError) for phase in check_items(phases, "phases"))
    chosen = from_keywords("bind", model, setup)
    if example_batch is None:
        if dims is not None:
            raise WorkloadError("dims says which axes of an example_batch are batch and length: give that too")
        if max_length is not None:
            raise WorkloadError("max_length bounds what is traced of an example_batch: give that too")
        return bind_setup(chosen)
    beside = [name for name in chosen.values if name not in ("compute", "dtype", "convention", "device")]
    if beside or chosen.get("convention", "full") != "full":
        raise FlopcalcError(
            "a module that is traced says itself what trains and which head it has, under convention full, in one "
            f"number format: leave {', '.join(beside or ['convention'])} out with example_batch"
        )
    from flopcalc.measure.trace.polynomials import trace_module  # torch: only where a module is traced

    compute = chosen.formats.compute
    return trace_module(model, example_batch, phases=asked, dims=dims, compute=compute, max_length=max_length)


def estimate_flops(model: Any = None, workload: Workload | None = None, **setup: Unpack[SetupKeywords]) -> Estimate:
    """Exact FLOPs of one step. `model` is a preset's name, a path, a mapping, an HF config or an HF model.

        estimate_flops("qwen2-vl", batch_size=2, seq_len="4k", images=[(1024, 768)] * 2, freeze="vision").total

    `workload` is one micro-batch, as a Workload, or `batch` a real one; else keywords say its sizes. `batch_size` is
    that of one GPU; with `gpus`, FLOPs are those of all GPUs. `images`, `videos` and `audio` are those of the whole
    batch. A step has `grad_accum` micro-batches, or as many as `global_batch` needs. `launch` is a launch file of a
    training framework, or a list of them; your own keywords win over it.
    """
    chosen = from_keywords("estimate", model, setup, workload)
    for name in BESIDE:
        if name in chosen.values:
            raise WorkloadError(
                f"estimate_flops takes no {spell(name)}: mfu() and hfu() take the time of a step, `flopcalc estimate` "
                "the tokens of a run"
            )
    counted = count(chosen)
    _, _, notes = find_shares(counted, chosen, "mfu(estimate, step_time_s)")  # there is no time: the least time alone
    return counted.estimate.add_notes(counted.notes, notes)


def count(setup: Setup, convention: Convention | None = None) -> SetupEstimate:
    """The Estimate of a Setup; HF's code is traced where it asks for that."""
    return count_setup(setup, _trace, convention)


def _trace(*arguments: Any) -> Any:
    try:
        from flopcalc.measure.trace.polynomials import trace_config  # torch: only where nothing is kept
    except ImportError as error:
        raise FlopcalcError(f"a trace needs {error.name}: {describe_install('measure')}") from None
    return trace_config(*arguments)


def translate(model: Any, **setup: Unpack[SetupKeywords]) -> Translation:
    """Convert a quoted performance into every convention. `model` is an Estimate, or what makes one.

        translate("llama-3.1-8b", seq_len=4096, mfu="45%", from_="6nd", device="h100-sxm")

    Give an MFU or TFLOP/s per GPU with `from_`, the convention they were quoted in. Or give tokens per second of all
    GPUs. With both and without `from_`, the rows are ordered by how well each convention fits.
    """
    if isinstance(model, Estimate):
        sizes = [name for name in setup if name not in _QUOTED]
        if sizes:
            raise WorkloadError(f"an Estimate already says the work: give no {', '.join(sizes)} with it")
        return translate_counted(SetupEstimate(model, []), from_keywords("translate", model, setup))
    chosen = from_keywords("translate", model, setup)
    return translate_counted(count(chosen), chosen)


_QUOTED = ("from_", "mfu", "tflops", "tokens_per_second", "gpus", "device", "dtype", "peak", "mtp")


def translate_counted(counted: SetupEstimate, setup: Setup) -> Translation:
    """As `translate`, of what was counted."""
    from flopcalc.core.estimate.translation import translate_estimate  # imported lazily: few calls need it

    place, compute = setup.place, setup.formats.compute
    found = translate_estimate(
        counted.estimate,
        from_=setup.get("from"),
        mfu=setup.get("mfu"),
        tflops=setup.get("tflops"),
        tokens_per_second=place.tokens_per_second,
        gpus=place.gpus,
        device=place.device,
        dtype="bf16" if compute is None else compute,
        peak=place.peak,
        mtp=setup.get("mtp"),
    )
    return found._replace(notes=(*found.notes, *counted.notes))


def predict(model: Any = None, workload: Workload | None = None, **setup: Unpack[SetupKeywords]) -> Prediction:
    """Time, utilization and memory of one step of a model on a device.

        predict("llama-3.1-8b", batch_size=4, seq_len=2048, device="h200").step_time_s

    Workload and recipe are those of estimate_flops. `execution` is eager (HF's own code, the default), compiled, graphs
    or fused. With several `gpus`, each runs such a step: tokens per second are of all of them, and communication is not
    timed (`plan` does). `host_factor`, `pause_s`, `transformers`, `timeline`: see predict_estimate.
    """
    chosen = from_keywords("predict", model, setup, workload)
    return predict_counted(count(chosen, "hardware"), chosen)


def predict_counted(counted: SetupEstimate, setup: Setup) -> Prediction:
    """As `predict`, of what was counted under convention hardware."""
    from flopcalc.hardware.devices import find_device
    from flopcalc.hardware.prices import find_price
    from flopcalc.prediction.execution_options import USUAL
    from flopcalc.prediction.step import predict_estimate
    from flopcalc.prediction.watts import check_site

    found = predict_estimate(
        counted.estimate,
        **list_step_options(setup, counted.estimate),
        memory=setup.get("memory", True),
        host_factor=setup.get("host_factor", 1.0),
        pause_s=setup.get("pause_s", 0.0),
        advise=setup.get("advise", True),
        transformers=setup.get("transformers"),
        timeline=setup.get("timeline", False),
        clip_gradients=setup.get("clip_gradients", False),
        hf_trainer=setup.get("hf_trainer", False),
    )
    gpus, notes = setup.place.count, list(dict.fromkeys([*found.notes, *counted.notes]))
    phase, optimizer = counted.estimate.terms[0].load.phase, setup.get("optimizer", "none")
    if phase != "train" and optimizer != "none":
        notes.append(f"phase {phase} has no optimizer's step, so {spell('optimizer', optimizer)} changes nothing")
    if gpus > 1:
        how = "`flopcalc plan` adds it" if phase == "train" else f"`flopcalc serving` with {spell('tp', gpus)} adds it"
        notes.append(f"each of {gpus:,} GPUs runs this step; time between GPUs is not included: {how}")
        notes += [USUAL] if phase == "train" and {"execution", "optimizer"} - set(setup.values) else []
    check_site(found.power, setup.get("pue"), setup.get("grid"))
    given, is_priced = setup.get("price"), counted.estimate.terms[0].estimator.is_diffusion
    price = find_price(find_device(found.device), given) if given is not None or is_priced else None
    return found._replace(
        notes=tuple(notes), gpus=gpus, global_batch=found.global_batch * gpus,
        floors=found.floors and found.floors._replace(tokens_per_s=(most := found.floors.tokens_per_s) and most * gpus),
        tokens_per_s=None if found.tokens_per_s is None else found.tokens_per_s * gpus,
        pue=setup.get("pue"), grid_g_per_kwh=setup.get("grid"), price=price,
    )  # fmt: skip


def list_step_options(setup: Setup, estimate: Estimate) -> dict[str, Any]:
    """How a step runs, as predict_estimate and find_largest_batch take it."""
    from flopcalc.prediction.execution_options import choose_execution, choose_usual

    (estimator, load, _), *_ = estimate.terms
    usual, optimizer = choose_usual(setup.place.count, estimator, load.phase, setup.get("hf_trainer", False))
    return {
        "device": require_device(setup),
        "dtype": setup.formats.compute,
        "optimizer": setup.get("optimizer", optimizer),
        "attention_kernel": setup.attention_kernel,
        "execution": choose_execution(
            setup.get("execution", None if setup.get("compile") else usual), setup.get("compile", False)
        ),
    }


def plan(model: Any = None, workload: Workload | None = None, **setup: Unpack[SetupKeywords]) -> Plan:
    """The best layouts of a training run on many devices: what fits, its time and cost, and why others lose.

        plan("llama-3.1-8b", tokens="2T", device="h200", gpus=64, seq_len=8192)

    `model` is anything that `bind` takes, or an Estimator. `global_batch` is in sequences, in tokens ("4M tokens"), or
    "auto": searched. A degree (tp, pp, cp, ep, dp, zero, micro_batch, recompute) is a number, a list of numbers to try,
    or left out for all that are worth a try. `images` are one sample's. `workload` is one sample instead, or the global
    batch of several like one another. `progress` is called with the number of layouts that were looked at, and of all.
    """
    from flopcalc.planning.plan import plan_setup

    return plan_setup(from_keywords("plan", model, setup, workload))


def serving(model: Any = None, **setup: Unpack[SetupKeywords]) -> ServingAnswer:
    """A model behind a serving engine under a load: what fits, time to first token, tokens per second, cost.

        serving("llama-3.1-8b", device="h100", tp=1, input_len=1024, output_len=256, concurrency=32).to_dict()

    `engine` is vllm (the default), sglang or trtllm, as in "vllm@0.15.1". The load is a `concurrency`, a `rate` in
    requests per second, or a file of `requests`.
    """
    from flopcalc.server.serve import serve_setup

    return serve_setup(from_keywords("serving", model, setup))
