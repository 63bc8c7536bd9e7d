# SPDX-License-Identifier: Apache-2.0
"""A contract for import-linter, which lacks one for names: a leading `_` permits imports only inside the package."""

from __future__ import annotations

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, output


class PrivateModulesContract(Contract):
    """A module or package with a leading `_` is imported only by modules of its parent package."""

    type_name = "private_modules"

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        broken = sorted(
            (importer, imported)
            for importer in graph.modules
            for imported in graph.find_modules_directly_imported_by(importer)
            if not _may_import(importer, imported)
        )
        return ContractCheck(kept=not broken, metadata={"broken": broken})

    def render_broken_contract(self, check: ContractCheck) -> None:
        for importer, imported in check.metadata["broken"]:
            output.print_error(f"{importer} imports {imported}, which is private to its package")


def _may_import(importer: str, imported: str) -> bool:
    parts = imported.split(".")
    parents = (".".join(parts[:place]) for place, part in enumerate(parts) if part.startswith("_") and place)
    return all(f"{importer}.".startswith(f"{parent}.") for parent in parents)
