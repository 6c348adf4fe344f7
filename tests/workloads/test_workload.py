"""Models that `--model` accepts, and the messages for those that can't be trained.

python -m pytest tests/workloads/test_workload.py
"""

import json
import os
import sys
import textwrap
import types
from pathlib import Path

import pytest
import torch

import curry_train
from curry_train.plan import Sketch
from curry_train.workloads import Case, WorkloadError, load_workload
from curry_train.workloads.models import describe_raised
from curry_train.workloads.workload import batch_size

from ..command_runs import ran
from ..language_models import SIZES
from ..toy_steps import all_equal


@pytest.fixture
def factory(tmp_path, monkeypatch):
    """Write a module into the current directory, and give the spec of its factory."""
    monkeypatch.chdir(tmp_path)
    name = f"theirs_{abs(hash(str(tmp_path)))}"

    def write(source):
        (tmp_path / f"{name}.py").write_text(
            "import torch\nfrom torch import nn\n" + textwrap.dedent(source)
        )
        return f"{name}:build"

    return write


@pytest.mark.parametrize("batch", ["", ", torch.ones(4, 8, dtype=torch.bfloat16)"])
def test_a_model_stays_in_the_dtype_in_which_it_is_made(factory, batch):
    spec = factory(f"""
        def build():
            return nn.Sequential(nn.Linear(8, 4).bfloat16(), nn.Linear(4, 2).bfloat16()){batch}
    """)
    workload = load_workload(spec)
    for asked in (None, torch.float32):
        case = Case(workload, dtype=asked)
        tensors = [case.batch(), *case.build().parameters()]
        assert {one.dtype for one in tensors} == {asked or torch.bfloat16} == {case.dtype}
    with Sketch(spec) as sketch:
        assert sketch.dtype_name == "bfloat16"


def test_a_seed_sets_weights_and_batch():
    cases = [Case(load_workload("mlp"), seed=seed) for seed in (0, 0, 1)]
    same, again, other = ([*case.build().parameters(), *case.batch()] for case in cases)
    assert all_equal(same, again)
    assert not any(map(torch.equal, same, other))


@pytest.mark.parametrize(
    "source",
    [
        "def build(): return nn.Sequential(nn.Linear(12, 8), nn.GELU(), nn.Linear(8, 2))",
        "def build(): return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten())",
        "def build(): return nn.Embedding(10, 4)",
        "def build(): return nn.Linear(5, 1), torch.randn(3, 5)",
        "def build(): return nn.Bilinear(5, 4, 1), (torch.randn(3, 5), torch.randn(3, 4))",
        "def build(): return nn.Linear(5, 1), {'input': torch.randn(3, 5)}",
        """
        from curry_train.workloads import Workload
        def build():
            loss = lambda module, batch: module(batch).square().sum()
            return Workload("own", lambda: nn.Linear(3, 1), lambda size: torch.randn(size, 3), loss)
        """,
    ],
)
def test_a_factory_outside_the_repository_becomes_a_workload(factory, source):
    case = Case(load_workload(factory(source)), batch_size=7)
    module, batch = case.build(), case.batch()
    assert batch_size(batch) == 7
    case.workload.mean_loss(module, batch).backward()
    assert all(parameter.grad is not None for parameter in module.parameters())


@pytest.mark.parametrize("kind", ["'Llama', pad_token_id=0", "'GPT2'"])
def test_a_hugging_face_causal_model_is_trained_on_its_tokens(factory, kind):
    workload = load_workload(
        factory(f"""
            from tests.language_models import language_model
            def build(): return language_model({kind})
        """)
    )
    case = Case(workload, batch_size=4)
    module, batch = case.build().eval(), case.batch()
    ours = workload.mean_loss(module, batch)
    assert ours.item() == pytest.approx(module(**batch).loss.item(), rel=1e-6)
    masked = workload.mask(batch)
    assert workload.count(masked) < workload.count(batch)
    assert workload.mean_loss(module, masked).item() == pytest.approx(
        module(**masked).loss.item(), rel=1e-6
    )


def test_another_loss_of_a_hugging_face_model_is_kept(factory):
    source = """
    from tests.language_models import language_model

    def build():
        model = language_model("GPT2")
        model.loss_function = lambda logits, labels, vocab_size, **_: logits.square().mean()
        return model
    """
    case = Case(load_workload(factory(source)), batch_size=2)
    module, batch = case.build().eval(), case.batch()
    assert case.workload.mean_loss(module, batch).item() == module(**batch).loss.item()


def test_loading_twice_gives_the_same_batch_as_ranks_rely_on(factory):
    spec = factory("def build(): return nn.Linear(5, 1)")
    first, second = (Case(load_workload(spec)).batch() for _ in range(2))
    assert torch.equal(first, second)


NESTED = """
from pathlib import Path
def inner():
    return nn.Linear('wide', 3)
def build():
    return inner()
"""


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def build(): return nn.ReLU()", "the input of ReLU can't be inferred"),
        (
            "def build(): return nn.Linear(4, 1), 'text'",
            "type str has no tensor with a batch dimension",
        ),
        (
            "def build(): return nn.Linear(4, 1).requires_grad_(False), torch.randn(2, 4)",
            "does not depend on any",
        ),
        (
            "class Text(nn.Linear):\n    forward = lambda s, x: 'a'\n"
            "def build(): return Text(4, 1)",
            "returned str",
        ),
        (
            "def build(): return nn.Linear(4, 1, device='meta'), torch.randn(2, 4)",
            "weight is on the device meta, without values: build the model on the CPU",
        ),
        (
            "import absent_package",
            "raised ModuleNotFoundError: No module named 'absent_package' (",
        ),
        (
            "raise ModuleNotFoundError('its requirements are missing')",
            "raised ModuleNotFoundError: its requirements are missing (",
        ),
        # The user's own line is named, not the line in torch that raised.
        ("def build():\n    raise RuntimeError('no weights here')", "THEIRS.py:4)"),
        (NESTED, "THEIRS.py:6)"),
        (
            "class Net(nn.Linear):\n    def forward(self, x): return x @ x\n"
            "def build(): return Net(4, 1)",
            "THEIRS.py:4)",
        ),
        (
            "class Exported(nn.Linear):\n    def train(self, mode=True): raise TypeError('no')\n"
            "def build(): return Exported(4, 1)",
            "raised TypeError: no THEIRS.py:4)",
        ),
        (
            "def build(size): return nn.Linear(4, 1)",
            "build() missing 1 required positional argument: 'size'",
        ),
        # An error while the file is imported.
        ("built = nn.Linear('wide', 3)", "THEIRS.py:3)"),
        ("def build(: pass", "THEIRS.py, line 3)"),
    ],
)
def test_a_model_that_can_not_train_is_reported_in_one_line(factory, source, message):
    spec = factory(source)
    with pytest.raises(WorkloadError) as raised:
        load_workload(spec)
    assert message.replace("THEIRS", f"({spec.partition(':')[0]}") in str(raised.value)
    assert "\n" not in str(raised.value)
    # That advice would not help where the user's module lacks a package.
    assert "Run from the folder" not in str(raised.value)


def test_a_folder_whose_name_begins_as_that_of_the_package_is_the_users(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = f"{Path(curry_train.__file__).parent}_experiments/train.py"
    with pytest.raises(KeyError) as raised:
        types.FunctionType(compile("raise KeyError('weights')", file, "exec"), {})()
    assert describe_raised(raised.value) == f"KeyError: 'weights' ({os.path.relpath(file)}:1)"


def test_a_line_outside_of_the_folder_is_named_as_seen_from_it(factory, tmp_path, monkeypatch):
    name = factory("def build(): raise KeyError('weights')").partition(":")[0]
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pytest.raises(WorkloadError) as raised:
        load_workload(f"{tmp_path / name}.py:build")
    assert str(raised.value).endswith(f"the factory raised KeyError: 'weights' (../{name}.py:3)")


OWN_FILE = "from torch import nn\ndef build(): return nn.Linear(5, 1)\n"


def test_a_factory_is_found_by_its_file_from_any_folder(tmp_path, monkeypatch):
    package = tmp_path / "by_file_project/models"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "sizes.py").write_text("WIDTH = 5")
    (package / "own.py").write_text("from .sizes import WIDTH\n" + OWN_FILE)
    assert Case(load_workload(f"{package / 'own.py'}:build")).build().in_features == 5
    monkeypatch.chdir(tmp_path)
    assert load_workload("by_file_project/models/own.py:build").name == "build"


def test_a_file_is_not_confused_with_a_module_of_the_same_name(tmp_path):
    (tmp_path / "shlex.py").write_text(
        OWN_FILE
    )  # the standard library's module is imported already
    with pytest.raises(
        WorkloadError,
        match=r"another module shlex is already imported, .*: give the file another name",
    ):
        load_workload(f"{tmp_path / 'shlex.py'}:build")


CONFIGURATIONS = {
    "LlamaForCausalLM": SIZES,
    "BertForSequenceClassification": SIZES | {"id2label": {"0": "a", "1": "b", "2": "c"}},
    "ViTForImageClassification": SIZES | {"image_size": 16, "patch_size": 8, "vocab_size": None},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("architecture", CONFIGURATIONS)
def test_a_configuration_in_a_file_is_a_model_with_a_batch(tmp_path, architecture):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGURATIONS[architecture] | {"architectures": [architecture]}))
    ended = ran("memory --model org/name --model-config", path, "--json -")
    assert json.loads(ended.stdout)["workload"] == "org/name"
    assert architecture in ended.stderr
    path.write_text(json.dumps({"architectures": ["NoSuchModel"]}))
    with pytest.raises(WorkloadError, match=r"the installed transformers \(.*NoSuchModel"):
        load_workload(f"config={path}:name")
    path.write_text("{}")
    with pytest.raises(WorkloadError, match=r"KeyError: 'architectures'.* an entry such as"):
        load_workload(f"config={path}:name")


@pytest.mark.parametrize("cause", [None, RuntimeError("operator torchvision::nms does not exist")])
def test_a_library_that_can_not_be_imported_says_why(tmp_path, monkeypatch, cause):
    class Broken(types.ModuleType):
        def __getattr__(self, name):
            raise ModuleNotFoundError(f"Could not import module {name!r}") from cause

    path = tmp_path / "config.json"
    path.write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    monkeypatch.setitem(sys.modules, "transformers", Broken("transformers") if cause else None)
    text = "torchvision::nms does not exist" if cause else "import of transformers halted"
    with pytest.raises(WorkloadError, match=f"needs transformers.*{text}.*install"):
        load_workload(f"config={path}:name")
