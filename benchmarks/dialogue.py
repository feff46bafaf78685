"""A child's side of the dialogue with the benchmark that started it: lines of JSON. It imports no packages."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from typing import Any


class Dialogue:
    """Commands on standard input and answers on standard output; what libraries print goes to the log."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def answer(self, **values: Any) -> None:
        """Answers."""
        self._answers.write(json.dumps(values) + "\n")
        self._answers.flush()

    def commands(self) -> Iterator[dict[str, Any]]:
        """Yields what is told, until the input ends."""
        for line in sys.stdin:
            yield json.loads(line)
