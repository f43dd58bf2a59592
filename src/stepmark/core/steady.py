"""Find the first steady-state sample of a series."""

import math
from collections.abc import Sequence


def steady_from(seconds: Sequence[float], cycle: int = 1) -> int | None:
    """Return the index of the first steady sample; None if fewer than half are steady.

    MSER (K. P. White, "An effective truncation heuristic for bias reduction in simulation
    output", Simulation 69(6), 1997): leave out as many from the start as make the standard
    error of the mean of the rest smallest. A quarter is always kept: two or three last values
    that happen to be alike would else win over a whole series without a trend. Whole cycles
    are left out, so that samples with and without an optimizer do not pass for a drift; an
    incomplete last cycle counts with what is left.
    """
    num_cycles = len(seconds) // cycle
    if num_cycles < 2:
        return None
    sums = [math.fsum(seconds[i * cycle : (i + 1) * cycle]) for i in range(num_cycles)]
    # From the end, so that each truncation costs one addition (Welford's recurrence).
    mean, squares = 0.0, 0.0
    error = [math.inf] * num_cycles
    for count, one in enumerate(reversed(sums), 1):
        delta = one - mean
        mean += delta / count
        squares += delta * (one - mean)
        error[num_cycles - count] = squares / count**2
    # At least two must remain, or their error would be 0 for want of a second.
    kept = max(2, num_cycles // 4)
    dropped = min(range(num_cycles - kept + 1), key=error.__getitem__)
    return dropped * cycle if dropped <= num_cycles // 2 else None
