"""What the worker processes of the runner's tests run, and how those wait for it; light: workers import it anew."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

Json = dict[str, Any]
CALL = "runner_jobs:start"
HERE = str(Path(__file__).parent)


def wait_until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def start(args: Json) -> Callable[[Json], Any]:
    return lambda row: ACTIONS[row["do"]](args, row)


def wait_for(path: str) -> None:
    while not os.path.exists(path):
        time.sleep(0.01)


def write(path: str, text: str) -> None:
    """Whole or not at all: whoever waits for the file reads it at once."""
    Path(f"{path}.part").write_text(text)
    os.replace(f"{path}.part", path)


def tell(args: Json, _row: Json) -> Json:
    print("told", flush=True)
    return {
        "process": os.getpid(), "name": args.get("name"), "raylet": os.environ.get("RAY_RAYLET_PID"),
        "oom_score_adj": Path("/proc/self/oom_score_adj").read_text().strip(),
        "env": {name: os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")},
    }  # fmt: skip


def meet(args: Json, row: Json) -> str:
    """Comes to its end only if the others run at the same time."""
    write(f"{args['folder']}/{args['name']}", "")
    for other in row["others"]:
        wait_for(f"{args['folder']}/{other}")
    return "met"


def gate(args: Json, _row: Json) -> Json:
    """Says who it is, then waits to be let through."""
    with open(f"{args['folder']}/{args['name']}.begun", "a") as file:
        file.write("begun\n")
    write(f"{args['folder']}/{args['name']}.process", f"{os.getpid()} {os.environ.get('RAY_RAYLET_PID')}")
    wait_for(f"{args['folder']}/open")
    return {"raylet": os.environ.get("RAY_RAYLET_PID")}


def family(args: Json, _row: Json) -> None:
    """A child in the group, one in a session of its own, an orphan that left the group; then a hang."""
    near = subprocess.Popen(["sleep", "600"])
    far = subprocess.Popen(["sleep", "600"], start_new_session=True)
    orphan = f"import os, time; os.fork() and os._exit(0); open({args['folder']!r} + '/orphan', 'w').write("
    orphan += "str(os.getpid())); time.sleep(600)"
    subprocess.run([sys.executable, "-S", "-c", orphan], start_new_session=True, check=True)
    while not (found := Path(args["folder"], "orphan")).exists() or not found.read_text():
        time.sleep(0.01)
    write(f"{args['folder']}/{args['name']}.family", f"{os.getpid()} {near.pid} {far.pid} {found.read_text()}")
    time.sleep(600)


def crash(_args: Json, _row: Json) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.kill(os.getpid(), signal.SIGSEGV)


def kill(_args: Json, _row: Json) -> None:
    print("last words", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def leave(_args: Json, _row: Json) -> None:
    os._exit(3)


def fill_memory(_args: Json, _row: Json) -> int:
    limit = 1 << 30
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    return len(bytearray(4 * limit))


def fill_device(args: Json, row: Json) -> Json:
    """Free memory of the device as this process meets it; then some of it, or more than there is."""
    import torch

    free, total = torch.cuda.mem_get_info()
    taken = torch.empty(int(total * row["share"]), dtype=torch.uint8, device="cuda")
    if row.get("waits"):
        gate(args, row)
    return {"free": free, "total": total, "taken": taken.numel()}


def hang(_args: Json, _row: Json) -> None:
    time.sleep(600)


def kill_machine(args: Json, row: Json) -> str:
    """End the process that the engine started, above the guard; only the first times."""
    with open(f"{args['folder']}/tries", "a+") as file:
        file.write("try\n")
        file.seek(0)
        tries = len(file.readlines())
    if tries <= row["times"]:
        guard = Path(f"/proc/{os.getppid()}/stat").read_text()
        os.kill(int(guard.rpartition(")")[2].split()[1]), signal.SIGKILL)
        time.sleep(600)
    return "done"


def babble(_args: Json, row: Json) -> None:
    """Write into the pipe of the answers what no worker would."""
    times = row.get("times", 1)
    descriptors = [int(name) for name in os.listdir("/proc/self/fd") if int(name) > 2]
    while times:
        times -= 1
        for descriptor in descriptors:
            with suppress(OSError):
                os.write(descriptor, row["text"].encode())
    time.sleep(600)


def draw_bar(_args: Json, _row: Json) -> None:
    sys.stderr.write("\r 10%|#   |\x1b[A\r 20%|\x1b[31m##\x1b[0m  |")
    sys.stderr.flush()
    os._exit(4)


def leave_daemon(_args: Json, _row: Json) -> int:
    return subprocess.Popen(["sleep", "600"], start_new_session=True).pid


def measure_args(args: Json, _row: Json) -> int:
    return len(args["ballast"])


def unsendable(_args: Json, _row: Json) -> object:
    return {"value": object()}


ACTIONS: dict[str, Callable[[Json, Json], Any]] = {
    "tell": tell, "meet": meet, "gate": gate, "family": family, "crash": crash, "kill": kill, "leave": leave,
    "memory": fill_memory, "device": fill_device, "hang": hang, "kill_machine": kill_machine, "unsendable": unsendable,
    "babble": babble, "bar": draw_bar, "daemon": leave_daemon, "measure_args": measure_args,
}  # fmt: skip
