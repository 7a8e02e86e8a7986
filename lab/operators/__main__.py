"""Records the operators of HF's models, or compares the files with other sizes.

    python -m lab.operators [TYPE …] [--check] [--out DIR]

Tiny models of every type are traced with several sizes and workloads; each tensor's elements are then written as
coefficient x sum of the workload x sizes of the model, which holds in every trace. DIR/TYPE.json is written; `predict`
reads the files of model_specs/operators. --check compares them with a trace of sizes that no file was made from, and
ends with 1 where bytes or calls are more than 15 % apart: what no expression was found for is roughly in proportion to
tokens, and weighs more in tiny models than in real ones.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from flopcalc.base.data import find_data_dir
from flopcalc.base.errors import FlopcalcError
from lab.truth import make_parser, report, write


def main() -> int:
    shipped = Path(find_data_dir()) / "operators"
    parser = make_parser("operators", __doc__, "without: those that were recorded before")
    parser.add_argument("--check", action="store_true", help="compare the files with other sizes; write nothing")
    parser.add_argument("--out", metavar="DIR", help=f"where to write; default: {shipped}")
    options = parser.parse_args()
    if options.check and options.out is not None:
        raise FlopcalcError(f"--check reads the files of {shipped}, as predict does: leave --out out")
    from flopcalc.measure.hf.verify import prepare
    from lab.operators.comparing import check

    prepare()
    folder = Path(options.out) if options.out is not None else shipped
    names = options.types or sorted(path.stem for path in shipped.glob("*.json"))
    wrong = sum(check(name) if options.check else record_type(name, folder) for name in names)
    return int(wrong > 0)


def record_type(name: str, folder: Path) -> int:
    """Record one type; 1 if nothing could be recorded."""
    from lab.operators.recording import record

    recording = record(name)
    if not recording.parts:
        print(f"{name:14} nothing could be recorded: is there model_specs/examples/{name}.toml?")
        return 1
    text = recording.to_json()
    path = folder / f"{name}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        same = [other.stem for other in sorted(folder.glob("*.json")) if other != path and other.read_text() == text]
        write(path, json.dumps({"same": same[0]}) + "\n" if same else text)
    except OSError as error:
        raise FlopcalcError(
            f"{path}: cannot be written: {error.strerror}; give another folder with --out DIR"
        ) from None
    print(f"{name:14} {len(text):8} bytes, {recording.approximate} of {recording.total} tensors approximate")
    return 0


if __name__ == "__main__":
    sys.exit(report(main))
