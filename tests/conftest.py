"""One thread per worker: several workers with several threads each are slower than the cores allow."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is first imported, here and in child processes
