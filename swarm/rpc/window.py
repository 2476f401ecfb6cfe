"""How many bytes of bulk (weights, files, tensors) may be on their way at a time.

Bytes that were sent and not acknowledged lie in a queue: in this process, in the kernel, in a router. What must be
quick (a ping, a heartbeat, a route) waits behind them. So the sender of bulk keeps the queue short itself:

    delay of an acknowledgement = base (light, distance, one piece on the line) + queue

The base is the shortest delay lately measured. While the queue takes less than QUEUE_LOW_S the window doubles each
round trip; then it grows by a step each round trip; when the queue takes more than QUEUE_HIGH_S, it shrinks to
what the line alone holds, at most once a round trip. So the queue empties now and then, and all flows on
the line see its true base again. Each flow keeps a part of a line that is shared; the parts need not be equal.

Patience follows what was measured: a line whose acknowledgements take long may also fall silent for longer.

Source: LEDBAT (RFC 6817) takes the queue's delay as the sign, TCP Vegas grows and shrinks by it. Not chosen: the line's
own congestion control, because it fills the router's buffer before it slows down, and a buffer may hold many seconds.

Decision: docs/decisions/082.
"""

from __future__ import annotations

from collections import deque

from swarm.errors import CorruptFrame

START_BYTES = 16 << 10  # of a flow: several may begin on one slow line, and all lie before its pings
WINDOW_BYTES_MIN, WINDOW_BYTES_MAX = 16 << 10, 8 << 20
PIECE_BYTES_MIN, PIECE_BYTES_MAX = 4 << 10, 1 << 20  # of what is sent and acknowledged at a time
# That a window grows in a round trip once there is a queue; one that is not small by the square root of its size.
STEP_BYTES, SMALL_BYTES = 16 << 10, 64 << 10
QUEUE_LOW_S, QUEUE_HIGH_S = 0.1, 0.5
BASE_KEPT_S = 60.0  # paths change: a base is forgotten after one to two times this
PATIENCE_S_MIN, PATIENCE_S_MAX = 3.0, 60.0  # with a line that keeps silent
PATIENCE_DELAYS = 4.0  # silence of so many usual delays is added to the least patience
PATIENCE_UNMEASURED_S = 20.0
QUICK_S = 0.05  # where acknowledgements come so soon, pieces need not be small


class Window:
    """Decides for one direction of one connection; every flow on it may share the window.

    The sender reports `sent` for each piece, in order, and `acknowledged` when the other side says that the oldest
    bytes have arrived. Times are seconds of any clock that does not go back.
    """

    def __init__(self, now_s: float, start_bytes: int = START_BYTES, patience_s_min: float = PATIENCE_S_MIN) -> None:
        self.size_bytes = start_bytes
        self._patience_s_min = patience_s_min
        self.unacknowledged_bytes = 0
        self._pieces: deque[tuple[int, float, bool]] = deque()  # bytes, when sent, whether the window was full then
        self._bases: deque[tuple[float, float]] = deque()  # when it began to count, shortest delay
        self._delay_s: float | None = None  # usual
        self._hold_bytes = 0  # to be acknowledged before it shrinks again: they were sent before it shrank
        self._progress_s = now_s

    @property
    def room_bytes(self) -> int:
        """How many bytes may be sent now."""
        return max(0, self.size_bytes - self.unacknowledged_bytes)

    @property
    def piece_bytes(self) -> int:
        """How many bytes to send at a time: an eighth of the window, so that acknowledgements come evenly."""
        return min(max(self.size_bytes // 8, PIECE_BYTES_MIN), PIECE_BYTES_MAX)

    @property
    def message_bytes(self) -> int:
        """How many bytes one message may take now: a piece, or all the room of a quick line, as messages cost time."""
        is_quick = self._delay_s is not None and self._delay_s <= QUICK_S
        return self.room_bytes if is_quick else min(self.piece_bytes, self.room_bytes)

    @property
    def is_open(self) -> bool:
        """Whether the next piece may leave now."""
        return not self.unacknowledged_bytes or self.room_bytes >= self.piece_bytes

    def sent(self, count_bytes: int, now_s: float) -> None:
        """A piece has left."""
        if not self.unacknowledged_bytes:
            self._progress_s = now_s  # silence before it was no silence
        self.unacknowledged_bytes += count_bytes
        self._pieces.append((count_bytes, now_s, self.room_bytes < self.piece_bytes))

    def acknowledged(self, count_bytes: int, now_s: float) -> None:
        """The oldest bytes have arrived; CorruptFrame if fewer were sent."""
        if not 0 <= count_bytes <= self.unacknowledged_bytes:
            raise CorruptFrame(f"{count_bytes} bytes are acknowledged, {self.unacknowledged_bytes} are on their way")
        if count_bytes:
            self._progress_s = now_s
        self.unacknowledged_bytes -= count_bytes
        self._hold_bytes = max(0, self._hold_bytes - count_bytes)
        sent_s, was_full = None, False
        while self._pieces and count_bytes >= self._pieces[0][0]:
            piece_bytes, sent_s, filled = self._pieces.popleft()
            count_bytes -= piece_bytes
            was_full |= filled
            if sent_s is not None:
                self._measured(piece_bytes, now_s - sent_s, was_full, now_s)
        if count_bytes:
            piece_bytes, sent_s, filled = self._pieces[0]
            self._pieces[0] = piece_bytes - count_bytes, sent_s, filled

    def heard(self, now_s: float) -> None:
        """The other side lives, though nothing more has arrived: it takes its time with what it has."""
        self._progress_s = now_s

    def measured(self, delay_s: float, now_s: float) -> None:
        """A small message went there and back; it moves the base, and not the window."""
        self._progress_s = now_s
        self._take_delay(delay_s, now_s)

    @property
    def patience_s(self) -> float:
        """For how long nothing may be acknowledged while something is on its way."""
        if self._delay_s is None:
            return PATIENCE_UNMEASURED_S
        return min(self._patience_s_min + PATIENCE_DELAYS * self._delay_s, PATIENCE_S_MAX)

    def dead_in_s(self, now_s: float) -> float:
        """Until the other side counts as dead if nothing arrives; 0 or less: it does."""
        return self._progress_s + self.patience_s - now_s

    def dead(self, now_s: float) -> bool:
        """Whether something is on its way, and nothing was acknowledged for too long."""
        return self.unacknowledged_bytes > 0 and self.dead_in_s(now_s) <= 0

    def restart(self, now_s: float, *, has_ended: bool = False) -> None:
        """The connection broke: what was on its way is lost, and the window is as at first again.

        `has_ended`: it did not break; what was on its way has arrived, and the next transfer may begin as large.
        """
        self.unacknowledged_bytes = self._hold_bytes = 0
        self._pieces.clear()
        self._progress_s = now_s
        if not has_ended:
            self.size_bytes = min(self.size_bytes, START_BYTES)

    def _measured(self, piece_bytes: int, delay_s: float, was_full: bool, now_s: float) -> None:
        queue_s = delay_s - self._take_delay(delay_s, now_s)
        if queue_s > QUEUE_HIGH_S:
            if not self._hold_bytes:
                left = (delay_s - queue_s) / delay_s
                self.size_bytes = max(WINDOW_BYTES_MIN, int(self.size_bytes * left))
                self._hold_bytes = self.unacknowledged_bytes
        elif was_full:
            step_bytes = STEP_BYTES * max(1.0, (self.size_bytes / SMALL_BYTES) ** 0.5)
            grown = piece_bytes if queue_s < QUEUE_LOW_S else int(step_bytes * piece_bytes / self.size_bytes)
            self.size_bytes = min(self.size_bytes + grown, WINDOW_BYTES_MAX)

    def _take_delay(self, delay_s: float, now_s: float) -> float:
        """Take a delay into account; gives the base with it."""
        self._delay_s = delay_s if self._delay_s is None else self._delay_s + (delay_s - self._delay_s) / 8
        if not self._bases or now_s - self._bases[-1][0] > BASE_KEPT_S:
            self._bases.append((now_s, delay_s))
            if len(self._bases) > 2:
                self._bases.popleft()
        else:
            began_s, base_s = self._bases[-1]
            self._bases[-1] = began_s, min(base_s, delay_s)
        return min(base_s for _, base_s in self._bases)
