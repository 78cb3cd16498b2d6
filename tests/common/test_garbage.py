"""Thresholds of the garbage collector within `rare_collections`, and afterwards."""

import gc

import pytest

from autopar.common.garbage import NEW_OBJECTS, rare_collections


def test_thresholds_come_back_after_an_error() -> None:
    before = gc.get_threshold()
    with pytest.raises(KeyError), rare_collections():
        assert gc.get_threshold()[0] >= NEW_OBJECTS
        raise KeyError
    assert gc.get_threshold() == before
