"""Names that skills write as code exist: in torch, in curry_train, or as a test.

python -m pytest tests/skills/test_skill_symbols.py
"""

import ast
import builtins
import functools
import importlib
import re

import pytest
import torch
from tree import ROOT

FENCE = re.compile(r" *(`{3,}|~{3,})")
SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")
DOTTED = re.compile(r"(?<![\w./\\-])([A-Za-z_]\w*(?:\.\w+)+)(?![\w*/.-])")
CALLED = re.compile(r"(?<![\w./-])([A-Za-z_]\w*)\(")
NAMED = re.compile(
    r"[a-z]+(?:_[a-z0-9]+)+|[A-Z][a-z]+(?:[A-Z][a-z]+)+"
)  # the whole span: recompute_blocks, LockedRun
TEST = re.compile(r"([\w/]+/test_\w+\.py)::(\w+)")
FILE = re.compile(r".*\.(?:py|md|json|jsonl|yaml|toml|txt|distcp|safetensors|metadata)")

MODULES = {
    "torch": "torch",
    "F": "torch.nn.functional",
    "nn": "torch.nn",
    "dcp": "torch.distributed.checkpoint",
}
PLACES = (
    *(
        "torch",
        "torch.nn",
        "torch.nn.functional",
        "torch.nn.utils.parametrizations",
        "torch.optim",
        "torch.amp",
    ),
    *(
        "torch.utils.data",
        "torch.utils.checkpoint",
        "torch.utils.flop_counter",
        "torch.autograd.graph",
    ),
    *(
        "torch.nn.parallel",
        "torch.distributed",
        "torch.distributed.fsdp",
        "torch.distributed.tensor",
    ),
    *(
        "torch.distributed.checkpoint",
        "torch.nn.attention.flex_attention",
        "torch._dynamo",
        "torch._dynamo.config",
    ),
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
)
CLASSES = (
    torch.Tensor,
    torch.nn.Module,
    torch.optim.Optimizer,
    torch.optim.lr_scheduler.LRScheduler,
)
ABSENT = {"torch._dynamo.config.activation_memory_budget": "the page says that it does not exist"}
WORDS = {  # names from elsewhere
    "aot_eager": "a backend, which torch finds by its name",
    "max_split_size_mb": "a setting in PYTORCH_CUDA_ALLOC_CONF",
    "context.is_recompute": "torch's, on what a policy is given",
    "mean_hours_between_failures": "a key of a project's configuration",
    "output_hidden_states": "Hugging Face's",
    "package.module": "stands for the user's",
    "ddp.module": "DistributedDataParallel's, on an instance",
    "retain_graph": "a keyword of torch's backward",
    "neuron.v": "spikingjelly's",
    "neuron": "stands for the user's",
    "norm": "stands for the user's",
    "numpy.random": "numpy's",
    "UnpicklingError": "of the module pickle",
    "accelerator.load_state": "of Accelerate, on an instance",
    "trainer.fit": "of Lightning, on an instance",
}
LOOKED_UP = {*MODULES, "aten", "curry_train"}
OTHERS = {
    "trainers.md": "names of other projects, which tests/skills/test_trainers.py looks up there"
}


def prose(text):
    """Yield the lines outside of fences and of the frontmatter, with their numbers."""
    fence, lines = None, text.splitlines()
    start = lines.index("---", 1) + 1 if lines[:1] == ["---"] else 0
    for number, line in enumerate(lines[start:], start=start + 1):
        found = FENCE.match(line)
        if fence is None and found:
            fence = found[1]
        elif fence is not None:
            fence = None if found and found[1].startswith(fence) else fence
        else:
            yield number, line


def resolve(dotted):
    """Return the object of a dotted name, importing its modules, or raise AttributeError."""
    first, *rest = dotted.split(".")
    module = MODULES.get(first, first)
    found = importlib.import_module(module)
    for name in rest:
        module += f".{name}"
        if not hasattr(found, name):
            try:
                importlib.import_module(module)
            except ModuleNotFoundError:
                raise AttributeError(dotted) from None
        found = getattr(found, name)
    return found


@functools.cache
def of_operations():
    return {
        name.split("::")[1].split(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name[:6] == "aten::"
    }


@functools.cache
def ours():
    """Return every name that the package binds, with parameters, attributes and keys."""
    found = set()
    for path in [*(ROOT / "template").rglob("*.py"), *(ROOT / "scripts").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, ast.arg):
                found.add(node.arg)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
            elif (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and node.value.isidentifier()
            ):
                found.add(node.value)
    return found


@functools.cache
def of_torch(name):
    places = [importlib.import_module(place) for place in PLACES] + [*CLASSES, builtins]
    return any(hasattr(place, name) for place in places)


def known(name):
    return name in WORDS or name in ours() or of_torch(name) or name in of_operations()


def exists(name):
    """Return whether a dotted name exists; its first part says where to look."""
    first, *_, last = name.split(".")
    if name in WORDS or FILE.fullmatch(name) or last.isdigit():
        return True
    if name in ABSENT or first in MODULES or first == "curry_train":
        try:
            resolve(name)
        except AttributeError:
            return name in ABSENT
        return name not in ABSENT
    if first == "aten":
        return name.split(".")[1] in of_operations()
    return (
        known(last) or len(last) == 1
    )  # x.grad, window.train_step_kwargs: the variable is the reader's


def unknown(page, text):
    """List the names in code that exist nowhere, as `page:line name`."""
    for number, line in prose(text):
        for span in SPAN.findall(line):
            for test, name in TEST.findall(span):
                if not (ROOT / test).is_file() or f"def {name}(" not in (ROOT / test).read_text(
                    encoding="utf-8"
                ):
                    yield f"{page}:{number} {test}::{name}"
            if TEST.search(span):
                continue
            dotted = [
                name
                for name in DOTTED.findall(span)
                if page not in OTHERS or name.split(".")[0] in LOOKED_UP
            ]
            yield from (f"{page}:{number} {name}" for name in dotted if not exists(name))
            if page in OTHERS:
                continue
            called = CALLED.findall(span) + NAMED.findall(span) * bool(NAMED.fullmatch(span))
            yield from (f"{page}:{number} {name}" for name in called if not known(name))


PAGES = sorted((ROOT / "skills").rglob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT / "skills")))
def test_every_name_on_a_page_exists(page):
    assert list(unknown(page.name, page.read_text(encoding="utf-8"))) == []


def test_pages_and_names_are_found_in_number():
    spans = [
        span
        for page in PAGES
        for _, line in prose(page.read_text(encoding="utf-8"))
        for span in SPAN.findall(line)
    ]
    assert len(PAGES) >= 20
    assert (
        sum(
            bool(DOTTED.search(span) or CALLED.search(span) or NAMED.fullmatch(span))
            for span in spans
        )
        >= 150
    )
    written = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert [name for name in [*WORDS, *ABSENT] if name not in written] == []


@pytest.mark.parametrize(
    "name",
    [
        *(
            "torch.gelu",
            "torch.utils.checkpoint.checkpoint_everything",
            "F.gelu_",
            "nn.Lienar",
            "dcp.store",
        ),
        *(
            "aten.gelu_forward",
            "curry_train.runs.keep",
            "curry_train.primitives.recompute_all",
            "window.train_kwargs",
        ),
        *("recompute_block(model)", "choose_segment", "RecomputeConfig", "HostMemoryMissing"),
        "tests/skills/test_pitfalls.py::test_that_does_not_exist",
    ],
)
def test_a_planted_name_that_is_not_there_is_caught(name):
    text = f"---\nname: `torch.gelu`\n---\n\n```text\n`torch.gelu`\n```\nUse `{name}` here.\n"
    (found,) = unknown("page.md", text)
    assert found == f"page.md:8 {name.split('(')[0]}"


@pytest.mark.parametrize(
    "name", ["torch.nn.functional.gelu", "aten.gelu.default", "Tensor.register_hook", "a.json"]
)
def test_names_that_exist_are_accepted(name):
    assert list(unknown("page.md", f"Use `{name}`.\n")) == []
