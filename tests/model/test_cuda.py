"""The torch backend on a GPU, against the reference on the CPU. Skipped where there is none."""

from dataclasses import replace

import pytest
import torch

from drumline import Request
from tests.drive import generate
from tests.oracle import assert_matches_reference
from tests.tiny import FAMILIES, tiny_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")


@pytest.mark.parametrize("family", FAMILIES)
async def test_rows_on_the_gpu_match_the_reference_on_the_cpu(family):
    model, gpu = tiny_model(family), torch.device("cuda")
    served = replace(model, device=gpu, weights=model.weights.map(lambda tensor: tensor.to(gpu)))
    requests = [Request(prompt_ids=tuple(range(3, 6 + 4 * row)), max_tokens=8, ignore_eos=True) for row in range(4)]
    results = await generate(served, *requests, rows=3, step_tokens=16)
    for request, result in zip(requests, results, strict=True):
        assert_matches_reference(model, request.prompt_ids, result.token_ids, ignore_eos=True, bound=1e-3)
