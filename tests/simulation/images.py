"""What no attempt of the simulation needs: its projects have no contract."""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Mapping, Sequence

from forge_core.image_ports import BuilderFacts, BuildRequest, BuiltImage, Evidence, EvidenceReader
from forge_core.image_retention import CachedImage, KeptEvidence


class NoBuilds:
    """:class:`forge_core.image_ports.ImageBuilder` and ``ImageGates``: nobody may ask."""

    async def facts(self) -> BuilderFacts:
        """Nobody may ask."""
        raise AssertionError

    async def build(
        self,
        request: BuildRequest,
        context: AsyncIterable[bytes],
        *,
        on_output: Callable[[bytes], None],
    ) -> str:
        """Nobody may ask."""
        raise AssertionError(request)

    async def prune_cache(self, *, keep_bytes: int, free_bytes: int) -> None:
        """There is no cache."""

    async def before_build(self, sources: Sequence[str]) -> None:
        """Nobody may ask."""
        raise AssertionError(sources)

    async def after_build(self, image: BuiltImage) -> Sequence[Evidence]:
        """Nobody may ask."""
        raise AssertionError(image)

    async def before_use(self, image_id: str, read: EvidenceReader) -> None:
        """Nobody may ask."""
        raise AssertionError(image_id)


class NoImages:
    """The records of images, of which there are none."""

    images: Mapping[str, CachedImage] = {}

    async def load(self) -> None:
        """Nothing is there."""

    async def put(self, *record: object) -> None:
        """Nothing is built."""
        raise AssertionError(record)

    put_set = put

    async def read(self, image_key: str) -> Sequence[Evidence]:
        """Nothing is there."""
        raise AssertionError(image_key)

    async def kept(self) -> Sequence[KeptEvidence]:
        """Nothing is there."""
        return ()

    async def remove(self, image_key: str) -> None:
        """Nothing is there."""
        raise AssertionError(image_key)
