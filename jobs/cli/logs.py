"""What a service says while it runs: lines for people, or JSON lines for programs."""

import json
import logging
import sys
from datetime import UTC, datetime


class JsonFormatter(logging.Formatter):
    """One JSON object a record: time (ISO 8601, UTC), level, logger, message, and the traceback where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields)


def log_to_stderr(*, as_json: bool) -> None:
    """Set up the logs of a service's process."""
    handler = logging.StreamHandler(sys.stderr)
    people = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonFormatter() if as_json else people)
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    for talkative in ("botocore", "celery", "kombu"):
        logging.getLogger(talkative).setLevel(logging.WARNING)
