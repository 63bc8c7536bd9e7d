# SPDX-License-Identifier: Apache-2.0
"""Adapts an NVFlare job to a level: a mapping from NVFlare's components to ours, applied to a job folder."""
