"""A launch file that somebody drops onto the page becomes a set-up."""

from __future__ import annotations

import os
import re
from typing import Any

from flopcalc.setup.launch import apply_launch, read_launch, write_value
from flopcalc.web.setups import Page, check_name, put_files

_NAME = re.compile(r"[^\w.-]", re.ASCII)


def read_launch_file(name: str, text: str, page: Page) -> dict[str, Any]:
    """What `flopcalc estimate --launch FILE` takes from a file, as fields of a set-up, and notes on it.

    A file without a model leaves the set-up's own.
    """
    plain = _NAME.sub("_", os.path.basename(name)) or "launch.yaml"
    with put_files([(plain, text)]) as folder:
        path = os.path.join(folder, plain)
        taken = read_launch(path, is_alone=True).taken
        has_model = "model" in taken and isinstance(taken["model"].value, str)  # else sizes: the page's own stays
        if has_model:
            check_name(taken["model"].value, f"{taken['model'].key}: ")
        given = {name: page.fields[name] for name in ("objective",) if name in page.fields}
        model = None if has_model else page.model or None
        applied = apply_launch(path, "estimate", given, model, is_alone=True)
    found: dict[str, object] = {} if has_model else {"model": page.model, "files": dict(page.files)}
    for option, value in applied.options.items():
        found[option] = list(value) if isinstance(value, tuple) else write_value(value)
    if "device" in page.fields:
        found.setdefault("device", page.fields["device"])
    return {"what": "launch", "setup": found, "notes": applied.notes}
