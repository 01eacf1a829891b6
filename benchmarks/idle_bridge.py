"""What a bridge costs that has nothing to do: resident memory, and CPU while it heartbeats.

    python benchmarks/idle_bridge.py [--engine d26] [--seconds 30] [--json]

A hub and a bridge run as processes of their own, against an engine of the test bed.  After one
attempt has gone through (so that everything lazy is loaded) the bridge is left alone.  The floor
is an interpreter that has imported the same third-party libraries and sleeps.  Goals: < 80 MiB,
< 1 % of a core.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from engines import TestBed
from rig import running_rig, wait_for

FLOOR = """
import aiohttp, anyio, cryptography, docker, orjson, pydantic, pydantic_settings, pysignalr
import structlog, typer, websockets, sys
print("ready", flush=True)
sys.stdin.read()
"""


def resident_mib(pid: int) -> float:
    """VmRSS of proc_pid_status(5)."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise AssertionError(pid)


def cpu_seconds(pid: int) -> float:
    """utime + stime of proc_pid_stat(5)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def floor_mib() -> float:
    """The libraries alone."""
    command = [sys.executable, "-c", FLOOR]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        size = resident_mib(process.pid)
        process.communicate(b"")
    return size


def measure(engine: str, seconds: float) -> dict[str, float]:
    """The bridge after its one attempt, for that long; what it starts of the test bed goes."""
    bed = TestBed.bring_up((engine,))
    try:
        with (
            tempfile.TemporaryDirectory() as directory,
            running_rig(Path(directory), bed.engine(engine), "benchmark-idle") as rig,
        ):
            rig.wait_over(rig.dispatch("true"))
            before, began = cpu_seconds(rig.bridge.pid), time.monotonic()
            wait_for("the time to pass", lambda: time.monotonic() - began > seconds, 3600)
            spent = cpu_seconds(rig.bridge.pid) - before
            percent = 100 * spent / (time.monotonic() - began)
            resident = resident_mib(rig.bridge.pid)
    finally:
        problem = bed.take_down()
    assert not problem, problem
    floor = floor_mib()
    return {
        "residentMiB": round(resident, 1),
        "floorMiB": round(floor, 1),
        "ratio": round(resident / floor, 2),
        "cpuPercent": round(percent, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--engine", default="d26")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = measure(options.engine, options.seconds)
    if options.json:
        print(json.dumps(found))
        return
    print(
        f"idle bridge: {found['residentMiB']} MiB resident ({found['ratio']} x its libraries "
        f"alone), {found['cpuPercent']} % of a core"
    )


if __name__ == "__main__":
    main()
