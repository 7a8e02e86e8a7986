"""Values that HF's code computes from a config and that no expression can: specs read them as keys of the config."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from flopcalc.base.errors import ConfigError, format_value

Lookup = Callable[[str], Any]
_MOST_PRIMES = 1000  # of tables of n-grams: each takes half a millisecond to find


def _read_whole(lookup: Lookup, key: str) -> int:
    """A key of the config that must be a whole number."""
    value = lookup(key)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{key} must be a whole number, not {format_value(value)}")
    return value


def _is_prime(number: int, primes: list[int]) -> bool:
    """Whether none of these divides it, up to its root."""
    for prime in primes:
        if prime * prime > number:
            return True
        if number % prime == 0:
            return False
    return True


def _list_primes(first: int, count: int) -> list[int]:
    """The first primes from a number on."""
    small: list[int] = []
    for number in range(2, math.isqrt(2 * first + 10**5) + 1):  # the next `count` primes are far below that square
        if _is_prime(number, small):
            small.append(number)
    primes: list[int] = []
    number = max(first, 2)
    while len(primes) < count:
        if _is_prime(number, small):
            primes.append(number)
        number += 1
    return primes


def _list_ngram_tables(lookup: Lookup) -> list[int]:
    """Rows of each layer's table of hashed n-grams: every head's are another prime, in the order of layers and heads.

    One entry more than there are layers, for the layers after the last table.
    """
    heads = (_read_whole(lookup, "ngram_size") - 1) * _read_whole(lookup, "heads_per_ngram")
    base, layers = _read_whole(lookup, "ngram_vocab_size_base"), lookup("ple_layer_ids")
    if not isinstance(layers, list) or not all(isinstance(layer, int) for layer in layers):
        raise ConfigError(f"ple_layer_ids must be a list of layers' numbers, not {format_value(layers)}")
    tables = len(set(layers))
    if not (0 < base <= 10**9 and 0 <= heads * (tables + 1) <= _MOST_PRIMES):
        raise ConfigError(
            f"ngram_vocab_size_base {format_value(base)} with {heads} heads and {tables} tables is no size"
        )
    primes = _list_primes(base, heads * (tables + 1))
    return [sum(primes[heads * i : heads * (i + 1)]) for i in range(tables + 1)]


def find_computed(name: str) -> Callable[[Lookup], Any] | None:
    """What computes the value of this name; None: nothing does."""
    if name == "ngram_table_rows":
        return _list_ngram_tables
    if not name.endswith("_blocks"):
        return None
    from flopcalc.core.spec.conv_blocks import CONVNETS  # lazily: few models are networks of such blocks
    from flopcalc.core.spec.diffusers_blocks import NETWORKS

    return {**NETWORKS, **CONVNETS}.get(name)
