# SPDX-License-Identifier: Apache-2.0
"""Out-of-core tensors for NVFlare: model updates stay on disk until somebody looks at one."""

__version__ = "0.1.0"
