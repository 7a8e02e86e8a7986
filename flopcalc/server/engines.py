"""Serving engines: their defaults by release and device, from model_specs/engines."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from flopcalc.base.data import find_data_dir, list_data_files, load_toml
from flopcalc.base.errors import SpecError, WorkloadError
from flopcalc.base.spelling import spell
from flopcalc.base.vocabulary import check_word
from flopcalc.hardware.devices import Device
from flopcalc.server.schedule import Policy

_MOST_CHARACTERS = 10_000  # of a command line
# Fields whose flags an answer's start line has anyway.
WRITTEN = ("tp", "dp", "pp", "ep", "attention_dp", "expert_parallel", "max_batched_tokens", "max_seqs",
           "memory_fraction", "kv_cache", "quantization", "max_model_len")  # fmt: skip


class Engine(NamedTuple):
    """One release of an engine, with its defaults on a device."""

    id: str
    name: str
    version: str  # empty: the newest that is known
    mixes: bool
    chunks: bool
    reserves: bool
    profiles: bool  # a trial step's activations are taken off the cache
    budget: Literal["total", "free"]
    overhead_gib: float
    rank_gib: float
    graph_gib: float
    block_size: int
    max_batched_tokens: int
    max_seqs: int
    memory_fraction: float
    flags: Mapping[str, str]
    cache_of: Mapping[str, str]  # format of weights -> format of the cache that checkpoints of it ask for
    interval: int = 1
    wait: int = 0
    graph_tokens: int = 0  # steps with prompts are graphs up to this size
    beside: Mapping[str, Mapping[str, int]] = MappingProxyType({})  # limit that is set -> what a benchmark sets with it
    logit_bytes: float = 6.0  # that a trial step's sampler holds for each logit
    totals: tuple[str, ...] = ()  # limits whose flags are of all ranks of attention data parallelism
    command: str = "{model}"
    drafts: str = ""  # flags that draft with a model's own layers
    kv_names: Mapping[str, str] = MappingProxyType({})  # our name of a cache's format -> the engine's
    switches: Mapping[str, str] = MappingProxyType({})  # field above one -> a flag without a value
    presence: Mapping[str, str] = MappingProxyType({})  # a flag without a value -> the field that it turns on
    online: Mapping[str, str] = MappingProxyType({})  # format -> the engine's word to bring weights to it on loading

    def set_limits(self, limits: Mapping[str, Any]) -> Engine:
        changes: dict[str, Any] = {}
        for name in limits:
            changes.update(self.beside.get(name, {}))
        return self._replace(**{**changes, **limits})

    def make_policy(self, cache_tokens: float) -> Policy:
        return Policy(self.max_batched_tokens, self.max_seqs, cache_tokens, self.mixes, self.chunks, self.reserves,
                      self.interval, self.wait)  # fmt: skip


@cache
def load_table(name: str) -> dict[str, Any]:
    return load_toml(os.path.join(find_data_dir(), "engines", f"{name}.toml"))


def list_engines() -> tuple[str, ...]:
    return tuple(sorted(list_data_files("engines")))


def split_version(text: str) -> tuple[int, ...]:
    """0.5.6.post2 -> (0, 5, 6): what releases are ordered by; a name without numbers is the newest."""
    found = re.match(r"v?(\d+(?:\.\d+)*)", text)
    return tuple(int(part) for part in found[1].split(".")) if found else (1 << 30,)


def find_engine(text: str, device: Device, ranks: int = 1, benchmark: str | None = None, dp: int = 1) -> Engine:
    """vllm, or vllm@0.15.1, with the defaults of that release on a device, and what a benchmark's scripts set."""
    name, _, version = text.lower().replace("tensorrt-llm", "trtllm").partition("@")
    if name == "transformers":
        raise WorkloadError(
            f"{spell('engine', name)}: its steps depend on the lengths that cuDNN has met, so it is not predicted; "
            f"serving knows {', '.join(list_engines())}, and flopcalc predict times a step of transformers"
        )
    name = check_word(name, list_engines(), "engine", WorkloadError, suggests=True)
    table = load_table(name)
    own, memory = split_version(version), device.memory_gb or 0.0
    scripts = table.get("benchmark", {}).get(benchmark, {})
    try:
        release = [each for each in table["release"] if split_version(each["since"]) <= own][-1]
        limits = [
            each
            for each in table["limits"]
            if each.get("memory_gib", 0) <= memory
            and split_version(each.get("since", "0")) <= own
            and not device.id.startswith(each.get("not_device", " "))
        ][-1]
        fraction = release.get("memory_fraction")
        if fraction is None:
            reserve = release["reserve_mib"]
            mib = reserve["base"] + reserve["token"] * limits["max_batched_tokens"] + reserve["rank"] * ranks
            mib += reserve["sequence"] * limits["graph_seqs"]
            mib = max(mib, reserve["least"]) if memory > reserve["least_above_gib"] else mib
            fraction = round(1 - mib / (1024 * memory), 3) if memory else 0.88
        return Engine(
            name, table["name"], version, table["mixes"], table["chunks"], table["reserves"], table["profiles"],
            table["budget"], table["overhead_gib"], table["rank_gib"], release["graph_gib"], table["block_size"],
            limits["max_batched_tokens"], limits["max_seqs"], fraction, table["flags"], release.get("cache_of", {}),
            wait=scripts.get("dp_wait", 0) if dp > 1 else 0,
            graph_tokens=table.get("graph_tokens", 0), beside=scripts.get("beside", {}),
            logit_bytes=release.get("logit_bytes", 6.0), command=table["command"], drafts=table["drafts"],
            totals=tuple(table.get("totals", ())),
            kv_names=table.get("kv_names", {}), switches=table.get("switches", {}),
            presence=table.get("presence", {}), online=table.get("online", {}),
        )  # fmt: skip
    except (KeyError, IndexError, TypeError) as error:
        raise SpecError(f"model_specs/engines/{name}.toml: {error} is wrong or missing") from None


def split_words(line: str, field: str) -> list[str]:
    """The words of a command line, as a shell reads them."""
    if len(line) > _MOST_CHARACTERS:
        raise WorkloadError(f"{spell(field)}: longer than {_MOST_CHARACTERS:,} characters")
    try:
        return shlex.split(line)
    except ValueError as error:
        raise WorkloadError(f"{spell(field)}: not a command line: {error}") from None


def read_flags(engine: Engine, text: str) -> tuple[dict[str, str], list[str]]:
    """Flags as an engine spells them: fields with their values, and a note on each flag that is not read.

    The field `rest` is what a start line takes over as it is.
    """
    found: dict[str, str] = {}
    unread: list[str] = []
    rest: list[str] = []
    given = split_words(text, "engine_args")
    words = [part for word in given for part in (word.split("=", 1) if word.startswith("-") else [word])]
    at = 0
    while at < len(words):
        word, at = words[at], at + 1
        has_value = at < len(words) and not re.match(r"--?[a-zA-Z]", words[at])
        field = engine.presence.get(word) or engine.flags.get(word)
        rest += words[at - 1 : at + (has_value and word not in engine.presence)] if field not in WRITTEN else []
        if word in engine.presence:
            found[engine.presence[word]] = "1"
            continue
        if word in engine.flags:
            if not has_value:
                raise WorkloadError(f"{spell('engine_args')}: {word} has no value")
            found[engine.flags[word]] = words[at]
        else:
            unread.append(word)
        at += has_value
    notes = [f"{spell('engine_args')}: not read, only passed on: {', '.join(unread)}"] if unread else []
    return found | ({"rest": shlex.join(rest)} if rest else {}), notes
