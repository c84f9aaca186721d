"""Bootstrap, permutation and exact tests against scipy, hand-worked examples and simulated data."""

import doctest
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from infoflow_kv.errors import OptionError
from infoflow_kv.evaluate import statistics
from infoflow_kv.evaluate.statistics import (
    Interval,
    gate,
    holm,
    mcnemar_p,
    paired_bootstrap,
    ratio_interval,
    recovery,
    sign_flip_p,
    wins_ties_losses,
)

# Two bootstraps of 10,000 resamples differ by chance. A 2.5 % quantile of a normal statistic has the standard error
# sqrt(.025 × .975 / 10,000) / .0584 = .027 standard errors of that statistic, the difference of two has .038; five of
# those are 0.19. A 90 % interval in place of a 95 % one would be 0.315 away.
QUANTILE_TOLERANCE = 0.2


def assert_like_scipy(ours, data, statistic, **options):
    theirs = stats.bootstrap(data, statistic, n_resamples=10_000, method="percentile", rng=7, **options)
    tolerance = QUANTILE_TOLERANCE * theirs.standard_error
    assert abs(ours.low - theirs.confidence_interval.low) < tolerance
    assert abs(ours.high - theirs.confidence_interval.high) < tolerance


def clustered_data(rng, clusters=20, size=8):
    """Values whose clusters share a common part as large as the items' own noise, with labels."""
    shared = rng.normal(size=clusters).repeat(size)
    return shared + rng.normal(size=clusters * size), [f"doc{item // size}" for item in range(clusters * size)]


# ------------------------------------------------------------------------------------------------------------ bootstrap


@pytest.mark.parametrize("draw", ["normal", "exponential"])
def test_the_interval_of_a_mean_is_scipys(draw):
    differences = getattr(np.random.default_rng(1), draw)(size=60)
    ours = paired_bootstrap(differences)
    assert ours.mean == pytest.approx(differences.mean(), rel=1e-12) and ours.n == 60
    assert_like_scipy(ours, (differences,), np.mean)


def test_the_paired_interval_is_scipys_bca_on_symmetric_data():
    rng = np.random.default_rng(2)
    ours_scores, theirs_scores = rng.normal(1, 1, 200), rng.normal(0.8, 1, 200)
    ours = paired_bootstrap(ours_scores - theirs_scores)
    bca = stats.bootstrap(
        (ours_scores, theirs_scores),
        lambda a, b, axis: np.mean(a - b, axis=axis),
        paired=True,
        n_resamples=10_000,
        rng=7,
    )
    # BCa moves the ends by the skewness of the mean, of the order 1 / sqrt(n) = .07 of a standard error here.
    assert abs(ours.low - bca.confidence_interval.low) < (QUANTILE_TOLERANCE + 0.07) * bca.standard_error
    assert abs(ours.high - bca.confidence_interval.high) < (QUANTILE_TOLERANCE + 0.07) * bca.standard_error


def test_clusters_are_resampled_whole_as_pairs_of_sum_and_size():
    rng = np.random.default_rng(3)
    sizes = rng.integers(1, 12, size=30)
    labels = np.arange(30).repeat(sizes)
    values = rng.normal(size=30).repeat(sizes) + rng.normal(size=len(labels)) + 0.5
    sums = np.array([values[labels == label].sum() for label in range(30)])
    shuffled = rng.permutation(len(values))  # members of a cluster need not stand together
    ours = paired_bootstrap(values[shuffled], clusters=labels[shuffled])
    assert ours.mean == pytest.approx(values.mean(), rel=1e-12) and ours.n == len(values)
    assert_like_scipy(ours, (sums, sizes), lambda s, k, axis: s.sum(axis=axis) / k.sum(axis=axis), paired=True)


def test_strata_have_equal_weights_and_are_resampled_each_within_itself():
    rng = np.random.default_rng(4)
    small, large = rng.normal(5, 1, 25), rng.normal(0, 2, 100)
    ours = paired_bootstrap(np.concatenate([small, large]), strata=["small"] * 25 + ["large"] * 100)
    assert ours.mean == pytest.approx((small.mean() + large.mean()) / 2, rel=1e-12)
    assert_like_scipy(ours, (small, large), lambda a, b, axis: (a.mean(axis=axis) + b.mean(axis=axis)) / 2)


def test_a_cluster_label_in_two_strata_is_two_clusters():
    values, strata = np.random.default_rng(5).normal(size=40), ["a"] * 20 + ["b"] * 20
    same = [f"doc{item % 5}" for item in range(40)]
    apart = [f"{stratum}-{label}" for stratum, label in zip(strata, same, strict=True)]
    assert paired_bootstrap(values, same, strata) == paired_bootstrap(values, apart, strata)


def test_clustered_data_have_a_wider_interval_with_clusters_than_without():
    values, labels = clustered_data(np.random.default_rng(6))
    with_clusters, without = paired_bootstrap(values, labels), paired_bootstrap(values)
    # Correlation .5 in clusters of 8 multiplies the variance by 1 + 7 × .5, the width by 2.1.
    assert 1.6 < (with_clusters.high - with_clusters.low) / (without.high - without.low) < 2.7


def test_empty_labels_make_every_item_its_own_cluster():
    values = np.random.default_rng(7).normal(size=30)
    assert paired_bootstrap(values, clusters=[""] * 30) == paired_bootstrap(values)
    assert paired_bootstrap(values, clusters=[None] * 30) == paired_bootstrap(values)


def test_the_interval_covers_the_truth_as_often_as_it_says():
    rng = np.random.default_rng(8)
    truth, runs = 0.3, 1000
    hits = 0
    for run in range(runs):
        interval = paired_bootstrap(rng.normal(truth, 1, 50), resamples=400, seed=run)
        hits += interval.low <= truth <= interval.high
    # The percentile interval of 50 values covers about 94 %; the band is three standard errors (.75 % each) and more.
    # A 90 % interval would cover 89 %, a 99 % one 98.5 %.
    assert 0.915 < hits / runs < 0.97


def test_only_with_clusters_does_the_interval_of_clustered_data_cover_the_truth():
    rng = np.random.default_rng(9)
    right = wrong = 0
    for run in range(200):
        values, labels = clustered_data(rng, clusters=30)
        clustered, flat = (paired_bootstrap(values, given, resamples=200, seed=run) for given in (labels, None))
        right += clustered.low <= 0 <= clustered.high
        wrong += flat.low <= 0 <= flat.high
    # Flat intervals are 2.1 times too narrow: they cover about 65 %. 200 runs: standard errors of 1.8 % and 3.4 %.
    assert right / 200 > 0.87 and wrong / 200 < 0.78


def test_the_seed_decides():
    values = np.random.default_rng(10).normal(size=30)
    first = paired_bootstrap(values, seed=3)
    assert paired_bootstrap(list(values), seed=3) == first
    assert paired_bootstrap(values, seed=4) != first


def test_batches_cover_every_resample(monkeypatch):
    values = np.random.default_rng(11).normal(10, 1, size=33)
    labels = [item // 2 for item in range(33)]
    whole, p = paired_bootstrap(values, labels), sign_flip_p(values - 10, resamples=1000)
    monkeypatch.setattr(statistics, "_DRAWS_AT_ONCE", 1000)
    cut = paired_bootstrap(values, labels)
    # Whether numpy's stream continues over calls is its own affair: the ends agree within chance.
    error = values.std() / math.sqrt(17)
    assert (
        abs(cut.low - whole.low) < QUANTILE_TOLERANCE * error
        and abs(cut.high - whole.high) < QUANTILE_TOLERANCE * error
    )
    assert abs(sign_flip_p(values - 10, resamples=1000) - p) < 0.1


@pytest.mark.parametrize("labels", [{}, {"clusters": ["one"] * 2}, {"strata": ["a", "b"]}])
def test_one_cluster_gives_an_unbounded_interval(labels):
    values = [0.5] * len(next(iter(labels.values()), [0]))
    interval = paired_bootstrap(values, **labels)
    assert interval == Interval(0.5, -math.inf, math.inf, len(values)) and not interval.excludes_zero


@pytest.mark.parametrize(
    ("low", "high", "excludes"),
    [(0.1, 0.2, True), (-0.2, -0.1, True), (-0.1, 0.1, False), (0, 1, False), (-1, 0, False)],
)
def test_an_interval_excludes_zero_only_strictly(low, high, excludes):
    assert Interval((low + high) / 2, low, high, 9).excludes_zero is excludes


# --------------------------------------------------------------------------------------------------------------- ratios


def test_the_interval_of_a_ratio_is_scipys():
    rng = np.random.default_rng(12)
    below = rng.uniform(1, 5, 80)
    above = 0.6 * below + rng.normal(0, 0.5, 80)
    ours = ratio_interval(above, below)
    assert ours.mean == pytest.approx(above.mean() / below.mean(), rel=1e-12)
    assert_like_scipy(ours, (above, below), lambda a, b, axis: a.mean(axis=axis) / b.mean(axis=axis), paired=True)
    # Pairing matters: with the pairs broken, the same numbers have a much wider interval.
    broken = ratio_interval(above, below[rng.permutation(80)])
    assert broken.high - broken.low > 1.5 * (ours.high - ours.low)


def test_a_ratio_takes_means_over_strata_before_it_divides():
    ratio = ratio_interval([1, 1, 9, 9, 9, 9], [2, 2, 10, 10, 10, 10], strata=["a"] * 2 + ["b"] * 4)
    assert ratio.mean == pytest.approx(5 / 6, rel=1e-12)


def test_a_ratio_over_a_denominator_that_may_be_zero_is_unbounded():
    rng = np.random.default_rng(13)
    ratio = ratio_interval(rng.normal(1, 0.1, 20), rng.normal(0.05, 1, 20))
    assert ratio.low == -math.inf and ratio.high == math.inf


def test_a_ratio_of_negative_means_is_positive_and_bounded():
    ratio = ratio_interval([-1, -2, -3], [-2, -4, -6])
    assert (ratio.mean, ratio.low, ratio.high) == (0.5, 0.5, 0.5)


def test_a_ratio_over_zero_is_refused():
    with pytest.raises(OptionError, match="mean of denominators is 0"):
        ratio_interval([1, 2], [1, -1])


def test_recovery_is_a_ratio_of_means_not_a_mean_of_ratios():
    # Means: none 5, method 2, full 1, so 3/4; the mean of the items' ratios would be (1 + 5/7) / 2.
    result = recovery(none=[2, 8] * 20, method=[1, 3] * 20, full=[1, 1] * 20)
    assert result is not None and result.mean == pytest.approx(3 / 4, rel=1e-12) and result.n == 40
    assert result.low < 3 / 4 < result.high


@pytest.mark.parametrize(("method", "share"), [("none", 0), ("full", 1)])
def test_recovery_is_0_for_no_recomputation_and_1_for_full_prefill(method, share):
    rng = np.random.default_rng(14)
    arms = {"none": rng.uniform(2, 3, 30), "full": rng.uniform(0, 1, 30)}
    result = recovery(arms["none"], arms[method], arms["full"])
    assert result is not None and (result.mean, result.low, result.high) == (share, share, share)


def test_recovery_works_where_higher_is_better():
    result = recovery(none=[0.2, 0.3, 0.1], method=[0.6, 0.7, 0.5], full=[1.0, 1.1, 0.9])
    assert result is not None and result.mean == pytest.approx(0.5, rel=1e-12)


def test_recovery_of_a_gap_that_may_be_zero_is_none():
    rng = np.random.default_rng(15)
    full = rng.normal(size=30)
    none = full + rng.normal(0.01, 1, size=30)
    assert recovery(none, full, full) is None
    assert recovery([1.0], [0.5], [0.0]) is None  # one item shows no gap


def test_recovery_uses_the_clusters_for_its_gate():
    gap, labels = clustered_data(np.random.default_rng(16), clusters=10)
    gap = gap - gap.mean() + 0.45  # clear of 0 for 80 independent items, not for 10 documents
    zeros = np.zeros_like(gap)
    assert recovery(gap, zeros, zeros) is not None
    assert recovery(gap, zeros, zeros, clusters=labels) is None


def test_the_gate_opens_only_where_full_prefill_is_clearly_better():
    rng = np.random.default_rng(17)
    closed = rng.uniform(0, 0.5, 50)
    assert gate(closed + rng.normal(0.2, 0.2, 50), closed)
    assert not gate(closed + rng.normal(0.0, 0.2, 50), closed)
    assert not gate(closed, closed + 0.2)  # clearly worse
    assert not gate(closed, closed)
    assert not gate([1.0], [0.0])


# ---------------------------------------------------------------------------------------------------------------- tests


@pytest.mark.parametrize("shift", [0.0, 0.3, -0.8])
def test_the_sign_flip_p_is_scipys_exact_one(shift):
    differences = np.random.default_rng(18).normal(shift, 1, 11)
    exact = stats.permutation_test((differences,), np.mean, permutation_type="samples", n_resamples=np.inf)
    assert sign_flip_p(differences) == pytest.approx(exact.pvalue, abs=1e-12)


def test_the_sign_flip_p_keeps_ties_and_ignores_zeros():
    differences = [0.1, 0.2, 0.3, -0.3, 0.1, 0.0, 0.0, 0.7]
    exact = stats.permutation_test((differences,), np.mean, permutation_type="samples", n_resamples=np.inf)
    assert sign_flip_p(differences) == sign_flip_p(differences + [0.0] * 40) == pytest.approx(exact.pvalue, abs=1e-12)
    assert sign_flip_p([0.0, 0.0]) == 1


def test_the_sampled_sign_flip_p_is_scipys_and_never_zero():
    differences = np.random.default_rng(19).normal(0.25, 1, 60)
    theirs = stats.permutation_test((differences,), np.mean, permutation_type="samples", n_resamples=10_000, rng=7)
    # Each has a standard error of at most .005 (p (1 - p) / 10,000); five of their difference's are .02 at p near .1.
    assert abs(sign_flip_p(differences) - theirs.pvalue) < 0.02
    assert 0.02 < theirs.pvalue < 0.3
    assert sign_flip_p([1.0] * 60, resamples=999) == 1 / 1000


def test_signs_are_flipped_for_whole_clusters():
    values, labels = clustered_data(np.random.default_rng(20), clusters=9)
    sums = values.reshape(9, 8).sum(axis=1)
    exact = stats.permutation_test((sums,), np.mean, permutation_type="samples", n_resamples=np.inf)
    assert sign_flip_p(values, clusters=labels) == pytest.approx(exact.pvalue, abs=1e-12)
    assert abs(sign_flip_p(values) - exact.pvalue) > 0.02


def test_signs_are_flipped_for_the_mean_over_strata():
    few, many = np.array([1.0, 0.5, -0.2]), np.array([0.1, -0.4, 0.3, 0.2, -0.1, 0.6])
    weighted = np.concatenate([few / len(few), many / len(many)])
    exact = stats.permutation_test((weighted,), np.mean, permutation_type="samples", n_resamples=np.inf)
    ours = sign_flip_p(np.concatenate([few, many]), strata=["few"] * 3 + ["many"] * 6)
    assert ours == pytest.approx(exact.pvalue, abs=1e-12)


@given(st.integers(0, 30), st.integers(0, 30), st.integers(0, 5), st.integers(0, 5))
def test_mcnemar_is_the_exact_binomial_test_of_the_disagreements(only_a, only_b, both, neither):
    a = [1] * only_a + [0] * only_b + [1] * both + [0] * neither + [True]
    b = [0] * only_a + [1] * only_b + [1] * both + [0] * neither + [True]
    disagreements = only_a + only_b
    expected = stats.binomtest(only_a, disagreements, 0.5).pvalue if disagreements else 1.0
    assert mcnemar_p(a, b) == pytest.approx(expected, rel=1e-9)
    assert mcnemar_p(b, a) == mcnemar_p(a, b)


def test_mcnemar_bears_many_items():
    a, b = [1] * 2100 + [0] * 1900, [0] * 2100 + [1] * 1900
    assert mcnemar_p(a, b) == pytest.approx(stats.binomtest(2100, 4000, 0.5).pvalue, rel=1e-9)


@pytest.mark.parametrize("hits", [[0.5, 1], [1, 2], [-1, 0]])
def test_mcnemar_refuses_scores_that_are_no_hits(hits):
    with pytest.raises(OptionError, match="expected a hit or a miss"):
        mcnemar_p(hits, [0, 1])


def test_holm_by_hand():
    # Sorted .005 .01 .03 .04 times 4 3 2 1: .02 .03 .06 .04, and the last may not fall below the one before.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx((0.03, 0.06, 0.06, 0.02), abs=1e-12)
    assert holm([0.2]) == (0.2,)
    assert holm([0.6, 0.7]) == (1.0, 1.0)


@pytest.mark.parametrize("p_values", [[0.1, 1.01], [-0.01], [math.nan], []])
def test_holm_refuses_what_is_no_probability(p_values):
    with pytest.raises(OptionError, match="p_values"):
        holm(p_values)


def test_wins_ties_and_losses():
    assert wins_ties_losses([0.5, 0.0, -0.1, 0.2]) == (2, 1, 1)
    assert wins_ties_losses([0.5, 0.0, -0.1, 0.2], tolerance=0.1) == (2, 2, 0)
    for tolerance in (-0.1, math.nan):
        with pytest.raises(OptionError, match="tolerance"):
            wins_ties_losses([0.5], tolerance)


# --------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("test", [paired_bootstrap, sign_flip_p, wins_ties_losses])
def test_bad_differences_are_named(test):
    with pytest.raises(OptionError, match="differences is empty"):
        test([])
    for bad in (math.nan, math.inf, None, "0.5", [1.0]):
        with pytest.raises(OptionError, match=r"differences\[1\] is .*; expected a finite number"):
            test([0.1, bad, 0.2])


@pytest.mark.parametrize(
    ("call", "names"),
    [
        (lambda: ratio_interval([1, 2], [1]), "numerators has 2 items but denominators has 1"),
        (lambda: gate([1, 2], [1]), "full_scores has 2 items but closed_scores has 1"),
        (lambda: mcnemar_p([1, 0], [1]), "a has 2 items but b has 1"),
        (lambda: recovery([1, 2], [1], [1, 2]), "none has 2 items but method has 1"),
        (lambda: recovery([1, 2], [1, 2], [1]), "none has 2 items but full has 1"),
        (lambda: paired_bootstrap([1, 2], clusters=["a"]), "clusters has 1 labels but differences has 2 items"),
        (lambda: paired_bootstrap([1, 2], strata=["a"] * 3), "strata has 3 labels but differences has 2 items"),
        (lambda: ratio_interval([1, math.nan], [1, 1]), r"numerators\[1\] is nan"),
        (lambda: ratio_interval([1, 1], [1, math.nan]), r"denominators\[1\] is nan"),
        (lambda: recovery([1], [math.nan], [1]), r"method\[0\] is nan"),
        (lambda: gate([], []), "full_scores is empty"),
        (lambda: paired_bootstrap([1, 2], resamples=99), "resamples is 99"),
        (lambda: sign_flip_p([1, 2], resamples=0), "resamples is 0"),
        (lambda: paired_bootstrap([1, 2], seed=-1), "seed is -1"),
        (lambda: sign_flip_p([1, 2], seed=-1), "seed is -1"),
    ],
)
def test_errors_name_what_was_given(call, names):
    with pytest.raises(OptionError, match=names):
        call()


def test_the_examples_in_the_docstrings_run():
    result = doctest.testmod(statistics)
    assert result.attempted >= 10 and result.failed == 0
