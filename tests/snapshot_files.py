"""Snapshots as torch writes them, of an allocator's record and of a scripted training."""

import bisect
import pickle
from dataclasses import dataclass, field
from pathlib import Path

from curry_train.plan.cuda_allocator import CudaAllocator
from curry_train.plan.owners import OwnedBlocks
from curry_train.plan.snapshot import read_snapshot


@dataclass
class Recorder:
    """An allocator of the model whose actions are recorded as torch records them."""

    expandable: bool = False
    device: int = 0
    events: list = field(default_factory=list)
    live: dict = field(default_factory=dict)
    segments: dict = field(default_factory=dict)

    def __post_init__(self):
        self.allocator = CudaAllocator(
            expandable_segments=self.expandable, new_address=self._address
        )
        self.time = 1_700_000_000_000_000
        self.top = 0x7F0000000000

    def _address(self, num_bytes):
        self.top -= 2**42 if self.expandable else -(-num_bytes // 2**21) * 2**21
        return self.top

    def event(self, action, address, num_bytes, stream=0, frames=()):
        self.time += 7
        name = "device_free" if action == "oom" else "addr"
        event = {"action": action, name: address, "size": num_bytes, "stream": stream}
        self.events.append(event | {"time_us": self.time, "frames": [*frames]})

    def allocate(self, num_bytes, *, stream=0, frames=()):
        """Allocate, with the event of a new segment before."""
        before = dict(self.allocator.segments)
        block = self.allocator.allocate(num_bytes, stream=stream)
        for base, size in self.allocator.segments.items():
            grown = size - before.get(base, 0)
            if grown:
                action = "segment_map" if self.expandable else "segment_alloc"
                self.event(action, base + before.get(base, 0), grown, stream, frames)
                self.segments[base] = stream
        self.event("alloc", block.address, num_bytes, stream, frames)
        self.live[block.address] = (block, num_bytes, stream, [*frames])
        return block

    def free(self, block):
        _, num_bytes, stream, _ = self.live.pop(block.address)
        self.event("free_requested", block.address, num_bytes, stream)
        self.event("free_completed", block.address, num_bytes, stream)
        self.allocator.free(block)

    def empty_cache(self):
        before = dict(self.allocator.segments)
        for base in self.allocator.empty_cache():
            stream = self.segments[base]
            left = self.allocator.segments.get(base, 0)
            action = "segment_unmap" if self.expandable else "segment_free"
            self.event(action, base + left, before[base] - left, stream)
            if not left:
                del self.segments[base]

    def device_segments(self):
        """Return the segments with their blocks, free ranges between them."""
        addresses = sorted(self.live)
        rows = []
        for base, size in sorted(self.allocator.segments.items()):
            if not size:
                continue
            blocks = []
            position = base
            first = bisect.bisect_left(addresses, base)
            for address in addresses[first : bisect.bisect_left(addresses, base + size)]:
                block, requested, _, frames = self.live[address]
                if address > position:
                    blocks.append(free_block(position, address - position))
                held = {"requested_size": requested, "state": "active_allocated", "frames": frames}
                blocks.append(free_block(address, block.num_bytes) | held)
                position = address + block.num_bytes
            if position < base + size:
                blocks.append(free_block(position, base + size - position))
            rows.append(
                {
                    "device": self.device,
                    "address": base,
                    "total_size": size,
                    "stream": self.segments[base],
                    "segment_pool_id": (0, 0),
                    "is_expandable": self.expandable,
                    "blocks": blocks,
                }
            )
        return rows

    def snapshot(self):
        return {
            "segments": self.device_segments(),
            "device_traces": [[] for _ in range(self.device)] + [self.events],
            "allocator_settings": {
                "PYTORCH_CUDA_ALLOC_CONF": "",
                "max_split_size": -1,
                "garbage_collection_threshold": 0.0,
                "expandable_segments": self.expandable,
                "roundup_power2_divisions": {str(2**power): 0 for power in range(16)},
            },
            "external_annotations": [],
        }


def free_block(address, size):
    return {
        "address": address,
        "size": size,
        "requested_size": 0,
        "state": "inactive",
        "frames": [],
    }


def write(path, snapshot):
    Path(path).write_bytes(pickle.dumps(snapshot, protocol=4))
    return path


# A scripted training of a small language model, whose owners are known.

TORCH = "/opt/venv/lib/python3.11/site-packages/torch"
MIB = 2**20
WIDTH_BYTES = 4 * MIB
LOGITS_BYTES = 40 * MIB
NUM_LAYERS = 4


def python(function, file, line):
    return {"name": function, "filename": file, "line": line}


def native(function, file=""):
    return python(function, file, 0)


@dataclass
class Training:
    """Steps of a training, with stacks as torch records them.

    `native_frames` adds those of C++; without them backward has no frames at all. `windows` writes
    paths with backslashes.
    """

    recorder: Recorder = field(default_factory=Recorder)
    native_frames: bool = True
    windows: bool = False
    foreach: bool = True
    truth: dict = field(default_factory=dict)
    code: str = "/home/user/train.py"
    gradients: list = field(default_factory=list)
    state: list = field(default_factory=list)
    parameters: list = field(default_factory=list)
    logits: list = field(default_factory=list)
    has_workspaces: bool = False
    clips: bool = False
    num_microbatches: int = 1
    matrix_bytes: int = 0  # of six equal parameters, in place of those of layers

    def stack(self, *frames, op="empty"):
        listed = [*frames]
        if self.native_frames:
            allocating = native("c10::cuda::CUDACachingAllocator::malloc")
            listed = [allocating, native(f"at::_ops::{op}::call"), *frames]
        if self.windows:
            listed = [
                frame | {"filename": frame["filename"].replace("/", "\\")} for frame in listed
            ]
        return listed

    def in_forward(self, function, line, *outer):
        return self.stack(
            python(function, self.code, line),
            *outer,
            python("_call_impl", f"{TORCH}/nn/modules/module.py", 1784),
            python("_wrapped_call_impl", f"{TORCH}/nn/modules/module.py", 1773),
            python("train_step", self.code, 90),
            python("<module>", self.code, 120),
            op="mm",
        )

    def in_loss(self, op="log_softmax"):
        return self.stack(
            python("cross_entropy", f"{TORCH}/nn/functional.py", 3458),
            python("train_step", self.code, 91),
            python("<module>", self.code, 120),
            op=op,
        )

    def in_backward(self):
        if not self.native_frames:
            return []
        return self.stack(
            native("torch::autograd::generated::MmBackward0::apply"),
            native("torch::autograd::Engine::evaluate_function"),
            native("torch::autograd::Engine::thread_main"),
            op="mm",
        )

    def in_step(self, function="_multi_tensor_adamw"):
        return self.stack(
            python(function, f"{TORCH}/optim/adamw.py", 400),
            python("wrapper", f"{TORCH}/optim/optimizer.py", 517),
            python("train_step", self.code, 93),
        )

    def make(self, owner, num_bytes, frames):
        block = self.recorder.allocate(num_bytes, frames=frames)
        self.truth[block.address, len(self.recorder.events) - 1] = owner
        return block

    def activation(self, num_bytes, function, line):
        return self.make("activations", num_bytes, self.in_forward(function, line))

    def drop(self, *blocks):
        for block in blocks:
            self.recorder.free(block)

    def build(self):
        frames = self.stack(
            python("convert", f"{TORCH}/nn/modules/module.py", 1300),
            python("_apply", f"{TORCH}/nn/modules/module.py", 900),
            python("to", f"{TORCH}/nn/modules/module.py", 1350),
            python("main", self.code, 60),
        )
        self.parameters = [self.make("parameters", size, frames) for size in self.parameter_sizes()]

    def parameter_sizes(self):
        if self.matrix_bytes:
            return [self.matrix_bytes] * 6
        return [LOGITS_BYTES // 4, *[3 * WIDTH_BYTES, WIDTH_BYTES, 4096] * NUM_LAYERS]

    def step(self, *, until=None):
        """Run one step; `until` ends it after a phase, as an error would."""
        self.drop(*self.gradients)
        self.gradients = []
        for number in range(self.num_microbatches):
            saved = self.forward()
            if until == "forward":
                return
            self.backward(saved, stops=until == "backward", accumulates=number > 0)
        if until != "backward":
            self.optimizer()

    def forward(self):
        batch_frames = self.stack(python("batches", self.code, 30), op="_to_copy")
        saved = [self.make("buffers and batch", 64 * 1024, batch_frames)]
        self.first_workspace(self.in_forward("attention", 41))
        for _ in range(NUM_LAYERS):
            temporary = self.make(
                "temporaries of forward", WIDTH_BYTES, self.in_forward("norm", 30)
            )
            saved.append(self.activation(WIDTH_BYTES, "norm", 31))
            self.drop(temporary)
            saved += [
                self.activation(3 * WIDTH_BYTES, "attention", 41),
                self.activation(8 * MIB, "softmax", 44),
                self.activation(WIDTH_BYTES, "mlp", 52),
            ]
        return saved + self.loss(LOGITS_BYTES // 2, self.in_forward("head", 60))

    def loss(self, num_bytes, frames):
        """Make logits, and return what their loss holds."""
        logits = self.make("logits and loss", num_bytes, frames)
        saved = [
            self.make("logits and loss", 2 * num_bytes, self.in_loss()),
            self.make("logits and loss", 512, self.in_loss("nll_loss")),
        ]
        self.drop(*self.logits)
        self.logits = [logits]
        return saved

    def first_workspace(self, frames):
        if not self.has_workspaces:
            self.make("workspaces", 8_519_680, frames)

    def backward(self, saved, *, stops=False, accumulates=False):
        self.first_workspace(self.in_backward())
        self.has_workspaces = True
        flowing = self.make("temporaries of backward", LOGITS_BYTES, self.in_backward())
        for size in reversed(self.parameter_sizes()):
            following = self.make("temporaries of backward", WIDTH_BYTES // 2, self.in_backward())
            if accumulates:
                self.drop(self.make("temporaries of backward", size, self.in_backward()))
            else:
                self.gradients.append(self.make("gradients", size, self.in_backward()))
            self.drop(flowing)
            flowing = following
            if stops and len(self.gradients) == 6:
                return
            if saved:
                self.drop(saved.pop())
        self.drop(flowing, *saved)

    def clip(self):
        """Make a norm for each gradient, as clip_grad_norm_ does."""
        frames = self.stack(
            python("_get_total_norm", f"{TORCH}/nn/utils/clip_grad.py", 100),
            python("clip_grad_norm_", f"{TORCH}/nn/utils/clip_grad.py", 220),
            python("train_step", self.code, 92),
        )
        norms = [
            self.make("temporaries of the optimizer", 512, frames) for _ in self.parameter_sizes()
        ]
        self.drop(*norms)

    def optimizer(self):
        if self.clips:
            self.clip()
        if not self.state:
            frames = self.in_step("_init_group")
            for size in self.parameter_sizes():
                self.state += [self.make("optimizer state", size, frames) for _ in range(2)]
        if self.foreach:
            copies = [
                self.make("temporaries of the optimizer", size, self.in_step())
                for size in self.parameter_sizes()
            ]
            self.drop(*copies)

    def record_from_here(self):
        """Forget the events so far, as if the recording began now."""
        self.recorder.events.clear()
        owners = {address: owner for (address, _), owner in self.truth.items()}
        live = self.recorder.live
        self.truth = {(a, -1): owner for a, owner in owners.items() if a in live}
        for address, (block, size, stream, _) in list(live.items()):
            live[address] = (block, size, stream, [])

    def snapshot(self):
        return self.recorder.snapshot()


def trained(*, recorded_from=None, steps=2, until=None, **settings):
    """Train for some steps, of which those from `recorded_from` on are recorded."""
    training = Training(**settings)
    training.build()
    for index in range(steps):
        if index == recorded_from:
            training.record_from_here()
        last = index == steps - 1
        training.step(until=until if last else None)
    return training


def owned_blocks(folder, snapshot):
    return OwnedBlocks(read_snapshot(write(folder / "a.pickle", snapshot)).devices[0])
