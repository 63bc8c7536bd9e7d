# SPDX-License-Identifier: Apache-2.0
"""Repeats requests to a server with growing pauses, while the error may be temporary and time remains."""

from __future__ import annotations

import email.utils
import random
import time
from typing import TYPE_CHECKING, TypeVar

from nvflare_lazy._text import get_logger
from nvflare_lazy.errors import NVFlareLazyError, RemoteError
from nvflare_lazy.remote.url import is_temporary, remote_error, retry_after, without_secrets

if TYPE_CHECKING:
    from collections.abc import Callable

logger = get_logger(__name__)

_Result = TypeVar("_Result")

#: After this time since the first failure, no further try begins. A server that restarts takes some seconds.
OPEN_SECONDS = 10.0
READ_SECONDS = 90.0
_FIRST_PAUSE = 0.1
_MAX_PAUSE = 10.0


def retried(url: str, action: str, request: Callable[[], _Result], seconds: float) -> _Result:
    """Return the result of a request, repeated for some seconds while its error may be temporary.

    Args:
        url: The file, for messages.
        action: Verb for the use of the file, for messages.
        request: Makes one request.
        seconds: Time after the first failure in which a try may start.

    Raises:
        RemoteError: The last error; the message has the number of tries.
    """
    failed: float | None = None
    tries = 0
    while True:
        try:
            tries += 1
            return request()
        except NVFlareLazyError as error:
            if not isinstance(error, RemoteError) or not is_temporary(error):
                raise
            cause: Exception = error
        except Exception as error:
            cause = error
        now = time.monotonic()
        failed = now if failed is None else failed
        pause = _pause(cause, tries)
        if not is_temporary(cause) or now + pause > failed + seconds:
            found = remote_error(url, action, cause)
            if tries > 1:
                found.args = (f"{found.args[0]} ({tries} tries in {now - failed:.0f} s)",)
            # The traceback of a library's error would keep its buffers alive.
            raise found from without_secrets(cause.with_traceback(None))
        logger.debug("Trying again to %s a remote file in %.1f s: %s", action, pause, type(cause).__name__)
        time.sleep(pause)


def _pause(error: BaseException, tries: int) -> float:
    """Return the seconds to wait: more after each try, and at least the server's number."""
    longest: float = min(_FIRST_PAUSE * 2.0 ** min(tries - 1, 10), _MAX_PAUSE)
    # Not all threads and machines at the same moment.
    pause = longest * random.uniform(0.5, 1.0)  # noqa: S311
    return max(pause, _seconds(retry_after(error)))


def _seconds(wanted: str | None) -> float:
    """Return the seconds of a header Retry-After, which has a number or a date; 0 if it is missing or invalid."""
    if wanted is None:
        return 0.0
    if wanted.strip().isdecimal():
        return float(wanted)
    try:
        return email.utils.parsedate_to_datetime(wanted).timestamp() - time.time()
    except ValueError:
        return 0.0
