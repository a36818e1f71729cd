"""Event files of TensorBoard, read without it."""

import struct
from pathlib import Path

from tensorboardX.proto.event_pb2 import Event


def scalars(folder: Path) -> list[tuple[int, str, float]]:
    """The scalars of event files, by the format of their records: the length in eight
    bytes, four of a checksum, the event, four of another."""
    found = []
    for path in sorted(folder.glob("events.*")):
        content = path.read_bytes()
        while content:
            (length,) = struct.unpack("<Q", content[:8])
            event = Event.FromString(content[12 : 12 + length])
            content = content[16 + length :]
            found += [
                (event.step, value.tag, value.simple_value)
                for value in event.summary.value
            ]
    return found
