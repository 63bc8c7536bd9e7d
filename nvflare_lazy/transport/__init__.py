# SPDX-License-Identifier: Apache-2.0
"""Sends and receives tensors through NVFlare without holding a complete payload in memory.

`registration.register()` replaces NVFlare's handlers of tensors and arrays. `decomposers` then encodes and decodes each
message, `_downloadable` serves its payloads, and `receive` downloads them, in the best of the `ways` that both ends
know. `offload` decides whether a payload is received on disk or in memory.
"""

from nvflare_lazy.transport.supported_nvflare import require_supported_nvflare

require_supported_nvflare()
