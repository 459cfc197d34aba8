import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumline import InvalidRequest
from drumline.scheduler.mqtt.topics import (
    JOB_KINDS,
    MAX_LEVELS,
    MAX_TOPIC_BYTES,
    ParsedTopic,
    Topics,
    check_reply_topic,
)

names = st.text("ABCxyz019_-", min_size=1, max_size=64)
prefixes = st.lists(st.text("abc1é ", min_size=1, max_size=5), min_size=1, max_size=3).map("/".join)


def test_the_names_of_the_contract():
    topics = Topics()
    assert topics.submit("dev-1") == "drumline/v1/clients/dev-1/submit"
    assert [topics.job("dev-1", kind, "j_2") for kind in JOB_KINDS] == [
        "drumline/v1/clients/dev-1/jobs/j_2/state",
        "drumline/v1/clients/dev-1/jobs/j_2/chunks",
        "drumline/v1/clients/dev-1/jobs/j_2/result",
        "drumline/v1/clients/dev-1/jobs/j_2/cancel",
        "drumline/v1/clients/dev-1/jobs/j_2/get",
    ]
    assert topics.worker_status("main") == "drumline/v1/workers/main/status"
    assert topics.dead == "drumline/v1/dead"


@given(names, names, st.sampled_from(JOB_KINDS))
def test_what_is_built_can_be_parsed(client: str, job_id: str, kind: str):
    topics = Topics("any/prefix")
    assert topics.parse(topics.submit(client)) == ParsedTopic(client, "submit", None)
    assert topics.parse(topics.job(client, kind, job_id)) == ParsedTopic(client, kind, job_id)


@given(st.text(max_size=60))
def test_parse_takes_any_text_and_accepts_only_what_it_would_build(tail: str):
    topics = Topics()
    topic = f"{topics.prefix}/clients/{tail}"
    parsed = topics.parse(topic)
    if parsed is not None:
        client, kind, job_id = parsed
        assert topic == (topics.submit(client) if job_id is None else topics.job(client, kind, job_id))
    assert topics.parse(tail) is None


@pytest.mark.parametrize(
    "topic",
    [
        "drumline/v1/clients/a/submit/",
        "drumline/v1/clients/a/jobs/j/state\n",
        "drumline/v1/clients/a/jobs/j/submit",
        "drumline/v1/clients/a/jobs/" + "j" * 65 + "/get",
        "drumline/v1/clients//submit",
        "drumline/v1/clients/a/state",
        "drumline/v2/clients/a/submit",
    ],
)
def test_other_topics_are_nobodys(topic: str):
    assert Topics().parse(topic) is None


@pytest.mark.parametrize("name", ["", "a/b", "a b", "+", "#", "ä", "x" * 65, "a\n"])
def test_names_that_are_no_topic_level_are_refused(name: str):
    with pytest.raises(InvalidRequest) as wrong_client:
        Topics().submit(name)
    assert wrong_client.value.field == "client"
    with pytest.raises(InvalidRequest) as wrong_job:
        Topics().job("a", "result", name)
    assert wrong_job.value.field == "id"


@pytest.mark.parametrize("prefix", ["", "/a", "a/", "a/+", "#", "$share/x", "a\0"])
def test_a_prefix_must_be_publishable(prefix: str):
    with pytest.raises(InvalidRequest) as wrong:
        Topics(prefix)
    assert wrong.value.field == "topic_prefix"


@pytest.mark.parametrize(
    "topic",
    [
        "", "a/+/b", "a/#", "a/\0", "$SYS/x", "b", "ab/c", "é" * (MAX_TOPIC_BYTES // 2) + "aa", "a/\ud800",
    ],
)  # fmt: skip
def test_bad_reply_topics_are_refused(topic: str):
    with pytest.raises(InvalidRequest) as wrong:
        check_reply_topic(topic, ["a", "é", "$SYS"])
    assert wrong.value.field == "response_topic"


@pytest.mark.parametrize(
    ("tail", "limit"),
    [
        ("\x01", "U+0001"),
        ("\x7f", "U+007F"),
        ("\x85", "U+0085"),
        ("\ufffe", "U+FFFE"),
        ("\ufdd0", "U+FDD0"),
        ("\U0010ffff", "U+10FFFF"),
        ("\ud800", "U+D800"),
        ("/b" * MAX_LEVELS, f"has {MAX_LEVELS + 1} levels, the limit is {MAX_LEVELS}"),
        ("x" * MAX_TOPIC_BYTES, f"the limit is {MAX_TOPIC_BYTES}"),
    ],
)
def test_what_a_broker_would_hang_up_on_is_named(tail: str, limit: str):
    with pytest.raises(InvalidRequest) as wrong:
        check_reply_topic(f"a{tail}", ["a", f"a{tail}"])
    assert limit in wrong.value.limit
    check_reply_topic("a" + "/b" * (MAX_LEVELS - 1), ["a"])


@given(prefixes, st.text("xyzé", max_size=9))
def test_reply_topics_under_an_allowed_prefix_are_taken(prefix: str, tail: str):
    check_reply_topic(f"{prefix}/{tail}", ["elsewhere", prefix])
    with pytest.raises(InvalidRequest):
        check_reply_topic(f"{prefix}{tail}z", [f"{prefix}{tail}"])


def test_replies_stay_with_their_client_unless_allowed_elsewhere():
    topics = Topics()
    topics.check_reply("drumline/v1/clients/a/inbox", "a")
    topics.check_reply("drumline/v1/clients/a/jobs/j/result", "a")
    topics.check_reply("house/lamp", "a", ["house"])
    for topic, client in (
        ("drumline/v1/clients/b/inbox", "a"),
        ("drumline/v1/clients/ab/inbox", "a"),
        ("drumline/v1/clients/a/submit", "a"),
        ("drumline/v1/clients/a/jobs/j/cancel", "a"),
        ("drumline/v1/clients/a/jobs/j/get", "a"),
        ("house/lamp", "a"),
    ):
        with pytest.raises(InvalidRequest):
            topics.check_reply(topic, client)
