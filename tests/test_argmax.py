"""`likeliest` is argmax, ties and odd sizes included; `most_likely` is topk."""

import pytest
import torch

from hf_specdec.verify.acceptance import CHUNK, FEW, likeliest, most_likely


@pytest.mark.parametrize("size", [1, 2, CHUNK, 2 * CHUNK, 2 * CHUNK + 1, 3 * CHUNK - 1, 5 * CHUNK + 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_argmax(size, dtype):
    scores = torch.randn(3, 4, size, generator=torch.Generator().manual_seed(size)).to(dtype)
    expected = torch.tensor(scores.float().numpy().argmax(-1))
    assert torch.equal(likeliest(scores), expected)


@pytest.mark.parametrize("rows", [1, FEW, FEW + 1, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("places", [[0, 1], [5, CHUNK + 3], [CHUNK - 1, CHUNK], [2 * CHUNK + 1, 3 * CHUNK]])
def test_the_first_of_equals_wins(places, dtype, rows):
    scores = torch.zeros(rows, 3 * CHUNK + 1, dtype=dtype)
    scores[:, places] = 2.0
    assert likeliest(scores).tolist() == [places[0]] * rows
    assert most_likely(scores, 1)[0].tolist() == [places[0]] * rows


@pytest.mark.parametrize("rows", [2, FEW + 1])
def test_minus_infinity_everywhere_but_once(rows):
    scores = torch.full((rows, 4 * CHUNK + 5), float("-inf"))
    scores[0, 4 * CHUNK + 4] = -3.0
    scores[1:, 0] = -3.0
    assert likeliest(scores).tolist() == [4 * CHUNK + 4, *[0] * (rows - 1)]


@pytest.mark.parametrize("size", [100, 8 * 512, 20 * 512, 20 * 512 + 7, 49152])
@pytest.mark.parametrize("shape", [(3,), (2, 5), (1, 1), (40,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_likeliest_tokens_are_those_of_topk(size, shape, dtype):
    scores = torch.randn(*shape, size, generator=torch.Generator().manual_seed(size)).to(dtype)
    choices, places, shares = most_likely(scores, 8)
    best = scores.float().topk(8, -1).values
    assert torch.equal(choices, scores.argmax(-1))
    assert torch.equal(scores.float().gather(-1, places), best)
    assert places.sort(-1).values.diff(dim=-1).all(), "each place once"
    torch.testing.assert_close(shares, best.softmax(-1))
