"""Keeps tests and campaigns on this machine: nobody's own credentials, and no server but the one that a test names."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from typing import Final

_NOWHERE: Final = "http://127.0.0.1:9"  # the port of "discard", where nothing listens
# IDENTITY_ENDPOINT is Azure's metadata service.
_PREFIXES: Final = ("AWS_", "GOOGLE_", "GCE_", "CLOUDSDK_", "AZURE_", "AZURITE_", "IDENTITY_", "SERVICE_ACCOUNT")


def stay_here(environment: MutableMapping[str, str] = os.environ) -> None:
    """Replaces all that the environment says of clouds; child processes inherit it. Idempotent."""
    for name in [name for name in environment if name.startswith(_PREFIXES)]:
        del environment[name]
    environment.update(
        AWS_ACCESS_KEY_ID="testing",
        AWS_SECRET_ACCESS_KEY="testing",
        AWS_EC2_METADATA_DISABLED="true",
        AWS_METADATA_ENDPOINT=_NOWHERE,
        AWS_SHARED_CREDENTIALS_FILE=os.devnull,
        AWS_CONFIG_FILE=os.devnull,
        AWS_ENDPOINT=_NOWHERE,
        AWS_ENDPOINT_URL=_NOWHERE,
        AWS_ALLOW_HTTP="true",
        GOOGLE_BEARER_TOKEN="testing",
        GOOGLE_BASE_URL=_NOWHERE,
        GCE_METADATA_HOST="127.0.0.1:9",
        GCE_METADATA_IP="127.0.0.1:9",
        CLOUDSDK_CONFIG=os.devnull,
        AZURE_STORAGE_ACCOUNT_NAME="testing",
        AZURE_STORAGE_ACCOUNT_KEY="dGVzdGluZw==",
        AZURE_STORAGE_ENDPOINT=_NOWHERE,
        IDENTITY_ENDPOINT=_NOWHERE,
    )
