"""Every error that can reach a person has one home, one code and one class behind that code."""

from __future__ import annotations

import ast
from pathlib import Path

import swarm
from swarm import errors
from swarm.errors import ERROR_BY_CODE, SwarmError

ROOT = Path(swarm.__file__).parent.parent


def all_errors() -> list[type[SwarmError]]:
    return [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, SwarmError)]


def test_every_error_of_the_four_packages_is_defined_in_one_module() -> None:
    known = {error.__name__ for error in all_errors()}
    elsewhere = [
        f"{path.relative_to(ROOT)}: {node.name}"
        for package in ("client", "scheduler", "stage_server", "swarm")
        for path in (ROOT / package).rglob("*.py")
        if path != Path(errors.__file__)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef) and known & {ast.unparse(base).rpartition(".")[2] for base in node.bases}
    ]
    assert elsewhere == []


def test_no_two_errors_share_a_code_of_their_own() -> None:
    codes = [error.code for error in all_errors() if "code" in vars(error)]
    assert len(codes) == len(set(codes))
    assert ERROR_BY_CODE.keys() == set(codes)


def test_every_error_can_be_made_from_what_crosses_a_connection() -> None:
    for error in ERROR_BY_CODE.values():
        assert str(error("it broke", hint="mend it")) == "it broke (mend it)"
