"""Long JSON is read in chunks as the C parser reads it, and answers are always valid JSON."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from rollout.server import json_route
from rollout.server.json_route import Integers, json_bytes, loads_in_chunks

LONG = list(range(50_000, 51_000)) * 20  # more than is parsed at once


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks so small that their borders meet everything."""
    monkeypatch.setattr(json_route, "_CHUNK", 8)


def parsed(loads: Any, data: bytes) -> tuple[Any, Any]:
    """The value as text, for NaN is not itself; or the kind of error."""
    try:
        return json.dumps(loads(data)), None
    except (ValueError, RecursionError) as error:
        return None, type(error)


def random_value(randomness: random.Random, depth: int) -> Any:
    kind = randomness.randrange(10 if depth else 7)
    if kind == 0:
        return randomness.choice([None, True, False, 1e300, -0.5, float("inf"), float("-inf")])
    if kind == 1:
        return randomness.randint(-(10**20), 10**20)
    if kind < 4:
        return randomness.randint(-9, 99999)
    if kind < 7:
        alphabet = 'ab]}[{,:"\\ \n\té\U0001f600\ud800'
        return "".join(randomness.choices(alphabet, k=randomness.randrange(12)))
    count = randomness.randrange(6)
    if kind == 7:
        return {str(i): random_value(randomness, depth - 1) for i in range(count)}
    if kind == 8:
        return [randomness.randint(0, 50_000) for _ in range(2 * count)]
    return [random_value(randomness, depth - 1) for _ in range(count)]


@pytest.mark.usefixtures("small_chunks")
def test_chunks_are_read_and_refused_as_the_c_parser_does() -> None:
    randomness = random.Random(0)
    refused = 0
    for _ in range(3000):
        text = json.dumps(
            random_value(randomness, 4),
            ensure_ascii=randomness.random() < 0.5,
            indent=randomness.choice([None, 0, 2]),
        )
        data = text.encode("utf-8", "surrogatepass")
        assert parsed(loads_in_chunks, data) == parsed(json.loads, data)
        place = randomness.randrange(len(data))
        junk = bytes([randomness.choice(b'0123456789,,,]]}}[{":-.eE tn\\\xff')])
        wrong = data[:place] + junk + data[place + randomness.randrange(2) :]
        expected = parsed(json.loads, wrong)
        refused += expected[0] is None
        assert parsed(loads_in_chunks, wrong) == expected, wrong
    assert refused > 1000
    for text in (
        "[1,2,3,4,5,6,7,8,]", "[1,2,3,,4,5,6,7]", "[,1,2,3,4,5]", "[1 2,3,4,5,6]", "[         ]",
        "[         ", "[1,2,3,4,5,6,7", "[1,2,3,4,5,6,7,", "[123456789012345678,1]", "[01,2,3,4,5]",
        "[1,2,3,4]  [5]", '{"a":1,"b":[1,2],}', '{"a" 1.0e5}  ', '{1:2,     3:4}',
        "\ufeff[1,2,3,4,5]",
        "[1,2,3,4,-Infinity,NaN]", "[1,2,3,4,--5]", "1234567890.5", '"123456789', "",
        "[" * 100_000 + "]" * 100_000, f"[{'9' * 5000}]", f"[1,2,{'9' * 5000}, 3]",
    ):  # fmt: skip
        for encoding in ("utf-8", "utf-16", "utf-32-le"):
            data = text.encode(encoding)
            assert parsed(loads_in_chunks, data) == parsed(json.loads, data), text[:30]


@pytest.mark.usefixtures("small_chunks")
def test_arrays_of_integers_are_known_and_no_others() -> None:
    integers, mixed, nested = loads_in_chunks(
        b"[[1,2,3,4,5,6,7,8,9], [1,2,3,4,5,6,7.5,8,9,10], [[1,2,3,4],[true]]]"
    )
    assert type(integers) is Integers
    assert type(mixed) is type(nested) is type(nested[1]) is list
    assert type(nested[0]) is Integers


@pytest.mark.usefixtures("small_chunks")
def test_lists_and_objects_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes longer to make, and more memory, than the bytes that say it."""
    monkeypatch.setattr(json_route, "_MAX_CONTAINERS", 10)
    for few in (b"[" + b"[]," * 8 + b"{}]", b'{"a":[[1,2],[3]],"b":[{},{},{},{},{}]}'):
        assert loads_in_chunks(few) == json.loads(few)
    for many in (b"[" + b"[]," * 9 + b"{}]", b'{"a":' * 10 + b"[]" + b"}" * 10):
        with pytest.raises(ValueError, match="more than 10 lists and objects"):
            loads_in_chunks(many)


def test_answers_are_json_whatever_they_hold() -> None:
    for text in ("plain", "naïve 日本", "\ud800", "a\udfffb", '"\\\n\0', "\U0001f600"):
        written = json_bytes({text: [text]})
        written.decode("utf-8")  # strictly
        assert json.loads(written) == {text: [text]}
    value = {
        "a": float("nan"), "b": [1.5, (float("-inf"), float("inf"))], "c": "NaN",
        "d": np.float32(0.5), "e": [np.float64(1.5), np.int64(3)], "f": np.float64("nan"),
    }  # fmt: skip
    found = json.loads(json_bytes(value), parse_constant=pytest.fail)
    assert found == {
        "a": None, "b": [1.5, [None, None]], "c": "NaN", "d": 0.5, "e": [1.5, 3], "f": None,
    }  # fmt: skip
    with pytest.raises(TypeError):
        json_bytes({"a": object()})
