"""The operator's commands, which need a store but no syncer: `log`, `export`, `verify`, `repair`, `gc` and `tokens`."""

from skerry.store.operator.checking import repair, verify
from skerry.store.operator.collecting import gc
from skerry.store.operator.reading import export, log
from skerry.store.operator.tokens import tokens

__all__ = ["export", "gc", "log", "repair", "tokens", "verify"]
