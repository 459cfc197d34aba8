"""bfloat16 on the torch backend, all families, against both judges: the reference in bfloat16 and float64."""

from dataclasses import replace

import pytest
import torch

from drumline import Request
from drumline.model.language_model import LanguageModel
from drumline.model.reference import emulated_logits, uncached_logits
from tests.drive import generate
from tests.oracle import assert_matches_reference
from tests.tiny import FAMILIES, tiny_model

BOUND = 0.25
"""bfloat16 keeps 8 bits: sums over tiny models whose logits spread by about 3 differ by a few hundredths."""


def narrow(family: str) -> LanguageModel:
    model = tiny_model(family)
    weights = model.weights.map(lambda tensor: tensor.to(torch.bfloat16))
    return replace(model, weights=weights, precision="bfloat16", kv_dtype=torch.bfloat16)


@pytest.mark.parametrize("family", FAMILIES)
async def test_rows_match_the_reference(family):
    model = narrow(family)
    assert not model.exact
    requests = [Request(prompt_ids=tuple(range(3, 6 + 4 * row)), max_tokens=8, ignore_eos=True) for row in range(4)]
    for request, result in zip(requests, await generate(model, *requests, rows=3, step_tokens=16), strict=True):
        assert_matches_reference(model, request.prompt_ids, result.token_ids, ignore_eos=True, bound=BOUND)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_reference_is_near_float64(family):
    model, ids = narrow(family), list(range(3, 23))
    difference = (uncached_logits(model, ids).double() - emulated_logits(model, ids)).abs()
    assert 0 < difference.max() < 2 * BOUND
    assert difference.mean() < BOUND / 5
