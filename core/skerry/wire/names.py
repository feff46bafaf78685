"""Checks names and ids. They become paths in the store, so they are checked before anything else."""

from __future__ import annotations

import re
from typing import Final

_NAME: Final = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,62}[a-z0-9])?")
_ID: Final = re.compile(r"[0-9a-f]{32}")
MAX_TENSOR_NAME_BYTES: Final = 512


class BadNameError(ValueError):
    """A name or id that does not match its pattern; reason `BAD_NAME`."""


def check_name(name: str, what: str) -> str:
    """Returns `name` if it is a legal name of a `what` (run, fragment, learner, region).

    Raises:
        BadNameError: it is not; nothing was done.
    """
    if _NAME.fullmatch(name) is None or ".." in name:
        raise BadNameError(
            f"{what} name is not legal: use 1 to 64 of a-z 0-9 . _ -, starting and ending with a letter or digit, "
            f"no '..'. name={name[:80]!r}"
        )
    return name


def check_id(value: str, what: str) -> str:
    """Returns `value` if it is 32 lower-case hexadecimal digits.

    Raises:
        BadNameError: it is not; nothing was done.
    """
    if _ID.fullmatch(value) is None:
        raise BadNameError(f"{what} is not legal: use 32 lower-case hexadecimal digits. value={value[:80]!r}")
    return value
