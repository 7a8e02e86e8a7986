"""Sums of all ranks: arithmetic, the channel in one process, and real ranks that die, hang or have no monitor."""

from __future__ import annotations

import json
import math
import os
import random
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist
from ranks import DEADLINE_S, Rank, Talk, run_ranks

from flopcalc.monitor import ranks as side_module
from flopcalc.monitor.ranks import GatheredInterval, Listener, MeanStep, Sender, Side, Sums, combine, open_side

NAN = math.nan


def make_sums(rank: int, interval: int = 1) -> Sums:
    return Sums(10, 2**70 + rank, 3000 + rank, 400 * interval, 500, 20, NAN, 1.5 + rank, 1.0 + rank, 1e15)


# --- combine ----------------------------------------------------------------------------------------------------------


def test_ranks_become_one_machine() -> None:
    sums = {
        0: Sums(10, 1000, 2000, 300, 400, 20, 5, 10.0, 8.0, 100.0),
        1: Sums(10, 3000, 4000, 100, 400, 20, 0, 11.0, 9.0, 100.0),
        2: Sums(10, 2000, 3000, 200, 400, 20, 1, 12.0, 8.0, 50.0),
    }
    assert combine(GatheredInterval(7, sums, ()), 3) == MeanStep(
        steps=10,
        model_flops=600.0,
        hardware_flops=900.0,
        tokens=60.0,
        padded_tokens=120.0,
        samples=6.0,
        images=0.6,
        wall_s=1.2,
        device_s=0.9,
        peak_flops_per_s=250.0,
        slowest_rank=1,
        stragglers=(1,),
        scope="all 3 ranks",
        reasons=(),
        ranks=3,
    )


def test_a_rank_with_fewer_steps_counts_by_its_mean() -> None:
    sums = {0: Sums(10, 1000, 0, 0, 0, 0, 0, 10.0, NAN, 1.0), 1: Sums(5, 500, 0, 0, 0, 0, 0, 10.0, NAN, 1.0)}
    found = combine(GatheredInterval(1, sums, ()), 2)
    assert (found.steps, found.model_flops, found.wall_s, found.slowest_rank) == (10, 200.0, 2.0, 1)
    assert found.scope == "all 2 ranks, the mean of 5 to 10 steps each"


def test_missing_ranks_are_not_made_up() -> None:
    sums = {rank: Sums(1, 10, 10, 1, 1, 1, 0, 1.0, NAN, 100.0) for rank in (0, 2, 3)}
    sums[1] = Sums(0, 0, 0, 0, 0, 0, 0, 0.0, 0.0, 100.0)  # no step: nothing to say
    found = combine(GatheredInterval(1, sums, (4,)), 5)
    assert (found.scope, found.model_flops, found.peak_flops_per_s) == ("3 of 5 ranks", 30.0, 300.0)


def test_nobody_reported_a_step() -> None:
    found = combine(GatheredInterval(1, {0: Sums(0, 0, 0, 0, 0, 0, 0, 0.0, 0.0, 1.0)}, (1,)), 2)
    assert (found.scope, found.reasons, found.slowest_rank) == ("0 of 2 ranks", ("no rank reported a step",), None)
    assert all(math.isnan(value) for value in found[1:10])


@pytest.mark.parametrize(
    ("field", "ranks", "reason"),
    [
        ("model_flops", (1,), "model FLOPs of rank 1 not known"),
        ("model_flops", (0, 1, 2, 4), "model FLOPs of ranks 0-2, 4 not known"),
        ("wall_s", (0, 2), "step time of ranks 0, 2 not known"),
        ("peak_flops_per_s", (3,), "peak of rank 3 not known"),
    ],
)
def test_what_one_rank_does_not_know_is_not_known(field: str, ranks: tuple[int, ...], reason: str) -> None:
    sums = {rank: Sums(1, 10, 10, 1, 1, 1, 0, 1.0, NAN, 100.0) for rank in range(5)}
    sums |= {rank: sums[rank]._replace(**{field: NAN}) for rank in ranks}
    found = combine(GatheredInterval(1, sums, ()), 5)
    assert math.isnan(getattr(found, field))
    assert found.reasons == (reason,)
    assert found.tokens == 5


@pytest.mark.parametrize(
    ("wall_s", "device_s", "factor", "slowest", "stragglers"),
    [
        ([1, 1, 1, 1], [NAN] * 4, 1.1, 0, ()),
        ([1, 1, 1.2, 1], [NAN] * 4, 1.1, 2, (2,)),
        ([1, 1, 1.2, 1], [NAN] * 4, 1.5, 2, ()),
        ([1, 1, 1, 1], [1, 2, 1, 2.5], 1.1, 3, (1, 3)),  # median 1.5
        ([1, 3, 1, 1], [1, 1, 1, 2], 1.1, 3, (3,)),  # the device's time where all have one
        ([1, 3, 1, 1], [1, 1, 1, NAN], 1.1, 1, (1,)),
        ([1, NAN, 1, 9], [NAN] * 4, 1.1, None, ()),
    ],
)
def test_stragglers(
    wall_s: list[float], device_s: list[float], factor: float, slowest: int | None, stragglers: tuple[int, ...]
) -> None:
    sums = {r: Sums(1, 1, 1, 1, 1, 1, 1, wall_s[r], device_s[r], 1.0) for r in range(4)}
    found = combine(GatheredInterval(1, sums, ()), 4, factor)
    assert (found.slowest_rank, found.stragglers) == (slowest, stragglers)


# --- The channel, all ranks in this process ---------------------------------------------------------------------------


class Group:
    """Stands for the default group; only its identity counts."""


class Said(list[str]):
    def __call__(self, message: str, once: str | None = None) -> None:  # noqa: ARG002
        self.append(message)


class Ends:
    """Makes ends of a channel over one store, and closes them."""

    def __init__(self) -> None:
        self.store = dist.HashStore()
        self.group = Group()
        self.said = Said()
        self.opened: list[Side] = []

    def listener(self, world: int = 3, timeout_s: float = DEADLINE_S) -> Listener:
        found = Listener(0, world, self.store, self.said, timeout_s, self.group)
        self.opened.append(found)
        return found

    def sender(self, rank: int, world: int = 3, timeout_s: float = DEADLINE_S) -> Sender:
        found = Sender(rank, world, self.store, self.said, timeout_s, self.group)
        self.opened.append(found)
        return found


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ends]:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setattr(side_module, "_LONGEST_PAUSE_S", 0.1)
    made = Ends()
    yield made
    for end in made.opened:
        end.close(0.2)
        end._thread.join(DEADLINE_S)
        assert not end._thread.is_alive()


def wait_for(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + DEADLINE_S
    while not (found := condition()):
        assert time.monotonic() < deadline, "did not come about"
        time.sleep(0.005)
    return found


def gather(listener: Side, last: int) -> list[GatheredInterval]:
    found: list[GatheredInterval] = []
    wait_for(lambda: found.extend(listener.collect()) or (found and found[-1].interval >= last))
    return found


def give_up_waiting(listener: Side, interval: int, arrived: set[int]) -> list[GatheredInterval]:
    """What is gathered when the time is over, once all have arrived that will."""
    assert isinstance(listener, Listener)
    wait_for(lambda: set(listener._open.get(interval, ())) == arrived)
    before, listener._timeout_s = listener._timeout_s, 0.0
    try:
        return listener.collect()
    finally:
        listener._timeout_s = before


def test_sums_arrive_exactly(ends: Ends) -> None:
    listener, one, two = ends.listener(), ends.sender(1), ends.sender(2)
    for end in (listener, one, two):
        end.post(1, make_sums(end.rank))
        end.post(2, make_sums(end.rank, 2))
    found = gather(listener, 2)
    assert repr(found) == repr(
        [GatheredInterval(i, {r: make_sums(r, i) for r in found[i - 1].sums}, ()) for i in (1, 2)]
    )  # NaN is not equal to itself
    assert all(set(each.sums) == {0, 1, 2} for each in found)
    assert type(found[0].sums[2].model_flops) is int
    assert (one.collect(), listener.collect(), ends.said) == ([], [], [])


def test_a_silent_rank_is_missing_named_once_and_used_when_it_is_back(ends: Ends) -> None:
    listener, one, two = ends.listener(), ends.sender(1), ends.sender(2)
    for interval in (1, 2):
        listener.post(interval, make_sums(0))
        one.post(interval, make_sums(1))
        [found] = give_up_waiting(listener, interval, {0, 1})
        assert (found.interval, sorted(found.sums), found.missing) == (interval, [0, 1], (2,))
    for interval in (1, 2, 3):  # the first two are too late
        two.post(interval, make_sums(2))
    listener.post(3, make_sums(0))
    one.post(3, make_sums(1))
    [found] = gather(listener, 3)
    assert (found.interval, found.missing) == (3, ())
    assert ends.said == [
        "rank 2 of 3 sent no sums in time (ended, hung, slow, or without a monitor): MFU is of the ranks that reported,"
        " as perf/scope says"
    ]


def test_a_rank_that_is_ahead_will_not_send_what_it_left_out(ends: Ends) -> None:
    listener, one = ends.listener(world=2), ends.sender(1, world=2)
    listener.post(1, make_sums(0))
    listener.post(2, make_sums(0))
    one.post(2, make_sums(1))
    assert [(each.interval, each.missing) for each in gather(listener, 2)] == [(1, (1,)), (2, ())]


def test_time_runs_from_the_first_that_is_heard(ends: Ends) -> None:
    listener = ends.listener(timeout_s=0.05)
    assert listener.collect() == []
    listener.post(4, make_sums(0))
    [found] = gather(listener, 4)
    assert (found.interval, list(found.sums), found.missing) == (4, [0], (1, 2))


def test_rank_0_may_be_the_missing_one(ends: Ends) -> None:
    listener, one = ends.listener(world=2), ends.sender(1, world=2)
    one.post(1, make_sums(1))
    [found] = give_up_waiting(listener, 1, {1})
    assert (list(found.sums), found.missing) == ([1], (0,))


def test_open_intervals_are_bounded(ends: Ends) -> None:
    listener = ends.listener(world=2)
    for interval in range(300):
        listener.post(interval, make_sums(0))
    assert [each.interval for each in listener.collect()] == list(range(300 - side_module._INTERVALS))


def test_a_rank_keeps_the_newest_while_rank_0_is_away(ends: Ends) -> None:
    one = ends.sender(1, world=2, timeout_s=0.05)
    for interval in range(1000):
        one.post(interval, make_sums(1, interval))
    wait_for(lambda: ends.said)
    assert ends.said[0] == (
        "rank 1 has not reached rank 0 for 0.05 s (ConnectionError: rank 0 has no monitor, or it has not begun): its"
        " last 256 intervals wait, training goes on"
    )
    one.post(1000, make_sums(1, 1000))
    listener = ends.listener(world=2)
    wait_for(lambda: 1000 in listener._open)
    assert len(listener._open) <= side_module._INTERVALS + 1  # the one in hand besides those that wait
    assert listener._open[1000][1].tokens == 400_000


def test_close_waits_for_what_is_under_way(ends: Ends) -> None:
    listener, one, two = ends.listener(), ends.sender(1), ends.sender(2)
    one.post(1, make_sums(1))
    wait_for(lambda: 1 in listener._open)
    listener.post(1, make_sums(0))
    listener.post(2, make_sums(0))
    found: list[GatheredInterval] = []
    closing = threading.Thread(target=lambda: found.extend(listener.close(DEADLINE_S)))
    closing.start()
    one.post(2, make_sums(1))
    two.post(2, make_sums(2))  # its first
    closing.join(DEADLINE_S)
    assert [(each.interval, each.missing) for each in found] == [(1, (2,)), (2, ())]


def test_close_is_bounded(ends: Ends) -> None:
    listener, one = ends.listener(), ends.sender(1, timeout_s=0.05)
    listener.post(1, make_sums(0))
    assert [(each.interval, each.missing) for each in listener.close(0.05)] == [(1, (1, 2))]
    one.post(1, make_sums(1))
    assert one.close(0.05) == []


def test_close_does_not_wait_for_a_rank_that_left(ends: Ends) -> None:
    listener, one = ends.listener(world=2), ends.sender(1, world=2)
    one.post(1, make_sums(1))
    one.close(DEADLINE_S)  # sends what it has
    listener.post(1, make_sums(0))
    listener.post(2, make_sums(0))
    wait_for(lambda: not listener._connected)
    began = time.monotonic()
    found = listener.close(DEADLINE_S)
    assert time.monotonic() - began < DEADLINE_S
    assert [(each.interval, each.missing) for each in found] == [(1, ()), (2, (1,))]


def test_a_new_monitor_of_rank_0_is_found(ends: Ends) -> None:
    first, one = ends.listener(world=2), ends.sender(1, world=2)
    one.post(1, make_sums(1))
    wait_for(lambda: 1 in first._open)
    first.close()
    one.post(2, make_sums(1))  # the address in the store is of the one before
    second = ends.listener(world=2)
    second.post(2, make_sums(0))
    [found] = gather(second, 2)
    assert (found.interval, found.missing) == (2, ())


def test_more_ranks_than_connections(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_module, "_KEPT_LINKS", 1)
    monkeypatch.setattr(side_module, "_MOST_LINKS", 3)
    listener = ends.listener(world=9)
    senders = [ends.sender(rank, world=9) for rank in range(1, 9)]
    for interval in (1, 2, 3):
        for end in (listener, *senders):
            end.post(interval, make_sums(end.rank, interval))
        if interval < 3:
            [found] = gather(listener, interval)
            assert (sorted(found.sums), found.missing) == (list(range(9)), ())
            assert len(listener._connected) <= 3
    [found] = listener.close(DEADLINE_S)  # who was sent away is waited for all the same
    assert found.missing == ()
    assert ends.said == []


@pytest.mark.heavy
def test_a_thousand_ranks_some_of_them_late_some_dead(ends: Ends) -> None:
    """Every sum arrives once, in the order of intervals, over far fewer connections than ranks."""
    world, late, dead, rng = 1024, {9, 512, 1023}, {5, 700}, random.Random("ranks")
    listener = ends.listener(world)
    senders = [ends.sender(rank, world) for rank in range(1, world)]

    def post(interval: int, left_out: set[int]) -> None:
        for end in rng.sample([listener, *senders], world):
            if end.rank not in left_out:
                end.post(interval, make_sums(end.rank, interval))

    post(1, set())
    [first] = gather(listener, 1)
    for rank in dead:
        senders[rank - 1].close(0.2)
    post(2, dead | late)
    post(3, dead | late)
    assert listener.collect() == []  # those that are late may still come
    for interval in (2, 3):
        for rank in late:
            senders[rank - 1].post(interval, make_sums(rank, interval))
    alive = set(range(world)) - dead
    wait_for(lambda: set(listener._open.get(2, ())) == alive)
    found = [first, *give_up_waiting(listener, 3, alive)]
    assert [each.interval for each in found] == [1, 2, 3]
    for each in found:
        ranks = sorted(each.sums)
        assert ranks == (list(range(world)) if each.interval == 1 else sorted(alive))
        assert repr([each.sums[rank] for rank in ranks]) == repr([make_sums(rank, each.interval) for rank in ranks])
    assert [each.missing for each in found] == [(), (5, 700), (5, 700)]
    assert [combine(each, world).scope for each in found] == ["all 1024 ranks", *["1022 of 1024 ranks"] * 2]
    assert len(listener._connected) <= side_module._MOST_LINKS
    assert [message[:39] for message in ends.said] == ["ranks 5, 700 of 1024 sent no sums in ti"]


def test_copies_of_the_sockets_hold_nobody(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader's workers are forked with them, and may live on."""
    copies: list[socket.socket] = []
    listen, connect = side_module._listen, socket.create_connection

    def keep_a_copy(make: Callable[..., socket.socket]) -> Callable[..., socket.socket]:
        def run(*args: Any) -> socket.socket:
            made = make(*args)
            copies.append(made.dup())
            return made

        return run

    monkeypatch.setattr(side_module, "_listen", keep_a_copy(listen))
    monkeypatch.setattr(socket, "create_connection", keep_a_copy(connect))
    first, one = ends.listener(world=2), ends.sender(1, world=2)
    one.post(1, make_sums(1))
    wait_for(lambda: 1 in first._open)
    port = read_address(ends.store)["port"]
    first.close()
    with pytest.raises(ConnectionRefusedError):
        connect(("127.0.0.1", port), DEADLINE_S)
    second = ends.listener(world=2)
    second.post(2, make_sums(0))
    one.post(2, make_sums(1))
    assert gather(second, 2)[0].missing == ()
    one.close(DEADLINE_S)
    wait_for(lambda: not second._connected)
    for copy in copies:
        copy.close()


def read_address(store: Any) -> dict[str, Any]:
    wait_for(lambda: store.check([side_module._KEY]))
    found: dict[str, Any] = json.loads(store.get(side_module._KEY))
    return found


@pytest.mark.parametrize(
    "lines",
    [
        b"GET / HTTP/1.1\r\n",
        b'["not the token", 1]\n',
        b"x" * 70_000,
        b"{}\n",
        b"\xff\n",
        b"1\n",
        b"[" * 60_000 + b"\n",
    ],
)
def test_strangers_are_sent_away(ends: Ends, lines: bytes) -> None:
    listener, one = ends.listener(world=2), ends.sender(1, world=2)
    port = read_address(ends.store)["port"]
    with socket.create_connection(("127.0.0.1", port), DEADLINE_S) as stranger:
        try:
            stranger.sendall(lines)
            answer = stranger.recv(1)
        except ConnectionError:
            answer = b""
        assert answer == b""
    listener.post(1, make_sums(0))
    one.post(1, make_sums(1))
    assert gather(listener, 1)[0].missing == ()


@pytest.mark.parametrize(
    "line", [b"[1, 2]\n", b'{"a": 1}\n', b"[" + b"1," * 11 + b"1]\n", b'["x", ' + b"1," * 9 + b"1]\n"]
)
def test_a_rank_that_talks_nonsense_is_dropped(ends: Ends, line: bytes) -> None:
    listener = ends.listener(world=2)
    address = read_address(ends.store)
    with socket.create_connection(("127.0.0.1", address["port"]), DEADLINE_S) as link:
        link.sendall(json.dumps([address["token"], 1]).encode() + b"\n")
        assert link.recv(1) == b"k"
        link.sendall(line)
        assert link.recv(1) == b""
    assert (listener._open, ends.said) == ({}, [])


class BrokenStore:
    """Its server is gone."""

    def set(self, key: str, value: str, /) -> None:
        raise RuntimeError(f"no connection for {key}\n{value}")

    def check(self, keys: list[str], /) -> bool:
        raise RuntimeError(f"no connection for {keys[0]}\nframe 0\nframe 1")

    def get(self, key: str, /) -> bytes:
        raise AssertionError(key)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_store_that_is_gone_ends_the_channel_in_words(rank: int) -> None:
    said = Said()
    group = Group()
    side = (Listener if rank == 0 else Sender)(rank, 2, BrokenStore(), said, DEADLINE_S, group)
    side.post(1, make_sums(rank))
    side._thread.join(DEADLINE_S)
    assert said == [
        f"rank {rank}: the channel between the ranks ended (RuntimeError: no connection for flopcalc/side); training"
        " goes on, MFU is of the ranks that still report"
    ]
    side.post(2, make_sums(rank))
    found = side.close()
    assert [each.interval for each in found] == ([1, 2] if rank == 0 else [])


def test_a_warning_that_is_an_error_stops_nothing(ends: Ends) -> None:
    def refuse(message: str, once: str | None = None) -> None:
        raise RuntimeWarning(message, once)

    one = Sender(1, 2, ends.store, refuse, 0.01, ends.group)
    ends.opened.append(one)
    one.post(1, make_sums(1))
    wait_for(lambda: one._queue == type(one._queue)())  # in hand, and refused
    listener = Listener(0, 2, ends.store, refuse, 0.01, ends.group)
    ends.opened.append(listener)
    wait_for(lambda: 1 in listener._newest.values())
    listener.post(5, make_sums(0))
    wait_for(lambda: [each for each in listener.collect() if each.interval == 5])


@pytest.mark.parametrize("is_here", [True, False])
def test_where_rank_0_is_found(monkeypatch: pytest.MonkeyPatch, is_here: bool) -> None:
    # 192.0.2.0/24 is for documentation: no machine has an address of it
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1" if is_here else "192.0.2.1")
    monkeypatch.setattr(socket, "gethostname", lambda: "here")
    assert side_module._own_names() == (["127.0.0.1", "here"] if is_here else ["here"])
    monkeypatch.delenv("MASTER_ADDR")
    assert side_module._own_names() == ["here"]


def test_a_second_name_is_tried(ends: Ends) -> None:
    listener, one = ends.listener(world=2), ends.sender(1, world=2)
    address = read_address(ends.store)
    ends.store.set(side_module._KEY, json.dumps(address | {"names": ["name.invalid", "127.0.0.1"]}))
    listener.post(1, make_sums(0))
    one.post(1, make_sums(1))
    assert gather(listener, 1)[0].missing == ()


def test_no_group_no_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    said = Said()
    assert open_side(said) is None
    monkeypatch.delitem(sys.modules, "torch.distributed")
    assert open_side(said) is None
    assert said == []


# --- Real ranks -------------------------------------------------------------------------------------------------------


def obey(talk: Talk, store: Any, with_monitor: tuple[int, ...]) -> None:
    """One rank that does what the test says."""
    said = Said()
    side = open_side(said, DEADLINE_S) if dist.get_rank() in with_monitor else None
    while True:
        order, *values = talk.hear()
        match order:
            case "post":
                assert side is not None
                for interval in values:
                    side.post(interval, make_sums(side.rank, interval))
                talk.say(None)
            case "gather":
                assert side is not None
                talk.say(gather(side, values[0]))
            case "give up":
                assert side is not None
                talk.say(give_up_waiting(side, *values))
            case "said":
                talk.say(list(said))
            case "wait for a word":
                talk.say(wait_for(lambda: list(said)))
            case "less patience":
                assert isinstance(side, Sender)
                side._timeout_s = side._answer_s = values[0]
                talk.say(None)
            case "all reduce":
                import torch

                number = torch.tensor([1.0 + dist.get_rank()])
                dist.all_reduce(number)
                talk.say(number.item())
            case "new group":
                assert side is not None
                rank, world, before = dist.get_rank(), dist.get_world_size(), side
                current = [before.is_current()]
                dist.destroy_process_group()
                current.append(before.is_current())
                again = dist.PrefixStore("again", store)  # gloo would find its old peers there
                dist.init_process_group("gloo", store=again, rank=rank, world_size=world)
                current.append(before.is_current())
                before.close()
                side = open_side(said, DEADLINE_S)
                assert side is not None
                talk.say([*current, side.is_current()])
            case "close":
                assert side is not None
                talk.say(side.close(*values))
            case "die":
                os._exit(3)


def tell_all(ranks: list[Rank], *message: Any) -> list[Any]:
    for rank in ranks:
        rank.tell(*message)
    return [rank.hear() for rank in ranks]


def describe(found: list[GatheredInterval]) -> list[tuple[int, list[int], tuple[int, ...]]]:
    return [(each.interval, sorted(each.sums), each.missing) for each in found]


def test_four_ranks_one_of_them_hangs_one_dies() -> None:
    with run_ranks(4, obey, (0, 1, 2, 3)) as ranks:
        tell_all(ranks, "post", 1, 2)
        found = ranks[0].ask("gather", 2)
        assert describe(found) == [(1, [0, 1, 2, 3], ()), (2, [0, 1, 2, 3], ())]
        assert found[1].sums[3].model_flops == 2**70 + 3
        assert combine(found[1], 4).scope == "all 4 ranks"

        ranks[2].stop()
        tell_all([ranks[0], ranks[1], ranks[3]], "post", 3)
        assert describe(ranks[0].ask("give up", 3, {0, 1, 3})) == [(3, [0, 1, 3], (2,))]
        ranks[2].go_on()
        tell_all(ranks, "post", 4)
        assert describe(ranks[0].ask("gather", 4)) == [(4, [0, 1, 2, 3], ())]

        ranks[3].tell("die")
        ranks[3].process.join(DEADLINE_S)
        for interval in (5, 6):
            tell_all(ranks[:3], "post", interval)
            [gathered] = ranks[0].ask("give up", interval, {0, 1, 2})
            assert gathered.missing == (3,)
            assert combine(gathered, 4).scope == "3 of 4 ranks"
        assert [text.split(" sent ")[0] for text in ranks[0].ask("said")] == ["rank 2 of 4", "rank 3 of 4"]
        assert tell_all(ranks[1:3], "said") == [[], []]

        tell_all(ranks[:3], "post", 7)
        assert describe(tell_all(ranks[:3], "close", DEADLINE_S)[0]) == [(7, [0, 1, 2], (3,))]


@pytest.mark.parametrize("end", [pytest.param("stopped", marks=pytest.mark.heavy), "killed"])
def test_rank_0_is_gone(end: str) -> None:
    """The group's store goes with it: in this process both are rank 0's."""
    with run_ranks(3, obey, (0, 1, 2)) as ranks:
        tell_all(ranks, "post", 1)
        assert describe(ranks[0].ask("gather", 1)) == [(1, [0, 1, 2], ())]
        tell_all(ranks[1:], "less patience", 0.05)
        if end == "stopped":
            ranks[0].stop()
        else:
            ranks[0].kill()
        tell_all(ranks[1:], "post", *range(2, 1000))  # answered, so no post waits for rank 0
        for rank in ranks[1:]:
            [text, *_] = rank.ask("wait for a word")
            assert "has not reached rank 0 for 0.05 s" in text or "the channel between the ranks ended" in text
        if end == "stopped":
            ranks[0].go_on()
            ranks[0].tell("post", 1000)
            ranks[0].hear()
            tell_all(ranks[1:], "post", 1000)
            assert describe(ranks[0].ask("gather", 1000))[-1] == (1000, [0, 1, 2], ())
            ranks[0].stop()
        tell_all(ranks[1:], "post", 1001)
        assert tell_all(ranks[1:], "close", 0.1) == [[], []]


def test_a_monitor_on_rank_0_only() -> None:
    with run_ranks(3, obey, (0,)) as ranks:
        ranks[0].ask("post", 1)
        assert describe(ranks[0].ask("give up", 1, {0})) == [(1, [0], (1, 2))]
        assert [text.split(" sent ")[0] for text in ranks[0].ask("said")] == ["ranks 1-2 of 3"]
        assert tell_all(ranks, "all reduce") == [6.0, 6.0, 6.0]
        assert ranks[0].ask("close") == []


@pytest.mark.heavy
def test_a_monitor_on_other_ranks_only() -> None:
    with run_ranks(2, obey, (1,)) as ranks:
        ranks[1].ask("less patience", 0.05)
        ranks[1].ask("post", 1)
        assert "rank 0 has no monitor" in ranks[1].ask("wait for a word")[0]
        assert tell_all(ranks, "all reduce") == [3.0, 3.0]
        assert ranks[1].ask("close") == []


def test_a_group_made_anew_has_a_channel_of_its_own() -> None:
    with run_ranks(2, obey, (0, 1)) as ranks:
        tell_all(ranks, "post", 1)
        assert describe(ranks[0].ask("gather", 1)) == [(1, [0, 1], ())]
        assert tell_all(ranks, "new group") == [[True, True, False, True]] * 2
        tell_all(ranks, "post", 1)
        assert describe(ranks[0].ask("gather", 1)) == [(1, [0, 1], ())]
        assert tell_all(ranks, "said") == [[], []]
