"""What versions of transformers do to routed rows, besides the operators that were recorded for one version.

Experts take the rows that a router sends them, sorted by expert. Some versions mask rows that belong to no expert of
this device, on one device too. Source: transformers, src/transformers/integrations/moe.py, grouped_mm_experts_forward,
releases 5.0 to 5.22.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from flopcalc.base.errors import WorkloadError, format_value
from flopcalc.core.model.ops import Op

# The version whose code runs if none is named: that of the machine on which steps with experts were measured.
USUAL = "5.17"
RECORDED = "5.22"  # the version whose operators model_specs/operators holds
FREE = "5.18"  # the first that masks nothing on one device any more
_VERSION = re.compile(r"(\d{1,4})\.(\d{1,4})(?:[.a-z].*)?")

# Direction, kind, calls, bytes read, bytes written: as in model_specs/operators, of the experts' module.
Table = list[tuple[str, str, int, str, str]]
_ROWS, _INNER = "x*tokens*.n_in*.active", "x*tokens*.n_out*.active"  # gathered and given back; between the products
_PLACES = "l*tokens*.active"
MASKED = "pointwise_strided_masked"  # a kernel that reads one mask a row


class _Masks(NamedTuple):
    """Which rows a version masks: in place, or as a copy."""

    first: tuple[int, int]  # the first release that does so
    in_place: tuple[str, ...] = ()
    copied: tuple[str, ...] = ()


_VERSIONS = (
    _Masks((0, 0)),
    _Masks((5, 6), (_ROWS,)),
    _Masks((5, 8), (_ROWS, _ROWS)),
    _Masks((5, 17), (_ROWS,), (_INNER, _ROWS)),
    _Masks((5, 18)),
)


def is_routed(op: Op) -> bool:
    """Whether rows are sorted for a module's experts. With one expert a row (Llama 4), HF runs all over all rows."""
    return op.kind == "linear" and op.copies > 1 and op.active > 1


def parse_version(text: str) -> str:
    """A release of transformers, as 5.17 or 5.17.0."""
    if not isinstance(text, str) or not _VERSION.fullmatch(text.strip()):
        raise WorkloadError(f"a version of transformers is written as 5.17 or 5.17.0, not {format_value(text)}")
    return text.strip()


def _find_masks(version: str) -> _Masks:
    found = _VERSION.fullmatch(version)
    assert found is not None
    asked = (int(found[1]), int(found[2]))
    return [each for each in _VERSIONS if each.first <= asked][-1]


def list_masks(version: str) -> Table:
    """The operators that a version adds to experts: masks, the copies that they are made of, and their gradients."""
    masks = _find_masks(version)
    masked = (*masks.in_place, *masks.copied)
    if not masked:
        return []
    rows: Table = [
        ("f", "pointwise", 2, _PLACES, _PLACES),
        ("f", "view", 1, "", ""),
        ("b", "node", len(masked), "", ""),
    ]
    rows += [("f", "copy", 1, moved, moved) for moved in masks.copied]
    for moved in masked:
        rows.append(("f", MASKED, 1, moved, moved))
        rows += [("b", "copy", 1, moved, moved), ("b", MASKED, 1, moved, moved)]
    return rows
