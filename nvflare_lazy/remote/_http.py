# SPDX-License-Identifier: Apache-2.0
"""The HTTP session of fsspec's client, with checks of each response before its body is read.

A server that ignores ranges would send a whole checkpoint for each request, and one that does not support If-Match
would mix two versions of a file. A redirect from https to http would make a secret link readable.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

from nvflare_lazy.errors import RemoteError, RemoteFileChangedError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import aiohttp

_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")
_CONNECT_SECONDS = 20
_STALLED_SECONDS = 60


class ExpectedRange(NamedTuple):
    """A range of a file and the version of the file, which a response has to match.

    Attributes:
        where: The file, for messages.
        start: The first byte.
        end: The byte after the last.
        size: The size of the file.
        etag: Its ETag, or None.
        modified: Its time of modification as the server states it, or None.
    """

    where: str
    start: int
    end: int
    size: int
    etag: str | None
    modified: str | None


async def new_session(**options: Any) -> aiohttp.ClientSession:
    """Return a session that stalls no longer than a minute and checks the responses to ranged requests."""
    import aiohttp

    tracing = aiohttp.TraceConfig()
    tracing.on_request_end.append(_check_response)
    tracing.on_request_redirect.append(_check_redirect)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS, sock_read=_STALLED_SECONDS)
    return aiohttp.ClientSession(**{"timeout": timeout, **options, "trace_configs": [tracing]})


async def _check_response(session: Any, context: Any, params: aiohttp.TraceRequestEndParams) -> None:
    expected = context.trace_request_ctx
    if isinstance(expected, ExpectedRange):
        error = _mismatch(expected, params.response)
        if error is not None:
            params.response.close()
            raise error


def _mismatch(expected: ExpectedRange, response: aiohttp.ClientResponse) -> RemoteError | None:
    if response.status == 200:
        return RemoteError(
            f"cannot read a part of {expected.where}: the server ignores requests for ranges and sends the whole file; "
            "use a server that supports ranges, or download the file"
        )
    if response.status != 206:
        return None  # the client library raises it
    given = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
    total = expected.size if given is None or given[3] == "*" else int(given[3])
    if total != expected.size or _is_other_version(expected, response.headers):
        return RemoteFileChangedError(f"{expected.where} was replaced while it was being read; open it again")
    if given is None or (int(given[1]), int(given[2]) + 1) != (expected.start, expected.end):
        return RemoteError(
            f"cannot read bytes {expected.start} to {expected.end} of {expected.where}: the server sent "
            f"{response.headers.get('Content-Range')!r}; use a server that supports ranges, or download the file"
        )
    if response.headers.get("Content-Encoding", "identity") != "identity":
        return RemoteError(f"cannot read a part of {expected.where}: the server compresses it; turn that off")
    return None


def _is_other_version(expected: ExpectedRange, headers: Mapping[str, str]) -> bool:
    for known, found in ((expected.etag, headers.get("ETag")), (expected.modified, headers.get("Last-Modified"))):
        if known is not None and found is not None:
            return known != found
    return False


async def _check_redirect(session: Any, context: Any, params: aiohttp.TraceRequestRedirectParams) -> None:
    if params.url.scheme == "https" and params.response.headers.get("Location", "").lower().startswith("http:"):
        params.response.close()
        raise RemoteError(
            f"{params.url.with_query(None).with_user(None)} redirects from https to http, which is not encrypted; "
            "use the URL that it leads to if you trust the network"
        )
