"""Where credentials come from is said at the start, they are never shown, and those with an end are renewed."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import boto3
import pytest
from click.testing import CliRunner
from moto import settings as moto_settings

from skerry.runtime.redaction import redacted
from skerry_syncer.command import serve
from skerry_syncer.store.errors import ObjectMissingError, StoreRefusedError, StoreURLError
from skerry_syncer.store.objects.credentials import found_credentials
from skerry_syncer.store.objects.opening import open_objects
from tests.e2e.azurite import AZURITE
from tests.support.google_storage import google_storage
from tests.support.heard_logs import heard_logs

_KEPT = {"AWS_EC2_METADATA_DISABLED", "AWS_SHARED_CREDENTIALS_FILE", "AWS_ALLOW_HTTP", "CLOUDSDK_CONFIG"}


@pytest.fixture
def _nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("AWS_", "GOOGLE_", "AZURE_")) and name not in _KEPT:
            monkeypatch.delenv(name)


def sources(scheme: str = "s3") -> tuple[dict[str, Any], list[str]]:
    """Returns what is found, and where it is said to come from; never with the secret."""
    with heard_logs() as lines:
        credentials = found_credentials(scheme)
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
@pytest.mark.parametrize(
    ("url", "advice"),
    [
        ("s3://bucket/x", "AWS_ACCESS_KEY_ID"),
        ("gs://bucket/x", "GOOGLE_APPLICATION_CREDENTIALS"),
        ("az://container/x", "AZURE_STORAGE_ACCOUNT_KEY"),
    ],
)
def test_without_credentials_a_syncer_ends_and_says_what_to_set(url: str, advice: str, tmp_path: Path) -> None:
    words = ["--listen", "127.0.0.1:0", "--store", url, "--scratch", str(tmp_path)]
    result = CliRunner().invoke(serve, words)
    assert result.exit_code == 2
    assert advice in result.output


def test_wrong_credentials_end_a_syncer_with_what_the_store_said(
    s3_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(moto_settings, "INITIAL_NO_AUTH_ACTION_COUNT", 0.0)  # from now on they are checked
    result = CliRunner().invoke(serve, ["--listen", "127.0.0.1:0", "--store", s3_url, "--scratch", str(tmp_path)])
    assert result.exit_code == 2
    assert "refuses the credentials" in result.output
    assert "InvalidAccessKeyId" in result.output


@pytest.mark.parametrize(
    ("kind", "variable", "code"),
    [
        ("gs", "GOOGLE_BEARER_TOKEN", "AuthenticationRequired"),
        pytest.param("az", "AZURE_STORAGE_ACCOUNT_KEY", "AuthorizationFailure", marks=AZURITE),
    ],
)
async def test_a_key_that_the_cloud_does_not_know_is_refused(
    kind: str, variable: str, code: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = request.getfixturevalue(f"{kind}_url")
    monkeypatch.setenv(variable, "d3Jvbmc=")
    with pytest.raises(StoreRefusedError, match=f"refuses the credentials.*code={code}"):
        await open_objects(url).get("a")


@pytest.mark.usefixtures("_nobody")
@pytest.mark.parametrize(
    "variable",
    [
        "AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_SKIP_SIGNATURE",
        "GOOGLE_SERVICE_ACCOUNT_KEY", "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_FEDERATED_TOKEN_FILE",
    ],
)  # fmt: skip
def test_a_variable_that_obstore_reads_is_said_and_its_value_is_not(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "hunter2")
    assert sources({"AW": "s3", "GO": "gs", "AZ": "az"}[variable[:2]]) == ({}, [variable])


@pytest.mark.usefixtures("_nobody")
def test_the_shared_file_of_aws_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_the_file_of_google_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = tmp_path / "application_default_credentials.json"
    shared.write_text('{"type": "authorized_user", "client_id": "a", "client_secret": "hunter2", "refresh_token": "b"}')
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    assert sources("gs") == ({"application_credentials": str(shared)}, ["shared file"])
    open_objects("gs://bucket/x")
    for content in ("hunter2", '"hunter2"', '{"type": "unheard-of"}'):
        shared.write_text(content)
        with pytest.raises(StoreURLError, match="Google's credentials can't be") as caught:
            open_objects("gs://bucket/x")
        assert "hunter2" not in str(caught.value)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "none"))
    with pytest.raises(StoreURLError, match=r"can't be used: .*No such file.*none"):
        open_objects("gs://bucket/x")


@pytest.mark.usefixtures("_nobody")
def test_a_federated_google_identity_without_its_extra_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation = tmp_path / "federation.json"
    federation.write_text('{"type": "external_account"}')
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(federation))
    monkeypatch.setitem(sys.modules, "google.auth", None)
    with pytest.raises(StoreURLError, match=r"pip install 'skerry\[gcs\]'"):
        open_objects("gs://bucket/x")


@pytest.mark.usefixtures("_nobody")
@pytest.mark.parametrize(
    ("scheme", "variable", "form"),
    [
        ("s3", "AWS_METADATA_ENDPOINT", "http://{}"),
        ("gs", "GCE_METADATA_HOST", "{}"),
        ("az", "IDENTITY_ENDPOINT", "http://{}/token"),
    ],
)
def test_a_machine_with_a_metadata_service_has_a_role(
    scheme: str, variable: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
    with socket.create_server(("127.0.0.1", 0)) as service:
        monkeypatch.setenv(variable, form.format(f"127.0.0.1:{service.getsockname()[1]}"))
        assert sources(scheme) == ({}, ["instance metadata"])
    with pytest.raises(StoreURLError, match="give the machine a"):
        found_credentials(scheme)


@pytest.mark.usefixtures("gs_url")
async def test_tokens_of_a_machine_at_google_are_renewed_before_they_end(
    moto: str, gs_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with google_storage(moto, token_lifetime_s=0.9) as server:  # by what it tells, a token is at its end at once
        for name, value in server.env().items():
            monkeypatch.setenv(name, value)
        objects = open_objects(gs_url)
        await objects.create("a", b"1")
        assert await objects.get("a") == b"1"
        assert server.token_count == 2


class _Cloud(BaseHTTPRequestHandler):
    """An empty bucket, and the services that exchange a workload's proof of identity for a token of one request."""

    protocol_version = "HTTP/1.1"
    tokens: list[str]
    proofs: list[str]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        said = f"{self.headers}{body}"
        if self.path.startswith("/exchange"):
            self.proofs.append(next((proof for proof in ("proof-1", "proof-2") if proof in said), ""))
            self.tokens.append(f"token-{len(self.tokens)}")
            names = ("access_token", "AccessKeyId", "SecretAccessKey", "Token")
            ended = {"expires_in": 0, "expires_on": "0", "Expiration": "2026-01-01T00:00:00Z"}
            kinds = {"token_type": "Bearer", "issued_token_type": "urn:ietf:params:oauth:token-type:access_token"}
            self._answer(200, {**dict.fromkeys(names, self.tokens[-1]), **ended, **kinds})
        else:
            self._answer(404 if self.tokens and self.tokens[-1] in said else 403, {})

    do_GET = do_POST  # noqa: N815 - the library's name

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def cloud() -> Iterator[tuple[str, type[_Cloud]]]:
    """Where a cloud is, and what was asked of it."""
    handler = type("Cloud", (_Cloud,), {"tokens": [], "proofs": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", handler
        server.shutdown()
        thread.join()


@pytest.mark.usefixtures("_nobody")
@pytest.mark.parametrize(
    ("url", "variables"),
    [
        (
            "s3://bucket/x",
            {
                "AWS_ENDPOINT_URL": "{cloud}",
                "AWS_REGION": "eu-central-1",
                "AWS_CONTAINER_CREDENTIALS_FULL_URI": "{cloud}/exchange",
                "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": "{proof}",
            },
        ),
        ("gs://bucket/x", {"GOOGLE_BASE_URL": "{cloud}", "GOOGLE_APPLICATION_CREDENTIALS": "{federation}"}),
        (
            "az://container/x",
            {
                "AZURE_STORAGE_ACCOUNT_NAME": "account",
                "AZURE_STORAGE_ENDPOINT": "{cloud}",
                "AZURE_AUTHORITY_HOST": "{cloud}/exchange",
                "AZURE_TENANT_ID": "tenant",
                "AZURE_CLIENT_ID": "client",
                "AZURE_FEDERATED_TOKEN_FILE": "{proof}",
            },
        ),
    ],
    ids=["s3", "gs", "az"],
)
async def test_workload_identity_is_proven_anew_when_a_token_ends(
    url: str,
    variables: dict[str, str],
    cloud: tuple[str, type[_Cloud]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    address, heard = cloud
    proof, federation = tmp_path / "proof", tmp_path / "federation.json"
    settings = {
        "type": "external_account",
        "audience": "//iam.googleapis.com/projects/1/locations/global/workloadIdentityPools/pool/providers/cluster",
        "subject_token_type": "urn:ietf:params:oauth:token-type:jwt",
        "token_url": f"{address}/exchange",
        "credential_source": {"file": str(proof)},
    }
    federation.write_text(json.dumps(settings))
    proof.write_text("proof-1")
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(cloud=address, proof=proof, federation=federation))
    objects = open_objects(url)
    for content in ("proof-1", "proof-2"):
        proof.write_text(content)  # as a cluster does before it ends
        with pytest.raises(ObjectMissingError):
            await objects.get("a")
        assert heard.proofs[-1] == content
    assert len(heard.tokens) >= 2


def _policy() -> str:
    """The policy for Amazon that the documents give, for the tests' bucket."""
    text = (Path(__file__).parents[5] / "docs" / "buckets.md").read_text(encoding="utf-8")
    policy: str = re.findall(r"^```json\n(.*?)^```", text, re.DOTALL | re.MULTILINE)[0]
    return policy.replace("BUCKET", "skerry-test").replace("PREFIX/*", "*")


# Deletes are left out: moto asks for the action DeleteObjects, which Amazon does not have.
async def test_the_policy_that_the_documents_give_suffices_to_read_write_and_list(
    moto: str, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    iam = boto3.client("iam", endpoint_url=moto, region_name="us-east-1")
    iam.create_user(UserName="skerry")
    iam.put_user_policy(UserName="skerry", PolicyName="skerry", PolicyDocument=_policy())
    key = iam.create_access_key(UserName="skerry")["AccessKey"]
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key["AccessKeyId"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", key["SecretAccessKey"])
    monkeypatch.setattr(moto_settings, "INITIAL_NO_AUTH_ACTION_COUNT", 0.0)
    objects = open_objects(s3_url)
    await objects.create("a/1", b"1")
    await objects.write("a/2", bytes(20 * 2**20))
    assert await objects.get("a/1") == b"1"
    with pytest.raises(ObjectMissingError):
        await objects.get("a/3")
    assert await objects.folders("") == ["a"]
