"""The import contract of extras, which import-linter checks: ``pyproject.toml`` names it."""

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, output

from benchmarks.extras import based_on, extras, part_of, still


class Extras(Contract):
    """Only an extra itself, and those that are built on it, import its modules; also where they do when it is used."""

    type_name = "extras"

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        """Return the imports that are not allowed, and the exceptions that nothing needs."""
        found = {}
        for importer in sorted(graph.modules):
            for imported in graph.find_modules_directly_imported_by(importer):
                extra, own = part_of(imported), part_of(importer)
                if extra in extras() and extra not in (based_on(own) if own in extras() else ()):
                    found[importer, extra] = f"{importer} ({own}) imports {imported} ({extra})"
        wrong = [text for key, text in found.items() if key not in still()]
        # Where a module itself is away, as `make separable` has it, its exceptions are no matter.
        idle = [key for key in still() - found.keys() if {key[0]} <= graph.modules and there(graph, key[1])]
        wrong += [f"{module} no longer imports {extra}: take it out of the table `still`" for module, extra in idle]
        return ContractCheck(kept=not wrong, metadata={"wrong": sorted(wrong)})

    def render_broken_contract(self, check: ContractCheck) -> None:
        """Print what is wrong, a line each."""
        for text in check.metadata["wrong"]:
            output.print_error(text)


def there(graph: ImportGraph, extra: str) -> bool:
    """Whether an extra has modules in the graph."""
    return any(part_of(module) == extra for module in graph.modules)
