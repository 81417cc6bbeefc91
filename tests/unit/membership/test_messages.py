"""Messages on the wire."""

import msgspec
import pytest

from flexfloor.experts.placement import canonical, rehome
from flexfloor.membership import messages as m
from flexfloor.membership.events import Leave
from flexfloor.membership.peers import Peers
from flexfloor.membership.state import Membership

HELLO = m.HelloMsg(
    ep_rank=1, incarnation=7, pid=99, node="n1", weight_version="v1", flexfloor_version="0.1.0",
    sglang_version="0.5.23", patches=["a"], token="secret", mailbox={"port": 5, "name": b"x"},
)  # fmt: skip
FULL = canonical(8, 4)
PLAN = m.PrepareMsg(
    membership_epoch=3, old_members=(0, 1, 2, 3), members=(0, 2), leavers_exit=(3,), old_placement=FULL,
    new_placement=rehome(FULL, (0, 2)), mailboxes={0: "box", 3: None},
)  # fmt: skip
BROKEN = m.BrokenMsg(generation=1, membership_epoch=3, slots=(0, None), weight_version="v1", where="gather")
RECOVER = m.RecoverMsg(
    generation=2, membership_epoch=4, members=(0, 2), placement=PLAN.new_placement, live=(0, 2, 3),
    weight_version="v1", mailboxes={0: "box"},
)  # fmt: skip
STATUS = Membership(4, 1, 8).status()


@pytest.mark.parametrize(
    ("decode", "message"),
    [
        (m.decode_from_peer, HELLO),
        (m.decode_from_peer, m.NumberedReportMsg(1, 0, m.SwitchedMsg(3, 0.5, 10))),
        (m.decode_from_peer, m.NumberedReportMsg(2, 7, m.CancelAnsweredMsg(3, True))),
        (m.decode_from_peer, m.NumberedReportMsg(3, 7, BROKEN)),
        (m.decode_from_peer, m.HeartbeatMsg(0.5, 7)),
        (m.decode_from_peer, m.ReleaseMsg("op", (1, 2), Leave.exit)),
        (m.decode_to_agent, m.NumberedOrderMsg(1, 2, PLAN)),
        (m.decode_to_agent, m.NumberedOrderMsg(2, 2, m.CancelMsg(3))),
        (m.decode_to_agent, m.NumberedOrderMsg(3, 2, m.BreakMsg(generation=1, lost=(1, 2)))),
        (m.decode_to_agent, m.NumberedOrderMsg(4, 2, RECOVER)),
        (m.decode_to_client, m.StatusMsg(STATUS, 4)),
        (m.decode_to_client, m.OperationMsg("op", False, "why", 2)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_messages_come_back_as_they_were(decode, message) -> None:
    assert decode([m.encode(message)]) == message


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([], "num_frames"),
        ([b"a", b"b"], "num_frames"),
        ([b"\xc1"], "malformed"),
        ([m.encode(HELLO)[:-3]], "malformed"),
        ([b"\x82\xa4type\xa8HelloMsg\xa7mailbox" + b"\x91" * 100_000], "malformed"),
        ([b"\x91" * 100_000], "invalid"),
        ([m.encode([])], "invalid"),
        ([m.encode(PLAN)], "invalid"),
        ([m.encode(m.DrainFinishedMsg())], "invalid"),
        (
            [m.encode({"type": "ReleaseMsg", "operation_id": "a", "ep_ranks": [], "leave": "rest"})],
            "invalid",
        ),
        (
            [m.encode({"type": "SwitchedMsg", "membership_epoch": "1", "stall_s": 0, "num_bytes": 0})],
            "invalid",
        ),
        ([bytes(m.MAX_FRAME_BYTES + 1)], "too_large"),
    ],
)
def test_bad_frames_have_a_reason(frames, reason) -> None:
    peers = Peers("secret")
    with pytest.raises(m.BadFrame):
        m.decode_from_peer(frames)
    assert peers.admit(b"p", frames) is None
    assert peers.num_dropped == {reason: 1}


def test_peers_speak_after_their_hello_and_for_themselves_only() -> None:
    peers = Peers("secret")
    said = m.NumberedReportMsg(1, 0, m.DrainFinishedMsg())
    report, request = [m.encode(said)], [m.encode(m.StatusRequestMsg())]
    assert peers.admit(b"agent", report) is None
    assert peers.admit(b"agent", [m.encode(msgspec.structs.replace(HELLO, token="guess"))]) is None
    hello = peers.admit(b"agent", [m.encode(HELLO)])
    assert isinstance(hello, m.HelloMsg)
    peers.add_agent(b"agent", hello, 0.0)
    peers.add_client(b"client")
    assert peers.admit(b"agent", report) == said
    assert peers.admit(b"client", request) == m.StatusRequestMsg()
    assert peers.admit(b"agent", request) is None
    assert peers.admit(b"client", report) is None
    assert peers.num_dropped == {"no_hello": 3, "wrong_token": 1}
    assert "secret" not in repr(peers.agents)


def test_a_process_of_other_code_is_named() -> None:
    peers = Peers("secret")
    peers.add_agent(b"agent", HELLO, 0.0)
    assert peers.mismatch(msgspec.structs.replace(HELLO, ep_rank=2)) == ""
    other = msgspec.structs.replace(HELLO, ep_rank=2, sglang_version="0.5.24")
    assert peers.mismatch(other) == "ep_rank 2: sglang_version 0.5.24, ep_rank 1: 0.5.23"
