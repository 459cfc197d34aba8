"""Fifty prompts against five schemas on the real model: every answer parses and validates."""

import json

import jsonschema
import pytest

from drumline.model.language_model import LanguageModel
from tests.drive import generate
from tests.structured import PROMPTS, SCHEMAS, asking_for


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", SCHEMAS)
async def test_every_answer_validates(smollm2_int8: LanguageModel, name: str):
    assert len(PROMPTS) == 50
    requests = [asking_for(name, prompt, seed) for seed, prompt in enumerate(PROMPTS)]
    for result in await generate(smollm2_int8, *requests, rows=16):
        assert result.stop_reason in ("stop", "eos")
        jsonschema.validate(json.loads(result.text), SCHEMAS[name])
