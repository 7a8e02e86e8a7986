"""Tasks go in, results come out: where a run's jobs run, and how many at once: here, on Ray, on Slurm.

A launcher only places tasks; what happens in a task (isolation, time limit, log) is the same everywhere, and so are its
results. Ray and Slurm's submitit are extras, imported when they are used.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, NamedTuple, Protocol

from flopcalc.errors import format_nearest, format_value
from flopcalc.measure.calibrate.provenance import count_gpus
from flopcalc.measure.jobs.job import Lost, Result, RunnerError, Running, Task, make_failure
from flopcalc.measure.jobs.journal import make_folder
from flopcalc.measure.jobs.process import JobRun, dump_task, read_tree_bytes, run_task, wait_for

LAUNCHERS = ("local", "ray", "slurm")
_OPTIONS = {
    "local": set(),
    "ray": {"cpus", "gpus", "ray_address"},
    "slurm": {"cpus", "gpus", "slurm_folder", "slurm_partition", "slurm_minutes", "slurm_cluster"},
}
_ROOM_LIMIT_S = 60.0  # so long an engine may have no machine at all, then the run ends (and can be gone on with)
_KNOCK_S = 10.0  # so long a Ray cluster may take to accept a connection
_STATE_EVERY_S = 30.0  # how often Slurm is asked for the state of its jobs
_SHARED_FOLDER_S = 30.0  # a result's file may show up so much later than the end of its job on a network's disk


class LauncherError(RunnerError):
    """A launcher that cannot do what was asked: unknown, without its library, without a machine."""


class Launcher(Protocol):
    """What the runner needs: `open`, then `start` while there is room and `wait` for events, then `close`."""

    @property
    def slots(self) -> int:
        """Jobs at once at the most, for the time left."""

    @property
    def is_busy(self) -> bool: ...

    def open(self, folder: str, /) -> None:
        """Get ready, for a run in this folder; close() undoes it."""

    def has_room(self) -> bool: ...

    def start(self, task: Task) -> None: ...

    def wait(self, timeout_s: float) -> Sequence[Result | Lost]:
        """What came of the tasks since the last time; at most so long, and shorter if something comes."""

    def look(self) -> Sequence[Running]: ...

    def stop(self) -> None:
        """Begin nothing more; what runs is brought to its end."""

    def close(self) -> None:
        """End everything at once; also after an open() that failed, or none."""


def make_launcher(
    name: str = "local",
    *,
    slots: int | None = None,
    device: str = "auto",
    cpus: int | None = None,
    gpus: int | None = None,
    ray_address: str | None = None,
    slurm_folder: str | None = None,
    slurm_partition: str | None = None,
    slurm_minutes: int | None = None,
    slurm_cluster: str | None = None,
) -> Launcher:
    """The launcher of that name; `cpus` and `gpus` are what each job gets on Ray and Slurm."""
    if name not in LAUNCHERS:
        known = ", ".join(LAUNCHERS)
        raise LauncherError(
            f"launcher {format_value(name)} is not one of {known}.{format_nearest(str(name), LAUNCHERS)}"
        )
    given = {
        "cpus": cpus, "gpus": gpus, "ray_address": ray_address, "slurm_folder": slurm_folder,
        "slurm_partition": slurm_partition, "slurm_minutes": slurm_minutes, "slurm_cluster": slurm_cluster,
    }  # fmt: skip
    for option, value in given.items():
        if value is not None and option not in _OPTIONS[name]:
            owners = " and ".join(owner for owner in LAUNCHERS if option in _OPTIONS[owner])
            raise LauncherError(f"{option} = {format_value(value)} is an option of launcher {owners}, not of {name}")
    for option, value, least in (
        ("slots", slots, 1),
        ("cpus", cpus, 1),
        ("gpus", gpus, 0),
        ("slurm_minutes", slurm_minutes, 1),
    ):
        if value is not None and value < least:
            raise LauncherError(f"{option} = {value} must be at least {least}")
    if slurm_cluster not in (None, "slurm", "local"):
        raise LauncherError(f"slurm_cluster = {format_value(slurm_cluster)} is not one of slurm, local")
    if device == "cpu":
        if gpus:
            raise LauncherError(f"gpus = {gpus} contradicts device 'cpu'")
        gpus = 0
    if name == "ray":
        return Ray(slots, cpus or 1, gpus, ray_address or "auto")
    if name == "slurm":
        needs_gpu = 1 if gpus is None else gpus
        return Slurm(
            slots, cpus or 1, needs_gpu, slurm_folder, slurm_partition, slurm_minutes, slurm_cluster or "slurm"
        )
    return Local(lambda: find_places(slots, device))


# --- here -------------------------------------------------------------------------------------------------------------
class Place(NamedTuple):
    """Where one process at a time may run on this machine."""

    name: str = ""
    env: Mapping[str, str] = {}
    gpu: Any = None  # NVML's handle


class Local:
    """One process per place, all watched by the thread that runs the jobs: nothing waits for a single one of them."""

    def __init__(self, find: Callable[[], Sequence[Place]] = lambda: [Place()]) -> None:
        self.slots = 1
        self._find = find
        self._free: list[Place] = []
        self._running: list[tuple[JobRun, Place]] = []

    @property
    def is_busy(self) -> bool:
        return bool(self._running)

    def open(self, _folder: str) -> None:
        self._free = list(self._find())
        self.slots = len(self._free)

    def has_room(self) -> bool:
        return bool(self._free)

    def start(self, task: Task) -> None:
        place = self._free.pop(0)
        try:
            self._running.append((JobRun(task, place.env), place))
        except BaseException:
            self._free.insert(0, place)
            raise

    def wait(self, timeout_s: float) -> list[Result | Lost]:
        wait_for([run for run, _ in self._running], timeout_s)
        results: list[Result | Lost] = []
        for entry in list(self._running):
            run, place = entry
            results += run.advance()
            if run.is_done:
                self._running.remove(entry)
                self._free.append(place)
        return results

    def look(self) -> list[Running]:
        now = time.monotonic()
        return [
            Running(run.job.id, now - run.began_s, read_tree_bytes(run.guard), _read_gpu_bytes(place.gpu), place.name)
            for run, place in self._running
            if not run.is_ending
        ]

    def stop(self) -> None:
        for run, _ in self._running:
            run.stop()

    def close(self) -> None:
        for run, _ in self._running:
            run.kill()
        while self._running:
            run, place = self._running.pop()
            run.close()
            self._free.append(place)


def find_places(slots: int | None, device: str = "auto") -> list[Place]:
    """One place per free GPU; without GPUs as many as asked for, one if nothing is said, which share the cores."""
    gpus = [] if device == "cpu" else find_gpus()
    if not gpus and device == "cuda":
        raise LauncherError("device 'cuda': there is no GPU, or CUDA_VISIBLE_DEVICES hides it; use device 'cpu'")
    if gpus:
        places = [
            Place(f"GPU {gpu.name}", {"CUDA_VISIBLE_DEVICES": gpu.name}, gpu.handle) for gpu in _choose(gpus, slots)
        ]
    else:
        places = [Place()] * (slots or 1)
    threads = {} if len(places) == 1 or "OMP_NUM_THREADS" in os.environ else _share_threads(len(places))
    return [place._replace(env={**place.env, **threads}) for place in places]


def _choose(gpus: Sequence[Gpu], slots: int | None) -> Sequence[Gpu]:
    if slots is not None:
        if slots > len(gpus):
            raise LauncherError(f"slots = {slots} is more than the GPUs found here ({len(gpus)}): one process each")
        return sorted(gpus, key=lambda gpu: gpu.is_busy is True)[:slots]
    if len(gpus) == 1 and gpus[0].is_busy is None:
        return gpus
    if any(gpu.is_busy is None for gpu in gpus):
        raise LauncherError(
            f"which of the {len(gpus)} GPUs here are free cannot be told without NVML: pip install nvidia-ml-py, "
            "or say how many to use all the same (slots)"
        )
    free = [gpu for gpu in gpus if not gpu.is_busy]
    if not free:
        raise LauncherError(
            f"all {len(gpus)} GPUs are in use by other processes: wait, or say how many to use all the same (slots)"
        )
    return free


def _share_threads(count: int) -> dict[str, str]:
    """Processes that run at once must not fight for the cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {"OMP_NUM_THREADS": str(max(1, cores // count))}


class Gpu(NamedTuple):
    name: str  # as CUDA_VISIBLE_DEVICES takes it
    handle: Any  # NVML's
    is_busy: bool | None  # some process computes on it; None: not known


def find_gpus() -> list[Gpu]:
    """The GPUs that CUDA would show to this process; nothing is allocated on any of them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = None if visible is None else [name.strip() for name in visible.split(",")]
    try:
        nvml = import_module("pynvml")
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        uuids = [nvml.nvmlDeviceGetUUID(handle) for handle in handles]
    except Exception:  # no library, or no driver: CUDA itself says how many there are, not who uses them
        count = count_gpus()
        return [Gpu(name, None, None) for name in (names or list(map(str, range(count))))[:count]]
    # Numbers mean different GPUs to NVML and CUDA, a UUID does not.
    known = dict(zip(uuids, handles, strict=True))
    found: dict[str, Gpu] = {}
    for name in uuids if names is None else names:
        handle = _find_handle(nvml, name, known)
        if handle is None or name in found:
            break  # CUDA shows those before it
        found[name] = Gpu(name, handle, _is_busy(nvml, handle))
    return list(found.values())


def _find_handle(nvml: Any, name: str, known: Mapping[str, Any]) -> Any:
    """What CUDA takes as a name: a number, a UUID or as much of it as is unique, a part of a GPU (MIG)."""
    if name.isdigit():
        return list(known.values())[int(name)] if int(name) < len(known) else None
    if name.startswith("MIG-"):
        with suppress(nvml.NVMLError):
            return nvml.nvmlDeviceGetHandleByUUID(name)
        return None
    matches = [handle for uuid, handle in known.items() if name.startswith("GPU-") and uuid.startswith(name)]
    return matches[0] if len(matches) == 1 else None


def _is_busy(nvml: Any, handle: Any) -> bool:
    try:
        return bool(nvml.nvmlDeviceGetComputeRunningProcesses(handle))
    except nvml.NVMLError:  # not told in some containers
        return False


def _read_gpu_bytes(handle: Any) -> int | None:
    """Memory in use on the whole GPU: NVML's process numbers are not those of a container."""
    if handle is None:
        return None
    with suppress(Exception):
        return int(import_module("pynvml").nvmlDeviceGetMemoryInfo(handle).used)
    return None


# --- elsewhere --------------------------------------------------------------------------------------------------------
class _Remote:
    """What Ray and Slurm share: a task is sent as plain data, run by run_task there, and answered as a whole."""

    def __init__(self, slots: int | None) -> None:
        self._limit = slots
        self._running: dict[Any, tuple[Task, float]] = {}  # the engine's handle -> task, when it was sent

    @property
    def is_busy(self) -> bool:
        return bool(self._running)

    def look(self) -> list[Running]:
        now = time.monotonic()
        return [Running(task.job.id, now - sent_s) for task, sent_s in self._running.values()]

    def _take(self, handle: Any, answer: Mapping[str, Any]) -> list[Result | Lost]:
        task, _ = self._running.pop(handle)
        try:
            with open(task.log, "a", encoding="utf-8") as log:
                log.write(answer["log"])
        except OSError as error:
            raise LauncherError(f"{task.log}: {error.strerror}; what was done is kept, run again to go on") from None
        return [Result(**result) for result in answer["results"]]

    def _fail(self, handle: Any, reason: str, detail: str) -> list[Result | Lost]:
        task, sent_s = self._running.pop(handle)
        return [make_failure(task.job, row, reason, detail, time.monotonic() - sent_s) for row in task.rows]

    def _lose(self, handle: Any, detail: str) -> list[Result | Lost]:
        task, _ = self._running.pop(handle)
        return [Lost(task.job.id, detail)]


class Ray(_Remote):
    """Tasks on a Ray cluster; Ray chooses the node, and a task of a node that dies is sent again."""

    def __init__(self, slots: int | None, cpus: int, gpus: int | None, address: str) -> None:
        super().__init__(slots)
        self._cpus = cpus
        self._gpus = gpus
        self._address = address
        self._is_mine = False
        self._no_room_since: float | None = None

    def open(self, _folder: str) -> None:
        ray = self._ray = _import("ray", "ray")
        if not ray.is_initialized():
            options: dict[str, Any] = {"address": self._address, "log_to_driver": False, "logging_level": "ERROR"}
            if self._address == "local":
                os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a cluster of ours tells nobody
                options["include_dashboard"] = False
            on_end = signal.getsignal(signal.SIGTERM)
            try:
                _knock(self._address)
                ray.init(**options)
            except (OSError, RuntimeError, ValueError) as error:
                raise LauncherError(
                    f"no Ray cluster at address {format_value(self._address)}: {_shorten(error)}. Start one "
                    "(ray start --head), give another address, or 'local' for one on this machine"
                ) from None
            self._is_mine = True
            if on_end is not None and threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, on_end)  # Ray's own prints a stack and aborts
        if self._gpus is None:
            self._gpus = 1 if ray.cluster_resources().get("GPU") else 0
        # A task that is lost is sent again by the runner, as with every launcher.
        self._run = ray.remote(num_cpus=self._cpus, num_gpus=self._gpus, max_retries=0, scheduling_strategy="SPREAD")(
            run_task
        )

    @property
    def slots(self) -> int:
        return min(self._limit or sys.maxsize, self._count_places())

    def _count_places(self) -> int:
        """How many tasks the living nodes hold at once."""
        places = 0
        for node in self._ray.nodes():
            if node["Alive"]:
                resources = node["Resources"]
                counts = [int(resources.get("CPU", 0) // self._cpus)]
                if self._gpus:
                    counts.append(int(resources.get("GPU", 0) // self._gpus))
                places += min(counts)
        return places

    def has_room(self) -> bool:
        places = self._count_places()
        if places == 0:
            now = time.monotonic()
            self._no_room_since = self._no_room_since or now
            if not self._running and now - self._no_room_since > _ROOM_LIMIT_S:
                raise LauncherError(
                    f"no node of the Ray cluster has {self._cpus} CPUs and {self._gpus} GPUs: ask for less per job "
                    "(cpus, gpus), or add a node and run again to go on"
                )
        else:
            self._no_room_since = None
        return len(self._running) < min(self._limit or places, places)

    def start(self, task: Task) -> None:
        self._running[self._run.options(name=task.job.id).remote(dump_task(task))] = (task, time.monotonic())

    def wait(self, timeout_s: float) -> list[Result | Lost]:
        if not self._running:
            time.sleep(timeout_s)
            return []
        errors = self._ray.exceptions
        handles = list(self._running)
        self._ray.wait(handles, num_returns=1, timeout=timeout_s)
        ready, _ = self._ray.wait(handles, num_returns=len(handles), timeout=0)
        events: list[Result | Lost] = []
        for handle in ready:
            try:
                answer = self._ray.get(handle)
            except errors.OutOfMemoryError as error:
                events += self._fail(handle, "oom", _shorten(error))
            except errors.RayTaskError as error:  # run_task itself raised: flopcalc is missing there, its disk is full
                events += self._fail(handle, "exception", _shorten(error))
            except errors.RayError as error:
                events += self._lose(handle, _shorten(error))
            else:
                events += self._take(handle, answer)
        return events

    def stop(self) -> None:
        pass  # no more are sent than can run

    def close(self) -> None:
        for handle in self._running:
            with suppress(Exception):
                self._ray.cancel(handle, force=True)
        self._running.clear()
        if self._is_mine:
            self._is_mine = False
            self._ray.shutdown()


class Slurm(_Remote):
    """One Slurm job per task, by submitit; its folder must be one that the nodes see too."""

    def __init__(
        self, slots: int | None, cpus: int, gpus: int, folder: str | None, partition: str | None,
        minutes: int | None, cluster: str,
    ) -> None:  # fmt: skip
        super().__init__(slots)
        self._cpus = cpus
        self._gpus = gpus
        self._folder = folder
        self._partition = partition
        self._minutes = minutes
        self._cluster = cluster
        self._asked_s = 0.0
        self._submitted = ""  # file with the numbers of the jobs that are in Slurm's hands
        self._ended_s: dict[Any, float] = {}  # jobs that Slurm says have ended, though their result is not there yet

    @property
    def slots(self) -> int:
        return self._limit or sys.maxsize  # as many as Slurm lets run

    def open(self, folder: str) -> None:
        submitit = _import("submitit", "slurm")
        path = os.path.abspath(self._folder or os.path.join(folder, "slurm"))
        make_folder(path)
        try:
            self._executor = submitit.AutoExecutor(folder=path, cluster=self._cluster)
        except (RuntimeError, ValueError) as error:
            raise LauncherError(f"Slurm cannot be used from here: {_shorten(error)}") from None
        self._submitted = os.path.join(path, "submitted")
        self._cancel_leftovers()

    def _cancel_leftovers(self) -> None:
        """A run that was killed left its jobs in the queue: they would write what is run anew."""
        import subprocess

        if self._cluster == "slurm" and os.path.exists(self._submitted):
            with open(self._submitted) as file:
                if jobs := file.read().split():
                    subprocess.run(["scancel", "--quiet", *jobs], check=False)
        self._forget_submitted()

    def _forget_submitted(self) -> None:
        with suppress(FileNotFoundError):
            os.unlink(self._submitted)

    def has_room(self) -> bool:
        return self._limit is None or len(self._running) < self._limit

    def start(self, task: Task) -> None:
        # Twice the start: a worker that dies in it is started once more.
        need_s = 2 * task.job.start_timeout_s + len(task.rows) * task.job.timeout_s
        parameters: dict[str, Any] = {
            "name": task.job.id, "timeout_min": self._minutes or int(need_s // 60) + 5,
            "cpus_per_task": self._cpus, "gpus_per_node": self._gpus,
        }  # fmt: skip
        if self._partition is not None:
            parameters["slurm_partition"] = self._partition
        self._executor.update_parameters(**parameters)
        try:
            job = self._executor.submit(run_task, dump_task(task))
        except Exception as error:  # sbatch's own words are in it
            raise LauncherError(f"Slurm refused {task.job.id}: {_shorten(error)}") from None
        self._running[job] = (task, time.monotonic())
        try:
            with open(self._submitted, "a") as file:
                file.write(f"{job.job_id}\n")
        except OSError as error:
            raise LauncherError(
                f"{self._submitted}: {error.strerror}; what was done is kept, run again to go on"
            ) from None

    def wait(self, timeout_s: float) -> list[Result | Lost]:
        events: list[Result | Lost] = []
        now = time.monotonic()
        asks = now - self._asked_s > _STATE_EVERY_S
        self._asked_s = now if asks else self._asked_s
        for job in list(self._running):
            is_ended = job.done(force_check=asks)  # there is a result, or Slurm says so
            asks = False  # one question is for all jobs
            if is_ended and job.paths.result_pickle.exists():
                events += self._read(job)
            elif is_ended:
                grace_s = 0.0 if self._cluster == "local" else _SHARED_FOLDER_S
                if now - self._ended_s.setdefault(job, now) >= grace_s:
                    events += self._explain(job)
        if not events:
            time.sleep(timeout_s)
        return events

    def _read(self, job: Any) -> list[Result | Lost]:
        error = job.exception()
        if error is not None:  # run_task itself raised, or Slurm's signal ended it
            return self._fail(job, "exception", _shorten(error))
        return self._take(job, job.result())

    def _explain(self, job: Any) -> list[Result | Lost]:
        state = job.state.upper()
        if state.startswith("OUT_OF_ME"):
            return self._fail(job, "oom", f"Slurm job {job.job_id}: {state}")
        if state.startswith("TIMEOUT"):
            return self._fail(job, "timeout", f"Slurm job {job.job_id} reached its own time limit")
        job.cancel(check=False)  # it is submitted anew: should Slurm queue it again by itself, it would run twice
        return self._lose(job, f"Slurm job {job.job_id} ended without a result: {state}")

    def stop(self) -> None:
        for job in list(self._running):
            if job.state.upper() == "PENDING":
                del self._running[job]
                job.cancel(check=False)

    def close(self) -> None:
        for job in self._running:
            with suppress(Exception):
                job.cancel(check=False)
        while self._cluster == "local" and not all(job.done() for job in self._running):
            time.sleep(0.05)  # these are our own children: none is left behind
        self._running.clear()
        self._forget_submitted()


def _knock(address: str) -> None:
    """Ray itself tries for more than a minute, without a word, where nobody listens."""
    import socket

    host, separator, port = address.removeprefix("ray://").rpartition(":")
    if separator and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=_KNOCK_S).close()


def _import(module: str, extra: str) -> Any:
    try:
        return import_module(module)
    except ImportError:
        raise LauncherError(f"launcher {extra} needs {module}: pip install 'flopcalc[{extra}]'") from None


def _shorten(error: BaseException) -> str:
    """The last line that says something, of an engine's long message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[-1][:300].rstrip(".")
