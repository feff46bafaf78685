"""Ceph's S3 gateway as a store; the gateway is then there for the contract of object stores, too."""

from __future__ import annotations

import boto3
import pytest
from click.testing import CliRunner

from skerry_syncer.command import serve as serve_command
from tests.e2e.ceph import CephGateway

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


def test_a_syncer_whose_secret_is_wrong_ends_with_what_the_gateway_said(
    ceph_gateway: CephGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in ceph_gateway.env().items():
        monkeypatch.setenv(name, value)
    boto3.client("s3").create_bucket(Bucket="skerry-e2e")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    result = CliRunner().invoke(serve_command, ["--listen", "127.0.0.1:0", "--store", "s3://skerry-e2e/store"])
    assert result.exit_code == 2
    assert "SignatureDoesNotMatch" in result.output
