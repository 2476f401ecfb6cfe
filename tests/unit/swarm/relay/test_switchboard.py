"""Who is put through to whom: whoever was sent by the scheduler, to whoever serves the same job, once."""

from __future__ import annotations

import pytest

from swarm.errors import NoPass, PeerUnavailable, Refused, RetryElsewhere, Revoked, SwarmError
from swarm.limits import RELAY_LINKS_MAX, RELAY_LINKS_OF_ONE_MAX
from swarm.relay.switchboard import Listening, Switchboard
from swarm.types import JobId, PeerId
from swarm.wire.messages import Pass

A, B, H = PeerId("a"), PeerId("b"), PeerId("h")
JOB, OTHER = JobId("job"), JobId("other")
NOW = 1000.0


def shown(
    peer: PeerId, job: JobId = JOB, *, cluster: str = "ours", issued: float = 900.0, ends: float = 1500.0
) -> Pass:
    return Pass(cluster, job, 0, peer, 1, 0, 2, issued, ends)


def board() -> Switchboard:
    """H listens for the job."""
    made = Switchboard("ours")
    line = Listening()
    made.listen(H, line)
    made.show(H, line, shown(H), NOW)
    return made


def of_h(made: Switchboard) -> Listening:
    """The line on which H listens."""
    return made._listening[H]


def refusal(made: Switchboard, caller: PeerId, with_pass: Pass, to: PeerId = H, now: float = NOW) -> object:
    try:
        made.connect(caller, with_pass, to, now)
    except SwarmError as error:
        return type(error)
    return None


@pytest.fixture
def made() -> Switchboard:
    return board()


def test_nobody_is_put_through_to_one_that_does_not_listen_or_has_no_pass(made: Switchboard) -> None:
    assert refusal(made, A, shown(A), B) is PeerUnavailable
    assert refusal(made, A, shown(A, OTHER)) is NoPass
    made.show(H, of_h(made), None, NOW)
    assert refusal(made, A, shown(A)) is NoPass
    made.show(H, of_h(made), shown(H, ends=1100.0), NOW)
    assert refusal(made, A, shown(A), now=1200.0) is NoPass, "what H may serve has ended"


@pytest.mark.parametrize("theirs", [shown(A), shown(H, cluster="theirs"), shown(H, ends=NOW)])
def test_one_that_listens_shows_its_own_pass(theirs: Pass) -> None:
    made = Switchboard("ours")
    made.listen(H, Listening())
    with pytest.raises(NoPass):
        made.show(H, of_h(made), theirs, NOW)
    assert refusal(made, A, shown(A)) is NoPass


def test_a_link_is_accepted_by_whom_it_is_for_once_and_before_it_is_given_up(made: Switchboard) -> None:
    opening, _ = made.connect(A, shown(A), H, NOW)
    for caller, connection in ((B, opening.connection), (A, opening.connection), (H, "x"), (H, "")):
        with pytest.raises(Refused):
            made.accept(caller, connection)
    assert made.accept(H, opening.connection) == opening
    other, line = made.connect(A, shown(A), H, NOW)
    assert line is of_h(made)
    made.ended(other)
    for over in (opening, other):
        with pytest.raises(Refused):
            made.accept(H, over.connection)


def test_links_to_one_stage_server_are_bounded(made: Switchboard) -> None:
    callers = [PeerId(f"p{number % 8}") for number in range(RELAY_LINKS_MAX)]
    openings = [made.connect(caller, shown(caller), H, NOW)[0] for caller in callers]
    assert refusal(made, A, shown(A)) is RetryElsewhere
    made.ended(openings[0])
    assert refusal(made, A, shown(A)) is None


def test_one_stage_server_takes_no_more_than_its_share_of_the_links_to_another(made: Switchboard) -> None:
    """One member of a job could take all 64, and nobody else reached the hidden one."""
    openings = [made.connect(A, shown(A), H, NOW)[0] for _ in range(RELAY_LINKS_OF_ONE_MAX)]
    assert refusal(made, A, shown(A)) is RetryElsewhere
    assert refusal(made, B, shown(B)) is None
    made.ended(openings[0])
    assert refusal(made, A, shown(A)) is None
    assert refusal(made, A, shown(A)) is RetryElsewhere


def test_a_newer_line_replaces_an_older_one_which_ends_nothing_of_it(made: Switchboard) -> None:
    older, newer = of_h(made), Listening()
    assert made.listen(H, newer) is older
    made.show(H, older, shown(H), NOW)
    assert refusal(made, A, shown(A)) is NoPass, "the newer one has shown none"
    made.hang_up(H, older)
    assert made.listeners == 1
    made.hang_up(H, newer)
    assert made.listeners == 0


def test_whoever_is_revoked_neither_dials_nor_listens_until_it_has_a_newer_pass(made: Switchboard) -> None:
    assert made.cut_off(A, 950.0) is None
    line = of_h(made)
    assert made.cut_off(H, 950.0) is line
    assert refusal(made, A, shown(A)) is Revoked
    assert refusal(made, B, shown(B)) is PeerUnavailable
    made.listen(H, line)
    with pytest.raises(Revoked):
        made.show(H, line, shown(H), NOW)
    made.show(H, line, shown(H, issued=960.0), NOW)
    assert refusal(made, A, shown(A, issued=960.0)) is None
