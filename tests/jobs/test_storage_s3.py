"""What is particular to S3: broken connections, repeated requests, server-side joins, and errors that help."""

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError, IncompleteReadError
from pydantic import SecretStr

from jobs.errors import ObjectNotFound, PagemillError, PreconditionFailed, ServiceUnreachable, StorageError, UsageError
from jobs.storage import ObjectWriter, S3Config, S3Store
from jobs.storage import s3 as s3_module
from jobs.storage.base import MIB
from jobs.storage.s3_errors import BrokenAnswer, explained
from jobs.storage.s3_object import S3Object
from jobs.storage.s3_upload import MAX_PARTS, part_size
from tests.proxy import TcpProxy, tcp_proxy
from tests.servers import BUCKET, S3Server


def store_at(server: S3Server, endpoint: str | None = None, **changes: Any) -> S3Store:
    fields = {
        "endpoint_url": endpoint or server.endpoint,
        "region": "us-east-1",
        "access_key_id": server.access_key,
        "secret_access_key": SecretStr(server.secret_key),
    }
    return S3Store(S3Config(**{**fields, **changes}))


@pytest.fixture
def base() -> str:
    return f"s3://{BUCKET}/{uuid.uuid4().hex}"


@pytest.fixture
def proxy(moto_s3: S3Server) -> Iterator[TcpProxy]:
    with tcp_proxy(moto_s3.endpoint) as proxy:
        yield proxy


@pytest.fixture(autouse=True)
def _no_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_module, "_pause", lambda attempt: None)


def test_a_stream_that_is_cut_goes_on_where_it_broke(moto_s3: S3Server, proxy: TcpProxy, base: str) -> None:
    data = uuid.uuid4().bytes * (4 * MIB // 16)
    info = store_at(moto_s3).put(f"{base}/x", data)
    proxy.cut_after(MIB // 3, 1_500_000, 10)
    assert b"".join(store_at(moto_s3, proxy.endpoint).stream(info.url, etag=info.etag)) == data
    assert proxy.connections_cut == 3


@pytest.mark.parametrize("cut", [0, 10, 60, 120, *range(150, 500, 25)])
def test_an_answer_cut_anywhere_is_asked_for_again(
    moto_s3: S3Server, proxy: TcpProxy, base: str, cut: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = store_at(moto_s3).put(f"{base}/x", b"0123456789" * 100)
    store = store_at(moto_s3, proxy.endpoint)
    monkeypatch.setattr(S3Object, "head", lambda source: info)
    proxy.cut_after(cut)
    assert b"".join(store.stream(info.url)) == b"0123456789" * 100
    assert proxy.connections_cut == 1


def test_a_range_of_a_known_version_takes_one_request(
    moto_s3: S3Server, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_at(moto_s3)
    info = store.put(f"{base}/x", b"0123456789")
    monkeypatch.delattr(S3Object, "head")
    assert store.read(info.url, 2, 5, info.etag) == b"234"


@pytest.mark.parametrize("server", ["moto_s3", "rclone_s3"])
def test_a_put_takes_one_request(
    server: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_at(request.getfixturevalue(server))
    file = tmp_path / "file"
    file.write_bytes(b"more")
    monkeypatch.delattr(S3Object, "head")
    assert store.put(f"s3://{BUCKET}/one", b"some").size == 4
    assert store.put_file(f"s3://{BUCKET}/one", file).size == 4


def test_a_look_at_an_object_that_is_cut_anywhere_gives_no_half_a_size(
    moto_s3: S3Server, proxy: TcpProxy, base: str
) -> None:
    info = store_at(moto_s3).put(f"{base}/x", b"0123456789" * 100)
    store = store_at(moto_s3, proxy.endpoint)
    seen = []
    for cut in range(320, 400):
        proxy.cut_after(cut)
        try:
            seen.append(store.head(info.url))
        except BrokenAnswer:
            seen.append(None)
    assert proxy.connections_cut == len(seen)
    assert set(seen) == {info, None}


@pytest.mark.parametrize("cut", [20, 120, 220])
def test_a_listing_that_is_cut_within_its_headers_is_no_empty_one(
    moto_s3: S3Server, proxy: TcpProxy, base: str, cut: int
) -> None:
    store_at(moto_s3).put(f"{base}/folder/x", b"x")
    store = store_at(moto_s3, proxy.endpoint)
    for listing in (store.list, store.folders, store.stored):
        proxy.cut_after(cut)
        with pytest.raises(BrokenAnswer):
            next(listing(f"{base}/"))
    assert proxy.connections_cut == 3


def test_a_stream_that_does_not_get_on_says_that_the_store_is_gone(
    moto_s3: S3Server, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_at(moto_s3)
    info = store.put(f"{base}/x", b"x" * 3 * MIB)
    get = S3Object.get

    def get_a_little(source: S3Object, start: int, end: int, etag: str) -> Iterator[bytes]:
        if start == 0:
            yield next(get(source, start, end, etag))
        raise IncompleteReadError(actual_bytes=1, expected_bytes=2)

    monkeypatch.setattr(S3Object, "get", get_a_little)
    stream = store.stream(info.url)
    assert next(stream) == b"x" * MIB
    with pytest.raises(ServiceUnreachable, match=moto_s3.endpoint):
        next(stream)


def test_an_own_create_whose_answer_was_lost_is_recognised(moto_s3: S3Server, proxy: TcpProxy, base: str) -> None:
    store = store_at(moto_s3, proxy.endpoint)
    assert store.supports_conditional_put(f"{base}/manifest")
    proxy.cut_after(0)
    info = store.put_if_absent(f"{base}/manifest", b"ours")
    assert proxy.connections_cut == 1
    assert info == store_at(moto_s3).head(f"{base}/manifest")


def test_a_completed_upload_whose_answer_was_lost_is_recognised(
    moto_s3: S3Server, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_at(moto_s3)
    complete = store._client.complete_multipart_upload

    def complete_twice(**arguments: Any) -> Any:
        complete(**arguments)
        return complete(**arguments)

    monkeypatch.setattr(store._client, "complete_multipart_upload", complete_twice)
    with store.writer(f"{base}/x", 20 * MIB) as writer:
        writer.write(b"x" * 20 * MIB)
    assert writer.info.size == 20 * MIB


def test_where_the_store_can_it_joins_by_itself(moto_s3: S3Server, base: str) -> None:
    store = store_at(moto_s3)
    sources = [store.put(f"{base}/{n}", bytes([n]) * size) for n, size in enumerate((6 * MIB, 5 * MIB, 0, 1))]
    assert store.concat(sources, f"{base}/joined").etag.endswith("-3")


def test_a_store_that_refuses_unequal_parts_gets_equal_ones(
    moto_s3: S3Server, base: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = store_at(moto_s3)
    sources = [store.put(f"{base}/{n}", bytes([n]) * size) for n, size in enumerate((6 * MIB, 5 * MIB, 7))]
    complete = store._client.complete_multipart_upload

    def complete_equal_parts(**arguments: Any) -> Any:
        if len(arguments["MultipartUpload"]["Parts"]) == 3:
            arguments["MultipartUpload"]["Parts"][1]["ETag"] = '"not-that-part"'
        return complete(**arguments)

    monkeypatch.setattr(store._client, "complete_multipart_upload", complete_equal_parts)
    info = store.concat(sources, f"{base}/joined")
    assert info.etag.endswith("-2")
    assert store.read(info.url) == b"".join(store.read(source.url) for source in sources)
    assert "by streaming" in caplog.text
    assert moto_s3.client().list_multipart_uploads(Bucket=BUCKET).get("Uploads", []) == []


def test_an_upload_that_cannot_be_aborted_is_named_in_the_error(
    moto_s3: S3Server, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_at(moto_s3)

    def refuse(**arguments: Any) -> Any:
        raise ClientError({"Error": {"Code": "AccessDenied"}, "ResponseMetadata": {"HTTPStatusCode": 403}}, "Abort")

    monkeypatch.setattr(store._client, "abort_multipart_upload", refuse)
    with pytest.raises(KeyError) as raised:
        _write_and_break_off(store.writer(f"{base}/x", 20 * MIB))
    assert f"{base}/x" in raised.value.__notes__[0]


def _write_and_break_off(writer: ObjectWriter) -> None:
    with writer:
        writer.write(b"x" * 10 * MIB)
        raise KeyError("the caller's own")


def test_a_large_file_goes_in_parts(
    moto_s3: S3Server, base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_module, "_SINGLE_PUT_LIMIT", 8 * MIB)
    path = tmp_path / "large"
    path.write_bytes(uuid.uuid4().bytes * (9 * MIB // 16))
    info = store_at(moto_s3).put_file(f"{base}/large", path)
    assert info.etag.endswith("-2")
    assert store_at(moto_s3).read(info.url) == path.read_bytes()


@pytest.mark.parametrize("size", [None, 0, 1, 64 * MIB, 80 * 1024 * MIB, 5 * 1024 * 1024 * MIB])
def test_parts_are_few_enough_for_any_size(size: int | None) -> None:
    assert part_size(size) >= 8 * MIB
    assert (size or 0) / part_size(size) <= MAX_PARTS * 0.9


def test_the_second_put_through_a_store_without_conditions_is_refused_all_the_same(
    rclone_s3: S3Server, base: str
) -> None:
    rclone_s3.client().put_object(Bucket=BUCKET, Key=f"{base.rpartition('/')[2]}/m", Body=b"theirs", IfNoneMatch="*")
    with pytest.raises(PreconditionFailed):
        store_at(rclone_s3).put_if_absent(f"{base}/m", b"ours")


def test_nobody_listening_is_unreachable(moto_s3: S3Server) -> None:
    store = store_at(moto_s3, "http://127.0.0.1:9")
    with pytest.raises(ServiceUnreachable, match=r"127\.0\.0\.1:9") as raised:
        store.head(f"s3://{BUCKET}/x")
    assert "PAGEMILL_S3_ENDPOINT_URL" in raised.value.hint


def test_a_missing_bucket_is_named(moto_s3: S3Server) -> None:
    store = store_at(moto_s3)
    for access in (lambda: store.put("s3://no-such-bucket/x", b""), lambda: list(store.list("s3://no-such-bucket/"))):
        with pytest.raises(StorageError, match="no-such-bucket") as raised:
            access()
        assert not isinstance(raised.value, ObjectNotFound)


def test_refused_credentials_are_named_without_the_secret(rclone_s3: S3Server) -> None:
    store = store_at(rclone_s3, secret_access_key=SecretStr("not-the-secret"))
    with pytest.raises(StorageError) as raised:
        store.put(f"s3://{BUCKET}/x", b"")
    assert BUCKET in str(raised.value)
    assert "PAGEMILL_S3_SECRET_ACCESS_KEY" in raised.value.hint
    assert "not-the-secret" not in str(raised.value) + raised.value.hint


def test_no_credentials_at_all_says_which_to_set(moto_s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, "/dev/null")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    store = store_at(moto_s3, access_key_id=None, secret_access_key=None)
    with pytest.raises(StorageError, match="No credentials") as raised:
        store.put(f"s3://{BUCKET}/x", b"")
    assert "PAGEMILL_S3_ACCESS_KEY_ID" in raised.value.hint


@pytest.mark.parametrize("url", ["s3://", "s3:///key", f"s3://{BUCKET}", f"s3://{BUCKET}/"])
def test_a_url_that_names_no_object_is_refused(moto_s3: S3Server, url: str) -> None:
    with pytest.raises(UsageError):
        store_at(moto_s3).put(url, b"x")


def test_only_headers_that_all_stores_know_are_sent(moto_s3: S3Server, base: str) -> None:
    """Newer SDK defaults (CRC32 checksums, aws-chunked bodies) are refused by several S3-compatible stores."""
    store = store_at(moto_s3)
    sent: dict[str, dict[str, str]] = {}

    def keep(request: Any, event_name: str, **_: Any) -> None:
        sent[event_name.rpartition(".")[2]] = {name.lower(): str(value) for name, value in request.headers.items()}

    store._client.meta.events.register("before-send.s3", keep)
    store.put(f"{base}/x", b"x")
    with store.writer(f"{base}/y", 20 * MIB) as writer:
        writer.write(b"y" * 9 * MIB)
    store.delete([f"{base}/x", f"{base}/y"])
    assert {"PutObject", "UploadPart", "DeleteObjects"} <= sent.keys()
    for operation in ("PutObject", "UploadPart", "DeleteObjects"):
        assert "content-md5" in sent[operation]
    for headers in sent.values():
        assert not [name for name in headers if name.startswith(("x-amz-checksum", "x-amz-sdk-checksum"))]
        assert "aws-chunked" not in headers.get("content-encoding", "")


@pytest.mark.parametrize(
    ("code", "status", "expected"),
    [
        ("404", 404, ObjectNotFound),
        ("NoSuchKey", 404, ObjectNotFound),
        ("PreconditionFailed", 412, PreconditionFailed),
        ("412", 412, PreconditionFailed),
        ("AccessDenied", 403, StorageError),
        ("403", 403, StorageError),
        ("InvalidAccessKeyId", 403, StorageError),
        ("PermanentRedirect", 301, StorageError),
        ("EntityTooLarge", 400, StorageError),
        ("NotImplemented", 501, StorageError),
        ("SlowDown", 503, ServiceUnreachable),
        ("InternalError", 500, ServiceUnreachable),
    ],
)
def test_an_answer_becomes_the_error_that_says_what_to_do(
    code: str, status: int, expected: type[PagemillError]
) -> None:
    answer = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    with pytest.raises(PagemillError) as raised, explained("PutObject", "s3://bucket/key", "http://store"):
        raise ClientError(answer, "PutObject")
    assert type(raised.value) is expected
    assert "bucket" in raised.value.message
