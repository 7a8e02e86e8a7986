"""What a spec says of another's stacks and ops, named sums, the usual part of a block, the folder of parts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flopcalc.api import bind
from flopcalc.base.data import find_data_file, list_data_files, load_toml
from flopcalc.base.errors import ConfigError, SpecError
from flopcalc.core.model.ops import Op, iterate
from flopcalc.core.spec.merge import _load, load_tables
from flopcalc.core.spec.spec import find_spec, load_spec
from flopcalc.core.workload.sums import Either, Expression, Tokens

HEAD = 'architecture = "A"\nsource = "S"\n'
BASE = (
    HEAD
    + """
[blocks]
mlp = [{ op = "linear", name = "up", in = "4", out = "8" }]
[[stack]]
path = "embed"
ops  = [{ op = "embed", count = "9", dim = "4" }]
[[stack]]
path       = "layers"
repeat     = "2"
checkpoint = true
ops        = ["mlp"]
[[stack]]
path = "norm"
ops  = [{ op = "norm", dim = "4" }]
[[stack]]
name = "second"
path = "norm"
ops  = [{ op = "norm", dim = "5" }]
[[stack]]
path = "head"
rows = "logits"
part = "lm_head"
ops  = [{ op = "linear", in = "4", out = "9" }]
"""
)


def write(folder: Path, text: str, name: str) -> str:
    path = folder / f"{name}.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def list_stacks(folder: Path, text: str) -> list[dict[str, Any]]:
    write(folder, BASE, "base")
    return load_spec(write(folder, HEAD + 'extends = "base"\n' + text, "child")).stacks


def stack(**keys: str) -> str:
    return "[[stack]]\n" + "".join(f"{key} = {value}\n" for key, value in keys.items())


# --- stacks -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "paths"),
    [
        ("", ["embed", "layers", "norm", "norm", "head"]),
        ('drop = ["second"]\n', ["embed", "layers", "norm", "head"]),
        (stack(change='"layers"', repeat='"3"'), ["embed", "layers", "norm", "norm", "head"]),
        (stack(change='"norm"', path='"last"'), ["embed", "layers", "last", "norm", "head"]),
        (stack(path='"x"', after='"embed"'), ["embed", "x", "layers", "norm", "norm", "head"]),
        (stack(path='"x"', before='"embed"'), ["x", "embed", "layers", "norm", "norm", "head"]),
        (stack(path='"x"', after='"embed"') + stack(path='"y"', after='"embed"'), ["embed", "x", "y", "layers"]),
        (stack(path='"x"', before='"head"') + stack(path='"y"', before='"head"'), ["norm", "x", "y", "head"]),
        (stack(path='"x"', after='"embed"') + stack(path='"y"', after='"x"'), ["embed", "x", "y", "layers"]),
        (stack(change='"head"', ops="[]") + stack(path='"x"'), ["head", "x"]),  # at the end
        ('drop = ["embed"]\n' + stack(path='"embed"', before='"layers"'), ["embed", "layers", "norm", "norm", "head"]),
        (stack(path='"all"', ops='["mlp"]'), ["all"]),  # a list of whole stacks stands for all of them
    ],
)
def test_stacks_are_merged_by_name(tmp_path: Path, text: str, paths: list[str]) -> None:
    found = [entry["path"] for entry in list_stacks(tmp_path, text)]
    assert paths in [found[i : i + len(paths)] for i in range(len(found))]
    assert not {"change", "after", "before"} & {key for entry in list_stacks(tmp_path, text) for key in entry}


def test_a_change_keeps_what_it_does_not_say(tmp_path: Path) -> None:
    layers = list_stacks(tmp_path, stack(change='"layers"', repeat='"3"'))[1]
    assert layers == {"path": "layers", "repeat": "3", "checkpoint": True, "ops": ["mlp"]}


def test_a_stack_without_a_path_is_called_after_its_config(tmp_path: Path) -> None:
    write(tmp_path, HEAD + stack(use='"llama"', config='"text_config"'), "base")
    child = HEAD + 'extends = "base"\n' + stack(change='"text_config"', use='"gemma"')
    assert load_spec(write(tmp_path, child, "child")).stacks == [{"use": "gemma", "config": "text_config"}]


def test_a_change_of_a_change(tmp_path: Path) -> None:
    list_stacks(tmp_path, stack(change='"norm"', path='"last"'))
    third = HEAD + 'extends = "child"\n' + stack(change='"last"', ops="[]")
    found = load_spec(write(tmp_path, third, "third")).stacks
    assert [entry for entry in found if entry["path"] == "last"] == [{"path": "last", "ops": []}]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (stack(change='"layer"', ops="[]"), "'base' has no stack 'layer'. Did you mean layers?"),
        ('drop = ["hed"]\n', "'base' has no stack 'hed'. Did you mean head, embed?"),
        (stack(path='"x"', after='"ebmed"'), "'base' has no stack 'ebmed'. Did you mean embed?"),
        ("drop = 'head'\n", "drop must be a list of stacks"),
        (stack(path='"x"', after='["embed"]'), "'base' has no stack ['embed']."),
        (stack(change="5", ops="[]"), "'base' has no stack 5."),
        (stack(change='"head"', after='"embed"'), "change and after exclude each other"),
        (stack(path='"x"', after='"embed"', before='"head"'), "after and before exclude each other"),
        (stack(change='"head"', rowz='"tokens"'), "unknown key 'rowz'. Did you mean rows?"),
        (stack(path='"norm"', after='"embed"') + stack(change='"norm"', ops="[]"), "several stacks 'norm'"),
    ],
)
def test_bad_changes(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(SpecError) as caught:
        list_stacks(tmp_path, text)
    assert words in str(caught.value)
    assert "child.toml" in str(caught.value)


def test_changes_need_a_spec_to_change(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="extends none"):
        load_spec(write(tmp_path, HEAD + stack(change='"head"', ops="[]"), "alone"))


# --- ops --------------------------------------------------------------------------------------------------------------
# a, siblings b (then c) and d, the block e, two ops f, an op without a name
PARENT = """
[blocks]
e = [{ op = "norm", name = "x", dim = "4" }]
layer = [
  { op = "norm", name = "a", dim = "4" },
  [
    [ { op = "linear", name = "b", in = "4", out = "4", bias = "true" }, { op = "norm", name = "c", dim = "4" } ],
    { op = "linear", name = "d", in = "4", out = "4" },
  ],
  "e",
  { op = "linear", name = "f", in = "4", out = "4" },
  { op = "linear", name = "f", param = "w", in = "4", out = "4" },
  { op = "norm", name = "f", dim = "4" },
  { op = "pointwise" },
]
[[stack]]
path = "layers"
ops  = ["layer", { op = "norm", name = "last", dim = "4" }]
"""
NEW = 'op = "pointwise", name = "n"'


def show(items: list[Any]) -> str:
    """Ops as their names: a series in plain order, siblings in brackets, fields that are not usual behind a colon."""
    words = []
    for item in items:
        if isinstance(item, dict):
            fields = {key: value for key, value in item.items() if key not in ("op", "name", "in", "out", "dim")}
            name = str(item.get("name") or item.get("block") or item["op"])
            words.append(":".join([name, *(f"{key}={value}" for key, value in fields.items() if key != "block")]))
        else:
            words.append(item if isinstance(item, str) else f"[{show(item)}]")
    return " ".join(words)


def change_ops(folder: Path, changes: str, block: str = "layer") -> list[Any]:
    write(folder, HEAD + PARENT, "base")
    text = f'{HEAD}extends = "base"\n[blocks]\n{block} = [{changes}]\n'
    return load_spec(write(folder, text, "child")).blocks[block]


@pytest.mark.parametrize(
    ("changes", "ops"),
    [
        ('{ drop = "a" }', "[[b:bias=true c] d] e f f:param=w f pointwise"),
        ('{ drop = ["a", "e", "pointwise"] }', "[[b:bias=true c] d] f f:param=w f"),
        ('{ drop = "f.w" }', "a [[b:bias=true c] d] e f f pointwise"),
        ('{ drop = "f#2" }', "a [[b:bias=true c] d] e f f:param=w pointwise"),
        ('{ drop = "d" }', "a b:bias=true c e f f:param=w f pointwise"),  # the sibling that is left joins the series
        ('{ drop = ["b", "c"] }', "a d e f f:param=w f pointwise"),
        ('{ drop = ["b", "c", "d"] }', "a e f f:param=w f pointwise"),
        ('{ change = "b", name = "q" }', "a [[q:bias=true c] d] e f f:param=w f pointwise"),
        ('{ change = "b", bias = "none" }', "a [[b c] d] e f f:param=w f pointwise"),
        ('{ change = "c", when = "true" }, { change = "c", name = "z" }', "a [[b:bias=true z:when=true] d] e"),
        ('{ change = "e", when = "true" }', "a [[b:bias=true c] d] e:when=true f"),
        ('{ change = "pointwise", name = "act" }', "f act"),
        (f'{{ after = "a", {NEW} }}', "a n [[b:bias=true c] d] e"),
        (f'{{ before = "a", {NEW} }}', "n a [[b:bias=true c] d] e"),
        (f'{{ after = "b", {NEW} }}', "a [[b:bias=true n c] d] e"),
        (f'{{ after = "d", {NEW} }}', "a [[b:bias=true c] [d n]] e"),  # a sibling becomes a series
        (f'{{ before = "d", {NEW} }}', "a [[b:bias=true c] [n d]] e"),
        (f'{{ beside = "d", {NEW} }}', "a [[b:bias=true c] d n] e"),
        (f'{{ beside = "b", {NEW} }}', "a [[b:bias=true c] n d] e"),  # beside the series that it begins
        (f'{{ beside = "c", {NEW} }}', "a [[b:bias=true [c n]] d] e"),
        (f'{{ beside = "a", {NEW} }}', "[a n] [[b:bias=true c] d] e"),
        (f'{{ before = ["b", "d"], {NEW} }}', "a n [[b:bias=true c] d] e"),
        (f'{{ after = ["b", "d"], {NEW} }}', "a [[b:bias=true c] d] n e"),
        (f'{{ after = ["b", "c"], {NEW} }}', "a [[b:bias=true c n] d] e"),
        (f'{{ beside = ["d", "b"], {NEW} }}', "a [[[[b:bias=true c] d]] n] e"),
        (f'{{ beside = ["b", "e"], {NEW} }}', "a [[[[b:bias=true c] d] e] n] f"),
        ('{ after = "a", block = "e" }', "a e [[b:bias=true c] d] e f"),
        (f'{{ after = "a", ops = ["e", [{{ {NEW} }}, "e"]] }}', "a e [n e] [[b:bias=true c] d] e f"),
        (f'{{ beside = "d", ops = ["e", {{ {NEW} }}] }}', "a [[b:bias=true c] d [e n]] e f"),
        (f'{{ after = "a", {NEW} }}, {{ after = "a", block = "e" }}', "a n e [[b:bias=true c] d] e"),
        (f'{{ before = "a", {NEW} }}, {{ before = "a", block = "e" }}', "n e a [[b:bias=true c] d]"),
        (f'{{ beside = "d", {NEW} }}, {{ beside = "d", block = "e" }}', "a [[b:bias=true c] d n e] e f"),
        (f'{{ drop = "d" }}, {{ after = "d", ops = [[{{ {NEW} }}, "e"]] }}', "a [[b:bias=true c] [[n e]]] e f"),
        (f'{{ drop = "a" }}, {{ after = "a", {NEW} }}', "n [[b:bias=true c] d] e"),
        (f'{{ drop = "a" }}, {{ {NEW} }}, "e"', "f pointwise n e"),  # without a place: at the end
        (f"{{ {NEW} }}", "n"),  # a list without changes replaces the other one
    ],
)
def test_ops_are_merged_by_name(tmp_path: Path, changes: str, ops: str) -> None:
    found = f" {show(change_ops(tmp_path, changes))} "
    assert f" {ops} " in found if changes != f"{{ {NEW} }}" else found == f" {ops} "


def test_a_block_of_two_parents_up_and_the_ops_of_a_stack_are_changed(tmp_path: Path) -> None:
    change_ops(tmp_path, f'{{ after = "a", {NEW} }}')
    third = '[blocks]\nlayer = [{ change = "n", name = "m" }]\n' + stack(change='"layers"', ops='[{ drop = "last" }]')
    spec = load_spec(write(tmp_path, HEAD + 'extends = "child"\n' + third, "third"))
    assert show(spec.blocks["layer"]).startswith("a m [[")
    assert spec.stacks == [{"path": "layers", "ops": ["layer"]}]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ('{ drop = "dd" }', "block 'layer': 'base' has no op 'dd' there. Did you mean d?"),
        ('{ change = "pointwis", name = "x" }', "has no op 'pointwis' there. Did you mean pointwise?"),
        (f'{{ after = ["a", "q"], {NEW} }}', "has no op 'q' there."),
        ("{ drop = 5 }", "has no op 5 there."),
        ('{ drop = "f" }', "'base' has several ops 'f' there; say which: f#1, f#2"),
        ('{ change = "a" }', "block 'layer', change 'a': says nothing"),
        ('{ after = "a" }', "block 'layer', after 'a': says nothing"),
        ('{ drop = "a", when = "true" }', "drop 'a': takes no other keys"),
        ('{ change = "a", after = "d", name = "x" }', "change 'a': change and after exclude each other"),
        ('{ drop = "a" }, { change = "a", name = "x" }', "op 'a': change and drop exclude each other"),
        ('{ after = "a", ops = ["e"], when = "true" }', "after 'a': ops must be a list, without other keys"),
        ('{ after = "a", ops = "e" }', "after 'a': ops must be a list, without other keys"),
        (f'{{ after = ["a", "b", "d"], {NEW} }}', "name one op, or the first and the last of several"),
        (f"{{ after = [], {NEW} }}", "name one op, or the first and the last of several"),
        ('{ change = "a", dimm = "4" }', "op 'a': unknown key 'dimm'. Did you mean dim"),
    ],
)
def test_bad_changes_of_ops(tmp_path: Path, changes: str, words: str) -> None:
    with pytest.raises(SpecError) as caught:
        change_ops(tmp_path, changes)
    assert words in str(caught.value)
    assert "child.toml" in str(caught.value)


def test_changes_of_ops_need_a_block_to_change(tmp_path: Path) -> None:
    with pytest.raises(
        SpecError, match=r"block 'layr' changes ops, but 'base' has no block of that name\. Did you mean layer"
    ):
        change_ops(tmp_path, '{ drop = "a" }', block="layr")
    with pytest.raises(SpecError, match="block 'layer' changes ops of another spec, but the file extends none"):
        load_spec(write(tmp_path, HEAD + '[blocks]\nlayer = [{ drop = "a" }]\n' + stack(path='"x"', ops="[]"), "alone"))


def list_ops(items: object) -> Iterator[dict[str, Any]]:
    """The ops that a list writes itself, without the keys that place them."""
    if isinstance(items, list):
        for item in items:
            yield from list_ops(item)
    elif isinstance(items, dict) and "ops" in items:
        yield from list_ops(items["ops"])
    elif isinstance(items, dict) and "op" in items:
        yield {key: value for key, value in items.items() if key not in ("after", "before", "beside")}


def count_copies(own: dict[str, Any], parent: dict[str, Any]) -> int:
    """Ops of blocks and stacks that change the parent's, and that the parent says too; one without sizes is no copy."""
    blocks, stacks = parent.get("blocks", {}), parent.get("stack", [])
    theirs = [*list_ops(list(blocks.values())), *list_ops(stacks)]
    written = list(list_ops([items for name, items in own.get("blocks", {}).items() if name in blocks]))
    copies = sum(op in theirs for op in written if len(op) > 1)
    for changed in own.get("stack", []):
        same = [stack for stack in stacks if changed.get("change", "") in (stack.get("name"), stack.get("path"))]
        known = list(list_ops([stack.get("ops", []) for stack in same]))
        copies += sum(op in known for op in list_ops(changed.get("ops", [])))
    return copies


def test_specs_copy_few_ops_of_their_parents() -> None:
    """A block that overrides another says what differs; a whole list is for blocks where nearly everything does."""
    copies = {}
    for folder in ("specs", "aliases"):
        for name, path in list_data_files(folder).items():
            tables = load_toml(path)
            if "extends" in tables:
                base = find_data_file("specs", tables["extends"]) or find_data_file("aliases", tables["extends"])
                assert base is not None
                own = tables if folder == "specs" else tables.get("spec", {})
                copies[f"{folder}/{name}"] = count_copies(own, _load(base, ()))  # with the names of sums
    assert sum(copies.values()) <= 115, sorted(copies.items(), key=lambda item: -item[1])[:10]


def test_copies_are_counted() -> None:
    a, b, c = ({"op": "norm", "name": name, "dim": "4"} for name in "abc")
    parent = {"blocks": {"x": [a, [b]], "y": [c]}, "stack": [{"path": "p", "ops": [a]}]}
    assert count_copies({"blocks": {"x": [a, c, {**a, "dim": "5"}], "z": [a]}}, parent) == 2
    assert (
        count_copies({"blocks": {"x": [{"after": "a", **b}, {"beside": "a", "ops": [c]}, {"drop": "a"}]}}, parent) == 2
    )
    assert count_copies({"stack": [{"change": "p", "ops": [a, b]}, {"path": "q", "ops": [a]}]}, parent) == 1


# --- sums -------------------------------------------------------------------------------------------------------------
def make_ops(folder: Path, text: str, config: dict[str, Any] | None = None) -> list[Op]:
    (stage,) = bind({"model_type": "mine", **(config or {})}, spec=write(folder, HEAD + text, "mine")).stages
    return list(iterate(stage.layers[0]))


SUMS = """
[sums]
whole = "(n + c) // rate"
all   = "sequence: n + whole ** 2"
[[stack]]
path = "layers"
rows = "all"
ops = [
  { op = "linear", name = "a", in = "2", out = "2" },
  { op = "linear", name = "b", in = "2", out = "2", rows = "sequence: 2 * whole", needed = "all" },
  { op = "linear", name = "c", in = "2", out = "2", rows = "tokens" },
]
"""


def test_sums_are_written_out(tmp_path: Path) -> None:
    found = [op.rows for op in make_ops(tmp_path, SUMS, {"rate": 3})]
    everything = Expression("sequence", "n + ((n + c) // rate) ** 2", (("rate", 3),))
    assert found == [
        everything,
        Either(everything, Expression("sequence", "2 * ((n + c) // rate)", (("rate", 3),))),
        Tokens(),
    ]


def test_sums_are_inherited_and_changed_by_name(tmp_path: Path) -> None:
    write(tmp_path, HEAD + SUMS, "base")
    child = HEAD + 'extends = "base"\n[sums]\nwhole = "n // rate"\n'
    spec = load_spec(write(tmp_path, child, "child"))
    assert spec.stacks[0]["rows"] == "sequence: n + (n // rate) ** 2"


@pytest.mark.parametrize(
    ("sums", "rows", "words"),
    [
        ("x = 'n * '", "tokens", "[sums] x: not an expression"),
        ("x = 5", "tokens", "[sums] x must be an expression"),
        ("x = 'sequense: n'", "tokens", "[sums] x: no unit 'sequense'. Did you mean sequence?"),
        ("n = '5'", "tokens", "[sums] n is the name of a dim, or of a number of the workload"),
        ("d = 'n'", "tokens", "[sums] d is the name of a dim, or of a number of the workload"),
        ("x = 'y'\ny = 'x + n'", "sequence: x", "a name leads back to itself in 'sequence: x'"),
        ("x = 'n'", "x", "rows 'x' unknown."),  # a term needs a unit
        ("whole = 'sequence: n'", "whoel", "rows 'whoel' unknown. Did you mean whole?"),
    ],
)
def test_bad_sums(tmp_path: Path, sums: str, rows: str, words: str) -> None:
    text = f"{HEAD}[dims]\nd = '3'\n[sums]\n{sums}\n[[stack]]\npath = 'x'\nrows = '{rows}'\nops = []\n"
    with pytest.raises(SpecError) as caught:
        load_spec(write(tmp_path, text, "mine"))
    assert words in str(caught.value)


# --- the usual part of a block ----------------------------------------------------------------------------------------
LINEAR = '{ op = "linear", name = "x", in = "2", out = "2" }'


@pytest.mark.parametrize(
    ("blocks", "stack_part", "part"),
    [
        (f"layer = [{LINEAR}]", "", "other"),
        (f'layer = ["attention"]\nattention = [{LINEAR}]', "", "attention_projections"),
        (f'layer = [["self_attention"]]\nself_attention = [{LINEAR}]', "", "attention_projections"),
        (f'layer = ["gated_mlp"]\ngated_mlp = [{LINEAR}]', "", "mlp"),
        (f'layer = ["attention"]\nattention = ["queries"]\nqueries = [{LINEAR}]', "", "attention_projections"),
        (f'layer = ["attention"]\nattention = ["mlp"]\nmlp = [{LINEAR}]', "", "mlp"),
        (f'layer = [{{ block = "mlp", when = "true" }}]\nmlp = [{LINEAR}]', "", "mlp"),
        (f'layer = ["mlp"]\nmlp = [{LINEAR[:-2]}, part = "router" }}]', "", "router"),
        (f'layer = ["mlp"]\nmlp = [{LINEAR}]', "vision", "vision"),
        ('layer = ["mlp"]\nmlp = [{ op = "norm", name = "x", dim = "2" }]', "", "other"),
        ('layer = ["mlp"]\nmlp = [{ op = "product", name = "x", flops = "2" }]', "", "other"),
    ],
)
def test_a_block_has_a_usual_part(tmp_path: Path, blocks: str, stack_part: str, part: str) -> None:
    own = f'part = "{stack_part}"\n' if stack_part else ""
    text = f'[blocks]\n{blocks}\n[[stack]]\npath = "layers"\n{own}ops = ["layer"]\n'
    assert [op.part for op in make_ops(tmp_path, text)] == [part]


# --- the folder of parts ----------------------------------------------------------------------------------------------
def test_parts_are_found_by_name_and_are_no_models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = find_data_file("specs", "pixtral")
    assert path is not None
    assert Path(path).parent.name == "parts"
    monkeypatch.setenv("FLOPCALC_DATA", str(tmp_path))
    (tmp_path / "specs" / "parts").mkdir(parents=True)
    write(tmp_path / "specs" / "parts", BASE, "mine_tower")
    write(tmp_path / "specs", HEAD + 'extends = "mine_tower"\ntower = false\n', "mine")
    assert list_data_files("specs")["mine_tower"] == str(tmp_path / "specs" / "parts" / "mine_tower.toml")
    tower, model = find_spec("mine_tower"), find_spec("mine")
    assert tower is not None
    assert model is not None
    assert (tower.is_tower, model.is_tower) == (True, False)
    with pytest.raises(ConfigError, match="is a part of other models"):
        bind({"model_type": "mine_tower"})


def test_every_shipped_tower_lies_there() -> None:
    for path in list_data_files("specs").values():
        assert load_spec(path).is_tower == (Path(path).parent.name in ("parts", "diffusers"))


# --- values that no expression computes -------------------------------------------------------------------------------
@pytest.mark.heavy
def test_no_spec_says_again_what_its_parent_says() -> None:
    """A spec that extends another says only what differs."""
    again = []
    for name, path in list_data_files("specs").items():
        own = load_toml(path)
        if "extends" not in own:
            continue
        base = find_data_file("specs", own["extends"]) or find_data_file("aliases", own["extends"])
        assert base is not None
        parent = load_tables(base)
        again += [f"{name}: stack {stack}" for stack in own.get("stack", []) if stack in parent["stack"]]
        again += [
            f"{name}: [{key}] {entry}"
            for key in ("dims", "defaults", "blocks", "checks", "sums", "heads")
            for entry, value in own.get(key, {}).items()
            if parent.get(key, {}).get(entry) == value
        ]
    assert again == []


def test_tables_of_ngrams_have_prime_sizes(tmp_path: Path) -> None:
    text = "[[stack]]\npath = 'x'\nops = [{ op = 'embed', count = 'ngram_table_rows[1]', dim = '1' }]\n"
    config = {"ngram_size": 3, "heads_per_ngram": 1, "ngram_vocab_size_base": 10, "ple_layer_ids": [1, 4, 4]}
    (op,) = make_ops(tmp_path, text, config)
    assert op.n_in == 17 + 19  # the first table has 11 and 13
    with pytest.raises(ConfigError, match="ngram_vocab_size_base"):
        make_ops(tmp_path, text, {**config, "ngram_vocab_size_base": 0})
