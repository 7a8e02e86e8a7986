"""Regular expressions from outside under a time limit: those that could be slow are matched in a helper process."""

from __future__ import annotations

import re
import sys
from functools import lru_cache

from flopcalc.base.errors import FlopcalcError, format_value

LIMIT_S = 5.0  # for all names together
MAX_CHARACTERS = 1000
MAX_REPEATS = 2  # time grows with a name's length to this power, and less than a millisecond is fine
# Compiling sets without case takes long; of nested sets re warns, and a user of LoRA would not know what of.
_ODD = r"\(\?[a-zA-Z]*i|\[\[|--|&&|~~|\|\|"
_LETTERS = r"(?s)\\.|\[\^?\]?[^]]*\]|\(\?"  # what repeats nothing: escapes, sets, groups' openings
# Its process can be stopped; a thread that matches cannot, and it holds all others up.
_HELPER = """import json, re, sys
text, names = json.load(sys.stdin)
try:
    pattern = re.compile(text)
    print(json.dumps([name for name in names if pattern.fullmatch(name)]))
except (re.error, RecursionError, OverflowError) as error:
    print(json.dumps(str(error)))
"""


def is_costly(text: str, most_repeats: int = MAX_REPEATS) -> bool:
    """Whether a pattern repeats a group beside other repeats or choices, or has many repeats: time may grow freely."""
    plain = re.sub(_LETTERS, "", text)
    repeats = len(re.findall(r"[*+?{]", plain))
    repeats_group = re.search(r"\)[*+{]", plain) is not None and (repeats > 1 or "|" in plain)
    return len(text) > MAX_CHARACTERS or re.search(_ODD, text) is not None or repeats_group or repeats > most_repeats


@lru_cache(maxsize=32)
def find_matches(text: str, names: tuple[str, ...], what: str, error: type[FlopcalcError]) -> frozenset[str]:
    """Those of the names that a pattern matches from start to end; an error that names a pattern that is too slow."""
    import json
    import subprocess

    shown = f"{what} {format_value(text)}"
    if not is_costly(text):
        try:
            return frozenset(filter(re.compile(text).fullmatch, names))
        except (re.error, RecursionError, OverflowError) as problem:
            raise error(f"{shown} is no regular expression: {problem}") from None
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-W", "ignore", "-c", _HELPER],
            input=json.dumps([text, names]),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=True,
        )
    except subprocess.TimeoutExpired:
        raise error(
            f"{shown} takes more than {LIMIT_S:g} s to match this model's module names: write it with fewer repeats"
        ) from None
    except (OSError, TypeError, subprocess.SubprocessError) as problem:  # a browser has no processes
        raise error(
            f"{shown} could take very long to match, so a helper process would do it, and that failed "
            f"({type(problem).__name__}): write it with at most {MAX_REPEATS} repeats"
        ) from None
    found = json.loads(done.stdout)
    if isinstance(found, str):
        raise error(f"{shown} is no regular expression: {found}")
    return frozenset(found)
