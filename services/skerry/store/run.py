"""What never changes of a run: its tensors and fragment plan (`run.json`), and the names of its objects."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from skerry.store.log.entries import FORMAT, canonical_json, check_format
from skerry.wire.layout import FragmentLayout, TensorSpec


def run_prefix(name: str, uid: str) -> str:
    """Returns the folder of a run."""
    return f"runs/{name}/{uid}"


def entry_name(prefix: str, position: int) -> str:
    """Returns the object name of the log entry at `position`, or for position 0 of `run.json`."""
    return f"{prefix}/log/{position:020}" if position else f"{prefix}/run.json"


@dataclass(frozen=True)
class RunSpec:
    """A run as it was created."""

    name: str
    uid: str
    fragments: tuple[FragmentLayout, ...]
    dtypes: Mapping[str, str]  # the learner's own element type, by tensor name
    created_at_unix_s: float  # the creating replica's clock; for people only

    def fragment(self, name: str) -> FragmentLayout:
        """Returns the layout of the fragment called `name`.

        Raises:
            KeyError: there is none.
        """
        for layout in self.fragments:
            if layout.name == name:
                return layout
        raise KeyError(name)

    def to_bytes(self) -> bytes:
        """Returns `run.json`."""
        return canonical_json(
            {
                "format": FORMAT,
                "name": self.name,
                "uid": self.uid,
                "created_at_unix_s": self.created_at_unix_s,
                "fragments": [
                    {
                        "name": layout.name,
                        "tensors": [
                            {"name": t.name, "shape": list(t.shape), "dtype": self.dtypes[t.name]}
                            for t in layout.tensors
                        ],
                    }
                    for layout in self.fragments
                ],
            }
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> RunSpec:
        """Returns the spec that `to_bytes` gave.

        Raises:
            ValueError, KeyError, TypeError: not a `run.json` that this version reads.
        """
        values = json.loads(data)
        check_format(values["format"], FORMAT)
        fragments = tuple(
            FragmentLayout(f["name"], tuple(TensorSpec(t["name"], tuple(t["shape"])) for t in f["tensors"]))
            for f in values["fragments"]
        )
        dtypes = {t["name"]: t["dtype"] for f in values["fragments"] for t in f["tensors"]}
        return cls(values["name"], values["uid"], fragments, dtypes, values["created_at_unix_s"])
