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
