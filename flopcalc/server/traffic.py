"""What is asked of a server: lengths, load, objectives, speculation; and the requests that a simulation serves."""

from __future__ import annotations

import math
import os
import random
import re
from typing import Any, NamedTuple

from flopcalc.base.errors import WorkloadError, format_value
from flopcalc.base.files import MAX_TOML_BYTES, read_csv, read_text
from flopcalc.base.spelling import spell
from flopcalc.base.units import parse_size
from flopcalc.core.model.config import Source
from flopcalc.core.model.mtp import count_layers
from flopcalc.server.schedule import Request
from flopcalc.server.served import ServedModel
from flopcalc.server.step import Deployment
from flopcalc.setup.setup import Setup

_LEAST = 0.8  # InferenceX draws lengths from 80 to 100 % of the nominal ones
_WAVES = 10  # and sends ten requests a slot
_OPEN_REQUESTS = 600  # of a simulation with arrivals; the first fifth is left out
_MOST_REQUESTS, _LATEST_S = 100_000, 1e9  # of a file
_MOST_SLOTS = 1 << 14  # requests in flight of one replica: a simulation takes a second
_SEED = 0


class Lengths(NamedTuple):
    """Tokens of prompts or answers: from low to high, or drawn from a file's."""

    low: int
    high: int
    values: tuple[int, ...] = ()

    def draw(self, source: random.Random, least: float) -> int:
        if self.values:
            return source.choice(self.values)
        if self.low == self.high:
            return max(1, round(self.high * source.uniform(least, 1)))
        return source.randint(self.low, self.high)

    def __str__(self) -> str:
        return f"{self.high:,}" if self.low == self.high else f"{self.low:,} to {self.high:,}"


class Objective(NamedTuple):
    """A limit in seconds, and the percentile that must keep it."""

    limit_s: float
    at: str


class Speculation(NamedTuple):
    """Drafts of one step, and the share of them that is accepted, one by one."""

    drafts: int
    accepted: float
    is_own: bool = False  # by the model's own layers

    @property
    def tokens(self) -> float:
        """Expected tokens of a step: a draft counts only if all before it were accepted."""
        if self.accepted == 1:
            return self.drafts + 1.0
        return (1 - self.accepted ** (self.drafts + 1)) / (1 - self.accepted)


class Traffic(NamedTuple):
    """What is asked of the server."""

    input: Lengths
    output: Lengths
    concurrency: int | None
    rate: float | None
    requests: tuple[Request, ...]  # of a file
    benchmark: str | None
    hit: float = 0  # of each prompt, what the cache holds: tokens, or as a float a share
    users: int = 0
    think_s: float = 0.0
    objectives: tuple[tuple[str, Objective], ...] = ()  # quantity -> its limit
    speculation: Speculation | None = None
    workers: tuple[int, int] = (0, 0)  # separate workers for prompts and for decodes

    @property
    def tokens(self) -> int:
        return max((each.input + each.output for each in self.requests), default=self.input.high + self.output.high)

    def count_cached(self, size: int) -> int:
        """Tokens of a prompt that the cache holds; the last one is always computed."""
        return min(round(self.hit * size) if isinstance(self.hit, float) else int(self.hit), size - 1)


def read_share(value: Any, name: str) -> float:
    """0.9 or 90%."""
    try:
        text = str(value).strip()
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = math.nan
    if not 0 < share <= 1:
        raise WorkloadError(f"{spell(name)} is a share between 0 and 1, such as 0.9 or 90%, not {format_value(value)}")
    return share


def read_seconds(text: str, name: str) -> float:
    """2s, 30ms or 0.5."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ms|s|min)?", text.strip())
    if found is None or not float(found[1]):
        raise WorkloadError(f"{spell(name)}: {format_value(text)} is not a time such as 2s or 30ms")
    return float(found[1]) * {"ms": 1e-3, "min": 60.0}.get(found[2], 1.0)


def _read_lengths(value: Any, name: str) -> Lengths:
    """8k, 6.5k..8k, or a file with a length on each line."""
    text = str(value)
    if os.path.isfile(text):
        lines = read_text(text, MAX_TOML_BYTES, WorkloadError).splitlines()
        values = tuple(parse_size(line.strip(), name) for line in lines if line.strip())
        if not values:
            raise WorkloadError(f"{text}: has no lengths; give one on each line")
        return Lengths(min(values), max(values), values)
    low, is_range, high = text.partition("..")
    found = Lengths(parse_size(low.strip(), name), parse_size((high if is_range else low).strip(), name))
    if found.low > found.high:
        raise WorkloadError(f"{spell(name, text)}: the first length is the smaller one")
    return found


_LONG_S = 60  # an objective of a minute, as a bare number, more likely means milliseconds


def _read_objective(text: str, name: str) -> Objective:
    limit, _, at = text.partition("@")
    if at not in ("", "p50", "p90", "p95", "p99"):
        raise WorkloadError(f"{spell(name, text)}: after @ comes p50, p90, p95 or p99")
    if limit.isdigit() and int(limit) >= _LONG_S:
        raise WorkloadError(f"{spell(name, text)}: write its unit, {limit}ms or {limit}s")
    return Objective(read_seconds(limit, name), at or "p95")


def _read_speculation(text: str, source: Source) -> Speculation:
    found = re.fullmatch(r"(mtp,)?(?:k=(\d+),)?accept=(\d*\.?\d+%?)", text.replace(" ", ""))
    drafts = 0 if found is None else int(found[2] or (count_layers(source) if found[1] else 0))
    if found is None or not drafts:
        raise WorkloadError(
            f"{spell('speculative', text)}: write k=3,accept=0.7: drafts of a step, and the share that is accepted; "
            "or mtp,accept=0.7 for a model with layers of multi-token prediction: it drafts with all of them"
        )
    return Speculation(drafts, read_share(found[3], "speculative"), found[1] is not None)


def read_traffic(setup: Setup, model: ServedModel, source: Source) -> Traffic:
    loads = [name for name in ("concurrency", "rate", "requests", "users") if setup.get(name) is not None]
    if len(loads) > 1:
        raise WorkloadError(f"{' and '.join(map(spell, loads))} each say the load: give one")
    benchmark = setup.get("benchmark")
    if benchmark is not None and setup.get("concurrency") is None:
        raise WorkloadError(f"{spell('benchmark', benchmark)} keeps requests in flight: give {spell('concurrency')}")
    if setup.get("think") is not None and setup.get("users") is None:
        raise WorkloadError(f"{spell('think')} is of users: give {spell('users', 'N')}")
    asked = {name: setup.get(name) for name in ("input_len", "output_len")}
    objectives = tuple(
        (name, _read_objective(str(setup.get(field)), field))
        for field, name in (("ttft", "ttft_s"), ("itl", "itl_s"))
        if setup.get(field) is not None
    )
    text = setup.get("disaggregate", "")
    split = re.fullmatch(r"([1-9]\d{0,5})p([1-9]\d{0,5})d", text)
    if text and split is None:
        raise WorkloadError(f"{spell('disaggregate', text)}: write 2p4d: workers for prompts, workers for decodes")
    workers = (int(split[1]), int(split[2])) if split is not None else (0, 0)
    speculative = setup.get("speculative")
    speculation = _read_speculation(speculative, source) if speculative is not None else None
    text = str(setup.get("prefix_hit", 0))
    is_share = text.endswith("%") or "." in text
    hit = read_share(text, "prefix_hit") if is_share else parse_size(text, "prefix_hit", 0)
    if setup.get("requests") is not None:
        if any(value is not None for value in asked.values()):
            given = f"{spell('input_len')} and {spell('output_len')}"
            raise WorkloadError(f"{spell('requests')} says the lengths: leave {given} out")
        if any(workers) or objectives:
            raise WorkloadError(f"{spell('requests')} takes neither objectives nor separate workers")
        none = Lengths(0, 0)
        return Traffic(
            none, none, None, None, _read_requests(setup.get("requests")), None, hit, speculation=speculation
        )
    for name, value in asked.items():
        if value is None:
            raise WorkloadError(f"serving needs {spell(name, 'N')}: tokens of a request")
    lengths = {name: _read_lengths(value, name) for name, value in asked.items()}
    prompt, answer = lengths["input_len"], lengths["output_len"]
    if model.longest and prompt.high + answer.high > model.longest:
        raise WorkloadError(
            f"{prompt.high:,} + {answer.high:,} tokens are more than the {model.longest:,} positions of {model.name}"
        )
    if hit > prompt.high:
        raise WorkloadError(f"{spell('prefix_hit', text)} is more than the {prompt.high:,} tokens of a prompt")
    concurrency, rate = setup.get("concurrency"), setup.get("rate")
    users = setup.get("users") or 0
    if any(workers) and rate is not None:
        raise WorkloadError(f"{spell('disaggregate')} takes {spell('concurrency')}, not {spell('rate')}")
    if concurrency is None and rate is None:
        concurrency = users or 1
    think = read_seconds(str(setup.get("think", "0.001")), "think") if users else 0.0
    return Traffic(
        prompt, answer, concurrency, rate, (), benchmark, hit, users, think, objectives, speculation, workers
    )


def _read_requests(path: str) -> tuple[Request, ...]:
    """A CSV file of arrival_s,input,output."""
    found = []
    for number, row in enumerate(read_csv(path, _MOST_REQUESTS, WorkloadError), 2):
        try:
            request = Request(int(row["input"]), int(row["output"]), float(row["arrival_s"]))
        except (KeyError, ValueError):
            raise WorkloadError(f"{path}: line {number} is not arrival_s,input,output, as 0.5,1024,128") from None
        if request.input < 1 or request.output < 1 or not 0 <= (request.arrival_s or 0.0) <= _LATEST_S:
            raise WorkloadError(
                f"{path}: line {number}: lengths start at 1, arrivals lie between 0 and {_LATEST_S:g} seconds"
            )
        found.append(request)
    if not found:
        raise WorkloadError(f"{path}: has no requests; its lines are arrival_s,input,output")
    return tuple(sorted(found, key=lambda each: each.arrival_s or 0.0))


def make_requests(traffic: Traffic, layout: Deployment) -> tuple[list[Request], int, list[float]]:
    """Requests of one replica, its slots, and each request's share of the means."""
    replicas = layout.replicas
    source = random.Random(_SEED)
    if traffic.requests:
        own = [each._replace(cached=traffic.count_cached(each.input)) for each in traffic.requests[::replicas]]
        return own, 0, [1.0] * len(own)
    least = _LEAST if traffic.benchmark == "inferencex" else 1.0

    def draw(arrival: float | None) -> Request:
        size, output = traffic.input.draw(source, least), traffic.output.draw(source, least)
        return Request(size, output, arrival, traffic.count_cached(size))

    if traffic.rate is not None:
        clock, own = 0.0, list[Request]()
        for _ in range(_OPEN_REQUESTS):
            clock += source.expovariate(traffic.rate / replicas)
            own.append(draw(clock))
        first = _OPEN_REQUESTS // 5
        return own, 0, [0.0] * first + [1.0] * (_OPEN_REQUESTS - first)
    slots = max(1, -(-(traffic.concurrency or 1) // replicas))
    if slots > _MOST_SLOTS:
        raise WorkloadError(
            f"{traffic.concurrency or 1:,} requests in flight are {slots:,} for each of {replicas} replicas; "
            f"up to {_MOST_SLOTS:,} are simulated"
        )
    waves = _WAVES if slots <= 32 else 6 if slots <= 128 else 4
    own = [draw(None) for _ in range(slots * waves)]
    # A benchmark's first wave, in which all wait for all, keeps its weight though fewer waves are simulated than run;
    # without a benchmark a server in its steady state is meant, and it counts for nothing.
    share = 1 / _WAVES if traffic.benchmark is not None else 0.0
    others = (1 - share) / (waves - 1)
    return own, slots, [share] * slots + [others] * (len(own) - slots)
