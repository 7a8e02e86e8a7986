"""Fixtures of the monitor's tests."""

from __future__ import annotations

import pytest
from loop import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The monitor's clock, in the hands of the test."""
    clock = Clock()
    monkeypatch.setattr("flopcalc.monitor.training._clock", clock)
    return clock


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller of metrics() waits for the count, no matter how slow the host is."""
    monkeypatch.setattr("flopcalc.monitor.training._CATCH_UP_S", 60.0)
