"""Built-in models, and loading a workload by name, pkg.module:factory or file.py:factory.

The built-in ones serve gates and examples: an MLP, a Llama-like transformer with grouped-query
attention, rotary positions, SwiGLU and RMS norms, a bottleneck ResNet and a spiking network.

Proof: `python -m pytest tests/workloads/test_workload.py`.
"""

import contextlib
import functools
import importlib
import json
import os
import shlex
import sys
import sysconfig
import textwrap
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core.generators import seeded
from ..core.wording import did_you_mean
from ..primitives.snn_timesteps import run_timesteps
from .from_script import advice_on, module_of, read_script
from .from_trainer import take_training
from .optimizers import stepped_on_host
from .shrink import split_shrink
from .workload import (
    LabelCount,
    OutputLoss,
    Workload,
    WorkloadError,
    default_workload,
    undivided,
    with_values,
)

# A small Llama-like causal language model.

linear = functools.partial(nn.Linear, bias=False)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, dim: int, heads: int, kv_heads: int, dropout: float):
        super().__init__()
        self.head_dim = dim // heads
        self.dropout = dropout
        self.wq = linear(dim, heads * self.head_dim)
        self.wk = linear(dim, kv_heads * self.head_dim)
        self.wv = linear(dim, kv_heads * self.head_dim)
        self.wo = linear(heads * self.head_dim, dim)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        q, k, v = [
            project(x).unflatten(2, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.wq, self.wk, self.wv)
        ]
        q = rotate(q, cosine, sine)
        k = rotate(k, cosine, sine)
        dropout = self.dropout if self.training else 0.0
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, dropout_p=dropout, enable_gqa=True
        )
        projected: Tensor = self.wo(out.transpose(1, 2).flatten(2))
        return projected


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Apply rotary position embeddings to the last dimension."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


class FeedForward(nn.Module):
    """SwiGLU feed-forward layer."""

    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.gate = linear(dim, hidden)
        self.up = linear(dim, hidden)
        self.down = linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, dim: int, heads: int, kv_heads: int, hidden: int, dropout: float):
        super().__init__()
        self.attention_norm = nn.RMSNorm(dim)
        self.attention = Attention(dim, heads, kv_heads, dropout)
        self.feed_forward_norm = nn.RMSNorm(dim)
        self.feed_forward = FeedForward(dim, hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), cosine, sine))
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))


class Transformer(nn.Module):
    """Llama-like causal language model."""

    cosine: Tensor
    sine: Tensor

    def __init__(
        self,
        *,
        vocabulary: int,
        length: int,
        depth: int = 4,
        dim: int = 128,
        heads: int = 4,
        kv_heads: int = 2,
        dropout: float = 0.0,
        hidden: int | None = None,
    ):
        super().__init__()
        hidden = hidden or 32 * round(dim * 8 / 3 / 32)
        self.embedding = nn.Embedding(vocabulary, dim)
        self.layers = nn.ModuleList(
            Block(dim, heads, kv_heads, hidden, dropout) for _ in range(depth)
        )
        self.norm = nn.RMSNorm(dim)
        self.head = linear(dim, vocabulary)
        half = dim // heads // 2
        angles = torch.outer(torch.arange(length), 10000.0 ** (-torch.arange(half) / half))
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.cosine[:length], self.sine[:length])
        return self.head(self.norm(x))


# Built-in workloads: MLP, Llama-like transformer, bottleneck ResNet and spiking network.


def mlp(*, depth: int = 6, width: int = 256) -> Workload:
    """Build a classifier of Linear and GELU blocks on one vector per sample."""

    def build() -> nn.Module:
        blocks = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth)]
        return nn.Sequential(*blocks, nn.Linear(width, 10))

    return _make_classifier("mlp", build, (width,))


def transformer(*, vocabulary: int = 512, length: int = 64, **sizes: Any) -> Workload:
    """Build a Llama-like transformer for next-token prediction on random tokens.

    `sizes` are the other options of `Transformer`.
    """

    def batch(size: int) -> dict[str, Tensor]:
        tokens = torch.randint(vocabulary, (size, length + 1))
        return {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}

    def loss(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = module(batch["tokens"]).flatten(0, 1).float()
        return F.cross_entropy(logits, batch["targets"].flatten(), reduction="sum")

    count = LabelCount(key="targets")
    return Workload(
        name="transformer",
        build=lambda: Transformer(vocabulary=vocabulary, length=length, **sizes),
        batch=batch,
        loss=loss,
        count=count,
        mask=count.mask,
    )


def convolution(inputs: int, outputs: int, size: int) -> Sequence[nn.Module]:
    """Make a convolution that keeps the size of an image, and its BatchNorm."""
    layer = nn.Conv2d(inputs, outputs, size, padding=size // 2, bias=False)
    return layer, nn.BatchNorm2d(outputs)


class Bottleneck(nn.Module):
    """Residual block of 1x1, 3x3 and 1x1 convolutions with BatchNorm."""

    def __init__(self, width: int):
        super().__init__()
        inner = width // 4
        self.residual = nn.Sequential(
            *convolution(width, inner, 1),
            nn.ReLU(),
            *convolution(inner, inner, 3),
            nn.ReLU(),
            *convolution(inner, width, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.residual(x))


def resnet(*, depth: int = 6, width: int = 64, size: int = 16) -> Workload:
    """Build a classifier of bottleneck blocks with BatchNorm on small images."""

    def build() -> nn.Module:
        stem = nn.Sequential(*convolution(3, width, 3), nn.ReLU())
        blocks = nn.Sequential(*[Bottleneck(width) for _ in range(depth)])
        return nn.Sequential(
            stem, blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)
        )

    return _make_classifier("resnet", build, (3, size, size))


class SurrogateSpike(torch.autograd.Function):
    """Step function with the derivative of an arctangent as surrogate gradient."""

    @staticmethod
    def forward(ctx: Any, potential: Tensor) -> Tensor:
        ctx.save_for_backward(potential)
        return (potential > 0).to(potential.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (potential,) = ctx.saved_tensors
        return gradients[0] / (1 + (torch.pi * potential) ** 2)


class SpikingLayer(nn.Module):
    """Linear layer and leaky integrate-and-fire neurons; takes and returns the state."""

    decay = 0.9
    threshold = 1.0

    def __init__(self, width: int):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor, potential: Tensor) -> tuple[Tensor, Tensor]:
        potential = self.decay * potential + self.linear(x)
        spikes = SurrogateSpike.apply(potential - self.threshold)
        return spikes, potential - spikes * self.threshold


class SpikingNetwork(nn.Module):
    """Layers of spiking neurons unrolled over (batch, timesteps, features)."""

    # The loop over timesteps; a method, so that a derived class can replace it.
    unroll = staticmethod(run_timesteps)

    def __init__(self, width: int, depth: int):
        super().__init__()
        self.layers = nn.ModuleList(SpikingLayer(width) for _ in range(depth))
        self.head = nn.Linear(width, 10)

    def initial_state(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.new_zeros(x.shape[0], x.shape[2]) for _ in self.layers)

    def step(self, x: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        potentials = []
        for layer, potential in zip(self.layers, state, strict=True):
            x, potential = layer(x, potential)
            potentials.append(potential)
        return x, tuple(potentials)

    def forward(self, x: Tensor) -> Tensor:
        rate, _ = self.unroll(self.step, x, self.initial_state(x), time_dim=1, outputs="mean")
        return self.head(rate)


def snn(*, depth: int = 3, width: int = 64, timesteps: int = 16) -> Workload:
    """Build a classifier with a spiking network over a short sequence."""
    return _make_classifier("snn", lambda: SpikingNetwork(width, depth), (timesteps, width))


def _make_classifier(name: str, build: Callable[[], nn.Module], shape: tuple[int, ...]) -> Workload:
    return Workload(
        name=name,
        build=build,
        batch=lambda size: (torch.randn(size, *shape), torch.randint(10, (size,))),
        loss=lambda module, batch: F.cross_entropy(
            module(batch[0]).float(), batch[1], reduction="sum"
        ),
    )


BUILTIN_WORKLOADS: dict[str, Callable[[], Workload]] = {
    "mlp": mlp,
    "transformer": transformer,
    "resnet": resnet,
    "snn": snn,
}


# Describe an error from the user's code, with the line of their code that it came from.

# How the paths of files begin that are not the user's.
LIBRARIES = (
    f"{Path(__file__).parents[1]}{os.sep}",
    f"{sysconfig.get_path('stdlib')}{os.sep}",
    # An environment may have packages of another one.
    *(f"{path}{os.sep}" for path in sys.path if path.endswith(("site-packages", "dist-packages"))),
    "<",
)


def users_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the frames of an error's traceback that are in no library and not ours."""
    frames = traceback.extract_tb(error.__traceback__)
    return [frame for frame in frames if not frame.filename.startswith(LIBRARIES)]


def describe_raised(error: BaseException) -> str:
    """Format an error as `TypeError: its message (model.py:12)`, by the user's last line."""
    text = f"{type(error).__name__}: {textwrap.shorten(str(error), 400)}"
    for frame in users_frames(error)[-1:]:
        text += f" ({os.path.relpath(frame.filename)}:{frame.lineno})"
    return text


# Load a `Workload` from a built-in name or from the user's own factory.


def load_workload(spec: str | Workload) -> Workload:
    """Load a built-in workload by name, or the user's own from its factory.

    A factory is given as `pkg.module:factory` or `folder/file.py:factory`; modules in the current
    directory are found. It takes no arguments and returns an `nn.Module`, a `(module, batch)` pair
    or a `Workload`. A workload in place of the text is returned as it is.
    """
    if isinstance(spec, Workload):
        return spec
    whole, shrink = split_shrink(spec)
    factory: Callable[[], Any]
    if is_taken(whole):
        factory = functools.partial(_take_workload, whole, Path.cwd())
    elif whole.startswith(CONFIG_PREFIX):
        factory = _read_config(whole)
    elif {":", ".", "/"} & {*whole}:
        factory = import_callable(whole)
    elif whole in BUILTIN_WORKLOADS:
        factory = BUILTIN_WORKLOADS[whole]
    else:
        raise WorkloadError(
            f"no workload is called {whole!r}, and it is neither pkg.module:factory nor "
            f"file.py:factory; {did_you_mean(whole, BUILTIN_WORKLOADS)}"
        )
    if shrink is not None:
        factory = shrink.factory(factory)

    # The factory may draw an example batch, which must be the same in every process.
    with seeded(0):
        made = call_factory(factory, spec)
        if isinstance(made, Workload):
            return replace(made, spec=spec)

        def build() -> nn.Module:
            again = call_factory(factory, spec)
            return again if isinstance(again, nn.Module) else again[0]

        try:
            workload = default_workload(spec.rsplit(":", 1)[1], build, made)
        except ValueError as error:
            raise WorkloadError(f"{spec}: {error}") from None
    notes = (shrink.note,) if shrink else ()
    return _try_workload(replace(workload, spec=spec, notes=notes))


def _try_workload(workload: Workload) -> Workload:
    """Run one forward; a batch that can't be divided is used as it is."""
    try:
        _try_once(workload)
    except WorkloadError:
        if workload.own_batch is None or not workload.is_divisible:
            raise
        return _try_workload(undivided(workload))
    return workload


# Begin the text of a workload that is read off the user's trainer, or script.
TRAINER_PREFIX = "trainer="
SCRIPT_PREFIX = "script="
# Begins the text of a model by its configuration: `config=FILE:NAME`.
CONFIG_PREFIX = "config="


def is_taken(spec: str) -> bool:
    """Return whether a workload is read off objects of the user, which are made once a process."""
    return spec.startswith((TRAINER_PREFIX, SCRIPT_PREFIX))


@functools.lru_cache(maxsize=4)
def _take_workload(spec: str, folder: Path) -> Workload:
    """Read a workload off the user's trainer or script, in this folder."""
    text = spec.partition("=")[2]
    is_script = spec.startswith(SCRIPT_PREFIX)
    name, *arguments = shlex.split(text) if is_script else [text]
    made = None if is_script else stepped_on_host()(load_object)(name)
    try:
        read = read_script(name, *arguments).workload() if is_script else take_training(made)
        return _try_workload(replace(read, spec=spec))
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # The user's script may raise anything.
        what = f"it raised {describe_raised(error)}{advice_on(error)}"
        if isinstance(error, WorkloadError):
            what = str(error)
        raise WorkloadError(f"{name}: {what}") from error


def _read_config(spec: str) -> Callable[[], nn.Module]:
    """Return the factory of a model of Hugging Face, of its configuration in a file."""
    path = spec.removeprefix(CONFIG_PREFIX).rpartition(":")[0]
    try:
        # The library of the user, whose models these are.
        library = importlib.import_module("transformers")
        name = json.loads(Path(path).read_text(encoding="utf-8"))["architectures"][0]
        architecture = getattr(library, name)
        config = architecture.config_class.from_json_file(path)
    except ImportError as error:
        why = f"transformers, which can't be imported: {error.__cause__ or error}"
        raise WorkloadError(f"a configuration needs {why}; install it, or what it needs") from error
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise WorkloadError(
            f"{path} is no configuration of a model of the installed transformers "
            f"({type(error).__name__}: {error}). Its class is named by an entry such as "
            '"architectures": ["LlamaForCausalLM"]'
        ) from error
    return lambda: architecture(config)


def load_object(spec: str) -> Any:
    """Return what the user's `pkg.module:factory` returns, such as a dataset."""
    return call_factory(import_callable(spec), spec)


def import_callable(spec: str | Callable[..., Any]) -> Callable[..., Any]:
    """Import `pkg.module:name` or `folder/file.py:name`; the name may be `Class.method`.

    A function is returned as it is.
    """
    if not isinstance(spec, str):
        return spec
    source, _, attribute = spec.rpartition(":")
    if not (source and attribute):
        raise WorkloadError(f"{spec} names no function: add one, as in {spec.strip(':')}:build")
    file = Path(source).expanduser().resolve() if source.endswith(".py") else None
    if file is not None and not file.is_file():
        raise WorkloadError(f"{spec}: there is no file {file}")
    folder, module_name = (Path.cwd(), source) if file is None else module_of(file)
    # Another folder may have a file of this name too.
    if str(folder) not in (sys.path if file is None else sys.path[:1]):
        sys.path.insert(0, str(folder))

    try:
        with contextlib.redirect_stdout(sys.stderr):
            module: Any = importlib.import_module(module_name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the user's module may raise anything, or end Python
        what = f"the import of {module_name} raised {describe_raised(error)}"
        absent = error.name if isinstance(error, ModuleNotFoundError) else None
        if f"{module_name}.".startswith(f"{absent}."):
            what = (
                f"can't import {absent}. Run from the folder that holds it, or give its "
                "folder/file.py:factory"
            )
        raise WorkloadError(f"{spec}: {what}") from error

    if file is not None and file != (loaded := Path(str(module.__file__)).resolve()):
        raise WorkloadError(
            f"{spec}: another module {module_name} is already imported, {loaded}: give the file "
            "another name"
        )

    names = attribute.split(".")
    factory = functools.reduce(lambda one, name: getattr(one, name, None), names, module)
    if not callable(factory):
        found = [name for name, value in vars(module).items() if callable(value)]
        raise WorkloadError(
            f"{spec}: {module_name} has no callable {attribute!r}; {did_you_mean(attribute, found)}"
        )
    return factory


def call_factory(factory: Callable[..., Any], spec: object, *arguments: Any) -> Any:
    """Call the user's function, which the error names if it raises one."""
    try:
        # The user's code may print and change the folder. Its text is kept out of a command's
        # output, and the command goes on in its own folder.
        with contextlib.redirect_stdout(sys.stderr), contextlib.chdir("."):
            return factory(*arguments)
    except (KeyboardInterrupt, WorkloadError):
        raise
    except BaseException as error:
        # The user's code may raise anything, or end Python. The error names it as theirs and keeps
        # its traceback.
        raise WorkloadError(f"{spec}: the factory raised {describe_raised(error)}") from error


def _try_once(workload: Workload) -> None:
    """Run one forward, so that a batch that does not fit the model is reported here."""
    with seeded(0):
        module = with_values(workload.build())
        try:
            module.train()
            if not workload.is_divisible:
                loss = workload.loss(module, workload.batch(workload.own_batch or 1))
            elif isinstance(workload.loss, OutputLoss):
                loss = workload.loss.learn(module, workload.batch)
            else:
                loss = workload.loss(module, workload.batch(2))
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            # The user's model may raise anything, or end Python.
            guess = "" if workload.own_batch else "The batch was guessed: return (module, batch). "
            raise WorkloadError(
                f"{workload.spec}: a forward on the batch raised {describe_raised(error)}. {guess}"
                "The batch of a (module, batch) pair is what forward takes, a tuple as its "
                "positional arguments; if the loss also needs targets, return a "
                "Workload(name, build, batch, loss)"
            ) from error
    if not loss.requires_grad:
        raise WorkloadError(f"{workload.spec}: the loss does not depend on any trainable parameter")
