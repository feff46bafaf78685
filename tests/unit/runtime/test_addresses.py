"""Addresses of syncers: what can be one, and what is refused by name."""

from __future__ import annotations

import pytest

from skerry.runtime.addresses import client_address, is_store, server_address, split_targets


@pytest.mark.parametrize("target", ["", "a:1,", ",", "a:1,,b:2"])
def test_an_empty_target_is_refused(target: str) -> None:
    with pytest.raises(ValueError, match="a target is empty"):
        split_targets(target)
    assert split_targets(" a:1 , b:2") == ("a:1", "b:2")


def test_the_url_of_a_store_is_a_target_of_its_own() -> None:
    for url in ("s3://bucket/a,b", "file:///srv/run", "file://run", "gs://bucket", "az://container/run"):
        assert is_store(url)
        assert split_targets(f" {url} ") == (url,)
    for other in ("s3://", "memory://", "https://a:443", "dns:///a:443", "unix:/run/socket", "a:443,s3://bucket"):
        assert not is_store(other)


_WRONG = (
    "127.0.0.1 localhost :1 127.0.0.1: 127.0.0.1:65536 127.0.0.1:105585 127.0.0.1:-1 127.0.0.1:1_0 127.0.0.1:٣ "
    "127.0.0.1:http http://127.0.0.1:1 127.0.0.1:1/path user@syncer.example:443 127.0.0.256:1 1.2.3:1 ::1:443 [::1] "
    "[::1 [127.0.0.1]:1 []:1 -a.example:1 a..example:1"
)


@pytest.mark.parametrize("address", [*_WRONG.split(), "sync er:443", "a\n:1", "a" * 64 + ":1", "a:" + "9" * 10_000])
def test_an_address_that_can_not_be_right_is_refused_and_named(address: str) -> None:
    for parse in (split_targets, client_address, server_address):
        with pytest.raises(ValueError, match=r"address=") as caught:
            parse(address)
        assert len(str(caught.value).splitlines()) == 1


def test_only_a_server_may_have_port_0() -> None:
    assert server_address("127.0.0.1:0") == ("127.0.0.1", 0)
    with pytest.raises(ValueError, match="a port from 1 to 65535"):
        client_address("127.0.0.1:0")


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1:50051", ("127.0.0.1", 50051)),
        ("syncer.example:443", ("syncer.example", 443)),
        ("skerry_syncer_1:65535", ("skerry_syncer_1", 65535)),
        ("a.example.:1", ("a.example.", 1)),
        ("[2001:db8::1]:443", ("2001:db8::1", 443)),
        ("dns:///syncer.example:443", ("syncer.example", 443)),
        ("dns://9.9.9.9/syncer.example:443", ("syncer.example", 443)),
        ("ipv6:[::1]:443", ("::1", 443)),
        ("unix:/run/skerry.sock", None),
        ("unix:///run/skerry.sock", None),
    ],
)
def test_an_address_of_any_kind_that_grpc_takes_is_read(address: str, expected: tuple[str, int] | None) -> None:
    assert client_address(address) == expected
