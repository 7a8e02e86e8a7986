"""How an engine's scheduler makes steps of requests: a simulation that jumps from event to event."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from flopcalc.server.step import StepCosts

# A request that takes the place of one that ended comes while the next step runs already. Requests that come at one
# time are read one after another, so many in a step.
LAG, READ = 1, 2


class Request(NamedTuple):
    """Lengths of a request, and when it comes; None: as soon as another ends."""

    input: int
    output: int
    arrival_s: float | None = None
    cached: int = 0  # tokens of the prompt that the cache holds already


class Policy(NamedTuple):
    """How an engine fills a step, and its limits for one attention rank."""

    max_tokens: int  # of one step
    max_seqs: int
    cache_tokens: float  # that the KV cache of a rank holds
    mixes: bool = True  # prompts and decodes share a step; else decodes wait for prompts
    chunks: bool = True  # a prompt may be spread over several steps
    reserves: bool = False  # a request is let in only if the cache holds all that it may come to
    interval: int = 1  # steps between two looks for new requests
    wait: int = 0  # steps for which a prompt waits for others while decodes run
    per_step: float = 1.0  # tokens of a sequence that a decode step gives, with speculation

    def count_steps(self, request: Request) -> int:
        return math.ceil((request.output - 1) / self.per_step)


class Served(NamedTuple):
    """When a request's first and last tokens came after its arrival."""

    ttft: Any
    e2e: Any


class Run(NamedTuple):
    """All requests of a simulation, in order, the steps that it took, and when it ended."""

    requests: list[Served]
    steps: int
    clock: Any
    gaps: list[tuple[Any, int]]  # seconds between two tokens of a stream, and how many tokens came after them


def simulate(costs: StepCosts, policy: Policy, requests: Sequence[Request], slots: int) -> Run:
    """Serve the requests in order. Without arrivals, `slots` are there at once and each end brings the next."""
    clock = costs.zero
    waiting: deque[tuple[int, Any]] = deque()
    due: list[tuple[int, int]] = []  # (count of decode steps at which it ends, request)
    arrived: list[Any] = [None] * len(requests)
    first: list[Any] = [None] * len(requests)
    shift: list[Any] = [None] * len(requests)
    last: list[Any] = [None] * len(requests)
    count = decodes = steps = 0
    keys = 0.0
    gaps: list[tuple[Any, int]] = []
    stall = costs.zero  # since the last decode, where prompts run alone
    reserved = 0.0
    partial: tuple[int, int] | None = None  # the prompt that is under way, and its tokens that are done
    is_open = bool(requests) and requests[0].arrival_s is not None
    following = since = 0
    late: deque[tuple[int, int]] = deque()  # (step at which it is seen, request)

    def bring(number: int) -> None:
        """Requests come while the next step runs, and are seen some steps later; one that finds no work is at once."""
        nonlocal following
        came = range(following, min(following + number, len(requests)))
        for place, each in enumerate(came):
            arrived[each] = clock
            late.append((steps + LAG + place // READ, each))
        following += len(came)

    if not is_open:
        bring(slots)
    while True:
        while late and (late[0][0] <= steps or not (waiting or partial or decodes)):
            number = late.popleft()[1]
            waiting.append((number, arrived[number]))
        if is_open:
            while following < len(requests) and (requests[following].arrival_s or 0.0) <= clock:
                arrived[following] = requests[following].arrival_s
                waiting.append((following, arrived[following]))
                following += 1
        chunks: list[tuple[int, int]] = []
        ready: list[int] = []
        if not waiting:
            since = count
        is_due = policy.interval == 1 or count % policy.interval == 0
        if (waiting or partial) and (not decodes or (is_due and (partial or count - since >= policy.wait))):
            room = policy.max_tokens - (decodes if policy.mixes else 0)
            partial = _fill(policy, requests, waiting, partial, room, decodes,
                            reserved if policy.reserves else keys, chunks, ready)  # fmt: skip
            reserved += sum(requests[number].input + requests[number].output for number in ready)
        if chunks:
            has_decodes = policy.mixes and decodes > 0
            taken = costs.run(chunks, decodes if has_decodes else 0, float(keys))
            clock, steps = clock + taken, steps + 1
            if has_decodes:
                gaps.append((taken, decodes))
                count, keys = count + 1, keys + decodes * policy.per_step
            elif decodes:
                stall = stall + taken
        elif decodes:
            ahead = due[0][0] - count
            if waiting and policy.interval > 1:
                ahead = min(ahead, policy.interval - count % policy.interval)
            if waiting and policy.wait:
                ahead = max(1, min(ahead, since + policy.wait - count))
            if late:
                ahead = max(1, min(ahead, late[0][0] - steps))
            if is_open and following < len(requests):
                single = costs.decode(decodes, float(keys), 1)
                gap = (requests[following].arrival_s or 0.0) - clock
                ahead = max(1, min(ahead, int(gap / single) + 1))
            taken = costs.decode(decodes, float(keys), ahead)
            gaps.append((taken * (1 / ahead) + stall, decodes))
            if ahead > 1:
                gaps.append((taken * (1 / ahead), decodes * (ahead - 1)))
            clock, stall = clock + taken, costs.zero
            count, keys, steps = count + ahead, keys + decodes * ahead * policy.per_step, steps + ahead
        elif is_open and following < len(requests):
            clock = max(clock, requests[following].arrival_s or 0.0)
            continue
        else:
            break
        ended = 0
        for number in ready:
            request = requests[number]
            shift[number] = costs.find_shift(sum(size for size, _ in chunks))
            first[number] = clock + shift[number]
            if request.output > 1:
                heapq.heappush(due, (count + policy.count_steps(request), number))
                keys, decodes = keys + request.input + 1, decodes + 1
            else:
                last[number] = first[number]
                reserved -= request.input + request.output
                ended += 1
        while due and due[0][0] <= count:
            _, number = heapq.heappop(due)
            request = requests[number]
            last[number] = clock + shift[number]
            keys -= request.input + 1 + policy.count_steps(request) * policy.per_step
            decodes, ended = decodes - 1, ended + 1
            reserved -= request.input + request.output
        if not is_open:
            bring(ended)
    served = [Served(first[i] - arrived[i], last[i] - arrived[i]) for i in range(len(requests))]
    return Run(served, steps, clock, gaps)


def _fill(
    policy: Policy, requests: Sequence[Request], waiting: deque[tuple[int, Any]], partial: tuple[int, int] | None,
    room: int, decodes: int, held: float, chunks: list[tuple[int, int]], ready: list[int],
) -> tuple[int, int] | None:  # fmt: skip
    """Chunks of prompts for one step, and the requests whose prompts they end; the prompt that is left unfinished."""
    while room > 0 and (partial or waiting):
        if partial is None:
            number = waiting[0][0]
            request = requests[number]
            sizes = [requests[each].input + requests[each].output * policy.reserves for each in (*ready, number)]
            is_full = held + sum(sizes) > policy.cache_tokens
            if decodes + len(ready) >= policy.max_seqs or (is_full and (decodes or ready)):
                break
            if not policy.chunks and chunks and request.input > room:
                break
            waiting.popleft()
            partial = (number, request.cached)
        number, done = partial
        size = requests[number].input - done
        if policy.chunks:
            size = min(size, room)
        chunks.append((size, done))
        room -= size
        if done + size < requests[number].input:
            return number, done + size
        ready.append(number)
        partial = None
    return partial
