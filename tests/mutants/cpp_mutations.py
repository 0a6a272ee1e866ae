"""Edits of C++ sources, by their tokens, as clang-format spaces them."""

from __future__ import annotations

import re

from tests.mutants.edit import Edit

_EDITS: list[tuple[str, str, str]] = [
    ("comparison", r"(?<= )<(?= )", "<="),
    ("comparison", r"(?<= )<=(?= )", "<"),
    ("comparison", r"(?<= )>(?= )", ">="),
    ("comparison", r"(?<= )>=(?= )", ">"),
    ("comparison", r"(?<= )==(?= )", "!="),
    ("comparison", r"(?<= )!=(?= )", "=="),
    ("and/or", r"(?<= )&&(?= )", "||"),
    ("and/or", r"(?<= )\|\|(?= )", "&&"),
    ("arithmetic", r"(?<= )\+(?= )", "-"),
    ("arithmetic", r"(?<= )-(?= )", "+"),
    ("arithmetic", r"(?<= )\*(?= )", "+"),
    ("arithmetic", r"(?<= )\+=(?= )", "-="),
    ("arithmetic", r"(?<= )-=(?= )", "+="),
    ("negation", r"!(?=[\w(])", ""),
    ("constant", r"\btrue\b", "false"),
    ("constant", r"\bfalse\b", "true"),
    ("other call", r"\bstd::min\b", "std::max"),
    ("other call", r"\bstd::max\b", "std::min"),
]
_INTEGER = re.compile(r"(?<![\w.'\"])\d+(?![\w.'\"])")
_CALL = re.compile(r"^\s+([\w.:]|->)+\(.*\);$")
_NOT_CODE = re.compile(r"^\s*(#|//|static_assert|using|namespace|template)|\"")


def cpp_edits(content: bytes) -> list[Edit]:
    """Comments, directives, declarations of names and lines with texts are left alone."""
    edits: list[Edit] = []
    start = 0
    for number, raw in enumerate(content.splitlines(keepends=True), start=1):
        text = raw.decode("ascii", errors="replace").rstrip("\n")
        code = "" if _NOT_CODE.search(text) else text.partition("//")[0].rstrip()
        for operator, begin, end, replacement in _edits_of(code):
            edits.append(
                Edit(
                    operator,
                    start + begin,
                    start + end,
                    replacement.encode(),
                    number,
                    (number, number),
                )
            )
        start += len(raw)
    return edits


def _edits_of(code: str) -> list[tuple[str, int, int, str]]:
    found = [
        (operator, match.start(), match.end(), replacement)
        for operator, pattern, replacement in _EDITS
        for match in re.finditer(pattern, code)
    ]
    for match in _INTEGER.finditer(code):
        values = (int(match[0]) + 1, int(match[0]) - 1)
        found += [("constant", match.start(), match.end(), str(value)) for value in values]
    if _CALL.match(code):
        found.append(("removed statement", len(code) - len(code.lstrip()), len(code), ";"))
    return found
