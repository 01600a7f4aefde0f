"""Whether tensors are numbers, and how large: exactly, for each precision, wherever the odd one stands."""

from __future__ import annotations

import math

import pytest
import torch

from noloco_node.finite import all_finite, root_mean_square

LARGE = 3 * (1 << 18) + 5
"""Elements: more than one part, and a rest."""


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("many", [1, 17, 4096, LARGE])
def test_one_that_is_no_number_is_found_wherever_it_stands(dtype: torch.dtype, many: int) -> None:
    """NaN and both infinities; what adds up to more than the precision holds is finite all the same."""
    largest = torch.finfo(dtype).max
    for value in (0.0, largest, -largest):
        values = torch.full((many,), value, dtype=dtype)
        assert all_finite(values)
        for odd in (math.nan, math.inf, -math.inf):
            for place in {0, many // 2, many - 1}:
                spoilt = values.clone()
                spoilt[place] = odd
                assert not all_finite(spoilt)
    both = torch.tensor([math.inf, -math.inf], dtype=dtype)
    assert not all_finite(both)
    assert all_finite(torch.zeros(0, 3, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_root_mean_square_is_that_of_fp64(dtype: torch.dtype) -> None:
    """Ten times as near as one pass in fp32 comes with so many, and of any shape."""
    values = torch.randn(64, 1024, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    real = math.sqrt(float(values.double().square().mean()))
    assert root_mean_square(values) == pytest.approx(real, rel=8e-6)
    assert root_mean_square(values.transpose(0, 2)) == pytest.approx(real, rel=8e-6)
    assert root_mean_square(torch.zeros(0, dtype=dtype)) == 0.0


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_of_what_is_no_number_it_is_none(odd: float) -> None:
    """In whatever part; and fp32 does not hold the square of its own largest number."""
    values = torch.ones(LARGE)
    values[-1] = odd
    assert not math.isfinite(root_mean_square(values))
    assert not math.isfinite(root_mean_square(torch.full((2,), torch.finfo(torch.float32).max)))
