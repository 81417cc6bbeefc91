"""Every route with good and bad input, against a real manager; docs/server_api.md shows the same answers."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from played_server import PlayedServer, play_server

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]


def wait_until(is_so: Callable[[], object], deadline_s: float = 20.0) -> None:
    end_s = time.monotonic() + deadline_s
    while not is_so():
        assert time.monotonic() < end_s


def events_of(server: PlayedServer, last_id: str = "0") -> list[dict[str, Any]]:
    """What a stream has so far."""
    server.tokenizer_manager.gracefully_exit = True
    text = server.get("events", **{"Last-Event-ID": last_id}).text
    server.tokenizer_manager.gracefully_exit = False
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]


def test_membership(server: PlayedServer) -> None:
    answer = server.get("membership")
    assert answer.status_code == 200
    found = answer.json()
    assert found["members"] == found["routed"] == [0, 1, 2, 3]
    assert found["states"] == {str(rank): "serving" for rank in range(4)}
    assert found["experts_per_rank"] == {str(rank): 2 for rank in range(4)}
    assert (found["mode"], found["release"], found["floor"]) == ("elastic", "manual", 2)
    assert (found["membership_epoch"], found["last_switches"], found["failed"]) == (0, [], None)


def test_a_release_and_a_rejoin(server: PlayedServer) -> None:
    code, answer = server.post("release", ep_ranks=[2, 3], operation_id="tail-7", wait_s=20)
    done = {"operation_id": "tail-7", "status": "done", "membership_epoch": answer["membership_epoch"]}
    assert (code, answer) == (200, done)
    found = server.get("membership").json()
    assert (found["members"], found["states"]["3"]) == ([0, 1], "parked")
    switch = found["last_switches"][-1]
    assert (switch["members"], switch["stall_s"]) == ([0, 1], 0.01)
    assert switch["num_bytes"] > 0
    assert abs(switch["at"] - time.time()) < 60
    # Asked again, nothing happens and the answer is the same.
    assert server.post("release", ep_ranks=[2, 3], operation_id="tail-7") == (200, done)
    assert server.get("operations/tail-7").json() == done
    assert server.post("rejoin", wait_s=20)[0] == 200
    assert server.members() == [0, 1, 2, 3]


def test_an_answer_does_not_wait_for_a_rank_that_is_busy(server: PlayedServer) -> None:
    server.ranks[1].num_work = 1
    code, answer = server.post("release", ep_ranks=[1], operation_id="slow")
    assert (code, answer) == (202, {"operation_id": "slow", "status": "pending"})
    assert server.get("operations/slow").status_code == 202
    found = server.get("membership").json()
    assert (found["members"], found["routed"]) == ([0, 1, 2, 3], [0, 2, 3])
    # The same again waits with it, another way of leaving is refused, and a rejoin takes it back.
    assert server.post("release", ep_ranks=[1], operation_id="slow")[0] == 202
    code, answer = server.post("release", ep_ranks=[1], leave="exit")
    assert (code, answer["status"]) == (409, "refused")
    assert answer["reason"] == "ep_rank 1 is draining in order to park, not to exit"
    assert server.post("rejoin", ep_ranks=[1], wait_s=20)[0] == 200
    code, answer = server.post("release", ep_ranks=[1], operation_id="slow")
    assert (code, answer["reason"]) == (409, "ep_rank 1 rejoined")
    server.ranks[1].num_work = 0


def test_a_release_ends_when_its_rank_is_drained(server: PlayedServer) -> None:
    server.ranks[3].num_work = 1
    assert server.post("release", ep_ranks=[3], operation_id="tail")[0] == 202
    server.ranks[3].num_work = 0
    wait_until(lambda: server.get("operations/tail").status_code == 200)
    assert server.members() == [0, 1, 2]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"ep_ranks": [7]}, "ep_rank 7 does not exist: the ranks are 0 to 3"),
        ({"ep_ranks": [-1]}, "ep_rank -1 does not exist: the ranks are 0 to 3"),
        ({"ep_ranks": [10**30]}, "does not exist"),
        ({"ep_ranks": [1, 2, 3]}, "would leave 1 of the 4 ranks that take requests, and the floor is 2"),
        ({"num_ranks": 3}, "the floor is 2"),
        ({"num_ranks": 99}, "would leave 0 of the 4 ranks"),
    ],
)
def test_a_release_that_cannot_be(server: PlayedServer, body: dict[str, Any], reason: str) -> None:
    code, answer = server.post("release", **body)
    assert (code, answer["status"]) == (409, "refused")
    assert reason in answer["reason"]
    assert server.get(f"operations/{answer['operation_id']}").status_code == 409
    assert server.members() == [0, 1, 2, 3]


def test_ranks_by_number_are_those_with_fewest_requests(server: PlayedServer) -> None:
    # The last rank has a request.
    assert server.post("release", num_ranks=1, wait_s=20)[0] == 200
    assert server.members() == [0, 1, 3]
    assert server.post("release", num_ranks=1, wait_s=20)[0] == 200
    assert server.members() == [0, 3]
    assert server.post("rejoin", num_ranks=1, wait_s=20)[0] == 200
    assert server.members() == [0, 1, 3]
    code, answer = server.post("rejoin", num_ranks=2)
    assert (code, answer["reason"]) == (409, "num_ranks=2: 1 ranks are parked or on their way there")


def test_a_rank_that_has_left_may_be_released_again_and_one_that_exited_cannot_return(
    server: PlayedServer,
) -> None:
    assert server.post("release", ep_ranks=[2], wait_s=20)[0] == 200
    assert server.post("release", ep_ranks=[2])[0] == 200
    assert server.post("release", ep_ranks=[3], leave="exit", wait_s=20)[0] == 200
    code, answer = server.post("rejoin", ep_ranks=[3])
    assert (code, answer["reason"]) == (409, "ep_rank 3 is exited: its process is gone")
    assert server.post("rejoin", ep_ranks=[9])[0] == 409


def test_an_operation_id_stands_for_one_request(server: PlayedServer) -> None:
    assert server.post("release", ep_ranks=[3], operation_id="x", wait_s=20)[0] == 200
    for path, body in (("release", {"ep_ranks": [2]}), ("rejoin", {})):
        code, answer = server.post(path, operation_id="x", **body)
        assert (code, answer["operation_id"], answer["status"]) == (409, "x", "refused")
        assert "operation_id x stands for another request (release ep_ranks=[3]" in answer["reason"]
    assert server.members() == [0, 1, 2]


@pytest.mark.parametrize("path", ["release", "rejoin", "rollout"])
@pytest.mark.parametrize("raw", [b"{", b"[]", b'{"no": 1}', b"\xff", b"[" * 50_000, b" " * 70_000])
def test_a_malformed_body_gets_one_clear_text(server: PlayedServer, path: str, raw: bytes) -> None:
    headers = {"Authorization": server.authorization, "Content-Type": "application/json"}
    answer = server.client.post(f"/flexfloor/{path}", content=raw, headers=headers)
    assert answer.status_code == 422
    assert answer.json().keys() == {"reason"}
    assert answer.json()["reason"].startswith("the body cannot be used: ")


def test_unknown_operations_and_wrong_methods(server: PlayedServer) -> None:
    answer = server.get("operations/never")
    assert (answer.status_code, answer.json()["operation_id"]) == (404, "never")
    assert server.get("release").status_code == 405
    assert server.post("membership")[0] == 405
    assert server.get("nothing").status_code == 404


def test_a_marked_rollout(server: PlayedServer) -> None:
    assert server.post("release", ep_ranks=[3], wait_s=20)[0] == 200
    code, answer = server.post("rollout", action="begin", rollout_step=5)
    assert code == 200
    assert (answer["status"], answer["rollout_step"]) == ("begun", 5)
    assert server.members() == [0, 1, 2, 3], "a step begins with everybody"
    code, answer = server.post("rollout", action="begin")
    assert (code, answer["reason"]) == (409, "rollout_step 5 has begun and has not ended")
    code, answer = server.post("rollout", action="end", rollout_step=6)
    assert (code, answer["reason"]) == (409, "rollout_step=6: rollout_step 5 has begun")
    assert server.post("release", ep_ranks=[2, 3], wait_s=20)[0] == 200
    server.tokenizer_manager.iterations = {0: 30, 1: 20, 2: 10, 3: 10}
    code, answer = server.post("rollout", action="end", rollout_step=5)
    assert code == 200
    assert (answer["status"], answer["rollout_step"]) == ("ended", 5)
    assert (answer["worker_iterations"], answer["static_worker_iterations"]) == (70, 120)
    assert (answer["num_releases"], answer["response_tokens"]) == (2, 0)
    assert 2 * answer["wall_s"] < answer["occupied_worker_s"] < answer["static_occupied_worker_s"]
    assert answer["static_occupied_worker_s"] == pytest.approx(4 * answer["wall_s"])
    assert server.members() == [0, 1, 2, 3], "and ends with everybody, for new weights"
    code, answer = server.post("rollout", action="end")
    assert (code, answer["reason"]) == (409, "no rollout step has begun")


def test_a_step_whose_ranks_do_not_answer_can_be_ended_later(server: PlayedServer) -> None:
    assert server.post("rollout", action="begin")[0] == 200
    server.tokenizer_manager.answers = False
    code, answer = server.post("rollout", action="end")
    assert code == 504
    assert "Fix: ask again" in answer["reason"]
    server.tokenizer_manager.answers = True
    assert server.post("rollout", action="end")[0] == 200


def test_events(server: PlayedServer) -> None:
    assert server.post("rollout", action="begin", rollout_step=1)[0] == 200
    assert server.post("release", ep_ranks=[3], operation_id="tail", wait_s=20)[0] == 200
    assert server.post("release", ep_ranks=[8], operation_id="bad")[0] == 409
    assert server.post("rollout", action="end")[0] == 200
    found = events_of(server)
    assert [event["id"] for event in found] == list(range(1, len(found) + 1))
    switches = [event["members"] for event in found if event["type"] == "switch"]
    assert switches == [[0, 1, 2], [0, 1, 2, 3]]
    states = [(e["ep_rank"], e["from"], e["to"]) for e in found if e["type"] == "state" and e["ep_rank"] == 3]
    assert states[-3:] == [
        (3, "serving", "draining"),
        (3, "draining", "parked"),
        (3, "parked", "serving"),
    ]
    results = {e["operation_id"]: e["status"] for e in found if e["type"] == "operation"}
    assert (results["tail"], results["bad"]) == ("done", "refused")
    marks = [event["action"] for event in found if event["type"] == "rollout"]
    assert marks == ["begin", "end"]
    assert events_of(server, str(len(found) - 1)) == found[-1:]
    # A number that this run of the server never gave: everything that is kept.
    assert events_of(server, "999999") == found


@pytest.mark.parametrize("last_id", ["x", "-1", "1.5", "9" * 19, "\u0663"])
def test_a_last_event_id_that_is_no_number(server: PlayedServer, last_id: str) -> None:
    headers = {"Last-Event-ID": last_id.encode()}
    answer = server.client.get("/flexfloor/events", headers=headers)
    assert answer.status_code == 422


def test_changing_needs_the_token_and_reading_does_not(server: PlayedServer) -> None:
    server.authorization = "Bearer wrong"
    assert server.get("membership").status_code == 200
    for path, body in (("release", {"num_ranks": 1}), ("rejoin", {}), ("rollout", {"action": "begin"})):
        code, answer = server.post(path, **body)
        assert code == 401
        assert "token in the server's --flexfloor-folder" in answer["reason"]
    headers = {"Authorization": b"Bearer \xff\xfe"}
    assert server.client.post("/flexfloor/rejoin", headers=headers).status_code == 401


def test_keys_of_sglang(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with play_server(
        monkeypatch, tmp_path, api_key="sek", admin_api_key="adm", membership="elastic"
    ) as server:
        for key, reads, changes in (("wrong", 401, 401), ("sek", 200, 401), ("adm", 200, 200)):
            server.authorization = f"Bearer {key}"
            assert server.get("membership").status_code == reads
            assert server.post("rejoin", wait_s=20)[0] == changes
        server.authorization = f"Bearer {server.token}"
        assert server.post("rejoin")[0] == 401, "with an admin key the token changes nothing"


def test_a_static_group_answers_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with play_server(monkeypatch, tmp_path) as server:
        found = server.get("membership").json()
        assert (found["mode"], found["members"], found["floor"]) == ("static", [0, 1, 2, 3], 4)
        assert found["weight_versions"] == {str(rank): "7" for rank in range(4)}
        assert found["experts_per_rank"] == {str(rank): 2 for rank in range(4)}
        code, answer = server.post("release", ep_ranks=[3], operation_id="s")
        assert (code, answer["status"]) == (409, "refused")
        assert "Fix: start flexfloor-serve with --flexfloor-membership elastic" in answer["reason"]
        assert server.get("operations/s").status_code == 409
        assert server.post("rejoin")[0] == 200
        assert server.post("rejoin", ep_ranks=[4])[0] == 409
        assert server.post("rollout", action="begin")[0] == 200
        server.tokenizer_manager.iterations = dict.fromkeys(range(4), 50)
        code, answer = server.post("rollout", action="end")
        assert (code, answer["worker_iterations"], answer["static_worker_iterations"]) == (200, 200, 200)
        assert answer["occupied_worker_s"] == pytest.approx(answer["static_occupied_worker_s"], rel=0.01)


@pytest.mark.parametrize("root_path", ["/flexfloor", "/flexfloor/x"])
def test_a_root_path_that_would_be_ours_ends_the_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, root_path: str
) -> None:
    with (
        pytest.raises(SystemExit, match="--fastapi-root-path"),
        play_server(monkeypatch, tmp_path, root_path=root_path),
    ):
        pass


PATHS = st.sampled_from(["membership", "release", "rejoin", "rollout", "operations/x"]) | st.text(
    st.characters(codec="utf-8", exclude_characters="?#\\"), max_size=12
).map("operations/{}".format)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=6,
)
FIELDS = ("ep_ranks", "num_ranks", "leave", "operation_id", "wait_s", "action", "rollout_step", "other")
GOOD = st.fixed_dictionaries(
    {},
    optional={
        "ep_ranks": st.lists(st.integers(-2, 6), max_size=4),
        "num_ranks": st.integers(0, 6),
        "leave": st.just("park"),
        "operation_id": st.sampled_from(["a", "b", "c"]),
        "action": st.sampled_from(["begin", "end"]),
        "rollout_step": st.integers(0, 3),
    },
)
# An answer that waits would make the test wait.
BODIES = (GOOD | st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=4)).map(
    lambda body: {name: value for name, value in body.items() if name != "wait_s"}
)
RAW = BODIES.map(lambda body: json.dumps(body).encode()) | st.binary(max_size=64)
SHOWN = st.sampled_from([b"token", b"token", b"token", b"Bearer x", b""]) | st.binary(max_size=16).map(
    lambda raw: raw.replace(b"\r", b"").replace(b"\n", b"").replace(b"\0", b"")
)


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(method=st.sampled_from(["GET", "POST", "POST", "PUT"]), path=PATHS, raw=RAW, shown=SHOWN)
def test_nothing_that_is_sent_breaks_a_route(
    server: PlayedServer, method: str, path: str, raw: bytes, shown: bytes
) -> None:
    headers = {"Authorization": server.authorization.encode() if shown == b"token" else shown}
    answer = server.client.request(method, f"/flexfloor/{quote(path)}", content=raw, headers=headers)
    assert answer.status_code < 500, (answer.status_code, answer.text)
    assert answer.status_code in (200, 202, 401, 404, 405, 409, 422, 307)
    if answer.status_code in (401, 409, 422):
        assert answer.json()["reason"]
    assert server.side.group.status().failed is None
