"""Publications of which nobody knows: what is still to be looked for (B-64)."""

from __future__ import annotations

from collections import deque

import anyio

from forge_hub.dispatch.leases import Key


class Looks:
    """The dispatches whose publication is unknown; memory only, made again from the database."""

    def __init__(self) -> None:
        self._keys: deque[Key] = deque()
        self._held: set[Key] = set()
        self._added = anyio.Event()

    def add(self, key: Key) -> None:
        """Look for it, unless somebody does."""
        if key not in self._held:
            self._held.add(key)
            self._keys.append(key)
            self._added.set()

    def done(self, key: Key) -> None:
        """Nobody looks any more."""
        self._held.discard(key)

    async def next(self) -> Key:
        """The next one that nobody looks for yet."""
        while not self._keys:
            self._added = anyio.Event()
            await self._added.wait()
        return self._keys.popleft()
