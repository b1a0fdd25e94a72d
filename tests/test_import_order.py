"""Imports point one way, and what must be light loads neither torch nor transformers."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "sarathi_tune"

#: The order of docs/decisions/001: an import may only point to something further left.
ORDER = (
    ("errors", "notices", "units", "stats"),
    ("config",),
    ("machine",),
    ("engine",),
    ("runtime",),
    ("measure",),
    ("stepmodel",),
    ("budget",),
    ("workload",),
    ("loadgen",),
    ("goodput",),
    ("server",),
    ("report",),
    ("tune",),
    ("cli",),
    ("__main__",),
)
#: Inside the leftmost group: who may import whom.
GROUND = {"errors": set(), "notices": set(), "units": {"errors"}, "stats": {"errors"}}
#: These work from documents: they import nothing of `runtime`, wherever it stands in the order.
NO_RUNTIME = {"stepmodel", "budget", "workload", "loadgen", "goodput", "report"}
#: The only places that may load torch, and then only when they are imported themselves.
TORCH = {"runtime", "measure.bench", "measure.kernels"}
HEAVY = {"torch", "transformers", "flash_attn", "triton"}

LEVEL = {name: level for level, group in enumerate(ORDER) for name in group}


def modules() -> list[str]:
    """Every module of the package, dotted, without the package's own name."""
    paths = sorted(ROOT.rglob("*.py"))
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in paths]
    return [name for name in names if name != "__init__"]


def source(module: str) -> Path:
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def imports(module: str, *, top_level_only: bool = False) -> Iterator[str]:
    """What a module imports, as dotted names; `from a import b` is both a and a.b."""
    tree = ast.parse(source(module).read_text(encoding="utf-8"))
    nodes = _run_on_import(tree.body) if top_level_only else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative imports hide the direction"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _run_on_import(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run when the module is imported: not those in functions, nor those for type checkers."""
    for node in body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test):
            yield from _run_on_import(node.body + node.orelse)
        elif isinstance(node, ast.Try):
            yield from _run_on_import(node.body + [inner for handler in node.handlers for inner in handler.body])
        elif isinstance(node, ast.ClassDef):
            yield from _run_on_import(node.body)
        else:
            yield node


def inner_imports(module: str) -> set[str]:
    """The parts of the package that a module imports: {"engine", "units"}."""
    own = [name.split(".")[1] for name in imports(module) if name.startswith("sarathi_tune.")]
    return {part for part in own if part in LEVEL}


def test_every_part_of_the_package_has_a_place_in_the_order() -> None:
    assert {module.split(".")[0] for module in modules()} <= set(LEVEL)


@pytest.mark.parametrize("module", modules())
def test_imports_point_left(module: str) -> None:
    part = module.split(".")[0]
    for imported in inner_imports(module) - {part}:
        if part in GROUND:
            assert imported in GROUND[part], f"{module} imports {imported}"
        else:
            assert LEVEL[imported] < LEVEL[part], f"{module} imports {imported}, which stands to its right"


@pytest.mark.parametrize("module", [module for module in modules() if module.split(".")[0] in NO_RUNTIME])
def test_what_works_from_documents_imports_nothing_of_the_runtime(module: str) -> None:
    assert "runtime" not in inner_imports(module)
    assert not {name for name in imports(module) if name.split(".")[0] in HEAVY}


@pytest.mark.parametrize("module", modules())
def test_only_the_runtime_loads_torch_when_imported(module: str) -> None:
    if any(module == place or module.startswith(f"{place}.") for place in TORCH):
        return
    heavy = {name for name in imports(module, top_level_only=True) if name.split(".")[0] in HEAVY}
    assert not heavy, f"{module} imports {heavy} at its top"


def loaded_after(code: str) -> set[str]:
    """The top-level modules that a fresh interpreter has loaded after `code`."""
    report = "import sys, json; print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"
    run = subprocess.run([sys.executable, "-c", f"{code}\n{report}"], capture_output=True, text=True, check=True)
    return set(json.loads(run.stdout.splitlines()[-1]))


def test_the_command_line_loads_nothing_heavy() -> None:
    loaded = loaded_after("import sarathi_tune.cli")
    assert "typer" in loaded
    assert not loaded & (HEAVY | {"numpy", "scipy", "yaml", "jsonschema"})


def test_derive_loads_neither_torch_nor_transformers() -> None:
    profile = Path(__file__).parent.parent / "results" / "examples" / "h100-llama-3.1-8b.profile.json"
    arguments = ["derive", str(profile), "--slo-itl", "20ms", "--max-num-seqs", "32", "--context", "1k"]
    loaded = loaded_after(
        "import sys\n"
        "from sarathi_tune.cli.app import app\n"
        f"try: app({arguments!r})\n"
        "except SystemExit as end: assert not end.code, end.code"
    )
    assert "numpy" in loaded, "the fit ran"
    assert not loaded & HEAVY
