"""Operations by id, and events by number."""

import asyncio
import json
from concurrent.futures import Future

from flexfloor.membership.status import OperationResult
from sglang_patches.http.events import EventLog
from sglang_patches.http.operations import Operations


def result(name: str, ok: bool = True) -> OperationResult:
    return OperationResult(operation_id=name, ok=ok, reason="" if ok else "the floor", membership_epoch=2)


def test_an_operation_is_open_until_its_result() -> None:
    operations, future = Operations(), Future[OperationResult]()
    assert operations.known("a") is None
    operations.add("a", "release 1", future)
    assert operations.known("a") is future
    future.set_result(result("a"))
    found = operations.known("a")
    assert found is not None
    assert found.result() == result("a")


def test_an_id_stands_for_one_request() -> None:
    operations, future = Operations(), Future[OperationResult]()
    operations.add("a", "release 1", future)
    assert operations.conflict("a", "release 1") == ""
    assert operations.conflict("b", "release 2") == ""
    assert "operation_id a stands for another request (release 1)" in operations.conflict("a", "release 2")
    future.set_result(result("a"))
    assert operations.conflict("a", "release 2")


def test_results_of_others_are_known_too_and_old_ones_forgotten() -> None:
    operations = Operations(num_kept=2)
    for name in ("a", "b", "c"):
        operations.finish(result(name, ok=False))
    assert operations.known("a") is None
    found = operations.known("b")
    assert found is not None
    assert found.result().reason == "the floor"


def test_an_operation_without_a_result_is_no_longer_known() -> None:
    operations, future = Operations(), Future[OperationResult]()
    operations.add("a", "release 1", future)
    future.set_exception(RuntimeError("the manager is closed"))
    assert operations.known("a") is None


def read(log: EventLog, last_id: int) -> str:
    """A stream from there to the end of the server."""

    async def run() -> str:
        return "".join([frame async for frame in log.stream(last_id, lambda: True)])

    return asyncio.run(run())


def test_a_stream_replays_what_came_after_a_number() -> None:
    log = EventLog(clock=lambda: 17.0)
    for epoch in (1, 2, 3):
        log.add({"type": "switch", "membership_epoch": epoch})
    frames = read(log, 1).split("\n\n")
    assert frames[0] == ": flexfloor"
    assert frames[1].splitlines()[:2] == ["id: 2", "event: switch"]
    data = json.loads(frames[1].splitlines()[2].removeprefix("data: "))
    assert data == {"id": 2, "at": 17.0, "type": "switch", "membership_epoch": 2}
    assert len(frames) == 4
    assert log.num_streams == 0


def test_what_is_no_longer_kept_is_said() -> None:
    log = EventLog(num_kept=2)
    for epoch in range(5):
        log.add({"type": "switch", "membership_epoch": epoch})
    assert ": 3 events are no longer kept\n" in read(log, 0)
    assert "no longer kept" not in read(log, 3)


def test_an_event_of_another_thread_wakes_a_stream() -> None:
    log = EventLog()

    async def run() -> list[str]:
        frames: list[str] = []
        async for frame in log.stream(0, lambda: len(frames) == 2):
            frames.append(frame)
            if len(frames) == 1:
                await asyncio.to_thread(log.add, {"type": "state"})
        return frames

    frames = asyncio.run(asyncio.wait_for(run(), 20))
    assert frames[1].startswith("id: 1\nevent: state\n")
