"""What DP-SGD costs: every trainer of the sweep at four sizes of one model, each in a process of its own.

    python benchmarks/dp_sgd.py --out DIR               on a GPU: 16 configurations of 1.3B parameters, under 9 minutes
    python benchmarks/dp_sgd.py --out DIR --tiny        the same with a tiny model: tries the script, also on a CPU
    python benchmarks/dp_sgd.py --show FILE             the tables; needs no torch
    python benchmarks/dp_sgd.py --show FILE --page docs/dp-sgd.md      puts them into the page

Writes DIR/dp_sgd.json after every configuration, one row a line. The same command goes on where it was cut short:
logs and journal stand in --work (default DIR/work). Exit code 1 if a configuration failed, 130 if it was stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

# The checkout that this script stands in, also where flopcalc is not installed.
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from flopcalc.base.errors import FlopcalcError
from flopcalc.measure.jobs.progress import Progress
from flopcalc.measure.sweep.matrix import CHILD, make_matrix
from flopcalc.measure.sweep.run import Swept, run_sweep
from flopcalc.measure.sweep.summary import summarize
from flopcalc.report.sweep import format_summary

Row = dict[str, Any]
SCHEMA = 1
NAME = "dp_sgd.json"
BEGIN, END = "<!-- tables of dp_sgd.json -->", "<!-- end of tables -->"
MATRIX: dict[str, Any] = {"models": ["1b"], "batch_sizes": [4, 8], "seq_lens": [512, 1024], "device": "cuda"}
TINY: dict[str, Any] = {"models": ["tiny"], "batch_sizes": [2, 3], "seq_lens": [16, 24], "device": "cpu"}


def measure(options: argparse.Namespace, call: str = CHILD) -> Swept:
    """Run what is missing, and write the rows there are after each."""
    configurations = make_matrix(
        **(TINY if options.tiny else MATRIX), steps=options.steps, warmup=options.warmup, timeout_s=options.timeout_s
    )
    path = os.path.join(options.out, NAME)
    os.makedirs(options.out, exist_ok=True)
    # No launcher: one at a time, also where several GPUs are free, for neighbours would share the host.
    swept = run_sweep(
        configurations,
        options.work or os.path.join(options.out, "work"),
        runs_dir=None,
        fresh=options.fresh,
        retry_failed=options.retry_failed,
        progress=Progress(sys.stderr, lists_results=True),
        call=call,
        on_rows=lambda rows: write_results(rows, path, describe_command(options)),
    )
    if swept.ran or not os.path.exists(path):
        write_results(swept.rows, path, describe_command(options))
    return swept


def describe_command(options: argparse.Namespace) -> str:
    """The command line, without the folders of the machine that it ran on."""
    words = ["python benchmarks/dp_sgd.py"]
    words += [f"--{name} {getattr(options, name)}" for name in ("steps", "warmup")]
    return " ".join([*words, *(["--tiny"] if options.tiny else [])])


def write_results(rows: Sequence[Row], path: str, command: str) -> None:
    """Provenance, then one row a line; replaced as a whole."""
    machines = [row["environment"] for row in rows if row["status"] == "ok"]
    date = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    about = {"command": command, "date": date, **(machines[0] if machines else {})}
    lines = ",\n".join("  " + json.dumps(row, ensure_ascii=False, allow_nan=False) for row in rows)
    with open(f"{path}.new", "w", encoding="utf-8") as file:
        file.write(f'{{\n "schema": {SCHEMA},\n "provenance": {json.dumps(about)},\n "rows": [\n{lines}\n ]\n}}\n')
    os.replace(f"{path}.new", path)


def read_results(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError) as error:
        raise FlopcalcError(f"{path}: cannot be read: {error}") from None
    schema = found.get("schema") if isinstance(found, dict) else None
    if schema != SCHEMA:
        raise FlopcalcError(f"{path}: schema {schema} is not known, this script reads {SCHEMA}")
    return dict(found)


def format_tables(results: dict[str, Any]) -> str:
    """Markdown: what the page shows."""
    return format_summary(summarize(results["rows"]), "github")


def write_page(page: str, tables: str) -> None:
    """The page with these tables between its two marks."""
    with open(page, encoding="utf-8") as file:
        text = file.read()
    before, found, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not found or not end:
        raise FlopcalcError(f"{page}: has no {BEGIN} and {END} to put the tables between")
    with open(page, "w", encoding="utf-8") as file:
        file.write(f"{before}{BEGIN}\n\n{tables}\n\n{END}{after}")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help=f"where {NAME} goes")
    parser.add_argument("--work", help="logs and journal (default: OUT/work)")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--steps", type=int, default=10, help="timed steps (default 10)")
    parser.add_argument("--warmup", type=int, default=3, help="steps before them (default 3)")
    parser.add_argument("--timeout-s", type=float, default=120.0, help="of one configuration (default 120)")
    parser.add_argument("--fresh", action="store_true", help="forget what was measured before")
    parser.add_argument("--retry-failed", action="store_true", help="measure those again that failed before")
    parser.add_argument("--show", metavar="FILE", help="print the tables of results")
    parser.add_argument("--page", metavar="FILE", help="with --show: put them into this page instead")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser()
    options = parser.parse_args(arguments)
    try:
        if options.show:
            tables = format_tables(read_results(options.show))
            if options.page:
                write_page(options.page, tables)
            else:
                print(tables)
            return 0
        if options.page:
            parser.error("--page needs --show FILE: the results that go into it")
        if not options.out:
            parser.error("--out DIR says where the results go")
        swept = measure(options)
        print(format_tables(read_results(os.path.join(options.out, NAME))))
        return 130 if swept.stopped else int(swept.failed > 0)
    except FlopcalcError as error:
        print(f"dp_sgd: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
