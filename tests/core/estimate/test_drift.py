"""Configs of other releases: every key of every example taken away, null or wrong binds, or is an error in words."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
from tiers import LIGHT_TYPES, mark_heavy

from flopcalc import FlopcalcError, bind
from flopcalc.base.data import list_data_files, load_toml

EXAMPLES = list_data_files("examples")


def load_configs(name: str) -> list[dict[str, Any]]:
    table = load_toml(EXAMPLES[name])
    named = {"architectures": [table["architecture"]]} if "architecture" in table else {}
    configs = []
    for config in table["configs"]:
        given = {key: value for key, value in config.items() if key != "null_keys"}
        configs.append({"model_type": name, **named, **given, **dict.fromkeys(config.get("null_keys", []))})
    return configs


def list_changes(config: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The config without each of its keys, and with each of them null or a word; one level of inner configs too."""
    for path in [(key,) for key in config] + [
        (key, inner) for key, value in config.items() if isinstance(value, dict) for inner in value
    ]:
        if path == ("model_type",):
            continue
        for change in ("removed", "null", "word"):
            changed = copy.deepcopy(config)
            table = changed
            for key in path[:-1]:
                table = table[key]
            if change == "removed":
                del table[path[-1]]
            else:
                table[path[-1]] = None if change == "null" else "seven"
            yield f"{'.'.join(path)} {change}", changed


def find_error(config: dict[str, Any]) -> str | None:
    """What bind says of a config that it refuses; None if it binds, with parameters in it."""
    try:
        assert bind(config).parameters()["total"] > 0
    except FlopcalcError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", mark_heavy(EXAMPLES, LIGHT_TYPES))
def test_a_changed_config_binds_or_says_why(name: str) -> None:
    for config in load_configs(name):
        assert find_error(config) is None
        for what, changed in list_changes(config):
            said = find_error(changed)
            assert said is None or len(said) > 20, what


@pytest.mark.parametrize("name", mark_heavy(EXAMPLES, LIGHT_TYPES))
def test_a_missing_required_key_is_named(name: str) -> None:
    for config in load_configs(name):
        for key in bind(config).spec.required:
            if key in config:
                said = find_error({other: value for other, value in config.items() if other != key})
                assert said is None or key in said  # None: under another release's name
