"""The bitwise checks before all else: they pass where rows are invariant, and see where not."""

from __future__ import annotations

import gpu_smoke
import pytest
import torch


@pytest.mark.parametrize("check", ["attention", "sampler", "engine"])
def test_what_is_exact_on_the_cpu_passes(check: str) -> None:
    torch.manual_seed(0)
    rows = list(gpu_smoke.checked(check, gpu_smoke.CHECKS[check], "cpu"))
    assert len(rows) >= 2
    assert [row.name for row in rows if row.ok is not True] == []


def test_products_are_near_and_rows_that_rest_on_their_number_are_seen(monkeypatch) -> None:
    def by_count(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (x.float() @ weight.float().T + 1e-3 * (len(x) % 5 == 0)).to(x.dtype)

    monkeypatch.setattr(gpu_smoke, "matmul", by_count)
    near = list(gpu_smoke.checked("matmul", gpu_smoke.products, "cpu"))
    assert [row.ok for row in near] == [False, True]


def test_attention_that_rests_on_its_company_is_seen(monkeypatch) -> None:
    attention = gpu_smoke.paged_attention

    def by_company(q, keys, values, plan, scale):
        return attention(q, keys, values, plan, scale) * (1 + 0.1 * (len(plan.rows_B) > 2))

    monkeypatch.setattr(gpu_smoke, "paged_attention", by_company)
    rows = {row.name: row.ok for row in gpu_smoke.checked("", gpu_smoke.attention, "cpu")}
    assert {name.split(": ")[1] for name, ok in rows.items() if not ok} == {
        "rows in company, alone", "nodes in company, plain decoding",
    }  # fmt: skip


def test_a_check_that_fails_costs_no_other(capsys) -> None:
    def failing(device: str):
        yield gpu_smoke.differing("first", 0)
        raise RuntimeError("no such kernel")

    rows = list(gpu_smoke.checked("attention", failing, "cpu"))
    assert [(row.name, row.ok) for row in rows] == [
        ("bitwise, first", True), ("bitwise, attention", None),
    ]  # fmt: skip
    assert "no such kernel" in capsys.readouterr().err
