"""The table that the check ends with: what is wrong, what is right by group, what was left out, and times."""

from collections import Counter
from collections.abc import Iterable, Sequence

from tests.gpu.cases import Outcome

# The last of the output is what a machine far away sends back.
LONGEST_TABLE = 11_500
_WIDTH = 150


def table(title: str, outcomes: Sequence[Outcome]) -> str:
    """Return the table, of at most `LONGEST_TABLE` characters. Whatever does not fit is counted."""
    head, wrong = [title, ""], _wrong(outcomes)
    rest = [*_right(outcomes), *_left_out(outcomes), *_figures(outcomes), "", _verdict(outcomes)]
    room = LONGEST_TABLE - sum(len(line) + 1 for line in (*head, *rest)) - 80
    shown: list[str] = []
    for number, line in enumerate(wrong):
        room -= len(line) + 1
        if room < 0:
            shown.append(f"WRONG     and {len(wrong) - number} more, see the JSON file")
            break
        shown.append(line)
    text = "\n".join([*head, *shown, *rest])
    # The rest is short, unless a great many cases were left out for reasons of their own.
    return text if len(text) <= LONGEST_TABLE else f"{text[: LONGEST_TABLE // 2]}\n[...]\n{text[-LONGEST_TABLE // 3 :]}"


def _wrong(outcomes: Iterable[Outcome]) -> list[str]:
    """One line for each case, whatever its seed."""
    seeds: dict[tuple[str, str], list[str]] = {}
    details: dict[tuple[str, str], str] = {}
    for one in outcomes:
        if one.status == "wrong":
            name, _, seed = one.name.partition(", seed ")
            seeds.setdefault((one.section, name), []).append(seed)
            details.setdefault((one.section, name), one.detail)
    lines = []
    for (section, name), found in seeds.items():
        of_seeds = f", seeds {' '.join(found)}" if found[0] else ""
        lines.append(f"WRONG     {section}: {name}{of_seeds}: {details[section, name]}")
    return lines


def _right(outcomes: Iterable[Outcome]) -> list[str]:
    counts = Counter((one.section, one.group) for one in outcomes if one.status == "ok" and not one.figures)
    sections: dict[str, list[str]] = {}
    for (section, group), count in counts.items():
        sections.setdefault(section, []).append(f"{group} {count}")
    return [line for section, groups in sections.items() for line in _wrapped(f"ok        {section}: ", groups)]


def _left_out(outcomes: Iterable[Outcome]) -> list[str]:
    reasons: dict[tuple[str, str], list[str]] = {}
    for one in outcomes:
        if one.status == "left out":
            reasons.setdefault((one.section, one.detail), []).append(one.name)
    lines = []
    for (section, reason), names in reasons.items():
        groups = Counter(name.split(":")[0] for name in names)
        named = names if len(names) <= 4 else [f"{group} ({count})" for group, count in groups.items()]
        lines.extend(_wrapped(f"left out  {section}: {reason}: ", named))
    return lines


def _figures(outcomes: Iterable[Outcome]) -> list[str]:
    lines = []
    for one in outcomes:
        if one.status == "ok" and one.figures:
            figures = "  ".join(f"{_number(value)} {unit}" for unit, value in one.figures.items())
            bar = f"  [{one.bar}: {'met' if one.met else 'NOT MET'}]" if one.bar else ""
            lines.append(f"{one.name:<58} {figures}{bar}{'  ' + one.detail if one.detail else ''}")
    return ["", *lines] if lines else []


def _verdict(outcomes: Sequence[Outcome]) -> str:
    status = Counter(one.status for one in outcomes)
    bars = [one for one in outcomes if one.met is not None]
    said = f"{status['ok']} right, {status['wrong']} wrong, {status['left out']} left out"
    return f"{said}; bars met: {sum(bool(one.met) for one in bars)} of {len(bars)}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _wrapped(start: str, parts: Sequence[str]) -> list[str]:
    lines, line = [], start
    for index, part in enumerate(parts):
        piece = part + (", " if index < len(parts) - 1 else "")
        if len(line) + len(piece) > _WIDTH and line != start:
            lines.append(line.rstrip())
            line = " " * 10
        line += piece
    return [*lines, line.rstrip()]
