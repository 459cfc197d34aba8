"""The accepted jobs that the engine does not have yet: the oldest first, but for clients who may have no more in it."""

from collections.abc import Callable, Iterator

from drumline.scheduler.mqtt.running import Key, Running


class Waiting:
    """Jobs in the order of acceptance, a line a client."""

    def __init__(self) -> None:
        self._lines: dict[str, dict[Key, Running]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Running]:
        return (running for line in self._lines.values() for running in line.values())

    def add(self, running: Running) -> None:
        """At the end of its client's line."""
        self._lines.setdefault(running.reply.client, {})[running.key] = running
        self._count += 1

    def remove(self, running: Running) -> bool:
        """Take it out; False where it does not wait."""
        line = self._lines.get(running.reply.client, {})
        if line.pop(running.key, None) is None:
            return False
        if not line:
            del self._lines[running.reply.client]
        self._count -= 1
        return True

    def first(self, may_run: Callable[[str], bool]) -> Running | None:
        """The oldest whose client may have another job in the engine. Takes the number of clients that wait."""
        heads = (next(iter(line.values())) for client, line in self._lines.items() if may_run(client))
        return min(heads, key=lambda running: running.number or 0, default=None)
