"""`python docs/import_graph.py`: draws imports.svg, the packages by layer and the imports between them.

An arrow is left out if a longer path connects the same packages. Raises SystemExit if packages import each other.
"""

import sys
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

ROOTS = ("python_backend", "trainer", "actor", "critic_client", "tools", "benchmarks", "examples")
SHADES = ("#d6ebf7", "#e7f3d8", "#fde9cf", "#f9dcdc", "#efe3f5", "#eeeeee", "#eeeeee", "#eeeeee")
COLOURS = dict(zip(ROOTS, SHADES, strict=True))
BASE = (  # many packages import them
    "python_backend.backoff",
    "python_backend.digests",
    "python_backend.errors",
    "python_backend.path_alias",
    "python_backend.process",
    "tools.arguments",
)
FLAT = ("benchmarks", "critic_client", "examples", "trainer")
Graph = Mapping[str, set[str]]


def main() -> None:
    """Write imports.svg beside this file."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    imports = package_imports()
    try:
        order = list(TopologicalSorter(imports).static_order())
    except CycleError as error:
        raise SystemExit(f"remove an import from this circle: {' -> '.join(error.args[1])}") from error
    imports = reduced(imports)
    layers: dict[str, int] = {}
    for package in order:
        layers[package] = 1 + max((layers[other] for other in imports[package]), default=-1)
    mpl.rcParams["svg.hashsalt"] = "imports"
    figure, axes = plt.subplots(figsize=(12, 1.15 * (max(layers.values()) + 1)))
    draw(axes, imports, layers)
    figure.savefig(Path(__file__).with_name("imports.svg"), bbox_inches="tight", metadata={"Date": None})


def package_imports() -> dict[str, set[str]]:
    """Return, for each package, the other packages that it imports from."""
    graph = grimp.build_graph(*ROOTS)
    modules = [module for module in graph.modules if module not in BASE]
    imports: dict[str, set[str]] = {package_of(module, graph): set() for module in modules}
    for module in modules:
        package = package_of(module, graph)
        for imported in graph.find_modules_directly_imported_by(module):
            if imported not in BASE and package_of(imported, graph) != package:
                imports[package].add(package_of(imported, graph))
    return {package: others for package, others in imports.items() if package != "python_backend"}


def package_of(module: str, graph: grimp.ImportGraph) -> str:
    """Return the package of a module, cut to two levels; a module directly in a top-level package belongs to that.

    The subpackages of those in FLAT belong to the package around them.
    """
    parts = module.split(".")
    inner = ".".join(parts[:2])
    is_package = len(parts) > 2 or bool(graph.find_children(inner))
    return inner if len(parts) > 1 and is_package and parts[0] not in FLAT else parts[0]


def reduced(imports: Graph) -> dict[str, set[str]]:
    """Return the imports without those that a longer path implies."""

    def below(package: str) -> set[str]:
        return imports[package].union(*(below(other) for other in imports[package]))

    return {
        package: {other for other in others if not any(other in below(via) for via in others - {other})}
        for package, others in imports.items()
    }


def draw(axes: Axes, imports: Graph, layers: Mapping[str, int]) -> None:
    """Draw a box for each package, in rows by layer, with importers above the packages that they import."""
    places: dict[str, tuple[float, float]] = {}
    for layer in range(max(layers.values()) + 1):
        row = sorted(package for package, at in layers.items() if at == layer)
        for i, package in enumerate(row):
            places[package] = ((i + 0.5) / len(row), float(layer))
    texts = {}
    for package, (x, y) in places.items():
        box = {"boxstyle": "round,pad=0.45", "facecolor": COLOURS[package.partition(".")[0]], "edgecolor": "#9aa0a6"}
        texts[package] = axes.text(x, y, package, ha="center", va="center", fontsize=9.5, bbox=box, zorder=3)
    axes.set_xlim(-0.02, 1.02)
    axes.set_ylim(-0.5, max(layers.values()) + 0.5)
    axes.axis("off")
    axes.figure.canvas.draw()  # sets the sizes of the boxes, at whose edges arrows end
    for package, others in imports.items():
        for other in sorted(others):
            ends = {"patchA": texts[package].get_bbox_patch(), "patchB": texts[other].get_bbox_patch()}
            style = {"arrowstyle": "-|>", "color": "#9aa0a6", "shrinkA": 0, "shrinkB": 2, "lw": 0.9, **ends}
            axes.annotate("", xy=places[other], xytext=places[package], arrowprops=style, zorder=1)


if __name__ == "__main__":
    main()
