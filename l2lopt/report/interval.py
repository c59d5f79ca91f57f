"""Intervals of means."""

import math

# Not scipy.stats, which has the same function and takes seconds to import.
from scipy.special import stdtrit


def half_width(deviation: float, count: int) -> float:
    """Half the width of the 95 % interval of a mean by Student's t: t₀.₉₇₅ s / √n with n − 1 degrees of freedom.

    Args:
        deviation: s, the standard deviation of the values with the divisor n − 1.
        count: n, at least 2.
    """
    return float(stdtrit(count - 1, 0.975)) * deviation / math.sqrt(count)
