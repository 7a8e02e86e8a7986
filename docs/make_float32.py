"""Parameters that transformers' classes keep in float32 go in; model_specs/float32.json comes out.

python docs/make_float32.py            write it
python docs/make_float32.py --check    exit 1 if it is stale
"""

from __future__ import annotations

import ast
import json
import sys
import warnings
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).resolve().parent.parent / "model_specs" / "float32.json"
# Parameters that modelling code makes in float32, whatever the model's format is; from_pretrained leaves them so.
MADE_IN_FLOAT32 = {"hunyuan_v1_moe": [r"\.wg\."], "olmo_hybrid": ["A_log"], "zamba": ["A_log"]}
KEPT = {"_keep_in_fp32_modules": "fp16", "_keep_in_fp32_modules_strict": "half"}
Names = dict[str, list[str]]  # 'fp16' or 'half' -> names


@cache
def read_float32(folder: Path) -> tuple[Names, Names]:
    """Names that classes of a model keep in float32: those of its base class, and all."""
    base: Names = {}
    every: Names = {}
    for path in sorted(folder.glob("modeling_*.py")):
        text = path.read_text(encoding="utf-8")
        if "_keep_in_fp32_modules" not in text:
            continue
        for node in ast.parse(text).body:
            for entry in node.body if isinstance(node, ast.ClassDef) else ():
                key = KEPT.get(getattr(entry.targets[0], "id", "")) if isinstance(entry, ast.Assign) else None
                names = ast.literal_eval(entry.value) if isinstance(entry, ast.Assign) and key else None
                if key and names:
                    for kept in (every, base) if node.name.endswith("PreTrainedModel") else (every,):
                        kept[key] = sorted({*kept.get(key, ()), *names})
    made = MADE_IN_FLOAT32.get(folder.name, [])
    for kept in (base, every):
        if made:
            kept["half"] = sorted({*kept.get("half", ()), *made})
    return base, every


def read_class(config_class: Any) -> Names:
    """Lists of a class that joins models hold for its config; those of the base class for every config beside it."""
    folder = Path(str(sys.modules[config_class.__module__].__file__)).parent
    base, every = read_float32(folder)
    return every if config_class.sub_configs or config_class.model_type == folder.name else base


def make() -> str:
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

    transformers.logging.set_verbosity_error()
    found: dict[str, Names] = {}
    waiting = [CONFIG_MAPPING[name] for name in sorted(CONFIG_MAPPING_NAMES)]
    for config_class in waiting:
        if config_class.model_type and config_class.model_type not in found:
            found[config_class.model_type] = read_class(config_class)
            waiting += [inner for inner in config_class.sub_configs.values() if inner.__name__ != "AutoConfig"]
    source = f"classes of transformers {transformers.__version__}; made by docs/make_float32.py"
    lines = [f"{json.dumps(name)}: {json.dumps(names)}" for name, names in sorted(found.items()) if names]
    return f'{{\n"source": {json.dumps(source)},\n"types": {{\n' + ",\n".join(lines) + "\n}}\n"


def main() -> None:
    warnings.simplefilter("ignore")
    text = make()
    if "--check" in sys.argv[1:]:
        sys.exit(0 if FILE.read_text(encoding="utf-8") == text else f"{FILE.name} is stale: run {Path(__file__).name}")
    FILE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
