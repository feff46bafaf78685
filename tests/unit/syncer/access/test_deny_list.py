"""The deny list follows its file."""

from __future__ import annotations

from pathlib import Path

import pytest

from skerry.wire.identity import Identity
from skerry_syncer.access.deny_list import DenyList
from skerry_syncer.errors import SyncerError
from tests.support.heard_logs import heard_logs
from tests.support.still_clock import StillClock

US, EU = Identity.parse("skerry://learner/us"), Identity.parse("skerry://learner/demo/eu")


def is_denied(denied: DenyList, caller: Identity) -> bool:
    try:
        denied.check(caller)
    except SyncerError as error:
        return error.reason == "PERMISSION_DENIED"
    return False


def test_it_denies_whom_the_file_names_now_and_reads_it_once_a_second(tmp_path: Path) -> None:
    file, clock = tmp_path / "denied", StillClock()
    file.write_text("# who left\n\nskerry://learner/us\n")
    denied = DenyList(file, clock)
    assert (is_denied(denied, US), is_denied(denied, EU)) == (True, False)
    file.write_text(f"{EU} # lost its key\n")
    clock.now_s += 0.5
    assert (is_denied(denied, US), is_denied(denied, EU)) == (True, False)
    clock.now_s += 1.0
    assert (is_denied(denied, US), is_denied(denied, EU)) == (False, True)


def test_a_file_that_can_not_be_used_leaves_the_old_list_in_force_and_is_logged_once(tmp_path: Path) -> None:
    file, clock = tmp_path / "denied", StillClock()
    file.write_text(str(US))
    denied = DenyList(file, clock)
    with heard_logs() as logs:
        for text in ("us\n", "us\n", None):
            file.unlink() if text is None else file.write_text(text)
            clock.now_s += 2
            assert is_denied(denied, US)
    assert [line["event"] for line in logs] == ["deny list can't be reloaded, what was read before stays in force"] * 2


@pytest.mark.parametrize("text", [None, "us", "skerry://owner/us", "skerry://learner/us skerry://learner/eu"])
def test_a_server_does_not_begin_with_a_file_that_can_not_be_used(text: str | None, tmp_path: Path) -> None:
    file = tmp_path / "denied"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ValueError, match="denied"):
        DenyList(file, StillClock())
