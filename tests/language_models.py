"""Small language models of transformers, built from a configuration and never downloaded."""

import transformers

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "bos_token_id": 1, "eos_token_id": 1}


def language_model(kind, **sizes):
    """Build a model by its kind, such as `Llama`, with other sizes or options than these."""
    config = getattr(transformers, f"{kind}Config")(**SIZES | sizes)
    return transformers.AutoModelForCausalLM.from_config(config)
