"""The options that say how fast a step ran and on what, and the shares of the peak that follow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from flopcalc.cli.options.counting import read_number
from flopcalc.cli.options.workload import add_options, dtype_option
from flopcalc.core.estimate.estimate import Estimate
from flopcalc.errors import WorkloadError, format_value
from flopcalc.hardware.devices import DTYPES, parse_dtype
from flopcalc.units import parse_number, parse_share

if TYPE_CHECKING:
    from flopcalc.core.estimate.run import Run
    from flopcalc.core.estimate.utilization import Utilization

# --step-time, --peak and their like.
time_options = add_options(
    dtype_option("|".join(DTYPES[:4]) + "|…"),
    click.option(
        "--peak",
        metavar="FLOPS_PER_S",
        help="Dense peak of one device, instead of the table's: 989T for all, or bf16=989T,fp8=1979T.",
    ),
    click.option("--gpus", "--num-devices", "gpus", metavar="N", help="GPUs that share the step (default 1)."),
    click.option(
        "--step-time", metavar="TIME", help="Measured time of one step, such as 0.5 or 500ms; gives MFU and HFU."
    ),
    click.option(
        "--tokens-per-second",
        metavar="N",
        help="Measured tokens per second of all GPUs, such as 12k; gives MFU and HFU.",
    ),
)

# --tokens and --mfu.
run_options = add_options(
    click.option("--tokens", metavar="N", help="Tokens of a whole run, such as 15T; gives steps, FLOPs and GPU-hours."),
    click.option(
        "--mfu", metavar="SHARE", help="MFU for the run's GPU-hours, such as 40% (default: as measured, or 100 %)."
    ),
)


def make_shares(
    estimate: Estimate, options: Mapping[str, object]
) -> tuple[Utilization | None, Utilization | None, list[str]]:
    """MFU and HFU where a time is given, and notes; without one, the least time that the peak allows."""
    where, measured = _read_place(options), _read_time(options)
    if not measured and where["device"] is None and where["peak"] is None:
        if options["gpus"]:
            raise WorkloadError("--gpus needs a --device or a --peak")
        return None, None, []
    from flopcalc.core.estimate.utilization import describe_least_time, hfu, mfu  # only with a peak or a time

    if not measured:
        return None, None, [note for note in describe_least_time(estimate, **where) if note not in estimate.notes]
    model_share, hardware_share = (share(estimate, **measured, **where) for share in (mfu, hfu))
    found = [share.note for share in (model_share, hardware_share) if share.note and share.note not in estimate.notes]
    return model_share, hardware_share, list(dict.fromkeys(found))


def make_run(estimate: Estimate, options: Mapping[str, Any]) -> Run | None:
    """The whole run that --tokens asks for."""
    share = None if options["mfu"] is None else parse_share(options["mfu"], "--mfu")
    if options["tokens"] is None:
        if share is not None:
            raise WorkloadError("--mfu belongs to a whole run: give its --tokens too; --step-time gives a step's MFU")
        return None
    from flopcalc.core.estimate.run import count_run  # only for a whole run

    return count_run(estimate, options["tokens"], mfu=share, **_read_time(options), **_read_place(options))


def _read_place(options: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "device": options["device"], "dtype": None,
        "peak": read_peak(options["peak"]), "gpus": read_number(options["gpus"], "--gpus") or 1,
    }  # fmt: skip


def _read_time(options: Mapping[str, Any]) -> dict[str, Any]:
    """What was measured of a step, if anything."""
    found = {
        "step_time_s": read_rate(options["step_time"], "--step-time"),
        "tokens_per_second": read_rate(options["tokens_per_second"], "--tokens-per-second"),
    }
    return {name: value for name, value in found.items() if value is not None}


def read_peak(text: str | None) -> float | dict[str, float] | None:
    """'989T', or one per format: 'bf16=989T,fp8=1979T'."""
    if text is None or "=" not in text:
        return read_rate(text, "--peak")
    found: dict[str, float] = {}
    for piece in text.split(","):
        name, equals, value = piece.partition("=")
        kind = parse_dtype(name.strip()) if equals else ""
        if not equals or kind in found:
            problem = f"gives {kind} twice" if equals else f"has {format_value(piece)}, which is not FORMAT=FLOPS_PER_S"
            raise WorkloadError(f"--peak {problem}; write it as bf16=989T,fp8=1979T")
        found[kind] = parse_number(value, "--peak")
    return found


def read_rate(text: str | None, flag: str) -> float | None:
    return None if text is None else parse_number(text, flag)
