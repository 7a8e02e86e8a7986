"""`flopcalc calibrate`: measure this machine's GPU into tables, or check the stored ones."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from flopcalc.base.data import find_user_dir
from flopcalc.base.errors import CalibrationError
from flopcalc.cli.command import Command
from flopcalc.hardware.tables import FOLDER

if TYPE_CHECKING:
    from flopcalc.measure.calibrate.run import Check, Written

# Spelled out here and not read from flopcalc.measure: --help must not load the torch side.
_TABLES = "counts, padding, attention, gemm, memory, steps"


@click.command(cls=Command)
@click.option(
    "--suite", default="quick", show_default=True, metavar="quick|full", help="quick: under 8 min on an H200."
)
@click.option("--tables", metavar="A,B", help=f"Only these tables, out of {_TABLES}.")
@click.option(
    "--out",
    metavar="DIR",
    help="Folder for <device>/<table>.json, or for a predictor <device>.json (default: your data folder).",
)
@click.option("--work", metavar="DIR", help="Journal and logs of the run (default: OUT/.run).")
@click.option("--resume/--fresh", "resume", default=None, help="Continue an earlier run (default), or start again.")
@click.option("--retry-failed", is_flag=True, help="Measure failed rows again.")
@click.option(
    "--predictor",
    is_flag=True,
    help="Measure whole steps instead of tables, for `flopcalc predict`: under 10 min on an H200.",
)
@click.option(
    "--host", is_flag=True, help="Adapt the shipped predictor to this machine's CPU: under a minute, needs its GPU."
)
@click.option("--check", is_flag=True, help="Measure a sample again; exit code 1 if it disagrees with the tables.")
@click.pass_context
def calibrate(
    ctx: click.Context,
    suite: str,
    tables: str | None,
    out: str | None,
    work: str | None,
    resume: bool | None,
    retry_failed: bool,
    predictor: bool,
    host: bool,
    check: bool,
) -> None:
    """Measure this machine's GPU into tables.

    If a row crashes, hangs or runs out of memory, it becomes a failure in the table, and the other rows follow. Ctrl-C
    stops after the current row; the same command continues from there.
    """
    from flopcalc.measure.calibrate.run import calibrate as measure
    from flopcalc.measure.calibrate.run import check as check_again
    from flopcalc.measure.calibrate.run import check_suite
    from flopcalc.measure.jobs.runner import Progress

    names = [name.strip() for name in tables.split(",") if name.strip()] if tables else None
    command, progress, fresh = _describe_command(sys.argv[2:]), Progress(sys.stderr), resume is False
    if host:
        if names or check or predictor or work or suite != "quick":
            raise CalibrationError("--host measures the host alone: of the other options it takes --out")
        from flopcalc.measure.predictor.host_speed import calibrate_host

        click.echo(calibrate_host(out, command=command))
    elif predictor:
        if names or check:
            raise CalibrationError("--predictor measures whole steps: it takes neither --tables nor --check")
        check_suite(suite, None)
        from flopcalc.measure.predictor.run import calibrate_predictor

        path = calibrate_predictor(
            out, suite=suite, work=work, fresh=fresh, retry_failed=retry_failed, command=command, progress=progress
        )
        if path is None:
            ctx.exit(_stop())
        click.echo(path)
    elif check:
        ctx.exit(_show_check(check_again(out, suite, tables=names, work=work, progress=progress)))
    else:
        folder = out or os.path.join(find_user_dir(), FOLDER)
        ctx.exit(
            _show_written(
                measure(
                    suite,
                    folder,
                    tables=names,
                    work=work,
                    fresh=fresh,
                    retry_failed=retry_failed,
                    command=command,
                    progress=progress,
                )
            )
        )


def _stop() -> int:
    click.echo("stopped: the same command goes on", err=True)
    return 130


def _show_written(written: Written) -> int:
    """Exit code 1 for a table without a row, 130 after Ctrl-C."""
    for table, path in written.files.items():
        failed = f", {written.failures[table]} failed" if written.failures[table] else ""
        click.echo(f"{path}: {written.rows[table]} rows{failed}")
    for table in written.empty:
        click.echo(
            f"{table}: no row was measured ({written.failures[table]} failed), so it was not written; "
            "a table from before stands. --retry-failed measures them again",
            err=True,
        )
    return _stop() if written.stopped else 1 if written.empty else 0


def _show_check(found: Check) -> int:
    """Exit code 1 where a table does not hold, 130 after Ctrl-C."""
    for table, path in found.files.items():
        differ = [difference for difference in found.differences if difference.table == table]
        click.echo(f"{path}: {found.rows[table]} rows measured again, {'holds' if not differ else 'DOES NOT HOLD'}")
        for difference in differ:
            click.echo(f"  {difference.row}: {difference.column} {difference.stored} -> {difference.measured}")
    return 130 if found.stopped else 1 if found.differences else 0


def _describe_command(given: Sequence[str]) -> str:
    """The command line for provenance, without the folders of the machine that it ran on."""
    kept = []
    skip = False
    for word in given:
        if not skip and word.partition("=")[0] not in ("--out", "--work"):
            kept.append(word)
        skip = not skip and word in ("--out", "--work")
    return " ".join(["flopcalc calibrate", *kept])
