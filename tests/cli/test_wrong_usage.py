"""Each mistake on the command line is one line and status 2.

python -m pytest tests/cli/test_wrong_usage.py
"""

import importlib.util
import json
import re
import sys

import pytest
import torch

from curry_train.cli.main import main

from ..command_runs import flat, in_python, ran, read_json

MODELS = """
import os
import sys

import torch
from torch import nn

print("importing")

def blocks():
    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)]), torch.randn(8, 8)

def loud():
    print("building", os.chdir("/"))
    return blocks()

def child():
    os.system("echo building")
    return blocks()

def raises():
    raise KeyError("weights")

def wrong():
    return "model", 3

def other():
    return nn.Embedding(8, 8), torch.randint(8, (4, 3))

def mismatch():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(8, 31)

def guessed():
    return nn.Sequential(nn.Flatten(0), nn.Linear(4, 4))

# These end Python, or raise what is no Exception.

def exits():
    sys.exit(3)

class Strange(BaseException):
    pass

def strange():
    raise Strange("no weights")

def lines():
    raise RuntimeError("no weights\\nin two lines")

class Net(nn.Linear):
    def forward(self, x):
        sys.exit("in forward")

def exits_in_forward():
    return Net(3, 3), torch.randn(4, 3)

def fails_in_backward():
    net = nn.Linear(3, 3)
    net.weight.register_hook(lambda gradient: {}["weights"])
    return net, torch.randn(4, 3)
"""

MISTAKES = """
bench                                       | give either --model, --trainer or --script
bench --model mlp --trainer a:b             | give either --model, --trainer or --script
bench --model bert                          | no workload is called 'bert'
bench --model mlp --lever ful               | no lever is called 'ful'; did you mean 'full'?
bench --model mlp --lever zzzz              | no lever is called 'zzzz'; there are none, full,
bench --model mlp --lever full+regoins      | did you mean 'regions'
bench --model mlp --lever ''                | no lever is called ''
bench --model mlp --lever accumulate        | accumulate takes a number of microbatches, such as accumulate=4; got None
bench --model mlp --lever accumulate=0      | got '0'
bench --model mlp --lever accumulate=two    | got 'two'
bench --model mlp --lever full=3            | the lever 'full' takes no value, got '3': leave it out
bench --model mlp --lever autocast:fp16     | the lever 'autocast' takes no value
bench --model mlp --lever plan=no:file      | Error: can't read the plan no:file: No such file or directory; write one with curry-train plan --out
bench --model mlp --lever plan              | Error: can't read the plan : Is a directory; write one
bench --model mlp --against absent:build    | can't import absent
bench --model mlp --optimizer adamx         | no optimizer is called 'adamx'
bench --model mlp --optimizer lion_32bit    | 'lion_32bit'; use one of
bench --model mlp --blocks layers.*         | the pattern 'layers.*' matches no module
bench --model mlp --steps 0                 | 0 is not in the range x>=1
bench --model mlp --seed 12345678901234567890 | is not in the range 0<=x<=9223372036854775807
validate --list --json -                    | there are no results to write: leave --json out
bench --model mlp --peak fast               | 'fast' is not a peak: give TFLOP/s, such as 989, or 'measured'
bench --model mlp --peak -3                 | '-3' is not a peak
bench --model mlp --plot absent/bench.png   | create it first
bench --model made.py:blocks --against made.py:other | made.py:other can't take the batch of made.py:blocks, on which both are compared
bench --model mlp now                       | 'now' is for no script: give --script FILE
bench --model mlp --factory f.py            | --factory writes what --script has read
grad-flow --model mlpp                      | no workload is called 'mlpp'
grad-flow --model mlp --layers blocks.*     | layers 'blocks.*' matches no module; there are 0, 0.0
grad-flow --model mlp --blocks 9.*          | pattern '9.*' matches no module
grad-flow --model mlp --learning-rate inf   | inf is not a finite number
grad-flow --model mlp --steps 0             | Invalid value for '--steps'
grad-flow --model mlp --plot nowhere/f.png  | create it first
train stpes=3                               | Error: stpes is no key; did you mean 'steps'?
train --config none.yaml                    | can't read the configuration none.yaml: No such file or directory
train --resume latest                       | has a saved state to resume from
train parallel=ddp                          | this is a single process: start it with torchrun --nproc-per-node 2
train parallel=fsdp2 ranks=8 batch_size=128 | torchrun --nproc-per-node 8 train.py parallel=fsdp2
train data.source=workload model=mlp microbatch=8 batch_size=8 runs=made.py/runs | runs=made.py/runs: no run can be written there (Not a directory): give
train model=mlp                             | this one takes tuple: use data.source=workload
train model=mlp data.source=os:cpu_count    | a dataset has a length and samples by number; got int
train model=tests.training_models:few_tokens      | text needs a vocabulary of 256 bytes, and transformer has 100 tokens
train model=tests.training_models:tiny data.length=20 | data.length=20: transformer can't take such a sample
train model=tests.training_models:tiny data.length=20 | use shorter ones, data.length=null for the length of its own batch
train model=tests.training_models:tiny 'recompute={strategy: full, exclude_patterns: [nothing]}' | exclude_patterns 'nothing' matches no module; there are
train model=tests.training_models:tiny 'recompute={strategy: full, include_patterns: [nothing]}' | include_patterns 'nothing' matches no module; there are
train model=tests.training_models:tiny 'recompute={strategy: plan, plan: none.json}' | can't read the plan none.json
train model=tests.training_models:tiny 'recompute={strategy: selective, memory_threshold_mb: 1000}' | recompute.strategy=selective changes no layer of transformer: lower
memory                                      | give either --model or --snapshot
memory --model bert                         | neither pkg.module:factory nor file.py:factory; there are mlp, transformer, resnet, snn
memory --model transfomer                   | nor file.py:factory; did you mean 'transformer'?
memory --model net/model.py                 | net/model.py names no function: add one, as in net/model.py:build
memory --model net.model                    | as in net.model:build
memory --model made.py:                     | made.py: names no function: add one, as in made.py:build
memory --trainer made                       | made names no function: add one, as in made:build
validate --model made.py:blocks --shrink 5  | Error: --shrink 5: Sequential has no
memory --model absent_module:build          | can't import absent_module. Run from the folder that holds it
memory --model mlp --blocks layers.*        | the pattern 'layers.*' matches no module
memory --model mlp --plot absent/step.png   | create it first
memory --model mlp --snapshot made.py       | give either --model or --snapshot
memory --snapshot made.py --dtype bfloat16  | runs no model: leave out --dtype
memory --snapshot made.py                   | is no CUDA memory snapshot
memory --model made.py:exits                | the factory raised SystemExit: 3 (made.py:39)
memory --model made.py:strange              | the factory raised Strange: no weights (made.py:45)
preflight --trainer made.py:strange         | Error: made.py:strange: the factory raised Strange: no weights (made.py:45)
preflight --trainer absent:make             | Error: absent:make: can't import absent. Run
preflight --trainer made.py:blocks          | Error: Sequential has no loop: give its script by --script
memory --model made.py:lines                | the factory raised RuntimeError: no weights in two lines (made.py:48)
memory --model made.py:exits_in_forward     | a forward on the batch raised SystemExit: in forward (made.py:52)
memory --model made.py:fails_in_backward    | Error: KeyError: 'weights' (made.py:59)
plan --model mlp                            | a plan needs a --budget
plan --fits h100 --trainer nowhere.py:make  | Error: nowhere.py:make: there is no file
plan --fits h100 --script nowhere.py        | Error: there is no file nowhere.py
PLAN --budget 24                            | '24' has no unit: write 24GiB or 24MiB (2**30 and 2**20 bytes), or 24B
PLAN --budget 1048575                       | '1048575' has no unit: write 1048575GiB
PLAN --budget 0.1B                          | must be at least 1 byte
PLAN --budget GiB                           | 'GiB' is not a memory size: write a number and a unit, such as 24GiB
PLAN --budget 24G                           | has the unit 'G': use one of B, KB, MB, GB, TB, KiB, MiB, GiB, TiB
PLAN --budget 0                             | must be at least 1 byte
PLAN --budget -1                            | must be at least 1 byte
PLAN --budget abc                           | 'abc' is not a memory size
PLAN --budget 1e3GiB                        | '1e3GiB' is not a memory size
PLAN --budget 24XB                          | has the unit 'XB'
PLAN --parallel ddp --ranks 2 --microbatch 3 | microbatch 3 does not divide the 4 samples of a rank: use one of 1, 2, 4
PLAN --microbatch 0                         | 0 is not in the range
PLAN --global-batch 1234567890123           | is not in the range 1<=x<=100000000
PLAN --parallel ddp --ranks 3               | a global batch of 8 can't be shared by 3 ranks: use a multiple of 3
PLAN --ranks 2                              | 2 ranks need a way to share the training
PLAN --parallel fsdp2                       | --parallel shares a training among ranks: give --ranks
PLAN --parallel fsdp2 --mesh dp=2 --mesh dp=4 | --fits alone takes several meshes: give --mesh once
PLAN --parallel ddp --ranks 2 --verify      | --verify runs one rank
PLAN --target h10                           | there is no profile 'h10'. Use one of: h100
PLAN --target rtx3060                       | rtx4090, cpu, measured. To plan for an
PLAN --parallel zero --ranks 2              | parallel must be one of ddp, fsdp2,
PLAN --parallel hsdp --ranks 4              | hsdp has a mesh such as replicate=2
PLAN --parallel fsdp2 --ranks 3 --mesh dp=2 | the mesh has 2 ranks, and ranks is 3
PLAN --parallel fsdp2 --mesh dp:8           | 'dp:8' is no mesh: write its dimensions as dp=8,tp=8
PLAN --optimizer adam-8bit                  | did you mean 'adamw-8bit'
PLAN --optimizer made.py:blocks             | the factory raised TypeError: blocks() takes 0 positional arguments
PLAN --optimizer adam                       | no optimizer is called 'adam'; did you mean 'adamw'?
PLAN --blocks nothing*                      | the pattern 'nothing*' matches no module
PLAN --out missing/plan.json                | does not exist: create it first
PLAN --json missing/plan.json               | does not exist: create it first
PLAN --chunked-loss                         | has no output layer
PLAN --margin nan                           | nan is not a finite number
PLAN --target cpu --margin 2                | CPU leaves nothing free: leave out --margin
PLAN --without half                         | is not one of
PLAN --parallel a:b --mesh pp=2             | stages of a pipeline are not planned
PLAN --link 450GB,50GB                      | one rank has no links to others: leave out --link
PLAN --link fast                            | fast
PLAN --link 450GB                           | are no links
PLAN --link 450GB,50GB,x                    | are no links
PLAN --link 450,50                          | has no unit
PLAN --link 450GB,50GB,0                    | are no links
PLAN --parallel ddp --ranks 2 --gather-in bfloat16 | are options of fsdp2, hsdp and
PLAN --parallel fsdp2 --ranks 2 --rank 2    | rank 2 is none of 2 ranks: use 0 to 1
plan --model mlp --fits cpu --global-batch 4 | the memory of cpu is not known
plan --model mlp --fits h100 --global-batch 3 --parallel hsdp --mesh replicate=1,shard=2 | a global batch of 3 can't be shared
PLAN --reshard-after-forward 1              | '1' is neither yes, no, nor a number of ranks
PLAN --model nothing                        | no workload is called 'nothing'
PLAN --model made.py:none                   | has no callable 'none'
PLAN --model absent:blocks                  | can't import absent
PLAN --model made.py:raises                 | the factory raised KeyError: 'weights'
PLAN --model made.py:wrong                  | the factory returned tuple: return an
PLAN --model made.py:mismatch               | a forward on the batch raised
PLAN --model made.py:guessed                | The batch was guessed: return (module, batch).
gen-tests --model mlp                       | Missing option '--out'
gen-tests --out t.py                        | give either --model, --trainer or --script
gen-tests --model bert --out t.py           | no workload is called 'bert'
gen-tests --model absent:build --out t.py   | can't import absent
gen-tests --model mlp --out t.py --gate recompute/all | no gate matches 'recompute/all'; did you mean
gen-tests --model mlp --out t.py --blocks x.* | the pattern 'x.*' matches no module
gen-tests --model mlp --out t.py --package absent | can't import absent.gates
gen-tests --model mlp --out absent/t.py     | the folder of 'absent/t.py' does not exist: create it first
gen-tests --model mlp --out folder          | is a directory
gen-tests --model mlp --out t.py --batch-size 0 | 0 is not in the range
preflight                                   | give either --script or --trainer
preflight --script a.py --trainer b:c       | give either --script or --trainer
preflight --script gone.py                  | there is no file gone.py
preflight --script gone.py --steps 1        | --steps
runs lsit                                   | No such command 'lsit'. Did you mean 'list'?
runs list nowhere                           | there is no folder nowhere
runs show nowhere                           | nowhere is no run; runs has no run
runs diff nowhere other                     | nowhere is no run with a journal; runs has no run
runs diff folder other                      | folder is no run
runs estimate                               | Missing option '--parameters'
runs estimate --parameters 0                | 0
runs estimate --parameters nan              | nan is not a finite number
runs estimate --parameters 7e9 retention.rollback=1 | checkpoint.retention.rollback is no key
runs estimate --parameters 7e9 best_k       | sets nothing: write key=value
runs estimate --parameters 7e9 rollback_every=[1 | rollback_every=[1 is not a YAML value
runs estimate --parameters 7e9 retention=5 retention.rollback_keep=2 | retention is 5, so that retention.rollback_keep can't be set
runs estimate --parameters 7e9 retention.rollback_keep=2 retention=5 | checkpoint.retention must be a block of keys, got 5
runs estimate --parameters 7e9 rollback_every.x=1 | rollback_every
runs estimate --parameters 7e9 rollback_every=1 rollback_every.x=1 | rollback_every is 1
runs inspect none.pt                        | Error: none.pt: No such file or directory
runs record --out A                         | give either --script or --trainer
runs record --script gone.py --out A        | there is no file gone.py
runs record --script train.py               | --out
runs replay folder --script made.py         | folder is no box: give a folder that holds box.json
runs replay folder --script nowhere.py      | there is no file nowhere.py
runs locate A B                             | runs record
runs resume-check --steps 5 --kill-at 5     | --kill-at 5 has to be below --steps 5
runs resume-check --script nowhere.py       | there is no file nowhere.py
runs resume-check --script a.py --trainer b:c | give either --script or --trainer
runs resume-check --resume-with '--resume latest' | --resume-with is for --script
runs resume-check --trainer a:b -- more     | 'more' is for no script: give --script FILE
runs resume-check batch_size=4              | Error: a window of 4 samples can't be cut into
runs spike-check --steps 40 --at 38 --windows 9 | bad windows 38 to 46 are not all among the 40 steps
runs spike-check --steps 30                 | begin in step 20, and the watchdog judges from step 33 on
runs spike-check --steps 40 spike.action=warn | needs spike.action=rollback
runs spike-check --steps 40 --runs .        | is not empty: give a new folder
savings --out out --batch-size 2,x          | 'x' is not a whole number from 1 up
savings --out out --limit 3                 | '3' has no unit
savings --out out --limit 999TiB            | a limit of 999 TiB is more than
savings --out out --strategy ful            | no strategy is called 'ful'; did you mean 'full'?
savings --out out --depth 3 --model their.net:build | depth applies to built-in workloads only
savings --out out --model mlp --blocks layers.* | the pattern 'layers.*' matches no module
savings --out out --repeats 0               | 0 is not in the range
validate --gate recompute/everything        | no gate matches 'recompute/everything'; did you mean 'recompute/
validate --gate recomput                    | no gate matches 'recomput'; did you mean 'recompute'?
validate --model mlp --blocks layers.*      | the pattern 'layers.*' matches no module; there are 0, 0.0
validate --dtype int8                       | 'int8' is not one of
validate --impl absent.sac:apply_sac        | can't import absent
validate --impl apply_sac=made.py:absent    | made has no callable 'absent'
validate --impl apply_sac=made.py:blocks    | the gates call apply_sac(model, *, blocks)
validate --impl made                        | made names no function: add one, as in made:build
validate --impl aply_sac=made.py:blocks     | what it implements: did you mean 'apply_sac'?
validate --impl math:sqrt                   | write NAME=math:sqrt, where NAME tells
validate --no-such-option                   | No such option
bench --plot x.xyz                          | x.xyz: a picture is a PNG, name it x.png
grad-flow --plot x.xyz                      | x.xyz: a picture is a PNG, name it x.png
memory --plot x.xyz                         | x.xyz: a picture is a PNG, name it x.png
plan --plot x.xyz                           | x.xyz: a picture is a PNG, name it x.png
runs plot nowhere                           | nowhere is no run
runs plot nowhere --out x.xyz               | x.xyz: a picture is a PNG, name it x.png
--no-such-option                            | No such option
validate --modle mlp                        | No such option '--modle'. (Did you mean one of: '--impl', '--model'?)
validate --model mlp --json absent/x.json   | does not exist: create it first
"""  # noqa: E501
PLAN = "plan --model made.py:blocks --budget 1GiB --target cpu --global-batch 8 --whole-loss"


@pytest.fixture(autouse=True)
def folder(tmp_path):
    (tmp_path / "made.py").write_text(MODELS)
    (tmp_path / "folder").mkdir()
    yield tmp_path
    sys.modules.pop("made", None)


@pytest.mark.parametrize("row", MISTAKES.strip().splitlines())
def test_a_mistake_is_one_message_and_status_2_and_writes_nothing(row, folder):
    line, _, message = row.partition("|")
    ended = ran(line.replace("PLAN", PLAN), status=2)
    assert message.strip() in flat(ended.stderr)
    assert "Traceback" not in ended.output
    assert "no line of yours" not in ended.output
    assert ended.stdout == ""
    assert {path.name for path in folder.glob("[!_]*")} == {"made.py", "folder"}


QUICK = {
    "bench": "bench --model made.py:loud --steps 2 --warmup 0",
    "grad-flow": "grad-flow --model made.py:loud --steps 1",
    "memory": "memory --model made.py:loud",
    "savings": "savings --model made.py:loud --strategy full --repeats 1 --out out",
    "train": "train data.source=workload steps=1 batch_size=2 microbatch=2",
    "validate": "validate --model made.py:loud --gate grad-accum/equal",
}


@pytest.mark.parametrize("command", ["memory", "validate"])
def test_json_on_standard_output_is_json_alone_where_a_factory_prints(command):
    ended = ran(f"{QUICK[command]} --json -")
    assert json.loads(ended.stdout)["command"]
    assert "building" in ended.stderr


def test_json_on_standard_output_is_json_alone_where_another_process_prints(folder):
    words = "-m curry_train memory --model made.py:child --json -"
    ended = in_python(*words.split(), cwd=folder)
    assert json.loads(ended.stdout)["command"]
    assert "building" in ended.stderr


def test_a_path_below_the_home_folder_is_found_where_the_shell_leaves_it(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder / "folder"))
    (folder / "folder/net_at_home.py").write_text(MODELS)
    ran("memory --model=~/net_at_home.py:blocks --json=~/found.json")
    assert read_json("folder/found.json")["workload"]
    shown = ran("train --show-config runs=~/kept data.source=workload")
    assert f"runs: {folder}/folder/kept\n" in shown.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("command", QUICK)
def test_a_missing_device_ends_with_status_3(command):
    refused = flat(ran(f"{QUICK[command]} --device cuda", status=3).stderr)
    assert re.search("no CUDA device: .* Use --device cpu", refused)


@pytest.mark.parametrize("name", ["bench", "grad-flow", "memory", "plan"])
def test_a_missing_matplotlib_is_reported_before_the_work_begins(name, monkeypatch):
    command = main.commands[name].load()
    # Finding a command calls `find_spec`, too.
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: None)
    refused = ran("--model mlp --plot x.png", command=command, status=2)
    assert "pip install 'matplotlib" in flat(refused.stderr)
