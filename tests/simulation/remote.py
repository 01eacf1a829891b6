"""The simulated remote: branches that move by compare-and-swap, whoever asks, however late."""

from __future__ import annotations

from collections.abc import Callable

import anyio

from forge_core.errors import RefusedError
from forge_core.publication import Pushed, Remote, RemoteUnreachable, Seen

from .faults import Faults
from .world import World

URL = "https://remote.example/sample.git"
MAX_ON_THE_WAY_S = 30.0
"""How long a push may take to arrive, also when nobody waits for it any more."""


class SimulatedRemote:
    """Behind :class:`.git.SimulatedGit`; it outlives every process of the runner.

    :ivar branches: what each is at; a branch that is not here does not exist.
    :ivar moved: every push that moved a branch: branch, from, to.
    :ivar on_move: told of each before it happens.
    """

    def __init__(self, world: World, faults: Faults) -> None:
        self.branches: dict[str, str] = {}
        self.moved: list[tuple[str, str | None, str]] = []
        self.on_move: Callable[[str, str | None, str], None] = lambda *_: None
        self._world = world
        self._faults = faults
        self._rng = world.rng("remote")

    async def look(self, remote: Remote, branch: str) -> Seen:
        """What the branch is at; sometimes a human is faster just then."""
        await anyio.sleep(self._rng.uniform(0.05, 2.0))
        self._let_in(remote)
        seen = Seen(self.branches.get(branch))
        if self._rng.random() < self._faults.remote_human:
            self.branches[branch] = f"{self._rng.getrandbits(160):040x}"
            self._world.note("human", f"pushes to {branch}")
        return seen

    async def push(
        self, remote: Remote, branch: str, commit: str, expected: Seen, timeout_ms: int
    ) -> Pushed:
        """Move the branch if it is as expected; the answer may get lost, the push not."""
        await anyio.sleep(self._rng.uniform(0.05, 1.0))
        self._let_in(remote)
        answer: list[Pushed] = []
        arrived = anyio.Event()

        def arrive() -> None:
            answer.append(Pushed(self._move(branch, expected.commit, commit), "it moved meanwhile"))
            arrived.set()

        on_the_way_s = self._rng.uniform(0.05, 2.0)
        if self._rng.random() < self._faults.remote_slow:
            on_the_way_s = self._rng.uniform(2.0, MAX_ON_THE_WAY_S)
        self._world.later("world", on_the_way_s, arrive)
        is_lost = self._rng.random() < self._faults.remote_slow
        with anyio.move_on_after(timeout_ms / 1000):
            await (anyio.sleep_forever() if is_lost else arrived.wait())
            return answer[0]
        raise RemoteUnreachable("cannot push: no end in time")

    def _let_in(self, remote: Remote) -> None:
        assert remote.url == URL
        assert remote.credential.header
        if self._rng.random() < self._faults.remote_away:
            raise RemoteUnreachable("cannot reach the remote")
        if self._rng.random() < self._faults.remote_refuses:
            raise RefusedError("the remote does not let us in", code="remote_refused")

    def _move(self, branch: str, expected: str | None, commit: str) -> bool:
        if self.branches.get(branch) != expected:
            return False
        self.on_move(branch, expected, commit)
        self.moved.append((branch, expected, commit))
        self.branches[branch] = commit
        self._world.note("remote", f"moves {branch} to {commit}")
        return True
