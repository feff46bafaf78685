"""Objects beside which something else happens at the worst moment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from tests.support.dict_objects import DictObjects
from tests.support.proxy_objects import ProxyObjects, Result

Hook: TypeAlias = Callable[[], Awaitable[object]]


class HookedObjects(ProxyObjects):
    """Awaits hooks, which may take long or fail, around operations on objects whose names have a text in them."""

    def __init__(self, inner: DictObjects | None = None) -> None:
        inner = inner or DictObjects(unix=lambda: self.now_s)
        self.now_s = 0.0  # by the store's own clock, if it has no other
        super().__init__(inner)
        self.objects = inner.objects
        self.hooks: dict[tuple[str, str], Hook] = {}  # by moment, such as "before write", and text
        self.calls: Counter[tuple[str, str]] = Counter()

    async def call(self, operation: str, name: str, act: Callable[[], Awaitable[Result]]) -> Result:
        """Does the operation between its hooks."""
        await self._happen(f"before {operation}", name)
        result = await act()
        await self._happen(f"after {operation}", name)
        return result

    async def _happen(self, moment: str, name: str) -> None:
        for key, hook in [*self.hooks.items()]:
            if key[0] == moment and key[1] in name:
                self.calls[key] += 1
                await hook()
