# SPDX-License-Identifier: Apache-2.0
"""A filter that writes to the values, as filters that add noise do."""

from nvflare.apis.dxo_filter import DXOFilter


class AddInPlace(DXOFilter):
    """Adds a number to each element of a result.

    Args:
        summand: The number.
    """

    def __init__(self, summand):
        super().__init__(supported_data_kinds=None, data_kinds_to_filter=None)
        self.summand = summand

    def process_dxo(self, dxo, shareable, fl_ctx):
        """Change the values of a result where they are."""
        for value in dxo.data.values():
            value += self.summand
        return dxo
