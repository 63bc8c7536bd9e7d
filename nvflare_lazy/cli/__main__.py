# SPDX-License-Identifier: Apache-2.0
"""`python -m nvflare_lazy.cli`, for where the `nvflare-lazy` script is not on the path."""

from nvflare_lazy.cli import main

main()
