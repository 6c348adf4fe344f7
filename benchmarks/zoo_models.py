"""Factories of the model zoo: small models of other libraries with random weights, and a batch.

Nothing is downloaded. `model` adds the factory of a row of the table; those that take more than a
call are functions at the end. `make zoo` runs every one of them.
Proof: `python -m pytest tests/benchmarks/test_recorders.py`.
"""

import re
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from wrapped import Wrapped

# The library of each model, whose name is that of a factory of this module.
ZOO: dict[str, str] = {}


def make(path: str, *arguments, **options) -> Any:
    """Call `module:name`; arguments that are calls are made before.

    A class that has a class of configurations gets its options in one.
    """
    kind = resolve_name(path)
    given = arguments, options
    arguments, options = tree_map(lambda one: one() if isinstance(one, partial) else one, given)
    if hasattr(kind, "config_class"):
        return kind(kind.config_class(**options))
    return kind(*arguments, **options)


# A call of `module:name` that is made when a model is built.
call = partial(partial, make)


def model(name: str, path: str, batch: Callable[[], Any], *arguments, **options) -> None:
    """Add the factory of a call with its batch; the library has the name of the module."""
    ZOO[name] = re.split("[.:]", path)[0].replace("_", "-")
    globals()[name] = lambda: (make(path, *arguments, **options), batch())


def tokens(length: int = 32) -> torch.Tensor:
    return torch.randint(1, 97, (2, length))


def labelled(length: int = 32) -> dict[str, torch.Tensor]:
    ids = tokens(length)
    return {"input_ids": ids, "labels": ids}


def random(*shape: int) -> Callable[[], torch.Tensor]:
    return partial(torch.randn, shape)


sequences = random(2, 32, 32)
small_images = random(2, 3, 32, 32)
large_images = random(4, 3, 64, 64)
frames = random(2, 3, 128, 128)


def pixels() -> dict[str, torch.Tensor]:
    return {"pixel_values": small_images()}


def forecast() -> dict[str, torch.Tensor]:
    return {"past_values": torch.randn(4, 32, 3)}


def declare_vision_operators() -> None:
    """Declare the operators of torchvision that no build for this machine registers.

    Without its compiled extension torchvision can be imported only once they are declared. None of
    the models here calls them.
    """
    try:
        import torchvision  # noqa: F401
    except ModuleNotFoundError:
        return
    except RuntimeError:
        found = find_spec("torchvision")
        text = Path(found.origin).with_name("_meta_registrations.py").read_text()
        for name in sorted(set(re.findall(r"torchvision::(\w+)", text))):
            if not hasattr(torch.ops.torchvision, name):
                torch.library.define(f"torchvision::{name}", "(Tensor input) -> Tensor")


# Before any library looks for torchvision.
declare_vision_operators()


# The table.

TRANSFORMER = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
ENCODER_AND_DECODER = {
    "vocab_size": 97,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
}
VISION_MIXER = {"image_size": 32, "patch_size": 8, "num_classes": 10, "dim": 32, "depth": 3}
VISION_TRANSFORMER = {"heads": 2, "mlp_dim": 64, **VISION_MIXER}
LANGUAGE_MODEL = {"num_tokens": 97, "dim": 32, "heads": 2}
MIXER = {"dim": 32, "depth": 3, "dim_head": 16, "heads": 2}
SEGMENTATION = {"in_channels": 1, "out_channels": 2, "spatial_dims": 2}
RESNET = {"encoder_weights": None, "classes": 2}
FORECAST = {"num_input_channels": 3, "patch_length": 8, "patch_stride": 4, "prediction_length": 8}

model(
    "albert",
    "transformers:AlbertModel",
    lambda: {"input_ids": tokens()},
    vocab_size=97,
    embedding_size=16,
    **TRANSFORMER,
)
model(
    "t5",
    "transformers:T5ForConditionalGeneration",
    labelled,
    vocab_size=97,
    d_model=32,
    d_kv=16,
    d_ff=64,
    num_layers=2,
    num_heads=2,
    decoder_start_token_id=0,
)
model(
    "bart",
    "transformers:BartForConditionalGeneration",
    labelled,
    max_position_embeddings=64,
    **ENCODER_AND_DECODER,
)
model("bert", "transformers:BertForMaskedLM", labelled, vocab_size=97, **TRANSFORMER)
model(
    "local_attention",
    "local_attention:LocalTransformer",
    tokens,
    depth=3,
    max_seq_len=64,
    local_attn_window_size=16,
    **LANGUAGE_MODEL,
)
model(
    "performer",
    "performer_pytorch:PerformerLM",
    tokens,
    max_seq_len=64,
    depth=3,
    **LANGUAGE_MODEL,
)
model(
    "reformer",
    "reformer_pytorch:ReformerLM",
    tokens,
    depth=2,
    max_seq_len=64,
    bucket_size=8,
    causal=True,
    **LANGUAGE_MODEL,
)
model("linformer", "linformer:LinformerLM", tokens, seq_len=32, depth=3, k=16, **LANGUAGE_MODEL)
model(
    "linear_attention",
    "linear_attention_transformer:LinearAttentionTransformerLM",
    tokens,
    depth=2,
    max_seq_len=64,
    causal=True,
    **LANGUAGE_MODEL,
)
model(
    "nystromformer",
    "nystrom_attention:Nystromformer",
    sequences,
    num_landmarks=8,
    pinv_iterations=4,
    **MIXER,
)
model(
    "sinkhorn",
    "sinkhorn_transformer:SinkhornTransformerLM",
    tokens,
    depth=2,
    max_seq_len=32,
    bucket_size=8,
    **LANGUAGE_MODEL,
)
model(
    "megabyte",
    "MEGABYTE_pytorch:MEGABYTE",
    tokens,
    num_tokens=97,
    dim=(32, 16),
    max_seq_len=(8, 4),
    depth=(2, 2),
    dim_head=8,
    heads=2,
)
model("soft_moe", "soft_moe_pytorch:SoftMoE", sequences, dim=32, seq_len=32)

model(
    "vit",
    "transformers:ViTForImageClassification",
    pixels,
    image_size=32,
    patch_size=8,
    **TRANSFORMER,
)
model(
    "swin",
    "transformers:SwinForImageClassification",
    pixels,
    image_size=32,
    embed_dim=16,
    depths=[2, 2],
    num_heads=[2, 2],
    window_size=4,
)
model(
    "convnext",
    "transformers:ConvNextForImageClassification",
    pixels,
    hidden_sizes=[16, 32],
    depths=[2, 2],
    num_stages=2,
)
model(
    "segformer",
    "transformers:SegformerForSemanticSegmentation",
    pixels,
    num_encoder_blocks=2,
    depths=[2, 2],
    sr_ratios=[2, 1],
    hidden_sizes=[16, 32],
    patch_sizes=[3, 3],
    strides=[2, 2],
    mlp_ratios=[2, 2],
    decoder_hidden_size=16,
)
model(
    "timm_mixer",
    "timm.models.mlp_mixer:MlpMixer",
    small_images,
    num_classes=10,
    img_size=32,
    patch_size=8,
    num_blocks=4,
    embed_dim=32,
)
model("torchvision_resnet", "torchvision.models:resnet18", random(4, 3, 32, 32), num_classes=10)
model(
    "torchvision_mobilenet", "torchvision.models:mobilenet_v3_small", large_images, num_classes=10
)
model(
    "torchvision_raft",
    "torchvision.models.optical_flow:raft_small",
    lambda: {"image1": frames(), "image2": frames(), "num_flow_updates": 3},
)
model(
    "torchvision_video", "torchvision.models.video:r3d_18", random(2, 3, 4, 16, 16), num_classes=5
)
model(
    "vit_pytorch",
    "vit_pytorch:ViT",
    small_images,
    dropout=0.1,
    **VISION_TRANSFORMER,
)
model(
    "deep_vit",
    "vit_pytorch.deepvit:DeepViT",
    small_images,
    **VISION_TRANSFORMER,
)
model(
    "cait",
    "vit_pytorch.cait:CaiT",
    small_images,
    cls_depth=1,
    layer_dropout=0.05,
    **VISION_TRANSFORMER,
)
model(
    "nested_vit",
    "vit_pytorch.nest:NesT",
    small_images,
    image_size=32,
    patch_size=4,
    dim=16,
    heads=2,
    num_hierarchies=2,
    block_repeats=(2, 2),
    num_classes=10,
)
model("smp_unet", "segmentation_models_pytorch:Unet", random(2, 3, 64, 64), "resnet18", **RESNET)
model(
    "smp_deeplab", "segmentation_models_pytorch:DeepLabV3Plus", large_images, "resnet18", **RESNET
)
model("g_mlp", "g_mlp_pytorch:gMLPVision", small_images, **VISION_MIXER)
model(
    "mlp_mixer",
    "mlp_mixer_pytorch:MLPMixer",
    small_images,
    channels=3,
    dropout=0.1,
    **VISION_MIXER,
)
model(
    "perceiver",
    "perceiver_pytorch:Perceiver",
    random(2, 16, 16, 3),
    num_freq_bands=4,
    max_freq=8.0,
    depth=2,
    num_latents=8,
    latent_dim=32,
    cross_dim_head=16,
    latent_dim_head=16,
    latent_heads=2,
    num_classes=10,
)

model(
    "monai_swin_unetr",
    "monai.networks.nets:SwinUNETR",
    random(2, 1, 64, 64),
    feature_size=12,
    depths=(1, 1, 1, 1),
    num_heads=(1, 1, 2, 2),
    **SEGMENTATION,
)
model(
    "monai_unet",
    "monai.networks.nets:UNet",
    random(4, 1, 32, 32),
    channels=(8, 16, 32),
    strides=(2, 2),
    **SEGMENTATION,
)
model(
    "monai_segresnet",
    "monai.networks.nets:SegResNet",
    random(2, 1, 16, 16, 16),
    blocks_down=(1, 2),
    blocks_up=(1,),
)
model(
    "monai_unetr",
    "monai.networks.nets:UNETR",
    random(2, 1, 32, 32),
    img_size=(32, 32),
    feature_size=4,
    hidden_size=32,
    mlp_dim=64,
    num_heads=2,
    **SEGMENTATION,
)

model(
    "diffusers_dit",
    "diffusers:DiTTransformer2DModel",
    lambda: {
        "hidden_states": torch.randn(2, 4, 8, 8),
        "timestep": torch.tensor([3, 500]),
        "class_labels": torch.tensor([1, 2]),
    },
    num_attention_heads=2,
    attention_head_dim=16,
    num_layers=3,
    sample_size=8,
    num_embeds_ada_norm=10,
)
model(
    "diffusers_flux",
    "diffusers:FluxTransformer2DModel",
    lambda: {
        "hidden_states": torch.randn(2, 16, 4),
        "encoder_hidden_states": torch.randn(2, 8, 16),
        "pooled_projections": torch.randn(2, 16),
        "timestep": torch.tensor([0.1, 0.7]),
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(8, 3),
    },
    in_channels=4,
    num_layers=2,
    num_single_layers=2,
    attention_head_dim=16,
    num_attention_heads=2,
    joint_attention_dim=16,
    pooled_projection_dim=16,
    axes_dims_rope=(4, 4, 8),
)
model(
    "diffusers_vae",
    "diffusers:AutoencoderKL",
    random(2, 3, 16, 16),
    block_out_channels=(16, 32),
    down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
    up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D"),
    norm_num_groups=8,
)
model(
    "ddpm_unet",
    "denoising_diffusion_pytorch:Unet",
    lambda: (torch.randn(2, 3, 16, 16), torch.tensor([3, 500])),
    dim=16,
    dim_mults=(1, 2),
    attn_dim_head=8,
    attn_heads=2,
)

model(
    "wav2vec2",
    "transformers:Wav2Vec2ForCTC",
    lambda: {"input_values": torch.randn(2, 800)},
    vocab_size=20,
    conv_dim=(16, 16),
    conv_stride=(5, 4),
    conv_kernel=(10, 8),
    num_conv_pos_embeddings=16,
    num_conv_pos_embedding_groups=2,
    **TRANSFORMER,
)
model(
    "whisper",
    "transformers:WhisperForConditionalGeneration",
    lambda: {"input_features": torch.randn(2, 16, 64), "labels": tokens(12)},
    num_mel_bins=16,
    max_source_positions=32,
    max_target_positions=32,
    pad_token_id=0,
    decoder_start_token_id=1,
    **ENCODER_AND_DECODER,
)
model(
    "encodec",
    "transformers:EncodecModel",
    lambda: {"input_values": torch.randn(2, 1, 640)},
    num_filters=4,
    upsampling_ratios=[4, 2],
    hidden_size=16,
    codebook_size=16,
)
model("conformer", "conformer:Conformer", sequences, conv_kernel_size=7, **MIXER)
model(
    "residual_quantizer",
    "vector_quantize_pytorch:ResidualFSQ",
    random(2, 32, 16),
    dim=16,
    levels=[8, 5, 5],
    num_quantizers=3,
)

model(
    "egnn",
    "egnn_pytorch:EGNN_Network",
    lambda: (torch.randint(0, 21, (2, 16)), torch.randn(2, 16, 3)),
    num_tokens=21,
    num_positions=16,
    dim=16,
    depth=3,
    num_nearest_neighbors=4,
)

model(
    "fourier_operator",
    "neuralop.models:FNO",
    random(2, 1, 16, 16),
    n_modes=(8, 8),
    hidden_channels=16,
    in_channels=1,
    out_channels=1,
    n_layers=3,
)
model(
    "u_shaped_operator",
    "neuralop.models:UNO",
    random(2, 1, 16, 16),
    in_channels=1,
    out_channels=1,
    hidden_channels=8,
    uno_out_channels=[8, 16, 8],
    uno_n_modes=[[4, 4], [4, 4], [4, 4]],
    uno_scalings=[[1, 1], [0.5, 0.5], [2, 2]],
    channel_mlp_skip="linear",
    n_layers=3,
)

model(
    "patch_tst",
    "transformers:PatchTSTForPrediction",
    forecast,
    d_model=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    ffn_dim=64,
    **FORECAST,
)
model(
    "inverted_transformer",
    "iTransformer:iTransformer",
    random(4, 32, 6),
    num_variates=6,
    lookback_len=32,
    pred_length=8,
    **MIXER,
)
model("patch_mixer", "transformers:PatchTSMixerForPrediction", forecast, d_model=16, **FORECAST)

model(
    "tabnet",
    "pytorch_tabnet.tab_network:TabNet",
    random(16, 12),
    12,
    3,
    group_attention_matrix=torch.eye(12),
)
model(
    "ft_transformer",
    "rtdl_revisiting_models:FTTransformer",
    lambda: (torch.randn(8, 6), None),
    n_cont_features=6,
    cat_cardinalities=[],
    d_out=2,
    n_blocks=3,
    d_block=32,
    attention_n_heads=2,
    attention_dropout=0.1,
    ffn_d_hidden_multiplier=2.0,
    ffn_dropout=0.1,
    residual_dropout=0.0,
)

model(
    "block_recurrent",
    "block_recurrent_transformer_pytorch:BlockRecurrentTransformer",
    tokens,
    depth=3,
    dim_head=16,
    max_seq_len=32,
    block_width=16,
    num_state_vectors=8,
    recurrent_layers=(2,),
    **LANGUAGE_MODEL,
)
model(
    "rwkv",
    "transformers:RwkvForCausalLM",
    lambda: labelled(16),
    vocab_size=97,
    hidden_size=32,
    num_hidden_layers=3,
)


# Calls within a call.

CAUSAL_MODEL = {
    "vocab_size": 97,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    **TRANSFORMER,
}


CAUSAL = "transformers:AutoModelForCausalLM.from_config"


def configuration(kind: str, **options) -> partial:
    return call("transformers:AutoConfig.for_model", kind, **CAUSAL_MODEL | options)


CAUSAL_MODELS = {
    "gpt2": configuration("gpt2"),
    "llama": configuration("llama"),
    "gemma3": configuration("gemma3_text", head_dim=16, sliding_window=16),
    "mixtral": configuration("mixtral", num_local_experts=4, output_router_logits=True),
    "mamba": configuration("mamba", state_size=8),
    "falcon": configuration("falcon"),
    "bloom": configuration("bloom"),
}
for name, config in CAUSAL_MODELS.items():
    model(name, CAUSAL, labelled, config, attn_implementation="eager")

model(
    "x_transformer",
    "x_transformers:TransformerWrapper",
    tokens,
    num_tokens=97,
    max_seq_len=64,
    attn_layers=call("x_transformers:Decoder", dim=32, depth=3, heads=2, rotary_pos_emb=True),
)
model(
    "x_encoder",
    "x_transformers:ContinuousTransformerWrapper",
    random(2, 32, 8),
    dim_in=8,
    dim_out=8,
    max_seq_len=64,
    attn_layers=call(
        "x_transformers:Encoder", dim=32, depth=3, heads=2, use_rmsnorm=True, ff_glu=True
    ),
)
model(
    "mamba_py",
    "mambapy.mamba:Mamba",
    sequences,
    call("mambapy.mamba:MambaConfig", d_model=32, n_layers=3),
)
model(
    "st_moe",
    "st_moe_pytorch:SparseMoEBlock",
    sequences,
    call("st_moe_pytorch:MoE", dim=32, num_experts=4),
)

ADAPTERS = {
    "lora": call("peft:LoraConfig", r=4, lora_dropout=0.1),
    "dora": call("peft:LoraConfig", r=4, target_modules=["q_proj", "up_proj"], use_dora=True),
    "scaled_activations": call("peft:IA3Config", target_modules=["k_proj", "down_proj"]),
}
LLAMA = call(CAUSAL, CAUSAL_MODELS["llama"], attn_implementation="eager")
for name, config in ADAPTERS.items():
    model(name, "peft:get_peft_model", labelled, LLAMA, config)

TOWER = TRANSFORMER | {"num_hidden_layers": 2}
model(
    "clip",
    "transformers:CLIPModel",
    lambda: {"input_ids": tokens(16), "return_loss": True} | pixels(),
    text_config=dict(
        vocab_size=97,
        max_position_embeddings=32,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        **TOWER,
    ),
    vision_config=dict(image_size=32, patch_size=8, **TOWER),
    projection_dim=16,
)

TIMM_MODELS = {
    "vit": (
        "vit_tiny_patch16_224",
        32,
        {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 4, "num_heads": 2},
    ),
    "swin": (
        "swin_tiny_patch4_window7_224",
        64,
        {
            "img_size": 64,
            "window_size": 4,
            "embed_dim": 16,
            "depths": (2, 2, 2),
            "num_heads": (2, 2, 2),
        },
    ),
    "convnext": ("convnext_atto", 32, {"depths": (2, 2, 2, 2), "dims": (8, 16, 32, 64)}),
    "efficientnet": ("efficientnet_lite0", 64, {}),
    "resnet": ("resnet10t", 64, {}),
    "densenet": ("densenet121", 64, {"growth_rate": 8, "block_config": (2, 2, 2)}),
    "maxvit": ("maxvit_rmlp_pico_rw_256", 64, {"img_size": 64}),
}
for short_name, (kind, size, sizes) in TIMM_MODELS.items():
    batch = random(2, 3, size, size)
    model(f"timm_{short_name}", "timm:create_model", batch, kind, num_classes=10, **sizes)

model(
    "efficientnet_pytorch",
    "efficientnet_pytorch:EfficientNet.from_name",
    large_images,
    "efficientnet-b0",
    num_classes=10,
)
model(
    "diffusers_unet",
    "diffusers:UNet2DConditionModel",
    lambda: {
        "sample": torch.randn(2, 4, 16, 16),
        "timestep": torch.tensor([3, 500]),
        "encoder_hidden_states": torch.randn(2, 8, 16),
    },
    block_out_channels=(16, 32),
    layers_per_block=1,
    cross_attention_dim=16,
    norm_num_groups=8,
    down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
)
model(
    "ddpm",
    "denoising_diffusion_pytorch:GaussianDiffusion",
    partial(torch.rand, 2, 3, 16, 16),
    call(
        "denoising_diffusion_pytorch:Unet", dim=16, dim_mults=(1, 2), attn_dim_head=8, attn_heads=2
    ),
    image_size=16,
    timesteps=100,
)


def graphs():
    from torch_geometric.data import Batch, Data

    graphs = []
    for _ in range(4):
        sources = torch.arange(10)
        edges = torch.stack([sources, (sources + 1) % 10])
        graphs.append(Data(x=torch.randn(10, 8), edge_index=edges))
    return Batch.from_data_list(graphs)


def edges() -> tuple[torch.Tensor, torch.Tensor]:
    batch = graphs()
    return batch.x, batch.edge_index


model("graph_convolution", "torch_geometric.nn:GCN", edges, 8, 32, num_layers=3, out_channels=4)
model("graph_u_net", "torch_geometric.nn:GraphUNet", edges, 8, 16, 4, depth=2)


# Factories that take more than a call.


def lambda_layer():
    from lambda_networks import LambdaLayer

    def block() -> nn.Module:
        mixer = LambdaLayer(dim=16, dim_out=16, n=8, dim_k=8, heads=2, dim_u=1)
        return nn.Sequential(nn.BatchNorm2d(16), mixer, nn.GELU())

    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), block(), block(), block())
    return model, (torch.randn(4, 3, 8, 8),)


def graph_attention():
    from torch_geometric.nn import GAT, global_mean_pool

    def forward(own, data) -> torch.Tensor:
        return global_mean_pool(own.net(data.x, data.edge_index), data.batch)

    net = GAT(8, 32, num_layers=3, out_channels=4, heads=2, dropout=0.1)
    return Wrapped(forward, net=net), (graphs(),)


def equivariant_product():
    from e3nn import o3
    from e3nn.nn import FullyConnectedNet

    def forward(own, x: torch.Tensor) -> torch.Tensor:
        for layer in own.layers:
            x = x + layer(x, own.radial(x))
        return x

    irreps = o3.Irreps("4x0e + 2x1o")
    layers = [o3.FullyConnectedTensorProduct(irreps, irreps, irreps) for _ in range(3)]
    radial = FullyConnectedNet([irreps.dim, 16, irreps.dim], nn.functional.silu)
    product = Wrapped(forward, layers=nn.ModuleList(layers), radial=radial)
    return product, (torch.randn(8, 10),)


def autoregressive_flow():
    from nflows.flows import MaskedAutoregressiveFlow

    flow = MaskedAutoregressiveFlow(
        features=8, hidden_features=16, num_layers=3, num_blocks_per_layer=2
    )
    return Wrapped(lambda own, x: own.flow.log_prob(x), flow=flow), (torch.randn(8, 8),)


def neural_equation():
    from torchdiffeq import odeint

    def solve(own, x: torch.Tensor) -> torch.Tensor:
        times = torch.linspace(0, 1, 5, dtype=x.dtype)
        return odeint(own.dynamics, x, times, method="rk4")[-1]

    net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))
    dynamics = Wrapped(lambda own, time, x: own.net(x), net=net)
    return Wrapped(solve, dynamics=dynamics), (torch.randn(8, 8),)


def snntorch_net():
    import snntorch

    def forward(own, x: torch.Tensor) -> torch.Tensor:
        membrane = own.spikes.init_leaky()
        total = torch.zeros(x.shape[0], 4, dtype=x.dtype)
        for _ in range(8):
            spike, membrane = own.spikes(own.first(x), membrane)
            total = total + own.last(spike)
        return total

    first = nn.Linear(16, 64)
    spikes = snntorch.Leaky(beta=0.9)
    last = nn.Linear(64, 4)
    return Wrapped(forward, first=first, spikes=spikes, last=last), (torch.randn(8, 16),)


def spikingjelly_net():
    from spikingjelly.activation_based import functional, layer, neuron

    def forward(own, x: torch.Tensor) -> torch.Tensor:
        functional.reset_net(own)
        return torch.stack([own.stages(x) for _ in range(6)]).mean(0)

    stages = [nn.Sequential(layer.Linear(16, 16), neuron.LIFNode(step_mode="s")) for _ in range(3)]
    return Wrapped(forward, stages=nn.Sequential(*stages)), (torch.randn(8, 16),)


ZOO |= {
    "lambda_layer": "lambda-networks",
    "graph_attention": "torch-geometric",
    "equivariant_product": "e3nn",
    "autoregressive_flow": "nflows",
    "neural_equation": "torchdiffeq",
    "snntorch_net": "snntorch",
    "spikingjelly_net": "spikingjelly",
}
