"""Commit the checkpoints of other trainers, and find the newest one that is whole.

    commit_checkpoints(trainer)
    trainer.train(resume_from_checkpoint=newest_whole("output"))

`commit_checkpoints` takes a Trainer of Hugging Face, an Accelerator or a Trainer of Lightning. Each
checkpoint is then hashed, synced and gets a manifest that is renamed into place; old ones are
deleted after that. Where the library allows it, the checkpoint itself is written under another name
and renamed. `newest_whole` reads every byte, and returns the newest checkpoint that is what was
saved. `record_training` writes the journal of such a training.

Proof: `python -m pytest tests/runs/test_trainers.py`.
"""

import contextlib
import dataclasses
import functools
import json
import logging
import pkgutil
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from .files import StrPath, read, sizes, sync_folder, write
from .journal import Journal
from .layout import (
    MANIFEST_FILE_NAME,
    FileEntry,
    SavedCheckpoint,
    check_sizes,
    entry_of,
    parse_manifest,
    verify_files,
)
from .policy_config import SpikeConfig
from .ranks import DamagedCheckpoint, Ranks, RunError
from .spike import SpikeWatchdog

logger = logging.getLogger(__name__)

# Commit a folder or a file, and find the newest one that is whole.

FOREIGN_KIND = "trainer"
# A checkpoint whose deletion was interrupted.
LEFT_PATTERN = re.compile(r"\..+\.removed-[0-9a-f]{8}")
# One that is being written, or that a new save of its name has moved out of the way.
HIDDEN_PATTERN = re.compile(r"\.(?P<name>.+)\.hidden-[0-9a-f]{8}")
# Names that the three libraries give to checkpoints.
FOREIGN_NAME_PATTERN = re.compile(r"checkpoint[-_]\d+|.+\.ckpt")


def verify_commit(commit: SavedCheckpoint) -> None:
    """Read all files; raise DamagedCheckpoint at the first that is not what was saved."""
    path = commit.location
    if path.is_dir():
        check_sizes(commit)
    elif [*commit.files] != [path.name]:
        raise DamagedCheckpoint(f"{path}: its manifest is one of another file")
    verify_files(commit, commit.files)


def commit_folder(folder: StrPath) -> Path:
    """Hash and sync every file below a folder, and write its manifest; replaces an older one."""
    path = Path(folder)
    names = [name for name in sorted(sizes(path)) if name != MANIFEST_FILE_NAME]
    entries = {name: entry_of(path / name) for name in names}
    for below in {(path / name).parent for name in names}:
        sync_folder(below)
    write(path / MANIFEST_FILE_NAME, SavedCheckpoint(FOREIGN_KIND, 0, entries).render())
    sync_folder(path.parent)
    return path


def _sweep(final: Path) -> None:
    """Remove what interrupted saves of this name, and interrupted deletions, left beside it."""
    for path in final.parent.iterdir():
        if _find_final_name(path) == final != path or LEFT_PATTERN.fullmatch(path.name):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def _make_hidden_name(path: Path) -> Path:
    """Return a new name beside a checkpoint, which hides it from the library."""
    return path.with_name(f".{path.name}.hidden-{secrets.token_hex(4)}")


def _find_final_name(path: Path) -> Path:
    """Return the name of a checkpoint that may be hidden."""
    return path.with_name(HIDDEN_PATTERN.sub(r"\g<name>", path.name))


def commit_file(staged: Path, final: Path) -> None:
    """Hash and sync a file, and rename it; a crash leaves the old file or the new one, whole."""
    manifest = SavedCheckpoint(FOREIGN_KIND, 0, {final.name: entry_of(staged)})
    # Until the rename the manifest also accepts the file that is there now.
    with contextlib.suppress(DamagedCheckpoint, FileNotFoundError):
        before = read_commit(final)
        manifest = dataclasses.replace(manifest, before=(*before.files[final.name], before.date))
    write(_find_manifest(final), manifest.render())
    staged.replace(final)
    sync_folder(final.parent)
    _sweep(final)


def newest_whole(folder: StrPath) -> str | None:
    """Return the newest committed checkpoint below `folder` whose every byte is what was saved.

    None if there is none. Checkpoints that are damaged, or that were never committed, are named in
    a warning. With several ranks every rank calls this, and the first one reads.
    """

    def find() -> str | None:
        commits = _find_commits(Path(folder))
        for commit in sorted(commits, key=lambda one: one.date, reverse=True):
            try:
                verify_commit(commit)
            except (DamagedCheckpoint, OSError) as error:
                logger.warning("a damaged checkpoint is passed over: %s", error)
                continue
            return str(_show(commit.location))
        return None

    return Ranks.on_the_host().agree(find)


def _find_commits(folder: Path) -> Iterator[SavedCheckpoint]:
    """Yield what is committed below a folder, such as in `lightning_logs/version_0/checkpoints`."""
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or LEFT_PATTERN.fullmatch(path.name):
            continue
        try:
            yield read_commit(path)
        except FileNotFoundError:
            if FOREIGN_NAME_PATTERN.fullmatch(path.name):
                logger.warning("%s was never committed, and is passed over", path)
        except (DamagedCheckpoint, OSError) as error:
            logger.warning("a damaged checkpoint is passed over: %s: %s", path, error)


def read_commit(path: Path) -> SavedCheckpoint:
    """Read the manifest of a folder or a file; raise FileNotFoundError if it has none."""
    manifest = parse_manifest(read(_find_manifest(path)))
    if manifest.kind != FOREIGN_KIND:
        raise DamagedCheckpoint(f"its manifest is one of {manifest.kind!r:.40}, not of a trainer")
    # A crash between manifest and rename leaves the file that was there before.
    if manifest.before and path.is_file():
        *old, date = manifest.before
        if entry_of(path) == tuple(old):
            files = {path.name: FileEntry(*old)}
            manifest = dataclasses.replace(manifest, files=files, date=date)
    return dataclasses.replace(manifest, location=path)


def _find_manifest(path: Path) -> Path:
    if path.is_dir():
        return path / MANIFEST_FILE_NAME
    return path.with_name(f"{path.name}.{MANIFEST_FILE_NAME}")


def _show(path: Path) -> Path:
    """Give a committed checkpoint its name, in place of another one; return its path."""
    final = _find_final_name(path)
    # Another process that looked for the newest checkpoint may have renamed it just now.
    if final != path and path.exists():
        if final.exists():
            _remove(final)
        path.rename(final)
        sync_folder(final.parent)
    return final


def _remove(path: Path) -> None:
    """Remove a folder; an interruption leaves a hidden folder and no half checkpoint."""
    hidden = path.with_name(f".{path.name}.removed-{secrets.token_hex(4)}")
    path.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def _commit_in_place(
    written: Path, pattern: str, limit: int | None, keep: Path | None = None
) -> Path:
    """Commit a folder and give it its name; return its path.

    Of the folders beside it of this pattern all but the newest `limit` and `keep` are deleted,
    first those that were never committed.
    """
    commit_folder(written)
    final = _show(written)
    _sweep(final)
    if not limit or limit < 0:
        return final
    folders = sorted(one for one in final.parent.glob(pattern) if one.is_dir())
    folders.sort(key=_read_date)
    spare = [path for path in folders[:-1] if path != keep]
    for path in spare[: max(0, len(folders) - limit)]:
        _remove(path)
    return final


def _read_date(path: Path) -> str:
    """Return when a folder was committed; nothing for one that was not."""
    with contextlib.suppress(FileNotFoundError, DamagedCheckpoint):
        return read_commit(path).date
    return ""


# The three libraries.


def commit_checkpoints(trainer: Any) -> Any:
    """Commit each checkpoint of a Hugging Face Trainer, an Accelerator or a Lightning Trainer.

    Returns what it was given. Deletion by `save_total_limit` and `total_limit` goes on, and follows
    the commit of the newer checkpoint.
    """
    return add_to(trainer, COMMITS, otherwise="commit its folders with commit_folder")


# The library of a package, and where its callbacks are.
LIBRARIES = {
    "transformers": ("transformers", "transformers.TrainerCallback"),
    "accelerate": ("accelerate", ""),
    "lightning": ("lightning", "lightning.pytorch.callbacks.Callback"),
    "pytorch_lightning": ("lightning", "pytorch_lightning.callbacks.Callback"),
}


def library_of(trainer: Any, *, otherwise: str) -> tuple[str, str]:
    """Return which library a trainer is of, and where its callbacks are.

    `otherwise` ends the error for other objects.
    """
    for one in type(trainer).__mro__:
        package = one.__module__.partition(".")[0]
        if package in LIBRARIES:
            return LIBRARIES[package]
    raise TypeError(
        f"a {type(trainer).__name__} is no Trainer of transformers or Lightning and no "
        f"Accelerator: {otherwise}"
    )


def add_to(trainer: Any, additions: Mapping[str, Any], *args: Any, otherwise: str = "") -> Any:
    """Call a function or a class, chosen by the trainer's library, with it; return the trainer.

    What a class makes becomes a callback of a Trainer of Hugging Face or Lightning.
    """
    library, path = library_of(trainer, otherwise=otherwise)
    make = additions[library]
    if not path or not isinstance(make, type):
        make(trainer, *args)
        return trainer
    bases = make, pkgutil.resolve_name(path)
    callback = type(make.__name__.lstrip("_"), bases, {})(trainer, *args)
    if library == "transformers":
        trainer.add_callback(callback)
    else:
        # Before those that save, which an end of the training must reach first.
        trainer.callbacks.insert(0, callback)
    return trainer


def replace_calls(owner: Any, **functions: Callable[..., Any]) -> None:
    """Replace methods of an object by functions that get the original first."""
    for name, function in functions.items():
        setattr(owner, name, functools.partial(function, getattr(owner, name)))


class _HuggingFaceCommits:
    """Commits after each save; an older checkpoint of its name is hidden meanwhile."""

    def __init__(self, trainer: Any) -> None:
        if trainer.args.save_on_each_node:
            raise ValueError("save_on_each_node writes folders that the first rank can't commit")
        self._trainer = trainer
        self._limit: int | None = None
        self._ranks = Ranks.on_the_host()
        replace_calls(trainer, save_model=self._save_model)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        step = state.global_step
        if step >= state.max_steps > 0 and state.is_world_process_zero:
            logger.warning(
                "step %d of %d was saved already, and the Trainer trains step %d now: raise "
                "max_steps or num_train_epochs, or leave out train() where the run has finished",
                step,
                state.max_steps,
                step + 1,
            )

    def _save_model(
        self, save: Any, output_dir: str | None = None, _internal_call: bool = False
    ) -> None:
        """Write the first files of a checkpoint, or those that the user asks for."""
        if _internal_call and output_dir is not None:
            # A kill in the middle of the save must leave the older one.
            self._ranks.agree(lambda: _hide(Path(output_dir)))
            # The Trainer would delete older checkpoints before the new one is committed.
            # None is what an earlier save has left, if it ended with an error.
            args = self._trainer.args
            if args.save_total_limit is not None:
                self._limit = args.save_total_limit
            args.save_total_limit = None
        save(output_dir, _internal_call)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        path = Path(args.output_dir, f"checkpoint-{state.global_step}")
        best = state.best_model_checkpoint
        keep = best and Path(best)
        # Every rank has written its part when the first one begins to hash.
        self._ranks.collect(
            lambda: None, lambda _: _commit_in_place(path, "checkpoint-*", self._limit, keep)
        )
        args.save_total_limit = self._limit


def _hide(path: Path) -> None:
    """Rename a committed checkpoint, so that a new save can't destroy it."""
    if (path / MANIFEST_FILE_NAME).is_file():
        path.rename(_make_hidden_name(path))


def _commit_accelerator(accelerator: Any) -> None:
    """Replace `save_state`: write under another name, commit, and rename."""
    configuration = accelerator.project_configuration
    # Accelerate would delete older checkpoints before it writes the new one.
    limit = configuration.total_limit
    configuration.total_limit = None
    ranks = Ranks.on_the_host()

    def save_state(save: Any, output_dir: Any = None, *args: Any, **options: Any) -> str:
        names = configuration.automatic_checkpoint_naming
        place = output_dir
        if not names:
            if output_dir is None:
                raise ValueError(
                    "save_state needs a folder, unless automatic_checkpoint_naming is on"
                )
            place = ranks.agree(lambda: str(_make_hidden_name(Path(output_dir))))
        kept = limit if names else None
        return ranks.collect(
            lambda: save(place, *args, **options),
            lambda written: str(_commit_in_place(Path(written[0]), "checkpoint_*", kept)),
        )

    replace_calls(accelerator, save_state=save_state)


def commit_files(io: Any) -> None:
    """Commit each file that a CheckpointIO of Lightning saves, and verify those that it loads."""
    replace_calls(
        io,
        save_checkpoint=_save_committed,
        load_checkpoint=_load_verified,
        remove_checkpoint=_remove_committed,
    )


def _save_committed(save: Any, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
    """Write a checkpoint under another name, and commit it."""
    if "://" in str(path):
        raise ValueError(f"{path} is no local path: only local checkpoints are committed")
    final = Path(path)
    final.parent.mkdir(parents=True, exist_ok=True)
    staged = _make_hidden_name(final)
    save(checkpoint, str(staged), storage_options=storage_options)
    commit_file(staged, final)


def _load_verified(load: Any, path: Any, *args: Any, **options: Any) -> Any:
    with contextlib.suppress(FileNotFoundError):
        verify_commit(read_commit(Path(path)))
    return load(path, *args, **options)


def _remove_committed(remove: Any, path: Any) -> None:
    remove(path)
    _find_manifest(Path(path)).unlink(missing_ok=True)


COMMITS = {
    "transformers": _HuggingFaceCommits,
    "accelerate": _commit_accelerator,
    "lightning": lambda trainer: commit_files(trainer.strategy.checkpoint_io),
}


# Record the journal of other trainers, and stop at a loss spike.


def record_training(trainer: Any, folder: StrPath, *, watch: SpikeConfig | None = None) -> Any:
    """Write the journal of a Trainer of Hugging Face or Lightning, or of an Accelerator's loop.

    The journal has the loss of each step, and of Hugging Face's Trainer the losses that it logs: of
    each step with `logging_steps=1`. `watch` turns the detection of spikes on: a spike is a
    warning, and with the action `rollback` it ends the training, which saves nothing more, so that
    the next start may resume from an older checkpoint; under Accelerate it ends with a RunError.
    Hugging Face logs a NaN only with `logging_nan_inf_filter=False`. Returns what it was given.
    """
    advice = "call saving(..., journal=True) in the loop"
    return add_to(trainer, JOURNALS, folder, watch, otherwise=advice)


class _WatchedJournal:
    """The journal of a training, and the watchdog over its losses."""

    def __init__(self, trainer: Any, folder: StrPath, watch: SpikeConfig | None) -> None:
        self._trainer = trainer
        self._folder = Path(folder)
        self._watchdog = SpikeWatchdog(watch or {"action": "none"})
        # The journal, from the first step to the end of a training.
        self.journal: Any = None
        # The spike that ends the training.
        self.reason = ""
        # The losses of the batches since the last step.
        self.losses: list[Any] = []

    def begin(self, step: int, *, config: dict[str, Any]) -> None:
        self.ranks = Ranks.on_the_host()
        self._folder.mkdir(parents=True, exist_ok=True)
        facts = {"config": config}
        self.journal = Journal(self._folder, step=step, facts=facts, rank=self.ranks.rank)

    def step(self, step: int, loss: float, rate: Any, norm: Any = None) -> None:
        """Record a step, and look for a spike."""
        self.journal.write("step", step=step, loss=loss, learning_rate=rate, grad_norm=norm)
        config = self._watchdog.config
        spike = None if config.action == "none" else self._watchdog.observe(step, loss)
        if spike is not None:
            self.journal.write("spike", step=step, reason=spike.words, loss=spike.loss)
            words = spike.words
            if config.rolls_back:
                words += f": start again from a checkpoint from before step {spike.first}"
                self.reason = self.reason or words
            logger.warning("%s", words)

    def mean_loss(self) -> float:
        """Return the loss of the step that was just made, and begin that of the next one."""
        total = float(sum(self.losses))
        self.losses.clear()
        return self.ranks.mean(total)

    def end(self, step: int, otherwise: str = "steps") -> None:
        if self.journal is not None:
            self.journal.write("stop", step=step, reason=self.reason or otherwise)
            self.journal.close()
        self.journal = None
        self.reason = ""


class _HuggingFaceJournal(_WatchedJournal):
    """Records what a Trainer of Hugging Face logs."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.begin(state.global_step, config=args.to_sanitized_dict())

    def on_log(
        self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] = {}, **_: Any
    ) -> None:
        # A call of `evaluate` before or after the training logs, too.
        if self.journal is None:
            return
        step = state.global_step
        if "loss" in logs:
            self.step(step, logs["loss"], logs.get("learning_rate", 0.0), logs.get("grad_norm"))
            control.should_training_stop |= bool(self.reason)
        if "eval_loss" in logs:
            self.journal.write("eval", step=step, metric="eval_loss", value=logs["eval_loss"])
        # A state after a spike is not saved, neither at its step nor at the end of its epoch.
        control.should_save &= not self.reason

    on_epoch_end = on_log

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.end(state.global_step)


class _LightningJournal(_WatchedJournal):
    """Records the loss of each optimizer step of Lightning's Trainer."""

    _seen = 0
    # Callbacks that save, which would do so after a spike, and delete an older checkpoint.
    _resting: Any = ()

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self._seen = trainer.global_step
        config = {"max_steps": trainer.max_steps, "precision": trainer.precision}
        self.begin(trainer.global_step, config=config)

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        own = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if own is None:
            return
        # Lightning has divided the loss by the number of batches of the step.
        self.losses.append(own.detach())
        if trainer.global_step == self._seen:
            return
        self._seen = trainer.global_step
        self.step(self._seen, self.mean_loss(), trainer.optimizers[0].param_groups[0]["lr"])
        if self.reason:
            trainer.should_stop = True
            self._resting = trainer.checkpoint_callbacks
            for one in self._resting:
                trainer.callbacks.remove(one)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.end(trainer.global_step)

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        trainer.callbacks += self._resting
        self._resting = ()


# Accelerate counts no steps, so its checkpoints hold their number in this file.
STEP_FILE_NAME = "journal_step.json"


class _AcceleratorJournal(_WatchedJournal):
    """Records the loss of each optimizer step of a loop that trains with an Accelerator."""

    _step = 0
    _norm: Any = None
    _has_hook = False

    def __init__(self, accelerator: Any, *args: Any) -> None:
        super().__init__(accelerator, *args)
        if accelerator.state.deepspeed_plugin is not None:
            raise ValueError("DeepSpeed steps inside of its engine: write the journal in the loop")
        accelerator.register_save_state_pre_hook(self._save)
        accelerator.register_load_state_pre_hook(self._load)
        replace_calls(
            accelerator,
            backward=self._on_backward,
            clip_grad_norm_=self._clip,
            end_training=self._end,
        )

    def _on_backward(self, backward: Callable[..., Any], loss: Any, **options: Any) -> None:
        backward(loss, **options)
        # As Accelerate divides it for the gradient.
        mean = loss.detach().float() / self._trainer.gradient_accumulation_steps
        self.losses.append(mean)
        if not self._has_hook:
            self._trainer._optimizers[0].optimizer.register_step_post_hook(self._on_step)
            self._has_hook = True

    def _clip(self, clip: Callable[..., Any], *args: Any, **options: Any) -> Any:
        self._norm = clip(*args, **options)
        return self._norm

    def _on_step(self, optimizer: Any, args: Any, options: Any) -> None:
        if not self.losses:
            return
        self._begin()
        self._step += 1
        self.step(self._step, self.mean_loss(), optimizer.param_groups[0]["lr"], self._norm)
        self._norm = None
        if reason := self.reason:
            self.end(self._step)
            raise RunError(reason)

    def _begin(self) -> None:
        if self.journal is None:
            accelerator = self._trainer
            config = {
                "gradient_accumulation_steps": accelerator.gradient_accumulation_steps,
                "mixed_precision": str(accelerator.mixed_precision),
            }
            self.begin(self._step, config=config)

    def _save(self, models: Any, weights: Any, folder: str) -> None:
        self._begin()
        place = Path(folder).resolve()
        if self._trainer.is_main_process:
            (place / STEP_FILE_NAME).write_text(json.dumps(self._step))
        self.journal.write("save", step=self._step, checkpoint=str(_find_final_name(place)))

    def _load(self, models: Any, folder: str) -> None:
        """Go on from the step that a state was saved at."""
        found = Path(folder, STEP_FILE_NAME)
        if found.is_file():
            self._step = int(json.loads(found.read_text()))
        else:
            logger.warning("%s was saved without a journal: its steps count on", folder)
        self.end(self._step, "another state is loaded")

    def _end(self, end: Callable[..., Any], *args: Any, **options: Any) -> Any:
        self.end(self._step)
        return end(*args, **options)


JOURNALS = {
    "transformers": _HuggingFaceJournal,
    "accelerate": _AcceleratorJournal,
    "lightning": _LightningJournal,
}
