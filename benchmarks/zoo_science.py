"""Models of audio, graphs, operators, time series, tables and spikes of the model zoo.

Proof: `python -m pytest tests/benchmarks/test_zoo.py`.
"""

from typing import Any

import torch

from zoo_models import images, tokens, zoo_model

# Audio and speech.


@zoo_model("transformers", field="audio")
def wav2vec2() -> Any:
    import transformers

    config = transformers.Wav2Vec2Config(
        vocab_size=20,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=64,
        conv_dim=(16, 16),
        conv_stride=(5, 4),
        conv_kernel=(10, 8),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=2,
        layerdrop=0.1,
    )
    return transformers.Wav2Vec2ForCTC(config), {"input_values": torch.randn(2, 800)}


@zoo_model("transformers", field="audio", short=True)
def whisper() -> Any:
    import transformers

    config = transformers.WhisperConfig(
        vocab_size=97,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        num_mel_bins=16,
        max_source_positions=32,
        max_target_positions=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    batch = {"input_features": torch.randn(2, 16, 64), "labels": tokens(97, length=12)}
    return transformers.WhisperForConditionalGeneration(config), batch


@zoo_model("transformers", field="audio")
def encodec() -> Any:
    import transformers

    config = transformers.EncodecConfig(
        num_filters=4, upsampling_ratios=[4, 2], hidden_size=16, codebook_size=16, codebook_dim=16
    )
    return transformers.EncodecModel(config), {"input_values": torch.randn(2, 1, 640)}


@zoo_model("conformer", field="audio")
def conformer() -> Any:
    from conformer import Conformer

    model = Conformer(dim=32, depth=3, dim_head=16, heads=2, conv_kernel_size=7)
    return model, (torch.randn(2, 32, 32),)


@zoo_model("vector-quantize-pytorch", field="audio")
def residual_quantizer() -> Any:
    from vector_quantize_pytorch import ResidualFSQ

    model = ResidualFSQ(dim=16, levels=[8, 5, 5], num_quantizers=3)
    return model, (torch.randn(2, 32, 16),)


# Graphs and molecules.


def _graphs() -> Any:
    from torch_geometric.data import Batch, Data

    graphs = []
    for _ in range(4):
        sources = torch.arange(10)
        edges = torch.stack([sources, (sources + 1) % 10])
        graphs.append(Data(x=torch.randn(10, 8), edge_index=edges))
    return Batch.from_data_list(graphs)


@zoo_model("torch_geometric", field="graphs")
def graph_convolution() -> Any:
    from torch_geometric.nn import GCN

    graphs = _graphs()
    return GCN(8, 32, num_layers=3, out_channels=4), (graphs.x, graphs.edge_index)


@zoo_model("torch_geometric", field="graphs", short=True)
def graph_attention() -> Any:
    from torch_geometric.nn import GAT, global_mean_pool

    class OnData(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = GAT(8, 32, num_layers=3, out_channels=4, heads=2, dropout=0.1)

        def forward(self, data: Any) -> torch.Tensor:
            return global_mean_pool(self.net(data.x, data.edge_index), data.batch)

    return OnData(), (_graphs(),)


@zoo_model("torch_geometric", field="graphs")
def graph_u_net() -> Any:
    from torch_geometric.nn import GraphUNet

    graphs = _graphs()
    return GraphUNet(8, 16, 4, depth=2), (graphs.x, graphs.edge_index)


@zoo_model("egnn-pytorch", field="graphs")
def egnn() -> Any:
    from egnn_pytorch import EGNN_Network

    model = EGNN_Network(num_tokens=21, num_positions=16, dim=16, depth=3, num_nearest_neighbors=4)
    return model, (torch.randint(0, 21, (2, 16)), torch.randn(2, 16, 3))


@zoo_model("e3nn", field="graphs")
def equivariant_product() -> Any:
    from e3nn import o3
    from e3nn.nn import FullyConnectedNet

    class Product(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            irreps = o3.Irreps("4x0e + 2x1o")
            self.layers = torch.nn.ModuleList(
                [o3.FullyConnectedTensorProduct(irreps, irreps, irreps) for _ in range(3)]
            )
            self.radial = FullyConnectedNet([irreps.dim, 16, irreps.dim], torch.nn.functional.silu)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = x + layer(x, self.radial(x))
            return x

    return Product(), (torch.randn(8, 10),)


# Operators, flows and equations.


@zoo_model("neuraloperator", field="operators")
def fourier_operator() -> Any:
    from neuralop.models import FNO

    model = FNO(n_modes=(8, 8), hidden_channels=16, in_channels=1, out_channels=1, n_layers=3)
    return model, (images(16, channels=1),)


@zoo_model("neuraloperator", field="operators")
def u_shaped_operator() -> Any:
    from neuralop.models import UNO

    model = UNO(
        in_channels=1,
        out_channels=1,
        hidden_channels=8,
        uno_out_channels=[8, 16, 8],
        uno_n_modes=[[4, 4], [4, 4], [4, 4]],
        uno_scalings=[[1, 1], [0.5, 0.5], [2, 2]],
        channel_mlp_skip="linear",
        n_layers=3,
    )
    return model, (images(16, channels=1),)


@zoo_model("nflows", field="operators")
def autoregressive_flow() -> Any:
    from nflows.distributions.normal import StandardNormal
    from nflows.flows.base import Flow
    from nflows.transforms import (
        CompositeTransform,
        MaskedAffineAutoregressiveTransform,
        ReversePermutation,
    )

    layers: list[Any] = []
    for _ in range(3):
        layers.append(ReversePermutation(features=8))
        layers.append(MaskedAffineAutoregressiveTransform(features=8, hidden_features=16))
    flow = Flow(CompositeTransform(layers), StandardNormal([8]))

    class Likelihood(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.flow = flow

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.flow.log_prob(x)

    return Likelihood(), (torch.randn(8, 8),)


@zoo_model("torchdiffeq", field="operators")
def neural_equation() -> Any:
    from torchdiffeq import odeint

    class Dynamics(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Sequential(
                torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 8)
            )

        def forward(self, time: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return self.net(x)

    class Solver(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dynamics = Dynamics()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            times = torch.linspace(0, 1, 5, dtype=x.dtype)
            return odeint(self.dynamics, x, times, method="rk4")[-1]

    return Solver(), (torch.randn(8, 8),)


# Time series and tables.


@zoo_model("transformers", field="time series", short=True)
def patch_tst() -> Any:
    import transformers

    config = transformers.PatchTSTConfig(
        num_input_channels=3,
        context_length=32,
        patch_length=8,
        patch_stride=4,
        d_model=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        ffn_dim=64,
        prediction_length=8,
    )
    return transformers.PatchTSTForPrediction(config), {"past_values": torch.randn(4, 32, 3)}


@zoo_model("iTransformer", field="time series")
def inverted_transformer() -> Any:
    from iTransformer import iTransformer

    model = iTransformer(
        num_variates=6, lookback_len=32, dim=32, depth=3, heads=2, dim_head=16, pred_length=8
    )
    return model, (torch.randn(4, 32, 6),)


@zoo_model("transformers", field="time series")
def patch_mixer() -> Any:
    import transformers

    config = transformers.PatchTSMixerConfig(
        num_input_channels=3,
        context_length=32,
        patch_length=8,
        patch_stride=4,
        d_model=16,
        num_layers=3,
        prediction_length=8,
    )
    return transformers.PatchTSMixerForPrediction(config), {"past_values": torch.randn(4, 32, 3)}


@zoo_model("pytorch-tabnet", field="tables")
def tabnet() -> Any:
    from pytorch_tabnet.tab_network import TabNet

    model = TabNet(12, 3, n_d=8, n_a=8, n_steps=3, group_attention_matrix=torch.eye(12))
    return model, (torch.randn(16, 12),)


@zoo_model("rtdl-revisiting-models", field="tables")
def ft_transformer() -> Any:
    from rtdl_revisiting_models import FTTransformer

    model = FTTransformer(
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
    return model, (torch.randn(8, 6), None)


# Spiking and recurrent networks.


@zoo_model("snntorch", field="spiking", short=True)
def snntorch_net() -> Any:
    import snntorch

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(16, 64)
            self.spikes = snntorch.Leaky(beta=0.9)
            self.last = torch.nn.Linear(64, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            membrane = self.spikes.init_leaky()
            total = torch.zeros(x.shape[0], 4, dtype=x.dtype)
            for _ in range(8):
                spike, membrane = self.spikes(self.first(x), membrane)
                total = total + self.last(spike)
            return total

    return Net(), (torch.randn(8, 16),)


@zoo_model("spikingjelly", field="spiking")
def spikingjelly_net() -> Any:
    from spikingjelly.activation_based import functional, layer, neuron

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            stages = []
            for _ in range(3):
                stages.append(
                    torch.nn.Sequential(layer.Linear(16, 16), neuron.LIFNode(step_mode="s"))
                )
            self.stages = torch.nn.Sequential(*stages)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            functional.reset_net(self)
            return torch.stack([self.stages(x) for _ in range(6)]).mean(0)

    return Net(), (torch.randn(8, 16),)


@zoo_model("block-recurrent-transformer-pytorch", field="recurrent")
def block_recurrent() -> Any:
    from block_recurrent_transformer_pytorch import BlockRecurrentTransformer

    model = BlockRecurrentTransformer(
        num_tokens=97,
        dim=32,
        depth=3,
        dim_head=16,
        heads=2,
        max_seq_len=32,
        block_width=16,
        num_state_vectors=8,
        recurrent_layers=(2,),
    )
    return model, (tokens(97),)


@zoo_model("transformers", field="recurrent")
def rwkv() -> Any:
    import transformers

    config = transformers.RwkvConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=3, attention_hidden_size=32
    )
    ids = tokens(97, length=16)
    return transformers.RwkvForCausalLM(config), {"input_ids": ids, "labels": ids}
