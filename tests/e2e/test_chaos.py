"""The campaign with real processes, a few minutes of it on each kind of store."""

from __future__ import annotations

import sys

import pytest

from tests.e2e import ceph
from tests.e2e.azurite import need_azurite
from tests.e2e.chaos.__main__ import UNSHARE
from tests.e2e.chaos.store_place import KINDS
from tests.e2e.machine import CommandError, need_programs, need_root, run

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


@pytest.mark.parametrize("store", KINDS)
def test_a_short_storm_loses_nothing_and_merges_nothing_twice(store: str) -> None:
    need_root()
    try:
        run([*UNSHARE, "true"], timeout_s=10)
    except CommandError as error:
        pytest.skip(f"no namespaces of its own: {error}")
    # The campaign's own network reaches no mirror.
    need_programs({"iptables": "iptables", "ip": "iproute2"} | (ceph.PACKAGES if store in {"s3", "gs"} else {}))
    if store == "az":
        need_azurite()
    minutes = "1" if store in {"gs", "az"} else "2.5"  # whose client is that of s3
    print(run([sys.executable, "-B", "-m", "tests.e2e.chaos", "--minutes", minutes, "--store", store], timeout_s=800))
