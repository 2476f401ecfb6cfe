"""The relay of the chaos tests does to packets what it is told, and only that."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from tests.chaos.relay import Fates, Relay, why_not

# Sends numbered datagrams from one host, counts at another what came, in which order, and after how long. The receiver
# is told when all is there.
RECEIVE = """
import select, socket, sys, time
door = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); door.setblocking(False)
door.setsockopt(socket.SOL_SOCKET, 33, 1 << 22)  # SO_RCVBUFFORCE: it may be held up for longer than usual room lasts
door.bind(("0.0.0.0", 9)); print("ready", flush=True)
came, late, told = [], [], False
while not told:
    told = sys.stdin in select.select([door, sys.stdin], [], [])[0]
    try:
        while True:
            data = door.recv(2000); number, sent = data.decode().split()[:2]
            came.append(int(number)); late.append(time.monotonic() - float(sent))
    except BlockingIOError:
        pass
print(len(came), len(set(came)), came == sorted(came), min(late, default=0.0), max(late, default=0.0))
"""
SEND = """
import socket, sys, time
door = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for number in range(int(sys.argv[2])):
    door.sendto(f"{number} {time.monotonic()} ".encode() + bytes(int(sys.argv[3])), (sys.argv[1], 9)); time.sleep(0.001)
"""


def test_fates_are_drawn_as_told() -> None:
    fates = Fates(seed=1)
    assert fates.arrivals(0, 1, 100, 5.0) == [5.0]
    fates.set(0, 1, loss=0.2, duplicate=0.25, delay_s=0.05, jitter_s=0.01)
    drawn = [fates.arrivals(0, 1, 100, 0.0) for _ in range(4000)]
    assert 700 < sum(not times for times in drawn) < 900
    assert 700 < sum(len(times) == 2 for times in drawn) < 900
    assert all(0.05 <= at_s <= 0.06 for times in drawn for at_s in times)
    assert fates.arrivals(1, 0, 100, 5.0) == [5.0]  # the other way is another link
    fates.set(0, 1, cut=True)
    assert fates.arrivals(0, 1, 100, 0.0) == []
    fates.set(1, 0, bytes_per_s=1000.0)
    assert [fates.arrivals(1, 0, 100, 0.0) for _ in range(3)] == [[0.1], [0.2], [pytest.approx(0.3)]]
    syn = bytes([0x45, *[0] * 8, 6, *[0] * 23, 0x02, *[0] * 6])
    answer = syn[:33] + bytes([0x12]) + syn[34:]
    fates.set(0, 1, closed=True)
    assert [fates.lets_in(0, 1, packet) for packet in (syn, answer)] == [False, True]
    assert fates.lets_in(1, 0, syn)
    assert [again.arrivals(0, 1, 100, 0.0) for again in [Fates(seed=2)]] == [[0.0]]


def test_all_links_of_a_host_share_what_it_can_send_and_what_it_can_receive() -> None:
    fates = Fates(seed=1)
    fates.set_access(0, up_bytes_per_s=1000.0, down_bytes_per_s=500.0)
    assert [fates.arrivals(0, target, 100, 0.0) for target in (1, 2)] == [[0.1], [0.2]]
    assert [fates.arrivals(source, 0, 100, 0.0) for source in (1, 2)] == [[0.2], [0.4]]
    assert fates.arrivals(1, 2, 100, 0.0) == [0.0]
    fates.set_access(2, up_bytes_per_s=0.0, down_bytes_per_s=200.0)
    assert fates.arrivals(0, 2, 100, 0.0) == [pytest.approx(0.8)]  # 0.3 until it has left, then 0.5


@pytest.mark.skipif(bool(why_not()), reason=f"no hosts here: {why_not()}")
def test_packets_between_hosts_are_lost_delayed_repeated_and_cut_one_way() -> None:
    with Relay(hosts=3, seed=4) as relay:
        count, distinct, ordered, least_s, _ = _between(relay, 0, 1, 300)
        assert (count, distinct, ordered) == (300, 300, True)
        relay.set(0, 1, delay_s=0.05, jitter_s=0.05, loss=0.2, duplicate=0.25)
        count, distinct, ordered, least_s, most_s = _between(relay, 0, 1, 300)
        assert 200 < distinct < 280
        assert count > distinct + 30
        assert not ordered
        assert least_s >= 0.05
        assert most_s >= 0.09
        assert _between(relay, 1, 0, 100)[:2] == (100, 100)
        relay.set(0, 1, cut=True)
        assert _between(relay, 0, 1, 50)[0] == 0
        assert _between(relay, 0, 2, 50)[0] == 50
        counts = relay.counts()
        assert counts["cut"] == 50
        assert counts["relayed"] >= 300 + 200 + 100 + 50


def _decided(relay: Relay) -> float:
    """How many packets have met their fate."""
    counts = relay.counts()
    return sum(counts.get(fate, 0) for fate in ("relayed", "lost", "cut"))


def _between(relay: Relay, source: int, target: int, packets: int) -> tuple[int, int, bool, float, float]:
    receiver = subprocess.Popen(
        [*relay.at(target), sys.executable, "-c", RECEIVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert receiver.stdout is not None
    assert receiver.stdout.readline() == "ready\n"
    before = _decided(relay)
    sending = [sys.executable, "-c", SEND, relay.hosts[target], str(packets), "100"]
    subprocess.run([*relay.at(source), *sending], check=True)
    while _decided(relay) < before + packets:
        time.sleep(0.01)
    time.sleep(0.2)  # no packet is delayed for longer
    for _ in range(2):
        relay.counts()  # when it has answered the second time, what was due before the first one is there
    out = receiver.communicate("all is there\n")[0].split()
    return int(out[0]), int(out[1]), out[2] == "True", float(out[3]), float(out[4])
