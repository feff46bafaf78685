"""The operator's commands, which need a store but no syncer: `log`, `export`, `verify` and `gc`."""

from skerry_syncer.store.maintenance.checking import verify
from skerry_syncer.store.maintenance.collecting import gc
from skerry_syncer.store.maintenance.reading import export, log

__all__ = ["export", "gc", "log", "verify"]
