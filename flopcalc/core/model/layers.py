"""Build the ops of one layer from a spec's items: every size an int, every row count a named sum of the workload."""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple

from flopcalc.base.errors import ConfigError, SpecError, format_value
from flopcalc.base.vocabulary import Component
from flopcalc.core.model.ops import (
    Attend,
    Chain,
    Conv,
    Dropout,
    Embed,
    Linear,
    Multiply,
    Norm,
    Op,
    Param,
    Pointwise,
    iterate,
    map_ops,
    put_under,
)
from flopcalc.core.model.sizes import Size, find_size, format_origin, is_partial
from flopcalc.core.spec.expressions import evaluate_truth, find_names
from flopcalc.core.spec.merge import Table, rename_path
from flopcalc.core.spec.row_units import UNITS
from flopcalc.core.spec.spec import HEAD_PARTS, SPANS, WORDS, BoundDims, Gate, Split, find_block_part, keeps_keys
from flopcalc.core.workload.sums import (
    CachedKeys,
    Calls,
    Either,
    Expression,
    Frames,
    Images,
    InDecoder,
    Logits,
    MergedPatches,
    Minus,
    Pairs,
    Patches,
    Sum,
    Tiles,
    Tokens,
    Windows,
)

_APART = ("router", "modulation", "projector")  # parts whose products make nothing that another product sums up
_SCANNED = ("ssm", "attention_projections")  # parts whose products of activations mix tokens
_ANY = "any"  # part of what attention or a scan made
_Items = list["Op | tuple[Chain, ...]"]


class _Flow(NamedTuple):
    """What a tensor on its way through a layer has passed since the residual stream."""

    part: str = ""  # of the last product, if none has summed up what it made
    is_mixed: bool = False  # attention, a scan or an activation function came after it


def settle(chain: Chain) -> Chain:
    """The chain of a layer, whose ops say how they are split, gated and normed."""
    return _settle(chain, _Flow())[0]


def _settle(chain: Chain, flow: _Flow) -> tuple[Chain, _Flow]:
    made: _Items = []
    for item in chain:
        if not isinstance(item, Op):
            settled = [_settle(branch, flow) for branch in item]
            made.append(tuple(branch for branch, _ in settled))
            flow = next((own for _, own in settled if own.part), _Flow())
            continue
        if isinstance(item, Linear):
            is_row = flow.is_mixed and flow.part in (_ANY, item.part)
            usual: Split | None = "whole" if item.part == "router" else "row" if is_row else None
            said = item.inferred if item.split else (*item.inferred, "split")
            item = item.replace(split=item.split or usual, reads_stream=not flow.part, inferred=said)
            flow = _Flow("" if item.split == "row" or item.part in _APART else item.part)
        elif isinstance(item, Norm) and not item.over:
            before = made[-1] if made else None
            if isinstance(before, Linear) and before.split != "row" and before.copies == 1:
                item = item.replace(over=before.n_out, inferred=(*item.inferred, "over"))
        elif isinstance(item, Pointwise) and item.gate is None:
            item = item.replace(gate=_find_gate(made), inferred=(*item.inferred, "gate"))
        elif isinstance(item, Attend):
            _mark_projections(made)
        made.append(item)
        if flow.part and item.kind in ("attend", "product", "pointwise"):
            is_any = item.kind == "attend" or (item.kind == "product" and flow.part in _SCANNED)
            flow = _Flow(_ANY if is_any else flow.part, True)
    return tuple(made), flow


def _find_gate(before: _Items) -> Gate:
    """An activation function after two products that are siblings multiplies one by the other."""
    last = before[-1] if before else None
    if not isinstance(last, tuple) or len(last) != 2:
        return "plain"
    is_pair = all(len(each) == 1 and isinstance(each[0], Linear) and each[0].part != "router" for each in last)
    return "pair" if is_pair else "plain"


def _mark_projections(before: _Items) -> None:
    """The projections of an attention call, in place: its operands, and those of low rank that lead to them.

    One operand is queries, keys and values; of siblings the first is the queries.
    """
    calls = [i for i, item in enumerate(before) if isinstance(item, Attend)]
    first = calls[-1] + 1 if calls else 0
    places = [i for i in range(first, len(before)) if any(isinstance(op, Linear) for op in iterate((before[i],)))]
    for i in places:
        item = before[i]
        if i != places[-1]:
            (before[i],) = map_ops((item,), partial(_say, split="whole"))
        elif isinstance(item, Op):
            before[i] = _say(item, "fused")
        else:
            before[i] = tuple(
                _mark_branch(branch, "keys" if number else "column") for number, branch in enumerate(item)
            )


def _mark_branch(branch: Chain, word: Split) -> Chain:
    """A branch whose last products have a split; those before them are of low rank."""
    places = [i for i, item in enumerate(branch) if any(isinstance(op, Linear) for op in iterate((item,)))]
    made = list(branch)
    for i in places:
        split: Split = word if i == places[-1] else "whole"
        (made[i],) = map_ops((made[i],), partial(_say, split=split))
    return tuple(made)


def _say(op: Op, split: Split) -> Op:
    is_open = isinstance(op, Linear) and op.split is None and op.part == "attention_projections"
    return op.replace(split=split) if is_open else op


class LayerBuilder:
    """Builds the chain of one layer; what does not change from layer to layer is built once."""

    def __init__(
        self, dims: BoundDims, rows: tuple[str, str], part: Component, path: str, rename: dict[str, str], side: str,
        is_repeated: bool,
    ) -> None:  # fmt: skip
        self.dims = dims
        self.rows, self.needed = rows
        self.part = part
        self.path = path
        self.rename = rename
        self.side = side
        self.is_repeated = is_repeated
        self._changing: list[str] | None = None
        self._chains: dict[tuple[Hashable, ...], Chain] = {}
        self._alike: dict[Chain, Chain] = {}
        self._width: int | None = None  # what the attention before hands on, until a product reads it
        self._width_from: tuple[str, ...] = ()  # the expressions behind it

    def build(self, items: list[object]) -> Chain:
        """The chain of the current layer; layers in which every changing name has the same value share one."""
        if self._changing is None:
            self._changing = self._find_changing(items)
        key = tuple([self._read(name) for name in self._changing])
        chain = self._chains.get(key)
        if chain is None:
            chain = self._chain(items, "other")
            chain = settle(chain) if self.is_repeated else chain
            chain = self._chains[key] = self._alike.setdefault(chain, chain)
        return chain

    def _find_changing(self, items: list[object]) -> list[str]:
        """Names that the ops read and that change from layer to layer."""
        flat = self._flatten(items)
        texts = {value for each in flat for key, value in each.items() if isinstance(value, str) and key not in WORDS}
        texts |= {
            text.partition(":")[2]
            for item in flat
            for text in (item.get("rows", self.rows), item.get("needed", self.needed), item.get("less", ""))
            if ":" in text
        }
        texts |= {item[key].partition(":")[2] for item in flat for key in ("cache_rows", "queries") if key in item}
        tied = [item["tied"] for item in flat if "tied" in item]
        texts |= {condition for condition, _ in tied}
        named = [target for _, target in tied] + [item.get(key, "") for item in flat for key in _FILLED]
        texts |= {name for text in named for name in re.findall(_BRACES, text)}
        names = {name for text in texts for name in find_names(text)}
        return sorted(name for name in names if self.dims.depends_on_layer(name))

    def _read(self, name: str) -> Hashable:
        value = self.dims.lookup(name)
        value = tuple(value) if isinstance(value, list) else value
        try:
            hash(value)
        except TypeError:  # an object where a size should be: refused when it is used
            return type(value).__name__
        return value

    def _flatten(self, items: list[Any]) -> list[Table]:
        """Every op of the items and of the blocks that they name, each block once."""
        flat: list[Table] = []
        blocks: list[str] = []
        waiting = list(reversed(items))
        while waiting:
            item = waiting.pop()
            if isinstance(item, list):
                waiting += reversed(item)
                continue
            if isinstance(item, dict):
                flat.append(item)
            block = item.get("block") if isinstance(item, dict) else item
            if block is not None and block not in blocks:
                blocks.append(block)
                waiting += reversed(self.dims.spec.blocks[block])
        return flat

    def _chain(self, items: list[Any], part: Component) -> Chain:
        """A series: each item reads the one before it. `part` is the usual part of the block around them."""
        built: list[Op | tuple[Chain, ...]] = []
        for item in items:
            self.dims.budget.spend("ops")
            if isinstance(item, str):
                built.extend(self._chain(self.dims.spec.blocks[item], find_block_part(item) or part))
            elif isinstance(item, list):
                # Siblings: branches that read the same tensor; a branch is an op or a series of its own.
                branches = tuple(branch for entry in item if (branch := self._branch(entry, part)))
                if branches:
                    built.append(branches)
            elif "block" in item:
                if evaluate_truth(item.get("when", "true"), self.dims):
                    chain = self._chain([item["block"]], part)
                    if "under" in item:
                        chain = put_under(chain, _absolute(self._fill(item["under"]), self.rename))
                    if "with" in item:
                        chain = map_ops(chain, partial(Op.replace, beside=item["with"]))
                    built.extend(
                        map_ops(chain, partial(Op.replace, nested=True, twice=item["checkpoint"] == "twice"))
                        if item.get("checkpoint")
                        else chain
                    )
            else:
                op = self._make(item, part, built)
                if op is not None and "again" in item:
                    op = op.replace(again=evaluate_truth(item["again"], self.dims))
                if op is not None and "unused" in item:
                    op = op.replace(unused=evaluate_truth(item["unused"], self.dims))
                if op is not None:
                    built.append(op)
        return tuple(built)

    def _branch(self, entry: object, part: Component) -> Chain:
        """One of several siblings: what it reads is not the attention before them alone, nor what follows it."""
        self._width = None
        chain = self._chain(entry if isinstance(entry, list) else [entry], part)
        self._width = None
        return chain

    def _make(self, item: Table, block_part: str, before: Sequence[Op | tuple[Chain, ...]]) -> Op | None:
        dims = self.dims
        if "when" in item and not evaluate_truth(item["when"], dims):
            return None
        kind: str = item["op"]
        name: str = _absolute(self._fill(item.get("name", "")), self.rename)
        where = f"{self.path}.{name}" if name else self.path

        def size(field: str, minimum: int = 1, default: str | None = None) -> int:
            text = item.get(field, default)
            if text is None:
                raise SpecError(f"{dims.spec.file}: op {where!r} needs {field!r}")
            return find_size(dims, str(text), f"{where} {field}", minimum)

        common: dict[str, Any] = {
            "name": name,
            "part": item.get("part") or self.part or (block_part if kind in ("linear", "conv") else "other"),
            "rows": self._rows(item),
            "times": size("times", default="1"),
            "state": size("state", 0, default="0") if "state" in item else 0,
            "source": self._fill(item.get("from", "")),
            "joined": tuple(item["joined"].split()) if "joined" in item else (),
            "to": self._fill(item.get("to", "")),
            "detached": bool(item.get("detached", False)) and kind not in ("embed", "dropout", "pointwise"),
            "float32": self._find_cast(item) if "float32" in item else "",
        }
        if kind in ("linear", "conv"):
            return self._make_linear(item, size, common)
        if kind == "attend":
            return self._make_attend(item, size, common, before)
        if kind == "product":
            flops = size("flops", 0)
            backward = size("backward", 0) if "backward" in item else 2 * flops
            return Multiply(**common, flops=flops, backward=backward, pair=bool(item.get("pair", False)))
        if kind == "embed":
            return Embed(
                **common,
                count=size("count"),
                dim=size("dim"),
                tied=self._tied(item),
                input_embedding=self._is_input(item),
            )
        if kind == "norm":
            copies = size("copies", default="1")
            return Norm(
                **common,
                dim=size("dim"),
                bias=self._has_bias(item),
                tied=self._tied(item),
                copies=copies,
                active=copies,
                over=size("over", 0, default="0"),
            )
        if kind == "param":
            return Param(**common, size=size("size"), tied=self._tied(item))
        if kind == "dropout":
            share = dims.evaluate(item["p"])
            if isinstance(share, bool) or not isinstance(share, (int, float)):
                raise ConfigError(f"{dims.where}: {item['p']} must be a number, not {format_value(share)}")
            return Dropout(**common, saves=share > 0)
        return Pointwise(**common, gate=item.get("gate"))

    def _find_cast(self, item: Table) -> str:
        """How the code computes an op in float32: not, by casting its inputs, or always."""
        found = self.dims.evaluate(item["float32"])
        if found == "always":
            return "always"
        return "cast" if found is True else ""

    def _make_linear(self, item: Table, size: Size, common: dict[str, Any]) -> Linear:
        dims = self.dims
        copies, active = size("copies", default="1"), size("active", default="1")
        if active > copies:
            raise ConfigError(f"{dims.where}: {active} experts a token ({item['active']}) of only {copies}")
        self._check_width(item, size("in"))
        adapts = evaluate_truth(item["adapts"], dims) if "adapts" in item else common["part"] not in HEAD_PARTS
        return (Linear if item["op"] == "linear" else Conv)(
            **common,
            n_in=size("in"),
            n_out=size("out"),
            bias=self._has_bias(item),
            param=item.get("param", "weight"),
            tied=self._tied(item),
            targets=self._targets(item),
            is_bare="targets" in item,
            copies=copies,
            active=active,
            input_embedding=self._is_input(item),
            own_flops=size("flops") if "flops" in item else 0,
            at=item.get("at", ""),
            numbered=tuple(self.dims.evaluate(item["numbered"])) if "numbered" in item else (0, 1),
            adapts=adapts,
            split=item.get("split"),
            is_shared=bool(item.get("shared", False)),
            groups=self._groups(item),
        )

    def _make_attend(
        self, item: Table, size: Size, common: dict[str, Any], before: Sequence[Op | tuple[Chain, ...]]
    ) -> Attend:
        if "rows" not in item:
            pairs, times = self._attend(item, size)
            pairs = self._sided(pairs)
            common["rows"] = Minus(pairs, self._sum_rows(item["less"])) if "less" in item else pairs
            common["times"] = times
        if common["part"] not in ("vision", "audio", "projector"):
            common["part"] = "attention_scores"
        heads, qk, v = size("heads"), size("qk"), size("v", 0)
        is_silent = "kv_heads" not in item
        kv_heads = _count_key_heads(before, heads, qk, v) if is_silent else size("kv_heads")
        texts = (str(item["heads"]), str(item.get("kv_heads", "0")))
        if heads % kv_heads and not is_partial(self.dims, *texts):
            raise ConfigError(
                f"{self.dims.where}: {heads} attention heads cannot share {kv_heads} heads of keys and values"
                f"{format_origin(self.dims, *texts)}"
            )
        self._check_rotary()
        self._width = size("out", default=str(heads * v)) if v else None  # a part of the products hands nothing on
        self._width_from = (*texts, str(item["v"]))
        cache = size("cache", 0, default=str(kv_heads * (qk + v) if keeps_keys(item) else 0))
        open_keys = {
            "kv_heads": is_silent and (kv_heads != heads or keeps_keys(item)),
            "queries": "queries" not in item and isinstance(common["rows"], Expression),
        }
        return Attend(
            **common,
            heads=heads,
            kv_heads=kv_heads,
            inferred=tuple(key for key, is_open in open_keys.items() if is_open),
            qk=qk,
            v=v,
            cache=cache,
            cache_rows=self._cache_rows(item) if cache else None,
            latent=size("latent", 0, default="0"),
            queries=self._sum_rows(item["queries"]) if "queries" in item else None,
            rotates_part=item.get("rotates") == "part",
            float_scores=bool(item.get("float_scores", False)),
        )

    def _check_rotary(self) -> None:
        """Rotary embeddings turn pairs of numbers: HF's code fails where it turns an odd number of them, or makes two
        numbers of one."""
        if "rotary" in self.dims.spec.dims:
            turned = find_size(self.dims, "rotary", f"{self.path} rotary", 0)
            if turned % 2:
                one = ", and a pair of a single one is not described" if turned == 1 else ""
                raise ConfigError(
                    f"{self.dims.where}: head_dim must be even: rotary embeddings turn pairs of numbers, not {turned}"
                    f"{one}{format_origin(self.dims, 'rotary')}"
                )

    def _check_width(self, item: dict[str, object], width: int) -> None:
        """A product after attention reads its heads, all of them and nothing else: HF's code would fail too."""
        given, self._width = self._width, None
        is_wrong = given is not None and given != width and item["op"] == "linear" and "from" not in item
        if is_wrong and not is_partial(self.dims, *self._width_from):
            raise ConfigError(
                f"{self.dims.where}: attention hands on {given} numbers, but {item.get('name') or self.path} reads "
                f"{width}: the width is no multiple of the heads{format_origin(self.dims, str(item['in']))}"
            )

    def _has_bias(self, item: Table) -> bool:
        return evaluate_truth(item["bias"], self.dims) if "bias" in item else False

    def _tied(self, item: Table) -> str | None:
        if "tied" not in item:
            return None
        condition, target = item["tied"]
        if not evaluate_truth(condition, self.dims):
            return None
        return rename_path(self._fill(target), self.rename)

    def _fill(self, name: str) -> str:
        return re.sub(_BRACES, lambda found: str(self.dims.lookup(found[1])), name) if "{" in name else name

    def _groups(self, item: Table) -> tuple[int, int]:
        """Groups of experts, and how many of them a token may reach; one of one where a config says none."""
        many, chosen = self.dims.evaluate(item["groups"]) if "groups" in item else (1, 1)
        is_known = type(many) is int and type(chosen) is int and 1 <= chosen <= many
        return (many, chosen) if is_known else (1, 1)

    def _is_input(self, item: Table) -> bool:
        value = item.get("input_embedding", False)
        return value if isinstance(value, bool) else evaluate_truth(value, self.dims)

    def _targets(self, item: Table) -> tuple[str, ...]:
        names = self.dims.evaluate(item["targets"]) if "targets" in item else []
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise SpecError(f"{self.dims.spec.file}: targets of {item.get('name')!r} must be a list of names")
        return tuple(names)

    def _attend(self, item: Table, size: Size) -> tuple[Sum, int]:
        span = item.get("span", "seq")
        if span == "seq":
            mask = item.get("mask", "causal")
            if mask == "causal" and evaluate_truth(_BOTH_WAYS, self.dims):
                mask = "full"
            shows = mask == "causal" and evaluate_truth(_SHOWS, self.dims)
            window = self.dims.evaluate(item["window"]) if "window" in item else None
            if window is None:
                return Pairs(mask, shows=shows), 1
            return Pairs(mask, find_size(self.dims, item["window"], f"{self.path} window", 1), shows=shows), 1
        if span == "frames":
            return Frames(), 1
        if span == "windows":
            return Windows(find_size(self.dims, "merge", "merge", 1), size("window")), 1
        if span in ("images", "tiles"):
            length = size("length")
            return (Images() if span == "images" else Tiles()), length * length
        raise SpecError(f"{self.dims.spec.file}: span {span!r} unknown; known: {', '.join(SPANS)}")

    def _cache_rows(self, item: Table) -> Sum:
        """Positions that a layer's cache holds: those said, else all of its own side's that its window lets it see."""
        if "cache_rows" in item:
            return self._expression(item["cache_rows"])
        unit = "decoder" if self.side == "decoder" else "sequence"
        window = self.dims.evaluate(item["window"]) if "window" in item else None
        return Expression(unit, "n + c" if window is None else f"min(n + c, {window})")

    def _rows(self, item: Table) -> Sum:
        rows = self._sum_rows(item.get("rows", self.rows))
        needed = item.get("needed", "" if "rows" in item else self.needed)
        if needed:
            rows = Either(self._sum_rows(needed), rows)
        return Minus(rows, self._sum_rows(item["less"])) if "less" in item else rows

    def _sum_rows(self, rows: str) -> Sum:
        if ":" in rows:
            return self._expression(rows)
        if rows == "merged":
            return MergedPatches(find_size(self.dims, "merge", "merge", 1) ** 2)
        return self._sided(_ROWS[rows])

    def _sided(self, rows: Sum) -> Sum:
        return InDecoder(rows) if self.side == "decoder" and isinstance(rows, _SIDED) else rows

    def _expression(self, rows: str) -> Expression:
        """An expression over the workload: the spec's own names get their values here, the unit's stay open."""
        unit, _, text = rows.partition(":")
        names = sorted(find_names(text) - set(UNITS[unit]))
        return Expression(unit, text.strip(), tuple((name, self._read(name)) for name in names))


_ROWS: dict[str, Sum] = {
    "tokens": Tokens(),
    "logits": Logits(),
    "cached": CachedKeys(),
    "patches": Patches(),
    "images": Images(),
    "tiles": Tiles(),
}
_SIDED = (Tokens, Logits, CachedKeys, Pairs, Calls)  # sums that a decoder has of its own
# transformers 5.22: masking_utils.py, create_causal_mask: the key makes a decoder's attention bidirectional.
_BOTH_WAYS = "has(is_causal) and not is_causal"
_SHOWS = "has(image_block) and image_block > 0"  # tokens of an image see one another both ways
_BRACES = r"\{(\w+)\}"  # a dim's value inside the name of a module, of a tied parameter or of a stream
_FILLED = ("name", "under", "from", "to")


def _count_key_heads(before: Sequence[Op | tuple[Chain, ...]], heads: int, qk: int, v: int) -> int:
    """Key heads where a user's older spec has none (a note says so): the projections that attention reads write
    heads · qk of queries and kv_heads · (qk + v) of keys and values; where they do not, every head has its own keys.
    """
    width = 0
    for item in reversed(before):
        branches = ((item,),) if isinstance(item, Op) else item
        linears = [[op for op in iterate(branch) if isinstance(op, Linear)] for branch in branches]
        width = sum(each[-1].n_out for each in linears if each)
        if width:
            break
    found, rest = divmod(width - heads * qk, qk + v)
    return found if found > 0 and not rest and heads % found == 0 else heads


def _absolute(name: str, rename: dict[str, str]) -> str:
    """A name that starts with / is a whole path: a module that several layers share."""
    return f"/{rename_path(name[1:], rename)}" if name.startswith("/") else name
