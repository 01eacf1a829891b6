"""The certificates that agents trust where a proxy on the way looks into TLS.

The file lies beside the workspace, in a directory of root's: an agent reads it and cannot change
it.  Programs are told by the variables that they read; most of them then trust nothing else, so
the file must hold everything that is to be trusted.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import AsyncIterator
from typing import Final

from cryptography import x509

from forge_core.errors import RefusedError
from forge_core.sandbox_spec import WORKSPACE_VOLUME

MAX_CA_BYTES: Final = 1 << 20
CA_NAME: Final = "ca.pem"
CA_FILE: Final = f"{WORKSPACE_VOLUME}/{CA_NAME}"

_READ_BY: Final = (
    "SSL_CERT_FILE",  # OpenSSL, Go, Rust, Ruby
    "CURL_CA_BUNDLE",
    "GIT_SSL_CAINFO",
    "NODE_EXTRA_CA_CERTS",
    "PIP_CERT",
    "REQUESTS_CA_BUNDLE",
    "CARGO_HTTP_CAINFO",
    "AWS_CA_BUNDLE",
)


def trust_environment() -> dict[str, str]:
    """What makes programs trust the file."""
    return dict.fromkeys(_READ_BY, CA_FILE)


def require_certificates(content: bytes) -> bytes:
    """``content``, when it is one or more certificates in PEM.

    :raises RefusedError: code ``configuration``.
    """
    try:
        if len(content) <= MAX_CA_BYTES and x509.load_pem_x509_certificates(content):
            return content
        why = f"it has more than {MAX_CA_BYTES} bytes"
    except ValueError:
        why = "it holds no certificates in PEM"
    raise RefusedError(
        f"cannot use FORGE_SANDBOX_CUSTOM_CA: {why}",
        code="configuration",
        field="FORGE_SANDBOX_CUSTOM_CA",
    )


async def ca_archive(content: bytes) -> AsyncIterator[bytes]:
    """A tar of the file, readable by all and writable by nobody."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        entry = tarfile.TarInfo(CA_NAME)
        entry.size, entry.mode = len(content), 0o444
        tar.addfile(entry, io.BytesIO(content))
    yield buffer.getvalue()
