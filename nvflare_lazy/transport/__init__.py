# SPDX-License-Identifier: Apache-2.0
"""How tensors cross NVFlare without ever being whole in memory.

`registration.register()` puts this package's handlers in the place of the stock ones; from then on whatever NVFlare
sends and receives goes through here, to and from peers that may or may not have this package. `offload` says whether
what comes goes to disk, and `install()` does both.
"""
