"""Object stores for the tests: every kind that Skerry runs on, S3 and Google's from servers in this process."""

import itertools
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.s3.responses import S3Response
from moto.server import ThreadedMotoServer

from skerry_syncer.store.objects.interface import Objects
from skerry_syncer.store.objects.opening import open_objects
from tests.e2e.azurite import AZURITE, Azurite, need_azurite
from tests.support.dict_objects import DictObjects
from tests.support.google_storage import GoogleStorage, google_storage

_BUCKET = "skerry-test"
_prefixes = itertools.count()


@pytest.fixture(scope="session")
def moto() -> Iterator[str]:
    """The address of moto's server, which puts one object at a time.

    Moto by itself looks whether an object exists and then writes it, so that of two conditional puts both may win.
    """
    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    lock, put_object = threading.Lock(), S3Response.put_object

    def put_alone(response: S3Response) -> Any:
        with lock:
            return put_object(response)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(S3Response, "put_object", put_alone)
        server.start()
        host, port = server.get_host_and_port()
        yield f"http://{host}:{port}"
        server.stop()


def _new_prefix(monkeypatch: pytest.MonkeyPatch, endpoint: str, **variables: str) -> str:
    """Returns the URL of an empty prefix on a server, to which the environment leads from now on."""
    variables = {"REGION": "us-east-1", "ENDPOINT": endpoint, "ENDPOINT_URL": endpoint, **variables}
    for name, value in variables.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    client = boto3.client("s3", endpoint_url=endpoint, region_name=variables["REGION"])
    if _BUCKET not in {bucket["Name"] for bucket in client.list_buckets()["Buckets"]}:
        client.create_bucket(Bucket=_BUCKET)
    return f"s3://{_BUCKET}/{os.getpid()}-{next(_prefixes)}"


@pytest.fixture
def s3_url(moto: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of an empty prefix on moto's server."""
    return _new_prefix(monkeypatch, moto)


@pytest.fixture(scope="session")
def google(moto: str) -> Iterator[GoogleStorage]:
    """Google Cloud Storage, kept by moto."""
    with google_storage(moto) as server:
        yield server


@pytest.fixture
def gs_url(s3_url: str, google: GoogleStorage, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of an empty prefix on Google Cloud Storage, for a machine with a service account."""
    monkeypatch.delenv("GOOGLE_BEARER_TOKEN")
    for name, value in google.env().items():
        monkeypatch.setenv(name, value)
    return s3_url.replace("s3://", "gs://")


@pytest.fixture(scope="session")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Azurite]:
    """Azure's blob storage, emulated, with one container."""
    need_azurite()
    server = Azurite.start(tmp_path_factory.mktemp("azurite"))
    server.create_container(_BUCKET)
    yield server
    server.stop()


@pytest.fixture
def az_url(azurite: Azurite, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of an empty prefix on Azurite."""
    for name, value in azurite.env().items():
        monkeypatch.setenv(name, value)
    return f"az://{_BUCKET}/{os.getpid()}-{next(_prefixes)}"


@pytest.fixture
def real_s3_url(monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of an empty prefix on the server that SKERRY_TEST_S3_ENDPOINT, _ACCESS_KEY and _SECRET_KEY name."""
    if (endpoint := os.environ.get("SKERRY_TEST_S3_ENDPOINT")) is None:
        pytest.skip("SKERRY_TEST_S3_ENDPOINT names no S3 server")
    key, secret = (os.environ[f"SKERRY_TEST_S3_{name}_KEY"] for name in ("ACCESS", "SECRET"))
    return _new_prefix(monkeypatch, endpoint, ACCESS_KEY_ID=key, SECRET_ACCESS_KEY=secret)


@pytest.fixture(
    params=[
        "dict",
        "memory",
        "file",
        "s3",
        "gs",
        pytest.param("real-s3", marks=pytest.mark.e2e),
        pytest.param("az", marks=AZURITE),
    ],
)
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> Objects:
    """An empty object store of each kind."""
    match request.param:
        case "dict":
            return DictObjects()
        case "memory":
            return open_objects("memory://")
        case "file":
            return open_objects(f"file://{tmp_path}/store")
    return open_objects(request.getfixturevalue(f"{request.param.replace('-', '_')}_url"))
