"""Object stores for the tests: every kind that Skerry runs on, S3 from a server in this process."""

import itertools
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
from moto.server import ThreadedMotoServer

from skerry_syncer.store.objects.interface import Objects
from skerry_syncer.store.objects.opening import open_objects
from tests.support.dict_objects import DictObjects

_BUCKET = "skerry-test"
_prefixes = itertools.count()


@pytest.fixture(scope="session")
def s3_options() -> Iterator[dict[str, str]]:
    """A bucket on moto's server."""
    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    options = {
        "endpoint": f"http://{host}:{port}",
        "region": "us-east-1",
        "access_key_id": "testing",
        "secret_access_key": "testing",
    }
    _make_bucket(options)
    yield options
    server.stop()


@pytest.fixture(scope="session")
def real_s3_options() -> dict[str, str]:
    """A bucket on the server that SKERRY_TEST_S3_ENDPOINT, _ACCESS_KEY, _SECRET_KEY and _REGION name."""
    endpoint = os.environ.get("SKERRY_TEST_S3_ENDPOINT")
    if not endpoint:
        pytest.skip("SKERRY_TEST_S3_ENDPOINT names no S3 server")
    options = {
        "endpoint": endpoint,
        "region": os.environ.get("SKERRY_TEST_S3_REGION", "us-east-1"),
        "access_key_id": os.environ["SKERRY_TEST_S3_ACCESS_KEY"],
        "secret_access_key": os.environ["SKERRY_TEST_S3_SECRET_KEY"],
    }
    _make_bucket(options)
    return options


def _make_bucket(options: dict[str, str]) -> None:
    client = boto3.client(
        "s3",
        endpoint_url=options["endpoint"],
        region_name=options["region"],
        aws_access_key_id=options["access_key_id"],
        aws_secret_access_key=options["secret_access_key"],
    )
    known = {bucket["Name"] for bucket in client.list_buckets()["Buckets"]}
    if _BUCKET not in known:
        client.create_bucket(Bucket=_BUCKET)


@pytest.fixture(
    params=["dict", "memory", "file", "s3", pytest.param("real-s3", marks=pytest.mark.e2e)],
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
    options = request.getfixturevalue("s3_options" if request.param == "s3" else "real_s3_options")
    return open_objects(f"s3://{_BUCKET}/{os.getpid()}-{next(_prefixes)}", options=options)
