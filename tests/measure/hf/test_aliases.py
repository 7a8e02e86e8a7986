"""Each alias against its witness: transformers' model of the mapped config, or a tiny module after published code."""

from __future__ import annotations

from copy import deepcopy
from decimal import Decimal
from functools import reduce
from operator import getitem
from typing import Any

import pytest
from tiers import mark_heavy

from flopcalc import bind
from flopcalc.base.data import list_data_files, load_toml
from flopcalc.core.model.bound import bind_model
from flopcalc.core.model.config import load_config
from flopcalc.core.spec.aliases import list_aliases, strip_marks

Json = dict[str, Any]
FILES = list_data_files("aliases")
TABLES = {name: load_toml(path) for name, path in FILES.items()}
CASES = [(name, i) for name, table in TABLES.items() for i in range(len(table.get("configs", ())))]
PUBLISHED = [(name, i) for name, table in TABLES.items() for i in range(len(table.get("published", ())))]
# Types that no model of transformers is like.
_ALONE = ("yuan", "chatglm4v", "qwen_vl", "eagle", "eagle3", "eagle3_speculator", "medusa", "dflash")
UNITS = {"M": 10**6, "B": 10**9, "T": 10**12}


def find_config(name: str, i: int, kind: str = "configs") -> Json:
    entry = TABLES[name][kind][i]
    config = deepcopy({"model_type": name, **(entry["config"] if kind == "published" else entry)})
    for path in entry.get("null_keys", ()):
        *outer, last = path.split(".")
        reduce(getitem, outer, config)[last] = None
    return config


def test_every_alias_has_a_witness() -> None:
    for name, alias in list_aliases().items():
        assert alias.witness in ("transformers", "module"), name
        assert alias.architectures or name == "intern_vit_6b", name
        assert TABLES[name].get("configs") or TABLES[name].get("example") or name == "intern_vit_6b", name


@pytest.mark.parametrize(("name", "i"), mark_heavy(PUBLISHED, [("internlm2", 0), ("chatglm", 0), ("qwen", 0)]))
def test_parameters_are_the_published(name: str, i: int) -> None:
    entry = TABLES[name]["published"][i]
    total = bind(find_config(name, i, "published")).parameters()["total"]
    digits = entry["parameters"].replace(",", "")
    unit = UNITS.get(digits[-1], 1)
    wanted = Decimal(digits.rstrip("MBT"))
    assert (Decimal(total) / unit).quantize(wanted) == wanted, total


@pytest.mark.parametrize(("name", "i"), mark_heavy(CASES, [("bailing_moe_v2", 0)]))
def test_mapped_config_builds_the_same_model(name: str, i: int) -> None:
    """The known family's spec equals transformers' model row by row, and the alias's own spec has the same sums."""
    from flopcalc.measure.hf.verify import verify

    config = load_config(find_config(name, i)).config
    known = {"pad_token_id": 0, **strip_marks(config)}
    if "dummy_heads" in str(known) or known.get("layer_group_size", 1) > 1 or name in _ALONE:
        pytest.skip("transformers has no such model: the test below has a witness of its own")
    workload: Json = {"batch": 2, "seq": 24, **TABLES[name].get("workload", {})}
    if not bind(known).needs_text:
        del workload["seq"]
    elif "images" in workload:
        known |= {"image_token_id": 95, "image_token_index": 95}
    verdict = verify(known, workload, {}, device="meta" if bind(known).parameters()["total"] > 10**7 else "cpu")
    assert verdict.is_equal, (verdict.different, verdict.parameters, verdict.not_counted)
    renamed, plain = (
        bind(each, convention="full")(2, workload.get("seq"), image_grid_thw=workload.get("images", []) * 2 or None)
        for each in (find_config(name, i), known)
    )
    assert renamed.by_component() == plain.by_component()


# The first config of these has full attention alone, which transformers' model shows.
_FIRST = [("bailing_hybrid", 0), ("bailing_moe_linear", 0)]
MODULES = [case for case in CASES if TABLES[case[0]]["witness"] == "module" and case not in _FIRST]


@pytest.mark.parametrize(("name", "i"), mark_heavy(MODULES, [("internlm2", 0)]))
def test_spec_equals_the_published_code(name: str, i: int) -> None:
    import torch
    from drafts import DRAFTS
    from foreign import ChatModel, Glm4v, QwenVL, make_decoder

    from flopcalc.measure.counters.flop_counter import count_flops
    from flopcalc.measure.hf.compare import compare_bound, make_executed
    from flopcalc.measure.hf.models import count_parameters

    source = load_config(find_config(name, i))
    seq = 150 if "layer_group_size" in source.config else 24
    ids = torch.zeros(2, seq, dtype=torch.long)
    workload: Json = {"batch": 2, "seq": seq}
    if "vision_config" in source.config:
        inner = source.config["text_config"]
        text = inner.get("_alias", inner["model_type"])
        model: Any = ChatModel(source.config, text, name == "NVLM_D")
        size = source.config["vision_config"]["image_size"]
        workload["images"] = [(1, 4, 4)]

        def step() -> None:
            model(ids, torch.ones(2, 3, size, size)).sum().backward()
    elif name in ("chatglm4v", "qwen_vl"):
        model = (Glm4v if name == "chatglm4v" else QwenVL)(source.config)
        workload["images"] = [(1, 4, 4)]

        def step() -> None:
            model.see(ids, torch.ones(2, 3, 28, 28)).sum().backward()
    elif name in DRAFTS:
        model = DRAFTS[name](source.config)

        def step() -> None:
            model(ids).sum().backward()
    else:
        model = make_decoder(name, source.config)

        def step() -> None:
            model(model.embed(ids)).sum().backward()

    counted = count_flops(model, step)
    total, trainable = count_parameters(model)
    traced = {"rows": counted.rows, "total": total, "trainable": trainable, "not_counted": counted.not_counted}
    verdict = compare_bound(make_executed(bind_model(source), {}), workload, traced)
    assert verdict.is_equal, (verdict.different, verdict.parameters, verdict.not_counted)
    names = {name: parameter.numel() for name, parameter in model.named_parameters()}
    assert set(names) == set(list_names(bind_model(source)))


def list_names(model: Any) -> list[str]:
    """The parameters of a bound model, by name."""
    from flopcalc.core.model.ops import list_parameters

    return list(list_parameters(model.stages))
