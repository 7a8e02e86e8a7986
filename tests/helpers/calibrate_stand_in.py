"""A calibration table of known rows, measured without torch; files in a folder say how rows fail or change."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flopcalc.measure.jobs.job import Job

Json = dict[str, Any]
HERE = "calibrate_stand_in"


def plan(_suite: str) -> list[Job]:
    folder = os.environ["FAKE_TABLE"]
    rows = {f"n{i}": {"n": i} for i in range(1, 6)}
    return [Job(f"fake-{name}", f"{HERE}:start", {"name": name, "folder": folder}, rows) for name in "ab"]


def start(args: Json) -> Callable[[Json], Json]:
    return lambda row: measure(args, row)


def measure(args: Json, row: Json) -> Json:
    folder = Path(args["folder"])
    mark = f"{args['name']}{row['n']}"
    if (folder / "raise").exists():
        raise ValueError("no row works")
    if (folder / f"kill-{mark}").exists():
        os.kill(os.getpid(), signal.SIGKILL)
    if (folder / f"stop-{mark}").exists():
        (folder / f"stop-{mark}").unlink()
        os.kill(int(os.environ["FAKE_RUNNER"]), signal.SIGINT)
    slower = 1.3 if (folder / "slower").exists() else 1.1
    count = row["n"] * 7 + (folder / "more").exists()
    return {"name": args["name"], "n": row["n"], "seconds": (row["n"] + 1) * slower, "count": count}
