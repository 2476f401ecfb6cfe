from swarm.types import Pieces, set_digest


def test_the_digest_of_a_set_is_that_of_its_members_only() -> None:
    assert set_digest([3, 1, 2]) == set_digest(iter((1, 2, 3))) == set_digest(frozenset({1, 2, 3}))
    sets = [(), (0,), (1,), (12,), (1, 2), (0, 1, 2), (1, 2, 3), (11, 2), (1, 12)]
    assert len({set_digest(indexes) for indexes in sets}) == len(sets)


def test_a_slice_of_pieces_is_that_of_their_bytes() -> None:
    whole = bytes(range(9))
    pieces = Pieces(whole[:2], b"", memoryview(whole)[2:7], whole[7:], b"")
    ends = (None, *range(-1, 11))
    assert all(pieces[start:stop] == whole[start:stop] for start in ends for stop in ends)
    assert (len(pieces), len(Pieces()), Pieces()[:]) == (9, 0, b"")
