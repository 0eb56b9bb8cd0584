"""Storage as objects of an S3 bucket."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache, partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from hippoindex.cluster.storage_backend import (
    ConditionFailedError,
    Content,
    Entry,
    ObjectMissingError,
    Stat,
    StorageError,
    TransientStorageError,
    Upload,
    removed_meanwhile,
)
from hippoindex.errors import MissingPackageError

if TYPE_CHECKING:
    import s3fs

#: Key of the metadata that carries the token of a write.
_WRITE = "hippoindex-write"
_REQUEST_TIMEOUT_S = 300.0
_TRANSIENT_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
_TRANSIENT_CODES = frozenset(
    {
        "BadDigest",
        "ConditionalRequestConflict",
        "IncompleteBody",
        "InternalError",
        "OperationAborted",
        "RequestTimeout",
        "ServiceUnavailable",
        "SlowDown",
        "Throttling",
        "ThrottlingException",
        "XAmzContentChecksumMismatch",
        "XAmzContentSHA256Mismatch",
    }
)
_OTHER_REGION_CODES = frozenset({"AuthorizationHeaderMalformed", "PermanentRedirect", "TemporaryRedirect"})
_USER_INFO = re.compile(r"(?<=://)[^/@\s]*@")
_connecting = threading.Lock()
_SECRET_VARIABLES = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_ACCESS_KEY_ID")


class S3Backend:
    """Objects of an S3 bucket, through the client that s3fs keeps.

    The repetitions of botocore and s3fs are switched off: they would repeat a conditional write blindly and
    take its own success for somebody else's. Every write carries its token as metadata instead; where the
    condition does not hold, the token of what is there says whose write it was.

    Parameters
    ----------
    bucket : str
    prefix : str
        Empty, or ending in a slash.

    Raises
    ------
    MissingPackageError
        If s3fs is not installed.
    """

    def __init__(self, bucket: str, prefix: str) -> None:
        try:
            import s3fs
        except ImportError as error:
            raise MissingPackageError("s3fs", f"s3://{bucket}", "pip install 'hippoindex[s3]'") from error
        self._connect: Callable[[], s3fs.S3FileSystem] = partial(_connected, s3fs)
        self._bucket = bucket
        self._prefix = prefix

    def __reduce__(self) -> tuple[Any, ...]:
        return S3Backend, (self._bucket, self._prefix)

    def stat(self, name: str) -> Stat | None:
        """HeadObject."""
        try:
            answer = self._call("head_object", name)
        except ObjectMissingError:
            return None
        return Stat(answer["ContentLength"], answer["ETag"])

    def read(self, name: str) -> Content | None:
        """GetObject."""
        try:
            answer = self._call("get_object", name)
        except ObjectMissingError:
            return None
        return Content(answer["Body"], answer["ContentLength"], answer["ETag"])

    def read_range(self, name: str, start: int, stop: int, etag: str) -> bytes:
        """GetObject with a range, of the same object."""
        answer = self._call("get_object", name, Range=f"bytes={start}-{stop - 1}", IfMatch=etag)
        return cast("bytes", answer["Body"])

    def page(self, prefix: str, after: str) -> tuple[list[Entry], str | None]:
        """ListObjectsV2."""
        token = {"ContinuationToken": after} if after else {}
        answer = self._call("list_objects_v2", None, Prefix=self._prefix + prefix, **token)
        now = datetime.now(UTC)
        entries = [
            Entry(key.removeprefix(self._prefix), item["Size"], (now - item["LastModified"]).total_seconds())
            for item in answer.get("Contents", ())
            if not (key := item["Key"]).endswith("/")  # a folder as consoles and Ray make them
        ]
        return entries, answer["NextContinuationToken"] if answer["IsTruncated"] else None

    def put(
        self, name: str, data: bytes, token: str, *, if_absent: bool = False, if_version: str | None = None
    ) -> str:
        """PutObject with ``If-None-Match`` or ``If-Match``."""
        condition = {"IfNoneMatch": "*"} if if_absent else {}
        if if_version is not None:
            condition = {"IfMatch": if_version}
        try:
            answer = self._call("put_object", name, Body=data, Metadata={_WRITE: token}, **condition)
        except (ConditionFailedError, ObjectMissingError) as error:
            version = self._version_of(name, token)
            if version is None:
                raise ConditionFailedError(str(error)) from None
            return version
        return cast("str", answer["ETag"])

    def delete(self, names: Sequence[str]) -> None:
        """DeleteObject, or DeleteObjects for several."""
        if len(names) == 1:
            self._call("delete_object", names[0])
            return
        keys = [{"Key": self._prefix + name} for name in names]
        answer = self._call("delete_objects", None, Delete={"Objects": keys, "Quiet": True})
        for failed in answer.get("Errors", ()):
            code = str(failed.get("Code"))
            kind = TransientStorageError if code in _TRANSIENT_CODES else StorageError
            raise kind(f"{failed.get('Key')} cannot be deleted: {code}: {failed.get('Message')}")

    def begin(self, name: str, token: str) -> str:
        """CreateMultipartUpload."""
        answer = self._call("create_multipart_upload", name, Metadata={_WRITE: token})
        return cast("str", answer["UploadId"])

    def put_part(self, name: str, upload: str, number: int, offset: int, data: bytes) -> str:  # noqa: ARG002
        """UploadPart; one of the same number is replaced."""
        try:
            answer = self._call("upload_part", name, UploadId=upload, PartNumber=number, Body=data)
        except ObjectMissingError:
            raise removed_meanwhile(self._url(name)) from None
        return cast("str", answer["ETag"])

    def complete(self, name: str, upload: str, token: str, parts: Sequence[str]) -> None:
        """CompleteMultipartUpload."""
        numbered = [{"PartNumber": number, "ETag": etag} for number, etag in enumerate(parts, 1)]
        try:
            self._call(
                "complete_multipart_upload", name, UploadId=upload, MultipartUpload={"Parts": numbered}
            )
        except ObjectMissingError:  # no such upload: it is completed already, or was aborted
            if self._version_of(name, token) is None:
                raise removed_meanwhile(self._url(name)) from None

    def abort(self, name: str, upload: str) -> None:
        """AbortMultipartUpload."""
        with contextlib.suppress(ObjectMissingError):
            self._call("abort_multipart_upload", name, UploadId=upload)

    def uploads(self, prefix: str) -> list[Upload]:
        """ListMultipartUploads, page by page."""
        found: list[Upload] = []
        markers: dict[str, str] | None = {}
        while markers is not None:
            answer = self._call("list_multipart_uploads", None, Prefix=self._prefix + prefix, **markers)
            now = datetime.now(UTC)
            for item in answer.get("Uploads", ()):
                age_s = (now - item["Initiated"]).total_seconds()
                found.append(Upload(item["Key"].removeprefix(self._prefix), item["UploadId"], age_s))
            markers = None
            if answer.get("IsTruncated"):
                markers = {name: answer[f"Next{name}"] for name in ("KeyMarker", "UploadIdMarker")}
        return found

    def local_path(self, name: str) -> Path | None:  # noqa: ARG002
        """Return nothing: the objects are elsewhere."""
        return None

    def _version_of(self, name: str, token: str) -> str | None:
        """Return the version of the object if it is the one written with this token."""
        try:
            answer = self._call("head_object", name)
        except ObjectMissingError:
            return None
        return answer["ETag"] if answer.get("Metadata", {}).get(_WRITE) == token else None

    def _call(self, operation: str, name: str | None, **arguments: Any) -> Mapping[str, Any]:
        """Make one request and return the answer; a body in it has been read."""
        from aiohttp import ClientError as BrokenConnection
        from botocore.exceptions import BotoCoreError, ClientError
        from botocore.parsers import ResponseParserError
        from fsspec.asyn import sync

        arguments["Bucket"] = self._bucket
        if name is not None:
            arguments["Key"] = self._prefix + name
        try:
            files = self._connect()
            answer = sync(files.loop, _request, files, operation, arguments, timeout=_REQUEST_TIMEOUT_S)
        # The causes are left out: what they say is in the messages, without what is secret.
        except ClientError as error:
            raise self._refused(error.response, operation, name) from None
        except (OSError, ValueError, BotoCoreError, ResponseParserError, BrokenConnection) as error:
            raise self._failed(error) from None
        return cast("Mapping[str, Any]", answer)

    def _refused(self, answer: Mapping[str, Any], operation: str, name: str | None) -> StorageError:
        """Return what an error answer of the server amounts to."""
        error = answer.get("Error", {})
        code, status = str(error.get("Code", "")), answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        said = _without_secrets(f"{operation}: {status} {code}: {error.get('Message', '')}")
        url = self._url(name or "")
        if code in _TRANSIENT_CODES or status in _TRANSIENT_STATUS:
            return TransientStorageError(said)
        if status == 412:
            return ConditionFailedError(f"{url} exists or has changed")
        if code == "NoSuchBucket" or (status == 404 and name is None):
            return StorageError(f"There is no bucket {self._bucket!r}: create it, or mend the URL ({said})")
        if status == 404:
            return ObjectMissingError(f"There is no {url} ({said})")
        if code in _OTHER_REGION_CODES or status == 301:
            return StorageError(f"The bucket {self._bucket!r} is in another region: set AWS_REGION ({said})")
        if status in {401, 403}:
            return StorageError(
                f"Access to {url} is denied: are the AWS credentials the right ones, and do they allow "
                "s3:GetObject, PutObject, DeleteObject, ListBucket, AbortMultipartUpload and "
                f"ListBucketMultipartUploads? ({said})"
            )
        return StorageError(f"{url}: the server refused {said}")

    def _failed(self, error: Exception) -> StorageError:
        """Return what a request without an answer amounts to."""
        from botocore import exceptions as boto

        said = _without_secrets(f"{type(error).__name__}: {error}")
        if isinstance(error, boto.NoCredentialsError | boto.PartialCredentialsError | boto.ProfileNotFound):
            return StorageError(
                f"There are no usable AWS credentials for s3://{self._bucket}: set AWS_PROFILE, or "
                f"AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or run on a machine with a role ({said})"
            )
        on_the_way = (
            boto.HTTPClientError,
            boto.ConnectionError,
            boto.IncompleteReadError,
            boto.ChecksumError,
        )
        if isinstance(error, ValueError | boto.BotoCoreError) and not isinstance(error, on_the_way):
            return StorageError(f"s3://{self._bucket} cannot be used with these AWS settings ({said})")
        return TransientStorageError(said)

    def _url(self, name: str) -> str:
        return f"s3://{self._bucket}/{self._prefix}{name}"


def _connected(module: ModuleType) -> s3fs.S3FileSystem:
    """Return this process's client for the present AWS settings; one from before a fork is of no use."""
    environment = frozenset((name, value) for name, value in os.environ.items() if name.startswith("AWS_"))
    with _connecting:
        return _connection(module, os.getpid(), environment)


@lru_cache(maxsize=8)
def _connection(
    module: ModuleType,
    pid: int,  # noqa: ARG001 - it only tells clients apart, as does the environment
    environment: frozenset[tuple[str, str]],  # noqa: ARG001
) -> s3fs.S3FileSystem:
    files = module.S3FileSystem(
        # Given as None, so that fsspec's own configuration does not fill them in.
        **dict.fromkeys(("key", "secret", "token", "endpoint_url", "client_kwargs")),
        config_kwargs={
            "connect_timeout": 10,
            "read_timeout": 60,
            "max_pool_connections": 64,
            "retries": {"total_max_attempts": 1},
        },
        use_listings_cache=False,
        skip_instance_cache=True,
    )
    files.connect()
    return files


async def _request(files: s3fs.S3FileSystem, operation: str, arguments: dict[str, Any]) -> dict[str, Any]:
    client = await files.set_session()
    answer: dict[str, Any] = await getattr(client, operation)(**arguments)
    if "Body" in answer:
        async with answer["Body"] as body:
            answer["Body"] = await body.read()
    return answer


def _without_secrets(text: str) -> str:
    """Strike out credentials, and the user part of a URL."""
    for secret in filter(None, map(os.environ.get, _SECRET_VARIABLES)):
        text = text.replace(secret, "***")
    return _USER_INFO.sub("***@", text)
