"""One JSON object a line over a pipe: what the kernel, the warm process and the ranks say to each other."""

import json
import os
from typing import Any


def send(descriptor: int, message: dict[str, Any]) -> None:
    """Write one message whole. Raises BrokenPipeError when the other end is gone."""
    data = memoryview(json.dumps(message).encode() + b"\n")
    while data:
        data = data[os.write(descriptor, data) :]


class Reader:
    """Collects messages from a descriptor; `read` is called when the descriptor is readable, or is not blocking."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.closed = False
        self._rest = b""

    def read(self) -> list[dict[str, Any]]:
        """All complete messages at hand; sets `closed` at the end of the stream."""
        try:
            data = os.read(self.descriptor, 1 << 16)
        except BlockingIOError:
            return []
        self.closed = not data
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]
