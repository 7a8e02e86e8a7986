"""What the worker processes of the runner's tests run, and how the tests wait for it; imports little on purpose."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Json = dict[str, Any]
CALL = "runner_jobs:start"
HERE = str(Path(__file__).parent)
LIMIT_S = 300.0  # a test that waits this long has failed; slow machines need some of it


def wait_until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def wait_gone(pids: list[int]) -> None:
    for pid in pids:
        wait_until(lambda pid=pid: is_gone(pid), f"process {pid} is still there")


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def read_pids(path: Path) -> list[int]:
    return [int(pid) for pid in path.read_text().split()]


def start(args: Json) -> Callable[[Json], Any]:
    if "starts" in args:
        with open(args["starts"], "a") as file:
            file.write("start\n")
        if len(Path(args["starts"]).read_text().split()) <= args["bad_starts"]:
            ACTIONS[args["end"]](args, {})
    return lambda row: act(args, row)


def act(args: Json, row: Json) -> Any:
    if "begun" in args:
        with open(args["begun"], "a") as file:
            file.write(f"{row.get('value', row['do'])}\n")
    return ACTIONS[row["do"]](args, row)


def write(path: str, text: str) -> None:
    """Whole or not at all: whoever waits for the file reads it at once."""
    Path(f"{path}.part").write_text(text)
    os.replace(f"{path}.part", path)


def wait_for(path: str) -> None:
    while not os.path.exists(path):
        time.sleep(0.01)


# --- rows -----------------------------------------------------------------------------------------------------------
def give_value(_args: Json, row: Json) -> Json:
    return {"value": row["value"], "process": os.getpid()}


def tell(args: Json, _row: Json) -> Json:
    print("told", flush=True)
    return {
        "process": os.getpid(),
        "name": args.get("name"),
        "oom_score_adj": Path("/proc/self/oom_score_adj").read_text().strip(),
        "env": {name: os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")},
    }


def meet(args: Json, row: Json) -> str:
    """Ends only if the others run at the same time."""
    write(f"{args['folder']}/{args['name']}", "")
    for other in row["others"]:
        wait_for(f"{args['folder']}/{other}")
    return "met"


def gate(args: Json, _row: Json) -> Json:
    """Says who it is, then waits until the file `open` is there."""
    write(f"{args['folder']}/{args['name']}.process", f"{os.getpid()} {os.environ.get('RAY_RAYLET_PID', 0)}")
    wait_for(f"{args['folder']}/open")
    return {"raylet": os.environ.get("RAY_RAYLET_PID")}


def family(args: Json, _row: Json) -> None:
    """Two more processes in the group, one of them a forked copy that holds the socket; then a hang."""
    child = subprocess.Popen(["sleep", "600"])
    copy = os.fork()
    if not copy:
        time.sleep(600)
    write(f"{args['folder']}/{args['name']}.family", f"{os.getpid()} {child.pid} {copy}")
    time.sleep(600)


def orphan(args: Json, _row: Json) -> None:
    """Die and leave a forked copy behind."""
    copy = os.fork()
    if not copy:
        time.sleep(600)
    write(f"{args['folder']}/{args['name']}.family", str(copy))
    os.kill(os.getpid(), signal.SIGKILL)


def fail(_args: Json, _row: Json) -> None:
    raise KeyError("not there")


def fail_row(_args: Json, _row: Json) -> None:
    from flopcalc.measure.jobs.job import RowError

    raise RowError("this row   cannot be measured")


def fail_device_memory(_args: Json, _row: Json) -> None:
    raise type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory. Tried to allocate 90 GiB")


def fail_device(_args: Json, _row: Json) -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def crash(_args: Json, _row: Json) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.kill(os.getpid(), signal.SIGSEGV)


def kill(_args: Json, _row: Json) -> None:
    print("last words", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def leave(_args: Json, _row: Json) -> None:
    os._exit(3)


def draw_bar(_args: Json, _row: Json) -> None:
    sys.stderr.write("\r 10%|#   |\x1b[A\r 20%|\x1b[31m##\x1b[0m  |")
    sys.stderr.flush()
    os._exit(4)


def fill_memory(_args: Json, _row: Json) -> int:
    limit = 1 << 30
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    return len(bytearray(4 * limit))


def fill_device(_args: Json, row: Json) -> Json:
    """Free memory of the device as this process finds it; then a share of it, or more than there is."""
    import torch

    free, total = torch.cuda.mem_get_info()
    taken = torch.empty(int(total * row["share"]), dtype=torch.uint8, device="cuda")
    return {"free": free, "taken": taken.numel()}


def hang(_args: Json, _row: Json) -> None:
    time.sleep(600)


def kill_machine(args: Json, row: Json) -> str:
    """Kill the process of the engine that runs this job; only the first times."""
    with open(f"{args['folder']}/tries", "a+") as file:
        file.write(f"{os.getpid()}\n")
        file.seek(0)
        tries = len(file.readlines())
    if tries <= row["times"]:
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)
    return "done"


def measure_args(args: Json, row: Json) -> str:
    """As long as what came in."""
    return "x" * (len(args["ballast"]) + len(row["ballast"]))


def print_text(_args: Json, _row: Json) -> None:
    print("into the log", flush=True)


def print_late(_args: Json, _row: Json) -> None:
    print("in a buffer until the process ends")


def give_object(_args: Json, _row: Json) -> object:
    return {"value": object()}


ACTIONS: dict[str, Callable[[Json, Json], Any]] = {
    "value": give_value, "tell": tell, "meet": meet, "gate": gate, "family": family, "orphan": orphan, "raise": fail,
    "row_error": fail_row, "device_memory": fail_device_memory, "device": fail_device, "crash": crash, "kill": kill,
    "leave": leave, "bar": draw_bar, "memory": fill_memory, "fill_device": fill_device, "hang": hang,
    "kill_machine": kill_machine, "measure_args": measure_args, "print": print_text, "print_late": print_late,
    "unsendable": give_object,
}  # fmt: skip
