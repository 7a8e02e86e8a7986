"""`flopcalc calibrate`: measure this machine's GPU into tables, or check the stored ones."""

from __future__ import annotations

import sys

import click

from flopcalc.cli.command import Command

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
    "--host", is_flag=True, help="Measure only this CPU and adapt the shipped predictor to it: under a minute."
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
    from argparse import Namespace

    from flopcalc.measure.calibrate.run import describe_command, run_command

    options = Namespace(
        suite=suite, tables=tables, out=out, work=work, resume=resume is True, fresh=resume is False,
        retry_failed=retry_failed, check=check, predictor=predictor, host=host,
    )  # fmt: skip
    ctx.exit(run_command(options, describe_command(sys.argv[2:])))
