"""What must not be written where others may read it: API keys, tokens and passwords. PURE.

A value is secret by its key's name. What is masked cannot be read back: whoever goes on with a run gives it
again.
"""

import re
from collections.abc import Mapping
from typing import Any

MASK = "***"
# A number per token is none.
_WORDS = r"api[-_]?key|access[-_]?key|secret|passw(?:or)?d|credentials?|(?<!per_)(?<!per-)token|authorization"
_NAME = rf"(?:[\w-]*[-_])?(?:{_WORDS})"
_SECRET_NAME = re.compile(rf"(?:.*[./])?(?:-*){_NAME}", re.IGNORECASE)
# `name=value`, `name: value`, `'name': 'value'`, `--name value`; a quoted value may hold blanks.
_IN_TEXT = re.compile(
    rf"""((?<![\w-])(?:--)?["']?{_NAME}["']?(?:\s*[=:]\s*|(?<=key)\s+))("[^"]*"|'[^']*'|(?!None\b|null\b)[^\s,;&)}}\]]+)""",
    re.IGNORECASE,
)
_IN_URL = re.compile(r"(?<=://)[^\s/@:]*:[^\s/@]+(?=@)")


def is_secret(name: str) -> bool:
    """Whether a key of this name, or of this dotted path, holds a secret."""
    return _SECRET_NAME.fullmatch(name) is not None


def masked(value: Any, name: str = "") -> Any:
    """The same mappings and lists with every secret text replaced; what is not text or not set stays."""
    if isinstance(value, Mapping):
        return {key: masked(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(masked(item, name) for item in value)
    if not isinstance(value, str):
        return MASK if is_secret(name) and isinstance(value, int) and not isinstance(value, bool) else value
    return MASK if value and is_secret(name) else _IN_URL.sub(MASK, value)


def masked_text(text: str) -> str:
    """A log line or a command line with its secrets replaced."""
    return _IN_URL.sub(MASK, _IN_TEXT.sub(lambda found: f"{found[1]}{MASK}", text))
