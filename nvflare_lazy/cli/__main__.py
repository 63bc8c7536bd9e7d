# SPDX-License-Identifier: Apache-2.0
"""`python -m nvflare_lazy.cli`, for environments without the `nvflare-lazy` script on the path."""

from nvflare_lazy.cli import main

# NVFlare imports every module of a package that is named in its `nvflare_decomposers`.
if __name__ == "__main__":
    main()
