"""Spec files: the shipped ones load and bind, and every way to write one wrongly is an error that names it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from flopcalc import ConfigError, SpecError, bind
from flopcalc.base.data import find_data_file, find_user_dir, list_data_files
from flopcalc.core.model.expand import expand
from flopcalc.core.spec.spec import bind as bind_spec
from flopcalc.core.spec.spec import find_spec, load_spec

FAMILIES = (
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "gpt2", "gpt_neox", "mixtral", "qwen3_moe",
    "deepseek_v3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava",
)  # fmt: skip
HEAD = 'architecture = "A"\nsource = "S"\n'
STACK = '[[stack]]\npath = "model.layers"\n'
MINIMAL = HEAD + STACK + 'ops = [{ op = "linear", name = "up", in = "width", out = "2 * width" }]\n'


def write(folder: Path, text: str, name: str = "mine") -> Path:
    path = folder / f"{name}.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_sixteen_families_are_there() -> None:
    assert set(FAMILIES) <= set(list_data_files("specs"))


@pytest.mark.parametrize("name", list_data_files("specs"))
def test_every_shipped_spec_loads_and_says_where_it_was_read(name: str) -> None:
    spec = find_spec(name)
    assert spec is not None
    assert spec.name == name
    assert re.match(r"(transformers |timm |diffusers |[\w.-]+/[\w.-]+: )", spec.source)
    assert spec.stacks


def test_minimal_spec_counts(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL)
    estimate = bind({"model_type": "mine", "width": 3}, spec=path)(2, 5)
    assert estimate.forward == 2 * 3 * 6 * 10
    assert estimate.backward == 2 * 3 * 6 * 10  # the first product owes no input gradient
    assert estimate.parameters == {"total": 18, "active": 18, "trainable": 18}


def test_a_changed_spec_is_read_again(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL)
    assert bind({"model_type": "mine", "width": 3}, spec=path).parameters()["total"] == 18
    write(tmp_path, MINIMAL.replace("2 * width", "3 * width"))
    assert bind({"model_type": "mine", "width": 3}, spec=path).parameters()["total"] == 27


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "needs architecture"),
        ("architecture = 5\nsource = 's'", "needs architecture"),
        (HEAD, "at least one [[stack]]"),
        ("architecture = [", "not valid TOML"),
        (HEAD + "famly = 'x'\n" + STACK, "unknown key 'famly'. Did you mean family?"),
        (MINIMAL + "rowz = 'tokens'\n", "unknown key 'rowz'. Did you mean rows?"),
        (MINIMAL + "rows = 'token'\n", "rows 'token' unknown. Did you mean tokens?"),
        (MINIMAL + "part = 'lmhead'\n", "part 'lmhead' unknown. Did you mean lm_head, head?"),
        (HEAD + STACK + "ops = [{ op = 'liner', in = '1', out = '1' }]", "unknown op 'liner'. Did you mean linear?"),
        (HEAD + STACK + "ops = [{ op = ['linear'] }]", "unknown op"),
        (HEAD + STACK + "ops = [{ name = 'x' }]", "unknown op None"),
        (HEAD + STACK + "ops = [{ op = 'linear', inn = '1', out = '1' }]", "unknown key 'inn'. Did you mean in"),
        (HEAD + STACK + "ops = [{ op = 'linear', in = [1], out = '1' }]", "in must be a str or int"),
        (HEAD + STACK + "ops = [{ op = 'linear', in = true, out = '1' }]", "in must be a str or int"),
        (HEAD + STACK + "ops = [{ op = 'linear', in = '1', out = '1', bias = 1 }]", "bias must be a str"),
        (HEAD + STACK + "ops = [{ op = 'linear', in = '1', out = '1', tied = 'x' }]", "tied must be a list"),
        (HEAD + STACK + "ops = [{ op = 'linear', in = '1', out = '1', tied = ['x'] }]", "tied must be two strings"),
        (HEAD + STACK + "ops = [{ op = 'linear', in = '1', out = '1', part = 'mpl' }]", "Did you mean mlp?"),
        (HEAD + STACK + "ops = [{ op = 'attend', heads = '1', qk = '1', v = '1', span = 'sec' }]", "Did you mean seq?"),
        (HEAD + STACK + "ops = [{ op = 'attend', heads = '1', qk = '1', v = '1', mask = 'casual' }]", "mean causal?"),
        (HEAD + STACK + "ops = [{ op = 'linear', in = 'width +', out = '1' }]", "not an expression: 'width +'"),
        (HEAD + STACK + "ops = [{ op = 'linear', in = '__import__(\"os\")', out = '1' }]", "unknown function"),
        (HEAD + STACK + "ops = [{ op = 'linear', in = 'width.__class__()', out = '1' }]", "unknown function"),
        (HEAD + STACK + "ops = 'x'", "ops must be a list"),
        (HEAD + STACK + "ops = ['atention']\n[blocks]\nattention = []", "no block 'atention'. Did you mean attention?"),
        (HEAD + STACK + "ops = [5]", "neither an op, a list of ops nor a block's name"),
        (HEAD + STACK + "ops = ['a']\n[blocks]\na = ['b']\nb = [['a']]", "leads back to itself"),
        (HEAD + "[[stack]]\nops = []", "needs a path"),
        (HEAD + "[[stack]]\nuse = 'llama'", 'needs config = "…"'),
        (HEAD + "[[stack]]\npath = 5", "path must be a str"),
        (HEAD + STACK + "repeat = 'exec(1)'", "unknown function"),
        (HEAD + STACK + "reads = ['x']", "reads must be two strings"),
        (HEAD + STACK + "rename = { a = 1 }", "rename must map names to strings"),
        (HEAD + STACK + "joins = [1]", "joins must be a list of streams"),
        (HEAD + "[stack]\npath = 'x'", "[[stack]]"),
        (HEAD + "stack = 5", "[[stack]]"),
        (HEAD + "dims = 5\n" + STACK, "[dims] must be a table"),
        (HEAD + "required = 5\n" + STACK, "required must be a list"),
        (HEAD + STACK + "[dims]\nd = []", "dim 'd' must be an expression"),
        (HEAD + STACK + "[dims]\nd = 1.5", "dim 'd' must be an expression"),
        (HEAD + STACK + "[dims]\nd = 'lambda: 1'", "dim 'd': Lambda not allowed"),
        (HEAD + STACK + "[checks]\nwords = 7", "[checks] 'words' must be an expression, not 7"),
        (HEAD + STACK + "[config_checks]\nwords = [1]", "[config_checks] 'words' must be an expression, not [1]"),
        (HEAD + STACK + "[checks]\nwords = '1 +'", "[checks] 'words'"),
        (HEAD + STACK + "ops = [{ block = ['a'] }]\n[blocks]\na = []", "block must be a str, not ['a']"),
        (HEAD + STACK + "ops = [{ block = 'a', when = 5 }]\n[blocks]\na = []", "when must be a str, not 5"),
        (HEAD + STACK + "[heads]\ntoken = { set = 5 }", "set must be a dict, not 5"),
        (HEAD + STACK + "[heads]\ntoken = { stack = 5 }", "[heads] token: stack must be a list of tables"),
        (HEAD + STACK + "[heads]\ntoken = { use = ['x'] }", "use must be a str"),
        (HEAD + STACK + "[renamed]\nd = 'x'", "[renamed] d must be a list"),
        (HEAD + STACK + "[vision]\npatch = 'p'", "[vision] needs kind = 'grid' or 'fixed'"),
        (HEAD + STACK + "[vision]\nkind = 'grid'\npatch = 5", "patch must be a str"),
        (HEAD + STACK + "[vision]\nkind = 'grid'\npach = 'p'", "Did you mean patch?"),
        (HEAD + STACK + "[positions]\nkind = 'absolute'", "[positions] needs kind"),
        (HEAD + "extends = 'mine'\n" + STACK, "leads back to it"),
        (HEAD + "extends = 'lama'\n" + STACK, "extends 'lama', which is no spec"),
        (HEAD + "extends = 5\n" + STACK, "which is no spec"),
    ],
)
def test_bad_spec(tmp_path: Path, text: str, words: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(SpecError) as caught:
        load_spec(str(path))
    assert str(path) in str(caught.value)
    assert words in str(caught.value)


def test_cyclic_extends_through_another_file(tmp_path: Path) -> None:
    write(tmp_path, "extends = 'mine'\n", "other")
    path = write(tmp_path, "extends = 'other'\n")
    with pytest.raises(SpecError, match="leads back"):
        load_spec(str(path))


def test_unreadable_and_huge_specs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SpecError, match="cannot be read: No such file"):
        load_spec(str(tmp_path / "absent.toml"))
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(SpecError, match="not UTF-8 text"):
        load_spec(str(tmp_path / "bytes.toml"))
    monkeypatch.setattr("flopcalc.base.data.MAX_TOML_BYTES", 20)
    with pytest.raises(SpecError, match="larger than 20 bytes"):
        load_spec(str(write(tmp_path, MINIMAL, "large")))


BOUND: list[tuple[str, dict[str, Any], str]] = [
    (MINIMAL, {}, "missing key 'width'"),
    (MINIMAL, {"width": "3"}, "up in = width must be a whole number, not '3'"),
    (MINIMAL, {"width": 0}, "is 0, which is not a size"),
    (HEAD + STACK + "ops = [{ op = 'linear', in = '1' }]", {}, "needs 'out'"),
    (HEAD + STACK + "ops = [{ op = 'linear', in = 'i', out = '1' }]", {}, "'i' used outside a repeated stack"),
    (HEAD + STACK + "ops = [{ op = 'linear', in = 'a', out = '1' }]\n[dims]\na = 'b'\nb = 'a'", {}, "itself"),
    (HEAD + STACK + "repeat = 'n'\nops = []", {"n": 10_001}, "more than 10000 is surely a mistake"),
    (HEAD + STACK + "repeat = 'n'\nops = []", {"n": -1}, "is -1, which is not a size"),
    (HEAD + "[[stack]]\nuse = 'mine'\nconfig = 'text'\nflat = true", {}, "uses itself"),
    (HEAD + "[[stack]]\nuse = 'absent'\nconfig = 'text'", {"text": {}}, "'absent' has no spec"),
    (HEAD + "[[stack]]\nuse = 'llama'\nconfig = 'text'", {"text": []}, "'text' must be an object, not []"),
    (HEAD + STACK + "reads = ['model.x', '0']\nrepeat = '1'", {}, "reads layer 0 of 'model.x', which has 0"),
]


@pytest.mark.parametrize(("text", "config", "words"), BOUND)
def test_spec_that_cannot_be_bound(tmp_path: Path, text: str, config: dict[str, Any], words: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises((ConfigError, SpecError)) as caught:
        bind({"model_type": "mine", **config}, spec=path)
    assert words in str(caught.value)


def test_dims_that_square_each_other_stay_small(tmp_path: Path) -> None:
    dims = "[dims]\nd0 = '10'\n" + "".join(f"d{n + 1} = 'd{n} * d{n}'\n" for n in range(60))
    path = write(tmp_path, HEAD + STACK + "ops = [{ op = 'linear', in = 'd60', out = '1' }]\n" + dims)
    with pytest.raises(ConfigError, match="too large"):
        bind({"model_type": "mine"}, spec=path)


def test_extends_merges_tables_and_replaces_stacks(tmp_path: Path) -> None:
    write(tmp_path, MINIMAL + "[defaults]\nwidth = 3\n", "base")
    path = write(tmp_path, "extends = 'base'\narchitecture = 'B'\n[defaults]\ndepth = 2\n")
    spec = load_spec(str(path))
    assert spec.defaults == {"width": 3, "depth": 2}
    assert spec.architecture == "B"
    assert spec.source == "S"
    assert len(spec.stacks) == 1


def test_first_dim_whose_keys_are_present() -> None:
    spec = find_spec("llama")
    assert spec is not None
    base = {
        "hidden_size": 24,
        "num_attention_heads": 4,
        "vocab_size": 5,
        "num_hidden_layers": 1,
        "intermediate_size": 3,
    }
    dims = bind_spec(spec, base, "config")
    assert (dims.lookup("hd"), dims.lookup("kv"), dims.lookup("tied")) == (6, 4, False)
    dims = bind_spec(spec, {**base, "head_dim": 8, "num_key_value_heads": None, "tie_word_embeddings": True}, "config")
    assert (dims.lookup("hd"), dims.lookup("kv"), dims.lookup("tied")) == (8, 4, True)
    assert len(expand(dims)) == 4


def test_user_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOPCALC_DATA", str(tmp_path))
    (tmp_path / "specs").mkdir()
    write(tmp_path / "specs", MINIMAL)
    assert find_user_dir() == str(tmp_path)
    assert "mine" in list_data_files("specs")
    assert bind({"model_type": "mine", "width": 3})(1, 1).forward == 36
    monkeypatch.setenv("FLOPCALC_DATA", "")
    monkeypatch.setenv("XDG_DATA_HOME", "/x")
    assert find_user_dir() == "/x/flopcalc"


@pytest.mark.parametrize("name", ["", "..", "../specs/llama", "a/b", "a\\b", "llama\0", ".hidden"])
def test_a_name_never_leaves_its_folder(name: str) -> None:
    assert find_data_file("specs", name) is None


def test_spec_for_another_model_type_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL)
    with pytest.raises(ConfigError, match="describes model_type 'mine'"):
        bind("sweep-tiny", spec=path)


def test_added_spec_inside_another_model(tmp_path: Path) -> None:
    (tmp_path / "my_llama.toml").write_text("extends = 'llama'\n")
    text = {"model_type": "llama", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 9}
    config = {"model_type": "llava", "vision_config": {"num_hidden_layers": 2}, "text_config": text}
    renamed = {**config, "text_config": {**text, "model_type": "my_llama"}}
    with pytest.raises(ConfigError, match="'my_llama' has no spec"):
        bind(renamed)
    added = bind(renamed, spec=tmp_path / "my_llama.toml")
    assert added(1, 7).total == bind(config)(1, 7).total


def test_what_a_config_gives_per_layer_must_be_read(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        HEAD
        + "[dims]\nw = \"override(per_layer_config, i, 'width', width)\"\n"
        + STACK
        + "repeat = '2'\nops = [{ op = 'linear', name = 'up', in = 'w', out = '2' }]\n",
    )
    config = {"model_type": "mine", "width": 3, "per_layer_config": {"01": {"width": 5}}}
    assert bind(config, spec=path).parameters()["total"] == 2 * (3 + 5)
    with pytest.raises(ConfigError, match="'depth', which this spec does not read"):
        bind({**config, "per_layer_config": {"1": {"depth": 5}}}, spec=path)
