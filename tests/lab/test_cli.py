"""The `prong` command finds its commands, helps with all of them, and says what is missing."""

from __future__ import annotations

import functools
import inspect
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated, get_args, get_origin

import pytest
import tyro

from prong.lab import cli
from prong.lab.cli import BENCH, PRONG, Command, Group, main

ROOT = Path(__file__).parents[2]


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120)


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as caught:
        main(words)
    output = capsys.readouterr()
    return output.out if caught.value.code == 0 else output.err


def test_the_package_installs_the_command() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"prong": "prong.lab.cli:main"}
    assert "$(VENV)/bin/prong bench step-cost" in (ROOT / "Makefile").read_text()


def test_help_lists_the_commands_with_examples(capsys: pytest.CaptureFixture[str]) -> None:
    shown = printed(capsys, "--help")
    assert "run" in shown and "bench" in shown and "examples:\n  prong list" in shown
    shown = printed(capsys, "bench", "--help")
    assert all(name in shown for name in BENCH.members) and "examples:\n  prong bench step-cost" in shown


def commands() -> dict[str, Command]:
    """All of them, by what is typed."""
    return dict(_commands(PRONG, ""))


def _commands(group: Group, prefix: str) -> Iterator[tuple[str, Command]]:
    for name, member in group.members.items():
        if isinstance(member, Command):
            yield f"{prefix}{name}", member
        else:
            yield from _commands(member, f"{prefix}{name} ")


def options(function: Callable[..., None]) -> set[str]:
    """The names of a command's options: its arguments, or the fields of the one that holds them."""
    arguments = inspect.signature(function, eval_str=True).parameters
    held = [get_args(a.annotation)[0] for a in arguments.values() if get_origin(a.annotation) is Annotated]
    kinds = [kind for kind in held if is_dataclass(kind)]
    return {field.name for kind in kinds for field in fields(kind)} if kinds else set(arguments)


@pytest.mark.parametrize("name", commands())
def test_every_command_explains_its_options_and_shows_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = commands()[name]
    shown = printed(capsys, *name.split(), "--help")
    assert f"usage: prong {name}" in shown and "Args:" not in shown
    assert all(f"  {example}\n" in shown for example in command.examples)
    usage = shown.partition("\n")[0].split()
    for option in options(command.load()):
        assert f"--{option.replace('_', '-')}" in shown or option.upper() in usage  # by name or by place


@pytest.mark.parametrize("name", commands())
def test_examples_are_commands_that_parse(name: str) -> None:
    function = commands()[name].load()
    for example in commands()[name].examples:
        words = shlex.split(example)
        called = ["prong", *name.split()]
        assert words[: len(called)] == called
        given = functools.wraps(function)(lambda **given: given)
        assert tyro.cli(given, args=words[len(called) :]).keys() == inspect.signature(function).parameters.keys()


def test_arguments_reach_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def compress(updates: int = 500) -> None:
        seen.append(updates)

    module = ModuleType("prong.lab.compression")
    module.main = compress  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "prong.lab.compression", module)
    main(["compression", "--updates", "3"])
    main(["compression"])
    assert seen == [3, 500]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nope"], f"prong knows no 'nope'. Choose from: {', '.join(PRONG.members)}"),
        (["bench", "nope", "--updates", "3"], f"prong bench knows no 'nope'. Choose from: {', '.join(BENCH.members)}"),
    ],
)
def test_a_wrong_name_is_one_line_with_the_right_ones(words: list[str], said: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == said


@pytest.mark.parametrize("words", [[], ["bench"], ["bench", "--nope"], ["bench", "refresh", "--nope"]])
def test_what_is_no_command_is_an_error(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code not in (0, None) and "--help" in capsys.readouterr().err


def test_without_the_lab_extra_the_command_says_how_to_install_it() -> None:
    for missing in ("tyro", "matplotlib"):
        code = (
            f"import sys; sys.modules[{missing!r}] = None; from prong.lab.cli import main; main(['bench', 'refresh'])"
        )
        done = python(code)
        assert done.returncode == 1
        assert done.stderr == (
            f"the prong command needs {missing}, which is not installed. Install the lab, in a clone of it: "
            "pip install '.[lab]'\n"
        )


@pytest.mark.parametrize("seconds", [0.5, 20.0], ids=["importing", "at work"])
def test_ctrl_c_is_one_line(seconds: float) -> None:
    code = "from prong.lab.cli import main; print('begun', flush=True); main(['bench', 'refresh', '--samples', '2000'])"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "begun\n"
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    _, trouble = process.communicate(timeout=100)
    assert (process.returncode, trouble) == (130, "Stopped.\n")


def test_another_missing_module_is_not_blamed_on_the_lab_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(words: list[str]) -> None:
        raise ModuleNotFoundError("No module named 'elsewhere'", name="elsewhere")

    monkeypatch.setattr(cli, "_run", fail)
    with pytest.raises(ModuleNotFoundError, match="elsewhere"):
        main([])


def test_help_needs_neither_the_benchmarks_nor_the_experiments() -> None:
    code = (
        "import sys\nfrom prong.lab.cli import main\n"
        "try: main(['bench', '--help'])\nexcept SystemExit: pass\n"
        "light = {'prong.lab.cli', 'prong.lab.experiments', 'prong.lab.experiments.catalogue'}\n"
        "sys.exit(str([m for m in sys.modules if m.startswith('prong.lab.') and m not in light] or ''))"
    )
    assert python(code).stderr.strip() == ""


def test_every_group_and_command_says_what_it_does() -> None:
    assert all(member.summary.endswith(".") for group in (PRONG, BENCH) for member in group.members.values())
