from swarm.types import set_digest


def test_the_digest_of_a_set_is_that_of_its_members_only() -> None:
    assert set_digest([3, 1, 2]) == set_digest(iter((1, 2, 3))) == set_digest(frozenset({1, 2, 3}))
    sets = [(), (0,), (1,), (12,), (1, 2), (0, 1, 2), (1, 2, 3), (11, 2), (1, 12)]
    assert len({set_digest(indexes) for indexes in sets}) == len(sets)
