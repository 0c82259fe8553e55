"""The S3 client, and one object seen through it: the single requests that everything else is made of."""

import base64
import hashlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from io import BufferedReader
from typing import TYPE_CHECKING, Any

import boto3.session
from botocore.config import Config
from pydantic import SecretStr

from jobs.errors import PreconditionFailed, StorageError, UsageError
from jobs.settings import Settings, mask
from jobs.storage.base import MIB, ObjectInfo, refuse_parent_segments
from jobs.storage.s3_errors import broken_answer, explained

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client
    from mypy_boto3_s3.type_defs import HeadObjectOutputTypeDef, PutObjectOutputTypeDef

_CONNECTIONS = 32
_READ_SIZE = MIB


@dataclass(frozen=True, slots=True)
class S3Config:
    """Where the store is and who asks. What is None is found the way boto3 does: environment, profile, role."""

    endpoint_url: str | None = None
    region: str | None = None
    access_key_id: str | None = None
    secret_access_key: SecretStr | None = None

    @classmethod
    def from_settings(cls, settings: Settings) -> "S3Config":
        return cls(
            settings.s3_endpoint_url, settings.s3_region, settings.s3_access_key_id, settings.s3_secret_access_key
        )

    @property
    def endpoint(self) -> str:
        """The address for error messages."""
        return mask(self.endpoint_url) if self.endpoint_url else "AWS S3"


def connect(config: S3Config) -> "S3Client":
    """A client that any number of threads may use. Sends no checksum header that S3-compatible stores do not know."""
    secret = config.secret_access_key
    client: S3Client = boto3.session.Session().client(
        "s3",
        endpoint_url=config.endpoint_url,
        region_name=config.region,
        aws_access_key_id=config.access_key_id,
        aws_secret_access_key=secret.get_secret_value() if secret else None,
        config=Config(
            signature_version="s3v4",
            retries={"mode": "standard", "max_attempts": 6},
            connect_timeout=5,
            read_timeout=60,
            tcp_keepalive=True,
            max_pool_connections=_CONNECTIONS,
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            s3={"addressing_style": "path" if config.endpoint_url else "auto"},
        ),
    )
    # DeleteObjects must carry a checksum; botocore's choice is a CRC32, which older stores refuse for want of an MD5.
    client.meta.events.register("before-sign.s3.DeleteObjects", _md5_instead_of_crc)
    return client


def _md5_instead_of_crc(request: Any, **_: Any) -> None:
    for name in [name for name in request.headers if name.lower().startswith(("x-amz-checksum", "x-amz-sdk-checksum"))]:
        del request.headers[name]
    request.headers["Content-MD5"] = content_md5(request.body)


def content_md5(data: bytes) -> str:
    return _encoded(hashlib.md5(data, usedforsecurity=False))


def _file_md5(file: BufferedReader) -> str:
    digest = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False))
    file.seek(0)
    return _encoded(digest)


def _encoded(digest: "hashlib._Hash") -> str:
    return base64.b64encode(digest.digest()).decode()


def unquoted(etag: str) -> str:
    """An ETag as ObjectInfo has it: some stores quote it in one answer and not in the next."""
    return etag.strip('"')


def quoted(etag: str) -> str:
    """An ETag as a condition has it."""
    return f'"{etag}"'


def _may_be_cut(answer: "HeadObjectOutputTypeDef | PutObjectOutputTypeDef", *needed: str) -> bool:
    """Whether an answer without a body may have broken off within a header that is needed: half of it looks whole.

    It is the last that came then. Where a store sends it last anyway, one that is whole looks the same.
    """
    return next(reversed(answer["ResponseMetadata"]["HTTPHeaders"]), "").lower() in needed


def split_url(url: str) -> tuple[str, str]:
    """Bucket and key of an S3 URL; the key may be empty. Raises UsageError."""
    refuse_parent_segments(url)
    scheme, _, rest = url.partition("://")
    bucket, _, key = rest.partition("/")
    if scheme.lower() != "s3" or not bucket:
        raise UsageError(f"{url!r} is not an S3 URL.", hint="Write s3://bucket/key.")
    return bucket, key


@dataclass(frozen=True, slots=True)
class S3Object:
    """One URL and the client that reaches it."""

    client: "S3Client"
    endpoint: str
    url: str
    bucket: str
    key: str

    def explained(self, operation: str) -> AbstractContextManager[None]:
        return explained(operation, self.url, self.endpoint)

    def head(self) -> ObjectInfo:
        """What is there now. Raises ObjectNotFound, and BrokenAnswer where the connection was cut within the answer."""
        seen, may_be_cut = self._look()
        if may_be_cut and self._look()[0] != seen:
            raise broken_answer("HeadObject", self.url, self.endpoint)
        return seen

    def _look(self) -> tuple[ObjectInfo, bool]:
        with self.explained("HeadObject"):
            answer = self.client.head_object(Bucket=self.bucket, Key=self.key)
        if not answer.get("ETag") or "ContentLength" not in answer:
            raise broken_answer("HeadObject", self.url, self.endpoint)
        seen = ObjectInfo(self.url, answer["ContentLength"], unquoted(answer["ETag"]))
        return seen, _may_be_cut(answer, "etag", "content-length")

    def get(self, start: int, end: int, etag: str) -> Iterator[bytes]:
        """The bytes [start, end), of which there is at least one, as they arrive.

        A connection that breaks on the way raises BrokenAnswer or one of CONNECTION_ERRORS.
        """
        with self.explained("GetObject"):
            answer = self.client.get_object(
                Bucket=self.bucket, Key=self.key, Range=f"bytes={start}-{end - 1}", IfMatch=quoted(etag)
            )
        if unquoted(answer.get("ETag", "")) != etag and self.head().etag != etag:
            raise PreconditionFailed(f"{self.url} is not the version that was asked for: it has changed since.")
        if not answer.get("ETag") or answer.get("ContentLength") != end - start:
            answer["Body"].close()
            raise broken_answer("GetObject", self.url, self.endpoint)
        with closing(answer["Body"]) as body:
            yield from body.iter_chunks(_READ_SIZE)

    def put(self, data: bytes, *, absent: bool = False) -> ObjectInfo:
        """Writes the object; with `absent` asks the store to refuse where there is one."""
        condition: Any = {"IfNoneMatch": "*"} if absent else {}
        with self.explained("PutObject"):
            answer = self.client.put_object(
                Bucket=self.bucket, Key=self.key, Body=data, ContentMD5=content_md5(data), **condition
            )
        return self._written(len(data), answer)

    def put_file(self, file: BufferedReader, size: int) -> ObjectInfo:
        with self.explained("PutObject"):
            answer = self.client.put_object(
                Bucket=self.bucket, Key=self.key, Body=file, ContentLength=size, ContentMD5=_file_md5(file)
            )
        return self._written(size, answer)

    def _written(self, size: int, answer: "PutObjectOutputTypeDef") -> ObjectInfo:
        # Not every store sends the ETag with the answer to a PUT, and a connection may break before it, or within.
        etag = None if _may_be_cut(answer, "etag") else answer.get("ETag")
        info = ObjectInfo(self.url, size, unquoted(etag)) if etag else self.head()
        if info.size != size:
            raise StorageError(f"{self.url} has {info.size} bytes after a PUT of {size}.")
        return info

    def delete(self) -> None:
        with self.explained("DeleteObject"):
            self.client.delete_object(Bucket=self.bucket, Key=self.key)
