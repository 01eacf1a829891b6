"""Many seeds, some at the same time."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from .mutations import mutated
from .simulation import MAX_STEPS, Outcome, simulate

SEEDS_OF_ONE_PROCESS = 200
"""What a dead bridge has left is never run again, so it is not taken apart: its memory goes with
the process."""


@dataclass(frozen=True, slots=True)
class How:
    """What all the seeds have in common.

    :param mutation: a known bug to put in first.
    """

    faults: bool = True
    max_steps: int = MAX_STEPS
    mutation: str | None = None


def outcomes(seeds: Iterable[int], how: How, *, jobs: int, trace: bool) -> Iterator[Outcome]:
    """One outcome a seed, in their order; ``trace`` prints every line, from this process."""
    if trace:
        yield from (outcome(how, seed, trace=True) for seed in seeds)
        return
    # Not concurrent.futures, which can wait for ever for the successor of a process (gh-115634).
    spawning = multiprocessing.get_context("spawn")
    with spawning.Pool(jobs, maxtasksperchild=SEEDS_OF_ONE_PROCESS) as processes:
        yield from processes.imap(partial(outcome, how), seeds)


def outcome(how: How, seed: int, *, trace: bool = False) -> Outcome:
    """What came of one seed."""
    show = print if trace else None
    with mutated(how.mutation):
        return simulate(seed, faults=how.faults, max_steps=how.max_steps, show=show)
