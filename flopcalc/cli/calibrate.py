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
@click.option("--tables", metavar="A,B", help=f"Only these of {_TABLES}.")
@click.option(
    "--out",
    metavar="DIR",
    help="Where <device>/<table>.json or, of a predictor, <device>.json go (default: your data folder).",
)
@click.option("--work", metavar="DIR", help="Journal and logs of the run (default: OUT/.run).")
@click.option("--resume/--fresh", "resume", default=None, help="Go on with a run (default), or forget it.")
@click.option("--retry-failed", is_flag=True, help="Measure rows again that failed before.")
@click.option(
    "--predictor", is_flag=True, help="Whole steps instead of tables, about 12 min: what `flopcalc predict` reads."
)
@click.option(
    "--host", is_flag=True, help="How fast this CPU dispatches, under a minute: adapts the shipped predictor to it."
)
@click.option("--check", is_flag=True, help="Measure a sample again; exit code 1 if the tables do not hold.")
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

    Row by row and resumable: a crash, a lack of memory or a hang is a row of the table, Ctrl-C stops after the
    current row, and the same command goes on.
    """
    from argparse import Namespace

    from flopcalc.measure.calibrate.run import describe_command, run_command

    options = Namespace(
        suite=suite, tables=tables, out=out, work=work, resume=resume is True, fresh=resume is False,
        retry_failed=retry_failed, check=check, predictor=predictor, host=host,
    )  # fmt: skip
    ctx.exit(run_command(options, describe_command(sys.argv[2:])))
