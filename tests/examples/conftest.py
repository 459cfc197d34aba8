import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from tests.checkpoints import llama, random_model, save
from tests.processes import ROOT


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama with a long window, so that a job can be caught while it runs."""
    return save(tmp_path_factory.mktemp("examples") / "tiny", random_model(llama(max_position_embeddings=2048)))


@pytest.fixture(scope="session")
def import_example():
    """Examples lie outside any package; most tests run their `main` in this process, for starting torch takes long."""

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load
