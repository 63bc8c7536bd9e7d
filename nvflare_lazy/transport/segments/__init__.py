# SPDX-License-Identifier: Apache-2.0
"""Transfer in segments, used if both processes have this package.

The sender offers its payload, the receiver asks for ranges of its bytes, and writes each where it belongs.
"""
