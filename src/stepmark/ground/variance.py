"""Variance between launches, estimated over rows that are alike.

Three launches say little about their own variance, but a table has many rows. As in Smyth,
Statistical Applications in Genetics and Molecular Biology 3 (2004), article 3, the variance of
a row is drawn from a scaled inverse chi-square distribution with d0 degrees of freedom around
s0^2. Both are estimated by maximum likelihood (his moments of log s^2 need thousands of rows),
and the row's own variance is averaged with s0^2 by degrees of freedom. Rows that vary unlike
have a small d0, so that a quiet one stays quiet beside noisy ones.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from stepmark.ground.ratio import t_quantile

# Rows and degrees of freedom from which the prior is estimated; with fewer, each row stands for
# itself.
MIN_ROWS = 3
_MIN_DF = 6
_LEAST_SHARE = 1e-4  # of the mean variance: what a row has at least, whose values are equal
_COARSE_DF = 100  # from here on quantiles hardly change, and tens do
_MAX_DF = 300.0  # of a prior: from here on rows share one variance
_GOLDEN = (math.sqrt(5) - 1) / 2
# A few launches have not seen a state that one in five takes. As if this had been seen, too:
# 2 % on four degrees of freedom. validation/verdicts.py shows what it prevents.
_RARE_VARIANCE = 0.02**2
_RARE_DF = 4


@dataclass(frozen=True, slots=True)
class Variance:
    """An estimate and its degrees of freedom."""

    value: float
    df: float

    def quantile(self, p: float) -> float:
        """Return the quantile p of an error with this variance, for p from 0.5."""
        df = max(1, math.floor(self.df))
        df -= df % 10 if df > _COARSE_DF else 0
        return t_quantile(p, df) * math.sqrt(self.value)

    def scaled(self, factor: float) -> "Variance":
        return Variance(self.value * factor, self.df)

    def plus(self, value: float) -> "Variance":
        return Variance(self.value + value, self.df)

    def widened(self, p: float, seen_df: float | None = None) -> "Variance":
        """Return the estimate with rare states added, if that makes quantile p larger.

        seen_df: degrees of freedom in which rare states would have been seen, if more.
        """
        seen_df = self.df if seen_df is None else max(self.df, seen_df)
        rare = _RARE_DF * _RARE_VARIANCE
        value = (seen_df * self.value + rare) / (seen_df + _RARE_DF)
        other = Variance(value, self.df + _RARE_DF)
        return max(self, other, key=lambda variance: variance.quantile(p))


def total(parts: Sequence[Variance]) -> Variance:
    """Return the variance of a sum of independent parts.

    Its degrees of freedom follow Satterthwaite's rule, Biometrics Bulletin 2, 1946.
    """
    value = math.fsum(part.value for part in parts)
    squares = math.fsum(part.value**2 / part.df for part in parts if part.value)
    return Variance(value, value**2 / squares if squares else min(part.df for part in parts))


@dataclass(frozen=True, slots=True, kw_only=True)
class Prior:
    """Distribution of the variances of like rows. df: d0; 0 where rows are too few for it.

    seen_df: degrees of freedom of all rows together.
    """

    variance: float
    df: float
    seen_df: float

    def moderated(self, own: Variance) -> Variance:
        """Return the variance of a row, of which this is known without the others."""
        if self.df == 0 and own.df:
            return own
        if self.df == 0 or self.df >= _MAX_DF:
            return Variance(self.variance, self.seen_df)
        value = (self.df * self.variance + own.df * own.value) / (self.df + own.df)
        return Variance(value, min(self.df + own.df, self.seen_df))


def prior_of(rows: Sequence[Variance]) -> Prior | None:
    """Return the prior of the variances of rows; None if nothing is known of any."""
    known = [row for row in rows if row.df]
    if not known:
        return None
    seen_df = math.fsum(row.df for row in known)
    pooled = math.fsum(row.df * row.value for row in known) / seen_df
    if pooled == 0:
        return Prior(variance=0.0, df=_MAX_DF, seen_df=seen_df)
    if len(known) < MIN_ROWS or seen_df < _MIN_DF:
        return Prior(variance=pooled, df=0, seen_df=seen_df)
    least = _LEAST_SHARE * pooled
    variance, df = _likeliest([(max(row.value, least), row.df) for row in known], pooled)
    return Prior(variance=variance, df=df, seen_df=seen_df)


def _likeliest(variances: Sequence[tuple[float, float]], start: float) -> tuple[float, float]:
    """Return s0^2 and d0 of highest likelihood, by a golden section over log d0."""

    def score(log_df: float) -> tuple[float, float, float]:
        return _scored(variances, start, math.exp(log_df))

    low = 0.0
    high = math.log(_MAX_DF)
    left = score(high - _GOLDEN * (high - low))
    right = score(low + _GOLDEN * (high - low))
    for _ in range(10):
        if left < right:
            low = high - _GOLDEN * (high - low)
            left = right
            right = score(low + _GOLDEN * (high - low))
        else:
            high = low + _GOLDEN * (high - low)
            right = left
            left = score(high - _GOLDEN * (high - low))
    best = max(left, right, _scored(variances, start, _MAX_DF))
    return best[1], best[2]


def _scored(
    variances: Sequence[tuple[float, float]], start: float, prior_df: float
) -> tuple[float, float, float]:
    """Return the logarithm of the likelihood at d0, up to a constant, with s0^2 and d0."""
    scale = start
    num_df = sum(df for _, df in variances)
    for _ in range(50):  # expectation-maximization; each step raises the likelihood
        shares = ((df + prior_df) * df * v / (prior_df * scale + df * v) for v, df in variances)
        previous = scale
        scale = scale * math.fsum(shares) / num_df
        if abs(scale - previous) < 1e-4 * scale:
            break
    likelihood = math.fsum(
        math.lgamma((df + prior_df) / 2)
        - math.lgamma(prior_df / 2)
        - df / 2 * math.log(prior_df * scale)
        - (df + prior_df) / 2 * math.log1p(df * value / (prior_df * scale))
        for value, df in variances
    )
    return likelihood, scale, prior_df
