# SPDX-License-Identifier: Apache-2.0
"""Transport between real cells, over TCP on loopback, in separate processes."""
