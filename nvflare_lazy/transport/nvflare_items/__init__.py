# SPDX-License-Identifier: Apache-2.0
"""Transfer of whole tensors in NVFlare's own item format: one end does not have this package."""
