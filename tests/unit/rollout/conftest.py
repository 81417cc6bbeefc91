"""Shared by the rollout's unit tests."""

import os

import pytest


@pytest.fixture(autouse=True)
def fsyncs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """No test cuts the power, and a real fsync takes seconds on a busy disk: count the calls instead."""
    calls: list[int] = []
    monkeypatch.setattr(os, "fsync", calls.append)
    return calls
