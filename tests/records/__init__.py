# SPDX-License-Identifier: Apache-2.0
"""The components of a job one by one, with as little of NVFlare around them as they need."""
