"""One thread a process, and the session's own folder for what autopar keeps on disk."""

import os
import sys
import tempfile

import pytest

os.environ["OMP_NUM_THREADS"] = "1"


def pytest_configure(config: pytest.Config) -> None:
    from hypothesis import settings

    cache = tempfile.TemporaryDirectory(prefix="autopar-tests-")
    os.environ["AUTOPAR_CACHE"] = os.environ["AUTOPAR_REPRODUCERS"] = cache.name
    config.add_cleanup(cache.cleanup)
    settings.register_profile("autopar", deadline=None, derandomize=True, database=None)
    settings.load_profile("autopar")


@pytest.fixture(autouse=True)
def nothing_said() -> None:
    """Let every test see the warnings that autopar gives once a process."""
    if notices := sys.modules.get("autopar.common.notices"):
        notices.SAID.clear()
