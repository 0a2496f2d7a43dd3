"""Masks of grammars, applied to logits."""

import numpy as np
import pytest
import torch

from kvpage.grammar import TokenMasks
from tests.structured.stripes import packed


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("masked", [31, 32, 33, 250, 4096])
@pytest.mark.parametrize("width", [1, 32, 33, 251, 4096, 5000])
def test_a_mask_forbids_what_it_does_not_allow(width: int, masked: int, device: str) -> None:
    """Whatever the sizes of vocabulary and mask; a token beyond the mask is forbidden."""
    rng = np.random.default_rng(width * 10_000 + masked)
    allowed = rng.random((6, masked)) < 0.5
    masks = TokenMasks(np.array([1, 3, 4, 8, 9, 20]), np.stack([packed(row) for row in allowed]))
    logits = torch.from_numpy(rng.normal(size=(3, width)).astype(np.float32)).to(device)
    expected = np.full((3, width), -np.inf, np.float32)
    known = min(width, masked)
    chosen = allowed[[1, 4, 5], :known]
    expected[:, :known][chosen] = logits.cpu().numpy()[:, :known][chosen]
    masks.apply(logits, np.array([3, 9, 20]))
    np.testing.assert_array_equal(logits.cpu().numpy(), expected)


def test_the_rows_of_a_part_need_not_be_in_order() -> None:
    """Parts are sorted by kind of work, not by row."""
    masks = TokenMasks(np.array([2, 5]), np.stack([packed(np.arange(8) == n) for n in (3, 6)]))
    logits = torch.zeros(2, 8)
    masks.apply(logits, np.array([5, 2]))
    assert logits.argmax(dim=1).tolist() == [6, 3]
