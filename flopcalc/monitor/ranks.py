"""Each rank's sums of an interval go in; on rank 0 the sums of all ranks come out, and no call waits for a rank.

Rank 0 listens on a socket of its own and leaves its address in the default group's store; every other rank has one
thread that connects and sends. This is no process group: making one is collective, so a rank without a monitor would
hang the others, and a group that timed out once is dead for good. It is no store of torch's either: a client whose
store's process is stopped waits without end, whatever its timeout, and prints stack traces when a peer dies.

One line of JSON per message, each answered by one byte; every wait has a limit, and all waits are in threads.
"""

from __future__ import annotations

import json
import math
import os
import selectors
import socket
import sys
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

from flopcalc.monitor.messages import Say

_KEY = "flopcalc/side"  # in the default group's store: where rank 0 listens
_TAKEN = b"k"  # the answer to a line that was read and kept
_LINE_BYTES = 65_536  # no line of ours is that long
_INTERVALS = 256  # the most that a rank that cannot send keeps, the newest ones; the most that rank 0 keeps open
_KEPT_LINKS, _MOST_LINKS = 128, 256  # of more ranks than that each connects anew: file descriptors are training's
_ANSWER_S = 5.0  # for a connection or an answer, before another try
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 5.0  # between tries
_CLOSE_S = 2.0


class Store(Protocol):
    """What is used of torch's stores."""

    def set(self, key: str, value: str, /) -> None: ...

    def check(self, keys: list[str], /) -> bool: ...

    def get(self, key: str, /) -> bytes: ...


class Sums(NamedTuple):
    """What one rank did in one interval: sums over its steps. NaN where a number is not known."""

    steps: int
    model_flops: float
    hardware_flops: float
    tokens: float
    padded_tokens: float
    samples: float
    images: float
    wall_s: float
    device_s: float
    peak_flops_per_s: float  # of this rank's device, for its FLOPs; not a sum
    other_s: float = 0.0  # of wall_s, in passes that do not train
    other_flops: float = 0  # of these passes
    hardware_peak_flops_per_s: float = math.nan  # for hardware FLOPs, as the next one for all passes; NaN: the peak
    step_peak_flops_per_s: float = math.nan


class GatheredInterval(NamedTuple):
    """One interval as rank 0 has it: who reported, and who did not in time."""

    interval: int
    sums: Mapping[int, Sums]
    missing: tuple[int, ...]


class MeanStep(NamedTuple):
    """The mean step of the ranks that reported, as of one machine. NaN where a number is not known."""

    steps: int  # the most that a rank reported
    model_flops: float
    hardware_flops: float
    tokens: float
    padded_tokens: float
    samples: float
    images: float
    wall_s: float  # of the slowest rank
    device_s: float  # of the slowest rank
    peak_flops_per_s: float  # of these ranks' devices together
    slowest_rank: int | None
    stragglers: tuple[int, ...]
    scope: str
    reasons: tuple[str, ...]  # why the FLOPs, the time or the peak are NaN
    ranks: int = 1  # that reported
    other_s: float = 0.0  # of wall_s, in passes that do not train
    other_flops: float = 0
    hardware_peak_flops_per_s: float = math.nan  # NaN: the peak
    step_peak_flops_per_s: float = math.nan

    @property
    def train_s(self) -> float:
        """The time that training took, without other passes."""
        return self.wall_s - self.other_s

    @property
    def hardware_peak(self) -> float:
        peak = self.hardware_peak_flops_per_s
        return self.peak_flops_per_s if math.isnan(peak) else peak

    @property
    def step_peak(self) -> float:
        return self.peak_flops_per_s if math.isnan(self.step_peak_flops_per_s) else self.step_peak_flops_per_s


def combine(gathered: GatheredInterval, world: int, straggler_factor: float = 1.1) -> MeanStep:
    """Adds up FLOPs, tokens and peaks of the ranks that reported; the time is the slowest one's."""
    sums = {rank: gathered.sums[rank] for rank in sorted(gathered.sums) if gathered.sums[rank].steps > 0}
    scope = f"all {world} ranks" if len(sums) == world else f"{len(sums)} of {world} ranks"
    nan = math.nan
    if not sums:
        return MeanStep(0, nan, nan, nan, nan, nan, nan, nan, nan, nan, None, (), scope, ("no rank reported a step",))

    least, most = (pick(one.steps for one in sums.values()) for pick in (min, max))
    if least < most:
        scope += f", the mean of {least} to {most} steps each"

    def per_step(name: str) -> dict[int, float]:
        return {rank: getattr(one, name) / one.steps for rank, one in sums.items()}

    wall_s, device_s, model_flops = per_step("wall_s"), per_step("device_s"), per_step("model_flops")
    train_s = {rank: time_s - sums[rank].other_s / sums[rank].steps for rank, time_s in wall_s.items()}
    peaks = {rank: one.peak_flops_per_s for rank, one in sums.items()}
    # In a synchronous step the ranks wait for each other on the host, so the device's own time says more.
    times = wall_s if _unknown(device_s) else device_s
    known = {} if _unknown(times) else times
    limit = straggler_factor * _median(known)
    unknown = {"model FLOPs": _unknown(model_flops), "step time": _unknown(wall_s), "peak": _unknown(peaks)}
    return MeanStep(
        steps=most,
        model_flops=sum(model_flops.values()),
        hardware_flops=sum(per_step("hardware_flops").values()),
        tokens=sum(per_step("tokens").values()),
        padded_tokens=sum(per_step("padded_tokens").values()),
        samples=sum(per_step("samples").values()),
        images=sum(per_step("images").values()),
        wall_s=_longest(wall_s),
        device_s=_longest(device_s),
        peak_flops_per_s=sum(peaks.values()),
        slowest_rank=max(known, key=known.__getitem__) if known else None,
        stragglers=tuple(rank for rank, time_s in known.items() if time_s > limit),
        scope=scope,
        reasons=tuple(f"{what} of {_ranks(ranks)} not known" for what, ranks in unknown.items() if ranks),
        ranks=len(sums),
        other_s=_longest(wall_s) - _longest(train_s),
        other_flops=sum(per_step("other_flops").values()),
        hardware_peak_flops_per_s=_add_peaks([one.hardware_peak_flops_per_s for one in sums.values()]),
        step_peak_flops_per_s=_add_peaks([one.step_peak_flops_per_s for one in sums.values()]),
    )


def _add_peaks(peaks: Sequence[float]) -> float:
    return math.nan if any(map(math.isnan, peaks)) else sum(peaks)


def _longest(times_s: Mapping[int, float]) -> float:
    """NaN where one is not known: it may be the longest."""
    return math.nan if _unknown(times_s) else max(times_s.values())


def _unknown(values: Mapping[int, float]) -> list[int]:
    return [rank for rank, value in values.items() if not math.isfinite(value)]


def _median(values: Mapping[int, float]) -> float:
    ordered = sorted(values.values())
    middle = len(ordered) // 2
    return (ordered[middle] + ordered[-middle - 1]) / 2 if ordered else math.nan


def _ranks(ranks: Collection[int]) -> str:
    """'rank 3', 'ranks 1-3, 7': runs are folded, since thousands of ranks may be meant."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], rank]
        else:
            runs.append([rank])
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join("-".join(map(str, run)) for run in runs)


def open_side(say: Say, timeout_s: float = 30.0) -> Side | None:
    """The channel of the default group; None where there is no group, or nobody else in it."""
    dist: Any = sys.modules.get("torch.distributed")  # a group exists only where it was imported
    if dist is None or not dist.is_available() or not dist.is_initialized() or dist.get_world_size() < 2:
        return None
    store = dist.distributed_c10d._get_default_store()
    if store is None:
        say("the default group has no store (MPI), so the ranks cannot find each other: MFU is of each rank alone")
        return None
    side_of = Listener if dist.get_rank() == 0 else Sender
    return side_of(dist.get_rank(), dist.get_world_size(), store, say, timeout_s, dist.group.WORLD)


class Side(ABC):
    """One rank's end of the channel. Intervals are numbered alike on all ranks, and grow. Only `close` waits."""

    def __init__(self, rank: int, world: int, store: Store, say: Say, timeout_s: float, group: object) -> None:
        self.rank = rank
        self.world = world
        self._store: Store | None = store  # dropped when it is not needed: it may hold the group's port
        self._say = say
        self._timeout_s = timeout_s
        self._group = weakref.ref(group)  # to hold it would keep its communicator alive
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._guarded_run, name="flopcalc-side", daemon=True)

    def is_current(self) -> bool:
        """Whether no other default group was made since; the channel itself outlives a group that is destroyed."""
        dist: Any = sys.modules["torch.distributed"]
        return not dist.is_initialized() or dist.group.WORLD is self._group()

    @abstractmethod
    def post(self, interval: int, sums: Sums) -> None:
        """Sends this rank's sums."""

    @abstractmethod
    def collect(self) -> list[GatheredInterval]:
        """On rank 0 the intervals that became complete or timed out, in order; nothing elsewhere."""

    @abstractmethod
    def close(self, timeout_s: float = _CLOSE_S) -> list[GatheredInterval]:
        """Gives what is under way so long to arrive, then ends. On rank 0 returns what was still open."""

    @abstractmethod
    def _run(self) -> None:
        """The thread; may raise."""

    def _guarded_run(self) -> None:
        try:
            self._run()
        except Exception as error:
            self._warn(
                f"rank {self.rank}: the channel between the ranks ended ({_first_line(error)}); training goes on,"
                " MFU is of the ranks that still report",
                once="side ended",
            )

    def _warn(self, message: str, once: str | None = None) -> None:
        with suppress(Exception):  # where warnings are errors, this thread still has to go on
            self._say(message, once)


class Listener(Side):
    """Rank 0's end: receives from all others."""

    def __init__(self, rank: int, world: int, store: Store, say: Say, timeout_s: float, group: object) -> None:
        super().__init__(rank, world, store, say, timeout_s, group)
        self._lock = threading.Lock()  # of what follows; never held during a wait
        self._open: dict[int, dict[int, Sums]] = {}
        self._since: dict[int, float] = {}  # interval -> when it was first heard of
        self._newest = dict.fromkeys(range(world), -1)  # rank -> its last interval
        self._handed_out = -1
        self._connected: set[_Peer] = set()
        self._seen: set[int | None] = set()  # ranks that were connected once
        self._absent: set[int] = set()  # from the interval that was handed out last
        self._named_missing: set[int] = set()
        self._token = os.urandom(16).hex()
        self._wake, self._woken = socket.socketpair()
        self._thread.start()

    def post(self, interval: int, sums: Sums) -> None:
        self._keep(self.rank, interval, sums)

    def collect(self) -> list[GatheredInterval]:
        late = time.monotonic() - self._timeout_s
        with self._lock:
            # A rank sends in order: one that sent a later interval will not send this one any more.
            everyone_at = min(self._newest.values())
            overfull = sorted(self._open)[:-_INTERVALS]
            done = [i for i in sorted(self._open) if i <= everyone_at or self._since[i] <= late or i in overfull]
            gathered = self._hand_out(done)
        return self._name_missing(gathered)

    def close(self, timeout_s: float = _CLOSE_S) -> list[GatheredInterval]:
        deadline = time.monotonic() + timeout_s
        while self._thread.is_alive() and self._expects_more() and time.monotonic() < deadline:
            time.sleep(0.01)
        self._closing.set()
        with suppress(OSError):
            self._wake.send(b"x")
        self._thread.join(max(0.1, deadline - time.monotonic()))
        with self._lock:
            gathered = self._hand_out(sorted(self._open))
        return self._name_missing(gathered)

    def _expects_more(self) -> bool:
        """Whether a rank owes an interval; one that was connected and is gone has sent all it had."""
        with self._lock:
            last = max(self._open, default=-1)
            gone = self._seen - {peer.rank for peer in self._connected} | self._absent | {self.rank}
            return any(newest < last for rank, newest in self._newest.items() if rank not in gone)

    def _keep(self, rank: int, interval: int, sums: Sums) -> None:
        with self._lock:
            self._newest[rank] = max(self._newest[rank], interval)
            if interval > self._handed_out:
                self._open.setdefault(interval, {})[rank] = sums
                self._since.setdefault(interval, time.monotonic())

    def _hand_out(self, intervals: list[int]) -> list[GatheredInterval]:
        gathered = []
        for interval in intervals:
            del self._since[interval]
            self._handed_out = max(self._handed_out, interval)
            sums = self._open.pop(interval)
            gathered.append(
                GatheredInterval(interval, sums, tuple(rank for rank in range(self.world) if rank not in sums))
            )
            self._absent = set(gathered[-1].missing)
        return gathered

    def _name_missing(self, gathered: list[GatheredInterval]) -> list[GatheredInterval]:
        missing = {rank for one in gathered for rank in one.missing} - self._named_missing
        if missing:
            self._named_missing |= missing
            self._warn(
                f"{_ranks(missing)} of {self.world} sent no sums in time (ended, hung, slow, or without a monitor): MFU"
                " is of the ranks that reported, as perf/scope says"
            )
        return gathered

    def _run(self) -> None:
        store, self._store = self._store, None
        assert store is not None
        with self._wake, self._woken, selectors.DefaultSelector() as ready, _listen(self.world) as entrance:
            address = {"names": _own_names(), "port": entrance.getsockname()[1], "token": self._token}
            store.set(_KEY, json.dumps(address))
            del store
            entrance.setblocking(False)
            ready.register(entrance, selectors.EVENT_READ)
            ready.register(self._woken, selectors.EVENT_READ)
            while not self._closing.is_set():
                for key, _ in ready.select():
                    if key.fileobj is entrance:
                        self._admit(entrance, ready)
                    elif key.data is not None and not self._hear(key.data):
                        ready.unregister(key.fileobj)
                        self._dismiss(key.data)
                self._watch_entrance(entrance, ready)
            for peer in list(self._connected):
                self._dismiss(peer)
            _hang_up(entrance)

    def _watch_entrance(self, entrance: socket.socket, ready: selectors.BaseSelector) -> None:
        """Too many at once wait outside."""
        is_full, is_watched = len(self._connected) >= _MOST_LINKS, entrance in ready.get_map()
        if is_full and is_watched:
            ready.unregister(entrance)
        elif not is_full and not is_watched:
            ready.register(entrance, selectors.EVENT_READ)

    def _admit(self, entrance: socket.socket, ready: selectors.BaseSelector) -> None:
        try:
            link, _ = entrance.accept()
        except OSError:  # gone again, or no file descriptor left: not to be tried without a pause
            self._closing.wait(_FIRST_PAUSE_S)
            return
        link.setblocking(False)
        peer = _Peer(link)
        ready.register(link, selectors.EVENT_READ, peer)
        with self._lock:
            self._connected.add(peer)

    def _dismiss(self, peer: _Peer) -> None:
        _hang_up(peer.link)
        with self._lock:
            self._connected.discard(peer)

    def _hear(self, peer: _Peer) -> bool:
        """Reads what has come; False: the connection is over, not one of ours, or one too many to be kept."""
        try:
            data = peer.link.recv(_LINE_BYTES)
            *lines, peer.unread = (peer.unread + data).split(b"\n")
            for line in lines:
                is_sums = self._take(peer, json.loads(line))
                peer.link.send(_TAKEN)
                if is_sums and len(self._connected) > _KEPT_LINKS:
                    with self._lock:
                        self._seen.discard(peer.rank)  # it is not gone, and may have more
                    return False
        except (OSError, ValueError, TypeError, RecursionError):
            return False
        return bool(data) and len(peer.unread) < _LINE_BYTES

    def _take(self, peer: _Peer, message: list[Any]) -> bool:
        """Whether it was sums; the first line only names the rank."""
        if peer.rank is not None:
            interval, *numbers = message
            if len(numbers) != len(Sums._fields):
                raise ValueError("not the sums of a rank")
            self._keep(peer.rank, interval, Sums(*numbers))
            return True
        token, rank = message
        if token != self._token or rank not in range(1, self.world):
            raise ValueError("not a rank of this group")
        with self._lock:
            peer.rank = rank
            self._seen.add(rank)
        return False


class _Peer:
    """A connection to rank 0; its rank is known after the first line."""

    def __init__(self, link: socket.socket) -> None:
        self.link = link
        self.rank: int | None = None
        self.unread = b""


class Sender(Side):
    """The other ranks' end: sends to rank 0, tries again where that fails, and keeps the newest sums meanwhile."""

    def __init__(self, rank: int, world: int, store: Store, say: Say, timeout_s: float, group: object) -> None:
        super().__init__(rank, world, store, say, timeout_s, group)
        self._queue: deque[tuple[int, Sums]] = deque(maxlen=_INTERVALS)
        self._news = threading.Event()
        self._answer_s = min(_ANSWER_S, timeout_s)
        self._ends_at = math.inf
        self._client: Store | None = None
        self._address: dict[str, Any] | None = None
        self._thread.start()

    def post(self, interval: int, sums: Sums) -> None:
        self._queue.append((interval, sums))
        self._news.set()

    def collect(self) -> list[GatheredInterval]:
        return []

    def close(self, timeout_s: float = _CLOSE_S) -> list[GatheredInterval]:
        self._ends_at = time.monotonic() + timeout_s
        self._closing.set()
        self._news.set()
        self._thread.join(timeout_s)
        return []

    def _run(self) -> None:
        link: socket.socket | None = None
        failing_since, pause_s = math.inf, _FIRST_PAUSE_S
        while (message := self._next()) is not None:
            while True:
                try:
                    link = link or self._connect()
                    _send(link, [message[0], *message[1]])
                    failing_since, pause_s = math.inf, _FIRST_PAUSE_S
                    break
                except OSError as error:
                    if link is not None:
                        _hang_up(link)
                        link = None
                    if time.monotonic() >= self._ends_at:
                        return
                    failing_since = min(failing_since, time.monotonic())
                    if time.monotonic() - failing_since >= self._timeout_s:
                        self._warn(
                            f"rank {self.rank} has not reached rank 0 for {self._timeout_s:g} s ({_first_line(error)}):"
                            f" its last {_INTERVALS} intervals wait, training goes on",
                            once="side unreachable",
                        )
                    if self._closing.wait(pause_s):
                        time.sleep(_FIRST_PAUSE_S)
                    pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        if link is not None:
            _hang_up(link)

    def _next(self) -> tuple[int, Sums] | None:
        """Waits for sums to send; None: there will be no more."""
        while not self._queue:
            if self._closing.is_set():
                return None
            self._news.wait()
            self._news.clear()
        return self._queue.popleft()

    def _connect(self) -> socket.socket:
        if self._client is None:
            assert self._store is not None
            self._client, self._store = _own_client(self._store), None
        if self._address is None:
            self._address = _find_address(self._client)
        trouble: OSError = ConnectionError("rank 0 gave no address")
        for name in self._address["names"]:
            try:
                link = socket.create_connection((name, self._address["port"]), self._answer_s)
            except OSError as error:
                trouble = error
                continue
            try:
                _send(link, [self._address["token"], self.rank])
                return link
            except OSError as error:
                _hang_up(link)
                trouble = error
        if not isinstance(trouble, TimeoutError):
            self._address = None  # a later monitor of rank 0 listens elsewhere; one that hangs may come back
        raise trouble


def _send(link: socket.socket, message: list[object]) -> None:
    link.sendall(json.dumps(message).encode() + b"\n")
    if link.recv(1) != _TAKEN:
        raise ConnectionError("rank 0 closed the channel")


def _hang_up(link: socket.socket) -> None:
    """Ends it for the children of a fork too, which hold copies: a loader's workers may outlive a monitor."""
    with suppress(OSError):
        link.shutdown(socket.SHUT_RDWR)
    link.close()


def _own_client(store: Store) -> Store:
    """A connection of our own where the store can have one, so that training never waits for a lock that we hold."""
    inner: Any = store
    while hasattr(inner, "underlying_store"):
        inner = inner.underlying_store
    can_clone = type(inner).__name__ == "TCPStore" and hasattr(store, "clone")
    own: Any = store
    return own.clone() if can_clone else own  # type: ignore[no-any-return]


def _find_address(client: Store) -> dict[str, Any]:
    if not client.check([_KEY]):  # a get of a missing key would wait for it
        raise ConnectionError("rank 0 has no monitor, or it has not begun")
    address: dict[str, object] = json.loads(client.get(_KEY))
    return address


def _listen(backlog: int) -> socket.socket:
    with suppress(OSError, ValueError):  # no IPv6 here, or not both at once
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog)
    return socket.create_server(("", 0), backlog=backlog)


def _own_names() -> list[str]:
    """By which names the other ranks may reach this machine; the first one they used already."""
    master = os.environ.get("MASTER_ADDR", "")
    return [*([master] if _is_here(master) else []), socket.gethostname()]


def _is_here(name: str) -> bool:
    """Only an address of this machine can be bound."""
    try:
        for family, kind, _, _, address in socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM) if name else ():
            with socket.socket(family, kind) as probe:
                probe.bind(address)
                return True
    except OSError:
        pass
    return False


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
