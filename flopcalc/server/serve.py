"""A question about a server in, the answer out: what fits, how long requests wait, tokens per second, money."""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

from flopcalc.base.errors import DeviceError, FlopcalcError, WorkloadError, format_value
from flopcalc.base.spelling import spell
from flopcalc.base.units import format_bytes, parse_size
from flopcalc.hardware.devices import Device, find_device
from flopcalc.planning.money import find_price
from flopcalc.server.engines import Engine, find_engine, read_flags
from flopcalc.server.fitted import Weights, find_weights
from flopcalc.server.kv import Room, find_longest, find_room
from flopcalc.server.kv import to_dict as show_cache
from flopcalc.server.power import MeanStep, find_server_watts
from flopcalc.server.schedule import Request, Run, simulate
from flopcalc.server.served import ServedModel, read_model
from flopcalc.server.step import CLASSES, Deployment, Rates, StepCosts, StepModel
from flopcalc.setup.counting import bind_setup
from flopcalc.setup.setup import Setup

BENCHMARKS = ("inferencex",)
_LEAST = 0.8  # InferenceX draws lengths from 80 to 100 % of the nominal ones
_WAVES = 10  # and sends ten requests a slot
_SIZES = (1, 2, 4, 8, 16, 32, 64)  # GPUs of the layouts that are looked at for the smallest that fits
_SHOWN = ("p50", "p90", "p95", "p99")
_OPEN_REQUESTS = 600  # of a simulation with arrivals; the first fifth is left out
HOST = ("step", "kernels", "casts", "eager", "sequences", "prompts", "arrivals", "floors", "expert_floors")
# What a reader calls a class of work.
_NAMES = {"dense": "weights", "math": "products", "experts": "experts", "kv": "KV cache", "sums": "collectives",
          "attention": "prompt attention", "tokens": "norms and casts"}  # fmt: skip


class Estimated(NamedTuple):
    """A value and its 90 % interval; without a high end it grows without bound."""

    low: float
    mid: float
    high: float | None

    def to_dict(self) -> dict[str, float | None]:
        return {"low": self.low, "mid": self.mid, "high": self.high}


class Traffic(NamedTuple):
    """What is asked of the server."""

    input: int
    output: int
    concurrency: int | None
    rate: float | None
    requests: tuple[Request, ...]  # of a file
    benchmark: str | None
    cached: int

    @property
    def tokens(self) -> int:
        return max((each.input + each.output for each in self.requests), default=self.input + self.output)


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

    def to_dict(self) -> dict[str, Any]:
        names = ("ttft_s", "tpot_s", "e2e_s", "tokens_per_s", "tokens_per_s_per_gpu", "power_w")
        return {
            "schema": 1, "model": self.model, "engine": self.engine.id, "engine_version": self.engine.version or None,
            "device": self.device.id, "gpus": self.layout.gpus, "layout": self.layout._asdict(), "fits": self.fits,
            "evidence": self.evidence,
            **{name: self.times[name].to_dict() if name in self.times else None for name in names},
            "percentiles": self.percentiles or None,
            "kv_cache": show_cache(self.room),
            "memory": {"total_bytes": round(self.room.total), "weights_bytes": round(self.room.weights),
                       "reserved_bytes": round(self.room.activations), "cache_bytes": max(0, round(self.room.cache))},
            "longest_context": self.longest,
            "smallest_layout": self.smallest._asdict() if self.smallest is not None else None,
            "limits": {"max_batched_tokens": self.engine.max_batched_tokens, "max_seqs": self.engine.max_seqs,
                       "memory_fraction": self.engine.memory_fraction},
            "time_shares": self.shares or None,
            "usd": self.usd, "price_source": self.price or None, "notes": list(self.notes),
        }  # fmt: skip


def serve_setup(setup: Setup) -> ServingAnswer:
    """The answer to a Setup of `serving`."""
    name = setup.place.device
    if name is None:
        raise DeviceError(f"on which device? Give {spell('device', 'NAME')}; `flopcalc devices` lists them")
    device, notes = find_device(name), list(setup.notes)
    engine, flags = _choose_engine(setup, device, notes)
    formats = setup.formats
    asked = flags.get("kv_cache", engine.cache_of.get(str(formats.weights), "auto"))
    if formats.kv_cache is None and asked != "auto":
        formats = formats.replace(kv_cache="fp8" if asked.startswith("fp8") else asked)
    model = read_model(bind_setup(setup.replace(formats=formats), "model", notes))
    traffic = _read_traffic(setup, model)
    layout = _choose_layout(setup, flags, model, device, engine, traffic, notes)
    engine = _set_limits(find_engine(_name_engine(setup), device, layout.tp * layout.pp, traffic.benchmark, layout.dp), setup, flags)
    room = find_room(model, layout, device, engine, traffic.tokens)
    longest, smallest = find_longest(model, layout, room), _find_smallest(model, device, engine, traffic.tokens)
    answer = ServingAnswer(
        model.name, engine, device, layout, traffic, room, room.fits, longest, smallest, "", {}, {}, {}, None, "", ()
    )
    if not room.fits:
        notes.append(_explain_fit(answer))
        return answer._replace(notes=tuple(notes), evidence="memory alone")
    weights = find_weights(model.name, engine.id, engine.version, device.id)
    step = StepModel(model, layout, Rates(device, layout.gpus, engine.id))
    return _time(answer._replace(evidence=weights.evidence), setup, step, weights, notes)


def _name_engine(setup: Setup) -> str:
    return str(setup.get("engine", "vllm"))


def _choose_engine(setup: Setup, device: Device, notes: list[str]) -> tuple[Engine, dict[str, str]]:
    engine = find_engine(_name_engine(setup), device)
    flags, found = read_flags(engine, setup.get("engine_args", ""))
    notes += found
    return engine, flags


def _set_limits(engine: Engine, setup: Setup, flags: dict[str, str]) -> Engine:
    """The engine with the limits that flags or fields say; fields win."""
    changes: dict[str, Any] = {}
    for name in ("max_batched_tokens", "max_seqs", "block_size", "interval"):
        if name in flags:
            changes[name] = parse_size(flags[name], name)
        if setup.get(name) is not None:
            changes[name] = setup.get(name)
    share = setup.get("memory_fraction", flags.get("memory_fraction"))
    if share is not None:
        changes["memory_fraction"] = _read_share(share, "memory_fraction")
    return engine._replace(**changes)


def _read_share(value: Any, name: str) -> float:
    """0.9 or 90%."""
    try:
        text = str(value).strip()
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = math.nan
    if not 0 < share <= 1:
        raise WorkloadError(f"{spell(name)} is a share between 0 and 1, such as 0.9 or 90%, not {format_value(value)}")
    return share


def _read_traffic(setup: Setup, model: ServedModel) -> Traffic:
    concurrency, rate, file = setup.get("concurrency"), setup.get("rate"), setup.get("requests")
    loads = [name for name in ("concurrency", "rate", "requests") if setup.get(name) is not None]
    if len(loads) > 1:
        raise WorkloadError(f"{' and '.join(map(spell, loads))} each say the load: give one")
    benchmark = setup.get("benchmark")
    if benchmark is not None and concurrency is None:
        raise WorkloadError(f"{spell('benchmark', benchmark)} keeps requests in flight: give {spell('concurrency')}")
    lengths = {name: setup.get(name) for name in ("input_len", "output_len")}
    if file is not None:
        if any(value is not None for value in lengths.values()):
            raise WorkloadError(f"{spell('requests')} says the lengths: leave input_len and output_len out")
        requests = _read_requests(file)
        return Traffic(0, 0, None, None, requests, None, 0)
    for name, value in lengths.items():
        if value is None:
            raise WorkloadError(f"serving needs {spell(name, 'N')}: tokens of a request")
    if model.longest and lengths["input_len"] + lengths["output_len"] > model.longest:
        raise WorkloadError(
            f"{lengths['input_len']:,} + {lengths['output_len']:,} tokens are more than the {model.longest:,} "
            f"positions of {model.name}"
        )
    hit = setup.get("prefix_hit")
    cached = 0
    if hit is not None:
        is_share = str(hit).endswith("%") or "." in str(hit)
        cached = (
            round(_read_share(hit, "prefix_hit") * lengths["input_len"])
            if is_share
            else parse_size(hit, "prefix_hit", 0)
        )
        cached = min(cached, lengths["input_len"] - 1)  # the last token is always computed
    if concurrency is None and rate is None:
        concurrency = 1
    return Traffic(lengths["input_len"], lengths["output_len"], concurrency, rate, (), benchmark, cached)


def _read_requests(path: str) -> tuple[Request, ...]:
    """A CSV file of arrival_s,input,output."""
    found = []
    try:
        with open(path, encoding="utf-8", newline="") as file:
            for number, row in enumerate(csv.DictReader(file), 2):
                try:
                    request = Request(int(row["input"]), int(row["output"]), float(row["arrival_s"]))
                except (KeyError, TypeError, ValueError):
                    raise WorkloadError(
                        f"{path}: line {number} is not arrival_s,input,output, as 0.5,1024,128"
                    ) from None
                if request.input < 1 or request.output < 1 or not 0 <= (request.arrival_s or 0.0) < math.inf:
                    raise WorkloadError(f"{path}: line {number}: lengths start at 1, arrivals at 0 seconds")
                found.append(request)
    except OSError as error:
        raise WorkloadError(f"{path}: cannot be read: {error.strerror or error}") from None
    if not found:
        raise WorkloadError(f"{path}: has no requests; its lines are arrival_s,input,output")
    return tuple(sorted(found, key=lambda each: each.arrival_s or 0.0))


def _choose_layout(
    setup: Setup, flags: dict[str, str], model: ServedModel, device: Device, engine: Engine, traffic: Traffic,
    notes: list[str],
) -> Deployment:  # fmt: skip
    """The layout that was asked for; without one, the smallest that fits."""
    given: dict[str, int] = {}
    for name in ("tp", "dp", "pp", "ep"):
        value = setup.get(name, (parse_size(flags[name], name),) if name in flags else None)
        if value is not None and len(value) > 1:
            raise WorkloadError(f"{spell(name)}: serving takes one value")
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
    layout = Deployment(**given)
    if gpus is not None and gpus != layout.gpus:
        raise WorkloadError(f"{spell('gpus', gpus)} is not tp · dp · pp = {layout.gpus}")
    check_layout(layout, model)
    return layout


def check_layout(layout: Deployment, model: ServedModel) -> None:
    """An error where a layout does not divide what it cuts."""
    heads = model.query_heads
    if heads > 1 and heads % layout.tp:
        raise WorkloadError(f"{spell('tp', layout.tp)} does not divide the {heads} heads of {model.name}")
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
def _time(answer: ServingAnswer, setup: Setup, step: StepModel, weights: Weights, notes: list[str]) -> ServingAnswer:
    engine, layout, traffic, room = answer.engine, answer.layout, answer.traffic, answer.room
    costs = StepCosts(step, weights.weigh, engine.max_batched_tokens + 2048)
    policy = engine.make_policy(room.cache / room.request * traffic.tokens)
    requests, slots, shares = make_requests(traffic, layout)
    run = simulate(costs, policy, requests, slots)
    kept = _keep(run, requests, shares)
    if traffic.concurrency is not None:
        most = room.max_concurrency * layout.replicas
        if traffic.concurrency > min(most, policy.max_seqs * layout.replicas):
            notes.append(f"the cache holds about {most:,} requests of this length at once: others wait")
    is_full = False
    if traffic.rate is not None or traffic.requests:
        is_full = _is_saturated(run, requests)
        if is_full:
            notes.append("the load is more than the server can take: waiting times grow without bound")
    means = {name: _mean([(value, share) for value, share in kept[name]]) for name in kept if kept[name]}
    times = {
        name: _widen(weights, name, means[name], is_full and name != "tpot_s") for name in means if name != "itl_s"
    }
    outputs = _mean([(float(each.output), share) for each, share in zip(requests, shares, strict=True)])
    if traffic.concurrency is not None:
        rate = traffic.concurrency * outputs / means["e2e_s"]
    else:
        rate = sum(each.output for each in requests) / run.clock * layout.replicas
    low, high = weights.intervals["tpot_s"]
    times["tokens_per_s"] = Estimated(rate / high, rate, rate / low)
    times["tokens_per_s_per_gpu"] = Estimated(*(value / layout.gpus for value in (rate / high, rate, rate / low)))
    by_class = _split(step, run, requests, weights)
    mean = _find_mean(run, requests, sum(by_class.values()))
    power = find_server_watts(step.model, layout, answer.device, mean)
    if power is not None:
        times["power_w"] = Estimated(*power)
    price = find_price(answer.device, setup.get("price"))
    usd = None
    if price is not None:
        hour = layout.gpus * price.usd_per_gpu_hour
        inputs = _mean([(float(each.input), share) for each, share in zip(requests, shares, strict=True)])
        each = hour / 3600 / rate
        usd = {"per_hour": hour, "per_million_output_tokens": 1e6 * each,
               "per_million_tokens": 1e6 * each * outputs / (inputs + outputs)}  # fmt: skip
    if weights.evidence != "pairing":
        notes.append(_EVIDENCE[weights.evidence])
    percentiles = {name: _find_percentiles(values) for name, values in kept.items() if values}
    return answer._replace(
        times=times, percentiles=percentiles, shares=_name_shares(by_class), usd=usd,
        price=price.source if price is not None else "", notes=tuple(dict.fromkeys(notes)),
    )  # fmt: skip


_EVIDENCE = {
    "engine and GPU": "this model was not measured on this GPU with this engine: others were",
    "engine": "nothing was measured on this GPU with this engine: the interval is that of a GPU never seen",
    "data sheet": "neither this GPU's generation nor its engine was measured: the interval is wide",
}


def make_requests(traffic: Traffic, layout: Deployment) -> tuple[list[Request], int, list[float]]:
    """Requests of one replica, its slots, and each request's share of the means."""
    replicas = layout.replicas
    draw = random.Random(0)
    if traffic.requests:
        own = list(traffic.requests[::replicas])
        return own, 0, [1.0] * len(own)
    if traffic.rate is not None:
        clock, own = 0.0, list[Request]()
        for _ in range(_OPEN_REQUESTS):
            clock += draw.expovariate(traffic.rate / replicas)
            own.append(Request(traffic.input, traffic.output, clock, traffic.cached))
        first = _OPEN_REQUESTS // 5
        return own, 0, [0.0] * first + [1.0] * (_OPEN_REQUESTS - first)
    slots = max(1, -(-(traffic.concurrency or 1) // replicas))
    waves = _WAVES if slots <= 32 else 6 if slots <= 128 else 4
    least = 1.0 if traffic.benchmark is None else _LEAST
    own = []
    for _ in range(slots * waves):
        size, output = (max(1, round(each * draw.uniform(least, 1))) for each in (traffic.input, traffic.output))
        own.append(Request(size, output, None, min(traffic.cached, size - 1)))
    # Fewer waves are simulated than run: the first, in which all wait for all, keeps its weight of one tenth.
    share, others = 1 / _WAVES, (1 - 1 / _WAVES) / (waves - 1)
    return own, slots, [share] * slots + [others] * (len(own) - slots)


Weighted = list[tuple[float, float]]


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


def _widen(weights: Weights, name: str, value: float, is_unbounded: bool) -> Estimated:
    low, high = weights.intervals[name]
    return Estimated(low * value, value, None if is_unbounded else high * value)


def _is_saturated(run: Run, requests: Sequence[Request]) -> bool:
    """Whether requests wait longer and longer: the last quarter far longer than the second, and longer than service."""
    count = len(requests)
    if count < 40:
        return False
    early, late = run.requests[count // 4 : count // 2], run.requests[-count // 4 :]
    before, after = (sum(each.ttft for each in part) / len(part) for part in (early, late))
    lasted = (requests[-1].arrival_s or 0.0) - (requests[0].arrival_s or 0.0)
    return bool(after > 1.5 * before and after > 0.1 * lasted)


def _split(step: StepModel, run: Run, requests: Sequence[Request], weights: Weights) -> dict[str, float]:
    """Seconds of the run's mean step by class: decodes at the mean load, and the prompts that came between."""
    output = sum(each.output for each in requests) / len(requests)
    prompt = sum(each.input - each.cached for each in requests) / len(requests)
    tokens = sum(count for _, count in run.gaps) or len(requests)
    decodes = max(1.0, tokens / max(1, run.steps))
    amounts = step.count_tokens(decodes + decodes / output * prompt)
    heads = step.count_sequences(decodes)
    found = {name: weight * (one + other) for name, weight, one, other in
             zip(CLASSES, weights.values, amounts, heads, strict=True)}  # fmt: skip
    key, state, windows = step.time_keys()
    length = sum(each.input + each.output / 2 for each in requests) / len(requests)
    seconds = key * length + state + sum(each * min(length, window) for each, window in windows)
    found["kv"] = weights.values[CLASSES.index("kv")] * decodes * seconds
    pair, bounded = step.time_pairs()
    pairs = pair * prompt * length / 2 + sum(each * prompt * min(window, prompt / 2) for each, window in bounded)
    found["attention"] = weights.values[CLASSES.index("attention")] * decodes / output * pairs
    return found


def _name_shares(by_class: dict[str, float]) -> dict[str, float]:
    total = sum(by_class.values())
    found: dict[str, float] = {}
    for name, seconds in by_class.items():
        word = "host and launches" if name in HOST else _NAMES[name]
        found[word] = found.get(word, 0.0) + seconds / total
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _find_mean(run: Run, requests: Sequence[Request], seconds: float) -> MeanStep:
    """The run's mean step, of so many seconds."""
    tokens = sum(count for _, count in run.gaps) or len(requests)
    decodes = max(1.0, tokens / max(1, run.steps))
    outputs = sum(each.output for each in requests)
    prompts = sum(each.input - each.cached for each in requests)
    length = sum(each.input + each.output / 2 for each in requests) / len(requests)
    return MeanStep(seconds, decodes, length, decodes / outputs * prompts)
