"""Ten thousand answers of the real model in random company, each the same to the bit as the one it gives alone."""

import random

import pytest

from drumline.model.language_model import LanguageModel
from tests.compositions import (
    DRAFT_TOKENS,
    ROWS,
    STEP_TOKENS,
    alone,
    in_company,
    random_company,
    random_requests,
)

REQUESTS = 10_000
DISTINCT = 500
TOGETHER = 100
STRANGERS = 10


@pytest.mark.soak
@pytest.mark.timeout(3600)
async def test_ten_thousand_requests_in_random_company(smollm2_int8: LanguageModel):
    dice = random.Random(0)
    vocab_size = smollm2_int8.config.vocab_size
    requests = random_requests(dice, DISTINCT, vocab_size, prompt=range(4, 65), tokens=range(2, 13))
    expected = await alone(smollm2_int8, requests)
    compared, differing = 0, []
    while compared < REQUESTS:
        chosen = dice.sample(range(DISTINCT), TOGETHER)
        strangers = random_requests(dice, STRANGERS, vocab_size, prompt=range(1, 100), tokens=range(6, 20))
        company = random_company(dice, [requests[index] for index in chosen], strangers)
        settings = {
            "rows": dice.choice(ROWS),
            "step_tokens": dice.choice(STEP_TOKENS),
            "draft_tokens": dice.choice(DRAFT_TOKENS),
        }
        given = await in_company(smollm2_int8, company, [requests[index] for index in chosen], **settings)
        differing += [
            (compared, settings, index) for index, text in zip(chosen, given, strict=True) if text != expected[index]
        ]
        compared += TOGETHER
        print(f"{compared} answers compared, {len(differing)} differ ({settings})", flush=True)
    assert differing == []
