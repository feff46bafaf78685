"""The campaign with real processes, three minutes of it on each kind of store."""

from __future__ import annotations

import os
import sys

import pytest

from tests.e2e import ceph
from tests.e2e.machine import need_programs, need_root, run

pytestmark = [pytest.mark.e2e, pytest.mark.storm, pytest.mark.timeout(900)]


@pytest.mark.parametrize("store", ["file", "s3"])
def test_a_short_storm_loses_nothing_and_merges_nothing_twice(store: str) -> None:
    if store == "s3":
        need_root()
        need_programs(ceph.PACKAGES)  # the campaign's own network reaches no mirror
    if os.geteuid() == 0:
        need_programs({"iptables": "iptables", "ip": "iproute2"})
    print(run([sys.executable, "-B", "-m", "tests.e2e.chaos", "--short", "--store", store], timeout_s=800))
