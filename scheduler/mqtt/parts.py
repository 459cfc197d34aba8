"""Terminal messages that are larger than a broker takes: sent in parts, which a reader joins by their offsets."""

from pydantic_core import from_json

from drumline.scheduler.mqtt.codec import Outgoing, parse


class PartMessage(Outgoing):
    """A piece of a terminal message's JSON text, from code point `offset` on, of `total`.

    Parts may come more than once and, after a loss, cut in other places: overlay them until nothing is missing.
    """

    job_id: str
    offset: int
    total: int
    body: str


def split(part: PartMessage, limit_bytes: int) -> list[PartMessage]:
    """The same text in parts of which none is longer than `limit_bytes` on the wire, or one character long."""
    room = max(1, limit_bytes - len(part.model_copy(update={"body": ""}).encode()) - 16)  # offsets may grow
    pieces, start = [], 0
    for end in _cuts(part.body, room):
        pieces.append(part.model_copy(update={"offset": part.offset + start, "body": part.body[start:end]}))
        start = end
    return pieces


def _cuts(text: str, room: int) -> list[int]:
    """Ends of pieces whose JSON strings take at most `room` bytes each."""
    cuts, used = [], 0
    for place, character in enumerate(text):
        size = 2 if character in '"\\' else len(character.encode())
        if used and used + size > room:
            cuts.append(place)
            used = 0
        used += size
    return [*cuts, len(text)]


def read_part(payload: bytes) -> PartMessage | None:
    """The part that a message is; None for a whole terminal message."""
    try:
        document = from_json(payload)
    except ValueError:
        return None
    if not isinstance(document, dict) or "offset" not in document:
        return None
    return parse(PartMessage.model_validate_json, payload)


class Joined:
    """Puts parts together again."""

    def __init__(self) -> None:
        self._pieces: dict[int, str] = {}

    def add(self, part: PartMessage) -> bytes | None:
        """Take a part; the whole message once nothing is missing."""
        if len(part.body) > len(self._pieces.get(part.offset, "")):
            self._pieces[part.offset] = part.body
        text = ""
        for offset in sorted(self._pieces):
            if offset > len(text):
                return None
            text += self._pieces[offset][len(text) - offset :]
        return text.encode() if len(text) == part.total else None
