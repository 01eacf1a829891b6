"""Command line of the test bed."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lib import demo_engine
from lib.bed import DEFAULT_PARTS, PARTS, Bed
from lib.layout import BedError, Layout, say


def main(arguments: Sequence[str]) -> int:
    """Run one command.

    :returns: exit status: 0 done, 1 a part could not be started or stopped, 2 wrong usage,
        130 interrupted.
    """
    options = _parser().parse_args(arguments)
    os.umask(0o022)  # the rootless engines' users must get to their files
    bed = Bed(Layout.from_environment())
    try:
        return int(options.command(bed, options))
    except (BedError, OSError) as error:
        say(f"testbed: {error}")
        return 1
    except KeyboardInterrupt:
        say("testbed: interrupted")
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/testbed",
        description="Private Docker daemons, a registry and offline images for the tests.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    up = commands.add_parser("up", help="start what does not run; a second call does nothing")
    up.add_argument("--json", action="store_true", help="print the status as JSON")
    up.set_defaults(command=_up)
    down = commands.add_parser("down", help="stop everything; images and data stay")
    down.add_argument("--purge", action="store_true", help="remove data, users and cache too")
    down.set_defaults(command=_down)
    for command, default in ((up, DEFAULT_PARTS), (down, PARTS)):
        command.add_argument(
            "--parts",
            type=_parts,
            default=default,
            metavar="PART[,PART]",
            help=f"of {','.join(PARTS)}; default {','.join(default)}",
        )
    status = commands.add_parser("status", help="what runs, where, and what can be used")
    status.add_argument("--json", action="store_true", help="for programs")
    status.set_defaults(command=_status)
    env = commands.add_parser("env", help="the same as shell variables, for eval")
    env.set_defaults(command=_env)
    demo = commands.add_parser("demo-engine", help="one engine without networks, for the demo")
    demo.add_argument("action", choices=("up", "down"))
    demo.add_argument("--purge", action="store_true", help="with down: remove its data too")
    demo.set_defaults(command=_demo_engine)
    tooling = commands.add_parser(
        "tooling-image", help="put the tooling image into a running engine, print its id"
    )
    tooling.add_argument("--socket", type=Path, required=True, help="path of the unix socket")
    tooling.set_defaults(command=_tooling_image)
    return parser


def _parts(text: str) -> tuple[str, ...]:
    parts = tuple(part for part in text.split(",") if part)
    unknown = sorted(set(parts) - set(PARTS))
    if unknown or not parts:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of {', '.join(PARTS)}")
    return parts


def _up(bed: Bed, options: argparse.Namespace) -> int:
    errors = bed.up(options.parts)
    status = bed.status()
    for part, error in errors.items():
        say(f"testbed: {error}")
        status["engines"][part]["error"] = error
    _print_status(status, as_json=options.json)
    return 1 if errors else 0


def _down(bed: Bed, options: argparse.Namespace) -> int:
    if options.purge:
        bed.purge()
    else:
        bed.down(options.parts)
    return 0


def _status(bed: Bed, options: argparse.Namespace) -> int:
    _print_status(bed.status(), as_json=options.json)
    return 0


def _env(bed: Bed, options: argparse.Namespace) -> int:
    status = bed.status()
    variables = {"FORGE_TESTBED_REGISTRY": status["registry"]["address"]}
    variables["FORGE_TESTBED_DOCKER"] = status["docker_cli"]["executable"]
    variables["FORGE_TESTBED_DOCKER_CONFIG"] = status["docker_cli"]["config"]
    for name, image in status["images"].items():
        variables[f"FORGE_TESTBED_{name.upper()}_IMAGE"] = image["reference"]
    for part, engine in status["engines"].items():
        if engine["up"]:
            variables[f"FORGE_TESTBED_{part.upper()}"] = f"unix://{engine['socket']}"
    for name, value in variables.items():
        print(f"export {name}={shlex.quote(value)}")
    return 0


def _demo_engine(bed: Bed, options: argparse.Namespace) -> int:
    if options.action == "down" and demo_engine.is_gone(bed.layout, purge=options.purge):
        return 0
    demo_engine.become_root(sys.argv)
    if options.action == "up":
        print(json.dumps(demo_engine.up(bed.layout)))
    else:
        demo_engine.down(bed.layout, purge=options.purge)
    return 0


def _tooling_image(bed: Bed, options: argparse.Namespace) -> int:
    print(demo_engine.tooling_image(bed.layout, options.socket))
    return 0


def _print_status(status: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(status, indent=2))
        return
    registry = status["registry"]
    print(f"registry  {'up' if registry['up'] else 'down':5} {registry['address']}")
    for part, engine in status["engines"].items():
        if engine["up"]:
            kind = "rootless" if engine["rootless"] else "rootful"
            limits = "limits enforced" if engine["limits_enforced"] else "limits ignored"
            facts = f"Docker {engine['version']}, API {engine['api_version']}, {kind}, {limits}"
            print(f"{part:9} up    unix://{engine['socket']}  {facts}")
        else:
            print(f"{part:9} down  {engine.get('error', '')}".rstrip())
    for image in status["images"].values():
        print(f"image     {image['reference']}")
