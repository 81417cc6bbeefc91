"""Who may say what to the manager, and for how long it is remembered."""

import pytest

from flexfloor.membership import messages as m
from flexfloor.membership import peers
from flexfloor.membership.peers import Peers

ASK = [m.encode(m.StatusRequestMsg(1))]


def test_the_clients_that_spoke_last_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "MAX_CLIENTS", 2)
    book = Peers("secret")
    for name in (b"a", b"b"):
        book.add_client(name)
    assert book.admit(b"a", ASK) is not None
    book.add_client(b"c")
    assert book.admit(b"b", ASK) is None
    assert book.admit(b"a", ASK) is not None
    assert book.num_dropped == {"no_hello": 1}


def test_a_client_gives_no_orders_of_a_rank() -> None:
    book = Peers("secret")
    book.add_client(b"a")
    assert book.admit(b"a", [m.encode(m.NumberedReportMsg(1, 0, m.WorkArrivedMsg()))]) is None
    assert book.admit(b"a", [m.encode(m.ClientHelloMsg("Secret"))]) is None
    assert book.num_dropped == {"no_hello": 1, "wrong_token": 1}
