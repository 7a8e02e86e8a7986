"""A question about a server in, the answer out: what fits, how long requests wait, tokens per second, money."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from flopcalc.base.errors import FlopcalcError, WorkloadError
from flopcalc.base.presentation import find_presenter
from flopcalc.base.rows import shorten
from flopcalc.base.spelling import spell
from flopcalc.base.units import format_bytes, format_seconds, parse_size
from flopcalc.base.vocabulary import name_part
from flopcalc.core.estimate.notes import describe_inferred
from flopcalc.hardware.devices import Device, find_device
from flopcalc.hardware.prices import find_price
from flopcalc.planning.network import find_interconnect
from flopcalc.server.engines import Engine, find_engine, read_flags
from flopcalc.server.fitted import Weights, find_weights
from flopcalc.server.kv import Room, find_longest, find_room
from flopcalc.server.launch import write_command
from flopcalc.server.power import MeanStep, find_server_watts
from flopcalc.server.schedule import Request, Run, simulate
from flopcalc.server.served import ServedModel, read_media, read_model
from flopcalc.server.step import CLASSES, Deployment, Rates, StepCosts, StepModel, find_peak, load_fitted
from flopcalc.server.traffic import Traffic, make_requests, read_share, read_traffic
from flopcalc.setup.counting import bind_setup, require_device
from flopcalc.setup.setup import Setup

_MOST_SLOTS = 2048  # that are simulated of a closed loop: others only wait
_SIZES = (1, 2, 4, 8, 16, 32, 64)  # GPUs of the layouts that are looked at for the smallest that fits
_SHOWN = ("p50", "p90", "p95", "p99")
_SLOW_S = 1e-4  # a layer's experts for one token; other kernels take 1e-5 to 4e-5 (model_specs/serving_kernels.json)
_BUSY = 0.95  # share of the time that a queue for prompts is taken to be busy at most
_LEAST_LOAD, _MOST_LOAD = 1e-3, 1 << 14  # requests in flight, or per second, that objectives are looked for
HOST = ("step", "kernels", "casts", "eager", "sequences", "prompts", "arrivals", "floors", "expert_floors")
# What a reader calls a class of work.
_NAMES = {"dense": "weights", "math": "products", "experts": "experts", "kv": "KV cache", "sums": "collectives",
          "attention": "prompt attention", "tokens": "norms and casts", "media": "towers"}  # fmt: skip


Weighted = list[tuple[float, float]]


class Estimated(NamedTuple):
    """A value and its 90 % interval; without a high end it grows without bound."""

    low: float
    mid: float
    high: float | None


class ServingAnswer(NamedTuple):
    """What a deployment does under a load; without times where it does not fit."""

    model: str
    engine: Engine
    device: Device
    layout: Deployment
    traffic: Traffic
    room: Room
    fits: bool
    longest: int
    smallest: Deployment | None
    evidence: str
    times: dict[str, Estimated]  # ttft_s, tpot_s, e2e_s, tokens_per_s, tokens_per_s_per_gpu, power_w
    percentiles: dict[str, dict[str, float]]
    shares: dict[str, float]  # where the time of all steps goes
    usd: dict[str, float] | None
    price: str
    notes: tuple[str, ...]
    command: str = ""
    use: Mapping[str, float] = MappingProxyType({})  # mfu, bandwidth
    objectives: dict[str, Any] | None = None
    advice: str = ""
    wh: dict[str, float] | None = None

    @property
    def gpus(self) -> int:
        return self.layout.gpus * (sum(self.traffic.workers) or 1)

    def __repr__(self) -> str:
        rate = f"{self.times['tokens_per_s'].mid:,.0f} tokens/s" if self.times else "no times"
        fit = "" if self.fits else "; does not fit"
        return (
            f"ServingAnswer({shorten(self.model)} on {self.gpus} {self.device.name}, {self.engine.name}: {rate}{fit})"
        )

    def _repr_html_(self) -> str:
        return find_presenter().show_answer(self)

    def to_dict(self) -> dict[str, Any]:
        names = ("ttft_s", "tpot_s", "e2e_s", "tokens_per_s", "tokens_per_s_per_gpu", "power_w")
        return {
            "schema": 1, "model": self.model, "engine": self.engine.id, "engine_version": self.engine.version or None,
            "device": self.device.id, "gpus": self.gpus, "layout": self.layout._asdict(), "fits": self.fits,
            "evidence": self.evidence,
            **{name: self.times[name]._asdict() if name in self.times else None for name in names},
            "percentiles": self.percentiles or None,
            "kv_cache": {"bytes_per_token": round(self.room.bytes_per_token), "tokens": self.room.tokens,
                         "blocks": self.room.blocks, "block_size": self.room.block_size,
                         "max_concurrency": self.room.max_concurrency,
                         "by_kind": {kind: round(size) for kind, size in self.room.by_kind.items()}},
            "memory": {"total_bytes": round(self.room.total), "weights_bytes": round(self.room.weights),
                       "reserved_bytes": round(self.room.activations), "cache_bytes": max(0, round(self.room.cache))},
            "longest_context": self.longest,
            "smallest_layout": self.smallest._asdict() if self.smallest is not None else None,
            "limits": {"max_batched_tokens": self.engine.max_batched_tokens, "max_seqs": self.engine.max_seqs,
                       "memory_fraction": self.engine.memory_fraction},
            "time_shares": self.shares or None, "mfu": self.use.get("mfu"),
            "bandwidth_utilization": self.use.get("bandwidth"), "concurrency": self.traffic.concurrency,
            "objectives": self.objectives, "advice": self.advice or None, "command": self.command or None,
            "usd": self.usd, "wh": self.wh, "price_source": self.price or None, "notes": list(self.notes),
        }  # fmt: skip


def serve_setup(setup: Setup) -> ServingAnswer:
    """The answer to a Setup of `serving`."""
    device = find_device(require_device(setup))
    notes = [*setup.notes, *([device.note] if device.note else [])]
    name = str(setup.get("engine", "vllm"))
    engine = find_engine(name, device)
    flags, unread = read_flags(engine, setup.get("engine_args", ""))
    notes += unread
    formats, estimator = setup.formats, bind_setup(setup, "model", notes)
    source, online = estimator.source, {word: kind for kind, word in engine.online.items()}
    notes += [source.note] if source.note else []
    notes += describe_inferred(estimator)
    if formats.weights is None and source.stored:  # an engine loads what is published
        notes.append(f"weights in {source.stored}, as published; {spell('weights', 'bf16')} serves another checkpoint")
    weights = str(formats.weights or source.stored or online.get(flags.get("quantization", ""), "")).lower()
    formats = formats.replace(weights=weights or None)
    asked = flags.get("kv_cache", engine.cache_of.get(weights, "auto"))
    if formats.kv_cache is None and asked != "auto":
        formats = formats.replace(kv_cache="fp8" if asked.startswith("fp8") else asked)
    model = read_model(estimator if formats == setup.formats else bind_setup(setup.replace(formats=formats), "model"))
    traffic = read_traffic(setup, model, source)
    prompts, _, _ = make_requests(traffic._replace(concurrency=1), Deployment())
    computed = sum(each.input - each.cached for each in prompts) / len(prompts)
    shortest = min((each.input for each in traffic.requests), default=traffic.input.low)
    media = read_media(estimator, setup.work.inputs, shortest, computed, notes)
    if not media.kernels and {"vision", "audio"} & {stage.group for stage in estimator.stages}:
        notes.append("prompts are text alone: give images, videos or sound, and their towers are timed too")
    layout = _choose_layout(setup, flags, model, device, engine, traffic, notes)
    engine = _set_limits(
        find_engine(name, device, layout.tp * layout.pp, traffic.benchmark, layout.dp), setup, flags, layout.dp
    )
    room = find_room(model, layout, device, engine, traffic.tokens)
    longest, smallest = find_longest(model, layout, room), _find_smallest(model, device, engine, traffic.tokens)
    most = _find_most_tokens(flags, traffic, 0 if longest == model.longest else longest)
    longest = min(longest, most or longest) if "max_model_len" in flags else longest
    answer = ServingAnswer(
        model.name, engine, device, layout, traffic, room, room.fits, longest, smallest, "", {}, {}, {}, None, "", ()
    )
    if not room.fits:
        notes.append(_explain_fit(answer))
        return answer._replace(notes=tuple(notes), evidence="memory alone")
    quantization = _find_quantization(engine, weights, source.stored, notes) or flags.get("quantization")
    command = write_command(
        source.hub_id or source.name, engine, layout, model.cache_bytes < 2, quantization, most,
        has_experts=model.experts > 1, drafts=_explain_start(answer, model, notes), rest=flags.get("rest", ""),
    )  # fmt: skip
    fitted = find_weights(model.name, engine.id, engine.version, device.id, model.experts > 1, media.kernels > 0)
    rates = Rates(device, layout.gpus, engine.id)
    if weights == "fp8" and model.experts > 1 and rates.experts.get("fp8", (0, 0, 0))[2] > _SLOW_S:
        notes.append(
            "experts in fp8 with one scale a tensor are timed with the kernels of ModelOpt's releases, measured to be "
            f"slow on this kind of GPU; most releases have a scale a block: {spell('weights', 'fp8-block')}"
        )
    step = StepModel(model, layout, rates, media)
    return _time(answer._replace(command=command, evidence=fitted.evidence), setup, step, fitted, notes)


def _set_limits(engine: Engine, setup: Setup, flags: dict[str, str], dp: int) -> Engine:
    """The engine with the limits that flags or fields say; fields win."""
    changes: dict[str, Any] = {}
    for name in ("max_batched_tokens", "max_seqs", "block_size", "interval", "graph_tokens"):
        if name in flags:
            ranks = dp if "attention_dp" in flags and name in engine.totals else 1
            changes[name] = max(1, parse_size(flags[name], name) // ranks)
        if setup.get(name) is not None:
            changes[name] = setup.get(name)
    changes |= {name: True for name in ("mixes", "chunks") if name in flags}
    share = setup.get("memory_fraction", flags.get("memory_fraction"))
    if share is not None:
        changes["memory_fraction"] = read_share(share, "memory_fraction")
    return engine.set_limits(changes)


def _explain_start(answer: ServingAnswer, model: ServedModel, notes: list[str]) -> int:
    """Drafts that the start line asks of the model's own layers, with notes on what a line cannot say."""
    engine, layout, speculation = answer.engine, answer.layout, answer.traffic.speculation
    ranks, is_own = layout.tp * layout.dp, speculation is not None and speculation.is_own
    unsaid = {
        f"{engine.name} spreads experts over all {ranks} ranks of tp · dp, or over none":
            "ep" in engine.switches and 1 < layout.ep < ranks,
        f"the start line is of one copy: start {layout.dp} of them behind a router":
            layout.dp > 1 and model.experts == 1 and "dp" not in engine.flags.values(),
        "the start line is of one worker: add its role, and what sends the keys": any(answer.traffic.workers),
        "the start line names no draft model: add yours, with as many drafts of a step":
            speculation is not None and not is_own,
    }  # fmt: skip
    notes += [note for note, holds in unsaid.items() if holds]
    return speculation.drafts if speculation is not None and is_own else 0


def _find_quantization(engine: Engine, weights: str, stored: str, notes: list[str]) -> str | None:
    """The engine's word for weights that it brings to a format as it loads them; a note where it needs them so."""
    if weights in ("", stored):
        return None
    if weights not in engine.online and not (weights == "bf16" and not stored):
        notes.append(f"start it with a checkpoint in {weights}: {engine.name} makes none as it loads the model")
    return engine.online.get(weights)


def _find_most_tokens(flags: Mapping[str, str], traffic: Traffic, longest: int) -> int | None:
    """What the engine's limit of a request must be: the one asked for; else none, unless the cache holds fewer."""
    if flags.get("max_model_len", "auto") in ("auto", "-1"):
        return min(longest, -(-traffic.tokens // 1024) * 1024) or None
    most = parse_size(flags["max_model_len"], "engine_args")
    if most < traffic.tokens:
        raise WorkloadError(
            f"a request has {traffic.tokens:,} tokens: the engine refuses it, as {spell('engine_args')} allow {most:,}"
        )
    return most


def _choose_layout(
    setup: Setup, flags: dict[str, str], model: ServedModel, device: Device, engine: Engine, traffic: Traffic,
    notes: list[str],
) -> Deployment:  # fmt: skip
    """The layout that was asked for; without one, the smallest that fits."""
    given: dict[str, int] = {}
    for name in ("tp", "dp", "pp", "ep"):
        value = setup.get(name, (parse_size(flags[name], name),) if name in flags else None)
        if value is not None:
            given[name] = value[0]
    gpus = setup.place.gpus
    if not given and gpus is None:
        layout = _find_smallest(model, device, engine, traffic.tokens) or Deployment()
        notes.append(f"no layout is given: {layout.gpus} GPU{'s' * (layout.gpus > 1)}, the fewest that hold the model")
        return layout
    if gpus is not None and "tp" not in given:
        others = given.get("dp", 1) * given.get("pp", 1)
        if gpus % others:
            raise WorkloadError(f"{spell('gpus', gpus)} is no multiple of dp · pp = {others}")
        given["tp"] = gpus // others
    if "attention_dp" in flags and "dp" not in engine.flags.values():  # of all ranks
        given.setdefault("dp", given.get("tp", 1))
    ranks = given.get("tp", 1) * given.get("dp", 1)
    if "attention_dp" in flags and given.get("tp", 1) % given.get("dp", 1) == 0:  # its tp counts these ranks too
        ranks, given["tp"] = given.get("tp", 1), given.get("tp", 1) // given.get("dp", 1)
    if "expert_parallel" in flags and model.experts > 1:
        given.setdefault("ep", ranks)
    layout = Deployment(**given)
    if gpus is not None and gpus != layout.gpus:
        way = f"give {spell('tp', gpus)} or {spell('dp', gpus)} alone"
        raise WorkloadError(f"{spell('gpus', gpus)} is not tp · dp · pp = {layout.gpus}: {way}")
    check_layout(layout, model)
    return layout


def check_layout(layout: Deployment, model: ServedModel) -> None:
    """An error where a layout does not divide what it cuts."""
    heads = [(each.heads, "heads") for each in model.cached]
    heads += [(each.kv_heads, "key heads") for each in model.cached if layout.tp % max(1, each.kv_heads)]  # no copies
    for many, what in heads:
        if many > 1 and many % layout.tp:
            raise WorkloadError(f"{spell('tp', layout.tp)} does not divide the {many} {what} of {model.name}")
    if layout.pp > model.layers:
        raise WorkloadError(f"{spell('pp', layout.pp)} is more than the {model.layers} layers of {model.name}")
    if layout.ep > 1:
        if model.experts == 1:
            raise WorkloadError(f"{spell('ep', layout.ep)}: {model.name} has no experts")
        if (layout.tp * layout.dp) % layout.ep:
            raise WorkloadError(f"{spell('ep', layout.ep)} does not divide tp · dp = {layout.tp * layout.dp}")
        if model.experts % layout.ep:
            raise WorkloadError(f"{spell('ep', layout.ep)} does not divide the {model.experts} experts of {model.name}")


def _find_smallest(model: ServedModel, device: Device, engine: Engine, tokens: int) -> Deployment | None:
    """The fewest GPUs that hold the weights and one request: tensor parallel in a node, stages beyond."""
    for gpus in _SIZES:
        layout = Deployment(tp=min(gpus, 8), pp=-(-gpus // 8))
        try:
            check_layout(layout, model)
        except FlopcalcError:
            continue
        if find_room(model, layout, device, engine, tokens).fits:
            return layout
    return None


def _explain_fit(answer: ServingAnswer) -> str:
    room, small = answer.room, answer.smallest
    have = f"{format_bytes(round(room.weights))} of weights on each of {answer.layout.gpus} GPUs"
    if room.cache > 0:
        have += f" leave {format_bytes(round(room.cache))} for the cache"
        have += f", a request takes {format_bytes(round(room.request))}"
    where = (
        f"the smallest layout that fits: tp {small.tp}, pp {small.pp}"
        if small
        else f"no layout up to {_SIZES[-1]} GPUs fits"
    )
    return f"does not fit on {answer.device.name}: {have}; {where}"


# --- times ------------------------------------------------------------------------------------------------------------
class Load(NamedTuple):
    """What a simulation of one load says."""

    traffic: Traffic
    requests: list[Request]
    shares: list[float]
    run: Run
    kept: dict[str, Weighted]
    is_full: bool

    def mean(self, name: str) -> float:
        return _mean(self.kept[name])


def _run_load(answer: ServingAnswer, costs: StepCosts, traffic: Traffic) -> Load:
    speculation = traffic.speculation
    policy = answer.engine.make_policy(answer.room.cache / answer.room.request * traffic.tokens)
    policy = policy._replace(per_step=speculation.tokens if speculation is not None else 1.0)
    # Of very many requests in flight most wait in line: all those beyond what runs wait longer by their share.
    replicas = answer.layout.replicas
    most = replicas * max(_MOST_SLOTS, 2 * min(answer.engine.max_seqs, answer.room.max_concurrency))
    asked = traffic.concurrency or 0
    requests, slots, shares = make_requests(traffic._replace(concurrency=min(asked, most)), answer.layout)
    run = simulate(costs, policy, requests, slots)
    is_full = (traffic.rate is not None or bool(traffic.requests)) and _is_saturated(run, requests)
    kept = _keep(run, requests, shares)
    if asked > most:
        line = (asked / most - 1) * _mean(kept["e2e_s"])
        kept |= {name: [(value + line, share) for value, share in kept[name]] for name in ("ttft_s", "e2e_s")}
    return Load(traffic, requests, shares, run, kept, is_full)


def _settle_users(run: Callable[[Traffic], Load], traffic: Traffic) -> Load:
    """Users who think between requests: those in flight are the users times the share of time that they wait."""
    low, high, tried = 1, traffic.users, 1
    while low < high:  # more in flight wait longer, so the share grows with what is tried: one point is its own answer
        waits = run(traffic._replace(concurrency=tried)).mean("e2e_s")
        found = int(traffic.users * waits / (waits + traffic.think_s))
        low, high = (min(found, high), high) if found >= tried else (low, max(found, low))
        tried = min((low + high + 1) // 2, 2 * low)
    return run(traffic._replace(concurrency=low))


def _split_workers(answer: ServingAnswer, costs: StepCosts, step: StepModel, traffic: Traffic) -> Load:
    """Separate workers: prompts queue for the first kind, their keys are sent, the second kind decodes alone."""
    prefill, decode = traffic.workers
    asked = traffic.concurrency or 1
    net = step.rates.net or find_interconnect(None, answer.device.id)
    link = net.across or net.inside[-1][1]

    def run_decodes(concurrency: float) -> Load:
        """A decode worker finds all of a prompt but its last token in the cache that was sent to it."""
        slots = max(1, -(-round(concurrency) // decode))
        return _run_load(answer, costs, traffic._replace(concurrency=slots, hit=traffic.input.high))

    own = run_decodes(asked)
    mean = sum(request.input for request in own.requests) / len(own.requests)
    cached = traffic.count_cached(round(mean))
    chunk = (round(mean - cached), cached)
    together = max(1, min(answer.engine.max_batched_tokens // chunk[0], asked // prefill))
    alone, sent = costs.run([chunk], 0, 0.0) + costs.find_shift(chunk[0]), mean * answer.room.bytes_per_token / link
    capacity = prefill * answer.layout.replicas * together / costs.run([chunk] * together, 0, 0.0)
    busy = asked / (alone + sent + own.mean("e2e_s") - own.mean("ttft_s")) / capacity
    if busy > 1:  # the others wait for a worker, so fewer decode
        own = run_decodes(min(asked, capacity * (own.mean("e2e_s") - own.mean("ttft_s"))))
    decoding = own.mean("e2e_s") - own.mean("ttft_s")
    # Past saturation all but those that are served wait; before it, a queue with regular service.
    busy = min(busy, _BUSY)
    wait = max(busy / (1 - busy) / (2 * capacity), asked / capacity - alone - sent - decoding)
    first = alone + wait + sent
    kept = {
        "ttft_s": [(first, share) for _, share in own.kept["ttft_s"]],
        "e2e_s": [(first + e2e - ttft, share) for (e2e, share), (ttft, _) in
                  zip(own.kept["e2e_s"], own.kept["ttft_s"], strict=True)],
        "tpot_s": own.kept["tpot_s"], "itl_s": own.kept["itl_s"],
    }  # fmt: skip
    return own._replace(traffic=traffic, kept=kept)


def _time(answer: ServingAnswer, setup: Setup, step: StepModel, weights: Weights, notes: list[str]) -> ServingAnswer:
    engine, layout, traffic, room = answer.engine, answer.layout, answer.traffic, answer.room
    drafts = traffic.speculation.drafts if traffic.speculation is not None else 0
    costs = StepCosts(step, weights.weigh, engine.max_batched_tokens + 2048 * (1 + drafts), drafts, engine.graph_tokens)

    def run(asked: Traffic) -> Load:
        return _split_workers(answer, costs, step, asked) if any(asked.workers) else _run_load(answer, costs, asked)

    load = _settle_users(run, traffic) if traffic.users else run(traffic)
    traffic = load.traffic
    if traffic.users:
        notes.append(f"{traffic.users:,} users who think for {traffic.think_s:g} s keep {traffic.concurrency:,} "
                     "requests in flight")  # fmt: skip
    requests, shares = load.requests, load.shares
    at_once = min(room.max_concurrency, engine.max_seqs) * layout.replicas * (traffic.workers[1] or 1)
    waits = (traffic.concurrency or 0) > at_once
    if waits:
        limit = "the cache" if room.max_concurrency < engine.max_seqs else spell("max_seqs", engine.max_seqs)
        notes.append(f"{limit} lets {at_once:,} request{'s' * (at_once > 1)} of this length run at once: others wait")
    if load.is_full:
        notes.append("the load is more than the server can take: waiting times grow without bound")
    means = {name: _mean(values) for name, values in load.kept.items() if values}
    outputs = _mean([(float(each.output), share) for each, share in zip(requests, shares, strict=True)])
    ends = {name: (low * means[name], high * means[name]) for name, (low, high) in weights.intervals.items()
            if name in means}  # fmt: skip
    tpot = means.get("tpot_s", 0.0)
    if traffic.concurrency is not None and traffic.benchmark != "inferencex":  # which streams tokens in groups
        most = load_fitted()["streamed_tokens_per_s"]
        line = outputs * (traffic.concurrency / most - tpot)
        if line > ends["ttft_s"][1]:
            if traffic.benchmark is not None:  # as the rows that showed it were measured
                ends["ttft_s"] = (ends["ttft_s"][0], line)
            notes.append(
                f"a host that streams {most:,} tokens/s, the fewest seen, lets first tokens wait "
                f"{format_seconds(line)}: the intervals are with{'' if traffic.benchmark else 'out'} it"
            )
    low, high = (first + (outputs - 1) * later for first, later in
                 zip(ends["ttft_s"], ends.get("tpot_s", (0.0, 0.0)), strict=True))  # fmt: skip
    ends["e2e_s"] = (min(low, means["e2e_s"]), max(high, means["e2e_s"]))
    times = {
        name: Estimated(low, means[name], None if load.is_full and name != "tpot_s" else high)
        for name, (low, high) in ends.items()
    }
    low, high = (end / means["e2e_s"] for end in ends["e2e_s"])
    inputs = _mean([(float(each.input), share) for each, share in zip(requests, shares, strict=True)])
    if traffic.concurrency is not None:
        rate = traffic.concurrency * outputs / means["e2e_s"]
        slow, fast = rate / high, rate / low
    else:  # a server that keeps up gives what is asked for
        rate = sum(each.output for each in requests) / load.run.clock * layout.replicas
        slow, fast = rate / high, rate / low if load.is_full else rate
        if traffic.rate is not None:
            fast = max(rate, min(fast, traffic.rate * outputs))
            keeps_up = not load.is_full and not run(traffic._replace(rate=traffic.rate * high)).is_full
            slow = rate if keeps_up else slow
    times["tokens_per_s"] = Estimated(slow, rate, fast)
    times["tokens_per_s_per_gpu"] = Estimated(*(value / answer.gpus for value in (slow, rate, fast)))
    mean = _find_mean(load.run, requests)
    prompt = inputs - traffic.count_cached(round(inputs))
    by_class = _split(step, mean, prompt, weights)
    by_class |= {"media": mean.prompt * costs.media} if costs.media else {}
    seconds = sum(by_class.values())
    mean = mean._replace(seconds=seconds, media=step.media.products)
    power = find_server_watts(step.model, layout, answer.device, mean)
    if power is not None:
        times["power_w"] = Estimated(*(watts * answer.gpus / layout.gpus for watts in power))
    price = find_price(answer.device, setup.get("price"))
    hour = answer.gpus * price.usd_per_gpu_hour if price is not None else 0.0
    usd = {"per_hour": hour, **_spread(hour / 3600, rate, inputs / outputs)} if price is not None else None
    wh = _spread(times["power_w"].mid / 3600, rate, inputs / outputs) if "power_w" in times else None
    if weights.evidence != "pairing":
        notes.append(_EVIDENCE["media" if costs.media else weights.evidence])
    if traffic.speculation is not None or any(traffic.workers):
        notes.append("speculation and separate workers were not compared with measurements: the interval is a guess")
    found = answer._replace(
        traffic=traffic, times=times, percentiles={name: _find_percentiles(values) for name, values in
                                                   load.kept.items() if values},
        shares=_name_shares(by_class), usd=usd, wh=wh, price=price.source if price is not None else "",
    )  # fmt: skip
    decodes = max(1.0, rate / (layout.replicas * (traffic.workers[1] or 1)) * means.get("tpot_s", means["e2e_s"]))
    flops = rate / outputs * (step.count_flops() * (prompt + outputs) + step.media.products * prompt)
    peak = find_peak(answer.device.id, max((each.compute for each in step.model.weights), default=""))
    return found._replace(
        use={"mfu": flops / (answer.gpus * peak),
             "bandwidth": step.count_bytes(decodes, decodes * (inputs + outputs / 2)) / seconds / step.rates.bandwidth},
        objectives=_judge(found, load, run, rate) if traffic.objectives else None,
        advice=_advise(found, step.model, waits or load.is_full), notes=tuple(dict.fromkeys(notes)),
    )  # fmt: skip


def _spread(per_second: float, rate: float, inputs: float) -> dict[str, float]:
    """What a second costs, over a million tokens: all of it over the output, over the input, or over both."""
    each = 1e6 * per_second / rate
    return {"per_million_output_tokens": each, "per_million_input_tokens": each / inputs,
            "per_million_tokens": each / (1 + inputs)}  # fmt: skip


def _find_judged(kept: dict[str, Weighted], name: str) -> dict[str, float]:
    """Percentiles that an objective is for: between tokens the larger one of all gaps and of the answers' own means."""
    found = _find_percentiles(kept[name])
    means = _find_percentiles(kept["tpot_s"]) if name == "itl_s" else found
    return {at: max(value, means[at]) for at, value in found.items()}


def _meets(load: Load, names: Sequence[str]) -> bool:
    limits = dict(load.traffic.objectives)
    found = {name: _find_judged(load.kept, name) for name in names if load.kept[name]}
    return not load.is_full and all(found[name][limits[name].at] <= limits[name].limit_s for name in found)


def _judge(answer: ServingAnswer, load: Load, run: Callable[[Traffic], Load], rate: float) -> dict[str, Any]:
    """Whether each objective is met, the load at which it breaks, goodput, and the GPUs that the load needs."""
    traffic, limits = load.traffic, dict(load.traffic.objectives)
    is_rate = traffic.rate is not None

    asked = traffic.rate if traffic.rate is not None else float(traffic.concurrency or 1)

    def find_most(names: Sequence[str], is_met: bool) -> float:
        """The largest load that keeps these objectives; 0: none does."""
        top = math.inf if is_met else asked  # where they break, as far as is known
        low, high = (asked, 2 * asked) if is_met else (0.0, asked if is_rate else 1.0)
        while high < top and _meets(run(_set_load(traffic, high)), names):
            low, high = high, min(2 * high, top)
            if high > _MOST_LOAD:
                return low
        while high > _LEAST_LOAD and high - low > (0.02 * high if is_rate else max(1.0, 0.02 * high)):
            middle = (low + high) / 2 if is_rate else float(int(low + high) // 2)
            low, high = (middle, high) if _meets(run(_set_load(traffic, middle)), names) else (low, middle)
        return low

    def count_users(most: float) -> int:
        """On more GPUs users wait less, so fewer requests are in flight: users are dealt out, not requests."""
        waits = run(_set_load(traffic, most or 1)).mean("e2e_s")
        own = int(most * (waits + traffic.think_s) / waits)
        return max(own, traffic.users) if most >= asked else min(own, traffic.users - 1)

    found: dict[str, Any] = {}
    for name, limit in limits.items():
        value, is_met = _find_judged(load.kept, name).get(limit.at), _meets(load, [name])
        most = find_most([name], is_met)
        found[name] = {"limit_s": limit.limit_s, "at": limit.at, "value_s": value, "met": is_met, "most_load": most,
                       **({"most_users": count_users(most)} if traffic.users else {})}  # fmt: skip
    good = [share for (ttft, share), (e2e, _), request in
            zip(load.kept["ttft_s"], load.kept["e2e_s"], load.requests, strict=True)
            if ("ttft_s" not in limits or ttft <= limits["ttft_s"].limit_s)
            and ("itl_s" not in limits or e2e - ttft <= limits["itl_s"].limit_s * (request.output - 1))]  # fmt: skip
    most, users = min(each["most_load"] for each in found.values()), dict[str, int]()
    needs = asked / most if most else 0.0
    if traffic.users:
        users = {"most_users": min(each["most_users"] for each in found.values())}
        needs = traffic.users / max(1, users["most_users"]) if most else 0.0
    return {**found, "load": "requests_per_s" if is_rate else "concurrency", "most_load": most, **users,
            "goodput_tokens_per_s": rate * sum(good) / sum(load.shares),
            "gpus_needed": math.ceil(needs) * answer.gpus or None}  # fmt: skip


def _set_load(traffic: Traffic, load: float) -> Traffic:
    return traffic._replace(rate=load) if traffic.rate is not None else traffic._replace(concurrency=round(load))


def _advise(answer: ServingAnswer, model: ServedModel, waits: bool) -> str:
    """The change that helps most, by the largest part of a step; where requests wait, what lets more of them run."""
    if waits:
        more = f" or a larger {spell('max_seqs')}"
        if answer.room.max_concurrency < answer.engine.max_seqs:
            more = ", an fp8 cache or shorter requests" if model.cache_bytes >= 2 else " or shorter requests"
        return f"requests wait: more GPUs{more} let more run at once"
    part, share = next(iter(answer.shares.items()))
    changes = {
        "KV cache": "an fp8 cache halves it" if model.cache_bytes >= 2 else "shorter contexts or more GPUs cut it",
        "weights": "narrower weights or more requests at once spread it over more tokens",
        "experts": "more requests at once spread it over more tokens; narrower weights cut it",
        "collectives": "fewer GPUs per replica, with more replicas, cut it",
        "host and launches": "more requests at once, or fewer GPUs per replica, spread it over more tokens",
        "products": "a narrower compute format, prefix caching or separate workers for prompts cut it",
        "towers": "fewer or smaller images, or separate workers for prompts, cut it",
        "prompt attention": "prefix caching or separate workers for prompts cut it",
    }
    return f"{name_part(part)}, {share:.0%} of a step: {changes.get(part, 'more requests at once spread it')}"


_EVIDENCE = {
    "engine and GPU": "this model was not measured on this GPU with this engine: others were",
    "engine": "nothing was measured on this GPU with this engine: the interval is that of a GPU never seen",
    "media": "images, videos and sound were not compared with measurements of an engine: the interval is wide",
    "data sheet": "no GPU of this generation was measured: the interval is wide",
}


def _keep(run: Run, requests: Sequence[Request], shares: Sequence[float]) -> dict[str, Weighted]:
    """Values by request with their shares."""
    found: dict[str, Weighted] = {"ttft_s": [], "tpot_s": [], "e2e_s": [], "itl_s": []}
    for served, request, share in zip(run.requests, requests, shares, strict=True):
        found["ttft_s"].append((served.ttft, share))
        found["e2e_s"].append((served.e2e, share))
        if request.output > 1:
            found["tpot_s"].append(((served.e2e - served.ttft) / (request.output - 1), share))
    found["itl_s"] = [(gap, float(count)) for gap, count in run.gaps]
    return found


def _mean(values: Weighted) -> float:
    total = sum(share for _, share in values)
    return sum(value * share for value, share in values) / total


def _find_percentiles(values: Weighted) -> dict[str, float]:
    ordered = sorted(value for value in values if value[1] > 0)
    total, seen, found = sum(share for _, share in ordered), 0.0, {}
    wanted = [(name, int(name[1:]) / 100) for name in _SHOWN]
    for value, share in ordered:
        seen += share
        while wanted and seen >= wanted[0][1] * total * (1 - 1e-12):
            found[wanted.pop(0)[0]] = value
    return found


def _is_saturated(run: Run, requests: Sequence[Request]) -> bool:
    """Whether requests wait longer and longer: the last quarter far longer than the second, and longer than service."""
    count = len(requests)
    if count < 40:
        return False
    early, late = run.requests[count // 4 : count // 2], run.requests[-count // 4 :]
    before, after = (sum(each.ttft for each in part) / len(part) for part in (early, late))
    lasted = (requests[-1].arrival_s or 0.0) - (requests[0].arrival_s or 0.0)
    return bool(after > 1.5 * before and after > 0.1 * lasted)


def _split(step: StepModel, mean: MeanStep, prompt: float, weights: Weights) -> dict[str, float]:
    """Seconds of the mean step by class, with prompts of so many tokens."""
    amounts = step.count_tokens(mean.decodes + mean.prompt)
    heads = step.count_sequences(mean.decodes)
    found = {name: weight * (one + other) for name, weight, one, other in
             zip(CLASSES, weights.values, amounts, heads, strict=True)}  # fmt: skip
    key, state, windows = step.time_keys()
    seconds = key * mean.length + state + sum(each * min(mean.length, window) for each, window in windows)
    found["kv"] = weights.values[CLASSES.index("kv")] * mean.decodes * seconds
    pair, bounded = step.time_pairs()
    pairs = pair * mean.length / 2 + sum(each * min(window, prompt / 2) for each, window in bounded)
    found["attention"] = weights.values[CLASSES.index("attention")] * mean.prompt * pairs
    return found


def _name_shares(by_class: dict[str, float]) -> dict[str, float]:
    total = sum(by_class.values())
    found: dict[str, float] = {}
    for name, seconds in by_class.items():
        word = "host and launches" if name in HOST else _NAMES[name]
        found[word] = found.get(word, 0.0) + seconds / total
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _find_mean(run: Run, requests: Sequence[Request]) -> MeanStep:
    """The run's mean step, without its seconds."""
    tokens = sum(count for _, count in run.gaps) or len(requests)
    decodes = max(1.0, tokens / max(1, run.steps))
    outputs = sum(each.output for each in requests)
    prompts = sum(each.input - each.cached for each in requests)
    length = sum(each.input + each.output / 2 for each in requests) / len(requests)
    return MeanStep(0.0, decodes, length, decodes / outputs * prompts)
