"""Same key, same image: what the key tells apart, and what it does not."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_core.dockerignore import Ignore
from forge_core.image_key import ImageInputs, context_id, image_key
from forge_core.image_ports import BuildLimits

LIMITS = BuildLimits(memory_bytes=4 << 30, cpu_quota_us=200_000, nofile=4096, pids=512)
INPUTS = ImageInputs(
    trust_domain_id="domain",
    project_id="project",
    contract=b"version: 1\n",
    dockerfile=b"FROM scratch\n",
    context_id="0" * 64,
    sources=("a@sha256:" + "1" * 64, "b@sha256:" + "2" * 64),
    tooling_image="tooling@sha256:" + "3" * 64,
    limits=LIMITS,
    builder="builder",
    network=False,
)
OTHER: dict[str, Any] = {
    "trust_domain_id": "domai",
    "project_id": "nproject",
    "contract": b"version: 1",
    "dockerfile": b"FROM scratch",
    "context_id": "1" * 64,
    "sources": INPUTS.sources[:1],
    "tooling_image": "tooling@sha256:" + "4" * 64,
    "limits": replace(LIMITS, pids=511),
    "builder": "another",
    "network": True,
}

texts = st.text(max_size=8)
inputs = st.builds(
    ImageInputs,
    trust_domain_id=texts,
    project_id=texts,
    contract=st.binary(max_size=8),
    dockerfile=st.binary(max_size=8),
    context_id=texts,
    sources=st.lists(texts, max_size=3, unique=True).map(sorted).map(tuple),
    tooling_image=texts,
    limits=st.builds(BuildLimits, *[st.integers(0, 3)] * 4),
    builder=texts,
    network=st.booleans(),
)


@pytest.mark.requirement("B-27")
@pytest.mark.parametrize("name", [field.name for field in fields(ImageInputs)])
def test_everything_that_decides_the_image_is_in_its_key(name: str) -> None:
    assert image_key(replace(INPUTS, **{name: OTHER[name]})) != image_key(INPUTS)


def test_every_limit_is_in_the_key() -> None:
    limits = [replace(LIMITS, **{field.name: 1}) for field in fields(BuildLimits)]
    assert len({image_key(replace(INPUTS, limits=other)) for other in (LIMITS, *limits)}) == 5


@given(inputs, inputs)
def test_two_inputs_have_one_key_only_when_they_are_the_same(
    one: ImageInputs, other: ImageInputs
) -> None:
    assert (image_key(one) == image_key(other)) == (one == other)


@given(st.permutations(INPUTS.sources))
def test_the_order_of_the_sources_and_their_repetition_say_nothing(sources: list[str]) -> None:
    again = replace(INPUTS, sources=(*sources, sources[0]))
    assert image_key(again) == image_key(INPUTS)


def listing(**files: str) -> bytes:
    """As ``git ls-tree -r -t -z`` has it; ``at_name`` lies in the directory ``at``."""
    lines = []
    for name, blob in files.items():
        directory, _, _ = name.rpartition("_")
        if directory:
            inside = "".join(b for n, b in files.items() if n.startswith(f"{directory}_"))
            lines.append(f"040000 tree {inside}\t{directory}\0")
        lines.append(f"100644 blob {blob}\t{name.replace('_', '/')}\0")
    return "".join(dict.fromkeys(lines)).encode()


@pytest.mark.requirement("B-52")
@pytest.mark.parametrize("at", ["", "at_"])
def test_the_context_is_what_is_sent_and_nothing_else(at: str) -> None:
    def context(**files: str) -> str:
        return context_id(listing(**{f"{at}{n}": b for n, b in files.items()}), ignore.excludes)

    ignore = Ignore.parse(b"**/notes\n")
    here = context(code="aa", notes="bb")
    assert context(code="aa", notes="cc") == here
    assert context(code="aa") == here
    assert context(code="ab", notes="bb") != here
    assert context(cod="aa", notes="bb") != here
    assert context(code="aa", more="aa") != here
    executable = listing(**{f"{at}code": "aa"}).replace(b"100644", b"100755")
    assert context_id(executable, ignore.excludes) != here


@pytest.mark.requirement("B-52")
def test_a_directory_is_sent_though_nothing_in_it_is() -> None:
    empty = listing(code="aa", at_notes="bb")
    sent, left_out = Ignore.parse(b"at/*\n"), Ignore.parse(b"at\n")
    assert context_id(empty, sent.excludes) != context_id(listing(code="aa"), sent.excludes)
    assert context_id(empty, sent.excludes) == context_id(
        listing(code="aa", at_notes="cc"), sent.excludes
    )
    assert context_id(empty, left_out.excludes) == context_id(listing(code="aa"), left_out.excludes)


def test_a_path_that_is_no_text_counts_too() -> None:
    one, other = (b"100644 blob aa\t\xff" + end + b"\0" for end in (b"1", b"2"))
    assert context_id(one, Ignore.parse(b"").excludes) != context_id(
        other, Ignore.parse(b"").excludes
    )
