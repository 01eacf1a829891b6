"""The base image of a starter's Dockerfile, pinned by its digest."""

from __future__ import annotations

from typing import Final

from forge_core.dockerfile import sources
from forge_core.errors import EngineNotFound, RefusedError
from forge_core.ports import Engine
from forge_core.sandbox_spec import require_pinned
from forge_edges.buildx_policy import repository_of

_OPTION: Final = "--base"


def is_pinned(image: str) -> bool:
    """Whether ``image`` can stand in a Dockerfile as it is.

    :raises RefusedError: code ``malformed``: it has a digest, and is no usable reference.
    """
    if "@" not in image:
        return False
    return sources.is_pinned(image) or bool(require_pinned(image, field_name=_OPTION))


async def pinned_base(engine: Engine, image: str) -> str:
    """``repository@sha256:…`` of an image that the engine has, as its registry knows it.

    :param image: a name as the engine takes it, with or without a tag.
    :raises RefusedError: code ``malformed``: the engine does not have it, or it came from no
        registry, so that no other engine could find it.
    """
    try:
        inspected = await engine.inspect_image(image)
    except EngineNotFound:
        raise _unusable(
            image, f"the engine does not have it; docker pull {image}, or write it with its digest"
        ) from None
    digests = [str(digest) for digest in inspected.get("RepoDigests") or ()]
    named = [digest for digest in digests if repository_of(digest) == repository_of(image)]
    if not digests:
        raise _unusable(image, "it came from no registry, so no other engine could find it")
    return require_pinned((named or digests)[0], field_name=_OPTION)


def _unusable(image: str, why: str) -> RefusedError:
    return RefusedError(f"cannot build on {image[:200]}: {why}", code="malformed", field=_OPTION)
