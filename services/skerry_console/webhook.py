"""Posts alerts to a web hook in the shape that Slack reads: each once when it is raised, and once when it is over."""

from __future__ import annotations

import json
import urllib.request
from typing import Final

from skerry.history.alerts import Alert
from skerry.runtime.logs import get_logger

_LOG: Final = get_logger(__name__)
_TIMEOUT_S: Final = 10.0


class Webhook:
    """Remembers which alerts of a run are posted."""

    def __init__(self, url: str, run: str) -> None:
        self._url = url
        self._run = run
        self._raised: dict[tuple[str, str], Alert] = {}

    def update(self, raised: list[Alert]) -> None:
        """Posts what is new and what is over.

        What could not be posted is tried again at the next call, and nothing after it before that: a hook that does not
        answer would keep the others waiting.
        """
        now = {alert.key: alert for alert in raised}
        for key, alert in now.items():
            if key not in self._raised:
                if not self._post(f"[{alert.severity}] {self._run}: {alert.summary}. {alert.action}"):
                    return
                self._raised[key] = alert
        for key in [key for key in self._raised if key not in now]:
            if not self._post(f"[resolved] {self._run}: {self._raised[key].summary}"):
                return
            del self._raised[key]

    def _post(self, text: str) -> bool:
        body = json.dumps({"text": text}).encode()
        request = urllib.request.Request(self._url, body, {"Content-Type": "application/json"})  # noqa: S310 -- the command takes http only
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S):  # noqa: S310 -- likewise
                return True
        except OSError as error:
            _LOG.warning("the web hook does not take an alert", cause=str(error))
            return False
