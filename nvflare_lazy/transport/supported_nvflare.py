# SPDX-License-Identifier: Apache-2.0
"""The releases of NVFlare that this package supports; all packages that import NVFlare check it first.

Another release may lack the names in `_nvflare_private`, or use them in another way. Checkpoint tools do not import it.
"""

from __future__ import annotations

import re
from importlib import metadata

from nvflare_lazy.errors import UnsupportedNVFlareError

#: As in pyproject.toml.
SUPPORTED = ">=2.9,<2.10"
_SERIES = (2, 9)
_VERSION = re.compile(r"v?(?P<release>\d+(?:\.\d+)*)[-_.]?(?P<pre>a|b|c|rc|pre|dev)?", re.ASCII | re.IGNORECASE)


def require_supported_nvflare() -> None:
    """Raise an error if NVFlare is not installed, or in another version.

    Raises:
        UnsupportedNVFlareError: The message has both versions.
    """
    version = _installed()
    if version is None:
        raise UnsupportedNVFlareError(f'NVFlare is not installed; run pip install "nvflare{SUPPORTED}"')
    if not is_supported(version):
        raise UnsupportedNVFlareError(
            f"nvflare-lazy needs nvflare{SUPPORTED}, and {version} is installed; "
            f'run pip install "nvflare{SUPPORTED}", or install the release of nvflare-lazy for your NVFlare'
        )


def is_supported(version: str) -> bool:
    """Return whether a version is in `SUPPORTED`, by the rules of packaging.

    2.9.1rc5 is, 2.9.0rc1 and 2.10.0rc1 are not.
    """
    match = _VERSION.match(version)
    if match is None:
        return False
    release = tuple(map(int, match["release"].split(".")))
    is_before_series = match["pre"] is not None and not any(release[2:])
    return release[:2] == _SERIES and not is_before_series


def _installed() -> str | None:
    for name in ("nvflare", "nvflare-nightly"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    try:
        import nvflare
    except ImportError:
        return None
    # A source tree on the path.
    return str(nvflare.__version__)
