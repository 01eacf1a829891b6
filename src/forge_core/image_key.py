"""The key of a built image: same key, same image, no build (sandbox.md, Images).

Everything that decides what a build gives is in it, and whose it is: two projects never share an
image, however alike their files are.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from forge_core.image_ports import BuildLimits

RECIPE: Final = 1
"""How inputs become an image; raise it when the same inputs give another one."""

_TREE: Final = b"040000 tree "


@dataclass(frozen=True, slots=True)
class ImageInputs:
    """All that goes into an image.

    :param contract: the bytes of the contract, exactly as committed; likewise ``dockerfile``.
    :param context_id: of all that is sent: :func:`context_id`, the id of the commit's whole tree
        where nothing is left out, or empty.
    :param sources: every external image, pinned by digest, in any order.
    :param tooling_image: pinned by digest.
    :param builder: :attr:`forge_core.image_ports.BuilderFacts.identity`.
    :param network: whether build steps have one.
    """

    trust_domain_id: str
    project_id: str
    contract: bytes
    dockerfile: bytes
    context_id: str
    sources: tuple[str, ...]
    tooling_image: str
    limits: BuildLimits
    builder: str
    network: bool


def image_key(inputs: ImageInputs) -> str:
    """64 hexadecimal digits; no two different inputs have the same encoding."""
    limits = inputs.limits
    return _digest(
        [
            RECIPE,
            inputs.trust_domain_id,
            inputs.project_id,
            hashlib.sha256(inputs.contract).hexdigest(),
            hashlib.sha256(inputs.dockerfile).hexdigest(),
            inputs.context_id,
            sorted(set(inputs.sources)),
            inputs.tooling_image,
            [limits.memory_bytes, limits.cpu_quota_us, limits.nofile, limits.pids],
            inputs.builder,
            inputs.network,
        ]
    )


def context_id(listing: bytes, excludes: Callable[[str], bool]) -> str:
    """What a build may see of a commit, as one digest.

    Mode, blob and path of every file that is sent, and the path of every directory; what
    ``.dockerignore`` leaves out changes nothing, so that a change of it does not build anew.

    :param listing: ``git ls-tree -r -t -z`` of the commit.
    :param excludes: :meth:`forge_core.dockerignore.Ignore.excludes`; asked once a path.
    """
    entries = []
    for entry in listing.split(b"\0"):
        head, _, name = entry.partition(b"\t")
        path = name.decode("utf-8", "surrogateescape")
        if path and not excludes(path):
            # The id of a directory is that of all that is in it, left out or not.
            kind = _TREE if head.startswith(_TREE) else head
            entries.append(f"{kind.decode()}\t{path}")
    return _digest(sorted(entries))


def _digest(material: list[object] | list[str]) -> str:
    """JSON lists of strings, numbers and lists are told apart whatever the strings hold."""
    return hashlib.sha256(json.dumps(material, separators=(",", ":")).encode()).hexdigest()
