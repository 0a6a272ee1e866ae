from __future__ import annotations

import pytest
import torch

from rollout.ops.rms_norm import add_rms_norm, native, reference, rms_norm


def tolerance(dtype: torch.dtype) -> float:
    return 2e-6 if dtype is torch.float32 else 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize("width", [1, 8, 24, 80, 100, 576])
def test_rms_norm_is_the_reference(dtype: torch.dtype, width: int) -> None:
    torch.manual_seed(width)
    x, weight = torch.randn(7, width).to(dtype) * 3, torch.randn(width).to(dtype)
    assert native.supports(x)
    torch.testing.assert_close(
        rms_norm(x, weight, 1e-5),
        reference.rms_norm(x, weight, 1e-5),
        rtol=tolerance(dtype),
        atol=1e-6,
    )


def test_rms_norm_of_heads_inside_a_fused_row(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    qkv, weight = torch.randn(5, 15 * 64).to(dtype), torch.randn(64).to(dtype)
    heads = qkv[:, 128 : 128 + 9 * 64].view(5, 9, 64)
    out = rms_norm(heads, weight, 1e-6)
    assert out.is_contiguous()
    assert torch.equal(out, rms_norm(heads.contiguous(), weight, 1e-6))
    torch.testing.assert_close(
        out, reference.rms_norm(heads, weight, 1e-6), rtol=tolerance(dtype), atol=1e-6
    )


@pytest.mark.parametrize("shape", [(16,), (2, 3, 4, 16)])
def test_rms_norm_takes_any_number_of_dimensions(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(shape), torch.randn(16)
    assert torch.equal(
        rms_norm(x, weight, 1e-5), rms_norm(x.reshape(-1, 16), weight, 1e-5).view(shape)
    )


@pytest.mark.parametrize("width", [24, 576])
def test_add_rms_norm_is_the_reference(dtype: torch.dtype, width: int) -> None:
    torch.manual_seed(1)
    weight = torch.randn(width).to(dtype)
    x = torch.randn(6, 2 * width).to(dtype)[:, :width]
    residual = torch.randn(6, width).to(dtype)
    expected_residual = residual.clone()
    expected = reference.add_rms_norm(x, expected_residual, weight, 1e-5)
    out = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, expected_residual)
    torch.testing.assert_close(out, expected, rtol=tolerance(dtype), atol=1e-6)


def test_rows_do_not_depend_on_each_other(dtype: torch.dtype, set_threads) -> None:
    torch.manual_seed(2)
    x, weight = torch.randn(300, 576).to(dtype), torch.randn(576).to(dtype)
    set_threads(2)
    together = rms_norm(x, weight, 1e-5)
    set_threads(1)
    order = torch.randperm(300)
    assert torch.equal(together[order], rms_norm(x[order], weight, 1e-5))
    for row in range(5):
        assert torch.equal(together[row : row + 1], rms_norm(x[row : row + 1], weight, 1e-5))


def test_a_weight_of_another_width_is_refused() -> None:
    with pytest.raises(ValueError, match="weight_E"):
        rms_norm(torch.randn(2, 8), torch.randn(7), 1e-5)


def test_no_rows() -> None:
    assert rms_norm(torch.empty(0, 8), torch.ones(8), 1e-5).shape == (0, 8)


def test_a_weight_of_another_dtype_is_left_to_torch() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(3, 16).bfloat16(), torch.randn(16)
    assert not native.supports(x, weight)
    assert torch.equal(rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
