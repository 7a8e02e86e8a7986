"""Host time of model types that the shipped calibration did not measure, and of an optimizer's tensors.

`measure` runs on a GPU machine: small steps of narrow models of each type, at two depths, each between runs of the
probe, as `flopcalc calibrate --predictor` does it; llama and qwen2 are measured again to compare machines.
`predict_error.py fit` takes them in with what the calibration measured.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import blind_models

from flopcalc.core.model.config import load_config
from flopcalc.measure.predictor.narrow import narrow
from flopcalc.measure.predictor.runs import Runner, make_case, name_case

Json = dict[str, Any]
RESULTS = Path(__file__).parent / "results"
# Preset, or config of blind_models.py; sequence length and patches of the steps with images.
TYPES: dict[str, tuple[int, list[list[int]]]] = {
    "llama-3.2-1b": (0, []), "olmo-3-7b": (0, []), "granite-3.0-3b-a800m": (0, []), "deepseek-v2-lite": (0, []),
    "granite-2304": (0, []), "olmoe-1280": (0, []), "internvl-2048": (640, [[1, 32, 32]]), "qwen2.5-0.5b": (0, []),
}  # fmt: skip
_DEPTHS = (4, 12)
_MARK = "-narrow-"


def get_config(name: str) -> Json:
    source, _, layers = name.rpartition(_MARK)
    known = blind_models.MODELS.get(source)
    config = known.source if known and isinstance(known.source, dict) else load_config(source).config
    return narrow(dict(config), int(layers))


def list_cases() -> list[Json]:
    """Training is measured twice, minutes apart."""
    found = []
    for layers in (*_DEPTHS, _DEPTHS[-1]):
        is_again = len(found) >= 2 * len(_list_once(4))
        found += [case for case in _list_once(layers) if not is_again or case["phase"] == "train"]
    return found


def _list_once(layers: int) -> list[Json]:
    found = []
    for name, (seq, grids) in TYPES.items():
        model = f"{name}{_MARK}{layers}"
        found += [make_case(model, "train", 1, 64), make_case(model, "prefill", 1, 64)]
        if grids:
            found += [make_case(model, "train", 1, seq, grids), make_case(model, "prefill", 1, seq, grids)]
        found.append(make_case(model, "decode", 1, 2, context=128))
    return found


def measure(out: Path, device: str) -> None:
    from flopcalc.measure.calibrate.provenance import describe_machine
    from flopcalc.measure.calibrate.tables import Bench
    from flopcalc.measure.predictor.host_calls import measure_tensors

    begun = time.monotonic()
    about = {**describe_machine(device), "command": "python benchmarks/host_types.py",
             "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}  # fmt: skip
    kept: Json = {"provenance": about, "tensors": [measure_tensors(Bench(device))], "cases": [], "failures": []}
    runner = Runner(device, get_config)
    for case in list_cases():
        try:
            kept["cases"].append({**runner.measure_host(case, 10), "is_host": True})
        except Exception as error:
            runner.drop()
            kept["failures"].append({"case": name_case(case), "reason": f"{type(error).__name__}: {error}"[:300]})
        print(f"{time.monotonic() - begun:6.1f} s  {name_case(case)}", flush=True)
    kept["tensors"].append(measure_tensors(Bench(device)))
    out.write_text(json.dumps(kept, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, default=RESULTS / "host_types.json")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    measure(args.out, args.device)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
