# SPDX-License-Identifier: Apache-2.0
"""Jobs on the real simulator and on real deployments: what users see, from the outside."""
