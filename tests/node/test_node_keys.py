"""Mutual TLS, renewed keys and revoked tokens of a `skerry serve` process, as a client in Node finds them."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from skerry import Tls
from skerry.cli.authority import Authority, client
from skerry.wire.identity import Role
from tests.node.deployment import ADMIN, LEARNER, LEARNER_OF_DEMO, Deployment, Served, attach, hears
from tests.support.made_keys import make_keys, replace_pair, tls_of
from tests.support.made_tokens import in_thread

# Of connections.
NUMBERS = itertools.count(1)


async def test_with_mutual_tls_only_a_certificate_of_the_authority_connects(deployment: Deployment) -> None:
    others, keys = deployment.folder / "others", deployment.keys
    make_keys(others, "--learner", "us")
    own, strange = tls_of(keys, "us"), tls_of(others, "us")
    Authority(keys, datetime.now(UTC) - timedelta(days=2)).make(client(Role.LEARNER, "late"), days=1)
    refused = {
        "no certificate": (tls_of(keys), "Failed to connect"),
        "a certificate of another authority": (replace(strange, ca=own.ca), "Failed to connect"),
        "a certificate that has expired": (tls_of(keys, "late"), "Failed to connect"),
        "plaintext": (None, "Failed to connect"),
        "no trust in the server": (replace(own, ca=strange.ca), "unable to verify the first certificate"),
    }
    admin = deployment.certificate(ADMIN)
    async with deployment.served(admin, "--tls-client-ca", f"{keys}/ca.pem") as served:
        for who, (tls, why) in refused.items():
            await served.client.open(who, tls)
            answer = await served.client.call(who, "Runs/GetRun", name="demo")
            assert (who, answer.code, answer.reason) == (who, "UNAVAILABLE", "")
            assert why in answer.message, who
            assert await presented(served, own) == deployment.serial(), who


@pytest.mark.parametrize("version", ["TLSv1.2", "TLSv1.3"])
async def test_a_session_is_not_resumed_so_that_each_connection_needs_a_certificate_that_is_valid_then(
    version: str, deployment: Deployment
) -> None:
    keys, us = deployment.keys, deployment.certificate(LEARNER)
    async with deployment.served(deployment.certificate(ADMIN), "--tls-client-ca", f"{keys}/ca.pem") as served:
        connect = served.client.connect
        assert await connect(us, version, resumes=False) == (True, False)
        assert await connect(tls_of(keys), version, resumes=True) == (False, False)
        assert await connect(us, version, resumes=True) == (True, False)
        (keys / "a.example.key").unlink()  # what is in service then is the last that could be read
        assert await connect(us, version, resumes=False) == (True, False)
        assert await connect(tls_of(keys), version, resumes=True) == (False, False)


async def test_a_renewed_certificate_is_for_new_connections_and_old_ones_go_on(deployment: Deployment) -> None:
    keys, us = deployment.keys, deployment.certificate(LEARNER)
    before, admin = deployment.serial(), deployment.certificate(ADMIN)
    async with deployment.served(admin, "--tls-client-ca", f"{keys}/ca.pem") as served:
        await served.client.open("old", us)
        assert (await attach(served, "old", "us")).serial == before
        make_keys(keys, "--server", "a.example", "--renew")
        after = deployment.serial()
        assert await presented(served, us) == after != before
        await hears(served, "old", 2)
        assert (await served.client.call("old", "Runs/GetRun", name="demo")).serial == before
        make_keys(keys, "--learner", "us", "--renew")
        assert await presented(served, us) == after
    assert (deployment.folder / "serve.log").read_text().count("certificates reloaded") == 1


async def test_an_authority_is_replaced_while_both_are_trusted_for_a_while(deployment: Deployment) -> None:
    keys, new, trusted = deployment.keys, deployment.folder / "new", deployment.folder / "trusted.pem"
    make_keys(new, "--server", "a.example", "--learner", "us")
    first, second = (keys / "ca.pem").read_bytes(), (new / "ca.pem").read_bytes()
    us = [replace(tls_of(folder, "us"), ca=trusted) for folder in (keys, new)]
    admin = deployment.certificate(ADMIN)
    async with deployment.served(admin, "--tls-client-ca", f"{keys}/ca.pem") as served:
        trusted.write_bytes(first)
        await served.client.open("old", us[0])
        await attach(served, "old", "us")
        before = deployment.serial()
        assert [await presented(served, one) for one in us] == [before, None]
        trusted.write_bytes(first + second)
        assert [await presented(served, one) for one in us] == [before, None]
        (keys / "ca.pem").write_bytes(first + second)
        assert [await presented(served, one) for one in us] == [before, before]
        replace_pair(keys, "a.example", new)
        after = deployment.serial()
        assert [await presented(served, one) for one in us] == [after, after]
        (keys / "ca.pem").write_bytes(second)
        trusted.write_bytes(second)
        assert [await presented(served, one) for one in us] == [None, after]
        await hears(served, "old", 2)


async def presented(served: Served, tls: Tls) -> int | None:
    """Returns the serial number of the certificate that a new connection is given; None if it is refused."""
    channel = f"connection {next(NUMBERS)}"
    await served.client.open(channel, tls)
    answer = await served.client.call(channel, "Runs/GetRun", name="demo")
    assert answer.code in {"OK", "UNAVAILABLE"}, answer
    return answer.serial


async def test_a_revoked_tokens_attachment_ends_within_10_s_and_its_next_call_is_refused(
    deployment: Deployment,
) -> None:
    us, eu = await deployment.token(LEARNER_OF_DEMO), await deployment.token(replace(LEARNER_OF_DEMO, name="eu"))
    async with deployment.served(await deployment.token(ADMIN), "--tokens") as served:
        for channel, tls in {"us": us, "eu": eu}.items():
            await served.client.open(channel, tls)
            assert (await attach(served, channel, channel)).code == "OK"
        listed = await in_thread("list", "--store", deployment.store_url)
        (line,) = [line for line in listed.splitlines() if str(LEARNER_OF_DEMO) in line]
        await in_thread("revoke", "--store", deployment.store_url, line.split()[0])
        revoked_s = time.monotonic()
        answer = await served.client.heard("us")
        while answer.code == "OK":
            answer = await served.client.heard("us")
        ended_s = time.monotonic() - revoked_s
        assert (answer.code, answer.reason) == ("UNAUTHENTICATED", "UNAUTHENTICATED")
        assert ended_s < 10
        answer = await served.client.call("us", "Runs/GetRun", name="demo")
        assert (answer.code, answer.reason) == ("UNAUTHENTICATED", "UNAUTHENTICATED")
        await hears(served, "eu", 2)
        print(f"the attachment ended {ended_s:.1f} s after the revocation")
