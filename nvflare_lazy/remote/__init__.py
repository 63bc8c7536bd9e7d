# SPDX-License-Identifier: Apache-2.0
"""Files on object stores and web servers, through fsspec: checkpoints by URL instead of by path.

`open_file` opens a local or a remote file, and `url` takes URLs apart. The
package works without fsspec's clients until a URL is used.
"""

from nvflare_lazy.remote.file import RemoteFile, list_directory, open_file
from nvflare_lazy.remote.url import is_url

__all__ = ["RemoteFile", "is_url", "list_directory", "open_file"]
