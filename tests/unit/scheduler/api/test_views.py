"""Lists that fit a message, whatever stage servers say of themselves."""

from __future__ import annotations

import pytest

from scheduler.api.views import fitting
from swarm.limits import PEERS_MAX, REPLY_BYTES_MAX
from swarm.wire import jobs_pb2 as pb

LONG = 4 << 10
LINKS = [pb.LinkView(to="x" * 128, bytes_per_s=1.0, receipt_s=1.0)] * 64


def honest(number: int) -> pb.PeerView:
    return pb.PeerView(id=f"gpu-{number}", state="idle", reason="joined", address=f"10.0.0.1:{number}", device="cpu")


@pytest.mark.parametrize(
    "long",
    [
        pb.PeerView(reason="r" * LONG),
        pb.PeerView(reason="r" * LONG, address="a" * 1024, http_address="h" * 1024, device="d" * 1024),
        pb.PeerView(reason="\U0001f600" * (LONG // 4)),
        pb.PeerView(links=LINKS),
    ],
)  # fmt: skip
def test_long_texts_of_some_hide_no_other(long: pb.PeerView) -> None:
    """Fifty stage servers with reasons of 64 KiB hid all that came behind them from `swarm peers`."""
    eves = []
    for number in range(PEERS_MAX // 2):
        long.id = f"eve-{number:04}-{'x' * 100}"
        eves.append(pb.PeerView.FromString(long.SerializeToString()))
    others = [honest(number) for number in range(PEERS_MAX // 2)]
    shown = fitting([*eves, *others])
    assert [view.id for view in shown] == [view.id for view in (*eves, *others)]
    assert shown[len(eves) :] == [honest(number) for number in range(PEERS_MAX // 2)], "who is brief is shown whole"
    assert pb.PeerList(peers=shown).ByteSize() <= REPLY_BYTES_MAX


def test_a_list_that_fits_is_shown_as_it_is() -> None:
    one = pb.PeerView(id="a", reason="r" * LONG, links=LINKS)
    assert fitting([one]) == [pb.PeerView(id="a", reason="r" * LONG, links=LINKS)]


def test_a_name_or_a_path_is_never_cut() -> None:
    waste = [pb.Waste(name="x" * (1 << 20)) for _ in range(4)]
    assert [len(view.name) for view in fitting(waste)] == [1 << 20] * 2
