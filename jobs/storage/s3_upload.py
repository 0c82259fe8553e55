"""Multipart uploads: an object sent in parts that appears when the upload is completed, and never in part."""

from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Self

from jobs.errors import ObjectNotFound, PagemillError, PreconditionFailed, StorageError
from jobs.storage.base import MIB, ObjectInfo
from jobs.storage.s3_errors import NoSuchUpload, broken_answer
from jobs.storage.s3_object import S3Object, content_md5, quoted

if TYPE_CHECKING:
    from mypy_boto3_s3.type_defs import CompletedPartTypeDef

MIN_PART = 5 * MIB
MAX_PART = 5 * 1024 * MIB
MAX_PARTS = 10_000
_UNKNOWN_SIZE_PART = 16 * MIB


def part_size(size: int | None) -> int:
    """Bytes a part, so that an object of `size` bytes needs at most 9,000 of the 10,000 parts allowed.

    All parts but the last are equal: some stores refuse others.
    """
    return _UNKNOWN_SIZE_PART if size is None else max(8 * MIB, -(-size // 9_000))


def abort_upload(target: S3Object, upload_id: str) -> None:
    """Drops an upload and its parts. One that is gone already is no error."""
    with suppress(NoSuchUpload), target.explained("AbortMultipartUpload"):
        target.client.abort_multipart_upload(Bucket=target.bucket, Key=target.key, UploadId=upload_id)


def upload_size(target: S3Object, upload_id: str) -> int:
    """The bytes of the parts that an upload holds; none if it has ended meanwhile."""
    size = 0
    with suppress(NoSuchUpload), target.explained("ListParts"):
        pages = target.client.get_paginator("list_parts")
        for page in pages.paginate(Bucket=target.bucket, Key=target.key, UploadId=upload_id):
            size += sum(part["Size"] for part in page.get("Parts", []))
    return size


class MultipartUpload:
    """One upload as a context: completed on a clean exit, when `info` is set, and aborted when the block raises."""

    info: ObjectInfo

    def __init__(self, target: S3Object) -> None:
        self._target = target
        self._parts: list[CompletedPartTypeDef] = []
        self._size = 0
        with target.explained("CreateMultipartUpload"):
            answer = target.client.create_multipart_upload(Bucket=target.bucket, Key=target.key)
        if not answer.get("UploadId"):
            raise broken_answer("CreateMultipartUpload", target.url, target.endpoint)
        self._id = answer["UploadId"]

    def __enter__(self) -> Self:
        return self

    def send(self, data: bytes) -> None:
        number = self._next_number()
        with self._target.explained("UploadPart"):
            answer = self._target.client.upload_part(
                Bucket=self._target.bucket,
                Key=self._target.key,
                UploadId=self._id,
                PartNumber=number,
                Body=data,
                ContentMD5=content_md5(data),
            )
        if not answer.get("ETag"):
            raise broken_answer("UploadPart", self._target.url, self._target.endpoint)
        self._add(number, answer["ETag"], len(data))

    def copy(self, source: S3Object, etag: str) -> None:
        """Adds that version of a whole object of the same store as a part.

        Raises PreconditionFailed where the object is another version, StorageError where the store does not copy.
        """
        number = self._next_number()
        with self._target.explained("UploadPartCopy"):
            answer = self._target.client.upload_part_copy(
                Bucket=self._target.bucket,
                Key=self._target.key,
                UploadId=self._id,
                PartNumber=number,
                CopySource={"Bucket": source.bucket, "Key": source.key},
                CopySourceIfMatch=quoted(etag),
            )
        part_etag = answer.get("CopyPartResult", {}).get("ETag")
        if not part_etag:
            raise StorageError(f"The store does not copy parts: UploadPartCopy of {source.url} returned no ETag.")
        # There are stores that ignore the condition, so what was copied is looked at as well.
        copied = source.head()
        if copied.etag != etag:
            raise PreconditionFailed(f"{source.url} has changed since.")
        self._add(number, part_etag, copied.size)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.abandon(error)
            return
        try:
            self._complete()
        except BaseException as failure:
            self.abandon(failure)
            raise

    def _next_number(self) -> int:
        if len(self._parts) == MAX_PARTS:
            raise StorageError(f"{self._target.url} needs more than {MAX_PARTS} parts.")
        return len(self._parts) + 1

    def _add(self, number: int, etag: str, size: int) -> None:
        self._parts.append({"PartNumber": number, "ETag": etag})
        self._size += size

    def _complete(self) -> None:
        target = self._target
        try:
            with target.explained("CompleteMultipartUpload"):
                target.client.complete_multipart_upload(
                    Bucket=target.bucket, Key=target.key, UploadId=self._id, MultipartUpload={"Parts": self._parts}
                )
        except NoSuchUpload:
            # A repeated Complete, whose first answer was lost, finds the upload gone and the object there.
            if not self._is_published():
                raise
        self.info = target.head()
        if self.info.size != self._size:
            raise StorageError(f"{target.url} has {self.info.size} bytes after an upload of {self._size}.")

    def _is_published(self) -> bool:
        try:
            there = self._target.head()
        except ObjectNotFound:
            return False
        return there.size == self._size and there.etag.endswith(f"-{len(self._parts)}")

    def abort(self) -> None:
        """Drops the upload and its parts. One that is gone already is no error."""
        abort_upload(self._target, self._id)

    def abandon(self, reason: BaseException) -> None:
        """Drops the upload because of `reason`, which stays the error to show, with a note where that fails too."""
        try:
            self.abort()
        except PagemillError as failure:
            reason.add_note(f"The unfinished upload {self._id} of {self._target.url} is left behind: {failure}")


class S3Writer:
    """An `ObjectWriter`: a single PUT where the object turns out smaller than a part, else a multipart upload."""

    info: ObjectInfo

    def __init__(self, target: S3Object, size: int | None) -> None:
        self._target = target
        self._part_size = part_size(size)
        self._buffer = bytearray()
        self._upload: MultipartUpload | None = None

    def __enter__(self) -> Self:
        return self

    def write(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= self._part_size:
            if self._upload is None:
                self._upload = MultipartUpload(self._target)
            self._upload.send(bytes(self._buffer[: self._part_size]))
            del self._buffer[: self._part_size]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            if self._upload is not None:
                self._upload.abandon(error)
        elif self._upload is None:
            self.info = self._target.put(bytes(self._buffer))
        else:
            with self._upload as upload:
                if self._buffer:
                    upload.send(bytes(self._buffer))
            self.info = upload.info
