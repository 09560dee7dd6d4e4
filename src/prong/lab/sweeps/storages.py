"""Where sweeps keep their trials: a journal in their folder, or a database that several machines reach."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import sqlalchemy.exc
from optuna.exceptions import OptunaError
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from sqlalchemy.engine import make_url

from prong.lab.record import alone, write_whole

ATTEMPTS = 5  # to make the tables of a new database, should others be at it at the same time
PATIENCE = 60.0  # seconds to wait for a SQLite file that others write to


class StorageError(RuntimeError):
    """Trials cannot be kept there; the message says why."""


@contextmanager
def sole_user(folder: Path) -> Iterator[str]:
    """A folder as one's own, and its name in storages, which stays the same.

    Raises:
        StorageError: another process has it.
    """
    refusal = (
        f"another process is at work in {folder}. Wait until it ends, or name another folder with --out: "
        "on one --storage any number can work, each in a folder of its own."
    )
    with alone(folder / "lock", StorageError(refusal)):
        holder = folder / "holder"
        if not holder.exists():
            write_whole(holder, uuid4().hex.encode())
        yield holder.read_text()


def open_journal(path: Path) -> BaseStorage:
    """The storage in a journal file, for who has it alone; a line that was cut short by a crash is taken back.

    Raises:
        StorageError: the file is no journal.
    """
    if path.exists():
        whole, _, rest = path.read_bytes().rpartition(b"\n")
        for line in whole.splitlines():
            if not _is_entry(line):
                raise StorageError(
                    f"{path} is not a journal of trials. Move it away, or name another folder with --out."
                )
        if rest and not whole and not b'{"op_code":'.startswith(rest[:11]):
            raise StorageError(f"{path} is not a journal of trials. Move it away, or name another folder with --out.")
        if rest:
            path.write_bytes(whole + b"\n" * bool(whole))
    path.with_name(path.name + ".lock").unlink(missing_ok=True)  # of a process that was killed while it wrote
    return JournalStorage(JournalFileBackend(str(path)))


def _is_entry(line: bytes) -> bool:
    try:
        entry = json.loads(line)
    except ValueError:
        return False
    return isinstance(entry, dict) and "op_code" in entry


def open_database(url: str) -> BaseStorage:
    """The storage in a database, by its SQLAlchemy URL.

    Raises:
        StorageError: there is no such database, or it cannot be reached.
    """
    try:
        parsed = make_url(url)
    except sqlalchemy.exc.ArgumentError as error:
        raise StorageError("--storage is no database URL. One looks like sqlite:///sweep.db") from error
    patience = {"connect_args": {"timeout": PATIENCE}} if parsed.get_backend_name() == "sqlite" else {}
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return RDBStorage(url, engine_kwargs=patience)
        except (sqlalchemy.exc.DatabaseError, OptunaError) as error:
            if attempt == ATTEMPTS or "exist" not in str(error):
                raise StorageError(_unusable(url, error)) from error
            time.sleep(0.3 * attempt)
        except (sqlalchemy.exc.SQLAlchemyError, ImportError, ValueError) as error:
            raise StorageError(_unusable(url, error)) from error
    raise AssertionError("the last attempt returns or raises")


def without_password(url: str) -> str:
    """A database URL as it may be shown."""
    return make_url(url).render_as_string(hide_password=True)


def _unusable(url: str, error: Exception) -> str:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return f"--storage {without_password(url)} cannot be used: {reason}"
