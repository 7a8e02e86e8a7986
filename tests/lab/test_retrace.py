"""The recorded traces still hold: HF's models are built, run and counted anew, and every number is compared."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from families import FAMILIES

from lab.truth import (
    Entry,
    find_differences,
    list_entries,
    list_types,
    load,
    record,
    record_entry,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # peft and torch advise on training, which this is not


def retrace(name: str, is_asked: Callable[[Entry], bool]) -> list[str]:
    """What the configs of a type that are asked for execute otherwise than recorded."""
    from flopcalc.measure.hf.examples import find_example

    example = find_example(name)
    if example.needs:
        pytest.importorskip(example.needs)
    old = load(name)
    entries = [entry for entry in list_entries(example, old) if is_asked(entry)]
    assert entries
    new = old._replace(
        architecture=example.architecture, entries=tuple(record_entry(example, each) for each in entries)
    )
    return find_differences(old._replace(entries=tuple(filter(is_asked, old.entries))), new)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_first_traces_still_hold(name: str) -> None:
    old = load(name)
    new = record(name, old, limit=2)
    assert len(new.cases) == 2
    assert find_differences(old, new, is_part=True) == []


@pytest.mark.heavy
@pytest.mark.parametrize("name", list_types())
def test_traces_still_hold(name: str) -> None:
    different = retrace(name, lambda entry: not entry.preset)
    assert not different, "\n".join([f"{len(different)} differ", *different])


@pytest.mark.heavy
@pytest.mark.parametrize("name", FAMILIES)
def test_traces_of_published_sizes_still_hold(name: str) -> None:
    different = retrace(name, lambda entry: bool(entry.preset))
    assert not different, "\n".join([f"{len(different)} differ", *different])
