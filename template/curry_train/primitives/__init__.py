"""Memory and training techniques, one module each, usable alone; they import only `core`."""

from ..core.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "checkpoint_config": ("CheckpointConfig",),
        "chunked_loss": (
            "LossUse",
            "apply_chunked_loss",
            "chunked_cross_entropy",
            "chunked_loss_report",
            "remove_chunked_loss",
        ),
        "grad_accum": (
            "GradientAccumulation",
            "NonFiniteWindow",
            "Window",
            "WindowResult",
            "train_window",
        ),
        "grad_flow": ("GradFlow",),
        "memory_budget": ("BudgetUnsafe", "memory_budget", "remove_memory_budget"),
        "offload": ("HostMemoryShort", "offload_blocks", "offload_report", "remove_offload"),
        "recompute": ("CheckpointWrapper", "Recompute", "recompute_blocks", "remove_recompute"),
        "regions": ("apply_regions", "remove_regions", "report_regions"),
        "sac": ("POLICIES", "apply_sac", "remove_sac"),
        "segments": ("choose_segments", "recompute_segments", "remove_segments"),
        "snn_timesteps": (
            "HiddenState",
            "checkpoint_timesteps",
            "choose_chunk_size",
            "recompute_timesteps",
            "remove_timesteps",
            "run_timesteps",
        ),
    },
    technique_of={
        "checkpoint_config": "recompute",
        "chunked_loss": "memory-plan",
        "memory_budget": "recompute",
        "offload": "recompute",
        "regions": "sac",
        "segments": "recompute",
    },
)
