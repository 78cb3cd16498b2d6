"""Thresholds of the garbage collector within `rare_collections`, and afterwards."""

import gc

from autopar.core.common.garbage import NEW_OBJECTS, rare_collections


def test_thresholds_come_back() -> None:
    before = gc.get_threshold()
    with rare_collections():
        assert gc.get_threshold()[0] >= NEW_OBJECTS
    assert gc.get_threshold() == before
