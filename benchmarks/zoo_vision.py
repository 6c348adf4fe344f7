"""Vision models and diffusion models of the model zoo.

Proof: `python -m pytest tests/benchmarks/test_zoo.py`.
"""

from typing import Any

import torch

from zoo_models import images, tokens, zoo_model

# Vision.


@zoo_model("transformers", field="vision", short=True)
def vit() -> Any:
    import transformers

    config = transformers.ViTConfig(
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=64,
        image_size=32,
        patch_size=8,
    )
    return transformers.ViTForImageClassification(config), {"pixel_values": images(32)}


@zoo_model("transformers", field="vision")
def swin() -> Any:
    import transformers

    config = transformers.SwinConfig(
        image_size=32, patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 2], window_size=4
    )
    return transformers.SwinForImageClassification(config), {"pixel_values": images(32)}


@zoo_model("transformers", field="vision")
def convnext() -> Any:
    import transformers

    config = transformers.ConvNextConfig(hidden_sizes=[16, 32], depths=[2, 2], num_stages=2)
    return transformers.ConvNextForImageClassification(config), {"pixel_values": images(32)}


@zoo_model("transformers", field="vision", short=True)
def segformer() -> Any:
    import transformers

    config = transformers.SegformerConfig(
        num_encoder_blocks=2,
        depths=[2, 2],
        sr_ratios=[2, 1],
        hidden_sizes=[16, 32],
        patch_sizes=[3, 3],
        strides=[2, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=16,
    )
    return transformers.SegformerForSemanticSegmentation(config), {"pixel_values": images(32)}


@zoo_model("transformers", field="vision")
def clip() -> Any:
    import transformers

    text = dict(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=32,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    vision = dict(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=32,
        patch_size=8,
    )
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    batch = {"input_ids": tokens(97, length=16), "pixel_values": images(32), "return_loss": True}
    return transformers.CLIPModel(config), batch


def _timm(name: str, size: int = 32, **options: Any) -> Any:
    import timm

    return timm.create_model(name, num_classes=10, **options), (images(size),)


@zoo_model("timm", field="vision")
def timm_vit() -> Any:
    return _timm(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=32, depth=4, num_heads=2
    )


@zoo_model("timm", field="vision")
def timm_swin() -> Any:
    return _timm(
        "swin_tiny_patch4_window7_224",
        64,
        img_size=64,
        window_size=4,
        embed_dim=16,
        depths=(2, 2, 2),
        num_heads=(2, 2, 2),
    )


@zoo_model("timm", field="vision")
def timm_convnext() -> Any:
    return _timm("convnext_atto", depths=(2, 2, 2, 2), dims=(8, 16, 32, 64))


@zoo_model("timm", field="vision")
def timm_efficientnet() -> Any:
    return _timm("efficientnet_lite0", 64)


@zoo_model("timm", field="vision")
def timm_mixer() -> Any:
    from timm.models.mlp_mixer import MlpMixer

    model = MlpMixer(num_classes=10, img_size=32, patch_size=8, num_blocks=4, embed_dim=32)
    return model, (images(32),)


@zoo_model("timm", field="vision")
def timm_resnet() -> Any:
    return _timm("resnet10t", 64)


@zoo_model("timm", field="vision")
def timm_densenet() -> Any:
    return _timm("densenet121", 64, growth_rate=8, block_config=(2, 2, 2))


@zoo_model("timm", field="vision")
def timm_maxvit() -> Any:
    return _timm("maxvit_rmlp_pico_rw_256", 64, img_size=64)


@zoo_model("torchvision", field="vision")
def torchvision_resnet() -> Any:
    from torchvision.models import resnet18

    return resnet18(num_classes=10), (images(32, samples=4),)


@zoo_model("torchvision", field="vision")
def torchvision_mobilenet() -> Any:
    from torchvision.models import mobilenet_v3_small

    return mobilenet_v3_small(num_classes=10), (images(64, samples=4),)


@zoo_model("torchvision", field="vision")
def torchvision_raft() -> Any:
    from torchvision.models.optical_flow import raft_small

    batch = {"image1": images(128), "image2": images(128), "num_flow_updates": 3}
    return raft_small(), batch


@zoo_model("torchvision", field="vision")
def torchvision_video() -> Any:
    from torchvision.models.video import r3d_18

    return r3d_18(num_classes=5), (torch.randn(2, 3, 4, 16, 16),)


@zoo_model("vit-pytorch", field="vision")
def vit_pytorch() -> Any:
    from vit_pytorch import ViT

    model = ViT(
        image_size=32,
        patch_size=8,
        num_classes=10,
        dim=32,
        depth=3,
        heads=2,
        mlp_dim=64,
        dropout=0.1,
    )
    return model, (images(32),)


@zoo_model("vit-pytorch", field="vision")
def deep_vit() -> Any:
    from vit_pytorch.deepvit import DeepViT

    model = DeepViT(
        image_size=32, patch_size=8, num_classes=10, dim=32, depth=3, heads=2, mlp_dim=64
    )
    return model, (images(32),)


@zoo_model("vit-pytorch", field="vision")
def cait() -> Any:
    from vit_pytorch.cait import CaiT

    model = CaiT(
        image_size=32,
        patch_size=8,
        num_classes=10,
        dim=32,
        depth=3,
        cls_depth=1,
        heads=2,
        mlp_dim=64,
        layer_dropout=0.05,
    )
    return model, (images(32),)


@zoo_model("vit-pytorch", field="vision")
def nested_vit() -> Any:
    from vit_pytorch.nest import NesT

    model = NesT(
        image_size=32,
        patch_size=4,
        dim=16,
        heads=2,
        num_hierarchies=2,
        block_repeats=(2, 2),
        num_classes=10,
    )
    return model, (images(32),)


@zoo_model("efficientnet-pytorch", field="vision")
def efficientnet_pytorch() -> Any:
    from efficientnet_pytorch import EfficientNet

    return EfficientNet.from_name("efficientnet-b0", num_classes=10), (images(64, samples=4),)


@zoo_model("segmentation-models-pytorch", field="vision")
def smp_unet() -> Any:
    from segmentation_models_pytorch import Unet

    return Unet("resnet18", encoder_weights=None, classes=2), (images(64),)


@zoo_model("segmentation-models-pytorch", field="vision")
def smp_deeplab() -> Any:
    from segmentation_models_pytorch import DeepLabV3Plus

    return DeepLabV3Plus("resnet18", encoder_weights=None, classes=2), (images(64, samples=4),)


@zoo_model("g-mlp-pytorch", field="vision")
def g_mlp() -> Any:
    from g_mlp_pytorch import gMLPVision

    return gMLPVision(image_size=32, patch_size=8, num_classes=10, dim=32, depth=3), (images(32),)


@zoo_model("mlp-mixer-pytorch", field="vision")
def mlp_mixer() -> Any:
    from mlp_mixer_pytorch import MLPMixer

    model = MLPMixer(
        image_size=32, channels=3, patch_size=8, dim=32, depth=3, num_classes=10, dropout=0.1
    )
    return model, (images(32),)


@zoo_model("lambda-networks", field="vision")
def lambda_layer() -> Any:
    from lambda_networks import LambdaLayer

    def block() -> torch.nn.Module:
        mixer = LambdaLayer(dim=16, dim_out=16, n=8, dim_k=8, heads=2, dim_u=1)
        return torch.nn.Sequential(torch.nn.BatchNorm2d(16), mixer, torch.nn.GELU())

    model = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3, padding=1), block(), block(), block())
    return model, (images(8, samples=4),)


@zoo_model("perceiver-pytorch", field="vision")
def perceiver() -> Any:
    from perceiver_pytorch import Perceiver

    model = Perceiver(
        input_channels=3,
        input_axis=2,
        num_freq_bands=4,
        max_freq=8.0,
        depth=2,
        num_latents=8,
        latent_dim=32,
        cross_dim_head=16,
        latent_dim_head=16,
        latent_heads=2,
        num_classes=10,
        weight_tie_layers=True,
    )
    return model, (torch.randn(2, 16, 16, 3),)


@zoo_model("monai", field="medical")
def monai_swin_unetr() -> Any:
    from monai.networks.nets import SwinUNETR

    model = SwinUNETR(
        in_channels=1,
        out_channels=2,
        feature_size=12,
        depths=(1, 1, 1, 1),
        num_heads=(1, 1, 2, 2),
        spatial_dims=2,
    )
    return model, (images(64, channels=1),)


@zoo_model("monai", field="medical", short=True)
def monai_unet() -> Any:
    from monai.networks.nets import UNet

    model = UNet(
        spatial_dims=2, in_channels=1, out_channels=2, channels=(8, 16, 32), strides=(2, 2)
    )
    return model, (images(32, channels=1, samples=4),)


@zoo_model("monai", field="medical")
def monai_segresnet() -> Any:
    from monai.networks.nets import SegResNet

    model = SegResNet(
        spatial_dims=3,
        init_filters=8,
        in_channels=1,
        out_channels=2,
        blocks_down=(1, 2),
        blocks_up=(1,),
    )
    return model, (torch.randn(2, 1, 16, 16, 16),)


@zoo_model("monai", field="medical")
def monai_unetr() -> Any:
    from monai.networks.nets import UNETR

    model = UNETR(
        in_channels=1,
        out_channels=2,
        img_size=(32, 32),
        feature_size=4,
        hidden_size=32,
        mlp_dim=64,
        num_heads=2,
        spatial_dims=2,
    )
    return model, (images(32, channels=1),)


# Diffusion.


def _diffusers_unet(**options: Any) -> Any:
    from diffusers import UNet2DConditionModel

    sizes: dict[str, Any] = dict(
        sample_size=16,
        block_out_channels=(16, 32),
        layers_per_block=1,
        cross_attention_dim=16,
        attention_head_dim=8,
        norm_num_groups=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )
    batch = {
        "sample": images(16, channels=4),
        "timestep": torch.tensor([3, 500]),
        "encoder_hidden_states": torch.randn(2, 8, 16),
    }
    return UNet2DConditionModel(**(sizes | options)), batch


@zoo_model("diffusers", field="diffusion")
def diffusers_unet() -> Any:
    return _diffusers_unet()


@zoo_model("diffusers", field="diffusion", short=True)
def diffusers_dit() -> Any:
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        num_layers=3,
        sample_size=8,
        patch_size=2,
        num_embeds_ada_norm=10,
    )
    batch = {
        "hidden_states": images(8, channels=4),
        "timestep": torch.tensor([3, 500]),
        "class_labels": torch.tensor([1, 2]),
    }
    return model, batch


@zoo_model("diffusers", field="diffusion")
def diffusers_flux() -> Any:
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        in_channels=4,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        pooled_projection_dim=16,
        axes_dims_rope=(4, 4, 8),
    )
    batch = {
        "hidden_states": torch.randn(2, 16, 4),
        "encoder_hidden_states": torch.randn(2, 8, 16),
        "pooled_projections": torch.randn(2, 16),
        "timestep": torch.tensor([0.1, 0.7]),
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(8, 3),
    }
    return model, batch


@zoo_model("diffusers", field="diffusion")
def diffusers_vae() -> Any:
    from diffusers import AutoencoderKL

    model = AutoencoderKL(
        block_out_channels=(16, 32),
        down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
        up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D"),
        norm_num_groups=8,
    )
    return model, (images(16),)


@zoo_model("denoising-diffusion-pytorch", field="diffusion")
def ddpm_unet() -> Any:
    from denoising_diffusion_pytorch import Unet

    model = Unet(dim=16, dim_mults=(1, 2), attn_dim_head=8, attn_heads=2)
    return model, (images(16), torch.tensor([3, 500]))


@zoo_model("denoising-diffusion-pytorch", field="diffusion")
def ddpm() -> Any:
    from denoising_diffusion_pytorch import GaussianDiffusion, Unet

    unet = Unet(dim=16, dim_mults=(1, 2), attn_dim_head=8, attn_heads=2)
    return GaussianDiffusion(unet, image_size=16, timesteps=100), (torch.rand(2, 3, 16, 16),)
