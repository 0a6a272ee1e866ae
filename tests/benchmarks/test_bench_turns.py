"""What turns share is told from what is new, and found in the cache."""

from __future__ import annotations

from bench_turns import make_command, turn_rows

from tests.helpers.text_model import save_text_model


def test_all_but_the_last_token_of_a_turn_is_cached(tmp_path) -> None:
    model = save_text_model(tmp_path, max_positions=512)
    options = make_command().parse(["--quick", "--model", str(model)])
    rows = {row.name: row for row in turn_rows(options)}
    assert rows["of what turns share, cached"].value == 1.0
    assert 0 < rows["of all prompt tokens, cached"].value < 1
    assert rows["prompt tokens of the last turn"].value > 2 * options.tokens
    assert rows["accept length of turns 2 and later"].value >= 1
    assert all(row.ok for row in rows.values())
