"""The operator's commands, which need a store but no syncer: `skerry log`, `export`, `verify`, `repair` and `gc`."""

from skerry.store.operator.checking import repair, verify
from skerry.store.operator.collecting import gc
from skerry.store.operator.reading import export, log

__all__ = ["export", "gc", "log", "repair", "verify"]
