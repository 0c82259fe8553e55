"""What botocore raises, said in pagemill's errors: which object, which operation, and what to check."""

from collections.abc import Iterator
from contextlib import contextmanager

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    PartialCredentialsError,
)
from botocore.exceptions import ConnectionError as BotoConnectionError

from jobs.errors import ObjectNotFound, PagemillError, PreconditionFailed, ServiceUnreachable, StorageError

CONNECTION_ERRORS = (BotoConnectionError, HTTPClientError, IncompleteReadError)
"""The connection could not be made, or broke. Another try may succeed."""

_CREDENTIALS = "PAGEMILL_S3_ACCESS_KEY_ID and PAGEMILL_S3_SECRET_ACCESS_KEY (or AWS_ACCESS_KEY_ID and so on)"
_NOT_IMPLEMENTED = 501
_NOT_FOUND = {"404", "NoSuchKey", "NotFound"}
_PRECONDITION = {"412", "PreconditionFailed"}
_OUT_OF_RANGE = {"416", "InvalidRange"}
_BAD_CREDENTIALS = {
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "ExpiredToken",
    "InvalidToken",
    "TokenRefreshRequired",
}
_WRONG_REGION = {"301", "PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"}


class BrokenAnswer(ServiceUnreachable):
    """The connection was cut within the headers of an answer, which botocore takes for all there is of them."""


class NoSuchUpload(StorageError):
    """The multipart upload was completed or aborted before."""


class WriteConflict(StorageError):
    """Another conditional write to the same key was under way; the store asks to try again."""


@contextmanager
def explained(operation: str, url: str, endpoint: str) -> Iterator[None]:
    """Turns botocore's errors into ObjectNotFound, PreconditionFailed, StorageError or ServiceUnreachable."""
    try:
        yield
    except ClientError as error:
        raise _refused(error, operation, url, endpoint) from error
    except (NoCredentialsError, PartialCredentialsError) as error:
        raise StorageError(f"No credentials for {url}: {error}.", hint=f"Set {_CREDENTIALS}.") from error
    except CONNECTION_ERRORS as error:
        raise unreachable(operation, url, endpoint, error) from error
    except BotoCoreError as error:
        raise StorageError(f"{operation} of {url} failed: {error}") from error
    except ValueError as error:
        # botocore's parser on half a date or half a number.
        raise broken_answer(operation, url, endpoint) from error


def broken_answer(operation: str, url: str, endpoint: str) -> BrokenAnswer:
    return BrokenAnswer(f"The answer of the object store at {endpoint} broke off ({operation} of {url}).")


def unreachable(operation: str, url: str, endpoint: str, error: Exception) -> ServiceUnreachable:
    return ServiceUnreachable(
        f"The object store at {endpoint} does not answer ({operation} of {url}): {error}",
        hint="Check that it runs, PAGEMILL_S3_ENDPOINT_URL, and the network between.",
    )


def _refused(error: ClientError, operation: str, url: str, endpoint: str) -> PagemillError:
    code = str(error.response.get("Error", {}).get("Code", ""))
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    bucket = url.removeprefix("s3://").partition("/")[0]
    if code == "NoSuchBucket":
        return StorageError(
            f"There is no bucket {bucket!r} at {endpoint} ({operation} of {url}).",
            hint="Create the bucket, or check its name and PAGEMILL_S3_ENDPOINT_URL.",
        )
    if code in _NOT_FOUND:
        return ObjectNotFound(f"There is no object {url}.")
    if code == "NoSuchUpload":
        return NoSuchUpload(f"The upload of {url} is gone ({operation}).")
    if code == "ConditionalRequestConflict":
        return WriteConflict(f"Another write to {url} is under way ({operation}).")
    if code in _OUT_OF_RANGE:
        return PreconditionFailed(f"{url} has fewer bytes than the version that was asked for.")
    if code in _PRECONDITION:
        return PreconditionFailed(f"{url} exists already, or has changed ({operation}).")
    if code in _BAD_CREDENTIALS:
        return StorageError(
            f"{endpoint} refuses the credentials ({code}; {operation} of {url}).", hint=f"Check {_CREDENTIALS}."
        )
    if status == 403:
        return StorageError(
            f"Access to bucket {bucket!r} is refused ({code}; {operation} of {url}).",
            hint=f"The credentials need the right for {operation} there; check {_CREDENTIALS}.",
        )
    if code in _WRONG_REGION:
        return StorageError(f"Bucket {bucket!r} is in another region ({code}).", hint="Set PAGEMILL_S3_REGION.")
    if status >= 500 and status != _NOT_IMPLEMENTED:
        return unreachable(operation, url, endpoint, error)
    return StorageError(f"{operation} of {url} failed: {error}")
