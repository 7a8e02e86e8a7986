"""What the training monitor costs: one training with and without it, in turn, in one process.

    python benchmarks/monitor_overhead.py --out DIR --parts host,arms --budget-s 330    the goals, on a GPU, 6 minutes
    python benchmarks/monitor_overhead.py --out DIR [--models 1b,0.5b]                   every part
    python benchmarks/monitor_overhead.py --out DIR --tiny                    tries the script itself, also on a CPU
    python benchmarks/monitor_overhead.py --out DIR --join FILE FILE          models of several files into one
    python benchmarks/monitor_overhead.py --show FILE [--page PAGE]           the tables, and each goal; needs no torch

Writes DIR/monitor_overhead.json after every part; what is in it already and is not run again stays. Exit code 1 if a
goal is missed or could not be judged.

host       what the host does more in a step with the monitor, mean: in a plain loop and in the Trainer of Hugging Face,
           with the attention mask on the device. Steps with and without the monitor take turns.
arms       step times: blocks of steps of every arm follow each other in a shuffled order, round by round, and every arm
           is compared with `none` of the same round. `none2` is `none` once more: its difference is the noise of the
           run. What the monitor's threads have not done when a block ends is done then, and added to the block.
measured   what a step costs that the monitor measures.
agreement  the reported HFU beside the tensor operations that the GPU's own counter saw.
waiting    that nothing the monitor calls in a step waits for the device.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from monitor_overhead_loop import SCALES, SEED, TINY, Deadline, Loop, PictureLoop, Place
from monitor_overhead_parts import (
    DROPPED_ROUNDS,
    Arms,
    check_agreement,
    check_waiting,
    describe,
    measure_extra,
    measure_plain_loop,
    measure_trainer,
)
from monitor_overhead_tables import (
    MASK,
    MEASURED_PARTS,
    NO_MASK,
    PARTS,
    RUN_STEPS,
    SAME_MASK,
    Results,
    Row,
    find_rows,
    format_table,
    join_results,
    make_results,
    read_results,
    trim_history,
    write_page,
    write_results,
)

NAME = "monitor_overhead.json"


class Run:
    """All parts of one model; a part that fails leaves its reason, and the others go on."""

    def __init__(self, name: str, options: argparse.Namespace, path: str, deadline: Deadline) -> None:
        import torch

        self._place = Place(torch.cuda.is_available())
        if not self._place.is_gpu and not options.tiny:
            raise SystemExit("no CUDA device here: this is measured on a GPU; --tiny tries the script itself")
        if not self._place.is_gpu:
            torch.set_num_threads(1)  # a toy's steps are too small to share
        self._name, self._options, self._path, self._deadline = name, options, path, deadline
        self._scale = TINY if options.tiny else SCALES[name]
        self._parts = options.parts.split(",")
        self._results = read_results(path) if os.path.exists(path) else make_results()

    def _tell(self, message: str) -> None:
        print(f"{self._deadline.left_s():6.0f} s left  {self._name}: {message}", flush=True)

    def _add(self, part: str, row: Row) -> None:
        self._results[part].append({"model": self._name, **row})

    def _attempt(self, part: str, what: str, call: Callable[[], None]) -> None:
        if part not in self._parts:
            return
        self._tell(what)
        try:
            call()
        except Exception as error:
            traceback.print_exc()
            self._add("problems", {"part": what, "reason": describe(error)})
        write_results(self._results, self._path)

    def run(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            loop = Loop(self._scale, self._place, folder)
            for _ in range(3):
                loop.train_step()
            step_s = loop.time_plain_step()
            self._begin(loop)
            self._tell(f"{loop.parameters:,} parameters, a plain step takes {1e3 * step_s:.1f} ms")
            # The counters' first start of this process is in the first of these.
            for mode in ("smart", "hybrid"):
                self._measure_extra(loop, mode, self._scale.measured)
            steps = self._scale.host_steps
            for mode, what in (("smart", MASK), ("estimate", MASK), ("estimate", NO_MASK), ("smart", SAME_MASK)):
                self._attempt(
                    "host",
                    f"host time, plain loop, {mode}, {what}",
                    lambda mode=mode, what=what: self._add("host", measure_plain_loop(loop, mode, what, steps)),
                )
            self._attempt(
                "host", "host time, Trainer", lambda: self._add("host", measure_trainer(loop, "smart", steps))
            )
            self._attempt("agreement", "agreement", lambda: self._add("agreement", check_agreement(loop)))
            self._check_waiting("no mask", lambda: (loop, loop.plain))
            self._check_waiting("mask on the device", lambda: (loop, loop.ragged))
            self._check_waiting("image_grid_thw on the device", lambda: self._make_pictures(folder))
            # A profiled step takes some ten to twenty plain ones, and its trace is read; it comes last.
            reserve_s = 5 + (25 * step_s * (self._scale.profiled + 3) + 60 * step_s if "measured" in self._parts else 0)
            self._attempt("arms", "arms", lambda: self._run_arms(loop, reserve_s))
            self._measure_extra(loop, "profiler", self._scale.profiled)
            self._tell("done")

    def _begin(self, loop: Loop) -> None:
        """Rows of parts that run now go; the others stay, with the provenance that they were measured under."""
        name, options, results = self._name, self._options, self._results
        before = trim_history(next(iter(find_rows(results, "provenance", name)), None), self._parts)
        for part in PARTS:
            if part in (*self._parts, "provenance", "problems"):
                results[part] = [row for row in results[part] if row["model"] != name]
        words = ["python benchmarks/monitor_overhead.py", f"--models {name}", f"--steps {options.steps}"]
        words += [f"--parts {options.parts}"] if options.parts != ",".join(MEASURED_PARTS) else []
        words += [f"--budget-s {options.budget_s:g}", *(["--tiny"] if options.tiny else [])]
        from flopcalc.measure.calibrate.provenance import describe_machine

        self._add(
            "provenance",
            {
                **describe_machine(self._place.device),
                "command": " ".join(words),
                "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
                "parameters": loop.parameters,
                "is_tiny": options.tiny,
                "seed": SEED,
                **self._scale._asdict(),
                "parts": self._parts,
                "before": before,
            },
        )

    def _measure_extra(self, loop: Loop, mode: str, count: int) -> None:
        self._attempt(
            "measured", f"measured steps, {mode}", lambda: self._add("measured", measure_extra(loop, mode, count))
        )

    def _check_waiting(self, what: str, make: Callable[[], tuple[Loop, Any]]) -> None:
        self._attempt("waiting", f"waiting, {what}", lambda: self._add("waiting", check_waiting(what, *make())))

    def _make_pictures(self, folder: str) -> tuple[Loop, Any]:
        loop = PictureLoop(self._place, folder)
        return loop, loop.ragged

    def _run_arms(self, loop: Loop, reserve_s: float) -> None:
        def add_problem(arm: str, reason: str) -> None:
            self._add("problems", {"part": f"arm {arm}", "reason": reason})

        def keep(rows: list[Row]) -> None:
            self._results["arms"] = [row for row in self._results["arms"] if row["model"] != self._name]
            for row in rows:
                self._add("arms", row)
            write_results(self._results, self._path)

        arms = Arms(loop, self._tell, add_problem, DROPPED_ROUNDS)
        arms.run(self._options.steps, reserve_s, self._deadline, keep)


def run_each(models: Sequence[str], options: argparse.Namespace, deadline: Deadline) -> None:
    """A process for each model: what one leaves behind in the driver is not in the next one's figures."""
    for index, name in enumerate(models):
        share = deadline.left_s() / (len(models) - index)
        command = [sys.executable, os.path.abspath(__file__), "--out", options.out, "--models", name]
        command += ["--steps", str(options.steps), "--parts", options.parts, "--budget-s", f"{share:.0f}"]
        command += ["--tiny"] if options.tiny else []
        subprocess.run(command, check=False)  # its goals are judged below once more


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="folder of the results")
    parser.add_argument("--models", default=",".join(SCALES), help=f"of {', '.join(SCALES)}")
    parser.add_argument("--steps", type=int, default=RUN_STEPS, help="at most so many steps an arm")
    parser.add_argument("--budget-s", type=float, default=840.0, help="for all models together; arms stop in time")
    parser.add_argument(
        "--parts", default=",".join(MEASURED_PARTS), help="only these; the others stay as the file in --out has them"
    )
    parser.add_argument("--tiny", action="store_true", help="a toy model: nothing is judged")
    parser.add_argument("--join", nargs="+", metavar="FILE", help="only write these files' models into one")
    parser.add_argument("--show", metavar="FILE", help="only print the tables of a file")
    parser.add_argument("--page", help="with --show: also write them into this page, between its two comments")
    options = parser.parse_args(arguments)
    if options.page and not options.show:
        parser.error("--page needs --show FILE")
    if options.show:
        results = read_results(options.show)
        if options.page:
            write_page(options.page, format_table(results))
        return _show(results)
    if not options.out:
        parser.error("--out DIR is needed")
    models = options.models.split(",")
    for what, given, known in (("model", models, SCALES), ("part", options.parts.split(","), MEASURED_PARTS)):
        for name in given:
            if name not in known:
                parser.error(f"no {what} {name!r}; known: {', '.join(known)}")
    os.makedirs(options.out, exist_ok=True)
    path = os.path.join(options.out, NAME)
    deadline = Deadline(options.budget_s)
    if options.join:
        write_results(join_results(options.join), path)
    elif len(models) == 1:
        Run(models[0], options, path, deadline).run()
    else:
        run_each(models, options, deadline)
    return _show(read_results(path))


def _show(results: Results) -> int:
    print(format_table(results))
    tiny = {row["model"] for row in results["provenance"] if row["is_tiny"]}
    return int(any(not row["met"] for row in results["goals"] if row["model"] not in tiny))


if __name__ == "__main__":
    sys.exit(main())
