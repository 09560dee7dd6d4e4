"""The `prong` command. Nothing of the lab is imported before the command that needs it is known."""

from __future__ import annotations

import inspect
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, get_type_hints

from prong.lab.experiments.catalogue import CATALOGUE

LIBRARIES = (  # of the lab extra
    "PIL",
    "filelock",
    "jinja2",
    "matplotlib",
    "mlxtend",
    "numpy",
    "optuna",
    "plotly",
    "pooch",
    "pytorch_optimizer",
    "requests",
    "rich",
    "scipy",
    "sqlalchemy",
    "tyro",
)


@dataclass(frozen=True)
class Command:
    """A function that is a command: its options are its arguments.

    Attributes:
        target: where it is, as `module:function`.
        summary: what it does, in a line.
        examples: how it is called.
    """

    target: str
    summary: str
    examples: tuple[str, ...]

    def load(self) -> Callable[..., Any]:
        """The function."""
        module, _, function = self.target.partition(":")
        return getattr(import_module(module), function)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Group:
    """Commands under one name."""

    summary: str
    members: Mapping[str, Command | Group]

    @property
    def examples(self) -> tuple[str, ...]:
        """One of each member."""
        return tuple(member.examples[0] for member in self.members.values())


BENCH = Group(
    "What PRONG costs: time and memory, measured here.",
    {
        "step-cost": Command(
            "prong.lab.bench.step_cost:main",
            "Time and memory of one update, PRONG beside its peers.",
            (
                "prong bench step-cost --json results/step-cost.json",
                "prong bench step-cost --tasks autoencoder --batches 128 --no-slow",
                'prong bench step-cost --tasks cifar10 --methods PRONG "batch norm"',
            ),
        ),
        "refresh": Command(
            "prong.lab.bench.refresh:main",
            "What a refresh of one layer takes, part by part, against its width.",
            (
                "prong bench refresh --json results/refresh.json",
                "prong bench refresh --max-width 1024 --samples 12800 --plot refresh.png",
            ),
        ),
        "scaling": Command(
            "prong.lab.bench.scaling:main",
            "How the cost of an update grows with depth, width and batch.",
            (
                "prong bench scaling --json results/scaling.json",
                "prong bench scaling --depths 2 4 --widths 128 256 --batches 64 128 --plot scaling.png",
            ),
        ),
        "spaces": Command(
            "prong.lab.bench.spaces:main",
            "Activation space against gradient space: the backward of one layer in both.",
            ("prong bench spaces --json results/spaces.json", "prong bench spaces --width 256 --repetitions 3"),
        ),
        "centring": Command(
            "prong.lab.bench.centring:main",
            "What it costs to take the mean off inputs, and what it loses.",
            ("prong bench centring --json results/centring.json", "prong bench centring --batch 1024 --repetitions 5"),
        ),
        "profile": Command(
            "prong.lab.bench.profile:main",
            "Where the time of an update goes.",
            ("prong bench profile --json results/profile.json", "prong bench profile --methods PRONG --batches 128"),
        ),
        "compiled": Command(
            "prong.lab.bench.compiled:main",
            "What torch.compile makes of an update.",
            ("prong bench compiled --json results/compiled.json", "prong bench compiled --methods PRONG --batch 64"),
        ),
        "watching": Command(
            "prong.lab.bench.watching:main",
            "What a measurement of prong.monitor costs, in updates.",
            ("prong bench watching --json results/watching.json", "prong bench watching --batches 128"),
        ),
        "untuned": Command(
            "prong.lab.bench.untuned:main",
            "Our optimizers with their defaults on small problems that nobody tuned.",
            (
                "prong bench untuned --jobs 2 --json results/untuned.jsonl",
                "prong bench untuned --problems transformer --methods adamw prong-adamw --rates 1e-3 3e-3 --seeds 3",
                "prong bench untuned --problems transformer --methods adamw prong-adamw --clock 3",
            ),
        ),
        "pace": Command(
            "prong.lab.bench.pace:main",
            "What an update of each method costs on the autoencoder, for the report's time axis.",
            ("prong bench pace --json results/autoencoder-pace.json", "prong bench pace --methods prong nesterov"),
        ),
        "plan": Command(
            "prong.lab.planning.calibration:main",
            "The constants of `prong plan`, measured on 1, 2 and 4 processes, and how well plans come true.",
            (
                "prong bench plan --json results/plan.json",
                "prong bench plan --processes 1 2 --widths 64 128 --checks mlp:64x2 --repetitions 3",
            ),
        ),
        "blocks": Command(
            "prong.lab.bench.blocks:main",
            "How far steps with blocks or a cutoff are from exact ones.",
            ("prong bench blocks --json results/blocks.json", "prong bench blocks --sizes 100 1 --cutoffs 0.5 2"),
        ),
        "race": Command(
            "prong.lab.racing.race:race",
            "Race to given errors on the paper's autoencoder, every method tuned alike.",
            (
                "prong bench race --workers 2 --json results/race.json",
                "prong bench race --methods PRONG Adam --trials 5 --cap 30 --json runs/race.json",
            ),
        ),
        "plan-report": Command(
            "prong.lab.planning.page:main",
            "Write the tables of docs/scaling.md anew, from the cost model and the records in results/.",
            ("prong bench plan-report", "prong bench plan-report --results runs --docs docs"),
        ),
        "report": Command(
            "prong.lab.bench.document:main",
            "Write the tables and pictures of docs/performance.md anew, from the records in results/.",
            ("prong bench report", "prong bench report --results runs --docs docs"),
        ),
    },
)
RUN = Group(
    "Run an experiment of the paper.",
    {entry.name: Command(entry.target, f"{entry.figure}.", entry.examples) for entry in CATALOGUE},
)
DATA = Group(
    "Data sets: which there are, and how to get them.",
    {
        "list": Command(
            "prong.lab.datasets.commands:list_sets",
            "The data sets of the lab, and which of them are here.",
            ("prong data list", "prong data list --data /srv/data"),
        ),
        "fetch": Command(
            "prong.lab.datasets.commands:fetch_set",
            "Download a data set, check it, and put it where experiments look for it.",
            (
                "prong data fetch mnist",
                "prong data fetch cifar10 --version python --data /srv/data",
                "prong data fetch fashion-mnist --mirror http://mirror.example/fashion",
            ),
        ),
        "unpack": Command(
            "prong.lab.datasets.commands:unpack_set",
            "Unpack an archive of a folder, such as one of photographs.",
            ("prong data unpack tiny-imagenet-20.tar", "prong data unpack photographs.tar --data /srv/data"),
        ),
    },
)
PRONG = Group(
    "Natural neural networks: the lab of the paper's experiments.",
    {
        "list": Command(
            "prong.lab.experiments.listing:main",
            "The experiments: what each tests, and how long it takes here.",
            ("prong list",),
        ),
        "run": RUN,
        "sweep": Command(
            "prong.lab.sweeps.sweep:sweep",
            "Try an experiment at many settings of its methods, and choose the best of each.",
            (
                "prong sweep autoencoder --grid paper --jobs 2",
                "prong sweep autoencoder --methods prong adam --trials 8 --updates 500 --out runs/sweep/small",
                "prong sweep autoencoder --grid grid.json --storage sqlite:///sweep.db",
            ),
        ),
        "data": DATA,
        "plan": Command(
            "prong.lab.planning.command:main",
            "Time, memory and bytes sent of training on so many workers, predicted.",
            (
                "prong plan --model autoencoder --workers 2 --batch 128",
                "prong plan --model transformer:16384x1x1024 --workers 1024 --batch 8192 --device h100",
                "prong plan --model mypackage.models:build --workers 8 --batch 256 --device a100 --json runs/plan.json",
            ),
        ),
        "compression": Command(
            "prong.lab.compression:main",
            "A trained classifier at a share of its size, by several rules.",
            ("prong compression --json results/compression.json --plot compression.png",),
        ),
        "report": Command(
            "prong.lab.page.command:main",
            "A page of what runs came to, beside the paper's claims.",
            (
                "prong report runs/autoencoder",
                "prong report runs/autoencoder --record results/autoencoder.json",
                "prong report results/autoencoder.json --markdown docs/reproduction.md",
            ),
        ),
        "bench": BENCH,
    },
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command that the arguments name; by default those that the program was called with."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        _run(words)
    except KeyboardInterrupt:  # where there is nothing to go on with, or while the lab's libraries are imported
        print("Stopped.", file=sys.stderr)
        raise SystemExit(128 + signal.SIGINT) from None
    except OSError as error:
        from prong.lab.terminal import NO_ROOM

        if error.errno not in NO_ROOM:
            raise
        raise SystemExit(
            f"{error.filename or 'a file'} cannot be written: {error.strerror}. Make room first."
        ) from error
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in LIBRARIES:
            raise
        raise SystemExit(
            f"the prong command needs {error.name}, which is not installed. Install the lab, in a clone of it: "
            "pip install '.[lab]'"
        ) from None


def _run(words: list[str]) -> None:
    import tyro

    called, found = "prong", PRONG
    while words and isinstance(found, Group) and words[0] in found.members:
        called += f" {words[0]}"
        found = found.members[words.pop(0)]  # type: ignore[assignment]
    if isinstance(found, Command):
        from prong.lab.terminal import plain_warnings

        plain_warnings()
        function = found.load()
        tyro.cli(_quick(function, words), prog=called, args=words, description=_description(found, function))
    elif words and not words[0].startswith("-"):
        raise SystemExit(f"{called} knows no {words[0]!r}. Choose from: {', '.join(found.members)}")
    else:  # tyro says it, from summaries alone
        members = {name: _placeholder(member.summary) for name, member in found.members.items()}
        tyro.extras.subcommand_cli_from_dict(
            members, prog=called, args=words, description=_description(found), sort_subcommands=False
        )


def _quick(function: Callable[..., Any], words: list[str]) -> Callable[..., Any]:
    """With --quick, an experiment's options have the defaults of its small version; what is given stays as given."""
    options = get_type_hints(function).get("options")
    return partial(function, options=options.small()) if options is not None and "--quick" in words else function


def _description(found: Command | Group, function: Callable[..., Any] | None = None) -> str:
    """What help says above the options: all but the arguments of the docstring, and examples."""
    documentation = inspect.getdoc(function) if function is not None else None
    text = (documentation or found.summary).partition("\nArgs:")[0].strip()
    examples = "\n".join(f"  {example}" for example in found.examples)
    return f"{text}\n\nexamples:\n{examples}"


def _placeholder(summary: str) -> Callable[[], None]:
    def nothing() -> None:
        pass

    nothing.__doc__ = summary
    return nothing


if __name__ == "__main__":
    main()
