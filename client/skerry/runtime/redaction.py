"""Takes secrets out of text that people and logs get to see."""

from __future__ import annotations

import re
from typing import Final

# Up to the last @, because passwords hold characters that a URL must not have; after a colon, blanks and quotes too. A
# file's path has no user.
_USER: Final = re.compile(r"(?<=://)(?<!file://)(?:[^\s'\"/@]*:(?:(?!://)[^\n])*@|[^\s'\"]*@)")
_WORDS: Final = "key|secret|token|passw|signature|credential"
_SECRET: Final = re.compile(rf"(?i)([?&](?:[\w%.-]*(?:{_WORDS})[\w%.-]*|sig)=)[^&\s'\"]*")


def redacted(text: str) -> str:
    """Returns `text` with `***` for the user, the password and the secret query values of each URL in it."""
    return _SECRET.sub(r"\1***", _USER.sub("***@", text))
