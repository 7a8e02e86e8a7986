"""Where the jobs of a run are executed, and how many at once: on this machine, on Ray, on Slurm."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from importlib import import_module
from inspect import signature
from multiprocessing import connection
from pathlib import Path
from typing import Any

from flopcalc.base.data import describe_install
from flopcalc.base.errors import format_nearest, format_value
from flopcalc.measure.calibrate.provenance import count_gpus
from flopcalc.measure.jobs.job import Job, Json, Result, RunnerError, make_failure, make_result
from flopcalc.measure.jobs.process import JobRun


class LauncherError(RunnerError):
    """A launcher that cannot do what was asked: unknown, without its library, without a machine."""


def make_environments(slots: int | None, device: str = "auto") -> list[dict[str, str]]:
    """The variables of each process that may run at the same time: its GPU, and its share of the cores."""
    gpus = {} if device == "cpu" else find_gpus()
    if not gpus and device == "cuda":
        raise LauncherError("device 'cuda': there is no GPU, or CUDA_VISIBLE_DEVICES hides it; use device 'cpu'")
    if gpus:
        environments = [{"CUDA_VISIBLE_DEVICES": name} for name in _choose(gpus, slots)]
    else:
        environments = [{} for _ in range(slots or 1)]
    if len(environments) > 1 and "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        for variables in environments:
            variables["OMP_NUM_THREADS"] = str(max(1, cores // len(environments)))
    return environments


def _choose(gpus: Mapping[str, bool | None], slots: int | None) -> list[str]:
    if slots is not None:
        if slots > len(gpus):
            raise LauncherError(f"slots = {slots} is more than the GPUs found here ({len(gpus)}): one process each")
        return sorted(gpus, key=lambda name: gpus[name] is True)[:slots]
    if len(gpus) > 1 and None in gpus.values():
        raise LauncherError(
            f"cannot find out which of the {len(gpus)} GPUs are free without NVML: pip install nvidia-ml-py, or say "
            "how many to use anyway (slots)"
        )
    free = [name for name, is_busy in gpus.items() if not is_busy]
    if not free:
        raise LauncherError(
            f"all {len(gpus)} GPUs are in use by other processes: wait, or say how many to use anyway (slots)"
        )
    return free


def find_gpus() -> dict[str, bool | None]:
    """The GPUs that CUDA shows to this process, by names for CUDA_VISIBLE_DEVICES: whether some process uses each.

    None: not known. Nothing is allocated on any of them.
    """
    count = count_gpus()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        nvml = import_module("pynvml")
        nvml.nvmlInit()
        uuids = [
            nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(index)) for index in range(nvml.nvmlDeviceGetCount())
        ]
    except Exception:  # no library or no driver: CUDA knows how many there are, not who uses them
        nvml, uuids = None, list(map(str, range(count)))
    # By default UUIDs: a number may mean different GPUs to NVML and to CUDA.
    names = uuids if visible is None else [name.strip() for name in visible.split(",")]
    return {name: None if nvml is None else _is_busy(nvml, name, uuids) for name in names[:count]}


def _is_busy(nvml: Any, name: str, uuids: Sequence[str]) -> bool:
    uuid = next((uuid for uuid in uuids if uuid.startswith(name)), name)  # CUDA takes the start of one
    try:
        is_number = name.isdigit()
        handle = nvml.nvmlDeviceGetHandleByIndex(int(name)) if is_number else nvml.nvmlDeviceGetHandleByUUID(uuid)
        return bool(nvml.nvmlDeviceGetComputeRunningProcesses(handle))
    except nvml.NVMLError:  # not available in some containers
        return False


POLL_S = 0.25
_MAX_LOSSES = 3  # a job whose machine fails this often is likely the cause
_SLURM_STATES = {"OUT_OF_ME": "oom", "TIMEOUT": "timeout"}  # how they begin, and the reason of the failure
_LOG_BYTES = 1 << 20  # of a log that comes back from another machine


class Local:
    """One process per slot on this machine; by default one, with the environment as it is.

    The runner calls `open`, then `start` while fewer than `slots` are running and `wait` for results, always `close`.
    """

    def __init__(self, slots: int | None = 1, device: str = "cpu") -> None:
        self._asked = slots, device
        self._free: list[dict[str, str]] = []  # environments
        self.running: dict[JobRun, dict[str, str]] = {}
        self.slots = 1

    def open(self, _folder: str) -> None:
        self._free = make_environments(*self._asked)
        self.slots = len(self._free)

    def start(self, job: Job, log: str) -> None:
        variables = self._free.pop(0)
        self.running[JobRun(job, log, variables)] = variables

    def wait(self, timeout_s: float) -> Iterator[Result]:
        """The new results; ends after the timeout if there are none."""
        connection.wait([run.worker.channel for run in self.running], timeout_s)
        for run in list(self.running):
            yield from run.advance()
            if run.is_done:
                self._free.append(self.running.pop(run))

    def stop(self) -> None:
        """Begin nothing more; rows that run are finished."""
        for run in self.running:
            run.is_stopped = True

    def close(self) -> None:
        """End everything at once."""
        while self.running:
            self.running.popitem()[0].close()


# --- other machines ---------------------------------------------------------------------------------------------------
def run_job(job: Job) -> Json:
    """What Ray and Slurm execute: one job in a local process; its results and its log come back."""
    with tempfile.TemporaryDirectory(prefix="flopcalc-") as folder, closing(Local()) as local:
        log = os.path.join(folder, "log")
        local.open(folder)
        local.start(job, log)
        results: list[Result] = []
        while local.running:
            results += local.wait(POLL_S)
        with open(log, "rb") as file:
            file.seek(max(0, os.path.getsize(log) - _LOG_BYTES))
            return {"results": results, "log": file.read().decode("utf-8", "replace")}


class Remote:
    """What Ray and Slurm share: a job is sent as plain data, run by run_job there, and answered as a whole."""

    def __init__(self, slots: int | None) -> None:
        self.slots = slots or sys.maxsize  # then as many as the cluster runs at once
        self.running: dict[Any, tuple[Job, str, float]] = {}  # handle -> job, its log, when it was sent
        self._losses: Counter[str] = Counter()
        self._is_stopping = False

    def open(self, folder: str) -> None:
        raise NotImplementedError

    def _send(self, job: Job) -> Any:
        """Hand the job over; returns a handle."""
        raise NotImplementedError

    def _fetch(self, handle: object) -> Json | None:
        """What run_job returned, or a failure; None while it runs."""
        raise NotImplementedError

    def _cancel(self, handle: object) -> None:
        raise NotImplementedError

    def start(self, job: Job, log: str) -> None:
        self.running[self._send(job)] = job, log, time.monotonic()

    def wait(self, timeout_s: float) -> Iterator[Result]:
        answers = {handle: answer for handle in self.running if (answer := self._fetch(handle))}
        if not answers:
            time.sleep(timeout_s)
        for handle, answer in answers.items():
            yield from self._collect(*self.running.pop(handle), answer)

    def _collect(self, job: Job, log: str, sent_s: float, answer: Json) -> list[Result]:
        with open(log, "a", encoding="utf-8") as file:
            file.write(answer["log"] if "log" in answer else f"{answer['reason']}: {answer['detail']}\n")
        if "results" in answer:
            return list(answer["results"])
        if answer["reason"] == "worker lost":  # its machine failed: nothing is known about the rows
            self._losses[job.id] += 1
            if self._is_stopping:
                return []
            if self._losses[job.id] < _MAX_LOSSES:
                self.start(job, log)
                return []
            answer = {**answer, "detail": f"lost {_MAX_LOSSES} times, last: {answer['detail']}"}
        return [make_result(job, row, answer, time.monotonic() - sent_s) for row in job.rows]

    def stop(self) -> None:
        self._is_stopping = True

    def close(self) -> None:
        for handle in self.running:
            with suppress(Exception):
                self._cancel(handle)
        self.running.clear()


class Ray(Remote):
    """Jobs on a Ray cluster; Ray chooses the node."""

    def __init__(
        self, slots: int | None = None, cpus: int = 1, gpus: int | None = None, ray_address: str = "auto"
    ) -> None:
        super().__init__(slots)
        self._cpus, self._gpus, self._address = cpus, gpus, ray_address
        self._is_mine = False  # the connection was opened here

    def open(self, folder: str) -> None:  # noqa: ARG002
        ray = self._ray = _import("ray", "ray")
        if not ray.is_initialized():
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            try:
                ray.init(address=self._address, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
            except (OSError, RuntimeError, ValueError) as error:
                raise LauncherError(
                    f"no Ray cluster at address {format_value(self._address)}: {_shorten(error)}. Start one "
                    "(ray start --head), give another address, or 'local' for one on this machine"
                ) from None
            self._is_mine = True
        if self._gpus is None:
            self._gpus = 1 if ray.cluster_resources().get("GPU") else 0
        needs = {"CPU": self._cpus, "GPU": self._gpus}
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        rooms = [min(int(node.get(kind, 0) // need) for kind, need in needs.items() if need) for node in nodes]
        if not sum(rooms):
            raise LauncherError(
                f"no node of the Ray cluster has {self._cpus} CPUs and {self._gpus} GPUs: ask for less per job "
                "(cpus, gpus), or add a node"
            )
        self.slots = min(self.slots, sum(rooms))
        # No retries by Ray: it would repeat a job that runs out of memory without end.
        self._run = ray.remote(num_cpus=self._cpus, num_gpus=self._gpus, max_retries=0, scheduling_strategy="SPREAD")(
            run_job
        )

    def _send(self, job: Job) -> Any:
        return self._run.options(name=job.id).remote(job)

    def _fetch(self, handle: object) -> Json | None:
        if not self._ray.wait([handle], timeout=0)[0]:
            return None
        errors = self._ray.exceptions
        try:
            answer: Json = self._ray.get(handle)
            return answer
        except errors.RayError as error:
            is_oom = isinstance(error, errors.OutOfMemoryError)
            raised = isinstance(error, errors.RayTaskError)  # by run_job: flopcalc is missing there, its disk is full
            return make_failure("oom" if is_oom else "exception" if raised else "worker lost", _shorten(error))

    def _cancel(self, handle: object) -> None:
        self._ray.cancel(handle, force=True)

    def close(self) -> None:
        super().close()
        if self._is_mine:
            self._is_mine = False
            self._ray.shutdown()


class Slurm(Remote):
    """Each job is a Slurm job, by submitit; its folder must be on a disk that the nodes share."""

    def __init__(
        self, slots: int | None = None, cpus: int = 1, gpus: int = 1, slurm_folder: str | None = None,
        slurm_partition: str | None = None, slurm_minutes: int | None = None, slurm_cluster: str = "slurm",
    ) -> None:  # fmt: skip
        super().__init__(slots)
        self._folder, self._minutes, self._cluster = slurm_folder, slurm_minutes, slurm_cluster
        self._parameters: Json = {"cpus_per_task": cpus, "gpus_per_node": gpus}
        if slurm_partition is not None:
            self._parameters["slurm_partition"] = slurm_partition

    def open(self, folder: str) -> None:
        submitit = _import("submitit", "slurm")
        path = Path(self._folder or os.path.join(folder, "slurm")).absolute()
        path.mkdir(parents=True, exist_ok=True)
        try:
            self._executor = submitit.AutoExecutor(folder=path, cluster=self._cluster)
        except (RuntimeError, ValueError) as error:
            raise LauncherError(f"Slurm cannot be used from here: {_shorten(error)}") from None
        # A run that was killed left its jobs in the queue and their files here; they would run along with the new ones.
        submitted = {file: file.name.removesuffix("_submitted.pkl") for file in path.glob("*_submitted.pkl")}
        if submitted and self._cluster == "slurm":
            subprocess.run(["scancel", "--quiet", *sorted(submitted.values())], check=False)
        for file in submitted:
            file.unlink()

    def _send(self, job: Job) -> Any:
        # Twice the start: a worker that dies while it starts is started once more.
        need_s = 2 * job.start_timeout_s + len(job.rows) * job.timeout_s
        minutes = self._minutes or int(need_s // 60) + 5
        self._executor.update_parameters(name=job.id, timeout_min=minutes, **self._parameters)
        try:
            return self._executor.submit(run_job, job)
        except Exception as error:  # with the words of sbatch
            raise LauncherError(f"Slurm refused {job.id}: {_shorten(error)}") from None

    def _fetch(self, handle: Any) -> Json | None:
        if not handle.done():
            return None
        error = handle.exception()  # waits some seconds for a file that is late on a shared disk
        state = handle.state.upper()
        if error is None:
            answer: Json = handle.result()
        elif handle.paths.result_pickle.exists():  # run_job itself raised, or a signal of Slurm ended it
            answer = make_failure("exception", _shorten(error))
        else:
            reason = next((reason for word, reason in _SLURM_STATES.items() if state.startswith(word)), "worker lost")
            answer = make_failure(reason, f"Slurm job {handle.job_id} ended without a result: {state}")
            if reason == "worker lost":
                self._cancel(handle)  # Slurm may queue it again by itself: it would run twice
        handle.paths.submitted_pickle.unlink(missing_ok=True)
        return answer

    def _cancel(self, handle: Any) -> None:
        handle.cancel(check=False)
        handle.paths.submitted_pickle.unlink(missing_ok=True)

    def stop(self) -> None:
        super().stop()
        for job in [job for job in self.running if job.state.upper() == "PENDING"]:
            del self.running[job]
            self._cancel(job)


Launcher = Local | Remote
_CLASSES: dict[str, type[Local | Ray | Slurm]] = {"local": Local, "ray": Ray, "slurm": Slurm}
LAUNCHERS = tuple(_CLASSES)
_LEAST = {"slots": 1, "cpus": 1, "gpus": 0, "slurm_minutes": 1}


def make_launcher(name: str = "local", *, device: str = "auto", **options: Any) -> Launcher:
    """The launcher of that name; `cpus` and `gpus` are for each job, on Ray and Slurm."""
    if name not in LAUNCHERS:
        known = ", ".join(LAUNCHERS)
        raise LauncherError(
            f"launcher {format_value(name)} is not one of {known}.{format_nearest(str(name), LAUNCHERS)}"
        )
    given = {option: value for option, value in options.items() if value is not None}
    for option, value in given.items():
        owners = [each for each, kind in _CLASSES.items() if option in signature(kind).parameters]
        if name not in owners:
            raise LauncherError(
                f"{option} = {format_value(value)} is an option of launcher {' and '.join(owners)}, not of {name}"
            )
        if option in _LEAST and value < _LEAST[option]:
            raise LauncherError(f"{option} = {value} must be at least {_LEAST[option]}")
    if name == "local":
        return Local(given.get("slots"), device)
    if device == "cpu" and given.setdefault("gpus", 0):
        raise LauncherError(f"gpus = {given['gpus']} contradicts device 'cpu'")
    return _CLASSES[name](**given)


def _import(module: str, extra: str) -> Any:
    try:
        return import_module(module)
    except ImportError:
        raise LauncherError(f"launcher {extra} needs {module}: {describe_install(extra)}") from None


def _shorten(error: BaseException) -> str:
    """The line of a long message that names the error, else its last one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    named = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return (named or lines)[-1][:300].rstrip(".")
