"""What holds for all tests: one thread per worker, and the same drawn examples in every run.

Several workers with several threads each are slower than the cores allow. `--hypothesis-profile=default` draws others.
"""

from __future__ import annotations

import os

from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is first imported, here and in child processes

settings.register_profile("same", derandomize=True)
settings.load_profile("same")
