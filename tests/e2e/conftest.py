"""What several of the tests on real parts share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from own_daemon import OwnDaemon


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnDaemon]:
    """An engine that the tests of one module may freeze and kill."""
    own = OwnDaemon(tmp_path_factory.mktemp("own"))
    yield own
    own.remove()
