"""Floor 1: one file per technique, each usable on its own. Imports core at most."""

from ..core.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "checkpoint_config": ("CheckpointConfig",),
        "grad_accum": ("GradientAccumulation", "NonFiniteWindow", "Window", "WindowResult", "train_window"),
        "recompute": ("CheckpointWrapper", "Recompute", "recompute_blocks", "remove_recompute"),
        "regions": ("apply_regions", "remove_regions", "report_regions"),
        "sac": ("POLICIES", "apply_sac", "remove_sac"),
        "segments": ("choose_segments", "recompute_segments", "remove_segments"),
    },
    technique_of={"checkpoint_config": "recompute", "regions": "sac", "segments": "recompute"},
)
