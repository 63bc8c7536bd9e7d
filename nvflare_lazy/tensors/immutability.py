# SPDX-License-Identifier: Apache-2.0
"""What is said to whoever tries to write to a lazy tensor or array.

One place, so that every way to write in place ends in the same error and the same advice.
"""

from __future__ import annotations

from typing import NoReturn

from nvflare_lazy.errors import ImmutableTensorError


def refuse_write(what: str, kind: str = "tensor") -> NoReturn:
    """Raise the error for a write.

    Args:
        what: What would have written, as its caller knows it.
        kind: What it would have written to.
    """
    raise ImmutableTensorError(
        f"{what} would write to a lazy {kind}, whose elements are in a file that others read too: "
        f"call materialize() on it and write to the {kind} that returns"
    )
