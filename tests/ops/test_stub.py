"""The committed stub is that of the compiled module."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import rollout.ops
from rollout.ops.extension import cpu

STUB = Path(rollout.ops.__file__).parent / "_cpu.pyi"


def parameters(definition: ast.stmt) -> list[str]:
    assert isinstance(definition, ast.FunctionDef)
    return [argument.arg for argument in definition.args.args]


def test_stub_has_the_functions_of_the_module() -> None:
    stub = ast.parse(STUB.read_text())
    expected = {d.name: parameters(d) for d in stub.body if isinstance(d, ast.FunctionDef)}
    compiled = {
        name: parameters(ast.parse(f"{member.__nb_signature__[0][0]}: ...").body[0])
        for name, member in inspect.getmembers(cpu)
        if hasattr(member, "__nb_signature__")
    }
    assert compiled == expected
