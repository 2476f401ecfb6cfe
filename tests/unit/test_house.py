"""The house keeps its order: what may import what among tests, where the tests of a module are, and what is claimed."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from tests.support.situations import situations
from tools.size import doubled, files

ROOT = Path(__file__).parents[2]
SOURCE = ("scheduler", "stage_server", "client", "swarm")
TESTS = sorted([*ROOT.glob("tests/**/test_*.py"), *ROOT.glob("benchmarks/tests/**/test_*.py")])

# All that benchmarks take from tests: the simulated system and real processes, chaos on them, the emulated network,
# and the patches.
LENT_TO_BENCHMARKS = (
    *("tests.support", "tests.simulation.engine", "tests.chaos.trial", "tests.chaos.relay", "tests.chaos.islands"),
    *("tests.chaos.harmed_stage_server", "tests.mutations.catalogue"),
)

# Modules without a test file of their own, by the file under tests/ whose claims are theirs.
COVERED_BY = {
    "unit/swarm/model/test_optimizers.py": ("swarm/job/optimizers",),
    "integration/test_client.py": (*("client/completion", "client/flags", "client/transfer/*", "client/verbs/*"),),
    "integration/test_api.py": ("client/api",),
    "integration/test_broker.py": ("scheduler/api/announcer",),
    "integration/test_up.py": ("client/up/*",),
    "property/test_exactly_once.py": (
        *("scheduler/brain/inputs", "scheduler/brain/outputs", "scheduler/brain/parts"),
        *("scheduler/brain/settings", "scheduler/brain/commit/*", "scheduler/brain/replicas/*"),
        "scheduler/brain/state/*",
    ),
    "simulation/test_trace.py": ("scheduler/brain/trace",),
    "simulation/test_outer_steps.py": ("scheduler/brain/islands/brain", "scheduler/brain/islands/checkpoints"),
    "simulation/test_draining.py": ("scheduler/brain/explain/situation",),
    "simulation/test_series.py": ("scheduler/jobs/series",),
    "simulation/test_stalling.py": ("scheduler/assembly", "scheduler/jobs/*"),
    "simulation/test_resume.py": ("scheduler/storage/*", "swarm/reference/checkpoints"),
    "simulation/test_data.py": ("scheduler/api/*",),
    "integration/test_lean_imports.py": ("stage_server/app", "stage_server/options", "stage_server/lean_imports"),
    "simulation/test_recovery.py": ("stage_server/replica/*",),
    "unit/stage_server/session/test_server.py": ("stage_server/session/calibration",),
    "unit/swarm/process/test_http.py": ("swarm/pki/https",),
    "unit/swarm/process/test_lifecycle.py": ("scheduler/app",),
    "unit/swarm/process/test_metrics.py": ("scheduler/metrics", "stage_server/metrics"),
    "unit/swarm/rpc/test_enrolment.py": ("swarm/rpc/members",),
    "unit/swarm/checkpoint/test_writer.py": ("swarm/checkpoint/storage",),
    "unit/swarm/job/test_partition.py": ("swarm/job/families", "swarm/job/model_config"),
    "property/test_safetensors_header.py": ("swarm/hf/safetensors_header",),
    "property/test_long_json.py": ("swarm/long_json",),
    "property/test_bulk_windows.py": ("swarm/rpc/window",),
    "property/test_rpc_frames.py": ("swarm/rpc/links/frames",),
    "unit/scheduler/planning/test_planner.py": ("scheduler/planning/search", "scheduler/planning/table"),
    "security/test_relay.py": (
        *(
            "swarm/relay/metrics",
            "swarm/relay/service",
            "swarm/rpc/links/tunnel",
        ),
    ),
    "integration/test_relay_processes.py": ("swarm/relay/app", "swarm/relay/session"),
    "integration/test_bulk_on_slow_lines.py": ("client/sending",),
    "integration/test_rpc_hostile.py": ("swarm/rpc/links/peers",),
    "unit/swarm/model/test_stage.py": ("swarm/model/state",),
    "integration/test_train_local.py": ("swarm/model/sample",),
    "integration/test_odd_models.py": (
        "swarm/hf/fit",
        "swarm/job/positions",
    ),
    "integration/test_cut_invariance.py": ("swarm/reference/trainer",),
    "integration/test_narrow.py": ("swarm/model/narrow",),
}

# The names that stand for two classes. This list may only shrink.
DOUBLED = """
    Checkpoint Connection Fact Job Link LogLine Peer Scheduler Stage
"""


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def nodes_of(path: Path) -> Sequence[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


@cache
def imports(path: Path) -> frozenset[str]:
    """All that a file may import, at its top or later: modules, and what may be modules."""
    found: set[str] = set()
    for node in nodes_of(path):
        match node:
            case ast.Import(names):
                found |= {name.name for name in names}
            case ast.ImportFrom(module, names, 0):
                found |= {f"{module}", *(f"{module}.{name.name}" for name in names)}
            case ast.Constant(str(text)):  # the program of a process that a test starts
                found |= set(re.findall(r"(?m)^\s*(?:from|import) (\w+\.[\w.]+)", text))
    return frozenset(found)


@cache
def loads(path: Path) -> frozenset[str]:
    """What a file imports, and the names that it has for modules to be loaded when they are needed."""
    names = {node.value for node in nodes_of(path) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return imports(path) | names


def modules() -> Iterator[Path]:
    for package in SOURCE:
        for path in ROOT.glob(f"{package}/**/*.py"):
            folders = path.relative_to(ROOT).parts
            if path.stem not in ("__init__", "__main__") and not {"wire", "migrations"} & set(folders):
                yield path


def partner(module: Path) -> Path:
    relative = module.relative_to(ROOT)
    return ROOT / "tests" / "unit" / relative.parent / f"test_{relative.name}"


def reached(test: Path) -> set[str]:
    """What a test file imports, if only through others."""
    known = {dotted(path): path for top in (*SOURCE, "tests") for path in ROOT.glob(f"{top}/**/*.py")}
    seen: set[str] = set()
    ahead = [test]
    while ahead:
        new = {name for name in loads(ahead.pop()) if name in known} - seen
        # To import a module is to import the packages that it is in.
        new |= {name.rpartition(".")[0] for name in new if name.rpartition(".")[0] in known} - seen
        seen |= new
        ahead += [known[name] for name in new]
    return seen


def test_a_test_file_is_imported_by_nobody() -> None:
    names = {dotted(path) for path in TESTS}
    found = {
        str(path.relative_to(ROOT))
        for path in files("tests", "benchmarks")
        if names & imports(path) and path != Path(__file__)
    }
    assert found == set(), "what tests share is in tests/support"


def test_tests_take_nothing_from_benchmarks_and_benchmarks_little_from_tests() -> None:
    takes = {
        dotted(path): {name for name in imports(path) if name.partition(".")[0] in ("tests", "benchmarks")}
        for path in files("tests", "benchmarks")
    }
    wrong = {f"{path}: {name}" for path, names in takes.items() if path.startswith("tests") for name in names
             if name.startswith("benchmarks")}  # fmt: skip
    lent = {name for path, names in takes.items() if path.startswith("benchmarks") for name in names
            if name.startswith("tests")}  # fmt: skip
    assert wrong == set()
    assert {name for name in lent if not name.startswith(LENT_TO_BENCHMARKS)} == set()
    assert [benchmark for benchmark in LENT_TO_BENCHMARKS if not any(name.startswith(benchmark) for name in lent)] == []


def test_a_module_has_a_test_file_or_is_listed_with_the_one_that_covers_it() -> None:
    lacking = {path.relative_to(ROOT).with_suffix("").as_posix(): path for path in modules()
               if not partner(path).exists()}  # fmt: skip
    patterns = {pattern: ROOT / "tests" / test for test, some in COVERED_BY.items() for pattern in some}
    stale = [pattern for pattern in patterns if not any(fnmatch(name, pattern) for name in lacking)]
    assert stale == [], "these modules have test files of their own, or are gone"
    reach = {test: reached(test) for test in set(patterns.values())}
    untested = [
        name
        for name, path in lacking.items()
        if not any(fnmatch(name, pattern) and dotted(path) in reach[test] for pattern, test in patterns.items())
    ]
    assert untested == [], "write tests/unit/.../test_MODULE.py"


def test_a_test_of_one_module_is_where_the_module_is() -> None:
    """tests/unit mirrors the source: a file there has the name of a module of the same folder, or begins with it."""
    known = {partner(path).relative_to(ROOT).with_suffix("").as_posix() for path in modules()}
    strays = [
        name
        for name in (path.relative_to(ROOT).with_suffix("").as_posix() for path in ROOT.glob("tests/unit/**/test_*.py"))
        if name not in known and not any(name.startswith(f"{prefix}_") for prefix in known)
    ]
    assert sorted(strays) == [
        "tests/unit/test_brains_stand_alone",
        "tests/unit/test_deploy",
        "tests/unit/test_documents",
        "tests/unit/test_house",
        "tests/unit/test_references",
    ]


def test_a_file_is_not_named_after_the_folder_that_it_is_in() -> None:
    found = [str(path) for path in ROOT.glob("tests/simulation/**/*.py") if "simulated" in path.stem]
    assert found == []


def test_a_file_of_the_source_has_at_most_800_lines() -> None:
    """A file is one noun; a longer one holds two."""
    assert [dotted(path) for path in modules() if len(path.read_text(encoding="utf-8").splitlines()) > 800] == []


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    """Not even for types, or within a function."""
    known = {dotted(path): path for path in modules()}
    graph = {name: imports(path) & known.keys() - {name} for name, path in known.items()}
    TopologicalSorter(graph).prepare()


def test_a_function_fits_a_screen() -> None:
    """70 lines below its signature."""
    functions = [(path, node) for path in modules() for node in nodes_of(path)
                 if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]  # fmt: skip
    long = [f"{dotted(path)}.{node.name}" for path, node in functions
            if (node.end_lineno or 0) - node.body[0].lineno >= 70]  # fmt: skip
    assert long == []


def test_a_name_of_a_class_stands_for_one_thing() -> None:
    assert doubled(files(*SOURCE)) == DOUBLED.split()


def claims() -> list[tuple[str, str]]:
    """Each claim with its file. A file's line begins at the margin, the lines of its claims with two spaces."""
    file, pairs = "", []
    for line in (ROOT / "tests/claims.txt").read_text().splitlines():
        if line.startswith("  "):
            pairs.append((file, line.strip()))
        else:
            file = line
    return pairs


def names(file: str) -> set[str]:
    """The tests that a file defines, or the titles of situations that are played; empty if there is no such file."""
    if file.endswith(".txt"):
        is_played = "beside(__file__)" in (ROOT / file).with_suffix(".py").read_text(encoding="utf-8")
        played = [situation for situation in situations(ROOT / file) if is_played and "\n> " in f"\n{situation.text}"]
        return {f"test_{run.title.replace(' ', '_')}" for run in played}
    nodes = nodes_of(ROOT / file) if (ROOT / file).exists() else ()
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_each_claim_is_held_by_the_test_of_its_name() -> None:
    listed = claims()
    defined = {file: names(file) for file in {file for file, _ in listed}}

    lost = [(file, claim) for file, claim in listed if f"test_{claim.replace(' ', '_')}" not in defined[file]]

    assert len(listed) > 1_000
    assert not lost, f"moved: move the line in tests/claims.txt; cut: remove it, and say so in the commit: {lost[:5]}"
