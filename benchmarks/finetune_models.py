"""Small fine-tunings of other libraries: optimizers, adapters on frozen bases, experts.

Each optimizer is a function of the module, each model a factory that `curry-train plan --model
benchmarks/finetune_models.py:lora` takes too. Libraries are imported where they are used.

Proof: `python -m pytest tests/benchmarks/test_finetune.py`.
"""

import importlib
from collections.abc import Callable

import torch
from torch import nn

WIDTH = 128
VOCABULARY = 256
LENGTH = 32
SAMPLES = 4
RANK = 4

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


def trained(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that an optimizer gets."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def of(name: str, library: str = "torch.optim", **options) -> MakeOptimizer:
    """Return a factory of a library's optimizer."""

    def make(module: nn.Module) -> torch.optim.Optimizer:
        return getattr(importlib.import_module(library), name)(trained(module), **options)

    return make


def matrices(module: nn.Module) -> torch.optim.Optimizer:
    """Return Muon over the matrices."""
    return torch.optim.Muon([one for one in trained(module) if one.dim() == 2])


PLAIN_OPTIMIZERS = (
    *("SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax"),
    *("NAdam", "RAdam", "RMSprop", "Rprop", "ASGD", "Adafactor"),
)
OPTIMIZERS = {
    **{name: of(name) for name in PLAIN_OPTIMIZERS},
    "Muon": matrices,
    "AdamW, foreach": of("AdamW", foreach=True),
    "AdamW, fused": of("AdamW", fused=True),
    "AdamW, amsgrad": of("AdamW", amsgrad=True),
    "AdamW, a tensor as rate": of("AdamW", lr=torch.tensor(1e-3)),
    "Adafactor, foreach": of("Adafactor", foreach=True),
    "Hugging Face Adafactor": of("Adafactor", "transformers.optimization"),
    "Hugging Face Adafactor, first moment": of(
        "Adafactor",
        "transformers.optimization",
        lr=1e-3,
        relative_step=False,
        scale_parameter=False,
        beta1=0.9,
    ),
    "Lion": of("Lion", "lion_pytorch", lr=1e-4),
    "torchao AdamW8bit": of("AdamW8bit", "torchao.optim"),
    "torchao AdamW4bit": of("AdamW4bit", "torchao.optim"),
    "torchao AdamWFp8": of("AdamWFp8", "torchao.optim"),
    "bitsandbytes AdamW8bit": of("AdamW8bit", "bitsandbytes.optim"),
    "bitsandbytes PagedAdamW8bit": of("PagedAdamW8bit", "bitsandbytes.optim"),
    "bitsandbytes Lion8bit": of("Lion8bit", "bitsandbytes.optim"),
}


SIZES = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 2 * LENGTH,
}


def llama(width: int = 64) -> nn.Module:
    """Return a small Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(hidden_size=width, intermediate_size=2 * width, **SIZES)
    return LlamaForCausalLM(config)


def words() -> dict[str, torch.Tensor]:
    """Return a batch of tokens with labels."""
    tokens = torch.randint(VOCABULARY, (SAMPLES, LENGTH))
    return {"input_ids": tokens, "labels": tokens}


Made = tuple[nn.Module, dict[str, torch.Tensor]]


def adapted(base: nn.Module, kind: str = "LoraConfig", **options) -> Made:
    """Return a base with adapters, of low rank if not of another kind, and a batch."""
    import peft

    own = {"r": RANK} if kind == "LoraConfig" else {}
    config = getattr(peft, kind)(task_type="CAUSAL_LM", **own | options)
    return peft.get_peft_model(base, config), words()


# Adapters on a small Llama, by what differs from adapters of its queries and values.
ON_LLAMA = {
    "lora": {},
    "lora_on_all_layers": {"target_modules": "all-linear"},
    "lora_with_dropout": {"use_rslora": True, "lora_dropout": 0.1},
    "lora_on_embeddings": {"target_modules": ["embed_tokens", "q_proj"]},
    "lora_with_a_whole_head": {"modules_to_save": ["lm_head"]},
    "dora": {"use_dora": True},
    "ia3": {"kind": "IA3Config"},
    "prompt_tuning": {"kind": "PromptTuningConfig", "num_virtual_tokens": 4},
}


for name, options in ON_LLAMA.items():
    globals()[name] = lambda options=options: adapted(llama(), **options)


def lora_with_input_gradients() -> Made:
    """The embeddings' output requires grad, as reentrant checkpointing needs it."""
    base = llama()
    base.enable_input_require_grads()
    return adapted(base)


def merged_and_adapted_again() -> Made:
    merged = adapted(llama())[0]
    return adapted(merged.merge_and_unload())


def merged_and_unmerged() -> Made:
    """Adapters that were merged into the base to evaluate, and are trained on apart from it."""
    model, batch = adapted(llama())
    model.merge_adapter()
    model.unmerge_adapter()
    return model, batch


def two_adapters() -> Made:
    """One of two adapters is trained; the other is frozen."""
    from peft import LoraConfig

    model, batch = adapted(llama())
    model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"]))
    return model, batch


def is_quantised(module: nn.Module, name: str) -> bool:
    """Return whether torchao changes a module: each linear layer but the head."""
    return isinstance(module, nn.Linear) and "lm_head" not in name


def lora_on_torchao_int8() -> Made:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    base = llama()
    quantize_(base, Int8WeightOnlyConfig(), filter_fn=is_quantised)
    return adapted(base)


def lora_on_torchao_int4() -> Made:
    """Values of 4 bits that take a byte each: the layout of torchao that runs on a CPU.

    `Int4WeightOnlyConfig` packs two values into a byte, with a scale and a zero for each group;
    its kernels run on CUDA and XPU alone, so no row measures them.
    """
    from torchao.quantization import IntxWeightOnlyConfig, PerGroup, quantize_

    base = llama()
    config = IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32))
    quantize_(base, config, filter_fn=is_quantised)
    return adapted(base)


def lora_on_torchao_nf4() -> Made:
    """The layout of QLoRA: two values in a byte, and a scale of 8 bits for each 32 of them."""
    from torchao.quantization.quantize_.workflows import to_nf4

    base = llama()
    for name, module in base.named_modules():
        if is_quantised(module, name):
            packed = to_nf4(module.weight.detach(), block_size=32, scaler_block_size=8)
            module.weight = nn.Parameter(packed, requires_grad=False)
    return adapted(base)


def on_bitsandbytes(kind: str, **options) -> Made:
    """A base whose adapted layers and up projections are layers of bitsandbytes."""
    import bitsandbytes

    make = getattr(bitsandbytes.nn, kind)
    base = llama(WIDTH)
    for path, plain in [*base.named_modules()]:
        if path.endswith(("q_proj", "v_proj", "up_proj")):
            made = make(plain.in_features, plain.out_features, bias=False, **options)
            made.load_state_dict(plain.state_dict())
            base.set_submodule(path, made.to("cpu"))
    return adapted(base)


def lora_on_bitsandbytes_int8() -> Made:
    return on_bitsandbytes("Linear8bitLt", has_fp16_weights=False)


def lora_on_bitsandbytes_nf4() -> Made:
    return on_bitsandbytes("Linear4bit", compute_dtype=torch.float32, quant_type="nf4")


def mixtral() -> Made:
    """Experts whose router has a loss of its own."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        hidden_size=64,
        intermediate_size=128,
        num_local_experts=4,
        output_router_logits=True,
        **SIZES,
    )
    return MixtralForCausalLM(config), words()


FACTORIES = (
    *ON_LLAMA,
    "lora_with_input_gradients",
    "merged_and_adapted_again",
    "merged_and_unmerged",
    "two_adapters",
    "lora_on_torchao_int8",
    "lora_on_torchao_int4",
    "lora_on_torchao_nf4",
    "lora_on_bitsandbytes_int8",
    "lora_on_bitsandbytes_nf4",
    "mixtral",
)
