"""Places on this machine; a real Ray cluster of two nodes; submitit locally and with a stand-in for Slurm."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import runner_jobs
from runner_jobs import is_gone, wait_until

from flopcalc.measure.jobs import launchers
from flopcalc.measure.jobs.job import Job, Result
from flopcalc.measure.jobs.launchers import LauncherError, Local, find_places, make_launcher
from flopcalc.measure.jobs.runner import Progress, run_jobs

Json = dict[str, Any]


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(runner_jobs.HERE)


def make_job(name: str, do: str, folder: Path, **row: Any) -> Job:
    # The path of the machine that runs it is not ours.
    env = {"PYTHONPATH": os.pathsep.join([runner_jobs.HERE, *filter(None, sys.path)])}
    args = {"name": name, "folder": str(folder)}
    return Job(name, runner_jobs.CALL, args, {"run": {"do": do, **row}}, 120.0, env=env)


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
        ({"name": "slurm", "slurm_cluster": "nope"}, "slurm_cluster = 'nope' is not one of slurm, local"),
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
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        if uuid != "MIG-7":
            raise self.NVMLError
        return 7

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}f"

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[int]:
        return [4711] if handle in self.busy else []

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(used=(handle + 1) << 30)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml(busy={1})
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: range(12))
    return fake


@pytest.mark.parametrize(
    ("visible", "slots", "devices", "threads"),
    [
        (None, None, ["GPU-0f", "GPU-2f", "GPU-3f"], "4"),  # the free ones, by names that mean the same to CUDA
        (None, 2, ["GPU-0f", "GPU-2f"], "6"),
        (None, 4, ["GPU-0f", "GPU-2f", "GPU-3f", "GPU-1f"], "3"),  # asked for: also the one that is in use
        (None, 1, ["GPU-0f"], None),  # alone: torch's own default
        ("3,1,2", None, ["3", "2"], "6"),  # the user's choice, in the user's words and order
        ("1,0", None, ["0"], None),
        (" 2 , 0 ", None, ["2", "0"], "6"),
        ("GPU-2f", None, ["GPU-2f"], None),
        ("GPU-2,GPU-0f", None, ["GPU-2", "GPU-0f"], "6"),  # as much of a UUID as is unique
        ("0,GPU-", None, ["0"], None),
        ("MIG-7,MIG-8", None, ["MIG-7"], None),
        ("3,3,2", None, ["3"], None),  # one process each: never two on one
        ("0,-1,2", None, ["0"], None),  # CUDA stops at -1, and at a number that is none
        ("0,2,9,3", None, ["0", "2"], "6"),
    ],
)
@pytest.mark.usefixtures("nvml")
def test_one_process_per_free_gpu(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, slots: int | None, devices: list[str], threads: str | None
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    places = find_places(slots)
    assert [place.env["CUDA_VISIBLE_DEVICES"] for place in places] == devices
    assert {place.env.get("OMP_NUM_THREADS") for place in places} == {threads}


@pytest.mark.parametrize(
    ("device", "visible", "slots", "count", "threads"),
    [
        ("cpu", None, None, 1, None),
        ("cpu", None, 3, 3, "4"),
        ("auto", "", None, 1, None),
        ("auto", "-1", 24, 24, "1"),
        ("auto", "NoDevFiles", None, 1, None),
    ],
)
@pytest.mark.usefixtures("nvml")
def test_places_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    visible: str | None,
    slots: int | None,
    count: int,
    threads: str | None,
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    places = find_places(slots, device)
    expected = {} if threads is None else {"OMP_NUM_THREADS": threads}
    assert [place.env for place in places] == [expected] * count


def test_the_users_threads_stand(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert nvml.nvmlDeviceGetCount() == 4
    assert [place.env for place in find_places(2, "cpu")] == [{}, {}]


def test_gpus_that_are_not_there_or_not_free(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LauncherError, match=r"slots = 5 is more than the GPUs found here \(4\): one process each"):
        find_places(5)
    nvml.busy = {0, 1, 2, 3}
    with pytest.raises(LauncherError, match="all 4 GPUs are in use by other processes"):
        find_places(None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(LauncherError, match="device 'cuda': there is no GPU, or CUDA_VISIBLE_DEVICES hides it"):
        find_places(None, "cuda")


@pytest.mark.parametrize(
    ("visible", "count", "slots", "devices"),
    [
        (None, 1, None, ["0"]),
        ("GPU-5,-1", 1, None, ["GPU-5"]),
        (None, 4, 2, ["0", "1"]),
        ("3,1,9", 2, 2, ["3", "1"]),
        (None, 4, None, "which of the 4 GPUs here are free cannot be told without NVML: pip install nvidia-ml-py"),
        (None, 1, 2, "slots = 2 is more than the GPUs found here (1): one process each"),
        ("", 0, None, "device 'cuda': there is no GPU, or CUDA_VISIBLE_DEVICES hides it"),
    ],
)
def test_gpus_without_nvml_are_those_that_cuda_counts(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, count: int, slots: int | None, devices: list[str] | str
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(launchers, "count_gpus", lambda: count)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if isinstance(devices, str):
        with pytest.raises(LauncherError) as caught:
            find_places(slots, "cuda")
        assert str(caught.value).startswith(devices)
    else:
        assert [(p.env["CUDA_VISIBLE_DEVICES"], p.gpu) for p in find_places(slots)] == [(d, None) for d in devices]


@pytest.mark.usefixtures("nvml")
def test_a_place_gives_its_job_a_device_and_tells_its_memory(tmp_path: Path) -> None:
    """What the table shows while they run, and what the children see."""
    jobs = [make_job(name, "gate", tmp_path) for name in "ab"] + [make_job(name, "tell", tmp_path) for name in "cd"]
    looks: list[Any] = []

    class Watched(Local):
        def wait(self, timeout_s: float) -> Any:
            if not looks and all((tmp_path / f"{name}.process").exists() for name in "ab"):
                looks.extend(self.look())
                (tmp_path / "open").touch()
            return super().wait(timeout_s)

    outcome = run_jobs(jobs, str(tmp_path / "run"), launcher=Watched(lambda: find_places(2)))
    assert [(run.job, run.place, run.device_bytes) for run in looks] == [
        ("a", "GPU GPU-0f", 1 << 30), ("b", "GPU GPU-2f", 3 << 30),
    ]  # fmt: skip
    assert all(run.host_bytes > 1 << 20 and run.seconds > 0 for run in looks)
    seen = {r.data["env"]["CUDA_VISIBLE_DEVICES"] for r in outcome.results[2:]}
    assert seen <= {"GPU-0f", "GPU-2f"}
    assert {r.data["env"]["OMP_NUM_THREADS"] for r in outcome.results[2:]} == {"6"}


@pytest.mark.gpu
def test_a_gpu_is_watched_filled_and_free_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    monkeypatch.setattr(launchers, "_is_busy", lambda _nvml, _handle: False)
    looks: list[Any] = []

    class Watched(Local):
        def wait(self, timeout_s: float) -> Any:
            if not looks and (tmp_path / "half.process").exists():
                looks.extend(self.look())
                (tmp_path / "open").touch()
            return super().wait(timeout_s)

    jobs = [
        make_job("before", "device", tmp_path, share=0.0),
        make_job("half", "device", tmp_path, share=0.5, waits=True),
        make_job("too much", "device", tmp_path, share=1.1),
        make_job("after", "device", tmp_path, share=0.0),
    ]
    results = run_jobs(jobs, str(tmp_path / "run"), launcher=Watched(lambda: find_places(1, "cuda"))).results
    assert [r.reason for r in results] == [None, None, "oom", None]
    assert "OutOfMemoryError" in str(results[2].detail)
    before, half, after = (results[i].data for i in (0, 1, 3))
    assert looks[0].device_bytes > half["taken"]
    assert after["free"] > before["free"] - (64 << 20)


# --- Ray ------------------------------------------------------------------------------------------------------------
@pytest.fixture
def cluster() -> Iterator[Any]:
    """Two nodes on this machine: each with a raylet, a store and workers of its own."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "num_gpus": 0, "object_store_memory": 80 << 20}
    # Ray takes a quarter of a minute to believe that a node is dead; here it is told to be quick.
    quick = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 4}
    head = {**node, "include_dashboard": False, "_system_config": quick}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    cluster.second = cluster.add_node(**node)
    yield cluster
    cluster.shutdown()


def run_on_ray(jobs: list[Job], folder: Path, cluster: Any, **options: Any) -> tuple[Result, ...]:
    launcher = make_launcher("ray", ray_address=cluster.address, device="cpu")
    return run_jobs(jobs, str(folder), launcher=launcher, **options).results


def check_same_results(tmp_path: Path, cluster: Any) -> None:
    # These two end only if both nodes run one at the same time.
    jobs = [make_job(name, "meet", tmp_path, others=["a", "b"]) for name in "ab"]
    jobs += [make_job(name, name, tmp_path) for name in ("tell", "kill", "memory")]
    results = run_on_ray(jobs, tmp_path / "run", cluster)
    assert [(r.job, r.reason) for r in results] == [
        ("a", None), ("b", None), ("tell", None), ("kill", "killed"), ("memory", "oom"),
    ]  # fmt: skip
    assert results[3].detail == "process ended by SIGKILL (by a person?): last words"
    assert (tmp_path / "run/logs/tell.log").read_text() == "told\n"
    assert (tmp_path / "run/logs/kill.log").read_text() == "last words\n"
    assert run_jobs(jobs, str(tmp_path / "run")).ran == 0  # the same journal, whoever ran them


def check_second_interrupt(tmp_path: Path, cluster: Any) -> None:
    heard = threading.Event()

    class Listening(Progress):
        def say(self, text: str) -> None:
            assert text.startswith("stopping after what runs now")
            heard.set()

    def interrupt_twice() -> None:
        wait_until((tmp_path / "a.process").exists, "a did not begin")
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        heard.wait(60)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = threading.Thread(target=interrupt_twice)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run_on_ray([make_job("a", "gate", tmp_path)], tmp_path / "run", cluster, progress=Listening(None))
    thread.join()
    worker = int((tmp_path / "a.process").read_text().split()[0])
    wait_until(lambda: is_gone(worker), "the worker is still there")


def check_term(tmp_path: Path, cluster: Any) -> None:
    def end() -> None:
        wait_until((tmp_path / "a.process").exists, "a did not begin")
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the cluster in this process has put its own there
    thread = threading.Thread(target=end)
    thread.start()
    with pytest.raises(SystemExit) as caught:
        run_on_ray([make_job("a", "gate", tmp_path)], tmp_path / "run", cluster)
    thread.join()
    signal.signal(signal.SIGTERM, before)
    assert caught.value.code == 143
    worker = int((tmp_path / "a.process").read_text().split()[0])
    wait_until(lambda: is_gone(worker), "the worker is still there")


def check_lost_worker(tmp_path: Path, cluster: Any) -> None:
    (result,) = run_on_ray([make_job("a", "kill_machine", tmp_path, times=1)], tmp_path / "run", cluster)
    assert (result.status, result.data) == ("ok", "done")
    assert (tmp_path / "tries").read_text() == "try\n" * 2


def check_dead_node(tmp_path: Path, cluster: Any) -> None:
    """Its job is done by the other node, which is the only one after this."""
    jobs = [make_job(name, "gate", tmp_path) for name in "ab"]
    second = cluster.second.all_processes["raylet"][0].process.pid
    lost: list[str] = []

    def kill_node() -> None:
        processes = {}
        for name in "ab":
            wait_until((tmp_path / f"{name}.process").exists, f"{name} did not begin")
            worker, raylet = map(int, (tmp_path / f"{name}.process").read_text().split())
            processes[raylet] = name, worker
        name, worker = processes[second]
        cluster.remove_node(cluster.second, allow_graceful=False)
        wait_until(lambda: is_gone(worker), "the dead node's worker is still there")
        lost.append(name)
        (tmp_path / "open").touch()

    thread = threading.Thread(target=kill_node)
    thread.start()
    results = run_on_ray(jobs, tmp_path / "run", cluster)
    thread.join()
    assert [r.status for r in results] == ["ok", "ok"]
    assert str(second) not in {r.data["raylet"] for r in results}
    assert {name: (tmp_path / f"{name}.begun").read_text().count("begun") for name in "ab"} == {
        name: 2 if name in lost else 1 for name in "ab"
    }


def check_no_room(tmp_path: Path, cluster: Any) -> None:
    launcher = make_launcher("ray", ray_address=cluster.address, cpus=64, gpus=2)
    with pytest.raises(LauncherError, match="no node of the Ray cluster has 64 CPUs and 2 GPUs"):
        run_jobs([make_job("a", "tell", tmp_path)], str(tmp_path / "run"), launcher=launcher)


def test_a_ray_cluster_of_two_nodes(tmp_path: Path, cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One test, for a cluster takes long to start, and tests of one file may be run by several processes."""
    monkeypatch.setattr(launchers, "_ROOM_LIMIT_S", 0.0)
    checks = (
        check_same_results, check_second_interrupt, check_term, check_lost_worker, check_dead_node, check_no_room
    )  # fmt: skip
    for check in checks:
        folder = tmp_path / check.__name__
        folder.mkdir()
        check(folder, cluster)


def test_a_ray_address_without_a_cluster_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")

    def refuse(**options: Any) -> None:
        raise ConnectionError(f"Could not find any running Ray instance at {options['address']}")

    monkeypatch.setattr(ray, "init", refuse)
    with pytest.raises(
        LauncherError, match=r"no Ray cluster at address 'auto': Could not find .* \(ray start --head\)"
    ):
        run_jobs([make_job("a", "tell", tmp_path)], str(tmp_path / "run"), launcher=make_launcher("ray"))


def test_a_ray_address_where_nobody_listens_is_said_at_once(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    with socket.socket() as bound:  # bound and not listening: no one else can have the port
        bound.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        with pytest.raises(LauncherError, match=rf"no Ray cluster at address '{address}': .*Connection refused"):
            run_jobs(
                [make_job("a", "tell", tmp_path)],
                str(tmp_path / "run"),
                launcher=make_launcher("ray", ray_address=address),
            )


# --- Slurm ----------------------------------------------------------------------------------------------------------
def run_on_slurm(jobs: list[Job], folder: Path, cluster: str = "local", **options: Any) -> tuple[Result, ...]:
    pytest.importorskip("submitit")
    launcher = make_launcher("slurm", slurm_cluster=cluster, device="cpu", **options)
    return run_jobs(jobs, str(folder), launcher=launcher).results


def test_jobs_by_submitit_give_the_same_results(tmp_path: Path) -> None:
    jobs = [make_job(name, "meet", tmp_path, others=["a", "b"]) for name in "ab"]
    jobs += [make_job(name, name, tmp_path) for name in ("tell", "leave")]
    results = run_on_slurm(jobs, tmp_path / "run", slots=2)
    assert [(r.job, r.reason) for r in results] == [("a", None), ("b", None), ("tell", None), ("leave", "exit")]
    assert (tmp_path / "run/logs/tell.log").read_text() == "told\n"
    assert (tmp_path / "run/slurm").is_dir()


@pytest.mark.parametrize(("times", "fate", "tries"), [(1, ("ok", None), 2), (9, ("failed", "worker lost"), 3)])
def test_a_lost_submitit_job_is_tried_again(tmp_path: Path, times: int, fate: tuple[str, str], tries: int) -> None:
    jobs = [make_job("a", "kill_machine", tmp_path, times=times)]
    (result,) = run_on_slurm(jobs, tmp_path / "run", slurm_folder=str(tmp_path / "shared"))
    assert (result.status, result.reason) == fate
    assert (tmp_path / "tries").read_text() == "try\n" * tries


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
    monkeypatch.setattr(launchers, "_STATE_EVERY_S", 0.0)
    monkeypatch.setattr(launchers, "_SHARED_FOLDER_S", 0.0)
    return state


@pytest.mark.parametrize("slurm", [1], indirect=True)
def test_what_slurm_says_of_a_job_becomes_its_result(tmp_path: Path, slurm: Path) -> None:
    jobs = [make_job(name, "tell", tmp_path) for name in ("good", "oom", "late", "node")]
    results = run_on_slurm(jobs, tmp_path / "run", "slurm", slurm_partition="big", slurm_minutes=7, cpus=3, slots=4)
    assert [(r.job, r.reason, r.detail) for r in results] == [
        ("good", None, None),
        ("oom", "oom", "Slurm job 1002: OUT_OF_MEMORY"),
        ("late", "timeout", "Slurm job 1003 reached its own time limit"),
        ("node", None, None),  # the second time
    ]
    script = (slurm / "1001.sh").read_text()
    for line in ("--job-name=good", "--partition=big", "--time=7", "--cpus-per-task=3", "--gpus-per-node=0"):
        assert f"#SBATCH {line}\n" in script
    assert (slurm / "last").read_text() == "1005\n"
    # Slurm may queue by itself what a dead node ran: it is taken back before it is submitted anew.
    assert (slurm / "cancelled").read_text() == "1004\n"


@pytest.mark.parametrize("slurm", [2], indirect=True)
def test_slurm_jobs_are_cancelled_when_their_run_is_gone(tmp_path: Path, slurm: Path) -> None:
    # A run that was killed left two in the queue.
    (tmp_path / "run/slurm").mkdir(parents=True)
    (tmp_path / "run/slurm/submitted").write_text("77\n78\n")

    class Interrupting(launchers.Slurm):
        def wait(self, timeout_s: float) -> Any:
            if not hasattr(self, "told"):
                self.told = True
                signal.raise_signal(signal.SIGINT)
            return super().wait(timeout_s)

    launcher = Interrupting(None, 1, 0, None, None, None, "slurm")
    jobs = [make_job(name, "tell", tmp_path) for name in ("good", "queued")]
    outcome = run_jobs(jobs, str(tmp_path / "run"), launcher=launcher)
    # The one that ran is finished, the one in the queue is taken out of it.
    assert [(r.job, r.is_ok) for r in outcome.results] == [("good", True)]
    assert outcome.stopped
    assert (slurm / "cancelled").read_text() == "--quiet 77 78\n2002\n"
    assert not (tmp_path / "run/slurm/submitted").exists()


@pytest.mark.parametrize("slurm", [3], indirect=True)
@pytest.mark.usefixtures("slurm")
def test_a_submission_that_slurm_refuses_ends_the_run_in_its_words(tmp_path: Path) -> None:
    with pytest.raises(LauncherError, match=r"Slurm refused refused: .*invalid partition specified: x"):
        run_on_slurm([make_job("refused", "tell", tmp_path)], tmp_path / "run", "slurm", slurm_partition="x")


def test_a_machine_without_slurm_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    left = tmp_path / "run/slurm/submitted"
    left.parent.mkdir(parents=True)
    left.write_text("77\n")
    with pytest.raises(LauncherError, match="Slurm cannot be used from here: "):
        run_on_slurm([make_job("a", "tell", tmp_path)], tmp_path / "run", "slurm")
    assert left.read_text() == "77\n"  # for the next run, where there is one


def test_a_place_is_free_again_when_a_job_cannot_be_started(tmp_path: Path) -> None:
    launcher = Local()
    launcher.open("")
    from flopcalc.measure.jobs.job import RunnerError, Task

    with pytest.raises(RunnerError, match="a cannot be started"):
        launcher.start(Task(make_job("a", "tell", tmp_path), ("run",), str(tmp_path)))
    assert launcher.has_room()
    assert not launcher.is_busy
