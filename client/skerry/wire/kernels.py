"""Whether the compiled kernels are used: where numba can be imported, on arrays that are worth it.

NumPy is the reference and does the same everywhere else, bit for bit. Importing numba takes half a second and about
60 MB, so a process that only ever handles small frames does without.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from numpy.typing import NDArray

if TYPE_CHECKING:
    from types import ModuleType

_WORTH_LOADING: Final = 2**16
"""Elements of the first frame for which the kernels are loaded. Once loaded, they take frames of any size."""


def kernels_for(*arrays: NDArray[Any]) -> ModuleType | None:
    """Return `skerry.wire.kernels_numba`, or None where NumPy is to do it; the arrays have one length.

    The first call for a large array loads the kernels, in seconds if no process of this machine has compiled them yet.
    """
    if not load.cache_info().currsize and len(arrays[0]) < _WORTH_LOADING:
        return None
    return load() if all(array.flags.aligned for array in arrays) else None


@cache
def load() -> ModuleType | None:
    """Return the kernels, compiled or loaded; None without numba.

    For a worker thread: the call takes between half a second and ten, once a process.
    """
    try:
        from skerry.wire import kernels_numba
    except ImportError:
        return None
    except Exception as error:  # noqa: BLE001 - whatever a compiler may raise, NumPy does without it
        warnings.warn(f"kernels can't be compiled; NumPy, a few times slower, does their work. {error!r}", stacklevel=2)
        return None
    return kernels_numba


def warm_up(numel: int) -> None:
    """Load the kernels ahead of the first frame, if a fragment of `numel` elements has large ones; for a worker."""
    if numel >= _WORTH_LOADING:
        load()
