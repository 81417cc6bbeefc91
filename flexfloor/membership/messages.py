"""What travels between the manager and its agents and clients: one msgpack frame each.

The first message of a peer carries the job's token: `HelloMsg` of an agent, `ClientHelloMsg` of a client.
From then on the manager knows the peer by its ZeroMQ identity, so other messages name no rank and no life.
"""

from enum import StrEnum
from typing import Any

import msgspec

from flexfloor.experts.placement import ExpertPlacement
from flexfloor.membership.events import Leave, WeightVersion
from flexfloor.membership.status import MembershipStatus

MAX_FRAME_BYTES = 1 << 20


# Agent -> manager.


class HelloMsg(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    ep_rank: int
    incarnation: int
    """Drawn at random by each process."""
    pid: int
    node: str
    """What the job's scheduler calls the machine: SLURM's node name, or else the host's."""
    weight_version: WeightVersion
    flexfloor_version: str
    sglang_version: str
    patches: list[str]
    """Targets that are patched in this process."""
    token: str = ""
    """Empty: AgentLink fills in the endpoint's."""
    mailbox: Any = None
    """What the other ranks need to reach this one; the manager passes it on with every plan, unread."""


class HeartbeatMsg(msgspec.Struct, tag=True, frozen=True):
    loop_age_s: float
    """Since the model's loop was last seen alive."""
    heard: int = 0
    """Orders taken, by their numbers."""


class DrainFinishedMsg(msgspec.Struct, tag=True, frozen=True):
    pass


class SwitchedMsg(msgspec.Struct, tag=True, frozen=True):
    membership_epoch: int
    stall_s: float
    num_bytes: int
    last_counters: dict[str, int] = {}
    """Of a rank that exits now: what it counted since its start, by the counters' names."""


class CancelAskedMsg(msgspec.Struct, tag=True, frozen=True):
    membership_epoch: int


class CancelAnsweredMsg(msgspec.Struct, tag=True, frozen=True):
    membership_epoch: int
    dropped: bool


class WorkArrivedMsg(msgspec.Struct, tag=True, frozen=True):
    pass


class BrokenMsg(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """See RankBroke."""

    generation: int
    membership_epoch: int
    slots: tuple[int | None, ...]
    weight_version: WeightVersion | None
    where: str


class RecoveredMsg(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    generation: int
    membership_epoch: int
    stall_s: float
    num_bytes: int


class RecoveryFailedMsg(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    generation: int
    reason: str


class GoodbyeMsg(msgspec.Struct, tag=True, frozen=True):
    """The process ends. From a rank that was not told to exit, that is a loss."""

    reason: str


# Manager -> agent.


class WelcomeMsg(msgspec.Struct, tag=True, frozen=True):
    membership_epoch: int


class RefusedMsg(msgspec.Struct, tag=True, frozen=True):
    """The hello was understood and not accepted."""

    reason: str


class AliveMsg(msgspec.Struct, tag=True, frozen=True):
    """Answer to a heartbeat."""

    heard: int = 0
    """Reports taken, by their numbers."""


class StartDrainMsg(msgspec.Struct, tag=True, frozen=True):
    pass


class StopDrainMsg(msgspec.Struct, tag=True, frozen=True):
    pass


class PrepareMsg(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    membership_epoch: int
    old_members: tuple[int, ...]
    members: tuple[int, ...]
    leavers_exit: tuple[int, ...]
    old_placement: ExpertPlacement
    new_placement: ExpertPlacement
    mailboxes: dict[int, Any]
    """ep_rank -> what its hello brought, for every old and new member."""


class CancelMsg(msgspec.Struct, tag=True, frozen=True):
    membership_epoch: int


class BreakMsg(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """A rank was lost. AgentLink calls `on_break` at once, and hands the order to the model's loop too."""

    generation: int
    lost: tuple[int, ...]


class RecoverMsg(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """The next group. Orders that came before it and were not carried out are void, drains included."""

    generation: int
    membership_epoch: int
    members: tuple[int, ...]
    placement: ExpertPlacement
    live: tuple[int, ...]
    """Ranks whose process is there, parked ones too: who takes part."""
    weight_version: WeightVersion
    mailboxes: dict[int, Any]
    """Of the live ranks."""


class StandDownMsg(msgspec.Struct, tag=True, frozen=True):
    """The server ends in good order. For parked ranks: they read no requests, so SGLang cannot tell them."""


class ManagerLostMsg(msgspec.Struct, tag=True, frozen=True):
    """Never on the wire: the link tells its own process that no manager will give orders any more."""

    reason: str


# Client -> manager.


class ClientHelloMsg(msgspec.Struct, tag=True, frozen=True):
    token: str


class ReleaseMsg(msgspec.Struct, tag=True, frozen=True):
    operation_id: str
    ep_ranks: tuple[int, ...]
    leave: Leave = Leave.park


class RejoinMsg(msgspec.Struct, tag=True, frozen=True):
    operation_id: str
    ep_ranks: tuple[int, ...] = ()
    """Empty: all that are parked or on their way there."""


class StatusRequestMsg(msgspec.Struct, tag=True, frozen=True):
    request_id: int = 0
    """Comes back in the answer, so that a late one is not taken for a fresh one."""


# Manager -> client.


class OperationMsg(msgspec.Struct, tag=True, frozen=True):
    operation_id: str
    ok: bool
    reason: str
    membership_epoch: int


class StatusMsg(msgspec.Struct, tag=True, frozen=True):
    status: MembershipStatus
    request_id: int = 0


ReportMsg = (
    DrainFinishedMsg
    | SwitchedMsg
    | CancelAskedMsg
    | CancelAnsweredMsg
    | WorkArrivedMsg
    | BrokenMsg
    | RecoveredMsg
    | RecoveryFailedMsg
    | GoodbyeMsg
)
"""What an agent says after its hello."""
WireOrderMsg = StartDrainMsg | StopDrainMsg | PrepareMsg | CancelMsg | BreakMsg | RecoverMsg | StandDownMsg
OrderMsg = WireOrderMsg | ManagerLostMsg
"""What the model's loop gets to see."""


class NumberedReportMsg(msgspec.Struct, tag=True, frozen=True):
    """See Session."""

    number: int
    heard: int
    report: ReportMsg


class NumberedOrderMsg(msgspec.Struct, tag=True, frozen=True):
    number: int
    heard: int
    order: WireOrderMsg


RequestMsg = ReleaseMsg | RejoinMsg | StatusRequestMsg
ManagerInMsg = HelloMsg | ClientHelloMsg | HeartbeatMsg | NumberedReportMsg | RequestMsg
AgentInMsg = WelcomeMsg | RefusedMsg | AliveMsg | NumberedOrderMsg
ClientInMsg = OperationMsg | StatusMsg
ManagerOutMsg = AgentInMsg | ClientInMsg


class BadFrameReason(StrEnum):
    """Why a frame was dropped."""

    num_frames = "num_frames"
    too_large = "too_large"
    malformed = "malformed"
    """No msgpack."""
    invalid = "invalid"
    """No message that is known here, or one with wrong fields."""
    wrong_token = "wrong_token"
    no_hello = "no_hello"
    """From a peer that has not introduced itself, or did so as something else."""


class BadFrame(ValueError):
    """A frame that is dropped and counted."""

    def __init__(self, reason: BadFrameReason, detail: str) -> None:
        self.reason = reason
        super().__init__(f"{reason}: {detail}")


encode = msgspec.msgpack.Encoder().encode
_from_peer = msgspec.msgpack.Decoder(ManagerInMsg)
_to_agent = msgspec.msgpack.Decoder(AgentInMsg)
_to_client = msgspec.msgpack.Decoder(ClientInMsg)


def decode_from_peer(frames: list[bytes]) -> ManagerInMsg:
    """What the manager received, its identity frame taken off. Raises BadFrame."""
    message: ManagerInMsg = _decode(frames, _from_peer)
    return message


def decode_to_agent(frames: list[bytes]) -> AgentInMsg:
    """Raises BadFrame."""
    message: AgentInMsg = _decode(frames, _to_agent)
    return message


def decode_to_client(frames: list[bytes]) -> ClientInMsg:
    """Raises BadFrame."""
    message: ClientInMsg = _decode(frames, _to_client)
    return message


def _decode(frames: list[bytes], decoder: msgspec.msgpack.Decoder[Any]) -> Any:
    if len(frames) != 1:
        raise BadFrame(BadFrameReason.num_frames, f"{len(frames)} frames instead of 1")
    if len(frames[0]) > MAX_FRAME_BYTES:
        raise BadFrame(BadFrameReason.too_large, f"{len(frames[0])} of {MAX_FRAME_BYTES} bytes")
    try:
        return decoder.decode(frames[0])
    except msgspec.ValidationError as error:
        raise BadFrame(BadFrameReason.invalid, str(error)) from error
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise BadFrame(BadFrameReason.malformed, str(error)) from error
