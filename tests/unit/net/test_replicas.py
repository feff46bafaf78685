"""Which proxy of the environment a target is called through."""

from __future__ import annotations

import pytest

from skerry.net.replicas import proxy_of


@pytest.mark.parametrize(
    ("target", "proxy"),
    [
        ("syncer.test:50051", "http_proxy=http://***@proxy.test:3128"),
        ("10.0.0.1:50051", "http_proxy=http://***@proxy.test:3128"),
        ("inside.example:50051", ""),
        ("localhost:50051", ""),
        ("127.0.0.2:50051", ""),
        ("[::1]:50051", ""),
        ("unix:/run/skerry.sock", ""),
    ],
)
def test_only_a_target_elsewhere_has_a_proxy(monkeypatch: pytest.MonkeyPatch, target: str, proxy: str) -> None:
    for name in ("grpc_proxy", "https_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://me:secret@proxy.test:3128")
    monkeypatch.setenv("no_proxy", ".example")
    assert proxy_of(target) == proxy
