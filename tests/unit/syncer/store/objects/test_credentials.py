"""Where credentials come from is said at the start, and they are never shown."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from click.testing import CliRunner
from moto import settings as moto_settings

from skerry.runtime.redaction import redacted
from skerry_syncer.command import serve
from skerry_syncer.store.errors import StoreURLError
from skerry_syncer.store.objects.credentials import found_credentials
from skerry_syncer.store.objects.opening import open_objects
from tests.support.heard_logs import heard_logs


@pytest.fixture
def _nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("AWS_") and name not in {"AWS_EC2_METADATA_DISABLED", "AWS_SHARED_CREDENTIALS_FILE"}:
            monkeypatch.delenv(name)


def sources() -> tuple[dict[str, str], list[str]]:
    """Returns what is found, and where it is said to come from; never with the secret."""
    with heard_logs() as lines:
        credentials = found_credentials()
    assert "hunter2" not in str(lines)
    return credentials, [line["source"] for line in lines]


@pytest.mark.parametrize(
    "url",
    [
        "s3://AKIA:hunter2/p@ss@bucket/prefix",
        "s3://bucket/prefix?aws_secret_access_key=hunter2&session_token=top",
        "s3://AKIA:hunter2@",
        's3://AKIA:"it\'s" top hunter2@bucket/prefix',
        "s3://bucket/prefix?se=2027&sig=hunter2%3D&sp=r",
    ],
)
def test_a_url_is_shown_without_its_secrets(url: str) -> None:
    shown = redacted(f"store can't be used. url={url!r}, and so on")
    assert not any(secret in shown for secret in ("hunter2", "AKIA", "p@ss", "top"))
    assert redacted(url).startswith("s3://")


@pytest.mark.parametrize("text", ["file:///home/a@b/store", "s3://bucket/prefix?list-type=2", "a@b ?x=1"])
def test_what_has_no_secret_stays_as_it_is(text: str) -> None:
    assert redacted(text) == text


@pytest.mark.usefixtures("_nobody")
def test_without_credentials_a_syncer_ends_and_says_what_to_set(tmp_path: Path) -> None:
    words = ["--listen", "127.0.0.1:0", "--store", "s3://bucket/x", "--scratch", str(tmp_path)]
    result = CliRunner().invoke(serve, words)
    assert result.exit_code == 2
    assert "AWS_ACCESS_KEY_ID" in result.output


def test_wrong_credentials_end_a_syncer_with_what_the_store_said(
    s3_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(moto_settings, "INITIAL_NO_AUTH_ACTION_COUNT", 0.0)  # from now on they are checked
    result = CliRunner().invoke(serve, ["--listen", "127.0.0.1:0", "--store", s3_url, "--scratch", str(tmp_path)])
    assert result.exit_code == 2
    assert "refuses the credentials" in result.output
    assert "InvalidAccessKeyId" in result.output


@pytest.mark.usefixtures("_nobody")
@pytest.mark.parametrize("variable", ["AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_SKIP_SIGNATURE"])
def test_a_variable_that_obstore_reads_is_said_and_its_value_is_not(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "hunter2")
    assert sources() == ({}, [variable])


@pytest.mark.usefixtures("_nobody")
def test_the_shared_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = tmp_path / "credentials"
    shared.write_text(
        "[default]\naws_access_key_id = AKIA\n[prod]\naws_access_key_id = AKIA2\naws_secret_access_key = hunter2%\n"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(shared))
    with pytest.raises(StoreURLError, match="AWS_PROFILE"):  # half a pair is none
        open_objects("s3://bucket/x")
    monkeypatch.setenv("AWS_PROFILE", "prod")
    assert sources() == ({"access_key_id": "AKIA2", "secret_access_key": "hunter2%"}, ["shared file"])


@pytest.mark.usefixtures("_nobody")
def test_a_machine_with_a_metadata_service_has_a_role(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
    with socket.create_server(("127.0.0.1", 0)) as service:
        monkeypatch.setenv("AWS_METADATA_ENDPOINT", f"http://127.0.0.1:{service.getsockname()[1]}")
        assert sources() == ({}, ["instance metadata"])
    with pytest.raises(StoreURLError, match="give the machine a role"):
        found_credentials()
