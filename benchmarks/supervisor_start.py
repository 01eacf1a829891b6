"""How long the supervisor takes to be ready, against the same interpreter doing nothing.

    python benchmarks/supervisor_start.py [--rounds 30] [--json]

Needs root (a PID namespace).  Absolute figures belong to the machine; the ratio is what to
compare.  The rounds of both are interleaved, so that a busy machine slows both alike.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from importlib import resources

UNSHARE = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
PYTHON = ("/usr/bin/python3", "-I", "-S", "-c")
SOURCE = resources.files("forge_supervisor").joinpath("supervisor.py").read_text("utf-8")
FLOOR = "import os; os.write(1, b'ready\\n')"


def ready_ms(source: str) -> float:
    """From the start of the process to its first line."""
    began = time.perf_counter()
    with subprocess.Popen(
        [*UNSHARE, *PYTHON, source], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin
        assert process.stdout
        line = process.stdout.readline()
        took_ms = (time.perf_counter() - began) * 1000
        assert b"ready" in line, line
        process.stdin.close()
    return took_ms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    floor, ours = [], []
    for _ in range(arguments.rounds):
        floor.append(ready_ms(FLOOR))
        ours.append(ready_ms(SOURCE))
    result = {
        "floorMs": round(statistics.median(floor), 1),
        "readyMs": round(statistics.median(ours), 1),
        "ratio": round(statistics.median(ours) / statistics.median(floor), 2),
        "rounds": arguments.rounds,
    }
    if arguments.json:
        print(json.dumps(result))
    else:
        print("interpreter alone {floorMs} ms, supervisor ready {readyMs} ms".format(**result))
        print("ratio {ratio} (median of {rounds} rounds)".format(**result))


if __name__ == "__main__":
    main()
