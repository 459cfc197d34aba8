import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.scheduler.stop import StopRules, StopStrings

EOS, STOP, OTHER = 1, 7, 50


def rules(**changed: object) -> StopRules:
    fields = {"eos_ids": frozenset({EOS}), "stop_ids": frozenset({STOP}), "max_tokens": 5, "min_tokens": 0, "room": 9}
    return StopRules(**{**fields, **changed})


class TestRules:
    @pytest.mark.parametrize(
        ("changed", "token_id", "generated", "reason"),
        [
            ({}, OTHER, 1, None),
            ({}, OTHER, 4, None),
            ({}, OTHER, 5, "budget"),
            ({}, EOS, 1, "eos"),
            ({}, EOS, 5, "eos"),  # this step chose it, and the cap comes second
            ({}, STOP, 1, "stop"),
            ({}, STOP, 5, "stop"),
            ({"stop_ids": frozenset({EOS})}, EOS, 1, "eos"),
            ({"eos_ids": frozenset()}, EOS, 1, None),  # EOS stopping off
            ({"eos_ids": frozenset()}, EOS, 5, "budget"),
            ({"eos_ids": frozenset({EOS, 2})}, 2, 1, "eos"),
            ({"room": 3}, OTHER, 2, None),
            ({"room": 3}, OTHER, 3, "window"),
            ({"room": 3}, EOS, 3, "eos"),
            ({"room": 3}, STOP, 3, "stop"),
            ({"room": 5}, OTHER, 5, "budget"),  # both caps at once: budget
            ({"room": None, "max_tokens": 99}, OTHER, 98, None),
            ({"room": 1, "max_tokens": 99}, OTHER, 1, "window"),
        ],
    )
    def test_table(self, changed: dict, token_id: int, generated: int, reason: str | None):
        assert rules(**changed).decide(token_id, generated) == reason

    def test_min_tokens_blocks_what_would_end_the_row(self):
        early = rules(min_tokens=3)
        assert set(early.blocked(0)) == set(early.blocked(2)) == {EOS, STOP}
        assert early.blocked(3) == ()
        assert rules().blocked(0) == ()
        assert rules(min_tokens=3, eos_ids=frozenset()).blocked(0) == (STOP,)


def cut(text: str, stops: list[str], keep: bool) -> tuple[str, bool]:
    """Character by character: the match that is complete first; of those that end together, the longest."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return (text[:end] if keep else text[: end - max(map(len, complete))]), True
    return text, False


def feed(stops: list[str], chunks: list[str], keep: bool = False) -> tuple[list[str], bool]:
    watch = StopStrings(stops, keep)
    leaving = [watch.push(chunk) for chunk in chunks]
    return [*leaving, watch.flush()], watch.matched


class TestStrings:
    def test_held_back_until_it_is_no_start(self):
        assert feed(["</end>"], ["one <", "/e", "nough", "."]) == (["one ", "", "</enough", ".", ""], False)

    def test_match_over_chunks_is_cut(self):
        assert feed(["</end>"], ["one </", "en", "d> two", "three"]) == (["one ", "", "", "", ""], True)

    def test_keep(self):
        assert feed(["."], ["one. two"], keep=True) == (["one.", ""], True)

    def test_held_text_leaves_at_the_end(self):
        assert feed(["</end>"], ["one </en"]) == (["one ", "</en"], False)

    def test_without_stops_everything_passes(self):
        assert feed([], ["a", "", "b"]) == (["a", "", "b", ""], False)

    def test_the_match_that_is_complete_first_wins_in_any_chunking(self):
        for chunks in (["xabc"], ["x", "a", "b", "c"], ["xa", "bc"]):
            leaving, matched = feed(["xabc", "ab"], chunks)
            assert ("".join(leaving), matched) == ("x", True)

    def test_matches_that_end_together_cut_the_longest(self):
        for chunks in (["123"], ["1", "2", "3"]):
            leaving, matched = feed(["23", "123"], chunks)
            assert ("".join(leaving), matched) == ("", True)

    @settings(deadline=None, max_examples=300)
    @given(
        stops=st.lists(st.text("ab.", min_size=1, max_size=4), min_size=1, max_size=3),
        chunks=st.lists(st.text("ab.", max_size=4), max_size=8),
        keep=st.booleans(),
    )
    def test_joined_output_is_the_cut_text_whatever_the_chunks(self, stops: list[str], chunks: list[str], keep: bool):
        leaving, matched = feed(stops, chunks, keep)
        expected, found = cut("".join(chunks), stops, keep)
        assert ("".join(leaving), matched) == (expected, found)
        if not keep:
            sent = ""
            for piece in leaving[:-1]:
                sent += piece
                assert not any(stop in sent for stop in stops)
        if not matched:
            sent, fed = "", ""
            for piece, chunk in zip(leaving, chunks, strict=False):
                sent, fed = sent + piece, fed + chunk
                longest = max(
                    (n for n in range(len(fed) + 1) if any(len(s) > n and fed.endswith(s[:n]) for s in stops)),
                )
                assert sent == fed[: len(fed) - longest]
