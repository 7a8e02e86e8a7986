"""GPUs of this machine; Ray, with a stand-in and for real; submitit, locally and with a stand-in for Slurm."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import runner_jobs
from runner_jobs import LIMIT_S, read_pids, wait_gone, wait_until

from flopcalc.measure.calibrate.provenance import count_gpus
from flopcalc.measure.jobs import launchers
from flopcalc.measure.jobs.job import Job, Result
from flopcalc.measure.jobs.launchers import LauncherError, Local, make_environments, make_launcher
from flopcalc.measure.jobs.runner import run_jobs

Json = dict[str, Any]


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(runner_jobs.HERE)
    # For the processes of Ray and submitit, too.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))


def make_job(name: str, do: str, folder: Path, **row: Any) -> Job:
    args = {"name": name, "folder": str(folder)}
    return Job(name, runner_jobs.CALL, args, {"run": {"do": do, **row}}, LIMIT_S)


# --- which, and with what -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "slrm"}, "launcher 'slrm' is not one of local, ray, slurm. Did you mean slurm?"),
        ({"name": "local", "cpus": 2}, "cpus = 2 is an option of launcher ray and slurm, not of local"),
        ({"name": "ray", "slurm_folder": "x"}, "slurm_folder = 'x' is an option of launcher slurm, not of ray"),
        ({"name": "slurm", "ray_address": "y"}, "ray_address = 'y' is an option of launcher ray, not of slurm"),
        ({"name": "local", "slots": 0}, "slots = 0 must be at least 1"),
        ({"name": "slurm", "slurm_minutes": 0}, "slurm_minutes = 0 must be at least 1"),
        ({"name": "ray", "gpus": -1}, "gpus = -1 must be at least 0"),
        ({"name": "ray", "gpus": 1, "device": "cpu"}, "gpus = 1 contradicts device 'cpu'"),
    ],
)
def test_what_does_not_fit_is_said(arguments: Json, message: str) -> None:
    with pytest.raises(LauncherError) as caught:
        make_launcher(**arguments)
    assert str(caught.value) == message


@pytest.mark.parametrize(("name", "library"), [("ray", "ray"), ("slurm", "submitit")])
def test_a_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, library: str) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(LauncherError, match=rf"launcher {name} needs {library}: pip install 'flopcalc\[{name}\]'"):
        run_jobs([make_job("a", "tell", tmp_path)], str(tmp_path / "run"), launcher=make_launcher(name))


class FakeNvml(SimpleNamespace):
    """Four GPUs; someone computes on the second."""

    class NVMLError(Exception):
        pass

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetCount(self) -> int:
        return 4

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index >= 4:
            raise self.NVMLError
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        known = {"MIG-7": 7, **{f"GPU-{index}f": index for index in range(4)}}
        if uuid not in known:
            raise self.NVMLError
        return known[uuid]

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}f"

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[int]:
        return [4711] if handle in self.busy else []


def show_gpus(monkeypatch: pytest.MonkeyPatch, count: int, visible: str | None = None) -> None:
    """As many as CUDA counts."""
    monkeypatch.setattr(launchers, "count_gpus", lambda: count)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml(busy={1})
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    show_gpus(monkeypatch, 4)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: range(12))
    return fake


@pytest.mark.parametrize(
    ("visible", "count", "slots", "devices", "threads"),
    [
        (None, 4, None, ["GPU-0f", "GPU-2f", "GPU-3f"], "4"),  # the free ones, by names that mean the same to CUDA
        (None, 4, 2, ["GPU-0f", "GPU-2f"], "6"),
        (None, 4, 4, ["GPU-0f", "GPU-2f", "GPU-3f", "GPU-1f"], "3"),  # asked for: also the one that is in use
        (None, 4, 1, ["GPU-0f"], None),  # alone: torch's own default
        ("3,1,2", 3, None, ["3", "2"], "6"),  # the user's choice, in the user's words and order
        (" 2 , 0 ", 2, None, ["2", "0"], "6"),
        ("GPU-2,GPU-1,GPU-0f", 3, None, ["GPU-2", "GPU-0f"], "6"),  # as much of a UUID as is unique
        ("MIG-7,MIG-8", 1, None, ["MIG-7"], None),
        ("0,2,-1,3", 2, None, ["0", "2"], "6"),  # CUDA stops at -1, and counts two
    ],
)
@pytest.mark.usefixtures("nvml")
def test_one_process_per_free_gpu(
    monkeypatch: pytest.MonkeyPatch,
    visible: str | None,
    count: int,
    slots: int | None,
    devices: list[str],
    threads: str | None,
) -> None:
    show_gpus(monkeypatch, count, visible)
    environments = make_environments(slots)
    assert [variables["CUDA_VISIBLE_DEVICES"] for variables in environments] == devices
    assert {variables.get("OMP_NUM_THREADS") for variables in environments} == {threads}


@pytest.mark.parametrize(
    ("device", "slots", "count", "threads"), [("cpu", None, 1, None), ("cpu", 3, 3, "4"), ("auto", 24, 24, "1")]
)
@pytest.mark.usefixtures("nvml")
def test_processes_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, device: str, slots: int | None, count: int, threads: str | None
) -> None:
    if device == "auto":
        show_gpus(monkeypatch, 0, "-1")
    expected = {} if threads is None else {"OMP_NUM_THREADS": threads}
    assert make_environments(slots, device) == [expected] * count


def test_the_threads_of_the_user_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert make_environments(2, "cpu") == [{}, {}]


def test_gpus_that_are_not_there_or_not_free(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LauncherError, match=r"slots = 5 is more than the GPUs found here \(4\): one process each"):
        make_environments(5)
    nvml.busy = {0, 1, 2, 3}
    with pytest.raises(LauncherError, match="all 4 GPUs are in use by other processes"):
        make_environments(None)
    show_gpus(monkeypatch, 0, "")
    with pytest.raises(LauncherError, match="device 'cuda': there is no GPU, or CUDA_VISIBLE_DEVICES hides it"):
        make_environments(None, "cuda")


@pytest.mark.parametrize(
    ("visible", "count", "slots", "devices"),
    [
        (None, 1, None, ["0"]),
        ("GPU-5,-1", 1, None, ["GPU-5"]),
        (None, 4, 2, ["0", "1"]),
        ("3,1,9", 2, 2, ["3", "1"]),
        (None, 4, None, "cannot find out which of the 4 GPUs are free without NVML: pip install nvidia-ml-py"),
        (None, 1, 2, "slots = 2 is more than the GPUs found here (1): one process each"),
        ("", 0, None, "device 'cuda': there is no GPU, or CUDA_VISIBLE_DEVICES hides it"),
    ],
)
def test_gpus_without_nvml_are_those_that_cuda_counts(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, count: int, slots: int | None, devices: list[str] | str
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    show_gpus(monkeypatch, count, visible)
    if isinstance(devices, str):
        with pytest.raises(LauncherError) as caught:
            make_environments(slots, "cuda")
        assert str(caught.value).startswith(devices)
    else:
        assert [variables["CUDA_VISIBLE_DEVICES"] for variables in make_environments(slots)] == devices


@pytest.mark.usefixtures("nvml")
def test_each_process_gets_its_gpu_and_its_threads(tmp_path: Path) -> None:
    jobs = [make_job(name, "meet", tmp_path, others="ab") for name in "ab"]
    jobs += [make_job(name, "tell", tmp_path) for name in "cd"]
    results = run_jobs(jobs, str(tmp_path / "run"), launcher=Local(2, "auto")).results
    assert [r.is_ok for r in results] == [True] * 4
    assert {r.data["env"]["CUDA_VISIBLE_DEVICES"] for r in results[2:]} <= {"GPU-0f", "GPU-2f"}
    assert {r.data["env"]["OMP_NUM_THREADS"] for r in results[2:]} == {"6"}


@pytest.mark.gpu
def test_a_gpu_is_filled_and_free_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if count_gpus() == 0:
        pytest.skip("needs a CUDA device")
    monkeypatch.setattr(launchers, "_is_busy", lambda *_: False)
    shares = {"before": 0.0, "half": 0.5, "too much": 1.1, "after": 0.0}
    jobs = [make_job(name, "fill_device", tmp_path, share=share) for name, share in shares.items()]
    results = {r.job: r for r in run_jobs(jobs, str(tmp_path / "run"), launcher=Local(1, "cuda")).results}
    assert {name: r.reason for name, r in results.items()} == {**dict.fromkeys(shares), "too much": "oom"}
    assert "OutOfMemoryError" in str(results["too much"].detail)
    assert results["after"].data["free"] > results["before"].data["free"] - (64 << 20)


# --- Ray ------------------------------------------------------------------------------------------------------------
class FakeRay(ModuleType):
    """What the launcher uses of Ray; a task runs at once, in this process, or meets the end of its name."""

    class Exceptions(SimpleNamespace):
        class RayError(Exception): ...

        class OutOfMemoryError(RayError): ...

        class RayTaskError(RayError): ...

        class NodeDiedError(RayError): ...

    def __init__(self, nodes: list[Json]) -> None:
        super().__init__("ray")
        self.exceptions = self.Exceptions
        self.calls: list[Any] = []
        self._nodes = nodes

    def is_initialized(self) -> bool:
        return False

    def init(self, **options: Any) -> None:
        self.calls.append(("init", options["address"]))
        if options["address"] == "nowhere:1":
            raise ConnectionError("long story\nCould not find any running Ray instance")

    def nodes(self) -> list[Json]:
        return self._nodes

    def cluster_resources(self) -> Json:
        return {"CPU": 3.0}

    def remote(self, **options: Any) -> Any:
        self.calls.append(("remote", options))

        def wrap(function: Any) -> Any:
            return SimpleNamespace(
                options=lambda name: SimpleNamespace(remote=lambda data: (name, lambda: function(data)))
            )

        return wrap

    def wait(self, handles: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        assert timeout == 0
        return handles, []

    def get(self, handle: Any) -> Any:
        name, run = handle
        kind = {"oom": "OutOfMemoryError", "raised": "RayTaskError", "node": "NodeDiedError"}.get(name)
        if kind is not None:
            raise getattr(self.exceptions, kind)(f"ray::run_task()\n  File ...\n{kind}: the words of Ray.")
        return run()

    def cancel(self, handle: Any, force: bool) -> None:
        self.calls.append(("cancel", handle[0], force))

    def shutdown(self) -> None:
        self.calls.append("shutdown")


def make_node(cpus: float, is_alive: bool = True) -> Json:
    return {"Alive": is_alive, "Resources": {"CPU": cpus}}


def test_what_ray_says_of_a_task_becomes_its_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = FakeRay([make_node(1.0), make_node(5.0), make_node(8.0, is_alive=False)])
    monkeypatch.setitem(sys.modules, "ray", ray)
    launcher = make_launcher("ray", cpus=2)
    jobs = [make_job(name, "tell", tmp_path) for name in ("good", "oom", "raised", "node")]
    results = run_jobs(jobs, str(tmp_path / "run"), launcher=launcher).results
    assert [(r.job, r.reason, r.detail) for r in results] == [
        ("good", None, None),
        ("oom", "oom", "OutOfMemoryError: the words of Ray"),
        ("raised", "exception", "RayTaskError: the words of Ray"),
        ("node", "worker lost", "lost 3 times, last: NodeDiedError: the words of Ray"),
    ]
    assert (tmp_path / "run/logs/good.log").read_text() == "told\n"
    options = {"num_cpus": 2, "num_gpus": 0, "max_retries": 0, "scheduling_strategy": "SPREAD"}
    assert ray.calls == [("init", "auto"), ("remote", options), "shutdown"]
    assert launcher.slots == 2  # as the two living nodes allow


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"ray_address": "nowhere:1"},
            r"no Ray cluster at address 'nowhere:1': Could not find any .*\(ray start --head",
        ),
        ({"cpus": 64, "gpus": 2}, "no node of the Ray cluster has 64 CPUs and 2 GPUs: ask for less per job"),
    ],
)
def test_a_ray_cluster_that_cannot_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: Json, message: str
) -> None:
    monkeypatch.setitem(sys.modules, "ray", FakeRay([make_node(4.0)]))
    with pytest.raises(LauncherError, match=message):
        run_jobs([make_job("a", "tell", tmp_path)], str(tmp_path / "run"), launcher=make_launcher("ray", **options))


def test_tasks_on_ray_are_cancelled_at_the_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Endless(FakeRay):
        def wait(self, *_: Any, **__: Any) -> tuple[list[Any], list[Any]]:
            signal.raise_signal(signal.SIGINT)  # the second time at once
            return [], []

    ray = Endless([make_node(4.0)])
    monkeypatch.setitem(sys.modules, "ray", ray)
    with pytest.raises(KeyboardInterrupt):
        run_jobs([make_job("a", "tell", tmp_path)], str(tmp_path / "run"), launcher=make_launcher("ray"))
    assert ray.calls[2:] == [("cancel", "a", True), "shutdown"]


@pytest.fixture
def cluster() -> Iterator[Any]:
    """Two nodes on this machine: each with a raylet, a store and workers of its own."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "num_gpus": 0, "object_store_memory": 80 << 20}
    # Ray takes a quarter of a minute to notice that a node is dead; here it is told to be quick.
    quick = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 4}
    cluster = Cluster(
        initialize_head=True, head_node_args={**node, "include_dashboard": False, "_system_config": quick}
    )
    cluster.second = cluster.add_node(**node)
    yield cluster
    cluster.shutdown()


def run_on_ray(jobs: list[Job], folder: Path, cluster: Any) -> tuple[Result, ...]:
    launcher = make_launcher("ray", ray_address=cluster.address, device="cpu")
    return run_jobs(jobs, str(folder), launcher=launcher).results


def check_same_results(tmp_path: Path, cluster: Any) -> None:
    # The first two end only if both nodes run one at the same time.
    jobs = [make_job(name, "meet", tmp_path, others="ab") for name in "ab"]
    jobs += [make_job(name, name, tmp_path) for name in ("tell", "kill", "memory")]
    results = run_on_ray(jobs, tmp_path / "run", cluster)
    assert [r.reason for r in results] == [None, None, None, "killed", "oom"]
    assert results[3].detail == "process ended by SIGKILL (by a person?): last words"
    assert (tmp_path / "run/logs/tell.log").read_text() == "told\n"
    assert run_jobs(jobs, str(tmp_path / "run")).ran == 0  # the same journal, whoever ran them


def check_lost_worker(tmp_path: Path, cluster: Any) -> None:
    """The process of Ray is killed: the worker below it ends, and the task runs again."""
    (result,) = run_on_ray([make_job("a", "kill_machine", tmp_path, times=1)], tmp_path / "run", cluster)
    assert (result.status, result.data) == ("ok", "done")
    first, _ = read_pids(tmp_path / "tries")
    wait_gone([first])


def check_dead_node(tmp_path: Path, cluster: Any) -> None:
    """Its task is done by the other node."""
    jobs = [make_job(name, "gate", tmp_path) for name in "ab"]
    second = cluster.second.all_processes["raylet"][0].process.pid

    def kill_node() -> None:
        workers = {}
        for name in "ab":
            wait_until((tmp_path / f"{name}.process").exists, f"{name} did not begin")
            worker, raylet = read_pids(tmp_path / f"{name}.process")
            workers[raylet] = worker
        cluster.remove_node(cluster.second, allow_graceful=False)
        wait_gone([workers[second]])
        (tmp_path / "open").touch()

    thread = threading.Thread(target=kill_node)
    thread.start()
    results = run_on_ray(jobs, tmp_path / "run", cluster)
    thread.join()
    assert [r.status for r in results] == ["ok", "ok"]
    assert str(second) not in {r.data["raylet"] for r in results}


@pytest.mark.heavy
def test_a_ray_cluster_of_two_nodes(tmp_path: Path, cluster: Any) -> None:
    """One test, for a cluster takes long to start."""
    for check in (check_same_results, check_lost_worker, check_dead_node):
        folder = tmp_path / check.__name__
        folder.mkdir()
        check(folder, cluster)


# --- Slurm ----------------------------------------------------------------------------------------------------------
@pytest.fixture
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """submitit waits some seconds for a result that is late on a shared disk."""
    core = pytest.importorskip("submitit.core.core")
    monkeypatch.setattr(core.Job, "_results_timeout_s", 0)


def run_on_slurm(jobs: list[Job], folder: Path, cluster: str = "local", **options: Any) -> tuple[Result, ...]:
    launcher = make_launcher("slurm", slurm_cluster=cluster, device="cpu", **options)
    return run_jobs(jobs, str(folder), launcher=launcher).results


@pytest.mark.usefixtures("no_patience")
def test_a_job_by_submitit_gives_the_same_result(tmp_path: Path) -> None:
    (result,) = run_on_slurm([make_job("tell", "tell", tmp_path)], tmp_path / "run")
    assert (result.job, result.reason) == ("tell", None)
    assert (tmp_path / "run/logs/tell.log").read_text() == "told\n"
    assert list((tmp_path / "run/slurm").glob("*_submitted.pkl")) == []


@pytest.mark.heavy
def test_jobs_by_submitit_run_at_once(tmp_path: Path) -> None:
    pytest.importorskip("submitit")
    jobs = [make_job(name, "meet", tmp_path, others="ab") for name in "ab"] + [make_job("leave", "leave", tmp_path)]
    results = run_on_slurm(jobs, tmp_path / "run", slots=2)
    assert [(r.job, r.reason) for r in results] == [("a", None), ("b", None), ("leave", "exit")]


@pytest.mark.heavy
@pytest.mark.usefixtures("no_patience")
@pytest.mark.parametrize(("times", "fate", "tries"), [(1, ("ok", None), 2), (9, ("failed", "worker lost"), 3)])
def test_a_lost_submitit_job_is_tried_again(tmp_path: Path, times: int, fate: tuple[str, str], tries: int) -> None:
    jobs = [make_job("a", "kill_machine", tmp_path, times=times)]
    (result,) = run_on_slurm(jobs, tmp_path / "run", slurm_folder=str(tmp_path / "shared"))
    assert (result.status, result.reason) == fate
    workers = read_pids(tmp_path / "tries")
    assert len(workers) == tries
    wait_gone(workers)


_FAKE_SLURM = {
    # A queue of files: <number>.state, <number>.sh; some names meet an end that a cluster can bring.
    "sbatch": """
id=$(($(cat "$FAKE_SLURM/last") + 1)); echo $id > "$FAKE_SLURM/last"
cp "$1" "$FAKE_SLURM/$id.sh"
name=$(sed -n 's/^#SBATCH --job-name=//p' "$1")
state=RUNNING
case $name in
    oom) state=OUT_OF_MEMORY ;;
    late) state=TIMEOUT ;;
    queued) state=PENDING ;;
    node) [ -e "$FAKE_SLURM/node" ] || { touch "$FAKE_SLURM/node"; state=NODE_FAIL; } ;;
    refused) echo "sbatch: error: invalid partition specified: x" >&2; exit 1 ;;
esac
echo $state > "$FAKE_SLURM/$id.state"
if [ $state = RUNNING ]; then
    (SLURM_JOB_ID=$id bash "$1"; echo COMPLETED > "$FAKE_SLURM/$id.state") > "$FAKE_SLURM/$id.out" 2>&1 < /dev/null &
fi
echo "Submitted batch job $id"
""",
    "srun": """
while [ "${1#-}" != "$1" ]; do case $1 in --unbuffered) shift ;; *) shift 2 ;; esac; done
exec "$@"
""",
    "sacct": """
echo "JobID|State|NodeList"
for file in "$FAKE_SLURM"/*.state; do echo "$(basename "$file" .state)|$(cat "$file")|n1"; done
""",
    "scancel": """
echo "$@" >> "$FAKE_SLURM/cancelled"
""",
}


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """Slurm's commands as scripts: submitit's own Slurm side runs, files and all."""
    request.getfixturevalue("no_patience")
    commands, state = tmp_path / "bin", tmp_path / "queue"
    commands.mkdir()
    state.mkdir()
    for name, text in _FAKE_SLURM.items():
        (commands / name).write_text(f"#!/bin/bash{text}")
        (commands / name).chmod(0o755)
    # submitit remembers numbers that have ended for the life of the process: each test has its own.
    (state / "last").write_text(str(1000 * request.param))
    monkeypatch.setenv("FAKE_SLURM", str(state))
    monkeypatch.setenv("PATH", f"{commands}{os.pathsep}{os.environ['PATH']}")
    return state


@pytest.mark.parametrize("slurm", [1], indirect=True)
def test_what_slurm_says_of_a_job_becomes_its_result(tmp_path: Path, slurm: Path) -> None:
    jobs = [make_job(name, "tell", tmp_path) for name in ("good", "oom", "late", "node")]
    results = run_on_slurm(jobs, tmp_path / "run", "slurm", slurm_partition="big", slurm_minutes=7, cpus=3, slots=4)
    assert [(r.job, r.reason, r.detail) for r in results] == [
        ("good", None, None),
        ("oom", "oom", "Slurm job 1002 ended without a result: OUT_OF_MEMORY"),
        ("late", "timeout", "Slurm job 1003 ended without a result: TIMEOUT"),
        ("node", None, None),  # the second time
    ]
    script = (slurm / "1001.sh").read_text()
    for line in ("--job-name=good", "--partition=big", "--time=7", "--cpus-per-task=3", "--gpus-per-node=0"):
        assert f"#SBATCH {line}\n" in script
    assert (slurm / "last").read_text() == "1005\n"
    # Slurm may queue by itself what a dead node ran: it is cancelled before it is submitted again.
    assert (slurm / "cancelled").read_text() == "1004\n"


@pytest.mark.parametrize("slurm", [2], indirect=True)
def test_slurm_jobs_are_cancelled_when_their_run_is_gone(tmp_path: Path, slurm: Path) -> None:
    # A run that was killed left two in the queue.
    left = tmp_path / "run/slurm"
    left.mkdir(parents=True)
    for number in (77, 78):
        (left / f"{number}_submitted.pkl").touch()

    class Interrupting(launchers.Slurm):
        def _fetch(self, handle: Any) -> Json | None:
            if not self._is_stopping and handle is next(iter(self.running)):
                signal.raise_signal(signal.SIGINT)
            return super()._fetch(handle) if self._is_stopping else None

    jobs = [make_job(name, "tell", tmp_path) for name in ("good", "queued")]
    outcome = run_jobs(jobs, str(tmp_path / "run"), launcher=Interrupting(gpus=0))
    # The one that ran is finished, the one in the queue is taken out of it.
    assert [(r.job, r.is_ok) for r in outcome.results] == [("good", True)]
    assert outcome.stopped
    assert (slurm / "cancelled").read_text() == "--quiet 77 78\n2002\n"
    assert list(left.glob("*_submitted.pkl")) == []


@pytest.mark.parametrize("slurm", [3], indirect=True)
@pytest.mark.usefixtures("slurm")
def test_a_submission_that_slurm_refuses_ends_the_run_in_its_words(tmp_path: Path) -> None:
    with pytest.raises(LauncherError, match=r"Slurm refused refused: .*invalid partition specified: x"):
        run_on_slurm([make_job("refused", "tell", tmp_path)], tmp_path / "run", "slurm", slurm_partition="x")


def test_a_machine_without_slurm_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("submitit")
    monkeypatch.setenv("PATH", str(tmp_path))
    left = tmp_path / "run/slurm/77_submitted.pkl"
    left.parent.mkdir(parents=True)
    left.touch()
    for cluster in ("slurm", "nope"):
        with pytest.raises(LauncherError, match="Slurm cannot be used from here: "):
            run_on_slurm([make_job("a", "tell", tmp_path)], tmp_path / "run", cluster)
    assert left.exists()  # for the next run, on a machine with Slurm
