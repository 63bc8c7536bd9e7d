# SPDX-License-Identifier: Apache-2.0
"""Transfer by handoff, used if both processes have this package and share a scratch root on one host.

The sender names files that contain the payload's bytes, and the receiver takes a hard link to each: no byte of a tensor
passes through a socket, and most bytes are not written again.
"""
