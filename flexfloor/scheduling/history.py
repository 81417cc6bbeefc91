"""Lengths of finished responses, kept over runs in one SQLite file.

Rule 1: what `add` was given is in the file whole or not at all, whatever kills the process.
Rule 2: a response is there once by (dataset, run_id, response_id). Drawn again, as after a resume, it takes
the place of the one before.
Rule 3: reading needs no leave of the writer, and a reader sees whole calls of `add` only.

The file is in write-ahead mode, so a `-wal` and a `-shm` file may lie beside it; they belong to it. Such a
file must not lie on a network file system.
"""

import sqlite3
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from flexfloor.errors import FlexfloorError
from flexfloor.scheduling.observation import LengthObservation

SCHEMA_VERSION = 1
APPLICATION_ID = 0x464C4648
"""Tells the file from other SQLite files: the letters FLFH."""
BUSY_TIMEOUT_S = 30.0

_COLUMNS = tuple(field.name for field in fields(LengthObservation))
_TABLE = """
CREATE TABLE observations (
    sequence INTEGER PRIMARY KEY AUTOINCREMENT,
    dataset TEXT NOT NULL,
    prompt_id TEXT NOT NULL,
    response_id TEXT NOT NULL,
    run_id TEXT NOT NULL,
    rollout_step INTEGER NOT NULL,
    weight_version INTEGER NOT NULL,
    pass_index INTEGER NOT NULL,
    num_tokens INTEGER NOT NULL,
    prompt_tokens INTEGER NOT NULL,
    is_truncated INTEGER NOT NULL,
    cap_tokens INTEGER NOT NULL,
    UNIQUE (dataset, run_id, response_id)
)
"""
_UPSERT = (
    f"INSERT INTO observations ({', '.join(_COLUMNS)}) VALUES ({', '.join('?' * len(_COLUMNS))}) "
    "ON CONFLICT (dataset, run_id, response_id) DO UPDATE SET "
    + ", ".join(f"{name} = excluded.{name}" for name in _COLUMNS)
)
# A run's first row orders runs; within one, steps. An older row that a resume replaced keeps its place.
_NEWEST_FIRST = f"""
SELECT {", ".join(f"observations.{name}" for name in _COLUMNS)} FROM observations
JOIN (SELECT run_id, MIN(sequence) AS first FROM observations WHERE dataset = :dataset GROUP BY run_id)
    AS runs USING (run_id)
WHERE dataset = :dataset AND NOT (observations.run_id = :run_id AND rollout_step >= :rollout_step)
ORDER BY observations.run_id = :run_id DESC, runs.first DESC, rollout_step DESC, sequence DESC
"""


class HistoryError(FlexfloorError):
    """The file is damaged, not a history, locked, or of another version; the text names file and fix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetCounts:
    """What a history holds of one dataset."""

    dataset: str
    num_responses: int
    num_prompts: int
    num_runs: int
    num_passes: int
    """Passes of runs that have any response here."""
    num_truncated: int
    mean_tokens: float
    longest_tokens: int


class LengthHistory:
    """An open history; see `open`. For use by one thread."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path = path
        self._connection = connection

    @classmethod
    @contextmanager
    def open(cls, path: str | Path, *, must_exist: bool = False) -> Iterator["LengthHistory"]:
        """Open the file, made if need be, and check it; closed at the end of the block. HistoryError."""
        path = Path(path)
        if must_exist and not path.is_file():
            raise HistoryError(f"{path}: there is no such file. Fix: check the path of the history")
        with _explained(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None)
        try:
            with _explained(path):
                _prepare(path, connection)
            yield cls(path, connection)
        finally:
            connection.close()

    def add(self, observations: Iterable[LengthObservation]) -> int:
        """Keep these, all or none; gives how many were not there before."""
        rows = [astuple(one) for one in observations]
        with _explained(self.path), _transaction(self._connection, "IMMEDIATE"):
            last = self._number("SELECT COALESCE(MAX(sequence), 0) FROM observations")
            self._connection.executemany(_UPSERT, rows)
            return self._number("SELECT COUNT(*) FROM observations WHERE sequence > ?", last)

    def read(
        self,
        dataset: str,
        *,
        limit_passes: int | None = None,
        resume: tuple[str, int] | None = None,
    ) -> list[LengthObservation]:
        """Observations of a dataset: run after run, within a run by rollout step, so fit for a replay.

        `limit_passes` keeps the last so many passes of every prompt. `resume=(run_id, rollout_step)` leaves
        out what that run observed at or after that step, which it is about to do again, and puts the run
        last: then it plans as it did before.
        """
        if limit_passes is not None and limit_passes < 1:
            raise ValueError(f"limit_passes={limit_passes}: nothing would be read")
        run_id, rollout_step = resume or ("", 0)
        values = {"dataset": dataset, "run_id": run_id, "rollout_step": rollout_step}
        with _explained(self.path):
            rows = self._connection.execute(_NEWEST_FIRST, values)
            kept = [_observation(row) for row in _last_passes(rows, limit_passes)]
        kept.reverse()
        return kept

    def counts(self) -> list[DatasetCounts]:
        """By dataset, in alphabetical order."""
        query = """
            SELECT dataset, COUNT(*), COUNT(DISTINCT prompt_id), COUNT(DISTINCT run_id),
                COUNT(DISTINCT run_id || ' ' || pass_index), SUM(is_truncated), AVG(num_tokens),
                MAX(num_tokens)
            FROM observations GROUP BY dataset ORDER BY dataset
        """
        names = [field.name for field in fields(DatasetCounts)]
        with _explained(self.path):
            rows = self._connection.execute(query).fetchall()
        return [DatasetCounts(**dict(zip(names, row, strict=True))) for row in rows]

    def _number(self, query: str, *values: int) -> int:
        return int(self._connection.execute(query, values).fetchone()[0])


_Row = tuple[Any, ...]
"""Values in the order of _COLUMNS."""
_VISIT_COLUMNS = [_COLUMNS.index(name) for name in ("prompt_id", "run_id", "pass_index")]


def _observation(row: _Row) -> LengthObservation:
    values = dict(zip(_COLUMNS, row, strict=True))
    values["is_truncated"] = bool(values["is_truncated"])
    return LengthObservation(**values)


def _last_passes(newest_first: Iterable[_Row], limit_passes: int | None) -> Iterator[_Row]:
    seen: dict[str, set[tuple[str, int]]] = {}
    for row in newest_first:
        prompt_id, *visit = (row[column] for column in _VISIT_COLUMNS)
        visits = seen.setdefault(prompt_id, set())
        if limit_passes is None or tuple(visit) in visits or len(visits) < limit_passes:
            visits.add((visit[0], visit[1]))
            yield row


def _prepare(path: Path, connection: sqlite3.Connection) -> None:
    """Check that the file is a sound history of this version; turn an empty one into it."""
    # A power failure may cost the last calls of `add`, never the file; a killed process costs nothing.
    connection.execute("PRAGMA synchronous = NORMAL")
    application, version, is_empty = _identity(connection)
    if is_empty:
        _write_ahead(connection)
        with _transaction(connection, "IMMEDIATE"):
            if _identity_within(connection)[2]:
                connection.execute(_TABLE)
                connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        application, version, _ = _identity(connection)
    if application != APPLICATION_ID:
        raise HistoryError(f"{path}: is a database of something else. Fix: name another file")
    if version != SCHEMA_VERSION:
        raise HistoryError(
            f"{path}: is a history of version {version}, this FlexFloor reads {SCHEMA_VERSION}. "
            "Fix: use the FlexFloor that wrote it, or start a new file"
        )
    problem = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    if problem != "ok":
        raise HistoryError(_damaged(path, str(problem)))


def _write_ahead(connection: sqlite3.Connection) -> None:
    """Turn write-ahead mode on; that needs the file alone for a moment, and SQLite itself does not wait."""
    deadline_s = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline_s:
                raise
        time.sleep(0.01)


def _identity(connection: sqlite3.Connection) -> tuple[int, int, bool]:
    """What the file is, as of one moment: another process may be turning it into a history."""
    with _transaction(connection, "DEFERRED"):
        return _identity_within(connection)


def _identity_within(connection: sqlite3.Connection) -> tuple[int, int, bool]:
    has_tables = connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone() is not None
    application, version = (
        int(connection.execute(f"PRAGMA {name}").fetchone()[0]) for name in ("application_id", "user_version")
    )
    return application, version, application == version == 0 and not has_tables


@contextmanager
def _transaction(connection: sqlite3.Connection, kind: Literal["DEFERRED", "IMMEDIATE"]) -> Iterator[None]:
    connection.execute(f"BEGIN {kind}")
    try:
        yield
    except BaseException:
        # SQLite ends some transactions itself, for example on a full disk.
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.OperationalError as error:
        if "locked" in str(error):
            wait = f"another process has been writing for {BUSY_TIMEOUT_S:.0f} s"
            raise HistoryError(f"{path}: {wait}. Fix: end it, or use another file") from error
        fix = "check that the file and its folder can be written and the disk has room"
        raise HistoryError(f"{path}: {error}. Fix: {fix}") from error
    except sqlite3.IntegrityError:
        # Our bug, not the file's damage.
        raise
    except sqlite3.DatabaseError as error:
        raise HistoryError(_damaged(path, str(error))) from error
    except OSError as error:
        raise HistoryError(f"{path}: {error.strerror}. Fix: name a file that can be written") from error


def _damaged(path: Path, problem: str) -> str:
    first_line = problem.splitlines()[0]
    fix = f"move it away and start anew, or save what can be read: sqlite3 {path} .recover | sqlite3 NEW"
    return f"{path}: damaged ({first_line}). Fix: {fix}"
