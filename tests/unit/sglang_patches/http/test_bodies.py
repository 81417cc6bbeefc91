"""Bodies: what is understood, and the one text that anything else gets."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_patches.http.bodies import BadBody, RejoinBody, ReleaseBody, RolloutBody, decode

KINDS = (ReleaseBody, RejoinBody, RolloutBody)


def test_a_release_with_all_its_fields() -> None:
    raw = b'{"ep_ranks": [2, 3], "leave": "exit", "operation_id": "tail-7", "wait_s": 2}'
    body = decode(raw, ReleaseBody)
    assert (body.ep_ranks, body.num_ranks, body.leave) == ([2, 3], None, "exit")
    assert (body.operation_id, body.wait_s) == ("tail-7", 2.0)


def test_what_may_be_left_out() -> None:
    assert decode(b"", RejoinBody) == decode(b"{}", RejoinBody) == RejoinBody()
    assert decode(b'{"num_ranks": 1}', ReleaseBody).leave == "park"
    assert decode(b'{"action": "end"}', RolloutBody).rollout_step is None


@pytest.mark.parametrize(
    ("kind", "raw", "text"),
    [
        (ReleaseBody, b"", "neither ep_ranks nor num_ranks"),
        (ReleaseBody, b'{"ep_ranks": [1], "num_ranks": 1}', "both ep_ranks and num_ranks"),
        (ReleaseBody, b'{"ep_ranks": []}', "length >= 1"),
        (ReleaseBody, b'{"ep_ranks": 1}', "Expected `array | null`, got `int`"),
        (ReleaseBody, b'{"ep_ranks": ["1"]}', "got `str` - at `$.ep_ranks[0]`"),
        (ReleaseBody, b'{"ep_ranks": [true]}', "got `bool`"),
        (ReleaseBody, b'{"ep_ranks": [1.5]}', "got `float`"),
        (ReleaseBody, b'{"num_ranks": 0}', ">= 1"),
        (ReleaseBody, b'{"ranks": [1]}', "unknown field `ranks`"),
        (ReleaseBody, b'{"num_ranks": 1, "leave": "die"}', "Invalid enum value 'die'"),
        (ReleaseBody, b'{"num_ranks": 1, "wait_s": -1}', ">= 0"),
        (ReleaseBody, b'{"num_ranks": 1, "wait_s": 1e300}', "<= 3600"),
        (ReleaseBody, b'{"num_ranks": 1, "wait_s": NaN}', "malformed"),
        (ReleaseBody, b'{"num_ranks": 1, "operation_id": ""}', "regex"),
        (ReleaseBody, b'{"num_ranks": 1, "operation_id": "a\\n"}', "regex"),
        (ReleaseBody, b'{"num_ranks": 1, "operation_id": "\\ud800"}', "BODY"),
        (RejoinBody, b"[]", "got `array`"),
        (RejoinBody, b"null", "got `null`"),
        (RejoinBody, b"\xff\xfe{", "malformed"),
        (RejoinBody, b'{"operation_id": "\xff"}', "BODY"),
        (RejoinBody, b"[" * 20000, "BODY"),
        (RejoinBody, b" " * 70000, "65536 bytes"),
        (RolloutBody, b"{}", "missing required field `action`"),
        (RolloutBody, b'{"action": "pause"}', "Invalid enum value 'pause'"),
        (RolloutBody, b'{"action": "begin", "rollout_step": -1}', ">= 0"),
        (RolloutBody, b'{"action": "begin", "rollout_step": 9007199254740992}', "<"),
    ],
)
def test_malformed(kind: type, raw: bytes, text: str) -> None:
    with pytest.raises(BadBody) as refused:
        decode(raw, kind)
    said = str(refused.value)
    assert said.startswith("the body cannot be used: ")
    assert ". Fix: send {" in said
    assert text == "BODY" or text in said


@settings(deadline=None)
@given(raw=st.binary(max_size=200) | st.text(max_size=100).map(str.encode), kind=st.sampled_from(KINDS))
def test_any_bytes_are_a_body_or_a_bad_one(raw: bytes, kind: type) -> None:
    try:
        assert isinstance(decode(raw, kind), kind)
    except BadBody as error:
        str(error).encode()
