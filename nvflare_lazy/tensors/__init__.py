# SPDX-License-Identifier: Apache-2.0
"""What a lazy tensor is: metadata plus a byte source, in the clothes of torch and NumPy.

The ground floor of the package; it knows nothing of files' formats, of NVFlare or of aggregation.
"""
