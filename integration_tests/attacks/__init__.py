# SPDX-License-Identifier: Apache-2.0
"""An executor that attacks, and its attacks; it travels in a job's `custom` folder."""
