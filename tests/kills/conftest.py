from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.kills.processes import Nursery, nursery
from tests.kills.work import checkpoint


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("kills"))


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def workers() -> AsyncIterator[Nursery]:
    """Forks workers."""
    async with nursery() as running:
        yield running
