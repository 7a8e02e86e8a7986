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
_ODD = re.compile(r"\(\?[a-zA-Z]*i|\[\[|--|&&|~~|\|\|")
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
    """Whether a pattern repeats a group with repeats or choices, or has many repeats: time may grow without bound."""
    if len(text) > MAX_CHARACTERS or _ODD.search(text):
        return True
    has_repeat = [False]  # of each open group
    repeats, at = 0, 0
    while at < len(text):
        letter = text[at]
        if letter == "\\":
            at += 1
        elif letter == "[":  # a set of letters; ] is its end unless it comes first
            at = max(text.find("]", at + (3 if text.startswith("^", at + 1) else 2)), at)
        elif letter == "(":
            has_repeat.append(False)
            at += text.startswith("?", at + 1)
        elif letter == ")" and len(has_repeat) > 1:
            inner = has_repeat.pop()
            if inner and text[at + 1 : at + 2] in ("*", "+", "{"):
                return True
            has_repeat[-1] |= inner
        elif letter in "*+?{|":
            repeats += letter != "|"
            has_repeat[-1] = True
        at += 1
    return repeats > most_repeats


@lru_cache(maxsize=32)
def find_matches(text: str, names: tuple[str, ...], what: str, error: type[FlopcalcError]) -> frozenset[str]:
    """Those of the names that a costly pattern matches from start to end; an error that names a pattern too slow."""
    import json
    import subprocess

    shown = f"{what} {format_value(text)}"
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-W", "ignore", "-c", _HELPER],
            input=json.dumps([text, names]), capture_output=True, text=True, timeout=LIMIT_S, check=True,
        )  # fmt: skip
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
