# SPDX-License-Identifier: Apache-2.0
"""Lazy tensors: metadata plus a byte source behind the interfaces of torch and NumPy.

The lowest layer of the package: it does not depend on file formats, NVFlare or aggregation.
"""
