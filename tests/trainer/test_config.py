"""Read a configuration from a file and words, and name every mistake.

Run with `python -m pytest tests/trainer/test_config.py`.
"""

import math
import re
import shlex

import pytest
import yaml

from curry_train.config import Config, load_config
from curry_train.runs.policy_config import flat_keys


def write(path, text):
    path.write_text(text)
    return path


def test_words_override_the_file_and_the_file_overrides_defaults(tmp_path):
    path = write(tmp_path / "c.yaml", "steps: 50\noptimizer: {learning_rate: 1e-4, beta2: 0.99}\n")
    config = load_config(
        path, ["optimizer.learning_rate=3e-4", "recompute.strategy=sac", "clip_norm=null"]
    )
    assert (config.steps, config.optimizer.beta2, config.clip_norm) == (50, 0.99, None)
    assert config.optimizer.learning_rate == 3e-4  # YAML itself reads 3e-4 as text
    assert config.recomputation().enabled
    assert config.recomputation().strategy == "sac"
    assert config.seed == Config().seed


def test_every_key_can_be_set_by_a_word():
    """Reach every key from the command line, since any other could not be used."""
    config = Config()
    for key in flat_keys(Config):
        value = config
        for part in key.split("."):
            value = getattr(value, part)
        assert (
            load_config(
                None, [f"{key}={yaml.safe_dump(value, default_flow_style=True).split(chr(10))[0]}"]
            )
            == config
        )


def test_naming_a_strategy_turns_recompute_on_unless_enabled_is_false():
    assert not Config().recomputation().enabled
    assert (
        load_config(None, ["recompute={strategy: plan, plan: plan.json}"]).recomputation().enabled
    )
    assert (
        not load_config(None, ["recompute={strategy: full, enabled: false}"])
        .recomputation()
        .enabled
    )


def test_warm_up_defaults_to_a_twentieth_of_the_steps():
    assert load_config(None, ["steps=200"]).schedule.warmup(200) == 10
    assert load_config(None, ["steps=5"]).schedule.warmup(5) == 0
    assert load_config(None, ["schedule.warmup_steps=7"]).schedule.warmup(300) == 7


CHECKPOINT_BLOCK = """
checkpoint: {rollback_every: 100, recovery_every: 1000, best_k: 3, best_k_metric: dev_loss,
             best_k_direction: minimize, retention: {rollback_keep: 5, recovery_keep: 3},
             overhead: 0.035}
"""


def test_the_documented_block_of_checkpoints_is_the_default(tmp_path):
    assert load_config(write(tmp_path / "c.yaml", CHECKPOINT_BLOCK)) == Config()


MISTAKES = """
stpes=3                    | stpes is no key; did you mean 'steps'?
learning_rate=3            | learning_rate is no key; did you mean 'optimizer.learning_rate'?
steps                      | 'steps' sets nothing: write key=value
steps=many                 | steps must be a whole number; got 'many'
steps=[                    | steps=[ is not a YAML value
precision=fp16             | precision must be float32 or bfloat16 or float16; got 'fp16'
seed=9223372036854775808   | seed must be from 0 to below 2**63; got 9223372036854775808
optimizer.learning_rate=0  | optimizer.learning_rate must be a number above 0; got 0
optimizer.learning_rate=.inf | optimizer.learning_rate must be a number above 0; got inf
optimizer.beta1=1          | optimizer.beta1 must be from 0 to below 1; got 1
recompute.exclude_patterns=5 | exclude_patterns must be a list of globs over module names
clip_norm=0                | clip_norm must be above 0, or null; got 0
name=a/b                   | name must be the name of a folder; got 'a/b'
recompute.strategy=sacc    | recompute: no strategy is called 'sacc'; did you mean 'sac'?
recompute.strategy=sequental       | did you mean 'sequential'
recompute.use_reentrant=3          | recompute: use_reentrant must be True or False; got 3
'recompute={use_reentrant: true, strategy: sequential}' \
                       | use_reentrant=True has no effect with sequential, only with full, selective
'recompute={preserve_rng_state: false, strategy: regions}' | has no effect with regions
'recompute={sequential_segments: 2, strategy: full}'       | only with sequential: leave it out
recompute.snn_chunk_size=2         | only with snn_timestep_checkpoint
recompute.memory_treshold_mb=3     | did you mean 'memory_threshold_mb'
recompute.memory_threshold_mb=.nan | memory_threshold_mb must be a number of MB from 0 up; got nan
recompute.profile_num_runs=-2      | profile_num_runs must be a whole number from 0 up; got -2
'recompute={strategy: plan, plan: 5}' | plan must be the path of a plan with strategy 'plan'
recompute.strategy=plan \
                 | plan must be the path of a plan with strategy 'plan', None with others; got None
'recompute={strategy: full, plan: plan.json}'              | None with others; got 'plan.json'
data.source=tokens         | data.path must be a glob where source is tokens; got None
checkpoint.best_k_metric=accuracy \
  | checkpoint.best_k_metric must be dev_loss or loss, the metrics that this loop \
measures; got 'accuracy'
dtype=bfloat16 precision=float16    | precision must be bfloat16 or float32 for bfloat16 weights
steps=10 schedule.warmup_steps=11 \
                           | schedule.warmup_steps must be from 0 to the 10 steps of the run; got 11
schedule.least=1.5         | schedule.least must be from 0 to 1
spike.window=4             | spike.window must be 16 or more; got 4
spike.least_rise=1.5       | spike.least_rise must be from 0 to below 1; got 1.5
spike.action=rollback 'checkpoint={rollback_every: null, recovery_every: null}' \
                           | spike.action must be warn or none, or
spike.action=rollback 'checkpoint={rollback_every: 1}' \
                           | rollback_every x (checkpoint.retention.rollback_keep - 1) at least 11
steps=48 batch_size=4 microbatch=2 'data.skip=[[400, 500]]' \
           | data.skip must be of positions that the run reaches; 48 steps of 4 end at 192
data.skip=[[5,5]]          | data.skip must be pairs such as [[5760, 5888]]
data=5 data.length=3       | data is 5, so that data.length can't be set
data.length=3 data=5       | data must be a block of keys, got 5
'checkpoint={rollback_evry: 5}'     | checkpoint.rollback_evry is no key; did you mean
checkpoint.rollback_every=0 \
                 | checkpoint.rollback_every must be 1 or more, or null for none; got 0
checkpoint.rollback_every=true      | checkpoint.rollback_every must be
checkpoint.overhead=0               | checkpoint.overhead must be above 0, at most 1; got 0
checkpoint.recovery_every=auto      | checkpoint.recovery_every must be a whole number or null
'checkpoint.best_k_metric=dev loss' | letters, digits and _, such as dev_loss
checkpoint.best_k_direction=min \
                 | checkpoint.best_k_direction must be minimize or maximize; got 'min'
checkpoint.retention=5              | checkpoint.retention must be a block of keys, got 5
'checkpoint.retention={keep_every: 0}' \
                       | checkpoint.retention.keep_every must be 1 or more, or null for none
"""


@pytest.mark.parametrize("row", MISTAKES.strip().splitlines())
def test_a_mistake_is_named_with_what_is_right(row):
    words, _, message = row.partition("|")
    with pytest.raises(ValueError, match=re.escape(message.strip())):
        load_config(None, shlex.split(words))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", r"c\.yaml is not valid YAML"),
        ("- a", r"c\.yaml must hold keys and values, such as 'steps: 300'; got list"),
        ("data: {path: [1]}", r"data\.path must be text or null; got \[1\]"),
    ],
)
def test_an_invalid_file_is_refused(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        load_config(write(tmp_path / "c.yaml", text))


def test_a_word_may_set_a_block_and_another_a_key_of_it():
    assert load_config(None, ["data={length: 4}", "data.length=3"]).data.length == 3
    config = load_config(None, ["spike.action=rollback", "spike={window: 16}"])
    assert (config.spike.action, config.spike.window) == ("rollback", 16)


@pytest.mark.parametrize(
    ("settings", "factors"),
    [
        (
            {"warmup_steps": 0, "least": 0},
            {0: 1.0, 25: (1 + math.cos(math.pi / 4)) / 2, 100: 0.0},
        ),
        (
            {"warmup_steps": 10, "least": 0.1},
            {0: 0.1, 4: 0.5, 9: 1.0, 10: 1.0, 100: 0.1, 10_000: 0.1},
        ),
        (
            {"warmup_steps": 0, "least": 0.5, "shape": "linear"},
            {0: 1.0, 50: 0.75, 100: 0.5},
        ),
        ({"warmup_steps": 2, "shape": "constant"}, {0: 0.5, 1: 1.0, 100: 1.0}),
    ],
)
def test_the_rate_rises_in_the_warm_up_and_falls_by_its_shape_to_the_least(settings, factors):
    words = [f"schedule.{name}={value}" for name, value in settings.items()]
    factor = load_config(None, ["steps=101", *words]).learning_rates()
    assert {step: factor(step) for step in factors} == pytest.approx(factors)
