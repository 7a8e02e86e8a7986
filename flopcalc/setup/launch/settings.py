"""Settings of launch files in the frameworks' words become flopcalc's options, each with where it was taken from."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from flopcalc.base.errors import ConfigError, FlopcalcError, format_value
from flopcalc.base.number_formats import parse_compute
from flopcalc.base.units import check_size, is_digits
from flopcalc.core.estimate.objective import KEYS as OBJECTIVE_KEYS
from flopcalc.core.recipe.recipe import PARAMETER, REGEX
from flopcalc.setup.megatron import map_arguments

# Names of optimizers without underscores -> flopcalc's; transformers, bitsandbytes, torchao, torch and DeepSpeed.
_OPTIMIZERS = {
    "adamw": ("adam", "adamw", "adamwhf", "adamwtorchfused", "adamwtorchxla", "adamwapexfused", "fusedadam"),
    "adamw-foreach": ("adamwtorch",),
    "adamw-32bit": ("adamw32bit", "pagedadamw", "pagedadamw32bit"),
    "adamw-8bit": ("adamw8bit", "adamwbnb8bit", "pagedadamw8bit", "adamwtorch8bit", "aoadamw8bit"),
    "adamw-fp8": ("aoadamwfp8",),
    "lion": ("lion", "lionpytorch"),
    "sgd": ("sgd",),
}  # fmt: skip
_SIZES = ("seq", "batch", "grad_accum", "gpus", "max_pixels", "global_batch", "tp", "cp", "pp", "ep", "virtual",
          "lora.r", "nodes", "objective.completion", "objective.prompt", "objective.group",
          "objective.rollout")  # fmt: skip
_FLAGS = ("reentrant", "no_checkpointing", "use_peft", "bits.4", "bits.8", "fp16",
          "tf32", "fp8", "lora.all_linear",
          "freeze.vision", "freeze.projector", "freeze.language", "objective.score",
          "objective.precomputed")  # fmt: skip
_ADAPTERS = {"lora": True, "qlora": True, "longlora": True, "full": False, "none": False, "": False}
_CHECKPOINTING = {
    "none": False, "false": False, "full": True, "true": True, "unsloth": True, "offload": True, "offload_disk": True,
    "selective": "selective",
}  # fmt: skip
_KERNELS = {
    "eager": "eager", "disabled": "eager", "flash_attention_2": "flash", "flash_attention_3": "flash",
    "flash_attention_4": "flash", "flash_attn": "flash", "fa2": "flash", "fa3": "flash", "sdpa": "auto",
}  # fmt: skip
# What FSDP shards -> the stage of ZeRO; numbers are those of accelerate.
_SHARDED = {"no_shard": 0, "shard_grad_op": 2, "full_shard": 3, "hybrid_shard": 3, "true": 3, "1": 3, "2": 2, "3": 0}
_STORED = dict.fromkeys(("kernel", "kernel.eager", "kernel.flash"), "attention_kernel") | {"fsdp": "zero"}
_PARTS = {"vision": ("vision", "audio")}  # what frameworks mean by a vision tower
_REGEX_SIGNS = "*^$(|\\["
_ALL_LINEAR = ("all", "all-linear", "all_linear")


class Taken(NamedTuple):
    """An option's value, and the key of the file that says it."""

    value: Any
    key: str


class LaunchSettings:
    """What launch files have said so far, under plain words; the first to say something holds."""

    def __init__(self) -> None:
        self._said: dict[str, Taken] = {}
        self._file = ""
        self._framework = ""
        self._spared: tuple[
            str, ...
        ] = ()  # where LoRA has no adapters: frozen parts, with named targets too, projector

    def add_file(self, name: str, table: Mapping[str, Any]) -> None:
        self._file, self._framework = name, table["name"]
        self._spared += tuple(table.get("spared_by_lora", ()))

    def take(self, word: str, value: object, key: str) -> bool:
        """Note a setting; whether its value is understood."""
        is_own = value == "auto" and (word not in ("bf16", "dtype") or key.endswith(".enabled"))  # DeepSpeed's: HF's
        is_made = word == "global_batch" and value == -1  # torchtitan: what the micro-batches make
        if value in (None, []) or is_own or is_made or (word in _STORED and not value):
            return True  # the framework's own choice
        try:
            read = _read(word, value, key)
        except FlopcalcError as error:
            raise ConfigError(f"{self._file}: {error}") from None
        if read is not None:
            self._said.setdefault(_STORED.get(word, word), Taken(read, key))
            if word == "objective.kl" and read:  # any of several terms asks for a reference
                self._said[word] = Taken(read, key)
        return read is not None

    def take_objective(self, patterns: Mapping[str, str], values: Mapping[str, Any]) -> None:
        """The first pattern that the file's values match; `*` is the value itself."""
        for pattern, name in patterns.items():
            said = [
                [key for key, value in values.items() if value is not None and fnmatchcase(f"{key}={value}", piece)]
                for piece in pattern.split("&")
            ]
            if all(said) and (name != "*" or values[said[0][0]]):
                key = said[0][0]
                self.take("objective", str(values[key]).removeprefix("trl ") if name == "*" else name, key)
                return

    def take_default(self, word: str, value: object) -> None:
        """What the framework takes where its file says nothing."""
        if word not in self._said:
            self._said[word] = Taken(_read(word, value, ""), f"{self._framework}'s default")

    def finish_file(self, flavours: Mapping[str, str]) -> list[str]:
        """Turn torchtitan's flavour into a preset, Megatron's sizes into a config; what is not understood of them."""
        shape = {word[6:]: self._said.pop(word) for word in [*self._said] if word.startswith("shape.")}
        if {"num_layers", "hidden_size", "num_attention_heads"} <= shape.keys():
            if not {"vocab_size", "padded_vocab_size"} & shape.keys():
                return [
                    f"{shape['num_layers'].key} …: the model's vocabulary is not said, add --vocab-size N to the script"
                ]
            tp = self._said["tp"].value if "tp" in self._said else 1
            config = map_arguments({word: each.value for word, each in shape.items()}, tp)
            self._said.setdefault("model", Taken(config, ", ".join(each.key for each in shape.values())))
        name, flavour = self._said.pop("titan.name", None), self._said.pop("titan.flavor", None)
        if name is None or flavour is None:
            return []
        preset = flavours.get(f"{name.value} {flavour.value}")
        if preset is None:
            return [f"{name.key}: {name.value}, {flavour.key}: {flavour.value}"]
        self._said.setdefault("model", Taken(preset, f"{name.key} and {flavour.key}"))
        return []

    def finish(self) -> dict[str, Taken]:
        """flopcalc's options."""
        said = self._said
        plain = (
            "model",
            "seq",
            "grad_accum",
            "max_pixels",
            "tp",
            "cp",
            "pp",
            "ep",
            "virtual",
            "zero",
            "attention_kernel",
            "hf_trainer",
        )
        found = {word: said[word] for word in plain if word in said}
        if "global_batch" in said:
            found.pop("grad_accum", None)  # which it decides
        found |= self._make_batch() | self._make_recompute() | self._make_lora() | self._make_formats()
        found |= self._make_objective(found) | self._make_optimizer()
        frozen = {word[7:]: each.key for word, each in said.items() if word.startswith("freeze.") and each.value}
        if "lora" in found:  # it freezes everything else anyway; some frameworks also leave out its adapters there
            is_all = found["lora"].value["targets"] == ("all-linear",)
            frozen = frozen if (is_all and self._spared) or "named" in self._spared else {}
            if is_all and "projector" in self._spared:
                frozen.setdefault("projector", self._framework)
        if frozen:
            names = tuple(name for part in frozen for name in _PARTS.get(part, (part,)))
            found["freeze"] = Taken(names, ", ".join(dict.fromkeys(frozen.values())))
        return found

    def _make_batch(self) -> dict[str, Taken]:
        """Sequences of a micro-batch on one GPU, and the GPUs."""
        said, found = self._said, dict[str, Taken]()
        spread = math.prod(said[word].value for word in ("tp", "cp", "pp") if word in said)
        found |= {word: said[word] for word in ("batch", "gpus", "global_batch") if word in said}
        rollout = said.get("objective.rollout")
        if rollout is not None and "objective" in said and said["objective"].value == "grpo":  # a step is all of it
            found["global_batch"] = said["global_batch"] = rollout
        for word, times in (("gpus", "nodes"), ("global_batch", "objective.group")):
            if word in found and times in said:
                pair = (said[word], said[times])
                found[word] = Taken(pair[0].value * pair[1].value, " × ".join(each.key for each in pair))
        dp = [said[word] for word in ("dp", "dp_shard") if word in said]
        if "gpus" not in said and "dp_shard" in said and all(each.value > 0 for each in dp):
            gpus = math.prod([spread, *(each.value for each in dp)])
            keys = [said[word].key for word in ("dp", "dp_shard", "tp", "cp", "pp") if word in said]
            found["gpus"] = Taken(gpus, " × ".join(keys))
        return found

    def _make_recompute(self) -> dict[str, Taken]:
        said = self._said
        asked = said.get("checkpointing")
        if "no_checkpointing" in said:
            off = said["no_checkpointing"]
            asked = Taken(not off.value, off.key)
        if asked is None:
            return {}
        if asked.value == "selective" or not asked.value:
            return {"recompute": Taken(asked.value or "none", asked.key)}
        reentrant = said.get("reentrant")
        is_reentrant = reentrant is not None and reentrant.value
        keys = ", ".join(dict.fromkeys(each.key for each in (asked, reentrant) if each is not None))
        return {"recompute": Taken("full-reentrant" if is_reentrant else "full", keys)}

    def _make_lora(self) -> dict[str, Taken]:
        said = self._said
        if "lora.rank" in said:  # 0: no LoRA
            said.setdefault("lora.r", said["lora.rank"])
        asked = said.get("adapter", said.get("use_peft", said.get("lora.rank")))
        if asked is None or not asked.value:
            return {}
        targets = said.get("lora.targets")
        if "lora.all_linear" in said and said["lora.all_linear"].value:
            targets = Taken(("all-linear",), said["lora.all_linear"].key)
        if (bare := said.get("lora.parameters")) is not None:
            named = targets if targets is not None else Taken((), asked.key)
            names = (*named.value, *(f"{PARAMETER}{name}" for name in bare.value))
            targets = Taken(names, f"{named.key}, {bare.key}")
        if targets is None:  # PEFT has defaults for some types of models
            targets = Taken((), asked.key)
        more = {word: said[f"lora.{word}"] for word in ("r", "save", "dtype") if f"lora.{word}" in said}
        lora = {"r": 8, "targets": targets.value, **{word: each.value for word, each in more.items()}}
        keys = [asked.key, targets.key, *(each.key for each in more.values())]
        return {"lora": Taken(lora, ", ".join(dict.fromkeys(keys)))}

    def _make_objective(self, found: dict[str, Taken]) -> dict[str, Taken]:
        """What the step trains for; grpo's sequence is its prompt and its completion."""
        said = self._said
        if "objective" not in said:
            return {}
        name, _, more = said["objective"].value.partition(",")
        if name == "sft":
            return {}
        if name not in OBJECTIVE_KEYS:
            return {"objective": said["objective"]}
        if name == "grpo" and "seq" in found and found["seq"].key.endswith("'s default"):
            del found["seq"]  # the length of plain training
        asked = said["objective"]
        own = {word: said[f"objective.{word}"] for word in OBJECTIVE_KEYS[name] if f"objective.{word}" in said}
        if name != "grpo":
            own.pop("completion", None)
        elif "objective.kl" in said:
            own["reference"] = said["objective.kl"]
        if more == "reference=no":
            own["reference"] = Taken(False, asked.key)
        elif name == "dpo" and "objective.precomputed" in said:
            off = said["objective.precomputed"]
            own["reference"] = Taken(not off.value, off.key)
        made: dict[str, Taken] = {}
        if name == "grpo" and "objective.prompt" in said and "completion" in own:
            pair = (said["objective.prompt"], own["completion"])
            made["seq"] = Taken(sum(each.value for each in pair), " + ".join(each.key for each in pair))
        keys = ", ".join(dict.fromkeys([asked.key, *(each.key for each in own.values())]))
        words = [
            f"{word}={('no', 'yes')[each.value] if each.value in (0, 1) else each.value}" for word, each in own.items()
        ]
        made["objective"] = Taken(",".join([name, *words]), keys)
        return made

    def _make_optimizer(self) -> dict[str, Taken]:
        """The optimizer; with `optimizer.master` the framework keeps float32 weights beside narrower ones."""
        said = self._said
        if (offload := said.get("optimizer.offload")) is not None and offload.value:
            return {"optimizer": Taken("adamw-offload", offload.key)}
        if "optimizer.master" in said:
            name, key = said["optimizer.master"]
            return {"optimizer": Taken("adamw-master" if name == "adamw" else name, key)}
        return {"optimizer": said["optimizer"]} if "optimizer" in said else {}

    def _make_formats(self) -> dict[str, Taken]:
        """What products are computed in, and how weights are stored."""
        said, found = self._said, {}
        if "converters" in said and "fp8" in said["converters"].value:
            found["compute"] = Taken("fp8", said["converters"].key)
        for word in ("fp8", "bf16", "fp16", "mixed_precision", "dtype", "tf32"):
            if word in said and "compute" not in found and said[word].value:
                value = said[word].value
                found["compute"] = Taken(word if value is True else value, said[word].key)
        bits = said.get("bits")
        for word, number in (("bits.4", 4), ("bits.8", 8)):
            if word in said and said[word].value:
                bits = Taken(number, said[word].key)
        if bits is not None:
            found["weights"] = Taken({4: "nf4", 8: "int8"}[bits.value], bits.key)
        return found


def _read(word: str, value: object, key: str) -> Any:
    """A setting's checked value; None where it is not understood."""
    if word in ("gpus", "nodes") and isinstance(value, str) and not is_digits(value):
        return None  # torchrun: gpu, 1:4
    if word in _SIZES:  # true: a line's variable that is not known
        return None if value is True else check_size(int(value) if is_digits(value) else value, key)
    if word in ("dp", "dp_shard", "lora.rank"):
        return check_size(value, key, -1)
    if word in ("model", "titan.name", "titan.flavor", "objective", "objective.teacher"):
        if not isinstance(value, str) or not value:
            raise ConfigError(f"{key} must be a name or path, not {format_value(value)}")
        return value
    if word in ("lora.targets", "lora.save", "lora.parameters"):
        return _read_names(word, value)
    if word in ("dtype", "mixed_precision", "lora.dtype"):
        return _read_format(value, key)
    return value if word.startswith("shape.") else _READERS[word](value)


def _read_flag(value: object) -> bool | None:
    return value if isinstance(value, bool) else None


def _read_stage(value: object) -> int | None:
    """ZeRO's stage: a number, ms-swift's zero3_offload, or whether Megatron's optimizer is distributed."""
    stage = str(int(value) if isinstance(value, bool) else value).removeprefix("zero")[:1]
    return int(stage) if stage in ("0", "1", "2", "3") else None


def _read_nonzero(value: object) -> bool | None:
    return value != 0 if isinstance(value, (bool, int, float)) else None


def _read_optimizer(value: object) -> str:
    plain = str(value).rpartition(".")[2].lower().replace("_", "")
    return next((name for name, others in _OPTIMIZERS.items() if plain in others), str(value))


def _read_names(word: str, value: object) -> tuple[str, ...] | None:
    """Module names as a list, or as text with commas; 'all' is every linear layer, other text may be a regex."""
    if word == "lora.targets" and isinstance(value, str) and any(sign in value for sign in _REGEX_SIGNS):
        return (REGEX + value,)
    names = [piece.strip() for piece in value.split(",")] if isinstance(value, str) else value
    if not isinstance(names, (list, tuple)) or not names or not all(isinstance(name, str) and name for name in names):
        return None
    if word == "lora.targets" and len(names) == 1 and names[0] in _ALL_LINEAR:
        return ("all-linear",)
    return None if any(sign in name for name in names for sign in _REGEX_SIGNS) else tuple(names)


def _read_converters(value: object) -> tuple[str, ...] | None:
    """torchtitan's model converters: float8 ones change the format of products."""
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        return None
    known = {"float8": "fp8", "quantize.linear.float8": "fp8", "quantize.grouped_mm.float8": "fp8"}
    return tuple(known[name] for name in value) if all(name in known for name in value) else None


def _read_format(value: object, key: str) -> Any:
    if value is False or value in ("no", "auto"):  # accelerate reads an unquoted no as 'no', too
        return False
    return parse_compute(str(value).removeprefix("torch."), key)


_READERS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(_FLAGS, _read_flag),
    "bf16": lambda value: True if value == "auto" else _read_flag(value),
    "fp8": lambda value: True if value in ("hybrid", "e4m3") else _read_flag(value),
    "fsdp": lambda value: next((stage for name, stage in _SHARDED.items() if name in str(value).lower()), None),
    "zero": _read_stage,
    "kernel": lambda value: _KERNELS.get(str(value)),
    "kernel.eager": lambda _: "eager",
    "kernel.flash": lambda _: "flash",
    "objective.kl": _read_nonzero,
    "hf_trainer": lambda _: True,  # it clips and reads the norm whatever the limit
    "optimizer": _read_optimizer,
    "optimizer.master": _read_optimizer,
    "optimizer.offload": lambda value: value in (True, "cpu", "nvme"),
    "adapter": lambda value: _ADAPTERS.get(str(value).lower()),
    "checkpointing": lambda value: _CHECKPOINTING.get(str(value).lower()),
    "bits": lambda value: value if value in (4, 8) and not isinstance(value, bool) else None,
    "converters": _read_converters,
}
