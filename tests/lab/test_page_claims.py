"""Claims are judged from medians over seeds, as a hand calculation has it; what is missing or failed is not hidden."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prong.lab.page.claims import CLAIMS, LEAST, NOT_CLAIMED, Claim, tally
from prong.lab.page.findings import Finding
from prong.lab.page.runs import Experiment, gather
from prong.lab.page.tables import grids
from tests.lab.written_runs import errors, plan, write_run


def claim(text: str) -> Claim:
    (found,) = [known for known in CLAIMS if text in known.text]
    return found


def judged(root: Path, text: str) -> Finding:
    """What became of the claim with this text, from the runs below a folder."""
    wanted = claim(text)
    (experiment,) = [known for known in gather([root]) if known.name == wanted.experiment]
    return wanted.finding(experiment)


def write_seeds(root: Path, method: str, *runs: list[float], pace: float = 1.0) -> None:
    for seed, values in enumerate(runs):
        write_run(root, method, errors(values, pace=pace), seed=seed)


def test_fewer_updates_is_the_ratio_of_updates_to_the_median_final_error_of_sgd(tmp_path: Path) -> None:
    write_seeds(tmp_path, "nesterov", [90, 50, 30, 21], [90, 50, 30, 20], [90, 50, 30, 10])  # medians 90, 50, 30, 20
    write_seeds(tmp_path, "prong", [90, 25, 20, 1], [90, 19, 18, 1], [90, 26, 21, 1])  # medians 90, 25, 20: at 20
    write_seeds(tmp_path, "prong-balanced", [90, 25, 25, 25])  # never there
    finding = judged(tmp_path, "fewer updates")
    assert finding.verdict == "does not hold", "1.5 is less than ten"
    assert finding.ours.startswith("1.5 times fewer: PRONG after 20, SGD after 30 updates, to 20")
    assert finding.ours.endswith("3 seeds")


def test_ten_times_fewer_updates_hold(tmp_path: Path) -> None:
    write_seeds(tmp_path, "nesterov", [90, *range(89, 80, -1), 20])
    write_seeds(tmp_path, "prong+", [90, 20])
    finding = judged(tmp_path, "fewer updates")
    assert (finding.verdict, finding.ours.split(":")[0]) == ("holds", "10.0 times fewer")


def test_a_failed_seed_counts_as_worse_than_any_other(tmp_path: Path) -> None:
    write_seeds(tmp_path, "nesterov", [90, 50, 20])
    write_run(tmp_path, "prong", errors([90, 10, 5]), seed=0)
    write_run(tmp_path, "prong", errors([90, 15, 5]), seed=1)
    write_run(tmp_path, "prong", errors([90]), seed=2, failure="diverged at update 3: the loss is nan")
    assert "PRONG after 10" in judged(tmp_path, "fewer updates").ours, "median of 10, 15 and infinity"
    write_run(tmp_path, "prong", errors([90]), seed=3, failure="diverged at update 3: the loss is nan")
    assert "none reaches" in judged(tmp_path, "fewer updates").ours, "half of them failed"


@pytest.mark.parametrize(
    ("pace", "verdict"), [(1.0, "holds"), (1.9, "holds"), (2.0, "does not hold"), (2.1, "does not hold")]
)
def test_ahead_by_the_clock_means_strictly_less_time(tmp_path: Path, pace: float, verdict: str) -> None:
    write_seeds(tmp_path, "nesterov", [90, 50, 20])  # there after 20 s
    write_seeds(tmp_path, "prong", [90, 20, 5], pace=pace)  # there after 10 updates
    assert judged(tmp_path, "every other method").verdict == verdict


def test_a_claim_about_methods_holds_only_where_all_of_them_were_run(tmp_path: Path) -> None:
    write_seeds(tmp_path, "nesterov", [90, 50, 20])
    write_seeds(tmp_path, "prong", [90, 20, 5])
    assert judged(tmp_path, "ahead of SGD, batch norm").words == "not run: no runs of batch norm and RMSprop"
    write_seeds(tmp_path, "batchnorm", [90, 50, 20])
    write_seeds(tmp_path, "rmsprop", [90, 50, 30, 25])
    assert judged(tmp_path, "ahead of SGD, batch norm").verdict == "holds"
    for method in ("prong", "sgd"):
        rows = [{"update": 0, "condition": 10.0}, {"update": 10, "condition": 5.0}]
        write_run(tmp_path, method, rows, experiment="conditioning")
    assert judged(tmp_path, "keeps it below").words == "not run: no runs of RMSprop"


@pytest.mark.parametrize(
    ("pace", "words"), [(2.0, "cannot be tested here: SOAP had less time than that"), (3.0, "holds")]
)
def test_who_was_stopped_before_our_best_arrived_has_not_lost(tmp_path: Path, pace: float, words: str) -> None:
    write_seeds(tmp_path, "nesterov", [90, 80, 70, 60, 50, 20])
    write_seeds(tmp_path, "prong", [90, 60, 50, 20, 5])  # there after 30 s
    write_run(tmp_path, "soap", errors([90, 25], pace=pace))
    assert judged(tmp_path, "every other method").words == words


def test_runs_of_one_length_count_and_those_on_other_data_and_trials_do_not(tmp_path: Path) -> None:
    write_run(tmp_path, "nesterov", errors([90, 80, 70, 60, 50, 20], step=200), plan=plan(1000))
    write_run(tmp_path, "prong", errors([90, 80, 70, 60, 50, 25], step=200), plan=plan(1000))
    assert "none reaches" in judged(tmp_path, "fewer updates").ours
    write_run(tmp_path, "prong", errors([90, 19], step=40), plan=plan(40))
    write_run(tmp_path, "prong", errors([90, 19], step=40), plan=plan(2000), data="other digits", seed=1)
    write_run(tmp_path, "prong", errors([90, 19], step=40), plan=plan(1000), part="sweep")
    write_run(tmp_path, "nesterov", errors([90, 20], step=2000), plan=plan(3000))
    assert "none reaches" in judged(tmp_path, "fewer updates").ours


def test_ends_of_runs_of_different_lengths_are_not_compared(tmp_path: Path) -> None:
    for method, updates in (("prong", 1000), ("sgd", 1000), ("rmsprop", 2000)):
        rows = [{"update": 0, "condition": 10.0}, {"update": updates, "condition": 5.0}]
        write_run(tmp_path, method, rows, experiment="conditioning", plan=plan(updates))
    words = judged(tmp_path, "keeps it below").words
    assert words.endswith("runs of different lengths, 1,000 updates (PRONG; SGD, heavy ball), 2,000 updates (RMSprop)")


def test_a_short_run_is_not_measured_against_the_end_of_a_long_one(tmp_path: Path) -> None:
    write_run(tmp_path, "nesterov", errors([90, *range(89, 80, -1), 20]), plan=plan(3000))
    write_run(tmp_path, "prong", errors([90, 20]), plan=plan(2000))
    told = "cannot be tested here: runs of different lengths, 2,000 updates (PRONG), 3,000 updates (SGD)"
    for text in ("fewer updates", "every other method", "An epoch of PRONG"):
        assert judged(tmp_path, text).words == told, text
    write_run(tmp_path, "prong-balanced", errors([90, 21, 20]), plan=plan(3000))
    assert "5.0 times fewer: PRONG, balanced after 20" in judged(tmp_path, "fewer updates").ours, "as long as SGD"


def test_who_was_run_for_another_length_is_not_beaten(tmp_path: Path) -> None:
    write_seeds(tmp_path, "nesterov", [90, 50, 20])
    write_seeds(tmp_path, "prong", [90, 20, 5])
    assert judged(tmp_path, "every other method").verdict == "holds"
    write_run(tmp_path, "soap", errors([90, 50]), plan=plan(5000))
    words = judged(tmp_path, "every other method").words
    assert words.endswith("runs of different lengths, 5,000 updates (SOAP), 10,000 updates (SGD)")
    write_seeds(tmp_path, "muon", [90, 20], pace=0.1)
    assert judged(tmp_path, "every other method").verdict == "does not hold", "whatever SOAP would do"


def test_the_length_is_the_longest_that_prong_and_another_have_been_run_for(tmp_path: Path) -> None:
    for updates, ends in ((1000, (20, 30)), (2000, (19, 18)), (3000, (17, None))):
        for method, end in zip(("nesterov", "prong"), ends, strict=True):
            if end is not None:
                write_run(tmp_path, method, errors([90, 50, end]), plan=plan(updates))
    assert "to 19" in judged(tmp_path, "fewer updates").ours


@pytest.mark.parametrize("name", LEAST)
def test_short_runs_are_not_judged(tmp_path: Path, name: str) -> None:
    known = [known for known in CLAIMS if known.experiment == name]
    for method in ("prong", "nesterov"):
        write_run(tmp_path, method, errors([90, 20]), experiment=name, plan=plan(LEAST[name] - 1))
    (experiment,) = gather([tmp_path])
    told = f"runs of {LEAST[name] - 1:,} updates, too short to judge ({LEAST[name]:,} or more)"
    assert {claim.finding(experiment).words for claim in known} == {f"cannot be tested here: {told}"}


def test_the_lengths_of_short_runs_are_told(tmp_path: Path) -> None:
    write_run(tmp_path, experiment="conditioning", plan=plan(1))
    assert "runs of 1 update, too short to judge (500 or more)" in judged(tmp_path, "keeps it below").words
    write_run(tmp_path, experiment="conditioning", plan=plan(200))
    assert "runs of 1 to 200 updates, too short" in judged(tmp_path, "keeps it below").words


def test_beside_long_runs_short_ones_do_not_count(tmp_path: Path) -> None:
    write_seeds(tmp_path, "nesterov", [90, *range(89, 80, -1), 20])
    write_run(tmp_path, "prong", errors([90, 20]), plan=plan(20))
    words = judged(tmp_path, "fewer updates").words
    assert words == "not run: no runs of PRONG of 1,000 updates or more"


def test_trials_of_a_sweep_are_not_judged_and_that_is_said(tmp_path: Path) -> None:
    write_run(tmp_path, "prong", errors([90, 20]), part="sweep")
    write_run(tmp_path, "nesterov", errors([90, 20]), part="sweep")
    assert judged(tmp_path, "fewer updates").words == "not run: trials of a sweep are not judged"


def test_who_arrives_and_then_diverges_has_not_arrived(tmp_path: Path) -> None:
    write_seeds(tmp_path, "nesterov", [90, *range(89, 80, -1), 20])
    write_run(tmp_path, "prong", errors([90, 20]), failure="diverged at update 12: the loss is nan")
    assert "none reaches" in judged(tmp_path, "fewer updates").ours
    assert judged(tmp_path, "every other method").verdict == "does not hold"


def test_prong_on_a_model_with_batch_norm_is_not_the_paper_s(tmp_path: Path) -> None:
    write_seeds(tmp_path, "nesterov", [90, 80, 70, 60, 50, 40, 35, 33, 32, 31, 20])
    write_seeds(tmp_path, "prong-bn", [90, 20])
    assert judged(tmp_path, "fewer updates").words == "not run: no runs of PRONG"
    assert judged(tmp_path, "every other method").verdict == "holds"


def test_others_than_the_paper_s_baselines_count_in_the_claim_about_every_method(tmp_path: Path) -> None:
    write_seeds(tmp_path, "nesterov", [90, 50, 20])
    write_seeds(tmp_path, "prong", [90, 20, 5])
    write_seeds(tmp_path, "muon", [90, 20, 5], pace=0.5)
    write_seeds(tmp_path, "batchnorm", [90, 50, 20])
    write_seeds(tmp_path, "rmsprop", [90, 50, 20])
    assert judged(tmp_path, "ahead of SGD, batch norm").verdict == "holds"
    assert judged(tmp_path, "every other method").verdict == "does not hold"


def test_a_clock_measured_apart_replaces_the_runs_own(tmp_path: Path) -> None:
    write_seeds(tmp_path / "runs", "nesterov", [90, 50, 20])
    write_seeds(tmp_path / "runs", "prong", [90, 20, 5], pace=100.0)
    clock = {
        "nesterov": {"ms_per_update": [90, 100, 500], "start_up_seconds": 0.0, "initialisation_seconds": []},
        "prong": {"ms_per_update": [120], "start_up_seconds": 0.3, "refresh_share": 0.3, "statistics_share": 0.2},
    }
    (tmp_path / "clock.json").write_text(json.dumps({"experiment": "autoencoder", "runs": [], "clock": clock}))
    assert judged(tmp_path / "runs", "every other method").verdict == "does not hold"
    (experiment,) = gather([tmp_path / "runs", tmp_path / "clock.json"])
    ahead = claim("every other method").finding(experiment)
    assert ahead.verdict == "holds"
    assert "PRONG 1.5 s to 20; SGD 1.33 times; side by side" in ahead.ours, "10 * 0.12 + 0.3 against 20 * 0.1"
    cost = claim("An epoch of PRONG").finding(experiment)
    assert cost == Finding("1.20 times (120.0 against 100.0 ms per update), cheaper here", "does not hold")
    assert claim("reparametrisation").finding(experiment) == Finding("30.0 %", "holds")
    assert claim("means and covariances").finding(experiment) == Finding("20.0 %", "does not hold")
    write_run(tmp_path / "half", "prong", errors([90, 20, 5]), plan={**plan(), "bf16": True})
    (experiment,) = gather([tmp_path / "half", tmp_path / "clock.json"])
    assert experiment.untimed() == ["PRONG"], "the clock is that of single precision"
    assert claim("reparametrisation").finding(experiment).verdict == "cannot be tested here"


def test_clocks_are_not_mixed_nor_used_for_other_settings(tmp_path: Path) -> None:
    write_seeds(tmp_path / "runs", "nesterov", [90, 50, 20])
    write_seeds(tmp_path / "runs", "prong", [90, 20, 5], pace=3.0)
    clock = {"nesterov": {"ms_per_update": [1e6]}, "prong": {"ms_per_update": [1.0]}}
    record = {"experiment": "autoencoder", "runs": [], "clock": clock, "config": {"batch": 128, "period": 1000}}
    for changed in ({}, {"period": 200}, {"batch": 64}):
        config = {**record["config"], **changed}  # type: ignore[dict-item]
        (tmp_path / "clock.json").write_text(json.dumps({**record, "config": config}))
        (experiment,) = gather([tmp_path / "runs", tmp_path / "clock.json"])
        ahead, cost = (claim(text).finding(experiment) for text in ("every other method", "An epoch of PRONG"))
        assert ("side by side" in ahead.ours, ahead.verdict == "holds") == (not changed, not changed)
        assert cost.ours.startswith("3.00 times") == bool(changed), "else 0.00"
    del clock["nesterov"]
    (tmp_path / "clock.json").write_text(json.dumps(record))
    (experiment,) = gather([tmp_path / "runs", tmp_path / "clock.json"])
    assert "own clocks" in claim("every other method").finding(experiment).ours


def test_an_epoch_of_larger_batches_has_fewer_updates(tmp_path: Path) -> None:
    write_seeds(tmp_path, "nesterov", [90, 20])
    write_run(tmp_path, "batchnorm", errors([90, 20], pace=4.6), plan={**plan(), "batch": 256})
    finding = judged(tmp_path, "So does one")
    assert (finding.verdict, finding.ours.split(" (")[0]) == ("holds", "2.30 times")


def test_what_was_not_timed_apart_cannot_be_tested(tmp_path: Path) -> None:
    write_seeds(tmp_path, "prong", [90, 20])
    assert judged(tmp_path, "reparametrisation").words.startswith(
        "cannot be tested here: the runs do not time it apart"
    )


def test_missing_methods_and_a_diverged_sgd_are_told(tmp_path: Path) -> None:
    write_seeds(tmp_path, "prong", [90, 20])
    assert judged(tmp_path, "fewer updates").words == "not run: no runs of SGD"
    write_run(tmp_path, "nesterov", errors([90]), failure="diverged at update 2: the loss is inf")
    assert judged(tmp_path, "fewer updates").words == "cannot be tested here: SGD diverged"


def test_unfinished_runs_are_not_judged(tmp_path: Path) -> None:
    write_run(tmp_path, "nesterov", errors([90, 50, 20]), ended=False)
    write_run(tmp_path, "prong", errors([90, 5]), ended=False)
    assert judged(tmp_path, "fewer updates").verdict == "not run"


@pytest.mark.parametrize(
    ("after", "verdict"), [((4, 4, 30), "holds"), ((4, 6, 6), "does not hold"), ((5, 5, 5), "does not hold")]
)
def test_the_reduction_of_the_condition_number_is_the_median_over_seeds(
    tmp_path: Path, after: tuple[int, ...], verdict: str
) -> None:
    for seed, value in enumerate(after):
        kept = {"condition_before": 100.0, "condition_after": float(value)}
        write_run(tmp_path, experiment="conditioning", seed=seed, keepsakes=kept)
    finding = judged(tmp_path, "reduces the condition number")
    assert finding.verdict == verdict
    assert f"{100 - sorted(after)[1]}.0 %" in finding.ours and "3 seeds" in finding.ours


def test_one_seed_has_no_range(tmp_path: Path) -> None:
    write_run(tmp_path, experiment="conditioning", keepsakes={"condition_before": 100.0, "condition_after": 4.0})
    assert judged(tmp_path, "reduces the condition number").ours == "96.0 % (1 seed)"


def test_conditioning_over_training_is_relative_to_each_run_s_first_value(tmp_path: Path) -> None:
    for method, first, last in (("prong", 1000.0, 100.0), ("sgd", 10.0, 9.0), ("rmsprop", 10.0, 20.0)):
        rows = [{"update": 0, "condition": first}, {"update": 10, "condition": last}]
        write_run(tmp_path, method, rows, experiment="conditioning")
    finding = judged(tmp_path, "keeps it below")
    assert finding.verdict == "holds", "10 % of 1000 is more than 9, but less than 90 % of 10"
    assert finding.ours.startswith("PRONG 10 %, SGD, heavy ball 90 %, RMSprop 200 %")


def write_pair(root: Path, lr: float, eps: float, final: float | None) -> None:
    rows, failure = errors([90, final or 80]), None if final else "diverged at update 12: the loss is nan"
    write_run(root, rows=rows, experiment="sensitivity", part="eps", settings={"lr": lr, "eps": eps}, failure=failure)


def test_the_grid_of_dampings_and_learning_rates_decides_three_claims(tmp_path: Path) -> None:
    finals = {(0.1, 1.0): 30, (0.1, 0.001): None, (0.001, 1.0): 50, (0.001, 0.001): 20}
    for (lr, eps), final in finals.items():
        write_pair(tmp_path, lr, eps, final)
    assert judged(tmp_path, "lower ε speeds up").verdict == "holds"
    assert judged(tmp_path, "more than a larger learning rate").verdict == "holds", "20 is less than 30"
    unstable = judged(tmp_path, "unstable")
    assert unstable == Finding("1 of 4 pairs diverged (lr 0.1 with ε 0.001), 0 lost their way; 1 seed", "holds")


@pytest.mark.parametrize(
    ("values", "lost"),
    [
        ([90, 10, 15.1], True),
        ([90, 10, 15], False),
        ([10, 90, 9], False),
        ([20, 90, 80], True),
        ([200, 100], False),
        ([200, 101], True),
    ],
)
def test_who_ends_far_above_its_lowest_error_or_above_a_smaller_rate_has_lost_its_way(
    tmp_path: Path, values: list[float], lost: bool
) -> None:
    for lr, rows in ((0.1, errors(values)), (0.001, errors([90, 50]))):
        settings = {"lr": lr, "eps": 0.001}
        write_run(tmp_path, rows=rows, experiment="sensitivity", part="eps", settings=settings)
    told = "1 lost its way (lr 0.1 with ε 0.001)" if lost else "0 lost their way"
    assert judged(tmp_path, "unstable") == Finding(
        f"0 of 2 pairs diverged, {told}; 1 seed", "holds" if lost else "does not hold"
    )
    assert (
        "loses its way" in claim("unstable").rule
        and "1.5 times" in claim("unstable").rule
        and "2 times" in claim("unstable").rule
    )


def test_parts_of_an_experiment_may_differ_in_length(tmp_path: Path) -> None:
    for eps, final in ((0.001, 20), (1.0, 50)):
        settings = {"lr": 0.001, "eps": eps}
        rows = errors([90, final])
        write_run(tmp_path, rows=rows, experiment="sensitivity", part="eps", settings=settings, plan=plan(3000))
    for start, final in (("whitened", 5.0), ("standard", 6.0)):
        write_period(tmp_path, 10, start, final)
    assert judged(tmp_path, "lower ε speeds up").verdict == "holds"
    assert judged(tmp_path, "beats fan-in").verdict == "holds"


def test_variants_have_grids_of_their_own_and_the_claims_are_about_the_paper_s_method(tmp_path: Path) -> None:
    for method, finals in (("prong", (20, 50)), ("prong+", (40, 10))):
        for eps, final in zip((0.001, 1.0), finals, strict=True):
            settings = {"lr": 0.001, "eps": eps}
            write_run(tmp_path, method, errors([90, final]), experiment="sensitivity", part="eps", settings=settings)
    assert judged(tmp_path, "lower ε speeds up").verdict == "holds"
    (experiment,) = gather([tmp_path])
    assert [(sheet.title.split(": ")[1], sheet.rows[0][1]) for sheet in grids(experiment)] == [
        ("PRONG", "50.00"),
        ("PRONG+", "10.00"),
    ]


def test_where_everything_diverges_high_learning_rates_are_not_to_blame(tmp_path: Path) -> None:
    for lr in (0.1, 0.001):
        for eps in (1.0, 0.001):
            write_pair(tmp_path, lr, eps, None)
    assert judged(tmp_path, "unstable").verdict == "does not hold"
    assert judged(tmp_path, "lower ε speeds up").verdict == "does not hold", "a tie of failures"


def write_period(root: Path, period: int, initialisation: str, final: float) -> None:
    schedule = {"period": period, "samples": 100}
    options = {"schedule": schedule, "initialisation": initialisation, "settings": {"lr": 0.1, "eps": 0.1}}
    write_run(root, rows=errors([90, final]), experiment="sensitivity", part="period", **options)


@pytest.mark.parametrize(("fan_in", "verdict"), [(6.0, "holds"), (5.0, "does not hold")])
def test_a_whitened_start_must_win_for_every_period_and_a_tie_is_no_win(
    tmp_path: Path, fan_in: float, verdict: str
) -> None:
    for period, final in ((10, 4.0), (1000, 5.0), (100_000, 5.0)):
        write_period(tmp_path, period, "whitened", final)
    write_period(tmp_path, 10, "standard", 9.0)
    write_period(tmp_path, 1000, "standard", fan_in)
    assert judged(tmp_path, "beats fan-in").verdict == verdict
    long = judged(tmp_path, "T is too large")
    assert long.verdict == "holds" and "5 at T 100,000, 4 at T 10;" in long.ours
    assert "shorter than T" in long.ours, "it never re-estimated"


def test_runs_that_end_before_a_long_period_does_do_not_refute_that_it_degrades(tmp_path: Path) -> None:
    for period, final in ((10, 5.0), (100_000, 5.0)):
        write_period(tmp_path, period, "whitened", final)
    found = judged(tmp_path, "T is too large")
    assert found.verdict == "cannot be tested here" and "shorter than T" in found.why


def write_cifar(root: Path, method: str, train: list[float], validation: list[float], test: list[float]) -> None:
    names = ("train_error", "validation_error", "test_error")
    points = enumerate(zip(train, validation, test, strict=True))
    rows = [{"update": 10 * number, **dict(zip(names, values, strict=True))} for number, values in points]
    write_run(root, method, rows, experiment="cifar10")


def test_test_errors_are_those_where_validation_was_best(tmp_path: Path) -> None:
    write_cifar(tmp_path, "nesterov", [0.9, 0.5, 0.4, 0.3], [0.9] * 4, [0.9] * 4)
    write_cifar(tmp_path, "batchnorm", [0.9, 0.5, 0.3, 0.2], [0.9, 0.5, 0.08, 0.09], [0.9, 0.5, 0.085, 0.01])
    write_cifar(tmp_path, "prong", [0.9, 0.3, 0.2, 0.1], [0.9, 0.5, 0.2, 0.08], [0.9, 0.5, 0.01, 0.08])
    better = judged(tmp_path, "generalises better")
    assert better == Finding("PRONG 8.00 %, batch norm 8.50 %; 1 seed", "holds")
    alike = judged(tmp_path, "speed up training alike")
    assert alike.verdict == "does not hold", "3 times and 1.5 times fewer updates are not alike"
    assert alike.ours.startswith("PRONG 3.00 times, batch norm 1.50 times fewer updates to SGD's 30.00 %")


def test_an_epoch_of_prong_is_timed_beside_one_of_batch_norm(tmp_path: Path) -> None:
    for method, ms, error in (("batchnorm", 100, 0.08), ("prong", 110, 0.09), ("prong-cutoff", 95, 0.08)):
        rows = [{"update": n, "seconds": n * ms / 1000, "validation_error": error, "test_error": error} for n in (0, 9)]
        write_run(tmp_path, method, rows, experiment="cifar10")
    told = "PRONG, cutoff 0.950 times batch norm's (95.0 against 100.0 ms per update); 1 seed"
    assert judged(tmp_path, "less time per epoch") == Finding(told, "holds"), "of the variants the one that is chosen"


def test_a_diverged_seed_is_worse_than_any_in_what_is_chosen_by_validation_too(tmp_path: Path) -> None:
    for method, values in (("batchnorm", (0.08, 0.08, 0.08)), ("prong", (0.05, 0.10, None))):
        for seed, value in enumerate(values):
            rows = [{"update": 10, "validation_error": value or 0.5, "test_error": value or 0.5}]
            failure = None if value else "diverged at update 12: the loss is nan"
            write_run(tmp_path, method, rows, experiment="cifar10", seed=seed, failure=failure)
    finding = judged(tmp_path, "generalises better")
    assert finding == Finding("PRONG 10.00 %, batch norm 8.00 %; 3 seeds", "does not hold")


def test_where_all_runs_diverged_that_is_said(tmp_path: Path) -> None:
    rows = [{"update": 10, "validation_error": 0.1, "test_error": 0.1}]
    write_run(tmp_path, "batchnorm", rows, experiment="cifar10")
    write_run(tmp_path, "prong", rows, experiment="cifar10", failure="diverged at update 12: the loss is nan")
    assert judged(tmp_path, "generalises better").words == "cannot be tested here: PRONG diverged"


def test_being_ahead_at_first_is_judged_after_a_quarter_of_all_updates(tmp_path: Path) -> None:
    for method, values in (("batchnorm", (0.9, 0.46, 0.3)), ("prong+", (0.95, 0.36, 0.31))):
        rows = [{"update": k, "validation_error": error} for k, error in zip((10, 25, 100), values, strict=True)]
        write_run(tmp_path, method, rows, experiment="imagenet", plan=plan(100))
    early = judged(tmp_path, "faster than batch norm at first")
    assert early == Finding("PRONG+ 36.0 %, batch norm 46.0 % after 25 updates; 1 seed", "holds")


def test_imagenet_has_its_place(tmp_path: Path) -> None:
    for method, validation in (("batchnorm", 0.286), ("prong+", 0.289), ("nesterov", 0.321)):
        write_run(tmp_path, method, [{"update": 10, "validation_error": validation}], experiment="imagenet")
    assert judged(tmp_path, "end alike") == Finding("28.6, 28.9, 32.1 %; 1 seed", "holds")


def test_without_runs_every_claim_is_not_run() -> None:
    assert tally([]) == {"holds": 0, "does not hold": 0, "cannot be tested here": 0, "not run": 18}
    assert all(known.finding(Experiment(known.experiment, [])).verdict == "not run" for known in CLAIMS)


def test_what_the_paper_does_not_claim_is_judged_but_not_counted(tmp_path: Path) -> None:
    write_seeds(tmp_path, "nesterov", [90, *range(89, 80, -1), 20])
    write_seeds(tmp_path, "prong", [90, 20])
    (experiment,) = gather([tmp_path])
    known = [claim for claim in CLAIMS if claim.finding(experiment).verdict == "holds"]
    assert [claim.number for claim in known] == ["up to an order of magnitude", NOT_CLAIMED]
    assert tally([experiment])["holds"] == 1
