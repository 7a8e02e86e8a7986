"""`python -m flopcalc.measure.calibrate`: `flopcalc calibrate` without click."""

from __future__ import annotations

import sys

from flopcalc.measure.calibrate.run import main

if __name__ == "__main__":
    sys.exit(main())
