"""500 short chat requests, always the same ones, as `drumline verify` and `drumline bench` read them.

    python -m benchmarks.chat500 > chat500.jsonl
    drumline verify chat500.jsonl --rows 1,2,3,7,16,32

Conversations of one to five messages in a handful of styles; a third greedy, the others sampled in different ways, some
with penalties, biases, bans, stop ids, minimum lengths and alternatives.
"""

import json
import random
from collections.abc import Sequence
from typing import Any, TypeVar

REQUESTS = 500

SYSTEMS = (
    None,
    None,
    "You are a helpful assistant.",
    "Answer in one short sentence.",
    "You are the assistant of a small workshop. You are polite, brief and exact, and you never invent a part number.",
)
QUESTIONS = (
    "What is {thing}?",
    "Explain {thing} to a child of {number}.",
    "Name {number} things that one should know about {thing}.",
    "Write one sentence about {thing} and {other}.",
    "How does {thing} differ from {other}?",
    "Is {number} a prime number? Say yes or no, then why.",
    "Write a haiku about {thing}.",
    "Finish this line: In the year 19{number}, {thing} was",
    "Translate into French: I have lost {thing}.",
    'def {word}(n):\n    """Return n times {number}."""\n',
    "Summarise in a few words: {notice}",
    "Reply to this note and keep it friendly: {notice}",
)
ANSWERS = ("Certainly.", "I am not sure, but I think so.", "Yes: it depends on {thing}.", "About {number}, usually.")
THINGS = (
    *("the sea", "a bicycle", "rain", "a bearing", "the moon", "bread", "a spring", "an engine", "light", "a library"),
    *("the loading bay", "a clock", "sound", "copper", "a river", "the alphabet", "tea", "a bridge", "dust", "a drum"),
)
NOTICES = (
    "the floor is painted on Friday, so machine {number} stays off until Monday morning.",
    "order {number} has arrived without {thing}; please ask the supplier when the rest will follow.",
    "whoever borrowed {thing} from room {number} is asked to bring it back, with {other}, before the weekend.",
    "Grüße aus Zürich – die Maschine {number} läuft wieder 😀, aber {thing} fehlt noch.",
)

T = TypeVar("T")


def requests(count: int = REQUESTS) -> list[dict[str, Any]]:
    """The first `count` requests."""
    return [_request(number) for number in range(count)]


def _request(number: int) -> dict[str, Any]:
    dice = random.Random(number)
    return {
        "id": f"chat-{number:03d}",
        "messages": _messages(dice),
        "max_tokens": _between(dice, 8, 48),
        "sampling": _sampling(dice, number),
        **_extras(dice, number),
    }


def _messages(dice: random.Random) -> list[dict[str, str]]:
    system = _one(dice, SYSTEMS)
    messages = [] if system is None else [{"role": "system", "content": system}]
    for _ in range(_one(dice, (0, 0, 0, 1, 1, 2))):
        messages.append({"role": "user", "content": _filled(dice, _one(dice, QUESTIONS))})
        messages.append({"role": "assistant", "content": _filled(dice, _one(dice, ANSWERS))})
    return [*messages, {"role": "user", "content": _filled(dice, _one(dice, QUESTIONS))}]


def _filled(dice: random.Random, text: str) -> str:
    names = {"thing": _one(dice, THINGS), "other": _one(dice, THINGS), "number": _between(dice, 11, 99)}
    notice = _one(dice, NOTICES).format(**names)
    return text.format(**names, notice=notice, word=f"times_{names['number']}")


def _sampling(dice: random.Random, number: int) -> dict[str, Any]:
    """A third greedy; the others in turn: the usual mixture, plain temperature, min-p, and hot with a small top-k."""
    kinds: tuple[dict[str, Any], ...] = (
        {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
        {"temperature": 1.0},
        {"temperature": 1.2, "min_p": 0.05},
        {"temperature": 2.0, "top_k": 5},
    )
    sampling = {} if number % 3 == 0 else dict(kinds[number % 4])
    if number % 5 == 0:
        sampling["repetition_penalty"] = _one(dice, (1.1, 1.3))
    if number % 7 == 0:
        sampling |= {"presence_penalty": 0.5, "frequency_penalty": _one(dice, (-0.2, 0.3))}
    if number % 11 == 0:
        sampling |= {"logit_bias": {str(_between(dice, 100, 999)): 2.5}, "banned_ids": [_between(dice, 100, 999)]}
    return sampling | {"seed": number * 1_000_003}


def _extras(dice: random.Random, number: int) -> dict[str, Any]:
    extras: dict[str, Any] = {}
    if number % 4 == 0:
        extras["logprobs"] = _between(dice, 1, 5)
    if number % 6 == 0:
        extras["stop_ids"] = sorted({_between(dice, 20, 400) for _ in range(4)})
    if number % 9 == 0:
        extras["min_tokens"] = _between(dice, 1, 8)
    return extras


def _one(dice: random.Random, values: Sequence[T]) -> T:
    return values[int(dice.random() * len(values))]  # `random()` alone is promised to stay the same in every version


def _between(dice: random.Random, low: int, high: int) -> int:
    return low + int(dice.random() * (high - low + 1))


def main() -> None:
    """Print one JSON line a request."""
    for request in requests():
        print(json.dumps(request, ensure_ascii=False))


if __name__ == "__main__":
    main()
