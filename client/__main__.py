"""Entry point of `swarm` and of `python -m client`."""

from __future__ import annotations

from swarm.process.startup import quiet_start

with quiet_start():
    import signal
    import sys
    from typing import NoReturn


def main() -> NoReturn:
    with quiet_start():
        from client.cli import run  # noqa: PLC0415  # takes about a second, in which Ctrl-C shall be no traceback
    # Like Ctrl-C, SIGTERM unwinds: temporary files go, the cursor comes back.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
