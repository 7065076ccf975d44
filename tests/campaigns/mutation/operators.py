"""What cosmic-ray would change in a source: its operators that take no arguments, at every place.

Needs the extra ``mutation``; nothing else here does.
"""

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

from .mutants import Place


def all_places(source: str) -> list[Place]:
    tree = get_ast(source)
    found = []
    for name in operator_names():
        kind = get_operator(name)
        if kind.arguments():
            continue
        operator = kind()
        starts = (start for node in ast_nodes(tree) for start, _ in operator.mutation_positions(node))
        found += [Place(tuple(start), name, number) for number, start in enumerate(starts)]
    return found


def changed_source(source: str, place: Place) -> str | None:
    """``source`` with the change at ``place`` made; None where the operator sees nothing to change."""
    changed: str | None = mutate_code(source, get_operator(place.operator)(), place.occurrence)
    return changed
