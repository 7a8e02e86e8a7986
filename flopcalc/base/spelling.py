"""How a message names a field of the setup: as a Python keyword, or as the door that was used spells it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

# Fields whose Python keyword has another name than the option; all others are spelled alike.
KEYWORDS = {
    "batch": "batch_size", "seq": "seq_len", "decoder_seq": "decoder_seq_len", "image": "images",
    "image_grid": "image_grid_thw", "video": "videos", "video_grid": "video_grid_thw", "from": "from_",
    "compile": "compiled", "step_time": "step_time_s", "real_batch": "batch",
}  # fmt: skip
_FIELDS = {keyword: field for field, keyword in KEYWORDS.items()}
LISTS = ("image", "video", "image_grid", "video_grid", "audio")  # in Python, of the whole batch


def find_field(keyword: str, value: object = None) -> str:
    """The field of a Python keyword: seq_len -> seq. An option's own name is taken too; batch may hold tensors."""
    if keyword == "batch" and isinstance(value, (int, str)):
        return keyword
    return _FIELDS.get(keyword, keyword)


Speller = Callable[[str, str], str]


def spell_keyword(field: str, value: str) -> str:
    """('seq', 'N') -> 'seq_len=N', ('image', '640x480') -> 'images=["640x480"]', ('trace', 'True') -> 'trace=True'."""
    name = KEYWORDS.get(field, field)
    if not value:
        return name
    # A number, a word for one, or a flag.
    is_plain = value.isdigit() or (value.isupper() and not value[0].isdigit()) or value == "True"
    value = f"({value})" if field.endswith("_grid") else value
    shown = value if is_plain else f'"{value}"'
    return f"{name}=[{shown}]" if field in LISTS else f"{name}={shown}"


def spell_option(field: str, value: str) -> str:
    """('seq', 'N') -> '--seq N', ('trace', 'True') -> '--trace'."""
    return f"--{field.replace('_', '-')} {value.removesuffix('True')}".rstrip()


_speller: ContextVar[Speller] = ContextVar("speller", default=spell_keyword)


def spell(field: str, value: object = "") -> str:
    """A field by its option's name, with a value where one is suggested, as the reader would write it."""
    return _speller.get()(field, str(value))


@contextmanager
def use_spelling(speller: Speller) -> Iterator[None]:
    """Messages made inside name fields this way."""
    token = _speller.set(speller)
    try:
        yield
    finally:
        _speller.reset(token)
