# SPDX-License-Identifier: Apache-2.0
"""URLs of remote files: their parts, their form in messages, and the fsspec file system that they belong to.

Used by everything that opens or writes a remote file. A URL comes from the user or a job's configuration, never from a
message of a client.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

from nvflare_lazy._text import quoted
from nvflare_lazy.errors import (
    MissingPackageError,
    RemoteDirectoryError,
    RemoteError,
    RemoteFileChangedError,
    RemoteNotFoundError,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fsspec import AbstractFileSystem

# A scheme of one letter would be a drive of Windows.
_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+)://")
_USER = re.compile(r"(?<=://)[^/@]*@")
_PASSWORD = re.compile(r"(?<=://)([^/@:]*):[^/@]*(?=@)")
# What a text from a client library may quote: an address with a signature, or a key.
_QUERY = re.compile(r"(\b[a-z][a-z0-9+.-]+://[^\s'\"?#]*)[?#][^\s'\",)]*", re.IGNORECASE)
_WEB = ("http", "https")
# The package that reads a scheme, as `pip install` names it.
_PACKAGES = {
    **dict.fromkeys(("s3", "s3a"), "nvflare-lazy[remote]"),
    **dict.fromkeys(_WEB, "nvflare-lazy[remote]"),
    **dict.fromkeys(("gs", "gcs"), "gcsfs"),
    "hf": "huggingface_hub",
    **dict.fromkeys(("az", "abfs", "abfss", "adl"), "adlfs"),
}
#: HTTP statuses that may be different in the next request.
TEMPORARY_STATUSES = frozenset((408, 425, 429, 500, 502, 503, 504))
_NETWORK_LIBRARIES = frozenset(
    ("aiohttp", "botocore", "aiobotocore", "urllib3", "httpx", "httpcore", "requests", "asyncio", "fsspec", "http")
)
# Seconds without an answer, after which a request is repeated.
_CONNECT_SECONDS = 20
_STALLED_SECONDS = 60

# Kept for good. A forked child that freed those of its parent would close their connections, and so remove them from
# the event loop that it shares with the parent: the parent would wait forever.
_file_systems: list[AbstractFileSystem] = []


def is_url(path: object) -> bool:
    """Whether a path is the URL of a remote file, such as "s3://bucket/model.safetensors"."""
    return isinstance(path, str) and _URL.match(path) is not None


def display(url: str) -> str:
    """Return a URL for messages: without password, and of the web without user name and query, such as a signature."""
    return redact(url) if is_web(url) else _PASSWORD.sub(r"\1", url)


def redact(text: str) -> str:
    """Return a text of a client library without the user names and queries of the URLs in it."""
    return _QUERY.sub(r"\1", _USER.sub("", text))


def is_web(url: str) -> bool:
    """Whether a URL has the scheme http or https: it can have a query, and its path is percent-encoded."""
    return url.partition("://")[0].lower() in _WEB


def child(url: str, name: str) -> str:
    """Return the URL of a file in the directory `url`. A query, which may be a key to the directory, is kept."""
    path, query = _split(url)
    return f"{path.rstrip('/')}/{quote(name) if is_web(url) else name}{query}"


def parent(url: str) -> str:
    """Return the URL of the directory that contains a file."""
    path, query = _split(url)
    return path.rstrip("/").rpartition("/")[0] + query


def basename(url: str) -> str:
    """Return the name of a file, without its directory."""
    name = _split(url)[0].rstrip("/").rpartition("/")[2]
    return unquote(name) if is_web(url) else name


def with_suffix(url: str, suffix: str) -> str:
    """Return the URL of the file whose name is longer by `suffix`."""
    path, query = _split(url)
    return path.rstrip("/") + suffix + query


def _split(url: str) -> tuple[str, str]:
    """Return the URL up to its query, and the query with its question mark."""
    if not is_web(url):
        return url, ""
    path, mark, query = url.partition("#")[0].partition("?")
    return path, mark + query


def filesystem(url: str) -> tuple[AbstractFileSystem, str]:
    """Return the file system of a URL and the path in it.

    fsspec keeps one file system per process and set of options, and a forked child makes its own. Options and
    credentials come from the client library's environment and from fsspec's configuration. Listings are not cached.

    Raises:
        MissingPackageError: The package for this kind of URL is not installed.
        RemoteError: The scheme is unknown, or the client cannot be configured.
    """
    match = _URL.match(url)
    if match is None or "::" in url:
        raise RemoteError(f"{quoted(display(url))} is not the URL of a file: expected for example s3://bucket/name")
    scheme = match["scheme"].lower()
    try:
        import fsspec
        from fsspec.config import conf

        kind = fsspec.get_filesystem_class(scheme)
        options: dict[str, Any] = {"use_listings_cache": False}
        if scheme in _WEB:
            from nvflare_lazy.remote._http import new_session

            options["get_client"] = new_session
        elif "s3" in kind.protocol:
            # With the process's own configuration first, which replaces options instead of merging them.
            own = conf.get("s3", {}).get("config_kwargs", {})
            options["config_kwargs"] = {"connect_timeout": _CONNECT_SECONDS, "read_timeout": _STALLED_SECONDS, **own}
        made = kind(**kind._get_kwargs_from_urls(url), **options)
        if not any(made is known for known in _file_systems):
            _file_systems.append(made)
        return made, str(kind._strip_protocol(url))
    except ImportError as error:
        package = _PACKAGES.get(scheme, "fsspec")
        raise MissingPackageError(
            f"{display(url)} needs a package that is not installed ({error.name or package}); "
            f"run: pip install '{package}'"
        ) from error
    except ValueError as error:
        raise RemoteError(f"cannot open {display(url)}: {redact(str(error))}") from error


class ClientError(Exception):
    """An error of a client library as text, without the secrets in it, since tracebacks print causes.

    Attributes:
        status: The HTTP status in it, or None.
    """

    def __init__(self, text: str, status: int | None = None) -> None:
        super().__init__(text)
        self.status = status


def without_secrets(error: BaseException) -> BaseException:
    """Return an error that tracebacks can contain: itself, or its text without the secrets of URLs."""
    if any(redact(text) != text for text in map(str, _causes(error))):
        return ClientError(f"{type(error).__name__}: {redact(str(error))}", http_status(error))
    return error


def http_status(error: BaseException) -> int | None:
    """Return the HTTP status that an error of any client library, or its cause, contains."""
    for cause in _causes(error):
        response = getattr(cause, "response", None)
        if isinstance(response, dict):  # botocore
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        else:
            found = (getattr(response, "status_code", None), vars(cause).get("status"), vars(cause).get("code"))
            status = next((value for value in found if value is not None), None)
        if isinstance(status, int) and 100 <= status < 600:
            return status
        if isinstance(status, str) and status.isdigit():
            return int(status)
    return None


def retry_after(error: BaseException) -> str | None:
    """Return the value of the header Retry-After in an error of a client library."""
    for cause in _causes(error):
        response = getattr(cause, "response", None)
        if isinstance(response, dict):
            headers = response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
        else:
            headers = getattr(response, "headers", None) or getattr(cause, "headers", None) or {}
        try:
            found = headers.get("Retry-After") or headers.get("retry-after")
        except AttributeError:
            continue
        if found:
            return str(found)
    return None


def is_temporary(error: BaseException) -> bool:
    """Whether the same request may succeed later: the server is busy, or the connection broke or stalled."""
    if (
        isinstance(error, (RemoteFileChangedError, FileNotFoundError, PermissionError, IsADirectoryError))
        and http_status(error) is None
    ):
        return False
    status = http_status(error)
    if status is not None:
        return status in TEMPORARY_STATUSES
    if isinstance(error, RemoteError):
        return False
    return any(
        isinstance(cause, (ConnectionError, TimeoutError, EOFError))
        or (type(cause).__module__.partition(".")[0] in _NETWORK_LIBRARIES and not isinstance(cause, ValueError))
        for cause in _causes(error)
    )


def remote_error(url: str, action: str, error: BaseException) -> RemoteError:
    """Return the error of this package for an error of a client library.

    Args:
        url: The file.
        action: What failed, as a verb: "read", "open", "write".
        error: The error of fsspec or of the library that it uses.
    """
    if isinstance(error, RemoteError):
        return error
    if isinstance(error, IsADirectoryError):
        return RemoteDirectoryError(f"cannot {action} {display(url)}: it is a directory; name a file in it")
    where, status = display(url), http_status(error)
    text = redact(str(error)) or type(error).__name__
    if status in (404, 410) or (status is None and isinstance(error, FileNotFoundError)):
        return RemoteNotFoundError(f"cannot {action} {where}: it does not exist; check the URL")
    if status in (401, 403) or isinstance(error, PermissionError) or "Credential" in type(error).__name__:
        return RemoteError(
            f"cannot {action} {where}: access denied ({text}); check the credentials of this process and their rights"
        )
    if status == 412:
        return RemoteFileChangedError(f"{where} was replaced while it was being read; open it again")
    advice = "check the network and the server, and try again" if is_temporary(error) else "check the URL"
    return RemoteError(f"cannot {action} {where}: {text if status is None else f'HTTP {status}, {text}'}; {advice}")


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its causes, the innermost of which knows the status."""
    cause: BaseException | None = error
    seen: set[int] = set()
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or cause.__context__
