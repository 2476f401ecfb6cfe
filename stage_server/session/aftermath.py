"""What the device still does for jobs that were released: a computation that has begun cannot be stopped.

The next job would wait behind it, so a stage server that is held up for long had better be given none.

After 10 s it says that it leaves, and dials again once the device is free. Not chosen: a report that the device is
busy, because every release would have to wait for it.
"""

from __future__ import annotations

import asyncio

from stage_server.device import Device

PATIENCE_S = 10.0


class Aftermath:
    """The work that released jobs have left on a device."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._end: asyncio.Future[None] | None = None
        self._since_s = 0.0

    def begin(self) -> None:
        """A job was released: it is over when all that was handed to the device before is done."""
        if self.is_over:
            self._since_s = asyncio.get_running_loop().time()
        self._end = asyncio.ensure_future(self._device.run(lambda: None))

    @property
    def is_over(self) -> bool:
        return self._end is None or self._end.done()

    @property
    def is_long(self) -> bool:
        """Whether others had better have the next job."""
        return not self.is_over and asyncio.get_running_loop().time() - self._since_s >= PATIENCE_S

    async def over(self) -> None:
        """Return when it is over."""
        if self._end is not None:
            await asyncio.wait({self._end})
