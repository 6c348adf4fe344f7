"""The techniques: what a training step imports."""

from ..core import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "chunked_loss": (
            "LossUse",
            "apply_chunked_loss",
            "chunked_loss_report",
            "remove_chunked_loss",
        ),
        "cross_entropy": ("chunked_cross_entropy", "chunked_log_probabilities"),
        "compile_budget": ("BudgetUnsafe", "memory_budget", "remove_memory_budget"),
        "grad_accum": (
            "GradientAccumulation",
            "NonFiniteWindow",
            "StepInBackward",
            "Window",
            "WindowResult",
            "train_window",
        ),
        "grad_flow": ("GradFlow",),
        "grad_flow_report": ("flow_findings", "flow_json", "flow_table"),
        "offload": ("HostMemoryShort", "offload_blocks", "offload_report", "remove_offload"),
        "recompute": (
            "CheckpointWrapper",
            "Recompute",
            "plain_blocks",
            "recompute_blocks",
            "remove_recompute",
        ),
        "segments": ("ChainBroken", "recompute_segments", "remove_segments"),
        "regions": ("apply_regions", "remove_regions"),
        "routing": ("keep_routing",),
        "sac": ("POLICIES", "apply_sac", "remove_sac"),
        "strategies": (
            "CheckpointConfig",
            "STRATEGIES",
            "Sample",
            "Strategy",
            "apply_config",
            "choose_segments",
        ),
        "snn_timesteps": (
            "HiddenState",
            "checkpoint_timesteps",
            "run_timesteps",
        ),
        "unroll": ("recompute_timesteps", "remove_timesteps"),
    },
)
