"""Language models, experts and adapters of the model zoo.

Proof: `python -m pytest tests/benchmarks/test_zoo.py`.
"""

from typing import Any

import torch

from zoo_models import tokens, zoo_model


def _language_model(kind: str, **options: Any) -> Any:
    import transformers

    sizes = dict(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
    )
    config = transformers.AutoConfig.for_model(kind, **(sizes | options))
    ids = tokens(97)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return model, {"input_ids": ids, "labels": ids}


@zoo_model("transformers", field="language", short=True)
def gpt2() -> Any:
    return _language_model("gpt2", n_embd=32, n_layer=3, n_head=2, n_positions=64)


@zoo_model("transformers", field="language", short=True)
def llama() -> Any:
    return _language_model("llama")


@zoo_model("transformers", field="language")
def gemma3() -> Any:
    return _language_model("gemma3_text", head_dim=16, sliding_window=16)


@zoo_model("transformers", field="language", short=True)
def mixtral() -> Any:
    return _language_model("mixtral", num_local_experts=4, output_router_logits=True)


@zoo_model("transformers", field="language")
def mamba() -> Any:
    return _language_model("mamba", state_size=8)


@zoo_model("transformers", field="language")
def falcon() -> Any:
    return _language_model("falcon")


@zoo_model("transformers", field="language")
def bloom() -> Any:
    return _language_model("bloom", n_layer=3, n_head=2)


@zoo_model("transformers", field="language")
def albert() -> Any:
    import transformers

    config = transformers.AlbertConfig(
        vocab_size=97,
        embedding_size=16,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=64,
    )
    return transformers.AlbertModel(config), {"input_ids": tokens(97)}


@zoo_model("transformers", field="language")
def t5() -> Any:
    import transformers

    config = transformers.T5Config(
        vocab_size=97,
        d_model=32,
        d_kv=16,
        d_ff=64,
        num_layers=2,
        num_heads=2,
        decoder_start_token_id=0,
    )
    ids = tokens(97)
    return transformers.T5ForConditionalGeneration(config), {"input_ids": ids, "labels": ids}


@zoo_model("transformers", field="language")
def bart() -> Any:
    import transformers

    config = transformers.BartConfig(
        vocab_size=97,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_position_embeddings=64,
    )
    ids = tokens(97)
    return transformers.BartForConditionalGeneration(config), {"input_ids": ids, "labels": ids}


@zoo_model("transformers", field="language", short=True)
def bert() -> Any:
    import transformers

    config = transformers.BertConfig(
        vocab_size=97,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=64,
    )
    ids = tokens(97)
    return transformers.BertForMaskedLM(config), {"input_ids": ids, "labels": ids}


@zoo_model("x-transformers", field="language", short=True)
def x_transformer() -> Any:
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(dim=32, depth=3, heads=2, rotary_pos_emb=True)
    model = TransformerWrapper(num_tokens=97, max_seq_len=64, attn_layers=layers)
    return model, (tokens(97),)


@zoo_model("x-transformers", field="language")
def x_encoder() -> Any:
    from x_transformers import ContinuousTransformerWrapper, Encoder

    layers = Encoder(dim=32, depth=3, heads=2, use_rmsnorm=True, ff_glu=True)
    model = ContinuousTransformerWrapper(dim_in=8, dim_out=8, max_seq_len=64, attn_layers=layers)
    return model, (torch.randn(2, 32, 8),)


@zoo_model("local-attention", field="language")
def local_attention() -> Any:
    from local_attention import LocalTransformer

    model = LocalTransformer(
        num_tokens=97, dim=32, depth=3, max_seq_len=64, local_attn_window_size=16, heads=2
    )
    return model, (tokens(97),)


@zoo_model("performer-pytorch", field="language")
def performer() -> Any:
    from performer_pytorch import PerformerLM

    model = PerformerLM(num_tokens=97, max_seq_len=64, dim=32, depth=3, heads=2, causal=False)
    return model, (tokens(97),)


@zoo_model("reformer-pytorch", field="language")
def reformer() -> Any:
    from reformer_pytorch import ReformerLM

    model = ReformerLM(
        num_tokens=97, dim=32, depth=2, max_seq_len=64, heads=2, bucket_size=8, causal=True
    )
    return model, (tokens(97),)


@zoo_model("linformer", field="language")
def linformer() -> Any:
    from linformer import LinformerLM

    model = LinformerLM(num_tokens=97, dim=32, seq_len=32, depth=3, heads=2, k=16)
    return model, (tokens(97),)


@zoo_model("linear-attention-transformer", field="language")
def linear_attention() -> Any:
    from linear_attention_transformer import LinearAttentionTransformerLM

    model = LinearAttentionTransformerLM(
        num_tokens=97, dim=32, heads=2, depth=2, max_seq_len=64, causal=True
    )
    return model, (tokens(97),)


@zoo_model("nystrom-attention", field="language")
def nystromformer() -> Any:
    from nystrom_attention import Nystromformer

    model = Nystromformer(dim=32, depth=3, dim_head=16, heads=2, num_landmarks=8, pinv_iterations=4)
    return model, (torch.randn(2, 32, 32),)


@zoo_model("sinkhorn-transformer", field="language")
def sinkhorn() -> Any:
    from sinkhorn_transformer import SinkhornTransformerLM

    model = SinkhornTransformerLM(
        num_tokens=97, dim=32, heads=2, depth=2, max_seq_len=32, bucket_size=8
    )
    return model, (tokens(97),)


@zoo_model("mambapy", field="language")
def mamba_py() -> Any:
    from mambapy.mamba import Mamba, MambaConfig

    return Mamba(MambaConfig(d_model=32, n_layers=3)), (torch.randn(2, 32, 32),)


@zoo_model("MEGABYTE-pytorch", field="language")
def megabyte() -> Any:
    from MEGABYTE_pytorch import MEGABYTE

    model = MEGABYTE(
        num_tokens=97, dim=(32, 16), max_seq_len=(8, 4), depth=(2, 2), dim_head=8, heads=2
    )
    return model, (tokens(97),)


@zoo_model("st-moe-pytorch", field="language")
def st_moe() -> Any:
    from st_moe_pytorch import MoE, SparseMoEBlock

    return SparseMoEBlock(MoE(dim=32, num_experts=4, gating_top_n=2)), (torch.randn(2, 32, 32),)


@zoo_model("soft-moe-pytorch", field="language")
def soft_moe() -> Any:
    from soft_moe_pytorch import SoftMoE

    return SoftMoE(dim=32, seq_len=32, num_experts=4), (torch.randn(2, 32, 32),)


@zoo_model("peft", field="adapters")
def lora() -> Any:
    from peft import LoraConfig, get_peft_model

    model, batch = _language_model("llama")
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
    return get_peft_model(model, config), batch


@zoo_model("peft", field="adapters")
def dora() -> Any:
    from peft import LoraConfig, get_peft_model

    model, batch = _language_model("llama")
    config = LoraConfig(r=4, target_modules=["q_proj", "up_proj"], use_dora=True)
    return get_peft_model(model, config), batch


@zoo_model("peft", field="adapters")
def scaled_activations() -> Any:
    from peft import IA3Config, get_peft_model

    model, batch = _language_model("llama")
    config = IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])
    return get_peft_model(model, config), batch
