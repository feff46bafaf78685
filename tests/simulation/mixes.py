"""The mixes of faults that a campaign goes through."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from skerry.wire.codecs import Codec
from tests.simulation.disturbances import Mix
from tests.simulation.network import NetworkFaults
from tests.simulation.shared_store import StoreFaults

_BAD_STORE: Final = StoreFaults(
    error_before=0.02, error_after=0.02, late=0.01, says_exists=0.2, says_full=0.1, slow=0.005
)
_BAD_NETWORK: Final = NetworkFaults(
    latency_s=(0.01, 0.3), resend=0.01, cut=0.003, lost_answer=0.03, repeat=0.05, wander=0.4
)
_FOREIGN: Final = 0.02
_EVERYTHING: Final = (
    ("kill_replica", 1.5),
    ("kill_replica_at_operation", 3.0),
    ("kill_all", 0.5),
    ("drain", 1.0),
    ("stop_replica", 1.5),
    ("kill_learner", 2.0),
    ("stop_learner", 1.5),
    ("replace_learner", 1.0),
    ("partition", 2.0),
    ("half_open", 1.0),
    ("store_outage", 1.0),
    ("roll_back", 0.3),
    ("change_policy", 0.3),
)

MIXES: Final[dict[str, Mix]] = {
    mix.name: mix
    for mix in (
        Mix("calm", delta_codec=Codec.FLOAT32),
        Mix("network", network=_BAD_NETWORK, kinds=(("partition", 3.0), ("half_open", 2.0))),
        Mix("proxies", network=replace(_BAD_NETWORK, lost_answer=0.1, foreign=_FOREIGN), kinds=(("partition", 2.0),)),
        Mix("store", store=_BAD_STORE, kinds=(("store_outage", 2.0),), delta_codec=Codec.FLOAT32, lane_bytes=2**22),
        Mix(
            "replicas",
            kinds=(
                ("kill_replica", 3.0),
                ("kill_replica_at_operation", 12.0),
                ("kill_all", 1.0),
                ("drain", 2.0),
                ("stop_replica", 3.0),
            ),
            snapshot_ratio=0.3,
        ),
        Mix(
            "learners",
            network=NetworkFaults(lost_answer=0.05, repeat=0.1, wander=0.3),
            kinds=(("kill_learner", 6.0), ("stop_learner", 4.0), ("replace_learner", 4.0)),
            quorum_count=2,
        ),
        Mix(
            "restarts",
            network=_BAD_NETWORK,
            kinds=(("kill_learner", 10.0), ("replace_learner", 4.0), ("kill_replica", 1.0), ("roll_back", 0.5)),
            quorum_count=2,
            delta_codec=Codec.FLOAT32,
        ),
        Mix("sleepers", kinds=(("replace_learner", 12.0), ("stop_learner", 4.0), ("stop_replica", 4.0))),
        Mix(
            "everything",
            kinds=_EVERYTHING,
            store=_BAD_STORE,
            network=replace(_BAD_NETWORK, foreign=_FOREIGN),
            lane_bytes=2**22,
        ),
        Mix(
            "everything-float32",
            kinds=_EVERYTHING,
            store=_BAD_STORE,
            network=_BAD_NETWORK,
            delta_codec=Codec.FLOAT32,
            snapshot_ratio=4.0,
            closes_under_fire=True,
            lane_bytes=2**22,
        ),
        Mix(
            "roll-backs",
            kinds=(("roll_back", 4.0), ("kill_replica_at_operation", 4.0), ("change_policy", 2.0)),
            network=_BAD_NETWORK,
        ),
        Mix(
            "ejections",
            kinds=(("eject", 6.0), ("kill_replica_at_operation", 4.0), ("kill_learner", 1.0), ("roll_back", 0.5)),
            network=_BAD_NETWORK,
            quorum_count=2,
        ),
        Mix("poison", kinds=(("poison", 4.0), ("kill_learner", 1.0)), delta_codec=Codec.INT8),
        Mix(
            "alone",
            kinds=(*_EVERYTHING, ("poison", 1.5)),
            network=_BAD_NETWORK,
            step_s=(0.5,),
            lane_bytes=2**22,
        ),
        Mix(
            "damage",
            store=StoreFaults(damaged=0.1, cut=0.1),
            kinds=(("kill_replica", 3.0), ("kill_replica_at_operation", 4.0), ("kill_all", 1.0), ("stop_replica", 2.0)),
            snapshot_ratio=0.3,
        ),
        Mix(
            "retention",
            kinds=(
                ("kill_replica", 3.0),
                ("kill_replica_at_operation", 8.0),
                ("kill_all", 1.0),
                ("stop_replica", 3.0),
                ("roll_back", 1.0),
            ),
            snapshot_ratio=1.0,
            kept_version_count=2,
        ),
    )
}
