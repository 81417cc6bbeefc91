"""Any order of records, from attempts current, given up and repeated, leaves each response finished once."""

from hypothesis import given
from hypothesis import strategies as st

from flexfloor.records import Aborted, Finished, Progress, StepOpened, Submitted
from flexfloor.rollout.step_state import StepState
from flexfloor.types import FinishReason

NAMES = ("a", "b", "c")
MOVES = st.lists(
    st.tuples(st.sampled_from(NAMES), st.sampled_from(["go", "tokens", "finish", "abort", "late", "again"])),
    max_size=80,
)


class Model:
    """The same step with plain counters: what the state has to agree with."""

    def __init__(self) -> None:
        self.state = StepState()
        self.state.apply(StepOpened(1, 0, 7, len(NAMES), 0.0, 0.0))
        self.attempt = dict.fromkeys(NAMES, 0)
        self.num_tokens = dict.fromkeys(NAMES, 0)
        self.is_running = dict.fromkeys(NAMES, False)
        self.is_finished = dict.fromkeys(NAMES, False)
        self.num_dropped = 0

    def move(self, name: str, move: str) -> None:
        if self.attempt[name] == 0 and move != "go":
            return
        getattr(self, move)(name)

    def go(self, name: str) -> None:
        if not self.is_running[name] and not self.is_finished[name]:
            self.attempt[name] += 1
            self.is_running[name] = True
            prompt = (1,) if self.attempt[name] == 1 else ()
            assert self.state.apply(Submitted(name, self.attempt[name], 0, 0.0, "p", 0, 1000, 1, prompt))

    def tokens(self, name: str) -> None:
        begin = self.num_tokens[name]
        new = list(range(begin, begin + 3))
        record = Progress(name, self.attempt[name], begin, new, [-float(t) for t in new])
        self._offer(record, name)
        self.num_tokens[name] += 3 * self.is_running[name]

    def finish(self, name: str) -> None:
        reason, count = FinishReason.stop, self.num_tokens[name]
        self._offer(Finished(name, self.attempt[name], 0, 7, reason, count, 1000, 0.0, 1.0), name)
        self.is_finished[name] |= self.is_running[name]
        self.is_running[name] = False

    def abort(self, name: str) -> None:
        self._offer(Aborted(name, self.attempt[name], 0, 0.0, self.num_tokens[name], "lost"), name)
        self.is_running[name] = False

    def late(self, name: str) -> None:
        """Tokens of the attempt before this one."""
        if self.attempt[name] > 1:
            assert not self.state.apply(Progress(name, self.attempt[name] - 1, 0, [9], [-9.0]))
            self.num_dropped += 1

    def again(self, name: str) -> None:
        if self.is_finished[name]:
            self.finish(name)

    def _offer(self, record: Progress | Finished | Aborted, name: str) -> None:
        accepted = self.state.apply(record)
        assert accepted == self.is_running[name]
        self.num_dropped += not accepted


@given(MOVES)
def test_each_response_finishes_once_with_the_tokens_of_its_live_attempts(
    moves: list[tuple[str, str]],
) -> None:
    model = Model()
    for name, move in moves:
        model.move(name, move)
        model.state.validate()
    state = model.state
    assert state.num_finished == sum(model.is_finished.values())
    assert [r.response_id for r in state.finished_responses()] == [
        name for name in state.responses if model.is_finished[name]
    ]
    for response in state.finished_responses():
        count = model.num_tokens[response.response_id]
        assert response.token_ids == tuple(range(count))
        assert response.logprobs == tuple(-float(t) for t in range(count))
        assert response.num_attempts == model.attempt[response.response_id]
    assert state.num_duplicates + state.num_late == model.num_dropped
    assert state.num_tokens == sum(model.num_tokens.values())
    assert state.num_retries == sum(max(0, n - 1) for n in model.attempt.values())
