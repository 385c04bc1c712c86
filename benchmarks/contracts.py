"""The import contract of extras, which import-linter checks: ``pyproject.toml`` names it."""

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, output

from benchmarks.extras import based_on, extras, part_of


class Extras(Contract):
    """Only an extra itself, and those that are built on it, import its modules; also where they do when it is used."""

    type_name = "extras"

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        """Return the imports that are not allowed."""
        wrong = []
        for importer in sorted(graph.modules):
            for imported in graph.find_modules_directly_imported_by(importer):
                extra, own = part_of(imported), part_of(importer)
                if extra in extras() and extra not in (based_on(own) if own in extras() else ()):
                    wrong.append(f"{importer} ({own}) imports {imported} ({extra})")
        return ContractCheck(kept=not wrong, metadata={"wrong": wrong})

    def render_broken_contract(self, check: ContractCheck) -> None:
        """Print what is wrong, a line each."""
        for text in check.metadata["wrong"]:
            output.print_error(text)
