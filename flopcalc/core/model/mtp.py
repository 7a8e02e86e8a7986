"""Multi-token prediction: layers that a config describes and HF's model leaves out, as stages of their own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from flopcalc.base.data import find_data_dir, load_toml
from flopcalc.base.errors import ConfigError
from flopcalc.base.spelling import spell
from flopcalc.base.units import check_size
from flopcalc.core.model.config import Source
from flopcalc.core.model.ops import Attend, Chain, Linear, Norm, Op, Stage, iterate, join
from flopcalc.core.spec.spec import find_key
from flopcalc.core.workload.sums import Tokens

MAX_DEPTH = 100


@cache
def _load() -> dict[str, Any]:
    return load_toml(os.path.join(find_data_dir(), "mtp.toml"))


def count_layers(source: Source) -> int:
    """How many layers of multi-token prediction a config has."""
    inner = source.config.get("text_config")
    for key in _load()["keys"]:
        for table in (source.config, inner):
            value = table.get(key) if isinstance(table, Mapping) else None
            if value is not None:
                return check_size(value, f"{source.where}: {key}", 0)
    return int(_load()["types"].get(source.config["model_type"], {}).get("default", 0))


def choose_depth(source: Source) -> int:
    """How many layers are asked for: none, the config's, or a number."""
    asked = source.mtp
    if asked is None or asked is False:
        return 0
    if asked is True:
        found = count_layers(source)
        if not found:
            raise ConfigError(
                f"{source.where}: no layers of multi-token prediction (num_nextn_predict_layers); "
                f"{spell('mtp', 'N')} counts N"
            )
        return found
    depth = check_size(asked, "mtp", 0)
    if depth > MAX_DEPTH:
        raise ConfigError(f"mtp must be at most {MAX_DEPTH}, not {depth}")
    return depth


def expand_mtp(source: Source, stages: tuple[Stage, ...], depth: int) -> tuple[Stage, ...]:
    """The stages of these layers, which follow the model's own."""
    table = _load()["types"].get(source.config["model_type"], {})
    names = _load()["names"][table.get("names", "deepseek")]
    layers = [stage for stage in stages if stage.repeated and stage.group == "language" and stage.layers]
    heads = [(stage, op) for stage in stages for op in _list_heads(stage)]
    if not layers or len(heads) != 1 or stages[-1].reads is not None:
        raise ConfigError(
            f"{source.where}: multi-token prediction is not described for {source.config['model_type']!r}"
        )
    main, (head_stage, head) = layers[-1], heads[0]
    chains = [_find_chain(main, kind, source) for kind in table.get("layer", ["last"])]
    chain = tuple(item for each in chains for item in each)
    if "split" in table:
        chain = _join_halves(chains[0], chains[1], *table["split"])
    width, count = head.n_in, main.first + len(main.layers)
    bias = bool(find_key(source.config, names["bias"])[1]) if "bias" in names else False
    tied = head.tied or f"{join(head_stage.path, head.name)}.weight"
    read = (main.path, (count - 1,))
    found: list[Stage] = []
    for number in range(depth):
        fill = {"layers": main.path, "n": str(count + number), "k": str(number)}
        again = number > 0 and "{" not in names["product"]  # one product for all
        before: Chain = (
            *(Norm(name="", part="other", rows=Tokens(), dim=width, again=again) for _ in names["norms"]),
            Linear(name="", part="other", rows=Tokens(), n_in=2 * width, n_out=width, bias=bias, again=again),
        )
        paths = [*names["norms"], names["product"]]
        found += [
            _make_stage(main, path.format(**fill), (op,), read if place == 0 else None)
            for place, (path, op) in enumerate(zip(paths, before, strict=True))
        ]
        path, _, last = names["layer"].format(**fill).rpartition(".")
        found.append(
            main.replace(path=path, layers=(chain,), first=int(last), dead=(False,), reads=None, joins=(), adds=None)
        )
        read = (path, (int(last),))
        if names["last"]:
            norm = Norm(name="", part="other", rows=Tokens(), dim=width, again=again)
            found.append(_make_stage(main, names["last"].format(**fill), (norm,), None))
        shared = replace(head, tied=tied, again=True)
        found.append(_make_stage(head_stage, head_stage.path, (shared,), None))
    return tuple(found)


def _make_stage(like: Stage, path: str, chain: Chain, reads: tuple[str, tuple[int, ...]] | None) -> Stage:
    return like.replace(
        path=path,
        layers=(chain,),
        repeated=False,
        checkpoint=False,
        dead=(False,),
        reads=reads,
        joins=(),
        adds=None,
        first=0,
    )


def _list_heads(stage: Stage) -> list[Linear]:
    ops = (op for chain in stage.layers for op in iterate(chain))
    return [op for op in ops if isinstance(op, Linear) and op.part == "lm_head"]


def _find_chain(stage: Stage, kind: str, source: Source) -> Chain:
    """The last layer of a kind: with attention, a window, experts, or dense; any for 'last'."""
    for chain in reversed(stage.layers):
        if _is_kind(list(iterate(chain)), kind):
            return chain
    raise ConfigError(f"{source.where}: no layer of {stage.path} has {kind}, as those of multi-token prediction do")


def _join_halves(first: Chain, second: Chain, split: str, name: str) -> Chain:
    """One layer up to the norm before its MLP, and another from it on, under another name."""

    def find(chain: Chain) -> int:
        return next(place for place, item in enumerate(chain) if isinstance(item, Op) and item.name == split)

    place = find(second)
    norm = second[place]
    assert isinstance(norm, Op)
    return (*first[: find(first)], norm.replace(name=name), *second[place + 1 :])


def _is_kind(ops: list[Op], kind: str) -> bool:
    has_experts = any(op.copies > 1 for op in ops)
    if kind == "attention":
        return any(isinstance(op, Attend) for op in ops)
    if kind == "window":
        return any(isinstance(op, Attend) and getattr(op.rows, "window", 0) for op in ops)
    if kind == "experts":
        return has_experts
    return kind == "last" or not has_experts
