"""The committed stubs are those of the compiled modules."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def parameters(definition: ast.stmt) -> list[str]:
    assert isinstance(definition, ast.FunctionDef)
    return [argument.arg for argument in definition.args.args]


@pytest.mark.parametrize("name", ["rollout.ops._cpu", "rollout.parallel._exchange"])
def test_stub_has_the_functions_of_the_module(name: str) -> None:
    module = pytest.importorskip(name)
    stub = ast.parse((ROOT / name.replace(".", "/")).with_suffix(".pyi").read_text())
    classes = [each for each in stub.body if isinstance(each, ast.ClassDef)]
    pairs = [(module, stub.body), *((getattr(module, each.name), each.body) for each in classes)]
    for owner, body in pairs:
        compiled = {
            name: parameters(ast.parse(f"{member.__nb_signature__[0][0]}: ...").body[0])
            for name, member in inspect.getmembers(owner)
            if hasattr(member, "__nb_signature__")
        }
        assert compiled == {
            each.name: parameters(each)
            for each in body
            if isinstance(each, ast.FunctionDef)
            and "property" not in map(ast.unparse, each.decorator_list)
        }
