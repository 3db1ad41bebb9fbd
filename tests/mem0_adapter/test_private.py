"""mem0's private names: all of them are listed in one module, and the installed mem0 has them."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest

import inferscale_memory
from inferscale_memory.mem0_adapter.private import MEMBERS

PACKAGE = Path(inferscale_memory.__file__).parent
LISTED = {name for members in MEMBERS.values() for name in members}


def test_private_names_are_imported_from_mem0_in_one_module_alone() -> None:
    importing = {
        path.relative_to(PACKAGE).as_posix()
        for path, tree in modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "mem0"
        if any(is_private(alias.name) for alias in node.names)
    }
    assert importing == {"mem0_adapter/private.py"}


def test_private_members_of_mem0_are_used_only_if_they_are_listed() -> None:
    of_mem0 = set().union(*map(members_of, MEMBERS))
    used = {
        (path.relative_to(PACKAGE).as_posix(), node.attr)
        for path, tree in modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and not is_own(node)
        if node.attr in of_mem0 - LISTED
    }
    assert used == set()


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in MEMBERS for name in MEMBERS[kind]])
def test_the_installed_mem0_has_each_listed_member(kind: str, name: str) -> None:
    assert name in members_of(kind)


def modules() -> list[tuple[Path, ast.Module]]:
    return [(path, ast.parse(path.read_text(encoding="utf-8"))) for path in PACKAGE.rglob("*.py")]


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def is_own(attribute: ast.Attribute) -> bool:
    """Whether it belongs to the object or class whose method uses it."""
    return isinstance(attribute.value, ast.Name) and attribute.value.id in ("self", "cls")


def members_of(kind: str) -> set[str]:
    """Private methods of a class of mem0, and the attributes that its methods set."""
    module, _, name = kind.rpartition(".")
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    body = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    methods = {node.name for node in body.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    attributes = {
        node.attr
        for node in ast.walk(body)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node)
    }
    return {member for member in methods | attributes if is_private(member)}
