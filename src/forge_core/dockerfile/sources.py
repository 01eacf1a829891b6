"""What names of sources in a Dockerfile mean to the builder."""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import unquote

from forge_core.errors import RefusedError
from forge_core.sandbox_spec import require_pinned, without_tag

_MAX_REFERENCE_CHARACTERS: Final = 512
_SCP_ADDRESS: Final = re.compile(r"[A-Za-z0-9_-]+@[A-Za-z0-9.-]+:")


def is_pinned(reference: str) -> bool:
    """Whether *reference* is ``repository@sha256:<64 hex>``, with a tag or without.

    The builder goes by the digest alone where both are given.
    """
    if len(reference) > _MAX_REFERENCE_CHARACTERS or "@" not in reference:
        return False
    try:
        require_pinned(without_tag(reference), field_name="image")
    except RefusedError:
        return False
    return True


def is_remote(source: str) -> bool:
    """Whether some version takes the source of an ``ADD`` for a URL or a Git repository.

    Some put ``https://`` in front of a path and then look whether it ends in ``.git``, which an
    escape of a URL may spell; only ``./`` and ``../`` stop them (BuildKit, util/gitutil).
    """
    if "://" in source or _SCP_ADDRESS.match(source):
        return True
    if source.startswith(("./", "../")):
        return False
    path = re.split("[?#]", source, maxsplit=1)[0]
    return unquote(path).rstrip("/").lower().endswith(".git")
