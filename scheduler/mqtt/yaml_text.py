"""As much of YAML as the contract needs, so that writing it takes no further dependency."""

import json
import re
from typing import Any

_PLAIN_KEY = re.compile(r"[A-Za-z$][A-Za-z0-9_]*")
_WORDS = ("null", "true", "false", "yes", "no", "on", "off", "y", "n")
"""Plain keys that some reader takes for something else."""


def to_yaml(value: Any, indent: int = 0) -> str:
    """The part of YAML that this needs: mappings and lists in block form, everything else as JSON, which YAML takes."""
    pad = " " * indent
    match value:
        case dict() if value:
            lines = (f"{pad}{_key(key)}:{_behind(child, indent)}" for key, child in value.items())
        case list() if value:
            lines = (f"{pad}- {to_yaml(child, indent + 2).lstrip()}" for child in value)
        case _:
            return f"{pad}{json.dumps(value, ensure_ascii=False)}"
    return "\n".join(lines)


def _key(key: str) -> str:
    return key if _PLAIN_KEY.fullmatch(key) and key.lower() not in _WORDS else json.dumps(key)


def _behind(child: Any, indent: int) -> str:
    is_block = isinstance(child, dict | list) and len(child) > 0
    return f"\n{to_yaml(child, indent + 2)}" if is_block else f" {to_yaml(child)}"
