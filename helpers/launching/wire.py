"""One JSON object a line over a pipe: what the kernel, the warm process and the ranks say to each other."""

import json
import os
from collections.abc import Iterator
from typing import Any


def send(descriptor: int, message: dict[str, Any]) -> None:
    """Write one message whole. Raises BrokenPipeError when the other end is gone."""
    data = memoryview(json.dumps(message).encode() + b"\n")
    while data:
        data = data[os.write(descriptor, data) :]


class Reader:
    """Collects messages from a descriptor, which becomes one that does not block: the other end may stay open for ever."""

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self.descriptor = descriptor
        self.closed = False
        self._rest = b""

    def read(self) -> Iterator[dict[str, Any]]:
        """Each complete message at hand, of which those not asked for are kept; sets `closed` at the end of the stream."""
        try:
            while not self.closed:
                data = os.read(self.descriptor, 1 << 16)
                self.closed = not data
                self._rest += data
        except BlockingIOError:
            pass
        while b"\n" in self._rest:
            line, _, self._rest = self._rest.partition(b"\n")
            yield json.loads(line)
