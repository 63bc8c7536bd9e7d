# SPDX-License-Identifier: Apache-2.0
"""Transfer of whole tensors in NVFlare's own format, used if one process does not have this package."""
