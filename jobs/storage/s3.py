"""Objects in S3 and in what speaks its language: `s3://bucket/key`, by boto3.

Stores differ in what they leave out. What pagemill depends on is probed once a bucket and done another way where it is
missing.
"""

import logging
import os
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from jobs.errors import ObjectNotFound, PreconditionFailed, StorageError, UsageError
from jobs.storage.base import CHUNK, MIB, ObjectInfo, ObjectWriter, StoredObject, UnfinishedWrite, stream_into
from jobs.storage.file import explained as explained_file
from jobs.storage.s3_errors import (
    CONNECTION_ERRORS,
    BrokenAnswer,
    NoSuchUpload,
    WriteConflict,
    broken_answer,
    explained,
    unreachable,
)
from jobs.storage.s3_object import S3Config, S3Object, connect, split_url, unquoted
from jobs.storage.s3_probe import Probes
from jobs.storage.s3_upload import (
    MAX_PART,
    MAX_PARTS,
    MIN_PART,
    MultipartUpload,
    S3Writer,
    abort_upload,
    part_size,
    upload_size,
)

if TYPE_CHECKING:
    from mypy_boto3_s3.type_defs import ListObjectsV2OutputTypeDef, ObjectTypeDef

_SINGLE_PUT_LIMIT = 64 * MIB
_TRIES = 6
_DELETE_BATCH = 1000

log = logging.getLogger(__name__)


@cache
def shared_s3_store(config: S3Config) -> "S3Store":
    """The process's one store, and so one connection pool, for that endpoint and those credentials."""
    return S3Store(config)


def _pause(attempt: int) -> None:
    """Exponential backoff with full jitter, so that the workers of a cut do not all come back at once."""
    time.sleep(random.uniform(0, min(10.0, 0.2 * 2**attempt)))


class S3Store:
    """A `Store` on one S3 endpoint."""

    def __init__(self, config: S3Config) -> None:
        self._endpoint = config.endpoint
        self._client = connect(config)
        self._probes = Probes(self._object)

    def _object(self, url: str) -> S3Object:
        bucket, key = split_url(url)
        if not key:
            raise UsageError(f"{url!r} names a bucket, not an object.", hint="Write s3://bucket/key.")
        return S3Object(self._client, self._endpoint, url, bucket, key)

    def head(self, url: str) -> ObjectInfo:
        return self._object(url).head()

    def read(self, url: str, start: int = 0, end: int | None = None, etag: str | None = None) -> bytes:
        return b"".join(self.stream(url, start, end, etag))

    def stream(
        self, url: str, start: int = 0, end: int | None = None, etag: str | None = None, chunk: int = CHUNK
    ) -> Iterator[bytes]:
        source = self._object(url)
        # Of a known version, every answer says whether it is still there: asking first would double the requests.
        if etag is None or end is None or start >= end:
            seen = source.head()
            if etag is not None and seen.etag != etag:
                raise PreconditionFailed(f"{url} is not the version that was asked for: it has changed since.")
            etag, end = seen.etag, seen.size if end is None else min(end, seen.size)
        position, attempt = start, 0
        while position < end:
            try:
                for piece in source.get(position, min(position + chunk, end), etag):
                    position += len(piece)
                    attempt = 0
                    yield piece
            except (*CONNECTION_ERRORS, BrokenAnswer) as error:
                attempt += 1
                if attempt == _TRIES:
                    raise unreachable("GetObject", url, self._endpoint, error) from error
                _pause(attempt)

    def put(self, url: str, data: bytes) -> ObjectInfo:
        return self._object(url).put(data)

    def put_file(self, url: str, path: Path) -> ObjectInfo:
        with explained_file(str(path), "read"), path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < _SINGLE_PUT_LIMIT:
                return self._object(url).put_file(file, size)
            with self.writer(url, size) as writer:
                while piece := file.read(CHUNK):
                    writer.write(piece)
        return writer.info

    def put_if_absent(self, url: str, data: bytes) -> ObjectInfo:
        target = self._object(url)
        try:
            return self._create(target, data)
        except PreconditionFailed:
            there = target.head()
            if there.size == len(data) and self.read(url, etag=there.etag) == data:
                return there
            raise

    def _create(self, target: S3Object, data: bytes) -> ObjectInfo:
        if not self._probes.conditional_put(target):
            try:
                target.head()
            except ObjectNotFound:
                return target.put(data)
            raise PreconditionFailed(f"{target.url} exists already.")
        for attempt in range(1, _TRIES):
            try:
                return target.put(data, absent=True)
            except WriteConflict:
                _pause(attempt)
        return target.put(data, absent=True)

    def supports_conditional_put(self, url: str) -> bool:
        return self._probes.conditional_put(self._object(url))

    def writer(self, url: str, size: int | None = None) -> ObjectWriter:
        return S3Writer(self._object(url), size)

    def check_writable(self, url: str) -> None:
        # An upload that is begun needs the permission to write, and shows nothing to anybody.
        MultipartUpload(self._object(url)).abort()

    def concat(self, sources: Sequence[ObjectInfo], url: str) -> ObjectInfo:
        target = self._object(url)
        pieces = [source for source in sources if source.size]
        size = sum(piece.size for piece in pieces)
        if size > part_size(size) and _fit_as_parts(pieces) and self._probes.part_copy(target):
            try:
                return self._join_in_place(pieces, target)
            except (PreconditionFailed, ObjectNotFound):
                raise
            except StorageError as error:
                # Some stores want all parts but the last of one size, and say so only when the upload is completed.
                log.warning("Joining %s by streaming, because the store did not join it: %s", url, error)
        return stream_into(self, pieces, self.writer(url, size))

    def _join_in_place(self, pieces: Sequence[ObjectInfo], target: S3Object) -> ObjectInfo:
        with MultipartUpload(target) as upload:
            for piece in pieces:
                upload.copy(self._object(piece.url), piece.etag)
        return upload.info

    def list(self, prefix_url: str) -> Iterator[ObjectInfo]:
        for url, entry in self._entries(prefix_url):
            yield ObjectInfo(url, entry["Size"], unquoted(entry["ETag"]))

    def stored(self, prefix_url: str) -> Iterator[StoredObject]:
        for url, entry in self._entries(prefix_url):
            yield StoredObject(url, entry["Size"], entry["LastModified"].timestamp())

    def _entries(self, prefix_url: str) -> Iterator[tuple[str, "ObjectTypeDef"]]:
        bucket, _ = split_url(prefix_url)
        for page in self._pages(prefix_url):
            for entry in page.get("Contents", []):
                yield f"s3://{bucket}/{entry['Key']}", entry

    def _pages(self, prefix_url: str, delimiter: str = "") -> Iterator["ListObjectsV2OutputTypeDef"]:
        bucket, prefix = split_url(prefix_url)
        with explained("ListObjectsV2", prefix_url, self._endpoint):
            pages = self._client.get_paginator("list_objects_v2")
            for page in pages.paginate(Bucket=bucket, Prefix=prefix, Delimiter=delimiter):
                # What broke off within its headers is to botocore a page with nothing on it, and the last.
                if "IsTruncated" not in page:
                    raise broken_answer("ListObjectsV2", prefix_url, self._endpoint)
                yield page

    def unfinished(self, prefix_url: str) -> Iterator[UnfinishedWrite]:
        bucket, prefix = split_url(prefix_url)
        pages = self._client.get_paginator("list_multipart_uploads").paginate(Bucket=bucket, Prefix=prefix)
        # One store says so where there is none at all.
        with suppress(NoSuchUpload), explained("ListMultipartUploads", prefix_url, self._endpoint):
            for page in pages:
                for upload in page.get("Uploads", []):
                    # There are stores that ignore the prefix.
                    if upload["Key"].startswith(prefix):
                        target = self._object(f"s3://{bucket}/{upload['Key']}")
                        started = upload["Initiated"].timestamp()
                        size = upload_size(target, upload["UploadId"])
                        yield UnfinishedWrite(target.url, size, started, upload["UploadId"])

    def discard(self, write: UnfinishedWrite) -> None:
        abort_upload(self._object(write.url), write.upload)

    def folders(self, prefix_url: str) -> Iterator[str]:
        _, prefix = split_url(prefix_url)
        for page in self._pages(prefix_url, delimiter="/"):
            for entry in page.get("CommonPrefixes", []):
                yield entry["Prefix"].removeprefix(prefix).removesuffix("/")

    def delete(self, urls: Iterable[str]) -> None:
        left = iter(urls)
        while batch := [self._object(url) for url in islice(left, _DELETE_BATCH)]:
            for bucket in {target.bucket for target in batch}:
                self._delete_from(bucket, [target for target in batch if target.bucket == bucket])

    def _delete_from(self, bucket: str, targets: Sequence[S3Object]) -> None:
        with targets[0].explained("DeleteObjects"):
            answer = self._client.delete_objects(
                Bucket=bucket, Delete={"Objects": [{"Key": target.key} for target in targets], "Quiet": True}
            )
        for refused in answer.get("Errors", []):
            if refused.get("Code") != "NoSuchKey":
                raise StorageError(
                    f"s3://{bucket}/{refused.get('Key')} could not be deleted: {refused.get('Message')}",
                    hint="The credentials need the right for DeleteObject.",
                )


def _fit_as_parts(pieces: Sequence[ObjectInfo]) -> bool:
    return (
        len(pieces) <= MAX_PARTS
        and all(piece.size <= MAX_PART for piece in pieces)
        and all(piece.size >= MIN_PART for piece in pieces[:-1])
    )
