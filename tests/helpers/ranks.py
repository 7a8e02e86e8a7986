"""A function and a number of ranks go in; real gloo processes on this machine come out, and are gone afterwards."""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

DEADLINE_S = 300.0  # for what takes a second where nothing else runs
_PRELOADED = [  # imported once, not once a rank
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
]


class Rank:
    """One process, seen from the test: what it sends, what it is told."""

    def __init__(self, process: Any, pipe: Connection) -> None:
        self.process = process
        self._pipe = pipe

    def tell(self, *message: Any) -> None:
        self._pipe.send(message)

    def hear(self) -> Any:
        if not self._pipe.poll(DEADLINE_S):
            raise TimeoutError(f"nothing heard from process {self.process.pid} for {DEADLINE_S:g} s")
        kind, value = self._pipe.recv()
        if kind == "error":
            raise AssertionError(f"a rank failed:\n{value}")
        return value

    def ask(self, *message: Any) -> Any:
        self.tell(*message)
        return self.hear()

    def stop(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.join(DEADLINE_S)


class Talk:
    """The test, seen from a rank."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def say(self, value: Any) -> None:
        self._pipe.send(("value", value))

    def hear(self) -> Any:
        return self._pipe.recv()


@contextmanager
def run_ranks(world: int, function: Callable[..., Any], *arguments: Any) -> Iterator[list[Rank]]:
    """Runs function(talk, store, *arguments) on every rank of a gloo group; what it returns is heard last."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    ranks: list[Rank] = []
    try:
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_run, args=(theirs, rank, world, function, arguments), daemon=True)
            process.start()
            theirs.close()
            ranks.append(Rank(process, ours))
        port = ranks[0].hear()
        for rank in ranks[1:]:
            rank.tell(port)
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()


def _run(pipe: Connection, rank: int, world: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    talk = Talk(pipe)
    wait = timedelta(seconds=DEADLINE_S)
    try:
        if rank == 0:  # a port of its own choice: one found free before may be taken by then
            store = dist.TCPStore("127.0.0.1", 0, world, True, wait, wait_for_workers=False)
            talk.say(store.port)
        else:
            store = dist.TCPStore("127.0.0.1", talk.hear()[0], world, False, wait)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=wait)
        talk.say(function(talk, store, *arguments))
    except BaseException:
        pipe.send(("error", traceback.format_exc()))
    finally:
        # Gloo's and the store's own threads are not waited for: a peer may be gone.
        os._exit(0)
