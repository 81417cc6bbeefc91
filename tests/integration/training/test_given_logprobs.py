"""A step that is given its old and reference logprobs does what it does when it computes them itself."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from tiny_qwen import ALGORITHM, make_sequences, running_trainer

from flexfloor.training.client import CallAbandoned, TrainerClient, TrainerRefused
from flexfloor.training.messages import LogprobGroup
from flexfloor.types import TrainerLogprobs, TrainSequence

pytestmark = pytest.mark.integration


class _TakesAnyWeights(BaseHTTPRequestHandler):
    """An engine as far as a sync over the disk goes."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        body = b'{"success": true, "message": ""}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def engine_url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _TakesAnyWeights) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@dataclass
class Synced:
    """A trainer at its start, whose weights are those of version 3."""

    client: TrainerClient
    start: Path
    url: str

    def again(self) -> TrainerClient:
        self.client.load_checkpoint(str(self.start))
        self.client.sync_weights(3, self.url)
        return self.client


@pytest.fixture(scope="module")
def started(hf_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Synced]:
    folder = tmp_path_factory.mktemp("given")
    sizes = {"weight_sync": "disk"}
    with (
        engine_url() as url,
        running_trainer(folder, hf_checkpoint, algorithm=ALGORITHM, trainer=sizes) as running,
    ):
        running.client.save_checkpoint(str(folder / "start"))
        yield Synced(running.client, folder / "start", url)


@pytest.fixture
def trainer(started: Synced) -> Synced:
    started.again()
    return started


def named(count: int, *, seed: int) -> list[TrainSequence]:
    return [replace(one, response_id=f"r{n}") for n, one in enumerate(make_sequences(count, seed=seed))]


def groups_of(sequences: Sequence[TrainSequence], size: int, *, first_later: int) -> list[LogprobGroup]:
    """Prompt groups of `size`; those from sequence `first_later` on train in a later optimizer step."""
    starts = range(0, len(sequences), size)
    return [LogprobGroup(list(sequences[n : n + size]), n + size > first_later) for n in starts]


def asked(client: TrainerClient, groups: Sequence[LogprobGroup]) -> dict[str, TrainerLogprobs]:
    answer = client.group_logprobs(groups, weight_version=3, needs_reference=True)
    assert answer.seconds > 0
    return {one.response_id: one for one in answer.logprobs}


def with_given(sequences: Sequence[TrainSequence], found: dict[str, TrainerLogprobs]) -> list[TrainSequence]:
    return [replace(one, given=found[one.response_id]) for one in sequences]


def test_given_logprobs_train_to_the_same_bits(trainer: Synced) -> None:
    """Where packing does not matter to the last bit, which is asked first; else to rounding.

    A step packs a minibatch together, what it is given was packed by the group, and a matrix kernel may round
    a row by the number of rows beside it. The CPUs seen so far give the same bits for groups of 16.
    """
    sequences = named(48, seed=21)
    together = trainer.client.logprobs(sequences)
    by_group = [trainer.client.logprobs(sequences[start : start + 16]) for start in (0, 16, 32)]
    rounds_alike = [row for part in by_group for row in part] == together
    alone = trainer.client.train_step(sequences)
    expected = trainer.client.weight_checksum()
    assert alone.logprob_seconds > 0

    client = trainer.again()
    found = asked(client, groups_of(sequences, 16, first_later=24))
    assert [name for name, one in found.items() if one.old is None] == [f"r{n}" for n in range(16)]
    assert all(one.reference is not None for one in found.values())
    given = client.train_step(with_given(sequences, found))
    assert given.logprob_seconds == 0.0
    assert given.kl > 0
    assert (client.weight_checksum() == expected) is rounds_alike
    limit = 0.0 if rounds_alike else 1e-5
    for field in ("loss", "grad_norm", "kl", "clip_fraction", "importance_clip_fraction", "entropy"):
        assert getattr(given, field) == pytest.approx(getattr(alone, field), abs=limit, rel=0.0), field


def test_a_group_has_the_same_logprobs_whenever_it_is_asked_for(trainer: Synced) -> None:
    """Groups of three: few rows for each expert, which is where packing together would change last bits."""
    groups = groups_of(named(27, seed=22), 3, first_later=0)
    together = asked(trainer.client, groups)
    one_by_one: dict[str, TrainerLogprobs] = {}
    for group in reversed(groups):
        one_by_one |= asked(trainer.client, [group])
    assert one_by_one == together
    assert asked(trainer.client, groups[5:] + groups[:5]) == together


def test_a_step_takes_what_it_is_given_and_computes_nothing_of_it(trainer: Synced) -> None:
    sequences = named(16, seed=23)
    found = asked(trainer.client, groups_of(sequences, 4, first_later=8))
    honest = trainer.client.train_step(with_given(sequences, found))
    client = trainer.again()
    shifted = {
        name: replace(one, reference=tuple(value - 1.0 for value in one.reference or ()))
        for name, one in found.items()
    }
    # The first optimizer step's current and reference logprobs are equal; k3 of a shift by -1 is exp(-1).
    assert client.train_step(with_given(sequences, shifted)).kl > honest.kl + 0.2


def test_stale_and_mixed_up_logprobs_are_refused_and_change_nothing(trainer: Synced) -> None:
    client, sequences = trainer.client, named(8, seed=24)
    groups = groups_of(sequences, 4, first_later=4)
    with pytest.raises(TrainerRefused, match="by weight_version 2, and the trainer's weights are 3"):
        client.group_logprobs(groups, weight_version=2, needs_reference=True)
    found = asked(client, groups)
    with pytest.raises(TrainerRefused, match="given for 1 of 8 sequences"):
        client.train_step([replace(sequences[0], given=found["r0"]), *sequences[1:]])
    with pytest.raises(TrainerRefused, match="response 'r0' is given the logprobs of 'r1'"):
        client.train_step(with_given(sequences, {**found, "r0": found["r1"]}))
    checksum = client.weight_checksum()
    client.train_step(with_given(sequences, found))
    assert client.weight_checksum() != checksum
    with pytest.raises(TrainerRefused, match="weight_version 3, and the trainer's weights have changed"):
        client.train_step(with_given(sequences, found))
    with pytest.raises(TrainerRefused, match="have changed since the last sync"):
        client.group_logprobs(groups, weight_version=3, needs_reference=True)
    client.sync_weights(4, trainer.url)
    with pytest.raises(TrainerRefused, match="weight_version 3, and the trainer's weights are 4"):
        client.train_step(with_given(sequences, found))


def test_an_unwanted_call_is_given_up_and_the_next_gets_its_own_answer(trainer: Synced) -> None:
    groups = groups_of(named(64, seed=25), 16, first_later=0)
    with pytest.raises(CallAbandoned, match="GroupLogprobsMsg"):
        trainer.client.group_logprobs(groups, weight_version=3, needs_reference=True, is_wanted=lambda: False)
    assert asked(trainer.client, groups[:1]).keys() == {f"r{n}" for n in range(16)}
