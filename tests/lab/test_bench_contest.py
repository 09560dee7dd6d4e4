"""Contestants take turns, windows are open and closed when they should be, and memory is what is there."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import pytest
import torch
from torch import nn

import prong
from prong.attachment import attachment_of
from prong.lab.bench import contest
from prong.lab.bench.amortise import CLOSED, OPEN, REFRESH
from prong.lab.bench.contest import Contestant, Pace, measure, steps
from prong.lab.bench.memory import extra_bytes, model_bytes, peak_bytes
from prong.lab.bench.phases import HORIZON, Phases, refresher_of, window_is_open
from prong.lab.bench.step_cost import ALL_PACES, BFLOAT16, TIMED
from prong.lab.bench.tasks import MAKERS, TOKENS, Task, mlp_task
from prong.lab.methods import METHODS
from prong.lab.timing import interleaved

WIDTH, BATCH, SAMPLES = 6, 4, 40
OURS = [name for name, method in METHODS.items() if method.refreshes]


def small_task() -> Task:
    return mlp_task(WIDTH, depth=2, largest=BATCH)


def contestant(name: str) -> Contestant:
    return Contestant(TIMED[name], small_task(), BATCH, SAMPLES, Pace())


def spied(function: Callable[[], None], log: list[str], word: Callable[[], str]) -> Callable[[], None]:
    def work() -> None:
        log.append(word())
        function()

    return work


def test_blocks_take_turns_after_a_round_that_does_not_count() -> None:
    log: list[str] = []
    blocks = {name: spied(lambda: None, log, lambda name=name: name) for name in "ab"}  # type: ignore[misc]
    prepare = {"b": spied(lambda: None, log, lambda: "before b")}
    seconds = interleaved(blocks, 2, lambda: log.append("done"), prepare)
    assert log == ["a", "done", "before b", "b", "done"] * 3
    assert {name: len(values) for name, values in seconds.items()} == {"a": 2, "b": 2}


def test_what_comes_before_a_block_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("prong.lab.timing.perf_counter", lambda: clock[0])

    def wait(seconds: float) -> Callable[[], None]:
        return lambda: clock.__setitem__(0, clock[0] + seconds)

    assert interleaved({"a": wait(2)}, 2, wait(5), {"a": wait(10)}) == {"a": [2, 2]}


@pytest.mark.parametrize("name", OURS)
def test_each_part_is_timed_where_it_happens_in_training(name: str) -> None:
    """Updates with the window closed, then with it open, then the refresh that closes it; and so in every round."""
    entrant = contestant(name)
    entrant.warm_up(block=2)
    assert entrant.phases is not None
    refresher = entrant.phases.refresher
    for _ in range(2):
        seen = []
        for part, (before, work) in entrant.parts().items():
            before()
            seen.append((part, window_is_open(refresher)))
            updates = refresher.updates
            work()
            made = refresher.updates - updates
            assert made == (0 if part == REFRESH else 2)
        assert seen == [(CLOSED, False), (OPEN, True), (REFRESH, True)]
        assert not window_is_open(refresher)


@pytest.mark.parametrize(("samples", "shown"), [(8, 8), (10, 12), (12, 12), (40, 20)])
def test_a_refresh_sees_its_samples_or_more_than_twice_as_many_as_inputs(samples: int, shown: int) -> None:
    """From there on it does not matter how many there are; fewer than inputs would be another factorisation."""
    entrant = Contestant(TIMED["PRONG"], small_task(), BATCH, samples, Pace())
    entrant.warm_up(block=2)
    assert entrant.phases is not None
    refresher = entrant.phases.refresher
    seen: list[int] = []
    entrant.model.register_forward_hook(lambda model, x, y: seen.append(len(y)) if window_is_open(refresher) else None)
    entrant.parts()[OPEN][0]()
    entrant.work()
    assert sum(seen) == shown


def test_windows_open_and_close_by_the_librarys_own_rules() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    optimizer = prong.PRONG(model, 1e-7, refresh=prong.Every(HORIZON, samples=SAMPLES))

    def update() -> None:
        optimizer.zero_grad()
        model(torch.randn(BATCH, WIDTH)).sum().backward()
        optimizer.step()

    refresher = refresher_of(model)
    assert refresher is attachment_of(optimizer).refresher
    phases = Phases(refresher, update)
    for _ in range(3):
        phases.close()
        assert not window_is_open(refresher)
        update()
        assert not window_is_open(refresher) and refresher.next_refresh() - refresher.updates > HORIZON / 2
        phases.open()
        for _ in range(5):
            update()
            assert window_is_open(refresher)
        phases.refresh()
    assert refresher_of(nn.Linear(2, 2)) is None


def test_a_window_that_will_not_move_is_an_error_and_not_a_wrong_time(monkeypatch: pytest.MonkeyPatch) -> None:
    phases = contestant("PRONG").phases
    assert phases is not None
    phases.close()
    monkeypatch.setattr("prong.lab.bench.phases.window_is_open", lambda refresher: False)
    with pytest.raises(RuntimeError, match="does not open"):
        phases.open()
    monkeypatch.setattr("prong.lab.bench.phases.window_is_open", lambda refresher: True)
    monkeypatch.setattr(phases.refresher, "refresh", lambda: None)
    with pytest.raises(RuntimeError, match="does not close"):
        phases.close()


def test_every_method_is_measured_in_every_part_and_repetition() -> None:
    methods, done = list(TIMED.values()), []
    cost = measure(
        small_task(),
        BATCH,
        methods,
        samples=SAMPLES,
        repetitions=2,
        block=2,
        paces=ALL_PACES,
        on_step=lambda: done.append(1),
    )
    assert len(done) == steps(methods, repetitions=2)
    assert list(cost["methods"]) == list(TIMED)
    for name, entry in cost["methods"].items():
        parts = [CLOSED, OPEN, REFRESH] if name in (*OURS, *BFLOAT16) else [CLOSED]
        assert list(entry["ms"]) == list(entry["block"]) == parts
        assert all(len(values) == 2 and min(values) > 0 for values in entry["ms"].values())
        assert entry["block"][CLOSED] == {"SOAP": 10, "Shampoo": 10, "PSGD-Kron, late": 30}.get(name, 2)
        assert set(entry["bytes"]) == {f"{part} {kind}" for part in parts for kind in ("state", "peak")} - {
            "refresh state"
        }
    assert cost["parameter_bytes"] == 4 * 2 * (WIDTH * WIDTH + WIDTH)
    ours, base = (cost["methods"][name]["bytes"] for name in ("PRONG", "SGD"))
    assert ours["open state"] > ours["update state"] >= base["update state"] + 2 * 4 * WIDTH * WIDTH
    assert base["update state"] == cost["parameter_bytes"], "momentum"


def test_methods_and_their_parts_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    def order(blocks: dict[str, Callable[[], None]], *_: object) -> dict[str, list[float]]:
        turns.extend(blocks)
        return {name: [1.0] for name in blocks}

    turns: list[str] = []
    monkeypatch.setattr(contest, "interleaved", order)
    methods = [METHODS[name] for name in ("PRONG", "SGD")]
    cost = measure(small_task(), BATCH, methods, samples=SAMPLES, repetitions=1, block=4)
    assert turns == ["PRONG: update", "PRONG: open", "PRONG: refresh", "SGD: update"]
    assert cost["methods"]["PRONG"]["ms"] == {"update": [250.0], "open": [250.0], "refresh": [1000.0]}


def test_a_model_that_diverged_is_not_timed() -> None:
    entrant = contestant("SGD")
    nn.init.constant_(next(entrant.model.parameters()), torch.nan)
    with pytest.raises(RuntimeError, match="SGD diverged on mlp"):
        entrant.check()


@pytest.mark.parametrize("name", ["cifar10", "transformer"])
def test_tasks_have_data_of_the_right_shape_and_say_that_it_is_random(name: str) -> None:
    task = MAKERS[name](2)
    x, y = next(task.batches(2))
    assert task.loss(task.make(False)(x), y).dim() == 0
    assert task.rows == (TOKENS if name == "transformer" else 1)
    assert "random" in task.describe()["data"] and task.describe()["input"] == list(x.shape[1:])


def test_parameters_and_state_are_counted_to_the_byte() -> None:
    model = nn.Linear(10, 5)
    sgd, adam = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), torch.optim.Adam(model.parameters())
    model(torch.ones(1, 10)).sum().backward()
    assert extra_bytes(model, sgd) == 0
    for optimizer in (sgd, adam):
        optimizer.step()
    assert model_bytes(model) == 4 * 55
    assert extra_bytes(model, sgd) == 4 * 55
    assert extra_bytes(model, adam) == 2 * 4 * 55 + 2 * 4, "two moments, and a counter per parameter"


class Slotted:
    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def hook(self) -> None:
        """Bound methods lead to what they are bound to."""


def test_tensors_are_found_wherever_they_are_and_counted_once() -> None:
    base = torch.zeros(10)
    places: list[object] = [
        [base],
        {"a": (base[2:],)},
        {1: deque([base])},
        Slotted(base),
        Slotted(base).hook,
        nn.ParameterList([base]),
    ]
    for place in places:
        assert extra_bytes(nn.Identity(), place) == 40
    assert extra_bytes(nn.Identity(), *places) == 40
    loop: list[object] = [torch]
    loop.append(loop)
    assert extra_bytes(nn.Identity(), loop) == 0, "neither modules nor circles are followed"


def test_the_peak_is_the_most_held_at_once_and_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        a = torch.zeros(1000)
        b = torch.zeros(2000)
        del a
        torch.zeros(500)
        del b

    assert peak_bytes(work) == 4 * 3000
    assert capfd.readouterr() == ("", "")


def test_what_an_update_replaces_is_not_counted_twice() -> None:
    held = [torch.zeros(1000)]

    def work() -> None:
        held.clear()
        held.append(torch.zeros(1000))

    assert peak_bytes(work) == 0
