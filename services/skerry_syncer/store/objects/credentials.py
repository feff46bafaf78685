"""Where the credentials of a bucket come from, by each cloud's own names."""

from __future__ import annotations

import configparser
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from skerry.runtime.logs import get_logger
from skerry.runtime.redaction import redacted
from skerry_syncer.store.errors import StoreURLError
from skerry_syncer.store.objects.interface import read_json

_LOG: Final = get_logger(__name__)
_KEYS: Final = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")
_GOOGLE_SCOPE: Final = "https://www.googleapis.com/auth/devstorage.read_write"
_HOST: Final = re.compile(r"[\w.:-]+", re.ASCII)
_METADATA_TIMEOUT_S: Final = 1.0  # the service is on the same host


class Cloud(NamedTuple):
    """What one cloud calls its settings."""

    sources: tuple[str, ...]  # variables of which any one names credentials that obstore takes by itself
    shared: Callable[[], dict[str, Any]]  # obstore's options for the credentials of a file, if there is one
    metadata: tuple[str, str]  # the variable of the metadata service's address, and the address without it
    credentials_advice: str
    endpoints: tuple[str, ...]  # variables of another server's URL; the first that is set counts
    settings_advice: str


def found_credentials(scheme: str) -> dict[str, Any]:
    """Returns the options that obstore does not find by itself, and logs where the credentials come from.

    That is the environment, including workload identity; then the file of the cloud's own tools; then the role of the
    machine, where it has a metadata service. Credentials with an end are renewed before it. May block for a second.

    Raises:
        StoreURLError: there are none; the message says what to set.
    """
    cloud = CLOUDS[scheme]
    source, options = next(filter(os.environ.get, cloud.sources), ""), {}
    if not source and (options := cloud.shared()):
        source = "shared file"
    if not source and not _has_metadata(*cloud.metadata):
        raise StoreURLError(f"there are no credentials for {scheme}://: {cloud.credentials_advice}")
    _LOG.info("store credentials found", source=source or "instance metadata")
    return options


def checked_endpoint(scheme: str) -> str:
    """Returns the host of the server that the environment names; "" for the cloud's own.

    Raises:
        StoreURLError: it is no URL of a server, for which obstore panics.
    """
    name = next((name for name in CLOUDS[scheme].endpoints if name in os.environ), None)
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
            f"the store's server has a URL such as https://storage.example:9000. {name}={redacted(url)!r}"
        )
    return parts.hostname or ""


def _aws_file() -> dict[str, Any]:
    path = Path(os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials").expanduser()
    parser = configparser.RawConfigParser()
    try:
        parser.read(path, encoding="utf-8")
        section = parser[os.environ.get("AWS_PROFILE") or "default"]
    except (configparser.Error, KeyError, OSError, UnicodeDecodeError):
        return {}
    keys = {name.removeprefix("aws_"): section[name] for name in _KEYS if name in section}
    return keys if {"access_key_id", "secret_access_key"} <= keys.keys() else {}


def _google_file() -> dict[str, Any]:
    named = os.environ.get("GOOGLE_APPLICATION_CREDENTIALS")
    folder = Path(os.environ.get("CLOUDSDK_CONFIG") or "~/.config/gcloud").expanduser()
    path = Path(named) if named else folder / "application_default_credentials.json"
    if not named and not path.exists():
        return {}
    try:
        settings = read_json(path.read_bytes(), dict[str, Any])
        if settings.get("type") in {"service_account", "authorized_user"}:
            return {"application_credentials": str(path)}
        return {"credential_provider": _google_tokens()}
    except ImportError as error:
        raise StoreURLError(f"Google's credentials need `pip install 'skerry[gcs]'`. path={path}") from error
    except (OSError, ValueError) as error:
        raise StoreURLError(f"Google's credentials can't be used: {error}. path={path}") from error


def _google_tokens() -> Any:
    """Returns what obstore itself does not know: workload identity federation, impersonated service accounts."""
    from google.auth import credentials, default
    from google.auth.exceptions import GoogleAuthError
    from obstore.auth.google import GoogleCredentialProvider

    try:
        unscoped, _ = default()  # with a scope it would ask Google for the name of the project
    except GoogleAuthError as error:
        raise ValueError(error) from error
    return GoogleCredentialProvider(credentials.with_scopes_if_required(unscoped, [_GOOGLE_SCOPE]))


def _has_metadata(variable: str, address: str) -> bool:
    if variable.startswith("AWS_") and os.environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
        return False
    url = urlsplit(os.environ.get(variable) or address)
    url = url if url.hostname else urlsplit(f"//{url.geturl()}")  # Google's variable is a host and a port
    try:
        socket.create_connection((url.hostname or "", url.port or 80), _METADATA_TIMEOUT_S).close()
    except OSError:
        return False
    return True


CLOUDS: Final = {
    "s3": Cloud(
        sources=(
            "AWS_ACCESS_KEY_ID",
            "AWS_WEB_IDENTITY_TOKEN_FILE",
            "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
            "AWS_CONTAINER_CREDENTIALS_FULL_URI",
            "AWS_SKIP_SIGNATURE",
        ),
        shared=_aws_file,
        metadata=("AWS_METADATA_ENDPOINT", "http://169.254.169.254"),
        credentials_advice="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE for one of the shared "
        "credentials file, or give the machine a role",
        endpoints=("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
        settings_advice="AWS_REGION sets the region, and AWS_ENDPOINT_URL the server",
    ),
    "gs": Cloud(
        sources=(
            "GOOGLE_SERVICE_ACCOUNT",
            "GOOGLE_SERVICE_ACCOUNT_PATH",
            "GOOGLE_SERVICE_ACCOUNT_KEY",
            "SERVICE_ACCOUNT",
            "GOOGLE_BEARER_TOKEN",
        ),
        shared=_google_file,
        metadata=("GCE_METADATA_HOST", "http://metadata.google.internal"),
        credentials_advice="set GOOGLE_APPLICATION_CREDENTIALS to a credentials file, or run `gcloud auth "
        "application-default login`, or give the machine a service account",
        endpoints=("GOOGLE_BASE_URL",),
        settings_advice="GOOGLE_BASE_URL sets the server, and GOOGLE_SERVICE_ACCOUNT or SERVICE_ACCOUNT a key file",
    ),
    "az": Cloud(
        sources=(
            "AZURE_STORAGE_ACCOUNT_KEY",
            "AZURE_STORAGE_ACCESS_KEY",
            "AZURE_STORAGE_MASTER_KEY",
            "AZURE_STORAGE_SAS_TOKEN",
            "AZURE_STORAGE_SAS_KEY",
            "AZURE_STORAGE_TOKEN",
            "AZURE_FEDERATED_TOKEN_FILE",
            "AZURE_STORAGE_CLIENT_SECRET",
            "AZURE_CLIENT_SECRET",
            "AZURE_USE_AZURE_CLI",
            "AZURE_STORAGE_USE_EMULATOR",
        ),
        shared=dict,
        metadata=("IDENTITY_ENDPOINT", "http://169.254.169.254"),
        credentials_advice="set AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN; or AZURE_TENANT_ID, "
        "AZURE_CLIENT_ID and one of AZURE_CLIENT_SECRET and AZURE_FEDERATED_TOKEN_FILE; or AZURE_USE_AZURE_CLI=true "
        "after `az login`; or give the machine a managed identity",
        endpoints=("AZURITE_BLOB_STORAGE_URL", "AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
        settings_advice="AZURE_STORAGE_ACCOUNT_NAME sets the account, and AZURE_STORAGE_ENDPOINT the server",
    ),
}
