"""What holds for all tests: one thread per worker, the same drawn examples in every run, and a tier of heavy tests.

Several workers with several threads each are slower than the cores allow. `--hypothesis-profile=default` draws others.
"""

from __future__ import annotations

import os
import sys

from formats import settle_bf16
from hypothesis import settings

pytest_plugins = ["tiers", "journal", "pytester"]  # the first two: tests/helpers; pytester tests them

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is first imported, here and in child processes
os.environ.pop("COLUMNS", None)  # pytest-xdist's workers have it; a test that needs a terminal's width sets one

settings.register_profile("same", derandomize=True)
settings.load_profile("same")


def pytest_runtest_setup() -> None:
    """torch warns once of a CPU without bf16 and takes another kernel ever after: no test is the one that it warns."""
    if "torch" in sys.modules:
        settle_bf16()
