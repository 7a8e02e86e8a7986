"""One performance under every quoted convention: an estimate and what was printed in; rows, nearest first, out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from flopcalc.base.errors import FlopcalcError, SpecError, format_value
from flopcalc.base.presentation import find_presenter
from flopcalc.base.spelling import spell
from flopcalc.base.units import check_positive, check_size, format_difference, parse_number
from flopcalc.core.estimate.estimate import Estimate, check_tokens
from flopcalc.core.estimate.published_conventions import find_quoted, load_quoted
from flopcalc.core.estimate.utilization import find_peak

FIT = 0.005  # a convention explains a printed figure that it meets within half a per cent
# Differences are ordered in steps of this: printed figures are rounded, and some conventions are equal for some models.
# Among equals the one that most published rows count in comes first.
_STEP = 0.001


class TranslatedRow(NamedTuple):
    """The same performance under one convention."""

    name: str
    flops: int  # of the whole step
    terms: dict[str, int]  # of its formula
    flops_per_token: float
    tflops_per_gpu: float
    mfu: float | None  # None without a peak
    difference: float | None  # from the convention or the rate that was quoted, as a share; None if none was
    fits: bool
    counts: str
    leaves_out: str
    source: str
    url: str
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        shown = self._asdict()
        return {"quoted_convention": shown.pop("name"), **shown, "note": self.note or None}


class Translation(NamedTuple):
    """A quoted performance, and what it is under every convention."""

    model: str
    work: str
    quoted: str | None  # the convention it was quoted in, or the one that fits best
    is_fit: bool  # found from a printed rate, not named
    tokens_per_second: float
    gpus: int
    device: str | None
    dtype: str
    peak_flops_per_s: float | None
    rows: tuple[TranslatedRow, ...]
    notes: tuple[str, ...]
    routing: str | None = None  # of a model with experts

    @property
    def fits(self) -> list[str]:
        """The conventions within half a per cent of what was quoted, nearest first."""
        return [row.name for row in self.rows if row.fits]

    def find(self, name: str) -> TranslatedRow:
        """The row of one convention."""
        wanted = find_quoted(name).name
        for row in self.rows:
            if row.name == wanted:
                return row
        raise FlopcalcError(f"convention {wanted} has no row for this model; the notes say why")

    def _repr_html_(self) -> str:
        return find_presenter().show_translation(self)

    def to_dict(self) -> dict[str, Any]:
        from flopcalc._version import __version__

        return {
            "schema": 1,
            "version": __version__,
            "model": self.model,
            "work": self.work,
            "routing": self.routing,
            "quoted_convention": self.quoted,
            "is_fit": self.is_fit,
            "fits": self.fits,
            "tokens_per_second": self.tokens_per_second,
            "gpus": self.gpus,
            "device": self.device,
            "dtype": self.dtype,
            "peak_flops_per_s": self.peak_flops_per_s,
            "rows": [row.to_dict() for row in self.rows],
            "notes": list(self.notes),
        }


def translate_estimate(
    estimate: Estimate,
    *,
    from_: str | None = None,
    mfu: float | str | None = None,
    tflops: float | None = None,
    tokens_per_second: float | None = None,
    gpus: int | None = None,
    device: str | None = None,
    dtype: object = "bf16",
    peak: float | Mapping[str, float] | None = None,
    mtp: int | None = None,
) -> Translation:
    """What a quoted MFU, a rate in TFLOP/s per GPU, or tokens per second of all GPUs is under every convention."""
    quoted = None if from_ is None else find_quoted(from_).name
    gpus = estimate.gpus if gpus is None else check_size(gpus, "gpus")
    mtp = None if mtp is None else check_size(mtp, "mtp", 0)
    tokens = check_tokens(estimate, "a quoted figure").tokens
    terms, missing = _count_all(estimate, mtp, quoted)
    flops = {each: sum(values.values()) for each, values in terms.items()}
    name, rate, said = _find_rate(device, dtype, peak, mfu is not None)
    printed = _read_printed(mfu, tflops, rate)
    pace = _find_pace(quoted, printed, tokens_per_second, gpus, flops, tokens)
    is_fit = quoted is None and printed is not None
    base = printed if is_fit and printed is not None else pace * flops[quoted] / tokens / gpus if quoted else None
    rows = []
    for each in load_quoted().conventions.values():
        if each.name not in flops:
            continue
        per_gpu = pace * flops[each.name] / tokens / gpus
        difference = per_gpu / base - 1 if base else None
        is_other = each.types and estimate.terms[0].estimator.source.config["model_type"] not in each.types
        rows.append(
            TranslatedRow(
                each.name,
                flops[each.name],
                terms[each.name],
                flops[each.name] / tokens,
                per_gpu / 1e12,
                None if rate is None else per_gpu / rate,
                difference,
                difference is not None and abs(difference) <= FIT,
                each.counts,
                each.leaves_out,
                each.source,
                each.url,
                each.otherwise if is_other else "",
            )
        )
    if is_fit:
        known = load_quoted().conventions
        rows.sort(key=lambda row: (round(abs(row.difference or 0.0) / _STEP), -known[row.name].published_rows))
    best = rows[0].name if is_fit and rows[0].fits else quoted
    notes = [*_describe(rows, is_fit, best), *missing, *said]
    kind, estimator = str(dtype), estimate.terms[0].estimator
    return Translation(
        estimator.source.name,
        estimate.describe(),
        best,
        is_fit,
        pace,
        gpus,
        name,
        kind,
        rate,
        tuple(rows),
        tuple(notes),
        estimator.routing_name,
    )


def _count_all(estimate: Estimate, mtp: int | None, quoted: str | None) -> tuple[dict[str, dict[str, int]], list[str]]:
    """FLOPs of the step under every convention, and why some have none for this model."""
    if any(term.estimator.origin == "trace" for term in estimate.terms):
        note = "a traced model's layers are not known: only convention full is counted"
        return {"full": estimate.terms_under("full")}, [note]
    terms, missing = {}, []
    for name in load_quoted().conventions:
        try:
            terms[name] = estimate.terms_under(name, mtp=mtp)
        except SpecError:
            raise
        except FlopcalcError as error:  # a formula that needs a dim which this model has not, or not only one of
            if name == quoted:
                raise
            missing.append(str(error))
    return terms, missing


def _find_rate(
    device: str | None, dtype: object, peak: float | Mapping[str, float] | None, is_needed: bool
) -> tuple[str | None, float | None, list[str]]:
    if device is None and peak is None:
        if is_needed:
            raise FlopcalcError(
                f"an MFU is a share of a peak: name the {spell('device')}, or give its {spell('peak', 'FLOPS_PER_S')}"
            )
        return None, None, []
    name, rate, note = find_peak(device, dtype, peak)
    if rate is None and is_needed:
        raise FlopcalcError(note or f"this device's peak is not known: give {spell('peak', 'FLOPS_PER_S')}")
    return name, rate, [note] if note and rate is not None else []


def _read_printed(mfu: float | str | None, tflops: float | None, rate: float | None) -> float | None:
    """The quoted rate of one GPU in FLOP/s, from an MFU or as TFLOP/s; None if neither is given."""
    share = None if mfu is None else parse_mfu(mfu)
    printed = None if tflops is None else check_positive(tflops, "tflops") * 1e12
    if share is None or rate is None:
        return printed
    if printed is not None and abs(share * rate / printed - 1) > FIT:
        raise FlopcalcError(
            f"an MFU of {100 * share:.4g} % is {share * rate / 1e12:,.4g} TFLOP/s of this peak, not "
            f"{printed / 1e12:,.4g}: give {spell('mfu')} or {spell('tflops')}, not both"
        )
    return share * rate


def parse_mfu(value: float | str) -> float:
    """'45%', '0.45' or 0.45 -> 0.45; above 100 % only with the sign, for 45 may mean either."""
    if not isinstance(value, str):
        share = check_positive(value, "mfu")
        if share > 10:
            raise FlopcalcError(f"mfu {format_value(value)} would be {100 * share:,.0f} %: write 0.45 or '45%'")
        return share
    share = parse_number(value, "mfu")
    if share > 1 and "%" not in value:
        raise FlopcalcError(f"{spell('mfu')}: {format_value(value)} is more than 1; write 45% or 0.45")
    return share


def _find_pace(
    quoted: str | None,
    printed: float | None,
    tokens_per_second: float | None,
    gpus: int,
    flops: dict[str, int],
    tokens: int,
) -> float:
    """Tokens per second of all GPUs."""
    if printed is None and tokens_per_second is None:
        raise FlopcalcError(
            f"what was quoted? Give {spell('mfu', '45%')}, {spell('tflops', '400')} or "
            f"{spell('tokens_per_second', '9k')}"
        )
    if quoted is not None and quoted not in flops:
        raise FlopcalcError(f"convention {quoted} needs a model's layers: of a traced model only full is known")
    if tokens_per_second is None:
        assert printed is not None
        if quoted is None:
            raise FlopcalcError(
                f"whose FLOPs are these? Name the convention with {spell('from')}, or give "
                f"{spell('tokens_per_second')} too to find it; "
                f"known: {', '.join(flops)}"
            )
        return printed * gpus * tokens / flops[quoted]
    pace = check_positive(tokens_per_second, "tokens per second")
    if quoted is not None and printed is not None:
        found = pace * flops[quoted] / tokens / gpus
        if abs(found / printed - 1) > FIT:
            raise FlopcalcError(
                f"{pace:,.6g} tokens per second are {found / 1e12:,.4g} TFLOP/s per GPU under {quoted}, not "
                f"{printed / 1e12:,.4g}: leave one of them out, or leave {spell('from')} out to see which "
                "convention fits"
            )
    return pace


def _describe(rows: list[TranslatedRow], is_fit: bool, best: str | None) -> list[str]:
    notes = []
    if is_fit:
        fitting = [row.name for row in rows if row.fits]
        if not fitting:
            distance = format_difference(rows[0].difference)
            notes.append(f"no convention fits within 0.5 %; the nearest, {rows[0].name}, is {distance}")
        elif len(fitting) > 1:
            notes.append(f"{len(fitting)} conventions fit within 0.5 %: for this model they are nearly equal")
    over = [row.name for row in rows if row.mfu is not None and row.mfu > 1]
    if over:
        notes.append(
            f"above 100 % of the peak under {', '.join(over)}: the peak, the time or that count is wrong; nothing is "
            "clamped"
        )
    named = next((row for row in rows if row.name == best), None)
    if named is not None and named.note:
        notes.append(named.note)
    return notes
