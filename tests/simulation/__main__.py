"""``python -m tests.simulation``: many seeds, or one with its trace."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from .many import How, outcomes
from .mutations import MUTATIONS
from .simulation import MAX_STEPS


def main() -> int:
    """The exit status: 1 when an invariant was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="how many (default 100)")
    parser.add_argument("--first", type=int, default=1, help="the first one (default 1)")
    parser.add_argument(
        "--steps", type=int, default=MAX_STEPS, help=f"the most of one seed (default {MAX_STEPS})"
    )
    parser.add_argument("--calm", action="store_true", help="without any fault")
    parser.add_argument("--trace", action="store_true", help="print every line of the trace")
    parser.add_argument("--mutate", choices=sorted(MUTATIONS), help="put a known bug in first")
    parser.add_argument("--jobs", type=int, default=1, help="seeds at the same time (default 1)")
    options = parser.parse_args()
    began = time.monotonic()
    steps, virtual_s, lives, broken = 0, 0.0, 0, []
    ends: Counter[str] = Counter()
    seeds = range(options.first, options.first + options.seeds)
    how = How(not options.calm, options.steps, options.mutate)
    for outcome in outcomes(seeds, how, jobs=options.jobs, trace=options.trace):
        steps += outcome.steps
        virtual_s += outcome.virtual_s
        lives += outcome.lives
        ends.update(outcome.ends)
        if outcome.violations:
            broken.append(outcome.seed)
            if not options.trace:
                print("\n".join(outcome.tail[-60:]))
            print(f"seed {outcome.seed} is broken: {'; '.join(outcome.violations)}\n")
    print("dispatches:", ", ".join(f"{count} {end}" for end, count in ends.most_common()))
    elapsed_s = time.monotonic() - began
    print(
        f"{options.seeds} seeds, {steps} steps, {lives} lives of the bridge,"
        f" {virtual_s / 3600:.1f} simulated hours in {elapsed_s:.1f} s; broken: {broken or 'none'}"
    )
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
