"""docs/requirements.md: which test shows which requirement, from the tests' own marks.

The tests are parsed, not run: a mark is ``pytest.mark.requirement("B-12", …)`` as a decorator of
a function or a class, in a module's ``pytestmark``, or in the ``marks`` of a parameter.
"""

from __future__ import annotations

import ast
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from .reference_markdown import code, page

_INTRODUCTION = """\
Each row with the tests that show it; a row with a dash has none yet, and *in part* says what is
missing. A test here fails when the behaviour is removed: see
[CONTRIBUTING.md](../CONTRIBUTING.md)."""

_TITLES = {"bridge": "The bridge", "execution": "Isolated execution"}


def requirement_titles(root: Path) -> dict[str, dict[str, str]]:
    """Section → row → title, and under ``partial`` row → what is missing."""
    with (root / "docs/requirements.toml").open("rb") as file:
        return tomllib.load(file)


def requirements_page(root: Path) -> str:
    """The page."""
    shown, titles = marked_tests(root / "tests"), requirement_titles(root)
    missing = titles["partial"]
    sections = []
    for section, heading in _TITLES.items():
        rows = titles[section]
        whole = sum(1 for row in rows if row in shown and row not in missing)
        part = sum(1 for row in rows if row in shown and row in missing)
        summary = f"Of {len(rows)} rows, tests show {whole} whole and {part} in part."
        sections.append(f"## {heading}\n\n{summary}")
        for row, title in rows.items():
            lacks = f" *In part: {missing[row]}.*" if row in missing else ""
            sections.append(_row(row, f"{title}.{lacks}", shown.get(row, set())))
    return page("Requirements", _INTRODUCTION, *sections)


def marked_tests(tests: Path) -> dict[str, set[tuple[str, str]]]:
    """Row → (file below ``tests``, test)."""
    shown: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for file in sorted(tests.rglob("test_*.py")):
        name = file.relative_to(tests).as_posix()
        for test, rows in _marks(ast.parse(file.read_text("utf-8"), str(file))):
            for row in rows:
                shown[row].add((name, test))
    return dict(shown)


def _row(row: str, title: str, tests: set[tuple[str, str]]) -> str:
    by_file: dict[str, list[str]] = defaultdict(list)
    for file, test in sorted(tests):
        by_file[file].append(code(test))
    lines = [f"- [{file}](../tests/{file}): {', '.join(names)}" for file, names in by_file.items()]
    return "\n".join([f"### {row}", "", title, "", *(lines or ["—"])])


def _marks(module: ast.Module) -> Iterator[tuple[str, set[str]]]:
    common: set[str] = set()
    for node in module.body:
        if isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == "pytestmark" for target in node.targets
        ):
            common |= _rows_in(node.value)
    for node in module.body:
        if isinstance(node, ast.ClassDef):
            of_class = common | _decorated(node)
            for member in node.body:
                yield from _of_test(member, of_class, f"{node.name}.")
        else:
            yield from _of_test(node, common, "")


def _of_test(node: ast.stmt, common: set[str], prefix: str) -> Iterator[tuple[str, set[str]]]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test"):
        yield f"{prefix}{node.name}", common | _decorated(node)


def _decorated(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    return set().union(*(_rows_in(decorator) for decorator in node.decorator_list))


def _rows_in(expression: ast.expr) -> set[str]:
    """The rows of every ``….mark.requirement(…)`` anywhere in an expression."""
    return {
        argument.value
        for call in ast.walk(expression)
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr == "requirement"
        for argument in call.args
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
    }
