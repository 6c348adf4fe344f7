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
from wrapped import Wrapped

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


def between_embeddings(body: nn.Module) -> Made:
    """Put a body between an embedding of tokens and a head."""

    def forward(own, tokens: Tensor) -> Tensor:
        hidden = own.body(own.embed(tokens))
        return own.head(hidden[0] if isinstance(hidden, tuple) else hidden)

    embed = nn.Embedding(VOCABULARY, WIDTH)
    head = nn.Linear(WIDTH, VOCABULARY)
    return of_tokens(Wrapped(forward, embed=embed, body=body, head=head))


def encoder() -> Made:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, batch_first=True)
    return between_embeddings(nn.TransformerEncoder(layer, 2))


def lstm() -> Made:
    return between_embeddings(nn.LSTM(WIDTH, WIDTH, 2, batch_first=True, dropout=0.1))


def routed() -> nn.Module:
    """Make a block in which each token goes to two of four experts."""

    def forward(own, hidden: Tensor) -> Tensor:
        inputs = own.norm(hidden).flatten(0, 1)
        weights, chosen = own.router(inputs).softmax(-1).topk(2)
        output = torch.zeros_like(inputs)
        for number, expert in enumerate(own.experts):
            rows, place = (chosen == number).nonzero(as_tuple=True)
            mixed = expert(inputs[rows]) * weights[rows, place, None]
            output = output.index_add(0, rows, mixed.to(output.dtype))
        return hidden + own.drop(output.view_as(hidden))

    router = nn.Linear(WIDTH, 4)
    experts = nn.ModuleList(
        nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.SiLU(), nn.Linear(2 * WIDTH, WIDTH))
        for _ in range(4)
    )
    norm = nn.LayerNorm(WIDTH)
    return Wrapped(forward, norm=norm, router=router, experts=experts, drop=nn.Dropout(0.1))


def experts() -> Made:
    return between_embeddings(nn.Sequential(routed(), routed()))


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


def with_skip(width: int) -> nn.Module:
    """Make a residual block of images."""

    def forward(own, hidden: Tensor) -> Tensor:
        return hidden + own.drop(F.gelu(own.convolution(own.norm(hidden))))

    convolution = nn.Conv2d(width, width, 3, padding=1)
    norm = nn.GroupNorm(2, width)
    return Wrapped(forward, norm=norm, convolution=convolution, drop=nn.Dropout2d(0.1))


def residual() -> Made:
    body = [with_skip(8), nn.Conv2d(8, 16, 2, 2), with_skip(16), nn.AdaptiveAvgPool2d(1)]
    return of_images(nn.Sequential(nn.Conv2d(3, 8, 1), *body, nn.Flatten(), nn.Linear(16, 5)))


def hourglass() -> Made:
    """Make a U-Net with one skip."""

    def forward(own, images: Tensor) -> Tensor:
        begun = own.begin(images)
        deep = F.silu(own.norm(own.down(begun)))
        return own.end(torch.cat([begun, own.up(deep)], 1)).mean((2, 3))

    model = Wrapped(
        forward,
        begin=nn.Conv2d(3, 8, 3, padding=1),
        down=nn.Conv2d(8, 16, 2, 2),
        norm=nn.InstanceNorm2d(16, affine=True),
        up=nn.ConvTranspose2d(16, 8, 2, 2),
        end=nn.Conv2d(16, 5, 1),
    )
    return of_images(model)


def spiking() -> Made:
    """Make two layers of leaky neurons over five timesteps."""
    import snntorch

    def forward(own, images: Tensor) -> Tensor:
        current = own.first(images.flatten(1))
        membrane, output = own.neurons.init_leaky(), own.readout.init_leaky()
        for _ in range(5):
            spikes, membrane = own.neurons(current * 2, membrane)
            _, output = own.readout(own.second(spikes), output)
        return output

    model = Wrapped(
        forward,
        first=nn.Linear(192, 32),
        neurons=snntorch.Leaky(beta=0.9),
        second=nn.Linear(32, 5),
        readout=snntorch.Leaky(beta=0.8, reset_mechanism="none"),
    )
    return of_images(model)


def sampled() -> Made:
    """Draw a hidden vector, as variational autoencoders do, and use one layer twice."""

    def forward(own, images: Tensor) -> Tensor:
        mean = own.encode(images.flatten(1))
        hidden = mean + torch.randn_like(mean) * 0.1
        for _ in range(2):
            hidden = own.norm(own.shared(hidden).tanh() + hidden)
        return own.decode(hidden)

    model = Wrapped(
        forward,
        encode=nn.Linear(192, WIDTH),
        shared=nn.Linear(WIDTH, WIDTH),
        norm=nn.LayerNorm(WIDTH),
        decode=nn.Linear(WIDTH, 5),
    )
    return of_images(model)


MODELS = {
    "encoder": encoder,
    "GPT-2": gpt2,
    "Llama": lambda: of_tokens(llama(WIDTH)),
    "LSTM": lstm,
    "experts": experts,
    "convolutions": convolutions,
    "residual": residual,
    "U-Net": hourglass,
    "spiking": spiking,
    "sampled": sampled,
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
