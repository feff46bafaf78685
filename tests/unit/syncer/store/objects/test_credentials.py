"""Where credentials come from is said at the start, and they are never shown."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import boto3
import pytest
from click.testing import CliRunner

from skerry.runtime.redaction import redacted
from skerry_syncer.command import serve
from skerry_syncer.store.errors import StoreUnavailableError, StoreURLError
from skerry_syncer.store.maintenance.reading import log
from skerry_syncer.store.objects.credentials import found_credentials
from skerry_syncer.store.objects.opening import open_objects
from tests.support.heard_logs import heard_logs
from tests.support.no_cloud import stay_here

SECRETS = ("hunter2", "AKIA", "p@ss", "top")
WITH_SECRETS = [
    "s3://AKIA:hunter2@bucket/prefix",
    "s3://AKIA:hunter2/p@ss@bucket/prefix",
    "ftp://AKIA:hunter2@nowhere",
    "s3://bucket/prefix?aws_secret_access_key=hunter2&session_token=top",
    "s3://AKIA:hunter2@",
    "s3://AKIA:it's top hunter2 p@ss@bucket/prefix",
    's3://AKIA:"hunter2" top@bucket/prefix',
    "s3://bucket/prefix?se=2027&sig=hunter2%3D&sp=r",
]


@pytest.fixture(autouse=True)
def nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("AWS_") and name not in {"AWS_EC2_METADATA_DISABLED", "AWS_SHARED_CREDENTIALS_FILE"}:
            monkeypatch.delenv(name)


def _is_clean(text: str) -> bool:
    return not any(secret in text for secret in SECRETS)


@pytest.mark.parametrize("url", WITH_SECRETS)
def test_a_url_is_shown_without_its_secrets(url: str) -> None:
    assert _is_clean(redacted(f"store can't be used. url={url!r}, and so on"))
    assert redacted(url).startswith(url.partition("://")[0])


@pytest.mark.parametrize(
    "text", ["file:///home/a@b/store", "s3://bucket/prefix?list-type=2", "http://127.0.0.1:9000/x", "a@b ?x=1"]
)
def test_what_has_no_secret_stays_as_it_is(text: str) -> None:
    assert redacted(text) == text


@pytest.mark.parametrize("url", WITH_SECRETS)
def test_no_command_prints_the_secrets_of_a_url(url: str, tmp_path: Path) -> None:
    for command, words in ((serve, ["--listen", "127.0.0.1:0", "--scratch", str(tmp_path)]), (log, ["demo"])):
        result = CliRunner().invoke(command, ["--store", url, *words])
        assert result.exit_code != 0
        assert _is_clean(f"{result.output} {result.exception}")


def test_without_credentials_a_syncer_ends_and_says_what_to_set(tmp_path: Path) -> None:
    result = CliRunner().invoke(
        serve, ["--listen", "127.0.0.1:0", "--store", "s3://bucket/x", "--scratch", str(tmp_path)]
    )
    assert result.exit_code == 2
    assert "AWS_ACCESS_KEY_ID" in result.output


@pytest.mark.parametrize(
    ("variables", "source"),
    [
        ({"AWS_ACCESS_KEY_ID": "AKIA", "AWS_SECRET_ACCESS_KEY": "hunter2"}, "AWS_ACCESS_KEY_ID"),
        ({"AWS_WEB_IDENTITY_TOKEN_FILE": "/token", "AWS_ROLE_ARN": "arn"}, "AWS_WEB_IDENTITY_TOKEN_FILE"),
        ({"AWS_CONTAINER_CREDENTIALS_RELATIVE_URI": "/x"}, "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI"),
        ({"AWS_SKIP_SIGNATURE": "true"}, "AWS_SKIP_SIGNATURE"),
    ],
)
def test_the_source_is_said_and_the_secret_is_not(
    variables: dict[str, str], source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with heard_logs() as lines:
        assert found_credentials({}) == {}
    assert [line["source"] for line in lines] == [source]
    assert _is_clean(str(lines))


def test_the_shared_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = tmp_path / "credentials"
    shared.write_text(
        "[default]\naws_access_key_id = AKIA\n[prod]\naws_access_key_id = AKIA2\naws_secret_access_key = hunter2%\n"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(shared))
    with pytest.raises(StoreURLError, match="AWS_PROFILE"):  # half a pair is none
        open_objects("s3://bucket/x")
    monkeypatch.setenv("AWS_PROFILE", "prod")
    with heard_logs() as lines:
        assert found_credentials({}) == {"access_key_id": "AKIA2", "secret_access_key": "hunter2%"}
    assert [line["source"] for line in lines] == ["shared file"]


def test_a_machine_with_a_metadata_service_has_a_role(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
    with socket.create_server(("127.0.0.1", 0)) as service:
        monkeypatch.setenv("AWS_METADATA_ENDPOINT", f"http://127.0.0.1:{service.getsockname()[1]}")
        with heard_logs() as lines:
            assert found_credentials({}) == {}
    assert [line["source"] for line in lines] == ["instance metadata"]
    with pytest.raises(StoreURLError, match="give the machine a role"):
        found_credentials({})


async def test_a_client_that_a_test_gives_no_server_stays_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"AWS_PROFILE": "mine", "AWS_SESSION_TOKEN": "mine", "AWS_ACCESS_KEY_ID": "mine", "PATH": "/bin"}
    stay_here(given)
    assert "mine" not in given.values()
    assert given["PATH"] == "/bin"
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert boto3.client("s3", region_name="us-east-1").meta.endpoint_url == given["AWS_ENDPOINT"]
    with pytest.raises(StoreUnavailableError, match=r"//127\.0\.0\.1:9/"):
        await open_objects("s3://bucket/x").get("a")
