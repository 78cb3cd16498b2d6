"""Blocks of parameters whose states lie on storage."""

from autopar.core.common.block_storage import split_blocks


def test_small_parameters_have_no_blocks_of_their_own() -> None:
    """Beside the largest one there is room for a sixteenth; otherwise the limit is as given."""
    blocks = [list(block) for block in split_blocks([2, 320, 3, 318, 1, 160, 170], 100)]
    assert blocks == [[0, 1, 2], [3, 4], [5, 6]]
    assert [list(block) for block in split_blocks([40, 60, 1, 100], 100)] == [[0, 1, 2], [3]]
    assert list(split_blocks([], 100)) == []
