"""The services' logs for programs."""

import json
import logging
import sys

from jobs.cli.logs import JsonFormatter


def record(message: str, *args: object, exc_info: object = None) -> logging.LogRecord:
    return logging.LogRecord("jobs.x", logging.WARNING, "file.py", 1, message, args, exc_info)  # type: ignore[arg-type]


def test_a_record_is_one_line_of_json() -> None:
    line = JsonFormatter().format(record("shard %d:\nlost", 7))
    assert "\n" not in line
    fields = json.loads(line)
    assert (fields["level"], fields["logger"], fields["message"]) == ("warning", "jobs.x", "shard 7:\nlost")
    assert fields["time"].endswith("+00:00")


def test_an_exception_is_in_the_same_line() -> None:
    try:
        raise ValueError("broken")
    except ValueError:
        line = JsonFormatter().format(record("it failed", exc_info=sys.exc_info()))
    assert "\n" not in line
    assert "ValueError: broken" in json.loads(line)["traceback"]
