"""Command lines of engines: one that is read, and the one that starts an answer's deployment."""

from __future__ import annotations

import shlex
from typing import Any

from flopcalc.base.errors import WorkloadError
from flopcalc.base.spelling import spell
from flopcalc.server.engines import Engine, load_table, split_words
from flopcalc.server.step import Deployment

# What a command line starts with, after `python -m` -> the engine.
_PROGRAMS = {"vllm": "vllm", "vllm.entrypoints.openai.api_server": "vllm", "sglang.launch_server": "sglang",
             "sglang": "sglang", "trtllm-serve": "trtllm"}  # fmt: skip


def read_launch(line: str) -> dict[str, Any]:
    """A line of `vllm serve`, `python -m sglang.launch_server` or `trtllm-serve` -> model, engine, engine_args."""
    words = [word for word in split_words(line, "launch") if not word.startswith("\n")]
    while words and (words[0] in ("python", "python3", "-m") or "=" in words[0]):
        words.pop(0)
    engine = _PROGRAMS.get(words[0].rpartition("/")[2]) if words else None
    if engine is None:
        raise WorkloadError(
            f"{spell('launch')}: the line starts with vllm serve, python -m sglang.launch_server or trtllm-serve, not "
            f"{words[0] if words else 'nothing'!r}"
        )
    words = words[2:] if words[1:2] == ["serve"] else words[1:]
    found: dict[str, Any] = {"engine": engine}
    model_flags = load_table(engine).get("model_flags", ())
    rest: list[str] = []
    while words:
        name, _, value = words.pop(0).partition("=")
        if name in model_flags and (value or words):
            found["model"] = value or words.pop(0)
        elif not name.startswith("-") and "model" not in found and (not rest or not rest[-1].startswith("-")):
            found["model"] = name
        else:
            rest.append(f"{name}={value}" if value else name)
    if rest:
        found["engine_args"] = shlex.join(rest)
    return found


def write_command(
    model: str, engine: Engine, layout: Deployment, has_fp8_cache: bool, quantization: str | None = None,
    max_model_len: int | None = None, *, has_experts: bool = True, drafts: int = 0, rest: str = "",
) -> str:  # fmt: skip
    """The line that starts this deployment; limits are written out, so that another release does the same."""
    spelled: dict[str, str] = {}
    for flag, field in engine.flags.items():
        if flag.startswith("--"):
            spelled.setdefault(field, flag)
    copies = layout.dp if has_experts else 1
    # SGLang and TensorRT-LLM count the ranks of data parallel attention as tensor parallel ones too.
    values = {
        "tp": layout.tp * (copies if engine.id != "vllm" else 1),
        "pp": layout.pp,
        "dp": layout.dp,
        "ep": layout.ep,
    }
    asked: dict[str, Any] = {name: value for name, value in values.items() if value > 1}
    asked |= {"max_batched_tokens": engine.max_batched_tokens, "max_seqs": engine.max_seqs,
              "memory_fraction": engine.memory_fraction,
              "kv_cache": engine.kv_names.get("fp8", "fp8") if has_fp8_cache else None,
              "quantization": quantization, "max_model_len": max_model_len}  # fmt: skip
    words = [engine.command.format(model=model)]
    words += [
        f"{spelled[name]} {value * copies if name in engine.totals else value}"
        for name, value in asked.items()
        if name in spelled and value is not None
    ]
    words += [flag for name, flag in engine.switches.items() if has_experts and values.get(name, 1) > 1]
    drafting = engine.drafts.format(drafts=drafts, tokens=drafts + 1) if drafts else ""
    return " ".join(filter(None, [*words, drafting, rest]))
