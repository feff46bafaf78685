"""The operator's commands, which need a store but no syncer: `log`, `export`, `verify`, `gc` and `tokens`."""

from skerry_syncer.store.maintenance.checking import verify
from skerry_syncer.store.maintenance.collecting import gc
from skerry_syncer.store.maintenance.reading import export, log
from skerry_syncer.store.maintenance.tokens import tokens

__all__ = ["export", "gc", "log", "tokens", "verify"]
