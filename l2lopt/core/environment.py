"""Numbers in environment variables, such as those that `torchrun` sets."""

import os

from l2lopt.core.errors import UserError


def whole_number(name: str, default: int) -> int:
    """The number above 0 in an environment variable.

    Args:
        name: Name of the variable.
        default: Number where the variable is not set.

    Raises:
        UserError: For anything but a whole number above 0.
    """
    text = os.environ.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text)):
        raise UserError(
            name, expected="a whole number above 0", found=repr(text), remedy="change or unset the variable"
        )
    return int(text)
