"""The paper's claims, one entry each, and the table of what became of them here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from prong.lab.bench.sheets import NONE, Sheet
from prong.lab.page import judges, sensitivities
from prong.lab.page.findings import Finding, comparable, too_short
from prong.lab.page.pairs import LOST_WORDS
from prong.lab.page.runs import Experiment

SWEEP = "sweep"  # the part of its trials
NOT_CLAIMED = "not claimed"
# Updates from which on runs are judged: a quick look at an experiment is shorter, and says nothing of the paper.
LEAST = {"conditioning": 500, "sensitivity": 1000, "autoencoder": 1000, "cifar10": 3000, "imagenet": 100}


@dataclass(frozen=True)
class Claim:
    """What the paper says.

    Attributes:
        experiment: that it is about.
        text: the claim.
        number: the paper's.
        rule: when it holds here.
        judge: what became of it, from runs that have ended.
    """

    experiment: str
    text: str
    number: str
    rule: str
    judge: Callable[[Experiment], Finding]

    @property
    def of_paper(self) -> bool:
        """Whether the paper does say it, or we alone."""
        return self.number != NOT_CLAIMED

    def finding(self, experiment: Experiment | None) -> Finding:
        """What became of it, from runs that are long enough and may be compared; not run, if none has ended."""
        if experiment is None or not experiment.runs:
            return Finding(NONE, "not run")
        results = [run for run in experiment.runs if run.config["part"] != SWEEP]
        if not results:
            return Finding(NONE, "not run", "trials of a sweep are not judged")
        ended = [run for run in results if run.outcome is not None]
        if not ended:
            return Finding(NONE, "not run", "no run has ended")
        least = LEAST.get(self.experiment, 0)
        judged = [run for run in ended if run.planned >= least]
        if not judged:
            return too_short(ended, least)
        finding = self.judge(replace(experiment, runs=comparable(judged)))
        if finding.verdict == "not run" and len(judged) < len(ended):
            return replace(finding, why=f"{finding.why} of {least:,} updates or more")
        return finding


ALONE = "without batch norm"
SQUARED = "median squared error on the training set"
NEAR = "within a quarter of the paper's"
CLAIMS = (
    Claim(
        "conditioning",
        "Whitening the activations reduces the condition number of the Fisher",
        "by more than 95 %",
        "median reduction above 95 %",
        partial(judges.reduction, least=95.0),
    ),
    Claim(
        "conditioning",
        "PRONG keeps it below that of SGD and RMSprop",
        "a figure",
        "smallest condition number at the end, each relative to its first",
        judges.stays_conditioned,
    ),
    Claim(
        "sensitivity",
        "At small step sizes a lower ε speeds up learning",
        "a figure",
        f"at the smallest learning rate, lower final {SQUARED} with the smallest ε than with the largest",
        sensitivities.lower_eps_helps,
    ),
    Claim(
        "sensitivity",
        "Lowering ε often does more than a larger learning rate",
        "a figure",
        "the smallest learning rate with a lower ε ends below every larger one with the largest ε",
        sensitivities.eps_beats_rate,
    ),
    Claim(
        "sensitivity",
        "High learning rates with a small ε are unstable",
        "left out of its figure",
        f"with the smallest ε the largest learning rate diverges or loses its way (it ends {LOST_WORDS}), and the "
        "smallest does neither",
        sensitivities.high_rates_diverge,
    ),
    Claim(
        "sensitivity",
        "A whitened initialisation beats fan-in, whatever T",
        "a figure, five T",
        f"lower final {SQUARED} for every T that was run with both",
        sensitivities.whitened_start_wins,
    ),
    Claim(
        "sensitivity",
        "Learning degrades when T is too large",
        "T = 100,000",
        f"higher final {SQUARED} at T = 100,000 than at the best other T",
        partial(sensitivities.long_period_degrades, period=1e5),
    ),
    Claim(
        "autoencoder",
        "PRONG needs fewer updates than the baselines",
        "up to an order of magnitude",
        f"the best variant {ALONE} reaches SGD's final {SQUARED} in a tenth of its updates or less",
        partial(judges.fewer_updates, times=10.0),
    ),
    Claim(
        "autoencoder",
        "It is ahead of SGD, batch norm and RMSprop by the clock, too",
        "a figure",
        f"the best variant {ALONE} is the first of them at SGD's final {SQUARED}",
        partial(judges.less_time, keys=("nesterov", "sgd", "batchnorm", "rmsprop")),
    ),
    Claim(
        "autoencoder",
        "It is ahead of every other method run here by the clock",
        NOT_CLAIMED,
        f"the best variant, with or without batch norm, is the first of all at SGD's final {SQUARED}",
        partial(judges.less_time, batch_norm=True),
    ),
    Claim(
        "autoencoder",
        "An epoch of PRONG costs more than SGD's",
        "3.2 times",
        NEAR,
        partial(judges.cost, key="prong", times=3.2),
    ),
    Claim(
        "autoencoder", "So does one of batch norm", "2.3 times", NEAR, partial(judges.cost, key="batchnorm", times=2.3)
    ),
    Claim("autoencoder", "And one of RMSprop", "9 times", NEAR, partial(judges.cost, key="rmsprop", times=9.0)),
    Claim(
        "autoencoder",
        "Much of PRONG's time goes into the reparametrisation",
        "34 %",
        "a quarter or more",
        partial(judges.time_share, what="refresh", least=0.25),
    ),
    Claim(
        "autoencoder",
        "Little of it goes into means and covariances",
        "4 %",
        "a twentieth or less",
        partial(judges.time_share, what="statistics", most=0.05),
    ),
    Claim(
        "cifar10",
        "PRONG and batch norm speed up training alike",
        "a figure",
        "both reach SGD's final training error in fewer updates, neither in more than 1.5 times the other's; "
        f"PRONG's best variant {ALONE}",
        judges.similar_speed_ups,
    ),
    Claim(
        "cifar10",
        "PRONG generalises better than batch norm",
        "7.32 % against 8.22 %",
        f"lower median test error, each chosen on the validation set; PRONG's best variant {ALONE}",
        judges.generalises_better,
    ),
    Claim(
        "cifar10",
        "It takes less time per epoch than batch norm",
        NOT_CLAIMED,
        "the same two, by the median time of an update",
        judges.cheaper,
    ),
    Claim(
        "imagenet",
        "PRONG+ learns faster than batch norm at first",
        "36 % against 46 % after 100,000 updates",
        "lower median validation error after a quarter of all updates",
        partial(judges.ahead_at_first, part=0.25),
    ),
    Claim(
        "imagenet",
        "Batch norm and PRONG+ end alike, ahead of SGD",
        "28.6 %, 28.9 %, 32.1 %",
        "least validation errors within a point of each other, both below SGD's",
        judges.top_1,
    ),
)


def claims_of(experiment: str) -> list[Claim]:
    """What the paper claims of an experiment."""
    return [claim for claim in CLAIMS if claim.experiment == experiment]


def claims_sheet(claims: Sequence[Claim], experiments: Mapping[str, Experiment]) -> Sheet | None:
    """Claims and what became of them; None without claims. Those of one experiment say which runs were judged."""
    rows = []
    for claim in claims:
        finding = claim.finding(experiments.get(claim.experiment))
        rows.append([claim.text, claim.number, finding.ours, finding.words, claim.rule])
    headings = ["claim of the paper", "its number", "ours", "verdict", "holds if"]
    least = {LEAST.get(claim.experiment, 0) for claim in claims if claim.experiment in experiments}
    note = f"Judged from runs of {least.pop():,} updates or more, compared with others as long." if least else ""
    return Sheet("Claims", headings, rows, note, words=len(headings)) if rows else None


def tally(experiments: Iterable[Experiment]) -> dict[str, int]:
    """How many of the paper's claims got each verdict."""
    known = {experiment.name: experiment for experiment in experiments}
    counts = {"holds": 0, "does not hold": 0, "cannot be tested here": 0, "not run": 0}
    for claim in CLAIMS:
        counts[claim.finding(known.get(claim.experiment)).verdict] += claim.of_paper
    return counts


def glance(experiments: Sequence[Experiment]) -> Sheet:
    """Every claim with its verdict alone, and how many of the paper's got each."""
    known = {experiment.name: experiment for experiment in experiments}
    rows = [
        [claim.experiment, claim.text, claim.number, claim.finding(known.get(claim.experiment)).verdict]
        for claim in CLAIMS
    ]
    told = [f"{verdict}: {count}" for verdict, count in tally(experiments).items() if count]
    headings = ["experiment", "claim", "the paper's number", "verdict"]
    return Sheet("All claims", headings, rows, f"Of the paper's own, {'; '.join(told)}.", words=len(headings))
