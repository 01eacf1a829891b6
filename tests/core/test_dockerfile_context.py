"""Whether a Dockerfile takes files of the repository: when in doubt, it does."""

from __future__ import annotations

import pytest

from forge_core.dockerfile import analyse_dockerfile

BASE = "registry.example/base@sha256:" + "5" * 64


@pytest.mark.requirement("B-52")
@pytest.mark.parametrize(
    "lines",
    [
        "COPY . /app",
        "copy . /app",
        "COPY --chown=1000 . /app",
        "COPY --from= . /app",
        "COPY <<EOF /greeting\nhello\nEOF",
        "ADD code /app",
        "RUN --mount=target=/src make -C /src",
        "RUN --mount=type=bind,source=.,target=/src make -C /src",
        "RUN --mount=type=tmpfs,target=/t --mount=type=bind,target=/src make",
    ],
)
def test_it_takes_files(lines: str) -> None:
    assert analyse_dockerfile(f"FROM {BASE}\n{lines}\n".encode()).reads_context


@pytest.mark.requirement("B-52")
@pytest.mark.parametrize(
    "lines",
    [
        "",
        "RUN make",
        "ENV A=b",
        f"COPY --from={BASE} /bin /bin",
        f"COPY --chown=1000 --from={BASE} /bin /bin",
        f"RUN --mount=type=bind,from={BASE},target=/src make",
        "RUN --mount=type=tmpfs,target=/scratch make",
    ],
)
def test_it_takes_none(lines: str) -> None:
    assert not analyse_dockerfile(f"FROM {BASE}\n{lines}\n".encode()).reads_context
