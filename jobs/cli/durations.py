"""Lengths of time on the command line: `90s`, `30m`, `24h`, `7d`, `1d12h`."""

import re

_SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_DURATION = re.compile(r"(\d+d)?(\d+h)?(\d+m)?(\d+s)?")


def seconds(text: str) -> int | None:
    """The length of time that a text means; None for one that means none."""
    found = _DURATION.fullmatch(text) if text else None
    return found and sum(int(part[:-1]) * _SECONDS[part[-1]] for part in found.groups() if part)
