"""Spec files as tables: what a spec says, merged with the spec that it extends, named sums written out."""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Iterable
from typing import Any, TypeGuard

from flopcalc.base.data import ALIASES, DIFFUSERS, PARTS, find_data_file, get_stem, list_data_files, load_toml
from flopcalc.base.errors import SpecError, format_nearest, format_value
from flopcalc.core.spec.expressions import find_names, parse
from flopcalc.core.spec.row_units import UNITS

Table = dict[str, Any]  # of a spec, as TOML has it
MAX_TERMS = 1000  # names of [sums] in one sum, written out
ROW_KEYS = ("rows", "needed", "less", "cache_rows", "queries")  # keys that hold a sum of the workload
SPEC_KEYS = {
    "family", "architecture", "source", "extends", "required", "tower", "defaults", "renamed", "dims", "blocks",
    "checks", "stack", "vision", "audio", "latents", "positions", "variants", "rename", "main_input",
    "reentrant", "sums", "drop", "config_checks", "heads", "refused", "phases", "note", "nulls", "sdpa",
    "conv1d", "untimed", "unrecomputed", "lists",
}  # fmt: skip
_MERGED = ("defaults", "nulls", "renamed", "dims", "checks", "blocks", "sums", "heads", "lists")  # merged key by key
# Not of specs that extend it.
_OWN = ("variants", "refused", "config_checks", "phases", "note", "sdpa", "conv1d", "untimed", "unrecomputed")
_TABLES = (*_MERGED, "variants", "refused", "config_checks", "vision", "audio", "latents", "positions", "rename")
_OF_PIPELINES = ("defaults", "encoders", "passed")  # the same of a file of pipelines and its siblings
CHANGES = ("change", "after", "before")  # keys of a stack that say what it does to the other spec's
_PLACES = ("after", "before", "beside")
OP_CHANGES = ("change", *_PLACES, "drop")  # the same of an op


def load_tables(path: str) -> Table:
    """The tables of a spec file, with those of the specs that it extends."""
    return _write_out_sums(_load(path, ()), path)


def list_pipelines() -> dict[str, tuple[str, dict[str, Any]]]:
    """Name -> file and tables of every pipeline that is described; a file's siblings say only what differs."""
    found = {}
    for name, path in list_data_files("pipelines").items():
        tables = load_toml(path)
        siblings = tables.pop("siblings", {})
        found[name] = (path, tables)
        for sibling, changes in siblings.items():
            merged = {key: {**tables.get(key, {}), **changes.get(key, {})} for key in _OF_PIPELINES}
            found[sibling] = (path, {**tables, **changes, **merged})
    return found


def find_parent(alias: Table) -> Any:
    """The model type that an alias extends; `like` is the key's earlier name."""
    return alias.get("extends", alias.get("like"))


def _load(path: str, above: tuple[str, ...]) -> Table:
    tables = load_toml(path)
    if os.path.basename(os.path.dirname(path)) == ALIASES:  # what differs from the family that the alias names
        tables = {"extends": find_parent(tables), "source": tables.get("source"), **tables.get("spec", {})}
    check_keys(tables, SPEC_KEYS, path)
    base_name = tables.pop("extends", None)
    for key in _TABLES:
        if not isinstance(tables.get(key, {}), dict):
            raise SpecError(f"{path}: [{key}] must be a table")
    stacks = tables.get("stack", [])
    if not isinstance(stacks, list) or not all(isinstance(stack, dict) for stack in stacks):
        raise SpecError(f"{path}: stacks are written [[stack]], one table each")
    if os.path.basename(os.path.dirname(path)) in (PARTS, DIFFUSERS):
        tables.setdefault("tower", True)
    dropped = tables.pop("drop", [])
    if not is_names(dropped):
        raise SpecError(f"{path}: drop must be a list of stacks")
    if base_name is None:
        if dropped or any(_is_change(stack) for stack in stacks):
            raise SpecError(f"{path}: changes stacks of another spec, but extends none")
        for name, items in tables.get("blocks", {}).items():
            if _is_op_change(items):
                raise SpecError(f"{path}: block {name!r} changes ops of another spec, but the file extends none")
        return tables
    is_own = base_name == get_stem(path) and os.path.basename(os.path.dirname(path)) != ALIASES
    if base_name in above or is_own:
        raise SpecError(f"{path}: extends {base_name!r}, which leads back to it")
    folder = os.path.dirname(path)
    beside = "" if os.path.basename(folder) == ALIASES else os.path.join(folder, f"{base_name}.toml")
    base_path = beside if os.path.isfile(beside) else find_data_file("specs", str(base_name))
    base_path = base_path or find_data_file(ALIASES, str(base_name))
    if base_path is None:
        raise SpecError(f"{path}: extends {base_name!r}, which is no spec")
    base = _load(base_path, (*above, get_stem(path)))
    for key in _OWN:
        base.pop(key, None)
    merged = {**base, **tables}
    for key in _MERGED:
        merged[key] = {**base.get(key, {}), **tables.get(key, {})}
    for name, items in tables.get("blocks", {}).items():
        if _is_op_change(items):
            where, blocks = f"{path}: block {name!r}", base.get("blocks", {})
            if not isinstance(blocks.get(name), list):
                near = format_nearest(name, blocks)
                raise SpecError(f"{where} changes ops, but {base_name!r} has no block of that name.{near}")
            merged["blocks"][name] = _merge_ops(blocks[name], items, where, str(base_name))
    rename = tables.get("rename", {})
    merged["rename"] = {old: rename_path(new, rename) for old, new in base.get("rename", {}).items()} | rename
    # "none" takes a default of the other spec back: TOML has no null.
    merged["defaults"] = {key: value for key, value in merged["defaults"].items() if value != "none"}
    if dropped or any(_is_change(stack) for stack in stacks):
        merged["stack"] = _merge_stacks(base.get("stack", []), stacks, dropped, path, str(base_name))
    return merged


# --- stacks -----------------------------------------------------------------------------------------------------------
def _is_change(stack: Table) -> bool:
    return any(key in stack for key in CHANGES)


def _merge_stacks(base: list[Table], own: list[Table], dropped: list[str], path: str, base_name: str) -> list[Table]:
    """The other spec's stacks, less those dropped, with the keys that changes give; new ones in their places."""
    stacks = list(base)
    followers: dict[str, int] = {}  # new stacks that are placed after one keep their order

    def find(name: Any) -> int:
        names = [_name_stack(stack) for stack in stacks]
        if names.count(name) == 1:
            return names.index(name)
        if name in names:
            raise SpecError(f"{path}: {base_name!r} has several stacks {name!r}; give each a name to change one")
        raise SpecError(f"{path}: {base_name!r} has no stack {name!r}.{format_nearest(str(name), names)}")

    for name in dropped:
        del stacks[find(name)]
    for stack in own:
        rest = {key: value for key, value in stack.items() if key not in CHANGES}
        given = [key for key in CHANGES if key in stack]
        if len(given) > 1:
            raise SpecError(f"{path}: stack {_name_stack(rest)!r}: {given[0]} and {given[1]} exclude each other")
        if not given:
            stacks.append(rest)
        elif given == ["change"]:
            i = find(stack["change"])
            if _is_op_change(rest.get("ops")):
                where = f"{path}: stack {stack['change']!r}"
                rest["ops"] = _merge_ops(stacks[i].get("ops", []), rest["ops"], where, base_name)
            stacks[i] = {**stacks[i], **rest}
        elif given == ["before"]:
            stacks.insert(find(stack["before"]), rest)
        else:
            i = find(stack["after"])
            followers[stack["after"]] = followers.get(stack["after"], 0) + 1
            stacks.insert(i + followers[stack["after"]], rest)
    return stacks


def _name_stack(stack: Table) -> str:
    """What a spec that extends this one calls the stack."""
    return str(stack.get("name") or stack.get("path") or stack.get("config"))


def rename_path(path: str, rename: dict[str, str]) -> str:
    """A module path with the longest matching prefix replaced."""
    found = max((old for old in rename if path == old or path.startswith(f"{old}.")), key=len, default=None)
    return path if found is None else (rename[found] + path[len(found) :]).removeprefix(".")


# --- ops --------------------------------------------------------------------------------------------------------------
def _is_op_change(items: object) -> bool:
    """Whether a list of ops says what differs from the other spec's, as stacks do; else it replaces them."""
    return isinstance(items, list) and any(isinstance(item, dict) and item.keys() & OP_CHANGES for item in items)


def _merge_ops(base: list[Any], own: list[Any], where: str, base_name: str) -> list[Any]:
    """The other spec's ops with changes. Names are those of the other spec's ops, whatever the order of changes."""
    ops: list[Any] = []

    def number(item: object) -> int:
        ops.append(item)
        return len(ops) - 1

    tree = _map_ops(base, number)
    names = [_name_op(op) for op in ops]
    numbers = {
        name if names.count(name) == 1 else f"{name}#{names[: i + 1].count(name)}": i for i, name in enumerate(names)
    }
    dropped: set[int] = set()
    changed: set[int] = set()
    placed: list[tuple[str, list[int], list[Any]]] = []

    def find(name: object) -> int:
        if isinstance(name, str) and name in numbers:
            return numbers[name]
        if name in names:
            several = ", ".join(other for other in numbers if other.rpartition("#")[0] == name)
            raise SpecError(f"{where}: {base_name!r} has several ops {name!r} there; say which: {several}")
        near = format_nearest(str(name), numbers)
        raise SpecError(f"{where}: {base_name!r} has no op {format_value(name)} there.{near}")

    for item in own:
        given = [key for key in OP_CHANGES if key in item] if isinstance(item, dict) else []
        if not given:
            tree += _map_ops([item], number)
            continue
        key, target = given[0], item[given[0]]
        ends = target if isinstance(target, list) else [target]
        fields = {field: value for field, value in item.items() if field not in OP_CHANGES}
        added = fields.get("ops", [fields])
        problems = {
            f"{key} and {given[-1]} exclude each other": len(given) > 1,
            "takes no other keys": key == "drop" and bool(fields),
            "says nothing": key != "drop" and not fields,
            "ops must be a list, without other keys": "ops" in fields
            and (len(fields) > 1 or not isinstance(added, list)),
            "name one op, or the first and the last of several": key in _PLACES and not 1 <= len(ends) <= 2,
        }
        for problem in (words for words, is_wrong in problems.items() if is_wrong):
            raise SpecError(f"{where}, {key} {format_value(target)}: {problem}")
        if key == "drop":
            dropped.update(map(find, ends))
        elif key == "change":
            at = find(target)
            changed.add(at)
            op = ops[at] if isinstance(ops[at], dict) else {"block": ops[at]}
            # "none" takes a key of the other spec back, as in [defaults].
            ops[at] = {field: value for field, value in {**op, **fields}.items() if value != "none"}
        else:
            placed.append((key, [find(name) for name in ends], _map_ops(added, number)))
    if dropped & changed:
        raise SpecError(f"{where}, op {names[min(dropped & changed)]!r}: change and drop exclude each other")
    # Backwards, so that the first of several ops after another one stands next to it.
    before = [change for change in placed if change[0] == "before"]
    for key, found, added in (*before, *(change for change in reversed(placed) if change[0] != "before")):
        _place_ops(tree, True, key, found, added)
    return _write_ops(tree, ops, dropped, True)


def _map_ops(items: list[Any], change: Callable[[Any], Any]) -> list[Any]:
    """The same lists with something else for each op."""
    return [_map_ops(item, change) if isinstance(item, list) else change(item) for item in items]


def _name_op(item: object) -> str:
    """What specs that extend this one call an op: the path of its module or parameter, else its kind."""
    if not isinstance(item, dict):
        return str(item)
    path = ".".join(str(item[key]) for key in ("name", "param") if key in item)
    return str(item.get("block") or path or item.get("op"))


def _place_ops(tree: list[Any], is_series: bool, key: str, ends: list[int], added: list[Any]) -> bool:
    """Put ops after or before others in a series, or next to them as a sibling; `ends` are the first and the last."""
    at = [i for i, entry in enumerate(tree) if any(_holds(entry, number) for number in ends)]
    start, end = at[0], at[-1] + 1
    found, inner = tree[start:end], tree[start]
    begins = key == "beside" and not is_series and [inner[0]] == ends if isinstance(inner, list) else True
    if len(at) == 1 and not begins and _place_ops(inner, not is_series, key, ends, added):
        return True
    if not is_series and len(ends) > 1:
        return False  # siblings: the list around them places ops after, before or next to all of them
    if key == "beside":
        branch = added if len(added) == 1 else [added]
        others = found if len(found) == 1 and not isinstance(inner, list) else [found]
        tree[start:end] = [[*others, *branch]] if is_series else [*found, *branch]
    else:
        chain = [*added, *found] if key == "before" else [*found, *added]
        tree[start:end] = chain if is_series else [chain]
    return True


def _holds(entry: object, number: int) -> bool:
    return any(_holds(inner, number) for inner in entry) if isinstance(entry, list) else entry == number


def _write_ops(tree: list[Any], ops: list[Any], dropped: set[int], is_series: bool) -> list[Any]:
    """The ops in the place of their numbers; if only one of several siblings is left, it joins the series."""
    written: list[Any] = []
    for entry in tree:
        inner = _write_ops(entry, ops, dropped, not is_series) if isinstance(entry, list) else [ops[entry]]
        if not isinstance(entry, list):
            written += inner if entry not in dropped else []
        elif is_series and len(inner) == 1 < len(entry):
            written += inner[0] if isinstance(inner[0], list) else inner
        elif inner:
            written.append(inner)
    return written


# --- sums -------------------------------------------------------------------------------------------------------------
def _write_out_sums(tables: Table, path: str) -> Table:
    """The same tables with every name of [sums] replaced by what it stands for."""
    sums = tables.get("sums", {})
    if not sums:
        return tables
    for name, text in sums.items():
        _check_sum(name, text, tables, path)
    terms = {name: text for name, text in sums.items() if ":" not in text}

    def write_out(table: Table) -> Table:
        changed = {
            key: _write_out(table[key], sums, terms, path) for key in ROW_KEYS if isinstance(table.get(key), str)
        }
        if isinstance(table.get("ops"), list):
            changed["ops"] = write_out_all(table["ops"])
        return {**table, **changed} if changed else table

    def write_out_all(items: object) -> Any:
        if isinstance(items, list):
            return [write_out_all(item) for item in items]
        return write_out(items) if isinstance(items, dict) else items

    tables["stack"] = write_out_all(tables.get("stack", []))
    tables["blocks"] = {name: write_out_all(items) for name, items in tables.get("blocks", {}).items()}
    return tables


def _check_sum(name: str, text: object, tables: Table, path: str) -> None:
    if not isinstance(text, str):
        raise SpecError(f"{path}: [sums] {name} must be an expression, or one after its unit")
    if name in tables.get("dims", {}) or any(name in names for names in UNITS.values()):
        raise SpecError(f"{path}: [sums] {name} is the name of a dim, or of a number of the workload")
    unit, colon, expression = text.rpartition(":")
    if colon and unit not in UNITS:
        raise SpecError(f"{path}: [sums] {name}: no unit {unit!r}.{format_nearest(unit, UNITS)}")
    try:
        parse(expression)
    except SpecError as error:
        raise SpecError(f"{path}: [sums] {name}: {error}") from None


def _write_out(text: str, sums: dict[str, str], terms: dict[str, str], path: str) -> str:
    text = text if text in terms else sums.get(text, text)
    unit, colon, expression = text.partition(":")
    try:
        if not colon or not find_names(expression) & terms.keys():
            return text
        return f"{unit}: {ast.unparse(_Terms(terms).visit(_make_tree(expression)))}"
    except SpecError:
        return text  # refused with its op's name, when the ops are checked
    except RecursionError:
        raise SpecError(
            f"{path}: [sums] a name leads back to itself in {text!r}, or stands for more than {MAX_TERMS} others"
        ) from None


def _make_tree(text: str) -> ast.expr:
    """A tree of its own: the parsed ones are kept for other readers."""
    return ast.parse(text.strip(), mode="eval").body


class _Terms(ast.NodeTransformer):
    """Puts terms in the place of their names."""

    def __init__(self, terms: dict[str, str]) -> None:
        self.terms = terms
        self.count = 0

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id not in self.terms:
            return node
        self.count += 1
        if self.count > MAX_TERMS:
            raise RecursionError
        tree: ast.expr = self.visit(_make_tree(self.terms[node.id]))
        return tree

    def visit_Call(self, node: ast.Call) -> ast.expr:
        node.args = [self.visit(argument) for argument in node.args]
        return node


# --- checks that every table needs ------------------------------------------------------------------------------------
def check_keys(table: Table, known: Iterable[str], where: str) -> None:
    for key in table:
        if key not in known:
            raise SpecError(f"{where}: unknown key {key!r}.{format_nearest(key, known)}")


def is_names(value: object) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)
