"""What shipping a spec takes, step by step: each is run or looked for, and says what is left to do."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from importlib.util import find_spec as find_library
from io import StringIO
from pathlib import Path
from typing import Literal, NamedTuple

from flopcalc.base.data import find_data_dir, find_data_file, list_data_files, load_toml
from flopcalc.base.errors import FlopcalcError
from flopcalc.core.spec.aliases import Alias, find_alias
from flopcalc.core.spec.spec import Spec, load_spec
from lab import truth
from lab.spec_keys import infer_keys, write_key

__all__ = ["Step", "ship", "write_keys"]


class Step(NamedTuple):
    """One step of shipping a spec."""

    name: str
    state: Literal["done", "left", "failed"]
    text: str  # what was done, or is left to do


def ship(name: str, *, check: bool = False) -> Iterator[Step]:
    """Every step for one model type, in order; `check` writes nothing. A step that others build on ends it."""
    folder = truth.find_folder()  # only a checkout ships specs
    spec, step = _find_spec(name)
    yield step
    if spec is None or spec.is_tower:
        return
    for take in (_find_example, _find_class, _compare):
        step = take(name, spec)
        yield step
        if step.state != "done":
            return
    yield write_keys(name, check or truth.is_recorded(name, folder))  # once: a shipped spec has its keys
    yield _turn_flags(name)
    yield _record(name, folder, check)
    yield _record_operators(name, spec, check)
    yield _write_page(folder.parent.parent, check)
    yield _find_preset(name)
    yield _find_change(name, folder.parent.parent)


def _find_spec(name: str) -> tuple[Spec | None, Step]:
    path = find_data_file("specs", name)
    alias = find_alias(name)
    if path is None and alias is not None:
        return None, _find_witness(alias)
    if path is None:
        words = f"write model_specs/specs/{name}.toml, or aliases/{name}.toml for a known family under other keys"
        return None, Step("spec", "left", f"{words}: docs/specs.md has both formats")
    spec = load_spec(path)
    if spec.is_tower:
        return spec, Step("spec", "done", f"{spec.file} is a part of other models: verify a model that uses it")
    return spec, Step("spec", "done", f"{spec.file}, {spec.architecture}; read from {spec.source}")


def _find_witness(alias: Alias) -> Step:
    """An alias is shipped with its witness: tiny configs, or those of the family that it is like."""
    tables = load_toml(alias.path)
    if not alias.witness or not (tables.get("configs") or tables.get("example")):
        return Step("alias", "left", f"aliases/{alias.name}.toml needs witness, and configs or example: docs/specs.md")
    test = f"pytest --all tests/measure/hf/test_aliases.py -k {alias.name}"
    return Step("alias", "done", f"a key map onto {alias.extends}, proved by {alias.witness}: {test} compares them")


def _find_example(name: str, spec: Spec) -> Step:
    path = find_data_file("examples", name)
    if path is None:
        keys = ", ".join([*spec.required, *(key for key in spec.defaults if key not in spec.required)][:12])
        words = f"write model_specs/examples/{name}.toml: two tiny configs that give {keys}"
        step = _find_class(name, spec)
        return Step("example", "left", words if step.state == "done" else f"{words}; {step.text}")
    tables = load_toml(path)
    needed = tables.get("needs")
    if needed and find_library(needed) is None:
        return Step("example", "left", f"install {needed}: HF builds this model with it")
    count = len(tables.get("configs", []))
    if not count:
        return Step("example", "left", f"examples/{name}.toml has no [[configs]]")
    return Step("example", "done", f"{count} tiny config{'s' * (count != 1)}")


def _find_class(name: str, spec: Spec) -> Step:
    """The class that is built: transformers', or a witness after published code."""
    from flopcalc.measure.hf.examples import find_example
    from flopcalc.measure.hf.models import find_class

    chosen = find_example(name).choose_class(spec.architecture)
    try:
        return Step("class", "done", f"{find_class(chosen).__name__} of {chosen.rpartition(':')[0] or 'transformers'}")
    except FlopcalcError as error:
        return Step("class", "left", str(error))


def _compare(name: str, _: Spec) -> Step:
    """Every usual case against HF's model, row by row."""
    from flopcalc.measure.hf.examples import find_example, list_cases
    from flopcalc.measure.hf.verify import prepare, verify

    prepare()
    example = find_example(name)
    wrong, cases = [], 0
    for config in example.configs:
        for workload, recipe in list_cases(example, config):
            cases += 1
            try:
                if not verify(config, workload, recipe, example=example).is_equal:
                    wrong.append(f"{workload} {recipe}")
            except Exception as error:  # HF's own code: whatever it raises is the answer for this case
                wrong.append(f"{workload} {recipe}: {type(error).__name__}: {str(error)[:100]}")
    if wrong:
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        return Step("rows", "failed", f"{wrong[0]}{more}: flopcalc verify --model-type {name} shows the rows")
    return Step("rows", "done", f"{cases} cases equal what HF's model executes")


def write_keys(name: str, check: bool) -> Step:
    """Keys that the sizes of the examples suggest, written into those ops of the spec's own file that say none."""
    path, example = str(find_data_file("specs", name)), str(find_data_file("examples", name))
    other = infer_keys(name, example)
    values = {"True": "true", "False": "false"}
    written = [
        f"{each.key} of {each.name}"
        for each in other
        if not check
        and each.key != "over"
        and write_key(Path(path), each.op, each.name, each.key, values.get(each.inferred, f'"{each.inferred}"'))
    ]
    if written:
        return Step("keys", "left", f"read the diff: sizes suggest {', '.join(written)}")
    if check and other:
        words = ", ".join(f"{each.key} {each.inferred} of {each.name}" for each in other[:5])
        return Step("keys", "done", f"the spec says otherwise than sizes suggest: {words}")
    return Step("keys", "done", "split, gate, over and shared are as the sizes of the examples suggest, or as written")


def _turn_flags(name: str) -> Step:
    from lab.flags import find_miscounted

    lines = find_miscounted(name)
    if lines:
        return Step("flags", "failed", f"{len(lines)} configs with one flag turned are counted wrongly: {lines[0]}")
    return Step("flags", "done", "every flag of the examples turned: counted rightly, or refused in words")


def _record(name: str, folder: Path, check: bool) -> Step:
    if check and not truth.is_recorded(name, folder):
        return Step("traces", "left", f"run flopcalc add {name} to record them")
    if truth.is_recorded(name, folder):
        return Step("traces", "done", f"{len(truth.load(name, folder).cases)} cases recorded")
    line, has_failed = truth.run(name, folder, check=False)
    return Step("traces", "failed" if has_failed else "done", line)


def _record_operators(name: str, spec: Spec, check: bool) -> Step:
    folder = Path(find_data_dir()) / "operators"
    if spec.vision.get("text") == "none":
        return Step("operators", "done", "none: a model of images alone is not predicted")
    from flopcalc.measure.hf.examples import find_example

    if find_example(name).witness:
        return Step("operators", "done", "none: a module after published code does not dispatch what that code does")
    if (folder / f"{name}.json").is_file():
        return Step("operators", "done", "recorded")
    if check:
        return Step("operators", "left", f"run flopcalc add {name} to record them")
    from lab.operators.__main__ import record_type

    if any("images" not in each for each in find_example(name).images):
        return Step(
            "operators", "left", "those of videos are not recorded: predict takes another family's, and says so"
        )
    with redirect_stdout(StringIO()):
        has_failed = record_type(name, folder)
    if has_failed:
        return Step("operators", "left", "nothing could be recorded: predict takes another family's, and says so")
    return Step("operators", "done", "recorded now")


def _write_page(checkout: Path, check: bool) -> Step:
    """docs/models.md and the catalogue, by the script that the checkout has for them."""
    script = checkout / "docs" / "make_models.py"
    if not script.is_file():
        raise FlopcalcError(f"{script}: no such file; add works in a checkout")
    before = sys.argv
    sys.argv = [str(script), *(["--check"] if check else [])]
    try:
        with redirect_stdout(StringIO()):
            runpy.run_path(str(script), run_name="__main__")
    except SystemExit as ended:
        if ended.code:
            return Step("page", "left", "run python docs/make_models.py")
    finally:
        sys.argv = before
    return Step("page", "done", "docs/models.md and catalogue.json are fresh")


def _find_preset(name: str) -> Step:
    for preset, path in list_data_files("presets").items():
        if load_toml(path).get("config", {}).get("model_type") == name:
            return Step("preset", "done", preset)
    return Step("preset", "left", "add a preset with the dims of a published size, if one was read")


def _find_change(name: str, checkout: Path) -> Step:
    files = [checkout / "CHANGELOG.md", *sorted((checkout / "changelog.d").glob("*.md"))]
    if any(path.is_file() and name in path.read_text(encoding="utf-8") for path in files):
        return Step("changelog", "done", "named")
    return Step("changelog", "left", f"name {name} in a file of changelog.d")
