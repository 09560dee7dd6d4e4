"""Sweeps: an experiment at many settings of its methods, to choose the best of each.

Data flows one way: grids say what to try, boards who tries it, jobs are what is tried, and folders what came of it.
"""

from __future__ import annotations

from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Annotated

import optuna
import tyro
from optuna.exceptions import StorageInternalError
from rich.console import Console

from prong.lab.experiments.common import can_take_part, check_job
from prong.lab.record import ForeignRecordError, InUseError, resume, write_json
from prong.lab.sweeps.board import Board, beating
from prong.lab.sweeps.grids import Search, paper_space, read_spaces
from prong.lab.sweeps.report import method_entry, shown_progress, table
from prong.lab.sweeps.storages import StorageError, open_database, open_journal, sole_user
from prong.lab.sweeps.sweepable import SWEEPABLE
from prong.lab.sweeps.sweeping import Keep, Sweep, carry_on
from prong.lab.terminal import announce, at_least, make_console, positive, trouble_with, writable


def sweep(
    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")],
    grid: str = "paper",
    methods: tuple[str, ...] = (),
    trials: int | None = None,
    updates: int = 1000,
    seed: int = 1,
    jobs: int = 1,
    storage: str | None = None,
    out: Path | None = None,
    json: Path | None = None,
    keep: Keep = "rows",
    grace: float = 120.0,
) -> None:
    """Try an experiment at many settings of its methods, and choose the best of each.

    A sweep that was stopped goes on where it was when the same command is given again; a trial that is finished is
    never repeated. Trials that fail or diverge are recorded, and never chosen.

    Args:
        name: the experiment.
        grid: `paper`, or a JSON file with a list of values, or a range, for each setting.
        methods: who takes part; by default those that the paper compares, or that the file names.
        trials: how many of every method: so many points of its grid by chance, or steps of a search of ranges. By
            default all points.
        updates: of every trial.
        seed: of weights, of the order of the data, and of what is random in the search.
        jobs: processes that train, one thread each; on a grid the results do not depend on it.
        storage: URL of a database on which several machines can work; by default a journal in the folder.
        out: folder of the sweep and of its runs; by default below runs/sweep.
        json: the record; by default sweep.json in the folder.
        keep: of every run its rows, its model too, or nothing.
        grace: seconds after which another machine on the same database that says nothing is taken for dead.
    """
    if name not in SWEEPABLE:
        raise SystemExit(f"no experiment {name!r} to sweep. Choose from: {'; '.join(SWEEPABLE)}")
    at_least(1, updates=updates, jobs=jobs, trials=[] if trials is None else trials)
    positive(grace=grace)
    out = Path("runs/sweep", name) if out is None else out
    path = out / "sweep.json" if json is None else json
    console = make_console()
    try:
        experiment = SWEEPABLE[name]()
        can_take_part(methods, experiment.fit)
        searches = searches_of(name, grid, methods or experiment.methods, bool(methods), trials, seed)
        can_take_part(searches, experiment.fit)  # a grid may name others
        wanted = Sweep(name, experiment, searches, updates, seed)
        for method, search in searches.items():
            for point in search.alone():
                check_job(wanted.job(method, point))  # which reads the data too: it may be missing
    except (ValueError, FileNotFoundError) as error:
        raise SystemExit(str(error)) from error
    try:
        run_sweep(wanted, out, path, storage, jobs, keep, grace, console)
    except KeyboardInterrupt:
        console.print("Stopped. The same command goes on from here.")
        raise SystemExit(130) from None
    except (ForeignRecordError, InUseError, StorageError) as error:
        raise SystemExit(str(error)) from error
    except OSError as error:
        raise SystemExit(trouble_with(error, out)) from error
    except StorageInternalError as error:
        raise SystemExit(f"stopped: {error}. Mend it, and the same command goes on from here.") from error
    except BrokenProcessPool as error:
        raise SystemExit("stopped: a process died, perhaps for want of memory. The same command goes on.") from error


def searches_of(
    experiment: str, grid: str, methods: tuple[str, ...], chosen: bool, trials: int | None, seed: int
) -> dict[str, Search]:
    """What is tried of each method; of those that the grid names, unless methods were chosen.

    Raises:
        ValueError: a grid that makes no sense; the message says what to do.
    """
    if grid == "paper":
        spaces = {method: paper_space(experiment, method) for method in methods}
    else:
        spaces = read_spaces(Path(grid), methods, chosen)
    searches = {}
    for method, space in spaces.items():
        try:
            searches[method] = Search(space, trials, seed)
        except ValueError as error:
            raise ValueError(f"{method}: {error}") from error
    return searches


def run_sweep(
    wanted: Sweep, out: Path, path: Path, url: str | None, jobs: int, keep: Keep, grace: float, console: Console
) -> None:
    """Begin a sweep, or go on with it, until all its trials have come to something; its record is at `path`.

    Raises:
        ForeignRecordError: there is the record of another sweep.
        StorageError: trials cannot be kept there.
        KeyboardInterrupt: somebody asked to stop.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    config = wanted.config()
    writable(json=path)
    resume(path, config)  # refuses before anything is made
    storage = None if url is None else open_database(url)
    with sole_user(out) as holder:
        storage = open_journal(out / "journal.log") if storage is None else storage
        record = resume(path, config)
        names = {method: wanted.study_name(method) for method in wanted.searches}
        boards = {
            method: Board(storage, names[method], search, holder, grace, shared=url is not None)
            for method, search in wanted.searches.items()
        }

        def keep_record() -> None:
            record["methods"] = {method: method_entry(board) for method, board in boards.items()}
            write_json(path, record)

        keep_record()
        with beating(list(boards.values()), grace), shown_progress(console, record["methods"]) as tell:

            def on_change() -> None:
                keep_record()
                tell(record["methods"])

            carry_on(wanted, boards, out / "runs", jobs, keep, on_change)
    console.print(table(record["methods"], wanted.measure))
    announce(console, record=path)
    for method, entry in record["methods"].items():
        if entry["chosen"] is None:
            failures = [trial["failure"] for trial in entry["trials"]]
            raise SystemExit(f"no trial of {method} came to anything; the first: {failures[0]}")
