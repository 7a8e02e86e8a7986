"""What holds for all tests: one thread per worker, the same drawn examples in every run, and a tier of heavy tests.

Several workers with several threads each are slower than the cores allow. `--hypothesis-profile=default` draws others.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

pytest_plugins = ["tiers", "pytester"]  # tiers: tests/helpers; pytester tests it

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is first imported, here and in child processes
os.environ.pop("COLUMNS", None)  # pytest-xdist's workers have it; a test that needs a terminal's width sets one

settings.register_profile("same", derandomize=True)
settings.load_profile("same")


@pytest.fixture(scope="session")
def bf16_products() -> None:
    """For tests that multiply in bf16: torch warns of a CPU without it once, and takes another kernel ever after."""
    from formats import settle_bf16

    settle_bf16()
