"""Imports go one way: kernels <- model <- runtime <- the commands; data stands beside."""
import ast
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
COMMANDS = {"train", "sample"}
MAY_IMPORT = {"kernels": {"kernels"}, "model": {"kernels", "model"}, "runtime": {"kernels", "model", "runtime"}, "data": {"data"},
              **dict.fromkeys(COMMANDS, {"model", "runtime", "data"})}
ROOMS = {"kernels", "model", "runtime", "data", "tests", "benchmarks", *COMMANDS}
# there on some machines only
OPTIONAL = {"wandb", "resource", "model.fused"}
TORCH_ALONE = ["model.reference", "model.block", "model.layout", "model.head", "model.config", "model.flops"]


def modules():
    """Every module of the product, by name."""
    paths = [p for room in ("kernels", "model", "runtime", "data") for p in sorted((ROOT / room).rglob("*.py"))]
    paths += [ROOT / f"{command}.py" for command in sorted(COMMANDS) if (ROOT / f"{command}.py").exists()]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in paths}


def imports(path, inside_functions_only=False):
    """Dotted names that the file imports; `from room import module` names the module."""
    tree = ast.parse(path.read_text())
    if inside_functions_only:
        nodes = [n for f in ast.walk(tree) if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef) for n in ast.walk(f)]
    else:
        nodes = ast.walk(tree)
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            package = (ROOT / node.module.replace(".", "/")).is_dir()
            found |= {f"{node.module}.{alias.name}" for alias in node.names} if package else {node.module}
    return found


def room(name):
    return name.partition(".")[0]


@pytest.mark.parametrize("name", modules())
def test_a_module_imports_from_its_own_room_or_one_to_its_left(name):
    ours = {target for target in imports(modules()[name]) if room(target) in ROOMS}
    wrong = {target for target in ours if room(target) not in MAY_IMPORT[room(name)]}
    assert not wrong, f"{name} imports {', '.join(sorted(wrong))}"
    assert all(target in modules() for target in ours), "imports go to a module, never through __init__.py"


@pytest.mark.parametrize("name", [name for name in modules() if name not in COMMANDS])
def test_imports_inside_functions_are_of_what_is_optional(name):
    hidden = imports(modules()[name], inside_functions_only=True)
    assert hidden <= OPTIONAL, f"{name}: {', '.join(sorted(hidden - OPTIONAL))} belong to the top of the file"


@pytest.mark.parametrize("name", TORCH_ALONE)
def test_a_machine_without_triton_trains_on_the_reference(name):
    """All that the module imports, and what that imports, is torch or Python's own."""
    reached, waiting = set(), [name]
    while waiting:
        now = waiting.pop()
        for target in imports(modules()[now]) - reached:
            reached.add(target)
            if target in modules():
                waiting.append(target)
    theirs = {room(target) for target in reached if room(target) not in sys.stdlib_module_names and target not in modules()}
    assert theirs <= {"torch"} and not any(room(target) == "kernels" for target in reached)


def test_packages_hold_nothing_themselves():
    for path in ROOT.rglob("__init__.py"):
        if path.relative_to(ROOT).parts[0] in ROOMS:
            assert path.read_text() == "", path


def test_the_rule_is_seen_to_be_broken(tmp_path):
    wrong = tmp_path / "wrong.py"
    wrong.write_text("import data.sources\ndef f():\n    from runtime import plan\n")
    assert imports(wrong) == {"data.sources", "runtime.plan"}
    assert imports(wrong, inside_functions_only=True) == {"runtime.plan"}
