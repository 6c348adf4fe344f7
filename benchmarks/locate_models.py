"""Ten small models and three Trainers, each with the samples that it trains on.

They train for a few steps of two microbatches; the benchmark of `runs locate` records them.
"""

import contextlib
import io
import itertools
import logging
import tempfile
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from finetune_models import llama

STEPS = 3
MICROBATCHES = 2
BATCH_SIZE = 4
WIDTH = 16
VOCABULARY = 32
LENGTH = 6
NUM_SAMPLES = STEPS * MICROBATCHES * BATCH_SIZE * 2
Made = tuple[nn.Module, list[Any]]


def of_tokens(model: nn.Module) -> Made:
    tokens = torch.randint(VOCABULARY, (NUM_SAMPLES, LENGTH + 1))
    return model, [(row[:-1], row[1:]) for row in tokens]


def of_images(model: nn.Module) -> Made:
    return model, [(torch.randn(3, 8, 8), torch.randint(5, ())) for _ in range(NUM_SAMPLES)]


class Tokens(nn.Module):
    """Embedding, a body and a head."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.body = body
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.body(self.embed(tokens))
        return self.head(hidden[0] if isinstance(hidden, tuple) else hidden)


def encoder() -> Made:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, batch_first=True)
    return of_tokens(Tokens(nn.TransformerEncoder(layer, 2)))


def lstm() -> Made:
    return of_tokens(Tokens(nn.LSTM(WIDTH, WIDTH, 2, batch_first=True, dropout=0.1)))


class Experts(nn.Module):
    """Each token goes to two of four experts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.SiLU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(4)
        )
        self.drop = nn.Dropout(0.1)

    def forward(self, hidden: Tensor) -> Tensor:
        inputs = self.norm(hidden).flatten(0, 1)
        weights, chosen = self.router(inputs).softmax(-1).topk(2)
        output = torch.zeros_like(inputs)
        for number, expert in enumerate(self.experts):
            rows, place = (chosen == number).nonzero(as_tuple=True)
            mixed = expert(inputs[rows]) * weights[rows, place, None]
            output = output.index_add(0, rows, mixed.to(output.dtype))
        return hidden + self.drop(output.view_as(hidden))


def experts() -> Made:
    return of_tokens(Tokens(nn.Sequential(Experts(), Experts())))


def sized_gpt2(**sizes: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None))


def gpt2() -> Made:
    sizes = dict(n_layer=2, n_head=2, n_embd=WIDTH, n_positions=LENGTH, vocab_size=VOCABULARY)
    return of_tokens(sized_gpt2(**sizes))


def pooled(one: int, two: int) -> nn.Module:
    """Make a convolution that halves the size of images."""
    convolution = nn.Conv2d(one, two, 3, padding=1)
    return nn.Sequential(convolution, nn.BatchNorm2d(two), nn.ReLU(), nn.MaxPool2d(2))


def convolutions() -> Made:
    blocks = [pooled(3, 8), pooled(8, 16)]
    return of_images(nn.Sequential(*blocks, nn.Flatten(), nn.Dropout(0.2), nn.Linear(64, 5)))


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, width)
        self.convolution = nn.Conv2d(width, width, 3, padding=1)
        self.drop = nn.Dropout2d(0.1)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.drop(F.gelu(self.convolution(self.norm(hidden))))


def residual() -> Made:
    body = [Residual(8), nn.Conv2d(8, 16, 2, 2), Residual(16), nn.AdaptiveAvgPool2d(1)]
    return of_images(nn.Sequential(nn.Conv2d(3, 8, 1), *body, nn.Flatten(), nn.Linear(16, 5)))


class Hourglass(nn.Module):
    """A U-Net with one skip."""

    def __init__(self) -> None:
        super().__init__()
        self.begin = nn.Conv2d(3, 8, 3, padding=1)
        self.down = nn.Conv2d(8, 16, 2, 2)
        self.norm = nn.InstanceNorm2d(16, affine=True)
        self.up = nn.ConvTranspose2d(16, 8, 2, 2)
        self.end = nn.Conv2d(16, 5, 1)

    def forward(self, images: Tensor) -> Tensor:
        begun = self.begin(images)
        deep = F.silu(self.norm(self.down(begun)))
        return self.end(torch.cat([begun, self.up(deep)], 1)).mean((2, 3))


class Spiking(nn.Module):
    """Two layers of leaky neurons over five timesteps."""

    def __init__(self) -> None:
        super().__init__()
        import snntorch

        self.first = nn.Linear(192, 32)
        self.neurons = snntorch.Leaky(beta=0.9)
        self.second = nn.Linear(32, 5)
        self.readout = snntorch.Leaky(beta=0.8, reset_mechanism="none")

    def forward(self, images: Tensor) -> Tensor:
        current = self.first(images.flatten(1))
        membrane, output = self.neurons.init_leaky(), self.readout.init_leaky()
        for _ in range(5):
            spikes, membrane = self.neurons(current * 2, membrane)
            _, output = self.readout(self.second(spikes), output)
        return output


class Sampled(nn.Module):
    """Draws a hidden vector, as variational autoencoders do, and uses one layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(192, WIDTH)
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.decode = nn.Linear(WIDTH, 5)

    def forward(self, images: Tensor) -> Tensor:
        mean = self.encode(images.flatten(1))
        hidden = mean + torch.randn_like(mean) * 0.1
        for _ in range(2):
            hidden = self.norm(self.shared(hidden).tanh() + hidden)
        return self.decode(hidden)


MODELS = {
    "encoder": encoder,
    "GPT-2": gpt2,
    "Llama": lambda: of_tokens(llama(WIDTH)),
    "LSTM": lstm,
    "experts": experts,
    "convolutions": convolutions,
    "residual": residual,
    "U-Net": lambda: of_images(Hourglass()),
    "spiking": lambda: of_images(Spiking()),
    "sampled": lambda: of_images(Sampled()),
    "Hugging Face": gpt2,
    "Lightning": convolutions,
    "Accelerate": encoder,
}


def loss_of(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    output = model(inputs)
    logits = output if isinstance(output, Tensor) else output.logits
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


def loader_of(samples) -> DataLoader[Any]:
    return DataLoader(samples, BATCH_SIZE)


def plain(model: nn.Module, optimizer: torch.optim.Optimizer, samples: list[Any]) -> None:
    batches = itertools.islice(loader_of(samples), STEPS * MICROBATCHES)
    for number, batch in enumerate(batches, start=1):
        (loss_of(model, *batch) / MICROBATCHES).backward()
        if number % MICROBATCHES == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


def accelerated(model: nn.Module, optimizer: torch.optim.Optimizer, samples: list[Any]) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=MICROBATCHES, cpu=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader_of(samples))
    for batch in itertools.islice(loader, STEPS * MICROBATCHES):
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, *batch))
            optimizer.step()
            optimizer.zero_grad()


def hugging_face(model: nn.Module, optimizer: torch.optim.Optimizer, samples: list[Any]) -> None:
    from transformers import Trainer, TrainingArguments

    class OwnTrainer(Trainer):
        def get_train_dataloader(self):
            return self.accelerator.prepare(loader_of(samples))

        def compute_loss(self, model, inputs, *args, **options) -> Tensor:
            return loss_of(model, *inputs)

        def _prepare_inputs(self, inputs):
            return inputs

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=STEPS,
            gradient_accumulation_steps=MICROBATCHES,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
        )
        trainer = OwnTrainer(model, arguments, train_dataset=samples, optimizers=(optimizer, None))
        trainer.train()


def lightning(model: nn.Module, optimizer: torch.optim.Optimizer, samples: list[Any]) -> None:
    import pytorch_lightning as pl

    class Lit(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch, number: int) -> Tensor:
            return loss_of(self.model, *batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer

    printing = ("logger", "enable_checkpointing", "enable_model_summary", "enable_progress_bar")
    trainer = pl.Trainer(
        max_steps=STEPS,
        accumulate_grad_batches=MICROBATCHES,
        gradient_clip_val=1.0,
        accelerator="cpu",
        **dict.fromkeys(printing, False),
    )
    trainer.fit(Lit(), loader_of(samples))


# The loops of the models that are not trained by the plain one.
LOOPS = {"Hugging Face": hugging_face, "Lightning": lightning, "Accelerate": accelerated}


@contextlib.contextmanager
def quietly():
    """Silence what the Trainers print."""
    logging.disable(logging.WARNING)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield
    logging.disable(logging.NOTSET)
