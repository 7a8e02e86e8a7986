"""Blind models are data: rounds/NN.json goes in, the models, steps and counted steps of a round come out.

A model is a preset with fewer layers (`preset`, `layers`), the same with other widths of its text (`text`), or a whole
`config`. Layers are those of the text and of the tower.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from flopcalc.base.vocabulary import Recompute
from flopcalc.core.model.config import load_config
from flopcalc.measure.predictor.runs import cut_config

Json = dict[str, Any]
FOLDER = Path(__file__).parent / "rounds"
NUMBERS = tuple(sorted(int(path.stem) for path in FOLDER.glob("*.json")))
KINDS = ("dense", "experts", "lora", "vision")


class Adapter(NamedTuple):
    """A LoRA of PEFT."""

    rank: int
    targets: tuple[str, ...]
    is_autocast: bool = False


class Step(NamedTuple):
    """One training step; a small one is timed between runs of the probe."""

    batch: int
    seq: int
    recompute: Recompute = "none"
    is_small: bool = False


class Model(NamedTuple):
    """A model with its steps."""

    kind: str  # one of KINDS
    config: Json
    steps: tuple[Step, ...]
    grids: tuple[tuple[int, int, int], ...] = ()  # images of each sample, in patches
    adapter: Adapter | None = None


class Counted(NamedTuple):
    """A step whose executed FLOPs are counted."""

    model: str  # of the round, or a preset
    layers: tuple[int, int]  # of a preset
    batch: int
    seq: int
    grids: list[list[int]]


class Round(NamedTuple):
    """What one round predicts and measures."""

    number: int
    passes: int  # how often all steps are timed
    models: dict[str, Model]
    executed: dict[str, Counted]
    decoded: tuple[tuple[str, int], ...]  # presets and their layers, whose tokens are timed

    @property
    def marks(self) -> tuple[str, str]:
        """What stands before and after its tables in README.md."""
        return f"<!-- tables of round {self.number} -->", f"<!-- end of the tables of round {self.number} -->"

    def name_result(self, kind: str) -> str:
        return f"blind_{kind}.json" if self.number == 1 else f"blind_{kind}_{self.number}.json"

    def get_counted_config(self, name: str) -> Json:
        """The config of a step whose executed FLOPs are counted."""
        counted = self.executed[name]
        if counted.model in self.models:
            return self.models[counted.model].config
        return cut_config(counted.model, *counted.layers)

    def take_turns(self) -> list[str]:
        """Order of a run: the kinds take turns, so that a run that is cut short has some of each."""
        kinds = [[name for name, model in self.models.items() if model.kind == kind] for kind in KINDS]
        return [name for turn in zip(*kinds, strict=True) for name in turn]


def load_round(number: int) -> Round:
    """The round of this number."""
    tables = json.loads((FOLDER / f"{number:02}.json").read_text(encoding="utf-8"))
    executed = {
        name: Counted(**{**table, "layers": tuple(table["layers"])}) for name, table in tables["executed"].items()
    }
    decoded = tuple((table["preset"], table["layers"]) for table in tables.get("decoded", ()))
    models = {name: _make_model(table) for name, table in tables["models"].items()}
    return Round(number, tables["passes"], models, executed, decoded)


def _make_model(table: Json) -> Model:
    if "config" in table:
        config = table["config"]
    elif "text" in table:
        config = resize(table["preset"], tuple(table["layers"]), table["text"])
    else:
        config = cut_config(table["preset"], *table["layers"])
    given = table.get("adapter")
    adapter = Adapter(**{**given, "targets": tuple(given["targets"])}) if given else None
    steps = tuple(Step(**step) for step in table["steps"])
    return Model(table["kind"], config, steps, tuple(map(tuple, table.get("grids", ()))), adapter)


def resize(preset: str, layers: tuple[int, int], text: Json) -> Json:
    """A preset's config with other widths of its text, and fewer layers."""
    config = dict(load_config(preset).config)
    vision = dict(config["vision_config"])
    part = {**config.get("text_config", config), **text, "num_hidden_layers": layers[0]}
    if isinstance(part.get("layer_types"), list):
        part["layer_types"] = part["layer_types"][: layers[0]]
    vision["depth" if "depth" in vision else "num_hidden_layers"] = layers[1]
    config = {**config, "text_config": part} if "text_config" in config else part
    for width in ("out_hidden_size", "projection_dim", *(("hidden_size",) if "embed_dim" in vision else ())):
        for each in (config, vision):
            if width in each:
                each[width] = text["hidden_size"]
    return {**config, "vision_config": vision}


def put_between(page: Path, start: str, end: str, shown: str) -> None:
    """Write tables between their marks in a page."""
    before, rest = page.read_text(encoding="utf-8").split(start, 1)
    after = rest.split(end, 1)[1]
    page.write_text(f"{before}{start}\n{shown}\n{end}{after}", encoding="utf-8")
