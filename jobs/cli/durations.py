"""Lengths of time on the command line: `90s`, `30m`, `24h`, `7d`; a bare number is seconds."""

import re

from jobs.errors import UsageError

_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)([smhd]?)")


def seconds(text: str, option: str) -> float:
    """The length of time that an option was given. Raises UsageError naming the option."""
    found = _DURATION.fullmatch(text.strip())
    if found is None:
        raise UsageError(f"{option}: {text!r} is no length of time.", hint="Write 90s, 30m, 24h or 7d.")
    return float(found[1]) * _SECONDS[found[2]]
