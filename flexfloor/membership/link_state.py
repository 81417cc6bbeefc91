"""What a rank's link says and takes, without its thread and its socket. PURE; AgentLink gives it both."""

from collections.abc import Callable

from flexfloor.membership import messages as m
from flexfloor.membership.session import Session


class LinkState:
    """Args:
    say: sends a message to the manager; never waits.
    deliver: hands an order to the model's loop.
    on_break: see AgentLink.
    """

    def __init__(
        self,
        hello: m.HelloMsg,
        manager_timeout_s: float,
        now_s: float,
        *,
        say: Callable[[m.HelloMsg | m.HeartbeatMsg | m.NumberedReportMsg], None],
        deliver: Callable[[m.OrderMsg], None],
        on_break: Callable[[int, tuple[int, ...]], None],
    ) -> None:
        self._hello = hello
        self._manager_timeout_s = manager_timeout_s
        self._say = say
        self._deliver = deliver
        self._on_break = on_break
        self._session = Session()
        self.heard_at_s = now_s
        self.is_welcome = False
        self.lost_reason = ""
        """Why no manager gives orders any more; empty: one does."""
        self.generation = 0

    @property
    def is_all_heard(self) -> bool:
        """The manager has every report."""
        return self._session.is_all_heard

    def open(self) -> None:
        self._say(self._hello)

    def report(self, report: m.ReportMsg, now_s: float) -> None:
        number = self._session.send(report, now_s)
        self._say(m.NumberedReportMsg(number, self._session.heard, report))

    def beat(self, loop_age_s: float, now_s: float) -> str:
        """Once per heartbeat. Gives the reason when the manager has been silent for too long."""
        if not self.is_welcome:
            self._say(self._hello)
        self._say(m.HeartbeatMsg(loop_age_s, self._session.heard))
        for number, report in self._session.due(now_s):
            self._say(m.NumberedReportMsg(number, self._session.heard, report))
        silent_s = now_s - self.heard_at_s
        return f"for {silent_s:.0f} s" if silent_s >= self._manager_timeout_s else ""

    def take(self, message: m.AgentInMsg, now_s: float) -> None:
        self.heard_at_s = now_s
        match message:
            case m.WelcomeMsg():
                self.is_welcome = True
            case m.RefusedMsg():
                self.lose_manager(f"the manager refused: {message.reason}")
            case m.AliveMsg():
                self._session.hear(message.heard)
            case m.NumberedOrderMsg():
                self._session.hear(message.heard)
                for order in self._session.take(message.number, message.order):
                    self._take_order(order)

    def lose_manager(self, reason: str) -> bool:
        """False: it was lost before."""
        if self.lost_reason:
            return False
        self._deliver(m.ManagerLostMsg(reason=reason))
        self.lost_reason = reason
        return True

    def _take_order(self, order: m.WireOrderMsg) -> None:
        if self.lost_reason:
            return
        if not isinstance(order, m.BreakMsg):
            return self._deliver(order)
        if order.generation > self.generation:
            self.generation = order.generation
            self._on_break(order.generation, order.lost)
            self._deliver(order)
