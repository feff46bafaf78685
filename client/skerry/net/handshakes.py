"""Why a connection could not be made, where TLS is the reason: what gRPC reports, in words that say what to do."""

from __future__ import annotations

from typing import Final

from skerry.net.tls import Tls
from skerry.wire.identity import Identity, Role, is_of_client

# What gRPC's details contain, and what that means; the first that fits. gRPC 1.80 has the words of BoringSSL.
_MEANINGS: Final = {
    "certificate has expired": (
        "the server's certificate has expired: renew it with `skerry keys DIR --server HOST --renew`"
    ),
    "CERTIFICATE_VERIFY_FAILED": (
        "the server's certificate does not come from an authority that this client trusts: give --tls-ca the ca.pem "
        "that the server's certificate was made with"
    ),
    "Hostname Verification Check failed": (
        "the server's certificate is not valid for the host in --target: use a host that it names, or make one for "
        "this host with `skerry keys DIR --server HOST`"
    ),
    "WRONG_VERSION_NUMBER": (
        "the server does not use TLS and this client does: start `skerry serve` with --tls-cert and --tls-key, or "
        "leave out this client's TLS options. A --target that is not on this machine needs --insecure then (in Python "
        "tls='insecure'), if you trust every machine on the way"
    ),
    "Tls handshake failed": "the TLS handshake with the server failed",
}
_CLOSED: Final = ("Socket closed", "Connection reset by peer")
_REFUSED_CERTIFICATE: Final = (
    "the server closed the connection during the TLS handshake, as it does when it refuses the client's certificate: "
    "give --tls-cert and --tls-key files that the authority in the server's --tls-client-ca made and that have not "
    "expired"
)
_BEHIND_PROXY: Final = (
    "no connection could be made through the proxy that the environment names. If the target is reached without it, "
    "add its host to no_proxy"
)
_REFUSED_PLAINTEXT: Final = (
    "the server closed the connection before it answered. If it uses TLS, this client must too: give --tls-ca the "
    "server's ca.pem, and --tls-cert and --tls-key if it asks for a client certificate"
)


def check_certificate(tls: Tls, run: str, learner_id: str | None) -> None:
    """Checks that a learner's certificate is its own, where it was made for clients of Skerry.

    Raises:
        ValueError: no syncer would let the learner attach; the message says whose certificate it is.
    """
    uris = [uri for uri in tls.names() if is_of_client(uri)]
    if len(uris) != 1:
        return  # the syncer may take it for other reasons
    owner = Identity.parse(uris[0])
    if owner.role is Role.LEARNER and owner.name == learner_id and owner.run in ("", run):
        return
    raise ValueError(
        f"the certificate is another client's: give this learner the id and the run that it names, or make one for it "
        f"with `skerry keys`. cert={tls.cert}, names={owner}, learner_id={learner_id}, run={run}"
    )


def explain(details: str, *, has_tls: bool, proxy: str) -> tuple[str, str] | None:
    """Returns the reason and the message for gRPC's details of UNAVAILABLE; None without TLS and proxy.

    `proxy` names the proxy of the environment that the connection goes through.
    """
    # gRPC adds this text where a connection could not be made. A connection that breaks later is not a TLS problem.
    if "last error:" not in details:
        return None
    meaning = next((meaning for sign, meaning in _MEANINGS.items() if sign in details), "")
    if proxy and not meaning:
        return "UNREACHABLE", f"{_BEHIND_PROXY}. {proxy}, cause={details}"
    is_closed = any(sign in details for sign in _CLOSED)
    if has_tls and (meaning or is_closed):
        return "TLS_FAILED", f"{meaning or _REFUSED_CERTIFICATE}. cause={details}"
    return ("UNREACHABLE", f"{_REFUSED_PLAINTEXT}. cause={details}") if is_closed else None
