"""What a spec says of another's stacks, sums that are named once, the usual part of a block, the folder of parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flopcalc.api import bind
from flopcalc.core.model.ops import Op, iterate
from flopcalc.core.spec.merge import load_tables
from flopcalc.core.spec.spec import find_spec, load_spec
from flopcalc.core.workload.sums import Either, Expression, Tokens
from flopcalc.data import find_data_file, list_data_files, load_toml
from flopcalc.errors import ConfigError, SpecError

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
