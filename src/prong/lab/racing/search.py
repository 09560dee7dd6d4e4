"""One search for settings, the same for every method: sampler, number of trials and width of ranges.

What is tried next is a function of the seed and of the trials so far, and of nothing else. So a search that was killed
goes on as if it had not been, and methods that are searched side by side do not see each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, FloatDistribution
from optuna.samplers import TPESampler

from prong.lab.methods import Settings

Space = Mapping[str, tuple[float, float]]  # from where to where, evenly on a logarithmic scale, by setting
STARTUP = 5  # random trials before the sampler learns from them; its default, 10, would be half a search or all of it


@dataclass(frozen=True)
class Trial:
    """Settings and what came of them.

    Attributes:
        settings: as tried.
        value: the smaller the better, and finite, also for a failure: the sampler learns from it.
        failure: how it failed, if it did.
        details: whatever else is worth recording.
    """

    settings: Settings
    value: float
    failure: str | None = None
    details: Mapping[str, Any] = field(default_factory=dict)


Objective = Callable[[Settings, Trial | None], Trial]  # from settings and the best trial so far


def search(
    objective: Objective,
    space: Space,
    trials: int,
    seed: int,
    history: Sequence[Trial] = (),
    on_trial: Callable[[Trial], None] = lambda trial: None,
) -> list[Trial]:
    """All trials of a search, those of `history` first, until there are `trials`.

    Args:
        objective: tries settings; it is told the best trial so far, beside which it may give up.
        space: the settings to choose, with their ranges.
        trials: how many in all, however many settings are searched.
        seed: of the sampler.
        history: trials of this same search that were made before.
        on_trial: called with every new trial as soon as it is finished.

    Raises:
        ValueError: the objective gave a value that is not finite.
    """
    done = list(history)
    while len(done) < trials:
        trial = objective(propose(done, space, seed), best(done))
        if not math.isfinite(trial.value):
            raise ValueError(f"a trial needs a finite value, also when it fails; got {trial.value}: {trial}")
        done.append(trial)
        on_trial(trial)
    return done


def next_trial(objective: Objective, space: Space, seed: int, history: Sequence[Trial]) -> Trial:
    """The one trial that comes after these: a step of `search`, for who makes its steps elsewhere."""
    return search(objective, space, len(history) + 1, seed, history)[-1]


def propose(history: Sequence[Trial], space: Space, seed: int) -> Settings:
    """What to try after these trials, to three digits: at random at first, then as a Parzen estimator advises.

    The sampler is Optuna's TPE with its defaults, but for STARTUP.
    """
    # A sampler of its own for every trial: one that goes on would be in a state that no record holds.
    own_seed = int(np.random.SeedSequence([seed, len(history)]).generate_state(1)[0])
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=TPESampler(seed=own_seed, n_startup_trials=STARTUP))
    axes: dict[str, BaseDistribution] = {name: FloatDistribution(*ends, log=True) for name, ends in space.items()}
    for trial in history:
        study.add_trial(optuna.trial.create_trial(params=dict(trial.settings), distributions=axes, value=trial.value))
    return {name: float(f"{value:.3g}") for name, value in study.ask(axes).params.items()}


def best(trials: Sequence[Trial]) -> Trial | None:
    """The first trial with the smallest value of those that did not fail; None if all did."""
    return min((trial for trial in trials if trial.failure is None), key=lambda trial: trial.value, default=None)
