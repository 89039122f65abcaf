"""The house keeps its shape: who may import whom, what a folder holds, and which names are public."""

import ast
import itertools
import re
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import jaxtyping
import numpy as np
import pytest
import torch

import doppler_hf
import doppler_hf.filters
import doppler_hf.optim
import doppler_hf.privacy
from doppler_hf.extras import EXTRAS
from doppler_hf.filters import optimal_fir
from doppler_hf.privacy.noise.mechanism import box_muller
from tests.support.array_types import CHECKED, TOO_BUSY

PACKAGE = Path(doppler_hf.__file__).parent
MODULES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))

ARRAYS = "numpy scipy jaxtyping"
# What a folder may import of ours, and of others. Each may import itself and `errors`; the longest name that fits a module
# counts.
# The privacy boundary runs between `privacy` and `optim`: one float crosses it.
MAY_IMPORT = {
    "filters": ("deprecated", ARRAYS),
    "deprecated": ("", ""),
    "linalg": ("", "torch jaxtyping"),
    "triton_support": ("", "numpy jaxtyping torch triton"),
    "shards": ("", "torch"),
    "optim": ("filters linalg shards triton_support", "jaxtyping torch"),
    "optim/fused_update": ("optim triton_support", "numpy jaxtyping torch triton"),
    "privacy": ("deprecated errors linalg shards triton_support filters.noise_shape", "numpy jaxtyping torch cryptography"),
    "privacy/batching/columns": ("", "numpy jaxtyping pyarrow"),
    "privacy/batching/places": ("", "numpy jaxtyping torch pyarrow"),
    "privacy/batching/data_digest": ("privacy.batching.columns", "numpy torch pyarrow"),
    "privacy/clipping/fused_gradients": ("triton_support", "numpy jaxtyping torch triton"),
    "privacy/clipping/opacus_layers": ("linalg privacy", "jaxtyping torch opacus"),
    "privacy/noise/chacha": ("triton_support", "numpy jaxtyping torch triton"),
    "privacy/accounting": ("", "scipy numpy dp_accounting"),
    "privacy/ledger": ("version privacy.accounting filters.noise_shape", "jsonschema filelock"),
    "privacy/clipping/transformers_layers": ("linalg privacy", "jaxtyping torch transformers peft"),
    "privacy/losses": ("linalg privacy.dense_losses privacy.token_losses", "jaxtyping torch transformers"),
    "privacy/loss_bounds": ("privacy.losses", "transformers"),
    "privacy/token_losses": ("linalg", "jaxtyping torch transformers"),
    "privacy/dense_losses": ("linalg privacy.token_losses", "jaxtyping torch transformers"),
    "training_args": ("deprecated filters privacy", "transformers torch"),
    # The folders of a run, each after those that it may import; `private_run` is between `planning` and `reporting`.
    "run": ("filters linalg optim privacy shards training_args", "numpy jaxtyping torch transformers accelerate"),
    "run/processes": ("privacy shards training_args run.digests run.interruptions", "torch transformers accelerate"),
    "run/weights": (
        "privacy run.processes run.digests run.states_folder",
        "numpy jaxtyping torch safetensors",
    ),
    "run/weights/merged_model": (
        "extras privacy.ledger.weights run.weights.config_differences",
        "torch transformers peft safetensors",
    ),
    "run/resuming": (
        "filters optim.checkpoint privacy training_args run.weights run.processes run.digests run.states_folder",
        "torch transformers accelerate safetensors",
    ),
    "run/planning": ("filters linalg optim privacy training_args run.resuming", "numpy jaxtyping torch transformers"),
    "run/reporting": (
        "filters privacy training_args run.private_run run.planning run.optimizer run.resuming run.processes "
        "run.interruptions run.own_code run.precision",
        "numpy jaxtyping torch transformers",
    ),
    "run/saving": (
        "privacy training_args run.private_run run.optimizer run.reporting run.resuming run.weights run.processes "
        "run.digests run.interruptions run.own_code run.precision",
        "numpy torch transformers safetensors huggingface_hub",
    ),
    "run/saving/training_curve": ("extras privacy run.reporting", "matplotlib"),
    "run/saving/card_part": ("", ""),
    "run/search": (
        "privacy training_args run.private_run run.planning run.reporting run.saving run.weights run.digests "
        "run.states_folder",
        "numpy transformers",
    ),
    "preflight": (
        "errors filters.noise_shape linalg optim privacy run shards training_args",
        "numpy jaxtyping torch transformers accelerate peft pyarrow",
    ),
    "errors": ("", ""),
    "extras": ("", ""),
    "version": ("", ""),
    "trainer": ("deprecated preflight privacy training_args run", "torch jaxtyping transformers accelerate"),
    "trl_checks": ("training_args preflight.data", "datasets"),
    "sft": ("deprecated trainer training_args trl_checks run.saving", "transformers trl"),
    "dpo": (
        "deprecated trainer training_args trl_checks run.saving run.own_code privacy",
        "transformers trl torch jaxtyping",
    ),
    "gradient_recorder": ("filters training_args", "numpy jaxtyping torch transformers"),
    "mean_pooling": ("privacy.losses", "torch jaxtyping transformers"),
    "audit": (
        "preflight.autograd_check deprecated trainer training_args run privacy shards filters.noise_shape",
        f"{ARRAYS} torch transformers datasets",
    ),
    "cli": (
        "deprecated extras version filters optim.update privacy trainer audit run.planning run.private_run "
        "run.saving.card_part run.weights.merged_model",
        "rich numpy matplotlib torch jaxtyping transformers peft",
    ),
    "__main__": ("cli", ""),
    "__init__": ("deprecated extras version trainer sft dpo training_args gradient_recorder", ""),
}


def imported(path, **leave_out):
    names = set()
    for statement in import_statements(ast.parse((PACKAGE / path).read_text()), **leave_out):
        if isinstance(statement, ast.Import):
            names.update(alias.name for alias in statement.names)
        else:
            assert statement.level == 0, f"{path}: imports are absolute, so that this test sees them"
            names.update(f"{statement.module}.{alias.name}" for alias in statement.names)
    return names


def import_statements(node, *, for_types=True, in_functions=True):
    for child in ast.iter_child_nodes(node):
        is_for_types = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif (for_types or not is_for_types) and (in_functions or not isinstance(child, ast.FunctionDef)):
            yield from import_statements(child, for_types=for_types, in_functions=in_functions)


def is_in(name, rooms):
    return any(f"{name}.".startswith(f"{room}.") for room in rooms)


def room_of(path):
    """Return the line of the table that counts for a module."""
    module = path.with_suffix("").as_posix()
    return max((name for name in MAY_IMPORT if f"{module}/".startswith(f"{name}/")), key=len)


def crossing(path):
    """Return what a module imports and its folder may not."""
    room = room_of(path)
    ours, others = (names.split() for names in MAY_IMPORT[room])
    allowed = [f"doppler_hf.{name}" for name in (*ours, "errors", room.replace("/", "."))] + others
    return [
        name for name in imported(path) if name.split(".")[0] not in sys.stdlib_module_names and not is_in(name, allowed)
    ]


def test_a_module_imports_what_its_folder_may():
    assert {path: names for path in MODULES if (names := crossing(path))} == {}


FILES = {".".join(("doppler_hf", *path.with_suffix("").parts)).removesuffix(".__init__"): path for path in MODULES}


def files_of(path):
    """What a file of ours imports of ours, in functions too; a facade that imports when asked, what it then does."""
    for name in imported(path, for_types=path.name == "__init__.py"):
        module = name if name in FILES else name.rpartition(".")[0]
        if module in FILES:
            yield FILES[module]


def test_no_file_imports_itself_by_way_of_others():
    graph = {path: set(files_of(path)) for path in MODULES}
    assert graph[Path("filters/grammar.py")] == {
        Path("errors.py"), Path("filters/design.py"), Path("filters/low_pass_filter.py")
    }  # fmt: skip
    assert Path("trainer.py") in graph[Path("__init__.py")]
    TopologicalSorter(graph).prepare()


def test_no_folder_of_a_run_imports_itself_by_way_of_others():
    """What a run is made from knows nothing of what is made of it, and the folders can be read one after another."""
    graph = {}
    for path in MODULES:
        if path.parts[0] == "run" and path.name != "__init__.py":
            graph.setdefault(Path(*path.parts[:2]), set()).update(Path(*other.parts[:2]) for other in files_of(path))
    for folder, others in graph.items():
        others.discard(folder)
    assert Path("run/reporting") in graph[Path("run/saving")]
    TopologicalSorter(graph).prepare()


# A class knows its bases from the start, and so what a file needs that nobody imports at theirs.
NEEDS = {"sft": {"trl"}, "dpo": {"trl"}}


def test_what_only_some_need_is_imported_where_it_is_used():
    for path in MODULES:
        at_start = imported(path, for_types=False, in_functions=False)
        assert not any(is_in(name, [f"doppler_hf.{other}" for other in NEEDS]) for name in at_start), path
        own = NEEDS.get(path.with_suffix("").as_posix(), set())
        assert {name.split(".")[0] for name in at_start} & set(itertools.chain(*EXTRAS.values())) == own, path


def test_every_permission_is_used():
    for room, (ours, others) in MAY_IMPORT.items():
        names = set().union(*(imported(path) for path in MODULES if room_of(path) == room))
        idle = [name for name in ours.split() if not any(is_in(each, [f"doppler_hf.{name}"]) for each in names)]
        idle += [name for name in others.split() if not any(is_in(each, [name]) for each in names)]
        assert not idle, f"nothing in {room} imports {', '.join(idle)}"


def test_types_of_arrays_are_checked_wherever_they_are_annotated():
    assert {*CHECKED, *TOO_BUSY} <= FILES.keys()
    annotating = {name for name, path in FILES.items() if any(is_in(other, ["jaxtyping"]) for other in imported(path))}
    assert {name for name in annotating if not is_in(name, CHECKED)} == set(TOO_BUSY)
    idle = [name for name in CHECKED if not any(is_in(module, [name]) for module in annotating)]
    assert not idle, f"nothing in {', '.join(idle)} annotates arrays"


NORMS = {"norm", "vector_norm", "matrix_norm", "_foreach_norm", "get_total_norm", "clip_grad_norm_", "renorm", "normalize",
         "cosine_similarity", "pairwise_distance", "cdist", "pdist", "dist"}  # fmt: skip
# A product of vectors may be added up one number after another as well, and a cumulative sum has no other order.
PRODUCTS_OF_VECTORS = {"dot", "vdot", "inner", "einsum", "tensordot", "cumsum", "logcumsumexp"}
SUMS = {"sum", "nansum", "mean", "nanmean", "var", "std", "var_mean", "std_mean", "prod", "logsumexp", "trace", "row_sums",
        "row_norms", "mm", "bmm", "mv", "matmul", "addmm", "addmm_", "addbmm", "addbmm_", "baddbmm", "baddbmm_", "addmv",
        "addmv_", "product_in_float32", "index_add", "index_add_", "scatter_add", "scatter_add_", "scatter_reduce",
        "scatter_reduce_", "segment_reduce", "all_reduce", "reduce_scatter", "added_up", "dot", "@"}  # fmt: skip


def uses_in(path):
    """Yield the attributes, calls and products of a file: name, whole, and the outermost function in which it stands."""

    def within(node, function):
        for child in ast.iter_child_nodes(node):
            match child:
                case ast.Attribute(attr=name) | ast.Call(func=ast.Name(id=name)):
                    yield name, ast.unparse(child).partition("(")[0], function
                case ast.BinOp(op=ast.MatMult()):
                    yield "@", ast.unparse(child), function
            yield from within(child, function or (child.name if isinstance(child, ast.FunctionDef) else ""))

    yield from within(ast.parse((PACKAGE / path).read_text()), "")


TORCHS = [path for path in MODULES if any(is_in(name, ["torch"]) for name in imported(path))]


def test_norms_are_taken_in_one_file_which_adds_up_in_any_layout():
    """Torch's own are wrong by some percent for millions of numbers: docs/method/sums.md."""
    taken = {(path.as_posix(), said) for path in TORCHS for name, said, _ in uses_in(path) if name in NORMS}
    # The norm of a noise shape is that of a few floats of Python, and what is called `norm` alone is imported.
    others = {each for each in taken if each[1] not in ("norm", "shape.norm", "mechanism.shape.norm")}
    # A sketch is some numbers of released weights, of which nothing follows for privacy.
    assert others == {("linalg.py", "torch.linalg.vector_norm"), ("run/weights/merges.py", "np.linalg.norm")}
    assert {name for path in TORCHS for name in imported(path) if name.rpartition(".")[2] in NORMS} == {
        "doppler_hf.linalg.norm"
    }


def test_no_vectors_are_multiplied_where_privacy_depends_on_it():
    found = {said for path in TORCHS if path.parts[0] == "privacy" for name, said, _ in uses_in(path)
             if name in PRODUCTS_OF_VECTORS}  # fmt: skip
    # Of tiles of 64 × 64, of our own function that adds in runs, and of NumPy's whole numbers.
    assert found == {"tl.dot", "dot", "np.cumsum"}


def test_every_sum_over_private_numbers_is_in_the_table_of_sums():
    """By file and function: whoever adds one says how large it may become, and why rounding does no harm."""
    listed = set()
    for row in re.findall(r"^\| (`.*?`) \|", (PACKAGE.parent / "docs/method/sums.md").read_text(), re.MULTILINE):
        for name in re.findall(r"`(.*?)`", row):
            path, function = name.split(": ") if ": " in name else (path, name)
            listed.add((path, function))
    found = set()
    for path in TORCHS:
        is_looked_at = path.parts[0] == "privacy" or path.is_relative_to("preflight/autograd_check")
        if not is_looked_at or path.parts[1] in {"accounting", "batching", "ledger"}:
            continue
        for name, said, function in uses_in(path):
            # The sum of Python is of sizes, as is that of programs; the others are a noise shape's and a pair's own numbers.
            if name in SUMS and said not in ("sum", "programs.sum", "math.prod", "self.shape.std", "p.mean"):
                found.add((path.as_posix().removeprefix("privacy/"), function))
    assert found == listed


@pytest.mark.parametrize(
    "call",
    [
        lambda: optimal_fir(np.ones((2, 2))),
        lambda: optimal_fir(np.ones(2, dtype=int)),
        lambda: box_muller(torch.ones(2, dtype=torch.int64), torch.ones(4, dtype=torch.float64), std=1.0),
    ],
    ids=["dimensions", "dtype", "sizes"],
)
def test_arrays_of_other_types_than_annotated_are_seen(call):
    with pytest.raises(jaxtyping.TypeCheckError):
        call()


def test_a_folder_says_what_is_in_it():
    for folder in {(PACKAGE / path).parent for path in MODULES}:
        documentation = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
        entries = re.findall(r"^- ((?:[a-z_]+, )*[a-z_]+): ", documentation, re.MULTILINE)
        inside = {path.stem for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
        assert {name for entry in entries for name in entry.split(", ")} == inside - {"__init__", "__main__"}, folder


def test_public_names():
    assert doppler_hf.__all__ == ["DopplerTrainer", "DopplerTrainingArguments", "GradientRecorder", "__version__"]
    assert all(hasattr(doppler_hf, name) for name in doppler_hf.__all__)
    assert not hasattr(doppler_hf, "no_such_name")
    assert sorted(doppler_hf.filters.__all__) == [
        "ClosedLoop", "FilterFigures", "LowPassFilter", "NoiseShape", "PAPER_FILTERS", "PowerEstimate", "StabilityLimit",
        "auto_filter", "auto_noise_shape", "autocorrelation",
        "butterworth", "corrected_noise_gain",
        "estimate_power", "filter_figures", "frequency_response",
        "group_delay", "impulse_response", "momentum", "moving_average",
        "noise_gain", "optimal_fir", "stability_limit", "step_response",
    ]  # fmt: skip
    assert doppler_hf.optim.__all__ == ["DopplerOptimizer"]
    assert sorted(doppler_hf.privacy.__all__) == [
        "AllocationSampler", "ClippedGradients", "GaussianMechanism", "LEDGER_NAME", "PrivacyLedger",
        "PrivacyStatement", "default_delta",
        "get_epsilon", "get_noise_multiplier",
    ]  # fmt: skip
    assert all(hasattr(doppler_hf.privacy, name) for name in doppler_hf.privacy.__all__)
    assert not hasattr(doppler_hf.privacy, "no_such_name")


def test_no_test_file_imports_another_one():
    """What several share is in `tests/support`, so that a file can be changed, moved and run by itself."""
    tests, wrong = Path(__file__).parent, []
    for path in sorted(tests.rglob("*.py")):
        own = ".".join(("tests", *path.relative_to(tests).with_suffix("").parts))
        # Also in the programs that a test runs in a process of its own.
        names = re.findall(r"\b(?:from|import) (tests(?:\.\w+)+)(?: import (\w+))?", path.read_text("utf-8"))
        modules = {module if module.rpartition(".")[2].startswith("test_") else f"{module}.{name}" for module, name in names}
        wrong += [(own, module) for module in modules - {own} if module.rpartition(".")[2].startswith("test_")]
    assert wrong == []
