"""What a bucket's store can do beyond the basics, found out by trying.

Documents do not tell: there are stores that ignore `If-None-Match`, and stores that answer a part copy without having
copied anything.
"""

import logging
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from jobs.errors import PreconditionFailed, StorageError
from jobs.storage.s3_object import S3Object
from jobs.storage.s3_upload import MultipartUpload

_NAME = ".pagemill-probe-"

log = logging.getLogger(__name__)


class Probes:
    """Answers for each bucket once; safe to ask from many threads."""

    def __init__(self, open_object: Callable[[str], S3Object]) -> None:
        self._open = open_object
        self._known: dict[tuple[str, Callable[[S3Object], bool]], bool] = {}
        self._lock = threading.Lock()

    def conditional_put(self, near: S3Object) -> bool:
        """Whether a PUT with `If-None-Match: *` is refused where there is an object."""
        return self._ask(near, _refuses_second_put)

    def part_copy(self, near: S3Object) -> bool:
        """Whether an object can be added to a multipart upload without sending it."""
        return self._ask(near, _copies_part)

    def _ask(self, near: S3Object, question: Callable[[S3Object], bool]) -> bool:
        with self._lock:
            known = self._known.get((near.bucket, question))
            if known is None:
                # Beside the object that is about to be written: a place where the credentials may write.
                folder = near.key.rpartition("/")[0]
                name = f"{folder}/{_NAME}{secrets.token_hex(8)}".lstrip("/")
                known = question(self._open(f"s3://{near.bucket}/{name}"))
                self._known[near.bucket, question] = known
            return known


@contextmanager
def _removed_after(probe: S3Object) -> Iterator[None]:
    try:
        yield
    finally:
        try:
            probe.delete()
        except StorageError as error:
            # Credentials that may write and not delete are no reason to refuse the work.
            log.warning("The probe object %s could not be deleted: %s", probe.url, error)


def _refuses_second_put(probe: S3Object) -> bool:
    with _removed_after(probe):
        probe.put(b"1")
        try:
            probe.put(b"2", absent=True)
        except PreconditionFailed:
            return True
        except StorageError:
            return False  # the store knows the header, and does not do it
        return False


def _copies_part(probe: S3Object) -> bool:
    with _removed_after(probe):
        source = probe.put(b"1")
        upload = MultipartUpload(probe)
        try:
            upload.copy(probe, source.etag)
        except StorageError:
            return False
        finally:
            upload.abort()
        return True
