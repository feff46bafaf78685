"""Where the credentials of an `s3://` store come from."""

from __future__ import annotations

import configparser
import os
import re
import socket
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from skerry.runtime.logs import get_logger
from skerry.runtime.redaction import redacted
from skerry_syncer.store.errors import StoreURLError

_LOG: Final = get_logger(__name__)
_KEYS: Final = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")
# Variables of which any one names credentials that obstore takes by itself.
_SOURCES: Final = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_SKIP_SIGNATURE",
)
_ENDPOINTS: Final = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")  # the first that is set counts
_HOST: Final = re.compile(r"[\w.:-]+", re.ASCII)
_METADATA: Final = "http://169.254.169.254"  # of the machine itself, in every cloud that has it
_METADATA_TIMEOUT_S: Final = 1.0  # it is on the same host


def found_credentials() -> dict[str, str]:
    """Returns the options that obstore does not find by itself, and logs where the credentials come from.

    That is the environment, web identity, a container's role, the shared credentials file (with AWS_PROFILE), or the
    machine's role where it has a metadata service. May block for a second.

    Raises:
        StoreURLError: there are none; the message says what to set.
    """
    source = next(filter(os.environ.get, _SOURCES), None)
    if source is not None:
        _LOG.info("store credentials found", source=source)
        return {}
    shared = _shared()
    if not shared and not _has_metadata():
        raise StoreURLError(
            "there are no credentials for s3://: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE for "
            "one of the shared credentials file, or give the machine a role"
        )
    _LOG.info("store credentials found", source="shared file" if shared else "instance metadata")
    return shared


def checked_endpoint() -> str:
    """Returns the host of the S3 server that the environment names; "" for Amazon's.

    Raises:
        StoreURLError: it is no URL of a server, for which obstore panics.
    """
    name = next((name for name in _ENDPOINTS if name in os.environ), None)
    if name is None:
        return ""
    url = os.environ[name]
    try:
        parts = urlsplit(url)
        is_right = parts.scheme in {"http", "https"} and _HOST.fullmatch(parts.hostname or "") and parts.port != 0
    except ValueError:  # of the port, or of brackets
        is_right = False
    if not is_right or parts.query or parts.fragment or not url.isprintable():
        raise StoreURLError(
            f"the S3 server's address is a URL such as https://s3.example:9000. {name}={redacted(url)!r}"
        )
    return parts.hostname or ""


def _shared() -> dict[str, str]:
    path = Path(os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials").expanduser()
    parser = configparser.RawConfigParser()
    try:
        parser.read(path, encoding="utf-8")
        section = parser[os.environ.get("AWS_PROFILE") or "default"]
    except (configparser.Error, KeyError, OSError, UnicodeDecodeError):
        return {}
    keys = {name.removeprefix("aws_"): section[name] for name in _KEYS if name in section}
    return keys if {"access_key_id", "secret_access_key"} <= keys.keys() else {}


def _has_metadata() -> bool:
    if os.environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
        return False
    address = urlsplit(os.environ.get("AWS_METADATA_ENDPOINT") or _METADATA)
    try:
        socket.create_connection((address.hostname or "", address.port or 80), _METADATA_TIMEOUT_S).close()
    except OSError:
        return False
    return True
